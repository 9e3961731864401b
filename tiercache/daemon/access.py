"""Principals: how a caller is recognised as a principal, and what that principal may do.

A principal is recognised by the user id at the other end of the attach socket, by a token, or by a subject
alternative name in a client certificate. Each principal has one view of the store (`tenants`), which decides
what objects the principal can see.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from blake3 import blake3
from grpc import StatusCode

from tiercache.config.files import read_token
from tiercache.config.models import Principal as PrincipalSettings
from tiercache.config.models import Settings
from tiercache.core import Verb
from tiercache.daemon.budget import MESSAGE_COPIES, Budget
from tiercache.daemon.tenants.account import Account
from tiercache.daemon.tenants.store import TenantStore, TenantStores
from tiercache.errors import WireError
from tiercache.storage.base import StorageBackend
from tiercache.wire.methods import SESSION_METADATA

if TYPE_CHECKING:
    from tiercache.daemon.payload.attachments import Attachments
    from tiercache.daemon.payload.shared import AttachSession

OWNER: Final = "owner"
"""Principal of the daemon's own user, unless the settings define a principal with that user id."""
ANONYMOUS: Final = "anonymous"
"""Principal of all TCP clients if no principal of the settings has a token or a certificate."""
_PRINCIPAL_SHARE: Final = 2
"""Divisor of the totals (payload, calls, messages, threads): each of several principals may hold half."""
_CLIENT_SHARE: Final = 4
"""Divisor of the daemon's totals of messages and threads: each client may hold a quarter."""
_BEARER: Final = "Bearer "
_REASONS: Final = {
    StatusCode.UNAUTHENTICATED: "unauthenticated",
    StatusCode.PERMISSION_DENIED: "permission",
    StatusCode.RESOURCE_EXHAUSTED: "busy",
    StatusCode.DEADLINE_EXCEEDED: "idle",
    StatusCode.INVALID_ARGUMENT: "malformed",
    StatusCode.FAILED_PRECONDITION: "malformed",
}
"""Reason that the metrics count for a refusal with this status code, if the refusal names no reason."""


