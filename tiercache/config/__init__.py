"""Notation of settings, and the configuration of the daemon.

Importing this package imports `quantities` only, which any module may use; `settings`, the daemon's configuration, needs pydantic.
"""

from tiercache.config.quantities import parse_duration, parse_size

__all__ = ["parse_duration", "parse_size"]
