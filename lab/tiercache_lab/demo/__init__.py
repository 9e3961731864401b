"""The demo: `command` is the verb, `serving` the process that it starts and kills, `small` the model."""
