"""Settings of the daemon: names, types, defaults and descriptions. Rules between settings are in `rules`.

The docstring below a setting is its description in `tiercache config schema`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tiercache.config import rules
from tiercache.config.rules import (
    FILE,
    HOST,
    LIST,
    LISTEN,
    LISTEN_OR_NONE,
    NAME,
    NAMESPACE,
    STORAGE,
    SUBJECT,
    VERB,
    VERBS,
    check_namespaces,
    check_verbs,
)
from tiercache.config.urls import Address, parse_address, storage_url
from tiercache.core import Verb
from tiercache.errors import ConfigError
from tiercache.events.settings import EventSettings
from tiercache.settings import FLAG, LINE, duration, one_of, size, whole

_MIB: Final = 2**20
_MESSAGE_LIMIT: Final = 2**31 - 1
"""Maximum size of a message in bytes; gRPC keeps this size in a signed 32-bit number."""
_OBJECT_BYTES: Final = 256 * _MIB
"""Default of `limits.object_bytes`: more than an unsharded state of any model known in 2026."""


Count = Annotated[int, whole(1, 2**20)]
Duration = Annotated[float, duration()]
File = Annotated[Path, FILE]
Flag = Annotated[bool, FLAG]
Name = Annotated[str, NAME]
ObjectBytes = Annotated[int, size(4096)]
Size = Annotated[int, size()]
Text = Annotated[str, LINE]


class _Table(BaseModel):
    """Base of the tables of the file, which are immutable and reject unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True
    )


class Tls(_Table):
    """Certificates of the TCP addresses. All are PEM files, read when the daemon starts."""

    certificate: File | None = None
    """File with the daemon's certificate, followed by the certificates between it and the root."""
    key: File | None = None
    """File with the private key of the certificate; only the daemon's user may have access to it."""
    client_ca: File | None = None
    """File with the certificate of the authority that signs client certificates.

    If it is given, every client must show a certificate (mutual TLS).
    """


class Principal(_Table):
    """User or program that may call the daemon, recognised by a user id, a token or a certificate."""

    name: Name
    """Name of this principal in the audit log and the metrics."""
    # The user id 2**32 - 1 is -1 as a uid_t; system calls use it for "no user".
    uid: Annotated[int, whole(0, 2**32 - 2)] | None = None
    """Credential: the user id of the process at the other end of a unix socket."""
    token_file: File | None = None
    """Credential: a file with a token of 16 to 4096 bytes; only the daemon's user may have access to it."""
    san: Annotated[str, SUBJECT] | None = None
    """Credential: a subject alternative name of the client's certificate, such as worker-1.example or
    spiffe://example/worker-1.
    """
    tenant: Text = ""
    """Tenant whose objects this principal sees; one of [tenants].

    If it is empty, the principal sees the objects that belong to no tenant.
    """
    verbs: Annotated[frozenset[Annotated[Verb, VERB]], VERBS, AfterValidator(check_verbs)] = frozenset(
        {Verb.READ, Verb.WRITE}
    )
    """Verbs that this principal may use: read, write, observe, admin.

    observe allows the metrics and the status of the whole daemon, and nothing else.
    """
    namespaces: Annotated[tuple[Annotated[str, NAMESPACE], ...], LIST, AfterValidator(check_namespaces)] = (
        "*",
    )
    """Namespaces that this principal may use, or "*" for all.

    A namespace is written with all of its hex digits, as `tiercache ls -o json` prints them. A namespace of a
    tenant has two names: principals of the tenant see a short name, and principals that see the whole store
    see the longer name in the store. Both names are accepted.
    """

    @property
    def credential(self) -> str:
        """Kind of the credential, followed by its user id, file or name; never the secret itself."""
        return next(f"{kind} {value}" for kind, value in self._credentials().items() if value is not None)

    @model_validator(mode="after")
    def _one_credential(self) -> Self:
        given = [kind for kind, value in self._credentials().items() if value is not None]
        if len(given) != 1:
            has = f"has {len(given)} credentials ({', '.join(given)})" if given else "has no credential"
            raise ConfigError(f"principal {self.name} {has}; give exactly one of uid, token_file and san")
        return self

    def _credentials(self) -> dict[str, int | str | Path | None]:
        return {"uid": self.uid, "token_file": self.token_file, "san": self.san}


class Tenant(_Table):
    """Owner of objects that the principals of other tenants cannot reach."""

    salt_file: File
    """File with 32 to 4096 secret bytes that separate this tenant's objects from all others.

    Never change these bytes: the tenant's objects would be lost.
    """
    quota: Size | None = None
    """Maximum bytes that this tenant's objects take in the store; every copy in a tier counts.

    A set beyond it evicts the tenant's own coldest objects. Default: no limit.
    """
    guarantee: Size = 0
    """Payload bytes of this tenant that the sets of others do not evict."""


