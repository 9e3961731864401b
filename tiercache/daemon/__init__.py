"""A storage node without torch: one store behind gRPC, for many workers.

Read `access` (who calls, and which view of the store is theirs), `views` (what a tenant and a fence do to a store), `budget` and `staging`
(what clients can make the daemon hold), `sessions` (the attach socket and the memory that came through it), `objects` (Get, Set, GetInto,
SetFrom), `service` (every call's way in and out) and `node` (start, serve, drain).
"""

from tiercache.daemon.node import Node

__all__ = ["Node"]
