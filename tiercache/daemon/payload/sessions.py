"""Sessions of remote clients: who may open data connections, for as long as a connection to gRPC lives.

Hello offers a token to the caller that it has recognised. The token is as good as the connection on which it
was given, of which the gate sees the end:

    1. Hello: the gate's connection 7 belongs to worker-1. `offer` makes a session, and its token.
    2. Data connections bring the token, and the credentials of worker-1 once more: `admit`.
    3. Connection 7 ends. The gate calls `end`: the token is worth nothing, and the data connections end.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from grpc import StatusCode

from tiercache.daemon.access import Access, Caller, Permissions, Refusal
from tiercache.wire.v1 import data_pb2
from tiercache.wire.v1 import storage_pb2 as pb

if TYPE_CHECKING:
    from tiercache.daemon.gate import Gate

_TOKEN_BYTES: Final = 32
MAX_CONNECTIONS: Final = 8
"""Maximum number of data connections of one client; it may have fewer calls under way (`limits`)."""


class DataSession:
    """Session of one client, from its Hello to the end of its connection to gRPC.

    Thread safety: the event loop's thread.
    """

    def __init__(self, peer: str, caller: Caller) -> None:
        self.peer: Final = peer
        self.caller = caller
        self.token: Final = secrets.token_bytes(_TOKEN_BYTES)
        self.over = False
        """Whether the session has ended."""
        self.ends: Final[set[Callable[[], object]]] = set()
        """Functions that end the data connections of the session."""


class DataSessions:
    """All sessions, by the names of their connections to gRPC, and by token.

    Thread safety: the event loop's thread.
    """

    def __init__(self, access: Access, gate: Gate, max_connections: int) -> None:
        self._access = access
        self._gate = gate
        self._max_connections = min(MAX_CONNECTIONS, max_connections)
        self._by_peer: dict[str, DataSession] = {}
        self._by_token: dict[bytes, DataSession] = {}
        self.draining = False
        """Whether a session that ends leaves its data connections to `port.DataPort.drain`."""
        self.ports: dict[int, int] = {}
        """Ports for data connections, by the ports on which their clients reach gRPC; empty while there are
        none."""

    def __len__(self) -> int:
        return len(self._by_peer)

    @property
    def connections(self) -> int:
        """Number of data connections of all sessions; any thread may read this."""
        return sum(len(session.ends) for session in list(self._by_peer.values()))

    def offer(self, caller: Caller, peer: str) -> pb.DataPort | None:
        """Return what a caller needs to open data connections; None if there are none for its connection."""
        port = self.ports.get(self._gate.port_of(peer))
        if port is None:
            return None
        session = self._by_peer.get(peer)
        if session is None or session.caller.permissions is not caller.permissions:
            self.end(peer)
            session = self._by_peer[peer] = DataSession(peer, caller)
            self._by_token[session.token] = session
            # The gate forgets a connection before it calls `end`. So a session of a connection that ended
            # meanwhile is either seen here, or by an `end` that is still to come.
            if not self._gate.port_of(peer):
                self.end(peer)
                return None
        session.caller = caller
        return pb.DataPort(port=port, token=session.token, connections=self._max_connections)

    def admit(self, opening: data_pb2.DataOpen, names: Sequence[bytes]) -> DataSession:
        """Return the session whose token a new connection brings; raises Refusal.

        `names`: the subject alternative names of the connection's certificate. The credentials must be those
        of the session's principal, so that a token alone, if another principal got it, opens nothing.
        """
        session = self._by_token.get(opening.token)
        if session is None:
            raise Refusal(StatusCode.UNAUTHENTICATED, "there is no such session, or it has ended; say Hello")
        identity: Mapping[str, Sequence[bytes]] = {"x509_subject_alternative_name": names}
        if self._access.authenticate(opening.authorization, identity) is not session.caller.permissions:
            raise Refusal(StatusCode.UNAUTHENTICATED, "the session belongs to another principal; say Hello")
        if len(session.ends) >= self._max_connections:
            raise Refusal(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{session.caller.permissions.name} has {len(session.ends)} data connections of one client"
                " already; use these",
            )
        return session

    def end_all_of(self, principals: AbstractSet[Permissions]) -> None:
        """End the sessions of these principals; their clients come again with what is valid now."""
        for session in list(self._by_peer.values()):
            if session.caller.permissions in principals:
                self.end(session.peer)

    def end(self, peer: str) -> None:
        """End the session of a connection to gRPC, if it has one, and all of its data connections."""
        session = self._by_peer.pop(peer, None)
        if session is not None:
            session.over = True
            del self._by_token[session.token]
            for end in () if self.draining else list(session.ends):
                end()
