"""The storage server: one store behind gRPC, for many workers. It does not need torch.

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
