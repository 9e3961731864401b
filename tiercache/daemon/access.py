"""Who calls, and what that one may do.

A principal is known by the user id at the other end of the attach socket, by a token, or by a subject alternative name of its
certificate. Each has one view of the store (`views`), which decides what is there for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, Protocol

from blake3 import blake3
from grpc import StatusCode

from tiercache.config.settings import Principal as PrincipalSettings
from tiercache.config.settings import Settings, read_salt, read_token
from tiercache.core import Verb
from tiercache.daemon.budget import Budget
from tiercache.daemon.views import Common, Fenced, Veil, Veiled
from tiercache.storage.base import StorageBackend
from tiercache.wire.methods import SESSION_METADATA

OWNER: Final = "owner"
ANONYMOUS: Final = "anonymous"
_PRINCIPAL_SHARE: Final = 2
"""Of several principals none takes more than this part of the calls."""
_CLIENT_SHARE: Final = 4
"""Of the messages and the threads no client takes more than this part."""
_BEARER: Final = "Bearer "
_CURSORS: Final = b"cursors"


class Refusal(Exception):  # noqa: N818  it is an answer, not a failure
    """A call that is not served: the status code and one sentence for the caller; `reason` where the metrics' does not follow from it."""

    def __init__(self, code: StatusCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code: Final = code
        self.message: Final = message
        self.reason: Final = reason


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be held at once."""

    payload: Budget
    """Bytes of objects."""
    streams: Budget
    """Calls."""
    transfers: Budget
    """Bytes of messages with payload, on their way in or out."""
    requests: Budget
    """Bytes of messages without payload, and of what is made of them."""
    workers: Budget
    """Threads in the store."""

    def part(self, payload: int, streams: int, share: int, message: int) -> Bounds:
        """Parts of these, no larger than the whole. Of messages and threads one in `share`, but room for a message of `message` bytes."""
        limits = (
            (self.payload, payload),
            (self.streams, streams),
            (self.transfers, max(self.transfers.limit // share, 2 * message)),
            (self.requests, max(self.requests.limit // share, message)),
            (self.workers, self.workers.limit // share),
        )
        return Bounds(*(Budget(max(1, min(limit, whole.limit)), whole) for whole, limit in limits))


class Grants:
    """What one principal may do, and the view of the store that it does it through.

    Thread safety: immutable, but for the budgets, which belong to the event loop's thread.
    """

    def __init__(self, name: str, tenant: str, verbs: AbstractSet[Verb], store: StorageBackend, bounds: Bounds) -> None:
        self.name: Final = name
        self.tenant: Final = tenant
        self.verbs: Final = verbs
        self.store: Final = store
        self.bounds: Final = bounds

    @property
    def sees_all(self) -> bool:
        """Is there nothing in the store that this one must not count?"""
        return Verb.ADMIN in self.verbs or not (self.tenant or isinstance(self.store, Fenced | Common))

    def check(self, verb: Verb | None) -> None:
        """Raise Refusal unless this principal has the verb."""
        if verb is not None and verb not in self.verbs:
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"{self.name} may {' and '.join(sorted(self.verbs)) or 'do nothing'}, not {verb}; the operator can add it to its verbs",
            )


@dataclass(frozen=True, slots=True)
class Caller:
    """One client: a session of the attach socket, or a TCP connection."""

    grants: Grants
    session: Any
    """Its `sessions.Session`; None over TCP."""
    bounds: Bounds


class Sessions(Protocol):
    """Where a session is found by its token."""

    def find(self, token: bytes) -> Any:
        """The session, or None."""


class Access:
    """All principals of a daemon.

    Thread safety: `caller` and `of_uid` belong to the event loop's thread.
    """

    def __init__(self, settings: Settings, store: StorageBackend, whole: Bounds) -> None:
        """Read every token and salt; raises ConfigError."""
        limits = settings.limits
        self._most_clients = limits.clients
        self._by_uid: dict[int, Grants] = {}
        self._by_token: dict[bytes, Grants] = {}
        self._by_san: dict[str, Grants] = {}
        self._peers: dict[tuple[str, str], Caller] = {}
        stores = _Views(settings, store)
        owned = any(principal.uid == os.getuid() for principal in settings.principals)
        share = _PRINCIPAL_SHARE if len(settings.principals) + (not owned) > 1 else 1

        def payload(most: int, part: int) -> int:
            """Of the arena: never so little that an object cannot be moved which the operator allows by its size."""
            return min(most, max(part, limits.object_bytes or 0))

        mine = payload(settings.client_bytes, whole.payload.limit * 3 // 4)
        self._client = (mine, limits.streams_per_client, _CLIENT_SHARE // share, limits.message_bytes)

        def grants(name: str, tenant: str, verbs: Iterable[str], namespaces: Sequence[str]) -> Grants:
            able = frozenset(map(Verb, verbs))
            most = payload(settings.principal_bytes, whole.payload.limit // share)
            bounds = whole.part(most, whole.streams.limit // share, share, limits.message_bytes)
            return Grants(name, tenant, able, stores.view(tenant, namespaces, everything=Verb.ADMIN in able), bounds)

        for principal in settings.principals:
            self._add(principal, grants(principal.name, principal.tenant, principal.verbs, principal.namespaces))
        self._by_uid.setdefault(os.getuid(), grants(OWNER, "", Verb, ("*",)))
        open_to_all = not (self._by_token or self._by_san)
        self._anonymous = grants(ANONYMOUS, "", (Verb.READ, Verb.WRITE), ("*",)) if open_to_all else None

    @property
    def uids(self) -> AbstractSet[int]:
        """Who may use the unix sockets."""
        return self._by_uid.keys()

    def of_uid(self, uid: int) -> Grants | None:
        """What the user at the other end of the attach socket may do; None: nothing."""
        return self._by_uid.get(uid)

    def client(self, grants: Grants, session: Any = None) -> Caller:
        """A new client of a principal, with budgets of its own inside the principal's."""
        return Caller(grants, session, grants.bounds.part(*self._client))

    def caller(
        self,
        metadata: Iterable[tuple[str, str | bytes]],
        peer: str,
        identity: Mapping[str, Sequence[bytes]],
        sessions: Sessions,
        *,
        local: bool,
    ) -> Caller:
        """Who makes a call. `peer` and `identity`: what gRPC knows of the connection; `local`: it came by a unix socket. Raises Refusal."""
        given = {key: value for key, value in metadata if key in (SESSION_METADATA, "authorization")}
        if local:
            session = sessions.find(_as_bytes(given.get(SESSION_METADATA, b"")))
            if session is None:
                raise Refusal(StatusCode.UNAUTHENTICATED, "there is no such session, or it has ended; connect to the attach socket first")
            caller: Caller = session.caller
            return caller
        grants = self._of_connection(given.get("authorization", ""), identity)
        found = self._peers.get((grants.name, peer))
        if found is None:
            self._forget_idle_peers()
            found = self._peers[grants.name, peer] = self.client(grants)
        return found

    def _of_connection(self, authorization: str | bytes, identity: Mapping[str, Sequence[bytes]]) -> Grants:
        if self._anonymous is not None:
            return self._anonymous
        if isinstance(authorization, str) and authorization.startswith(_BEARER):
            # By digest: how long this takes says nothing about the tokens that are known.
            found = self._by_token.get(_fingerprint(authorization.removeprefix(_BEARER).encode()))
            if found is not None:
                return found
        for name in identity.get("x509_subject_alternative_name", ()):
            if (named := self._by_san.get(name.decode("utf-8", "replace"))) is not None:
                return named
        raise Refusal(StatusCode.UNAUTHENTICATED, "no principal is known by this token or certificate; ask the operator for one")

    def _forget_idle_peers(self) -> None:
        """gRPC does not tell when a connection ends, so clients that hold nothing are forgotten when there are many."""
        if len(self._peers) >= self._most_clients:
            self._peers = {key: caller for key, caller in self._peers.items() if caller.bounds.streams.held}

    def _add(self, principal: PrincipalSettings, grants: Grants) -> None:
        if principal.uid is not None:
            self._by_uid[principal.uid] = grants
        elif principal.token_file is not None:
            self._by_token[_fingerprint(read_token(principal.token_file, f"principal {principal.name}"))] = grants
        elif principal.san is not None:
            self._by_san[principal.san] = grants


class _Views:
    """The views of a store: one veil a tenant, one fence a set of namespaces, and what is nobody's."""

    def __init__(self, settings: Settings, store: StorageBackend) -> None:
        self._store = store
        salts = {name: read_salt(tenant.salt_file, f"tenants.{name}.salt_file") for name, tenant in sorted(settings.tenants.items())}
        self._veils = {name: Veil(salt) for name, salt in salts.items()}
        self._cursors = Veil(_CURSORS + b"".join(salts.values()))

    def view(self, tenant: str, namespaces: Sequence[str], *, everything: bool) -> StorageBackend:
        """What a principal sees; `everything`: of a store with tenants also theirs, if it has none itself."""
        seen = self._store
        names = [bytes.fromhex(name) for name in namespaces if name != "*"]
        if tenant:
            names = [self._veils[tenant].unmark(name) or name for name in names]
            seen = Veiled(self._store, self._veils[tenant], tenant)
        elif self._veils and not everything:
            seen = Common(self._store, list(self._veils.values()), self._cursors)
        return seen if "*" in namespaces else Fenced(seen, frozenset(names))


def _fingerprint(token: bytes) -> bytes:
    return blake3(token).digest()


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else b""
