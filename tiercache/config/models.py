"""Settings of the daemon: names, types, defaults and descriptions. Rules across settings are in `rules`.

The docstring below a setting is its description in `tiercache config schema`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tiercache.config import rules
from tiercache.config.addresses import Address, parse_address
from tiercache.config.fields import (
    AbsolutePath,
    Count,
    DiskBytes,
    Duration,
    Flag,
    HostBytes,
    Listed,
    ListenOrNone,
    Listens,
    MessageBytes,
    Name,
    Namespaces,
    ObjectBytes,
    Size,
    StorageUrl,
    Subject,
    Text,
    UserId,
    Verbs,
)
from tiercache.config.urls import storage_url
from tiercache.core import Verb
from tiercache.errors import ConfigError

_MIB: Final = 2**20
_OBJECT_BYTES: Final = 256 * _MIB
"""Default of the largest object, in bytes: more than an unsharded state of any model known in 2026."""


class _Table(BaseModel):
    """A table of the file. Frozen; knows no other keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)


class Tls(_Table):
    """Certificates of the TCP addresses. All are PEM files, read when the daemon starts."""

    certificate: AbsolutePath | None = None
    """The daemon's certificate, and those between it and the root."""
    key: AbsolutePath | None = None
    """The private key of the certificate; readable by the daemon's user alone."""
    client_ca: AbsolutePath | None = None
    """Certificate authority of client certificates. Where it is given, a client must show one (mutual TLS)."""


class Principal(_Table):
    """Somebody who may call the daemon, known by one credential: a user id, a token or a certificate."""

    name: Name
    """Name of this principal in the audit log and the metrics."""
    uid: UserId | None = None
    """Credential: the user id of the process at the other end of a unix socket."""
    token_file: AbsolutePath | None = None
    """Credential: a file with a token of 16 to 4096 bytes; readable by the daemon's user alone."""
    san: Subject | None = None
    """Credential: a subject alternative name of the client's certificate, such as worker-1.example or spiffe://example/worker-1."""
    tenant: Text = ""
    """The tenant whose objects this principal sees; one of [tenants]."""
    verbs: Verbs = frozenset({Verb.READ, Verb.WRITE})
    """Verbs that this principal may use: read, write, admin."""
    namespaces: Namespaces = ("*",)
    """Namespaces that this principal may use, in hex digits, all of them, as `tiercache ls -o json` prints them; "*" is all.

    Of a tenant either name will do: the tenant's own, or the longer one that whoever sees the whole store is shown.
    """

    @property
    def credential(self) -> str:
        """Kind of the credential, and its user id, file or name; never the secret itself."""
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
    """Somebody whose objects nobody else can name."""

    salt_file: AbsolutePath
    """32 to 4096 secret bytes that separate this tenant's objects from all others; never change them: its objects would be lost."""


class Limits(_Table):
    """Limits of one client, and of all of them together."""

    clients: Count = 512
    """Connections and sessions in total."""
    streams: Count = 256
    """Calls under way in total."""
    streams_per_client: Count = 32
    """Calls of one client under way."""
    client_bytes: ObjectBytes | None = None
    """Payload bytes of one client in flight. Default: an eighth of host_bytes, or object_bytes where that is more."""
    principal_bytes: ObjectBytes | None = None
    """Payload bytes of all clients of one principal in flight. Default: half of host_bytes, or a quarter of several principals."""
    keys_per_batch: Count = 4096
    """Keys that one call may name."""
    message_bytes: MessageBytes = 4 * _MIB
    """The largest message; objects travel in chunks of half of it, and of 2MiB at most."""
    object_bytes: ObjectBytes | None = None
    """The largest object. Default: 256MiB, or a quarter of host_bytes where that is less."""
    attached_bytes: Size = 64 * 1024 * _MIB
    """Shared memory that one client may attach; 0 turns attaching off."""
    idle: Duration = 10.0
    """A stream that makes no progress for so long is cut."""
    call: Duration = 60.0
    """The longest deadline that a call may have."""


