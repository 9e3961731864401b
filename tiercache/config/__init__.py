"""How settings are written, and the configuration of the daemon.

`quantities` is what everything may use, and all that is imported here: `settings`, the daemon's configuration, needs pydantic.
"""

from tiercache.config.quantities import parse_duration, parse_size

__all__ = ["parse_duration", "parse_size"]
