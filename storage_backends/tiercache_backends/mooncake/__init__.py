"""The `mooncake` store: objects in the pooled memory of many hosts, held by Mooncake."""

from tiercache_backends.mooncake.store import MooncakeBackend

__all__ = ["MooncakeBackend"]
