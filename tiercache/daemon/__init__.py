"""The storage server: one store behind gRPC, for many workers. It does not need torch.

Read in this order: `access` (principals and their permissions), `views` (what a principal sees of the store),
`budget` (bounds on the memory that clients can make the daemon hold), `call` (messages and store threads),
`streams` (Get and Set), `shared` and `sessions` (attached memory, GetInto and SetFrom, the attach socket),
`service` (checks of each call before it is served, and status codes for its errors), `admission` and `gate`
(connections before a caller is known) and `server` (start, serve, drain).
"""

from tiercache.errors import MissingExtraError

try:
    from tiercache.daemon.server import StorageServer
except ModuleNotFoundError as error:
    raise MissingExtraError("the daemon", "daemon", error) from error

__all__ = ["StorageServer"]
