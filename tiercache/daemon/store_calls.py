"""Handlers of the calls about objects, namespaces, the store, and what the daemon knows of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

from grpc import StatusCode

import tiercache
from tiercache.core import ObjectKey, PoolName
from tiercache.daemon.access import Caller, LimitError, Permissions, Refusal
from tiercache.daemon.call import Call, read_keys
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.payload.port import DataSessions
from tiercache.daemon.removals import MAX_FOUND
from tiercache.daemon.status import StatusBoard
from tiercache.daemon.store_threads import Threads
from tiercache.daemon.tenants.account import HOUR_S, Account
from tiercache.errors import RefusedError, StorageError, WireError
from tiercache.storage.base import NAMESPACE_BYTES, NamespaceRecord, ScanEntry, StorageBackend
from tiercache.storage.history import Cause, History
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

_RECORD_BYTES: Final = 4096
"""Maximum bytes of a namespace's record as a message."""
_PAGE_BYTES: Final = 32
_MAX_ROWS: Final = 20_000
"""Maximum number of rows of one reply."""
_CAUSES: Final = {
    Cause.EVICTED: pb.REMOVAL_CAUSE_EVICTED,
    Cause.DELETED: pb.REMOVAL_CAUSE_DELETED,
    Cause.CORRUPT: pb.REMOVAL_CAUSE_CORRUPT,
}

T = TypeVar("T")
A = TypeVarTuple("A")


