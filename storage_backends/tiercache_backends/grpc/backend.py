"""The `grpc` backend: the store contract over a connection to a daemon; the daemon may be down."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, Final, Self, TypeVar

from tiercache.core import DIGEST_BYTES, ObjectKey, Outcome
from tiercache.errors import ConfigError, RefusedError, StorageError, UnlistedError, WireError
from tiercache.storage.base import (
    FLUSH_SECONDS,
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    SharedMemory,
    StorageBackend,
    StoreContext,
    TierReport,
    Usage,
    storable,
)
from tiercache.storage.gate import CallGate
from tiercache.storage.history import Cause, History, PastRemoval, TierHistory
from tiercache.storage.values import usable_hints
from tiercache.storage.vectors import usable
from tiercache.storage.wrappers import decide, store_once
from tiercache.wire import messages
from tiercache.wire.methods import CHANGES
from tiercache.wire.v1 import storage_pb2 as pb
from tiercache_backends.grpc.connection import Connection
from tiercache_backends.grpc.connection_manager import ConnectionManager
from tiercache_backends.grpc.failures import CallError, Kind
from tiercache_backends.grpc.payload import Payload
from tiercache_backends.grpc.settings import GrpcSettings, read_settings

_log = logging.getLogger(__name__)

_UNCONNECTED: Final = Capabilities(shared=True)
"""Capabilities of the backend until the first connection."""
_CAUSES: Final[dict[int, Cause]] = {
    pb.REMOVAL_CAUSE_EVICTED: Cause.EVICTED,
    pb.REMOVAL_CAUSE_DELETED: Cause.DELETED,
    pb.REMOVAL_CAUSE_CORRUPT: Cause.CORRUPT,
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to a ping: what the daemon says of itself and of this client."""

    seconds: float
    """Seconds that the answer took."""
    version: str
    instance: str
    """Random hex digits, which the daemon chooses when it starts."""
    principal: str
    """Name of the principal that the daemon takes this client for."""
    tenant: str
    verbs: tuple[str, ...]
    """Rights of the principal."""
    transport: str
    """`unix`, `tcp` or `tls`."""
    store: str
    """Type of the daemon's own store, to show to a user."""


@dataclass(frozen=True, slots=True)
class DaemonReport:
    """Account of a daemon, as far as the caller may know it."""

    rows: Sequence[Mapping[str, Any]]
    """Rows by hour and tenant, in this order, with the fields of AccountRow on the wire."""
    begun: float
    """Begin of the first hour of the account, in seconds since 1970; 0 if it has no rows."""


