"""A storage node, which needs no torch: one store behind gRPC, for many workers.

Read in this order: `access` (principals and their rights), `views` (limits on what a principal sees of the store), `budget` and `staging`
(bounds on the memory that clients can make the daemon hold), `sessions` (the attach socket and attached memory), `objects` (Get, Set,
GetInto, SetFrom), `service` (admission and errors of all calls) and `node` (start, serve, drain).
"""

from tiercache.daemon.node import Node

__all__ = ["Node"]