class StoreCalls:
    """Handlers of the calls whose request is one message without places in memory.

    Thread safety: the event loop's thread.
    """

    def __init__(
        self,
        threads: Threads,
        calls: CallLog,
        sessions: DataSessions,
        account: Account,
        board: StatusBoard,
        limits: pb.Limits,
        *,
        instance: bytes,
        kind: str,
    ) -> None:
        """Answer for the daemon `instance`, whose store is of this `kind`."""
        self._threads: Final = threads
        self._calls: Final = calls
        self._sessions: Final = sessions
        self._account: Final = account
        self._board: Final = board
        self._limits: Final = limits
        self._instance: Final = instance
        self._kind: Final = kind

    async def hello(self, call: Call) -> None:
        """Serve Hello."""
        await call.request(pb.HelloRequest)
        permissions = call.caller.permissions
        able = permissions.store.capabilities
        data = self._sessions.offer(call.caller, call.context.peer())
        await _answer(
            call,
            pb.HelloReply(
                version=tiercache.__version__, instance=self._instance, principal=permissions.name,
                tenant=permissions.tenant,
                verbs=sorted(permissions.verbs), store=self._kind, persistent=able.persistent,
                bounded=able.bounded, unordered=not able.ordered, unlisted=not able.listed,
                limits=self._limits_of(call.caller), data=data,
            ),
        )  # fmt: skip

    def _limits_of(self, caller: Caller) -> pb.Limits:
        """Return the limits; those for payload are at most the payload budget of this caller."""
        limits = pb.Limits()
        limits.CopyFrom(self._limits)
        limits.client_bytes = min(limits.client_bytes, caller.budgets.payload.largest)
        limits.object_bytes = min(limits.object_bytes, caller.budgets.payload.largest)
        return limits

    async def exists(self, call: Call) -> None:
        """Serve Exists."""
        keys = await self._keys(call, pb.ExistsRequest)
        answers = await self._ask(call, call.caller.permissions.store.exists, keys)
        self._calls.metrics.count_exists(keys, answers)
        await _answer(call, pb.BitmapReply(bits=messages.bits(answers)))

    async def delete(self, call: Call) -> None:
        """Serve Delete."""
        keys = await self._keys(call, pb.DeleteRequest)
        caller = call.caller
        deleted = await self._calls.change(
            "delete",
            partial(self._threads.start, caller.budgets.workers),
            partial(caller.permissions.store.delete, keys),
            lambda deleted: {"deleted": sum(deleted)},
            objects=len(keys),
        )
        await _answer(call, pb.BitmapReply(bits=messages.bits(deleted)))

    async def describe(self, call: Call) -> None:
        """Serve Describe."""
        entries = await self._ask(
            call, call.caller.permissions.store.describe, await self._keys(call, pb.DescribeRequest)
        )
        there = [entry for entry in entries if entry is not None]
        present = messages.bits([entry is not None for entry in entries])
        await _answer(call, pb.DescribeReply(present=present, **_described(call, there)))

    async def scan(self, call: Call) -> None:
        """Serve Scan."""
        request = await call.request(pb.ScanRequest)
        namespace = request.namespace if request.HasField("namespace") else None
        page = await self._ask(call, call.caller.permissions.store.scan, namespace, request.cursor)
        await _answer(call, pb.ScanReply(cursor=page.cursor, **_described(call, page.entries)))

    async def advise(self, call: Call) -> None:
        """Serve Advise."""
        request = await call.request(pb.AdviseRequest)
        keys = read_keys(request.keys, self._limits.keys)
        if len(request.values) not in (0, len(keys)):
            raise WireError(f"{len(keys)} keys came with {len(request.values)} values; give each its value")
        with suppress(StorageError):  # a hint may be lost
            await self._ask(
                call, call.caller.permissions.store.advise, keys, list(request.values), request.worker
            )
        await _answer(call, pb.AdviseReply())

    async def register(self, call: Call) -> None:
        """Serve Register."""
        request = (await call.request(pb.RegisterRequest)).namespace
        if not 0 < len(request.namespace) <= NAMESPACE_BYTES:
            raise WireError(
                f"a namespace of {len(request.namespace)} bytes is not allowed; it must have 1 to"
                f" {NAMESPACE_BYTES} bytes"
            )
        store = call.caller.permissions.store
        if not store.may_register(request.namespace):
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"{call.caller.permissions.name} may not use namespace {request.namespace.hex()}; the"
                " operator can add it to its namespaces",
            )
        if request.ByteSize() > _RECORD_BYTES:
            raise WireError(
                f"a namespace's record of {request.ByteSize()} bytes is beyond the limit of {_RECORD_BYTES};"
                " shorten the identity"
            )
        record = NamespaceRecord(
            request.namespace, messages.read_mapping(request.texts, request.numbers), request.states
        )
        await self._ask(call, _register, store, record)
        await _answer(call, pb.RegisterReply())

    async def namespaces(self, call: Call) -> None:
        """Serve Namespaces."""
        await call.request(pb.NamespacesRequest)
        records = await self._ask(call, call.caller.permissions.store.namespaces)
        found = [messages.namespace(r.namespace, r.identity, states=r.states) for r in records]
        await _answer(call, pb.NamespacesReply(namespaces=found))

    async def usage(self, call: Call) -> None:
        """Serve Usage."""
        await call.request(pb.UsageRequest)
        permissions = call.caller.permissions
        if not permissions.sees_all:
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"the store holds objects that {permissions.name} cannot see; its totals need the verb admin",
            )
        usage = await self._ask(call, permissions.store.usage)
        await _answer(
            call,
            pb.UsageReply(
                objects=usage.objects, payload_bytes=usage.payload_bytes, used_bytes=usage.used_bytes,
                capacity_bytes=usage.capacity_bytes,
                texts=messages.texts(usage.details), numbers=messages.numbers(usage.details),
                tiers=[messages.tier(asdict(tier)) for tier in usage.tiers],
            ),
        )  # fmt: skip

    async def flush(self, call: Call) -> None:
        """Serve Flush."""
        await call.request(pb.FlushRequest)
        await self._ask(call, call.caller.permissions.store.flush)
        await _answer(call, pb.FlushReply())

    async def status(self, call: Call) -> None:
        """Serve Status."""
        await call.request(pb.StatusRequest)
        document = await self._ask(call, self._board.encoded, call.caller.permissions)
        await _answer(call, pb.StatusReply(document=document))

    async def history(self, call: Call) -> None:
        """Serve History."""
        request = await call.request(pb.HistoryRequest, lambda asked: len(asked.pages))
        keys = read_keys(request.keys, self._limits.keys)
        if len(request.pages) % _PAGE_BYTES:
            raise WireError(f"{len(request.pages)} bytes are no page keys of {_PAGE_BYTES} bytes each")
        if len(request.pages) > self._limits.keys * _PAGE_BYTES:
            raise LimitError(f"more than {self._limits.keys} pages are beyond the limit; send them in parts")
        pages = [request.pages[at : at + _PAGE_BYTES] for at in range(0, len(request.pages), _PAGE_BYTES)]
        found = await self._ask(call, _history_for, call.caller.permissions, keys, pages)
        await _answer(call, _encoded(found))

    async def report(self, call: Call) -> None:
        """Serve Report."""
        request = await call.request(pb.ReportRequest)
        permissions = call.caller.permissions
        if permissions.store.is_narrow:
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"the account counts by tenant, and {permissions.name} is limited to namespaces; ask with"
                " another principal",
            )
        if not 0 <= request.since < 2**40:  # also false for NaN
            raise WireError("since is no time in seconds since 1970")
        tenant = None if permissions.observes else permissions.tenant
        await _answer(call, await self._ask(call, self._report, request.since, tenant))

    def _report(self, since: float, tenant: str | None) -> pb.ReportReply:
        try:
            rows = self._account.rows(tenant)
        except OSError as error:
            raise StorageError(f"the account cannot be read: {error.strerror or error}") from error
        begun = min((hour for hour, _ in rows), default=0)
        rows = {key: counts for key, counts in rows.items() if key[0] + HOUR_S > since}
        if len(rows) > _MAX_ROWS:
            raise LimitError(
                f"{len(rows)} rows of hours and tenants are beyond the limit of {_MAX_ROWS}; ask for a"
                " shorter time"
            )
        found = [
            pb.AccountRow(hour=hour, tenant=name, **asdict(counts)) for (hour, name), counts in rows.items()
        ]
        return pb.ReportReply(rows=found, begun=begun)

    async def _ask(self, call: Call, work: Callable[[*A], T], *arguments: *A) -> T:
        """Run `work` in a store thread and return its result."""
        return await self._threads.start(call.caller.budgets.workers, work, *arguments)

    async def _keys(self, call: Call, kind: type[Any]) -> list[ObjectKey]:
        request = await call.request(kind)
        return read_keys(request.keys, self._limits.keys)