class GrpcBackend(StorageBackend):
    """Store in a tiercache daemon.

    The backend can be opened while the daemon is down, and reconnects by itself. An item is UNAVAILABLE if
    the daemon does not answer, and REFUSED if the daemon does not serve this client.

    Every call returns within its deadline. A call without payload has `timeout` seconds, a call with payload
    `transfer_timeout` seconds for each 128 MiB (CALL_BYTES), a flush or a reload FLUSH_SECONDS more.
    `settings` explains the section of the configuration.

    A process that was forked after the backend was opened must open its own: connections are the parent's.

    Thread safety: as the contract says. Calls share one connection, and hold no lock while they wait.
    """

    capabilities = _UNCONNECTED

    def __init__(self, settings: GrpcSettings) -> None:
        self._settings = settings
        self._gate = CallGate(f"the store at {settings}", os.getpid)
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        """Records to register on every connection, by namespace."""
        self._namespaces_lock = Lock()
        self._refused: set[bytes] = set()
        """Namespaces whose refusal by the daemon was logged."""
        self._manager = ConnectionManager(settings, self._prepare, self._adopt_capabilities)
        self._payload = Payload(self._manager, settings)
        self._manager.start()

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
            return decide(items, self._unreadable, self._payload.get)

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            return decide(items, self._unreadable, partial(self._payload.get, peek=True))

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            return decide(items, self._unwritable, lambda sound: store_once(sound, self._payload.set))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            return self._flags(keys, "Delete", pb.DeleteRequest)

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        def work(part: Sequence[ObjectKey]) -> list[ScanEntry | None]:
            def read(reply: pb.DescribeReply) -> list[ScanEntry | None]:
                present = messages.read_bits(reply.present, len(part))
                entries = iter(_entries(messages.read_keys(reply.keys, len(part)), reply))
                if sum(present) != len(reply.metas):
                    raise WireError(f"{sum(present)} objects are present, {len(reply.metas)} are described")
                return [next(entries) if is_there else None for is_there in present]

            return self._ask("Describe", pb.DescribeRequest(keys=messages.keys(part)), read)

        with self._gate:
            return self._by_key(keys, work, None)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        with self._gate:
            if len(values):
                possible, which = usable_hints(values, worker, len(keys))
                keys, values = [keys[i] for i in which.tolist()], possible.tolist()
            sound = [n for n, key in enumerate(keys) if len(key.digest) == DIGEST_BYTES]
            try:
                self._payload.advise(
                    [keys[n] for n in sound], [values[n] for n in sound] if len(values) else (), worker
                )
            except CallError as error:
                _log.debug("values were not taken: %s", error.text)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate:
            return self._ask(
                "Scan",
                pb.ScanRequest(namespace=namespace, cursor=cursor),
                lambda reply: ScanPage(
                    _entries(messages.read_keys(reply.keys, len(reply.keys.pool_of)), reply), reply.cursor
                ),
                impossible=UnlistedError,
            )

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            with self._namespaces_lock:
                record = record.over(self._namespaces.get(record.namespace))
                # Keep the record before the call, so that a connection that opens during the call also
                # registers this record.
                self._namespaces[record.namespace] = record
            try:
                self._manager.perform(
                    lambda connection, seconds: self._register(connection, record, seconds),
                    self._settings.timeout,
                )
            except CallError as error:
                _log.debug("a namespace will be registered with the next connection: %s", error.text)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate:
            return self._ask(
                "Namespaces",
                pb.NamespacesRequest(),
                lambda reply: [
                    NamespaceRecord(
                        found.namespace, messages.read_mapping(found.texts, found.numbers), found.states
                    )
                    for found in reply.namespaces
                ],
            )

    def usage(self) -> Usage:
        with self._gate:
            reply: pb.UsageReply = self._ask("Usage", pb.UsageRequest())
            return Usage(
                reply.objects,
                reply.payload_bytes,
                reply.used_bytes,
                reply.capacity_bytes,
                messages.joined(reply.texts, reply.numbers),
                [TierReport(**messages.read_tier(tier)) for tier in reply.tiers],
            )

    def flush(self) -> None:
        with self._gate:
            self._ask("Flush", pb.FlushRequest(), seconds=self._settings.transfer_timeout + FLUSH_SECONDS)

    def status(self) -> dict[str, Any]:
        """Return the status document of the daemon (docs/status.md); raise StorageError without an answer."""

        def read(reply: pb.StatusReply) -> dict[str, Any]:
            try:
                found = json.loads(reply.document)
            except (ValueError, RecursionError) as error:
                raise WireError(f"the status is no JSON: {error}") from error
            if not isinstance(found, dict):
                raise WireError("the status is no JSON object")
            return found

        with self._gate:
            return self._ask("Status", pb.StatusRequest(), read)

    def history(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
        with self._gate:
            step = self._manager.limits.keys
            parts = []
            for at in range(0, max(len(keys), len(pages), 1), step):
                some, others = keys[at : at + step], pages[at : at + step]
                request = pb.HistoryRequest(keys=messages.keys(some), pages=b"".join(others))
                read = partial(read_history, keys=len(some), pages=len(others))
                parts.append((at, self._ask("History", request, read, self._settings.transfer_timeout)))
            return _joined(parts)

    def report(self, since: float) -> DaemonReport:
        """Return the account of the daemon, as far as this client may know it.

        `since` is in seconds since 1970. Raises StorageError without an answer.
        """
        with self._gate:
            request = pb.ReportRequest(since=since)
            return self._ask("Report", request, read_report, self._settings.transfer_timeout)

    def reload(self, drop: Sequence[str] = ()) -> tuple[list[str], list[str]]:
        """Let the daemon take over what its file has now; see `StorageBackend.retier` for `drop`.

        Returns what has changed, and the settings that take effect at the next start only. Raises ConfigError
        for a file that is not possible, RefusedError for a caller who may not, or another StorageError.
        """
        with self._gate:
            seconds = self._settings.transfer_timeout + FLUSH_SECONDS
            reply: pb.ReloadReply = self._ask("Reload", pb.ReloadRequest(drop=drop), seconds=seconds)
        if reply.error:
            kinds = {pb.RELOAD_ERROR_CONFIG: ConfigError, pb.RELOAD_ERROR_REFUSED: RefusedError}
            raise kinds.get(reply.error, StorageError)(reply.why)
        return list(reply.changed), list(reply.at_next_start)

    def ping(self) -> Pong:
        """Ask the daemon for its identity; raise StorageError if it does not answer."""
        with self._gate:
            started = time.monotonic()
            hello = self._manager.ask(lambda connection, seconds: connection.greet(seconds), "ping")
            seconds = time.monotonic() - started
        return Pong(
            seconds, hello.version, hello.instance.hex(), hello.principal, hello.tenant, tuple(hello.verbs),
            self._settings.transport,
            hello.store,
        )  # fmt: skip

    def close(self) -> None:
        if self._gate.close():
            self._manager.close()

    def attach(self, memory: SharedMemory) -> None:
        with self._gate:
            self._payload.attach(memory)

    # --- items
    # --------------------------------------------------------------------------------------------------------

    def _unreadable(self, item: GetItem) -> Outcome | None:
        if len(item.key.digest) != DIGEST_BYTES:
            return Outcome.MISS
        fits = item.length <= self._manager.limits.object_bytes
        sound = fits and usable(item.buffers, item.length, writable=True)
        return None if sound else Outcome.ERROR

    def _unwritable(self, item: SetItem) -> Outcome | None:
        fits = item.meta.length <= self._manager.limits.object_bytes
        return None if fits and storable(item) else Outcome.ERROR

    def _flags(self, keys: Sequence[ObjectKey], name: str, kind: type[Any]) -> list[bool]:
        def work(part: Sequence[ObjectKey]) -> list[bool]:
            request = kind(keys=messages.keys(part))
            return self._ask(name, request, lambda reply: messages.read_bits(reply.bits, len(part)))

        return self._by_key(keys, work, False)

    def _by_key(
        self, keys: Sequence[ObjectKey], work: Callable[[Sequence[ObjectKey]], list[T]], otherwise: T
    ) -> list[T]:
        """Return the answers of `work` for all keys, in order.

        `work` gets at most `limits.keys` keys at a time. A key of a wrong length is not passed to `work`, and
        gets the answer `otherwise`.
        """
        possible = [key for key in keys if len(key.digest) == DIGEST_BYTES]
        step = self._manager.limits.keys
        found = iter(
            [answer for at in range(0, len(possible), step) for answer in work(possible[at : at + step])]
        )
        return [next(found) if len(key.digest) == DIGEST_BYTES else otherwise for key in keys]

    # --- calls
    # --------------------------------------------------------------------------------------------------------

    def _ask(
        self,
        name: str,
        request: Any,
        read: Callable[[Any], T] = lambda reply: reply,
        seconds: float | None = None,
        impossible: type[StorageError] = StorageError,
    ) -> T:
        """Return what `read` makes of the reply to a call; see `ConnectionManager.ask` for its errors."""
        words = re.sub("(?<!^)(?=[A-Z])", " ", name).lower()
        reply = self._manager.ask(
            lambda connection, left: connection.call(name, request, left), words, seconds, impossible,
            changes=name in CHANGES,
        )  # fmt: skip
        try:
            return read(reply)
        except WireError as error:
            raise StorageError(f"{self._settings}: {error}; is the daemon another version?") from error

    def _prepare(self, connection: Connection) -> None:
        """Attach the memories and register the namespaces that the connection does not have yet.

        The manager calls this method for each new connection, and after each check of the current one.
        """
        self._payload.prepare(connection)
        for record in list(self._namespaces.values()):
            try:
                self._register(connection, record, self._settings.timeout)
            except CallError as error:
                if error.kind in (Kind.UNREACHABLE, Kind.SESSION_ENDED):
                    raise
                if record.namespace not in self._refused:
                    self._refused.add(record.namespace)
                    _log.warning("namespace %s was not registered: %s", record.namespace.hex(), error.text)

    def _adopt_capabilities(self, connection: Connection) -> None:
        hello = connection.hello
        self.capabilities = Capabilities(
            hello.persistent, True, hello.bounded, not hello.unordered, not hello.unlisted
        )

    def _register(self, connection: Connection, record: NamespaceRecord, seconds: float) -> None:
        if connection.registered.get(record.namespace) == record:
            return
        described = messages.namespace(record.namespace, record.identity, states=record.states)
        connection.call("Register", pb.RegisterRequest(namespace=described), seconds)
        connection.registered[record.namespace] = record


def _entries(keys: Sequence[ObjectKey], reply: pb.DescribeReply | pb.ScanReply) -> list[ScanEntry]:
    metas, times = reply.metas, reply.stored_at
    if not len(keys) == len(metas) == len(times):
        raise WireError(f"{len(keys)} objects came with {len(metas)} descriptions and {len(times)} times")
    return [
        ScanEntry(key, messages.read_meta(meta), at or None, tier)
        for key, meta, at, tier in zip(
            keys, metas, times, messages.read_tiers(reply.tiers, len(keys)), strict=True
        )
    ]


def read_report(reply: pb.ReportReply) -> DaemonReport:
    """Decode an account."""
    names = [found.name for found in pb.AccountRow.DESCRIPTOR.fields]
    rows = [{name: getattr(row, name) for name in names} for row in reply.rows]
    return DaemonReport(rows, reply.begun)


def read_history(reply: pb.HistoryReply, keys: int, pages: int) -> History:
    """Decode the history of `keys` objects and `pages` pages; raises WireError."""
    tiers = [
        TierHistory(
            tier.name,
            [] if tier.why else messages.read_bits(tier.present, keys),
            tier.since or None,
            tier.why,
        )
        for tier in reply.tiers
    ]
    columns = (reply.pages, reply.layout_of, reply.tier_of, reply.causes, reply.times)
    if len({len(column) for column in columns}) > 1:
        raise WireError("the removals of a history are not of one number")
    removals = []
    for page, layout, tier, cause, at in zip(*columns, strict=True):
        if page >= pages or layout >= len(reply.layouts) or tier > len(tiers):
            raise WireError("a removal of a history names a page, a layout or a tier that is not there")
        name = tiers[tier - 1].name if tier else ""
        removals.append(PastRemoval(page, reply.layouts[layout], name, _CAUSES.get(cause, Cause.EVICTED), at))
    return History(tiers, removals, reply.forgotten or None)


def _joined(parts: Sequence[tuple[int, History]]) -> History:
    """Return one history of several that were asked for one after the other.

    Each comes with the position of its first page. What several tiers answer is joined by their names; a tier
    that one of them could not ask has not answered.
    """
    tiers: dict[str, TierHistory] = {}
    for _, part in parts:
        for tier in part.tiers:
            before = tiers.get(tier.name)
            if before is None:
                tiers[tier.name] = tier
            elif before.why or tier.why:
                tiers[tier.name] = replace(before, present=[], why=before.why or tier.why)
            else:
                tiers[tier.name] = replace(before, present=[*before.present, *tier.present])
    removals = [
        removal._replace(page=removal.page + first) for first, part in parts for removal in part.removals
    ]
    forgotten = [part.forgotten for _, part in parts if part.forgotten is not None]
    removals.sort(key=lambda removal: -removal.at)
    return History(list(tiers.values()), removals, max(forgotten, default=None))
