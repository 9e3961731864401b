"""Principals: how a caller is recognised as one, and what it may do.

A principal is recognised by the user id at the other end of the attach socket, by a token, or by a subject alternative name of its
certificate. Each principal has one view of the store (`views`), which decides what it can see there.
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
"""Principal of the daemon's own user, unless the settings name one for it."""
ANONYMOUS: Final = "anonymous"
"""Principal of all TCP clients where the settings name neither tokens nor certificates."""
_PRINCIPAL_SHARE: Final = 2
"""Divisor of the totals (payload, calls, messages, threads) for each principal, where there are several."""
_CLIENT_SHARE: Final = 4
"""Divisor of the totals of messages and threads for each client."""
_BEARER: Final = "Bearer "
_CURSORS: Final = b"cursors"


class Refusal(Exception):  # noqa: N818  it is an answer, not a failure
    """A call is not served: the status code and one sentence for the caller; `reason` for the metrics if the code does not determine it."""

    def __init__(self, code: StatusCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code: Final = code
        self.message: Final = message
        self.reason: Final = reason


@dataclass(frozen=True, slots=True)
class Bounds:
    """Budgets for what may be held at once: by the daemon, by one principal, or by one client."""

    payload: Budget
    """Bytes of payload in the arena."""
    streams: Budget
    """Calls under way."""
    transfers: Budget
    """Bytes of messages with payload, on their way in or out."""
    requests: Budget
    """Bytes of messages without payload, and of the Python objects made of them."""
    workers: Budget
    """Store threads."""

    def part(self, payload: int, streams: int, share: int, message: int) -> Bounds:
        """Return budgets inside these, each at least 1 and no larger than the whole.

        They have `payload` bytes and `streams` calls, and one part in `share` of messages and threads, but room for at least one request
        and two messages with payload of `message` bytes each.
        """
        limits = (
            (self.payload, payload),
            (self.streams, streams),
            (self.transfers, max(self.transfers.limit // share, 2 * message)),
            (self.requests, max(self.requests.limit // share, message)),
            (self.workers, self.workers.limit // share),
        )
        return Bounds(*(Budget(max(1, min(limit, whole.limit)), whole) for whole, limit in limits))


class Grants:
    """Permissions of one principal, and its view of the store.

    Thread safety: immutable, except for the budgets, which belong to the event loop's thread.
    """

    def __init__(self, name: str, tenant: str, verbs: AbstractSet[Verb], store: StorageBackend, bounds: Bounds) -> None:
        self.name: Final = name
        self.tenant: Final = tenant
        self.verbs: Final = verbs
        self.store: Final = store
        self.bounds: Final = bounds

    @property
    def sees_all(self) -> bool:
        """Whether this principal may know the totals of the whole store: with the verb admin, or if none of it is hidden from it."""
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
    """The client's `sessions.Session`; None over TCP."""
    bounds: Bounds


class Sessions(Protocol):
    """A directory of sessions (`sessions.Attachments`)."""

    def find(self, token: bytes) -> Any:
        """Return the session with this token, or None."""


class Access:
    """All principals of a daemon, and the clients that were recognised.

    Thread safety: `caller` and `of_uid` belong to the event loop's thread.
    """

    def __init__(self, settings: Settings, store: StorageBackend, whole: Bounds) -> None:
        """Read every token and salt, and divide the budgets `whole` among the principals; raises ConfigError."""
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
            """Return the smaller of `most` and `part` bytes, but within `most` enough for an object of `limits.object_bytes`."""
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
        """User ids that may use the unix sockets."""
        return self._by_uid.keys()

    def of_uid(self, uid: int) -> Grants | None:
        """Return the grants of a user at the other end of the attach socket; None if it is no principal."""
        return self._by_uid.get(uid)

    def client(self, grants: Grants, session: Any = None) -> Caller:
        """Make a client of a principal, with budgets of its own inside the principal's."""
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
        """Return the client that makes a call; raises Refusal if it is not known.

        `peer` and `identity`: name and authentication properties that gRPC gives the connection. `local`: whether it came by a unix socket.
        """
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
            # By digest, so that the time of the lookup says nothing about the known tokens.
            found = self._by_token.get(_fingerprint(authorization.removeprefix(_BEARER).encode()))
            if found is not None:
                return found
        for name in identity.get("x509_subject_alternative_name", ()):
            if (named := self._by_san.get(name.decode("utf-8", "replace"))) is not None:
                return named
        raise Refusal(StatusCode.UNAUTHENTICATED, "no principal is known by this token or certificate; ask the operator for one")

    def _forget_idle_peers(self) -> None:
        """Forget TCP clients without calls under way once `limits.clients` are kept; gRPC does not tell when a connection ends."""
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
    """The views of a store: a veil for each tenant, a fence for each list of namespaces, and a view of what belongs to no tenant."""

    def __init__(self, settings: Settings, store: StorageBackend) -> None:
        self._store = store
        salts = {name: read_salt(tenant.salt_file, f"tenants.{name}.salt_file") for name, tenant in sorted(settings.tenants.items())}
        self._veils = {name: Veil(salt) for name, salt in salts.items()}
        self._cursors = Veil(_CURSORS + b"".join(salts.values()))

    def view(self, tenant: str, namespaces: Sequence[str], *, everything: bool) -> StorageBackend:
        """Return the view of a principal; `tenant` is "" for none, and "*" in `namespaces` stands for all.

        `everything`: whether a principal without a tenant sees the objects of tenants as well.
        """
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
