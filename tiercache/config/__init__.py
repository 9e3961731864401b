"""Sizes and durations as they are written in settings, and the configuration of the daemon.

Importing this package imports only `tiercache.text`, which needs no other package.
`tiercache.config.settings`, the daemon's configuration, needs pydantic.
"""

from tiercache.text import parse_duration, parse_size

__all__ = ["parse_duration", "parse_size"]
