"""The storage server: one store behind gRPC, for many workers. It does not need torch.

Principles:

1. Nothing is read of a request before its caller is known and has room.
2. Whatever a client can make the daemon hold is bounded, for itself, its principal and all together.
3. A tenant's names name nothing of another's, and take as long to miss.
4. The event loop never waits for the store; threads do.
5. A change is recorded before it is made, with its outcome after it; settings change whole or not at all.

Read in this order: `access` (principals and their permissions), `tenants` (what a principal sees of the
store), `budget` (bounds on the memory that clients can make the daemon hold), `call` (messages), `call_log`
(what every call leaves behind), `payload` (Get and Set in all their ways), `store_calls` (the other calls of
the store), `service` (checks of each call before it is served, and status codes for its errors), `admission`
and `gate` (connections before a caller is known), `listeners` (sockets) and `server` (start, serve, drain).
"""

from tiercache.errors import MissingExtraError

try:
    from tiercache.daemon.server import StorageServer
except ModuleNotFoundError as error:
    raise MissingExtraError("the daemon", "daemon", error) from error

__all__ = ["StorageServer"]
