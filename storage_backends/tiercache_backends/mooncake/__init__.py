"""The `mooncake` store: objects in the pooled memory of many hosts, held by Mooncake.

Principles:

1. A read is right or a miss: length, header and checksum must match.
2. A client with a call that hangs is kept, with the memory of the call, until it returns.
3. The pool evicts as it likes and without notice, so nothing is promised to be there.
"""

from tiercache_backends.mooncake.store import MooncakeBackend

__all__ = ["MooncakeBackend"]
