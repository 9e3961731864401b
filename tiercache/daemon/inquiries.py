"""The calls Status, History and Report: how the daemon is, what became of objects, what the account says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from grpc import StatusCode

from tiercache.core import ObjectKey, PoolName
from tiercache.daemon.access import LimitError, Permissions, Refusal
from tiercache.daemon.call import Call, read_keys
from tiercache.daemon.removals import MAX_FOUND
from tiercache.daemon.status import StatusBoard
from tiercache.daemon.store_threads import Threads
from tiercache.daemon.tenants.account import HOUR_S, Account
from tiercache.errors import StorageError, WireError
from tiercache.storage.history import Cause, History
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

_PAGE_BYTES: Final = 32
_MAX_ROWS: Final = 20_000
"""Maximum number of rows of one reply."""
_CAUSES: Final = {
    Cause.EVICTED: pb.REMOVAL_CAUSE_EVICTED,
    Cause.DELETED: pb.REMOVAL_CAUSE_DELETED,
    Cause.CORRUPT: pb.REMOVAL_CAUSE_CORRUPT,
}


class Inquiries:
    """Handlers of Status, History and Report.

    Thread safety: the event loop's thread; what they read is read in store threads.
    """

    def __init__(self, threads: Threads, account: Account, board: StatusBoard, max_keys: int) -> None:
        """Ask the account and the board; a call may have `max_keys` keys and as many pages."""
        self._board: Final = board
        self._threads: Final = threads
        self._account: Final = account
        self._max_keys: Final = max_keys

    async def status(self, call: Call) -> None:
        """Serve Status."""
        await call.request(pb.StatusRequest)
        permissions = call.caller.permissions
        document = await self._threads.start(call.caller.budgets.workers, self._board.encoded, permissions)
        await call.send(pb.StatusReply(document=document).SerializeToString())

    async def history(self, call: Call) -> None:
        """Serve History."""
        request = await call.request(pb.HistoryRequest, lambda asked: len(asked.pages))
        keys = read_keys(request.keys, self._max_keys)
        if len(request.pages) % _PAGE_BYTES:
            raise WireError(f"{len(request.pages)} bytes are no page keys of {_PAGE_BYTES} bytes each")
        if len(request.pages) > self._max_keys * _PAGE_BYTES:
            raise LimitError(f"more than {self._max_keys} pages are beyond the limit; send them in parts")
        pages = [request.pages[at : at + _PAGE_BYTES] for at in range(0, len(request.pages), _PAGE_BYTES)]
        permissions = call.caller.permissions
        found = await self._threads.start(call.caller.budgets.workers, _history_for, permissions, keys, pages)
        await call.send(_encoded(found).SerializeToString())

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
        reply = await self._threads.start(call.caller.budgets.workers, self._report, request.since, tenant)
        await call.send(reply.SerializeToString())

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