class Refusal(Exception):  # noqa: N818  it is an answer, not a failure
    """Answer to a call that is not served."""

    def __init__(self, code: StatusCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code: Final = code
        self.message: Final = message
        """One sentence for the caller."""
        self.reason: Final = reason
        """Reason that the metrics count; empty if the code determines the reason."""


class LimitError(WireError):
    """Request beyond a limit that the operator may raise.

    The metrics count such requests apart from requests that cannot be read.
    """


def reason_of(error: BaseException | None) -> str | None:
    """Return the reason of a refusal (`metrics.table.REFUSALS`); None if the client is not the cause."""
    if isinstance(error, Refusal):
        return error.reason or _REASONS.get(error.code)
    if isinstance(error, WireError):
        return "limit" if isinstance(error, LimitError) else "malformed"
    return None


@dataclass(frozen=True, slots=True)
class Budgets:
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

    def part(self, payload: int, streams: int, share: int, message: int) -> Budgets:
        """Return smaller budgets whose parents are these budgets.

        Units that are taken from a smaller budget are also taken from its parent.

        A part has `payload` bytes and `streams` calls. Its limits for messages and threads are those of its
        parents, divided by `share`. The limits for messages have room for at least one message with payload
        (MESSAGE_COPIES) and one without, of `message` bytes each. Every limit is at least 1, and at most that
        of its parent.
        """
        limits = (
            (self.payload, payload),
            (self.streams, streams),
            (self.transfers, max(self.transfers.limit // share, MESSAGE_COPIES * message)),
            (self.requests, max(self.requests.limit // share, message)),
            (self.workers, self.workers.limit // share),
        )
        return Budgets(*(Budget(max(1, min(limit, whole.limit)), whole) for whole, limit in limits))


class Permissions:
    """Permissions and budgets of one principal, and its view of the store.

    Thread safety: immutable, except for the budgets and `is_revoked`: the event loop's thread.
    """

    def __init__(
        self, name: str, tenant: str, verbs: AbstractSet[Verb], store: TenantStore, budgets: Budgets
    ) -> None:
        self.name: Final = name
        self.tenant: Final = tenant
        self.verbs: Final = verbs
        self.store: Final = store
        self.budgets: Final = budgets
        self.is_revoked = False
        """Whether the operator has taken these permissions back."""

    @property
    def sees_all(self) -> bool:
        """Whether this principal may know the totals of the whole store.

        A principal may do so if it has the verb admin, or if no part of the store is hidden from it.
        """
        return Verb.ADMIN in self.verbs or not (self.tenant or self.store.is_fenced)

    @property
    def is_limited(self) -> bool:
        """Whether this principal is limited to a tenant or to namespaces."""
        return bool(self.tenant) or self.store.is_narrow

    @property
    def observes(self) -> bool:
        """Whether this principal may know the metrics and the status of the whole daemon.

        A principal may do so if it is not limited to a tenant or to namespaces, and either has the verb
        observe or admin, or shares the store with no tenant.
        """
        return not self.is_limited and (
            not self.verbs.isdisjoint((Verb.OBSERVE, Verb.ADMIN)) or not self.store.is_fenced
        )

    @property
    def operates(self) -> bool:
        """Whether this principal may change the daemon itself, such as the tiers of its store.

        A principal may do so if it has the verb admin, and is not limited to a tenant or to namespaces.
        """
        return Verb.ADMIN in self.verbs and not self.is_limited

    def check(self, verb: Verb | None) -> None:
        """Raise Refusal if this principal does not have `verb`; None stands for a call that needs no verb."""
        if self.is_revoked:
            raise Refusal(
                StatusCode.UNAUTHENTICATED,
                f"the operator has changed the rights of {self.name}; connect again",
            )
        if verb is not None and verb not in self.verbs:
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"{self.name} may {' and '.join(sorted(self.verbs)) or 'do nothing'}, not {verb}; the"
                " operator can add the verb",
            )


@dataclass(frozen=True, slots=True)
class Caller:
    """One client: a session of the attach socket, or a TCP connection."""

    permissions: Permissions
    session: AttachSession | None
    """Session of the attach socket; None over TCP."""
    budgets: Budgets
    peer: str = ""
    """gRPC's name of the TCP connection, or the process on this host."""


class Access:
    """All principals of a daemon, and all clients that were recognised as principals.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self, settings: Settings, store: StorageBackend, whole: Budgets, account: Account | None = None
    ) -> None:
        """Read every token and salt, and divide the daemon's budgets `whole` among the principals.

        The calls of all principals count in `account`.

        Raises ConfigError.
        """
        limits = settings.limits
        self._max_clients = limits.clients
        self._by_uid: dict[int, Permissions] = {}
        self._by_token: dict[bytes, Permissions] = {}
        self._by_san: dict[str, Permissions] = {}
        self._peers: dict[tuple[str, str], Caller] = {}
        stores = TenantStores(settings, store, account)
        self.tenant_of: Final = stores.tenant_of
        """Function that returns the tenant of a namespace, by its name in the store; "" for none.

        Any thread may call it."""
        self.prices: Final = stores.prices
        """Prices of the namespaces, by which the account counts."""
        names_own_user = any(principal.uid == os.getuid() for principal in settings.principals)
        principals = len(settings.principals) + (0 if names_own_user else 1)  # 1 for OWNER
        share = _PRINCIPAL_SHARE if principals > 1 else 1

        def payload(maximum: int, part: int) -> int:
            """Return the larger of `part` and `limits.object_bytes`, at most `maximum`; all in bytes."""
            return min(maximum, max(part, limits.object_bytes or 0))

        client_payload = payload(settings.client_bytes, whole.payload.limit * 3 // 4)
        # A client may hold a quarter of the daemon's totals. Its budgets are divided from those of its
        # principal, so the divisor is 4 if the principal has the whole totals, and 2 if it has a half.
        self._client = (
            client_payload,
            limits.streams_per_client,
            _CLIENT_SHARE // share,
            limits.message_bytes,
        )

        def permit(name: str, tenant: str, verbs: Iterable[str], namespaces: Sequence[str]) -> Permissions:
            granted = frozenset(map(Verb, verbs))
            principal_payload = payload(settings.principal_bytes, whole.payload.limit // share)
            budgets = whole.part(principal_payload, whole.streams.limit // share, share, limits.message_bytes)
            view = stores.view(tenant, namespaces, everything=Verb.ADMIN in granted)
            return Permissions(name, tenant, granted, view, budgets)

        self._permit = permit
        self._granted: dict[str, _Granted] = {}
        self._owner = permit(OWNER, "", Verb, ("*",))
        self._install(read_tokens(settings.principals))
        open_to_all = not (self._by_token or self._by_san)
        self._anonymous = permit(ANONYMOUS, "", (Verb.READ, Verb.WRITE), ("*",)) if open_to_all else None

    def reload(self, principals: Sequence[tuple[PrincipalSettings, bytes]]) -> set[Permissions]:
        """Let these be the principals from now on; each comes with the fingerprint of its token, or b"".

        Returns the permissions whose credential is not valid any more. Those of a principal that was removed
        or has other rights are revoked; one that is only recognised by something else keeps its own.
        A daemon that was closed to strangers stays closed, also without principals.
        """
        before = self._granted
        self._install(principals)
        for name, granted in before.items():
            now = self._granted.get(name)
            granted.permissions.is_revoked = now is None or now.permissions is not granted.permissions
        return {
            granted.permissions
            for name, granted in before.items()
            if (now := self._granted.get(name)) is None or now != granted
        }

    def _install(self, principals: Sequence[tuple[PrincipalSettings, bytes]]) -> None:
        before = self._granted
        by_name: dict[str, _Granted] = {}
        by_uid: dict[int, Permissions] = {}
        by_token: dict[bytes, Permissions] = {}
        by_san: dict[str, Permissions] = {}
        for principal, token in principals:
            rights = principal.tenant, principal.verbs, principal.namespaces
            known = before.get(principal.name)
            permissions = (
                known.permissions
                if known is not None and known.rights == rights
                else self._permit(principal.name, *rights)
            )
            credential = principal.uid if principal.uid is not None else token or principal.san
            by_name[principal.name] = _Granted(rights, credential, permissions)
            if principal.uid is not None:
                by_uid[principal.uid] = permissions
            elif token:
                by_token[token] = permissions
            elif principal.san is not None:
                by_san[principal.san] = permissions
        by_uid.setdefault(os.getuid(), self._owner)
        # Other threads read these at any moment, so each is replaced as a whole.
        self._granted, self._by_uid, self._by_token, self._by_san = by_name, by_uid, by_token, by_san

    @property
    def tenants(self) -> Mapping[str, str]:
        """Tenants of all principals by the principals' names; "" for none. Any thread may ask."""
        named = {name: granted.permissions.tenant for name, granted in self._granted.items()}
        return named | {OWNER: ""} | ({ANONYMOUS: ""} if self._anonymous is not None else {})

    @property
    def uids(self) -> AbstractSet[int]:
        """User ids that may use the unix sockets."""
        return self._by_uid.keys()

    def permissions_of_uid(self, uid: int) -> Permissions | None:
        """Return the permissions of a user of the attach socket; None if the user is not a principal."""
        return self._by_uid.get(uid)

    def new_client(
        self, permissions: Permissions, session: AttachSession | None = None, peer: str = ""
    ) -> Caller:
        """Return a new client of a principal; its budgets are parts of the principal's budgets."""
        return Caller(permissions, session, permissions.budgets.part(*self._client), peer)

    def identify(
        self,
        metadata: Iterable[tuple[str, str | bytes]],
        peer: str,
        identity: Mapping[str, Sequence[bytes]],
        sessions: Attachments,
        *,
        local: bool,
    ) -> Caller:
        """Identify the client that makes a call; raises Refusal if the client is not known.

        `peer` is gRPC's name of the connection, and `identity` its authentication properties. `local` says
        whether the connection came through a unix socket.
        """
        given = {key: value for key, value in metadata if key in (SESSION_METADATA, "authorization")}
        if local:
            token = given.get(SESSION_METADATA, b"")
            session = sessions.find(token) if isinstance(token, bytes) else None
            if session is None:
                raise Refusal(
                    StatusCode.UNAUTHENTICATED,
                    "there is no such session, or it has ended; connect to the attach socket first",
                )
            return session.caller
        permissions = self.authenticate(given.get("authorization", ""), identity)
        found = self._peers.get((permissions.name, peer))
        if found is None or found.permissions is not permissions:
            self._forget_idle_peers()
            found = self._peers[permissions.name, peer] = self.new_client(permissions, peer=peer)
        return found

    def authenticate(
        self, authorization: str | bytes, identity: Mapping[str, Sequence[bytes]]
    ) -> Permissions:
        """Return the principal of a TCP connection; raises Refusal if there is none with these credentials.

        `authorization` is the header of that name, and `identity` the connection's authentication properties.
        Any thread may call.
        """
        if self._anonymous is not None:
            return self._anonymous
        if isinstance(authorization, str) and authorization.startswith(_BEARER):
            # The lookup uses the digest of a token, so that its duration tells nothing about the token.
            found = self._by_token.get(_fingerprint(authorization.removeprefix(_BEARER).encode()))
            if found is not None:
                return found
        for name in identity.get("x509_subject_alternative_name", ()):
            if (named := self._by_san.get(name.decode("utf-8", "replace"))) is not None:
                return named
        raise Refusal(
            StatusCode.UNAUTHENTICATED,
            "no principal is known by this token or certificate; ask the operator for one",
        )

    def _forget_idle_peers(self) -> None:
        """Forget TCP clients without calls under way, once `limits.clients` clients are remembered.

        gRPC does not report when a connection ends, so this is the only way to forget its client.
        """
        if len(self._peers) >= self._max_clients:
            self._peers = {key: caller for key, caller in self._peers.items() if caller.budgets.streams.held}


@dataclass(frozen=True, slots=True)
class _Granted:
    """Principal as it was last granted its rights."""

    rights: tuple[str, AbstractSet[Verb], Sequence[str]]
    """Tenant, verbs and namespaces."""
    credential: int | bytes | str | None
    """User id, fingerprint of the token, or subject alternative name."""
    permissions: Permissions


def read_tokens(principals: Iterable[PrincipalSettings]) -> list[tuple[PrincipalSettings, bytes]]:
    """Return each principal with the fingerprint of its token, or b""; raises ConfigError."""
    return [
        (
            principal,
            b""
            if principal.token_file is None
            else _fingerprint(read_token(principal.token_file, f"principal {principal.name}")),
        )
        for principal in principals
    ]


def _fingerprint(token: bytes) -> bytes:
    return blake3(token).digest()
