"""The `grpc` store, whose objects are in a tiercache daemon on this host or on another.

Principles:

1. No call takes longer than its deadline; while the daemon is away, calls are not even tried.
2. Memory of a call without an answer is withheld until the daemon has let it go.
3. Lengths that a daemon claims are bounded here too.
4. gRPC is in charge; payload goes through attached memory or data connections, never through gRPC.

Read in this order:

    settings              what the configuration says
    backend               the store contract
    connection_manager    the current connection, and how it is replaced; uses `tiercache.storage.breaker`
    failures              why a call failed
    connection            one connection, from its greeting to its end
    data                  connections on which payload travels
    payload               attached memory where the buffers lie in it, data connections elsewhere
"""

from tiercache_backends.grpc.backend import GrpcBackend, Pong

__all__ = ["GrpcBackend", "Pong"]