class MetricsSettings(_Table):
    """The metrics endpoint, for Prometheus."""

    listen: ListenOrNone = ""
    """Address of the endpoint, such as 127.0.0.1:9464; empty turns it off."""
    public: Flag = False
    """Allow an address that other machines reach: metrics show names of principals and tenants, and nothing can be changed there."""

    @property
    def address(self) -> Address | None:
        """Address of `listen`, parsed; None if the endpoint is off."""
        return parse_address(self.listen) if self.listen else None


class Settings(BaseSettings):
    """All settings of the daemon. Frozen; made by `load`, which alone looks at files and variables."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True, title="tiercache"
    )

    directory: AbsolutePath = Path("/var/lib/tiercache")
    """Directory of the store (DIR/store) and of the unix sockets (DIR/run)."""
    storage: StorageUrl = ""
    """URL of another store than the file store in DIR/store, such as lmdb:///var/lib/tiercache/lmdb?capacity=64GiB."""
    disk_bytes: DiskBytes = 64 * 1024 * _MIB
    """Capacity of the file store in DIR/store."""
    host_bytes: HostBytes = 512 * _MIB
    """Memory for what is in flight: half for payloads, half for messages."""
    sockets: AbsolutePath | None = None
    """Directory of the unix sockets, grpc.sock and attach.sock. Default: DIR/run."""
    unix: Flag = True
    """Serve the unix sockets."""
    listen: Listens = ()
    """TCP addresses as host:port; port 0 is any free one."""
    insecure_bind: Flag = False
    """Allow addresses that other machines reach without TLS and authentication. Whoever reaches them may then read and change the cache."""
    drain: Duration = 10.0
    """How long calls under way may take to end after SIGTERM."""
    tls: Tls | None = None
    """Certificates of the TCP addresses."""
    principals: Annotated[tuple[Principal, ...], Listed] = ()
    """Principals that may call, and what each may do."""
    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    """Tenants by name."""
    limits: Limits = Limits()
    """Limits of one client, and of all of them together."""
    metrics: MetricsSettings = MetricsSettings()
    """The metrics endpoint, for Prometheus."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use the arguments only: `load` reads the environment itself, to know which values came from there."""
        return (init_settings,)

    def check(self) -> Self:
        """Return these settings; raises ConfigError if they contradict each other. Opens no file: see `files.check_files`."""
        rules.check(self)
        return self

    @property
    def store_url(self) -> str:
        """URL of the store to open."""
        return self.storage or storage_url("file", self.directory / "store", capacity=self.disk_bytes)

    @property
    def socket_directory(self) -> Path:
        """Directory of the unix sockets."""
        return self.sockets or self.directory / "run"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Addresses of `listen`, parsed."""
        return tuple(parse_address(text) for text in self.listen)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes that may be in flight in total: half of host_bytes, rounded down to a MiB."""
        return self.host_bytes // 2 // _MIB * _MIB

    @property
    def object_bytes(self) -> int:
        """Size of the largest object in bytes: the setting, or its default."""
        given = [size for size in (self.limits.client_bytes, self.limits.principal_bytes) if size is not None]
        return self.limits.object_bytes or min(_OBJECT_BYTES, self.payload_bytes // 2, *given)

    @property
    def client_bytes(self) -> int:
        """Payload bytes of one client that may be in flight: the setting, or its default."""
        # The default leaves room for the largest object, which could not be moved at all otherwise.
        return self.limits.client_bytes or min(max(self.payload_bytes // 4, self.object_bytes), self.principal_bytes)

    @property
    def principal_bytes(self) -> int:
        """Payload bytes that may be in flight for all clients of one principal: the setting, or its default."""
        share = self.payload_bytes // 2 if len(self.principals) > 1 else self.payload_bytes
        return self.limits.principal_bytes or max(share, self.object_bytes)