def _register(store: StorageBackend, record: NamespaceRecord) -> None:
    """Register a namespace; runs in a store thread. Raises Refusal beyond the bounds of its tenant."""
    try:
        store.register_namespace(record)
    except RefusedError as error:
        raise Refusal(StatusCode.RESOURCE_EXHAUSTED, str(error), "limit") from error


def _described(call: Call, entries: Sequence[ScanEntry]) -> dict[str, Any]:
    """Return the fields of a reply that describe these objects."""
    # The tier of an object depends on what other callers store and read. So the tiers are told only to
    # callers who may know the totals of the store.
    told = call.caller.permissions.sees_all
    return {
        "keys": messages.keys([entry.key for entry in entries]),
        # Present values say what other callers expect of the objects, so they are not told.
        "metas": [messages.meta(replace(entry.meta, value=None, worker=0)) for entry in entries],
        "stored_at": [entry.stored_at or 0.0 for entry in entries],
        "tiers": messages.tiers([entry.tier for entry in entries]) if told else None,
    }


def _history_for(permissions: Permissions, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
    """Return a history as a principal may know it; runs in a store thread."""
    found = permissions.store.history(keys, pages)
    if permissions.sees_all:
        return found
    # In which tier an object is depends on what other callers store and read. So tiers are not told, nor is
    # the removal from one tier of an object that another one still has.
    whole = found.without_tiers()
    known = [removal for removal in whole.removals if removal.layout]
    asked = [ObjectKey(PoolName.KV, removal.layout + pages[removal.page]) for removal in known]
    there = permissions.store.history(asked, ()).without_tiers().tiers[0].present
    gone = [removal for removal, is_there in zip(known, there, strict=True) if not is_there]
    return History(whole.tiers, gone)


def _encoded(found: History) -> pb.HistoryReply:
    removals = found.removals[:MAX_FOUND]
    layouts = list(dict.fromkeys(removal.layout for removal in removals))
    numbers = {layout: number for number, layout in enumerate(layouts)}
    tiers = {tier.name: number for number, tier in enumerate(found.tiers, 1)}
    removals = [removal for removal in removals if not removal.tier or removal.tier in tiers]
    return pb.HistoryReply(
        tiers=[
            pb.TierHistory(
                name=tier.name, present=messages.bits(tier.present), since=tier.since or 0.0, why=tier.why
            )
            for tier in found.tiers
        ],
        layouts=layouts,
        pages=[removal.page for removal in removals],
        layout_of=[numbers[removal.layout] for removal in removals],
        tier_of=[tiers[removal.tier] if removal.tier else 0 for removal in removals],
        causes=[_CAUSES[removal.cause] for removal in removals],
        times=[removal.at for removal in removals],
        forgotten=found.forgotten or 0.0,
    )


async def _answer(call: Call, reply: Any) -> None:
    await call.send(reply.SerializeToString())
