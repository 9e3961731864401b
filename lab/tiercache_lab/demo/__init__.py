"""The demo: `command` is the verb, `serving` the process that it starts and kills, `small` the model.

Principles:

1. Every answer is computed again without the cache, and must be equal to the last bit.
2. The first process is killed, never asked to end.
3. A tier that was never needed is a failure too.
"""