class Limits(_Table):
    """Limits of each client, and of all clients together."""

    clients: Count = 512
    """Maximum number of connections of all clients, and also of clients with attached memory."""
    streams: Count = 256
    """Maximum number of calls under way, of all clients."""
    streams_per_client: Count = 32
    """Maximum number of calls under way, of one client."""
    keys_per_batch: Count = 4096
    """Maximum number of keys in one call."""
    message_bytes: Annotated[int, size(3 * _MIB // 2, _MESSAGE_LIMIT)] = 4 * _MIB
    """Maximum size of a message. Objects travel in chunks of half this size, but of at most 2MiB."""
    object_bytes: ObjectBytes | None = None
    """Maximum size of an object. Default: 256MiB, or a quarter of host_bytes if that is less."""
    attached_bytes: Size = 64 * 1024 * _MIB
    """Maximum shared memory that one client may attach; 0 turns attaching off."""
    idle: Duration = 10.0
    """Time after which a call that makes no progress is cut."""
    call: Duration = 60.0
    """Maximum duration of a call, whatever its deadline is."""


class HttpSettings(_Table):
    """Port for operators: /metrics, /healthz, /readyz and /status (docs/status.md). It changes nothing."""

    listen: Annotated[str, LISTEN_OR_NONE] = ""
    """Address of the port, such as 127.0.0.1:9464; empty turns it off.

    The port is in TLS if the addresses of `listen` are, and has the same principals.
    """
    hosts: Annotated[tuple[Annotated[str, HOST], ...], LIST] = ()
    """Names by which callers may address the port, such as cache-1.example.

    IP addresses and localhost are always allowed. Other names are refused, because a page in a browser could
    otherwise reach the port by a name of its own.
    """
    public: Flag = False
    """Answer everyone who reaches the address, without a token or a certificate.

    Metrics and status show the names of principals and tenants, and their figures.
    """

    @property
    def address(self) -> Address | None:
        """Address of `listen`, parsed; None if the port is off."""
        return parse_address(self.listen) if self.listen else None


class LogSettings(_Table):
    """The log, which goes to the standard error stream."""

    level: Annotated[str, one_of("debug", "info", "warning", "error")] = "info"
    """Least level of the lines that are written: debug, info, warning or error."""
    format: Annotated[str, one_of("text", "json")] = "text"
    """Lines for people (text), or one JSON object a line (json)."""
    slow_call: Duration = 5.0
    """Duration from which a call is told of as slow."""


class AuditSettings(_Table):
    """Audit log: JSON lines of what callers with the verb admin change, and of refusals."""

    file: File | None = None
    """File of the records, which only the daemon's user can read. Default: DIR/audit.jsonl."""
    bytes: Annotated[int, size(64 << 10)] = 16 * _MIB
    """Size at which the file is set aside, and a new one begun."""
    kept: Count = 8
    """Number of files that are kept beside it."""
    required: Flag = False
    """Refuse changes of which no record can be written. Otherwise they are made, and a metric counts."""


class EventsSettings(_Table):
    """Publisher of KV events, which tell routers what the tiers hold (docs/events.md)."""

    endpoint: Text = ""
    """Address of the events, such as tcp://127.0.0.1:5557 or ipc:///run/tiercache/events; empty: none."""
    replay: Text = ""
    """Address at which subscribers ask for what they have missed; empty: none."""
    topic: Text = "kv-events"
    """Topic of the messages."""
    buffer: Count = 10_000
    """Number of batches that are kept for replays."""
    public: Flag = False
    """Allow addresses that other machines can reach.

    Events have no authentication. They show keys of objects and names of tiers, and no tokens.
    """

    @property
    def publisher(self) -> EventSettings | None:
        """Settings of the publisher; None without an endpoint. Raises ConfigError."""
        if not self.endpoint:
            if self.replay:
                raise ConfigError("events.replay needs events.endpoint; give both")
            return None
        return EventSettings(**self.model_dump())


class ScoreSettings(_Table):
    """Answers of the HTTP port at /score: how much of a prompt each worker can restore (docs/events.md)."""

    workers: dict[Name, Annotated[tuple[EventsSettings, ...], LIST]] = Field(default_factory=dict)
    """Workers, with endpoint, replay and topic of each rank's events; without any, there is no /score."""
    apart: Annotated[tuple[Name, ...], LIST] = ()
    """Workers that do not restore from this daemon's store."""
    objects: Annotated[int, whole(1, 2**28)] = 2**22
    """Maximum number of pages and states that are known, of some 300 bytes; others count as absent."""


class Settings(_Table, title="tiercache"):
    """All settings of the daemon, immutable. `load` makes them from a file and flags."""

    directory: File = Path("/var/lib/tiercache")
    """Directory of the store (DIR/store) and of the unix sockets (DIR/run)."""
    storage: Annotated[str | tuple[str, ...], STORAGE] = ""
    """URL of the store, such as lmdb:///data/kv?capacity=64GiB, or URLs of tiers, the fastest first.

    Default: a file store in DIR/store.
    """
    disk_bytes: Annotated[int, size(4 * _MIB)] = 64 * 1024 * _MIB
    """Capacity of the file store in DIR/store."""
    host_bytes: Annotated[int, size(32 * _MIB)] = 512 * _MIB
    """Memory that clients can make the daemon hold: half for payloads, half for messages."""
    sockets: File | None = None
    """Directory of the unix sockets, grpc.sock, attach.sock and data.sock, and of those inside the daemon.

    Default: DIR/run.
    """
    unix: Flag = True
    """Serve the unix sockets."""
    listen: Annotated[tuple[Annotated[str, LISTEN], ...], LIST] = ()
    """TCP addresses as host:port; port 0 stands for any free port."""
    data_port: Annotated[int, whole(0, 65535)] = 0
    """Port of the connections for payload on the hosts of `listen`; 0 stands for any free port.

    Clients are told the port. A firewall between them and the daemon must let it through.
    """
    insecure_bind: Flag = False
    """Allow addresses that other machines can reach, without TLS or authentication.

    Every client that reaches such an address may then read and change the cache.
    """
    drain: Duration = 10.0
    """Time after SIGTERM in which calls under way can still end."""
    tls: Tls | None = None
    """Certificates of the TCP addresses."""
    principals: Annotated[tuple[Principal, ...], LIST] = ()
    """Principals that may call, and what each may do."""
    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    """Tenants by name."""
    limits: Limits = Limits()
    """Limits of each client, and of all clients together."""
    http: HttpSettings = HttpSettings()
    """Port for operators: metrics, health and status."""
    events: EventsSettings = EventsSettings()
    """Publisher of KV events."""
    score: ScoreSettings = ScoreSettings()
    """Answers at /score."""
    log: LogSettings = LogSettings()
    """The log."""
    audit: AuditSettings = AuditSettings()
    """The audit log."""

    def check(self) -> Self:
        """Return these settings; raises ConfigError if they contradict each other.

        No file is opened; `files.check_files` checks the files.
        """
        rules.check(self)
        return self

    @property
    def store_url(self) -> str | tuple[str, ...]:
        """URL of the store to open, or the URLs of the tiers of a chain, as `open_backend` takes them."""
        return self.storage or storage_url("file", self.directory / "store", capacity=self.disk_bytes)

    @property
    def store_urls(self) -> tuple[str, ...]:
        """URLs of all stores to open: one, or those of the tiers of a chain."""
        return (self.store_url,) if isinstance(self.store_url, str) else self.store_url

    @property
    def socket_directory(self) -> Path:
        """Directory of the unix sockets."""
        return self.sockets or self.directory / "run"

    @property
    def account_file(self) -> Path:
        """File of the account that `tiercache report` shows."""
        return self.directory / "account.jsonl"

    @property
    def audit_file(self) -> Path:
        """File of the audit log."""
        return self.audit.file or self.directory / "audit.jsonl"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Addresses of `listen`, parsed."""
        return tuple(parse_address(text) for text in self.listen)

    @property
    def payload_bytes(self) -> int:
        """Maximum payload bytes of all calls under way: half of host_bytes, rounded down to a MiB."""
        return self.host_bytes // 2 // _MIB * _MIB

    @property
    def object_bytes(self) -> int:
        """Maximum size of an object in bytes: the setting, or its default."""
        return self.limits.object_bytes or min(_OBJECT_BYTES, self.payload_bytes // 2)

    @property
    def client_bytes(self) -> int:
        """Maximum payload bytes of one client's calls under way: an eighth of host_bytes, or one object."""
        return max(self.payload_bytes // 4, self.object_bytes)

    @property
    def principal_bytes(self) -> int:
        """Maximum payload bytes of the calls under way of one principal: half if there are several."""
        share = self.payload_bytes // 2 if len(self.principals) > 1 else self.payload_bytes
        return max(share, self.object_bytes)
