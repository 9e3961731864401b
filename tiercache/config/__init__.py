"""Configuration of the daemon, storage URLs, and sizes and durations as they are written in settings.

Principles:

1. What cannot be served is refused before anything is written, in a sentence with the setting's name.
2. An unknown setting is a mistake, never ignored.
3. Secrets are in files that only their owner reads; settings name the files.

The daemon reads one TOML file and flags into one immutable object:

    load(Path("/etc/tiercache/tiercache.toml"), {"listen": ["127.0.0.1:7070"]})

A flag overrides the file, and the file overrides the defaults. Order of reading: `models` (the settings),
`rules` (kinds of values, and what settings must obey together), `loading` (from a file and flags), `files`
(checks of the files that settings name), `document` (settings as a file). These modules need pydantic;
importing this package imports only `tiercache.text`, which needs no other package.
"""

from tiercache.text import parse_duration, parse_size

__all__ = ["parse_duration", "parse_size"]
