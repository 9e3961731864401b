"""Store contract of the `grpc` backend, over a connection to the daemon that may be down."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Self, TypeVar

from tiercache.core import ObjectKey, Outcome, Reason
from tiercache.errors import StorageError, WireError
from tiercache.storage.base import (
    DIGEST_BYTES,
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    SharedMemory,
    StorageBackend,
    StoreContext,
    Usage,
    storable,
)
from tiercache.storage.gate import CallGate
from tiercache.storage.vectors import usable
from tiercache.storage.wrappers.base import decide
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.failures import CallError, Kind
from tiercache_backends.grpc.link import Link
from tiercache_backends.grpc.settings import Settings, read_settings
from tiercache_backends.grpc.shared import SharedPlane
from tiercache_backends.grpc.stream import StreamPlane

_log = logging.getLogger(__name__)

_AWAY: Final = Capabilities(shared=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to a ping: what a daemon says of itself, and the `seconds` that it took."""

    seconds: float
    version: str
    instance: str
    """Hex digits that differ after each start of the daemon."""
    principal: str
    tenant: str
    verbs: tuple[str, ...]
    transport: str
    """`unix`, `tcp` or `tls`."""
    store: str


class GrpcBackend(StorageBackend):
    """Store in a tiercache daemon. It opens even while the daemon is down, answers nothing until it is up, and reconnects by itself.

    Every call returns within its deadline: `timeout` seconds, or `transfer_timeout` seconds for each 64 MiB of payload. See `settings` for
    the section of the configuration.

    Thread safety: as the contract says; calls share one connection, and no lock is held during a call.
    """

    capabilities = _AWAY

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._gate = CallGate(f"the store at {settings}")
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        self._naming = Lock()
        self._refused: set[bytes] = set()
        self._link = Link(settings, self._prepare, self._settled)
        self._stream = StreamPlane(self._link, settings.transfer_timeout)
        self._shared = SharedPlane(self._link, settings, self._stream) if settings.shared else None
        self._link.start()

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(read_settings(section))

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        read_settings(section)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            return self._flags(keys, "Exists", pb.ExistsRequest)

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            plane = self._shared or self._stream
            return decide(items, self._unreadable, plane.get)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            plane = self._shared or self._stream
            return decide(items, self._unwritable, lambda sound: _once(sound, plane.set))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            return self._flags(keys, "Delete", pb.DeleteRequest)

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        def work(part: Sequence[ObjectKey]) -> list[ScanEntry | None]:
            reply = self._ask("Describe", pb.DescribeRequest(keys=messages.keys(part)))
            present = messages.read_bits(reply.present, len(part))
            entries = iter(_entries(messages.read_keys(reply.keys, len(part)), reply.metas, reply.stored_at))
            if sum(present) != len(reply.metas):
                raise WireError(f"{sum(present)} objects are present and {len(reply.metas)} described")
            return [next(entries) if is_there else None for is_there in present]

        with self._gate:
            try:
                return self._by_key(keys, work, None)
            except WireError as error:
                raise self._unreadable_reply(error) from error

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate:
            reply = self._ask("Scan", pb.ScanRequest(namespace=namespace, cursor=cursor))
            try:
                keys = messages.read_keys(reply.keys, len(reply.keys.pool_of))
                return ScanPage(_entries(keys, reply.metas, reply.stored_at), reply.cursor)
            except WireError as error:
                raise self._unreadable_reply(error) from error

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            with self._naming:
                record = record.over(self._namespaces.get(record.namespace))
                self._namespaces[record.namespace] = record  # before the call, so that a new connection registers it
            try:
                self._link.perform(lambda connection, seconds: self._register(connection, record, seconds), self._settings.timeout)
            except CallError as error:
                _log.debug("a namespace is registered later: %s", error.text)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate:
            try:
                return [
                    NamespaceRecord(found.namespace, messages.read_mapping(found.texts, found.numbers), found.states)
                    for found in self._ask("Namespaces", pb.NamespacesRequest()).namespaces
                ]
            except WireError as error:
                raise self._unreadable_reply(error) from error

    def usage(self) -> Usage:
        with self._gate:
            reply = self._ask("Usage", pb.UsageRequest())
            details = {**reply.texts, **reply.numbers}
            return Usage(reply.objects, reply.payload_bytes, reply.used_bytes, reply.capacity_bytes, details)

    def flush(self) -> None:
        with self._gate:
            self._ask("Flush", pb.FlushRequest(), self._settings.transfer_timeout)

    def ping(self) -> Pong:
        """Ask the daemon for its identity; raise StorageError where it does not answer."""
        with self._gate:
            started = time.monotonic()
            hello = self._link.ask(lambda connection, seconds: connection.greet(seconds), "ping")
            seconds = time.monotonic() - started
        return Pong(
            seconds, hello.version, hello.instance.hex(), hello.principal, hello.tenant, tuple(hello.verbs), self._settings.transport,
            hello.store,
        )  # fmt: skip

    def close(self) -> None:
        if self._gate.close() and self._link.close() and self._shared is not None:
            self._shared.close()

    def outage(self) -> Reason:
        return self._link.outage

    def attach(self, memory: SharedMemory) -> None:
        with self._gate:
            if self._shared is not None:
                self._shared.attach(memory)

    # --- items -------------------------------------------------------------------------------------------------------------------------

    def _unreadable(self, item: GetItem) -> Outcome | None:
        if len(item.key.digest) != DIGEST_BYTES:
            return Outcome.MISS
        sound = usable(item.buffers, item.length, writable=True) and item.length <= self._link.limits.object_bytes
        return None if sound else Outcome.ERROR

    def _unwritable(self, item: SetItem) -> Outcome | None:
        return None if storable(item) and item.meta.length <= self._link.limits.object_bytes else Outcome.ERROR

    def _flags(self, keys: Sequence[ObjectKey], name: str, kind: type[Any]) -> list[bool]:
        def work(part: Sequence[ObjectKey]) -> list[bool]:
            request = kind(keys=messages.keys(part))
            bits = self._link.perform(lambda connection, seconds: connection.call(name, request, seconds).bits, self._settings.timeout)
            return messages.read_bits(bits, len(part))

        found = [False] * len(keys)
        try:
            found = self._by_key(keys, work, False)
        except (CallError, WireError) as error:
            if isinstance(error, WireError) or error.kind is Kind.WRONG:
                _log.warning("%s is answered with False: %s", name, error)
        return found

    def _by_key(self, keys: Sequence[ObjectKey], work: Callable[[Sequence[ObjectKey]], list[T]], otherwise: T) -> list[T]:
        """Return what `work` answers for the keys, at most `limits.keys` at a time; `otherwise` for a key of a wrong length."""
        possible = [key for key in keys if len(key.digest) == DIGEST_BYTES]
        most = self._link.limits.keys
        found = iter([answer for at in range(0, len(possible), most) for answer in work(possible[at : at + most])])
        return [next(found) if len(key.digest) == DIGEST_BYTES else otherwise for key in keys]

    # --- calls -------------------------------------------------------------------------------------------------------------------------

    def _ask(self, name: str, request: Any, seconds: float | None = None) -> Any:
        return self._link.ask(lambda connection, left: connection.call(name, request, left), name.lower(), seconds)

    def _unreadable_reply(self, error: WireError) -> StorageError:
        return StorageError(f"{self._settings}: {error}; is the daemon another version?")

    def _prepare(self, connection: Connection) -> None:
        """Attach memories and register namespaces that a fresh connection, or one that was checked, does not know yet."""
        if self._shared is not None:
            self._shared.prepare(connection)
        for record in list(self._namespaces.values()):
            try:
                self._register(connection, record, self._settings.timeout)
            except CallError as error:
                if error.kind in (Kind.AWAY, Kind.ENDED):
                    raise
                self._log_refusal(record, error)

    def _settled(self, connection: Connection) -> None:
        hello = connection.hello
        self.capabilities = Capabilities(persistent=hello.persistent, shared=True, bounded=hello.bounded)

    def _register(self, connection: Connection, record: NamespaceRecord, seconds: float) -> None:
        if connection.registered.get(record.namespace) == record:
            return
        described = messages.namespace(record.namespace, record.identity, states=record.states)
        connection.call("Register", pb.RegisterRequest(namespace=described), seconds)
        connection.registered[record.namespace] = record

    def _log_refusal(self, record: NamespaceRecord, error: CallError) -> None:
        if record.namespace not in self._refused:
            self._refused.add(record.namespace)
            _log.warning("namespace %s was not registered: %s", record.namespace.hex(), error.text)


def _once(items: Sequence[SetItem], store: Callable[[Sequence[SetItem]], list[Outcome]]) -> list[Outcome]:
    """Store each key once; a repeated item is a HIT if the first one was STORED, else it has the same outcome."""
    first: dict[bytes, int] = {}
    for number, item in enumerate(items):
        first.setdefault(item.key.digest, number)
    answers = dict(zip(first, store([items[number] for number in first.values()]), strict=True)) if first else {}

    def answer(number: int, digest: bytes) -> Outcome:
        found = answers[digest]
        return Outcome.HIT if found is Outcome.STORED and first[digest] != number else found

    return [answer(number, item.key.digest) for number, item in enumerate(items)]


def _entries(keys: Sequence[ObjectKey], metas: Sequence[pb.ObjectMeta], times: Sequence[float]) -> list[ScanEntry]:
    if not len(keys) == len(metas) == len(times):
        raise WireError(f"{len(keys)} objects came with {len(metas)} descriptions and {len(times)} times")
    return [ScanEntry(key, messages.read_meta(meta), at or None) for key, meta, at in zip(keys, metas, times, strict=True)]
