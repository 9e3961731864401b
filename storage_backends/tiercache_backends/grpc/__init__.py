"""`grpc`: a store that is a tiercache daemon, on this host or another.

Read `settings`, `backend` (the contract's surface), `link` (which connection there is, and getting another one) with `breaker` and
`failures`, `connection` and `session` (one connection, from its first word to its end), then how payloads travel: `stream` (in messages),
`shared` (through memory that both map) with `places`, `staging` and `hazards`.
"""

from tiercache_backends.grpc.backend import GrpcBackend, Pong

__all__ = ["GrpcBackend", "Pong"]
