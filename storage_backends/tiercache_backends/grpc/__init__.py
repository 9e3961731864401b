"""The `grpc` store, which is a tiercache daemon on this host or another.

Order of reading: `settings`; `backend` (the store contract); `link` (the current connection, and how it is replaced) with
`tiercache.storage.breaker` and `failures`; `connection` and `session` (one connection, from its greeting to its end); then how payloads
travel: `stream` (in messages), and `shared` (through memory that both processes map) with `places`, `staging` and `hazards`.
"""

from tiercache_backends.grpc.backend import GrpcBackend, Pong

__all__ = ["GrpcBackend", "Pong"]
