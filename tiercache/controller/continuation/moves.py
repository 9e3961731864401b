"""Moves of a parked request: from device to host and on to storage, and back.

park      device --ParkCopy--> host --ParkWrite--> storage      ParkDeletion, when it is over
resume    device <----------- Arrival ------------ host or storage
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.continuation.holds import HostHold, HostHolds, Parcel, Places, counts
from tiercache.controller.store_calls import TAKEN, StoreCall
from tiercache.core import (
    CacheTransferUnits,
    HitPolicy,
    Locations,
    Mask,
    Outcome,
    PoolName,
    PoolTransfer,
    Reason,
)
from tiercache.errors import PoolFullError, RefusedError, TransferError
from tiercache.index import Pin
from tiercache.storage.hybrid import HybridStorage
from tiercache.transfer import Fence, LayerTicket, Ticket

_log = logging.getLogger(__name__)


class ParkCopy:
    """Copy of a request's own objects from device to host.

    The copied slots, and the pins that keep the pages that the index has on the device, are let go when the
    copy has landed. The request's other slots are given back at once.
    """

    kind = "park"

    def __init__(
        self,
        context: ControllerContext,
        hold: HostHold,
        units: Sequence[CacheTransferUnits],
        *,
        slots: Mapping[PoolName, Locations],
        pins: Sequence[Pin],
        fence: Fence | None,
        over: Callable[[bool], None],
    ) -> None:
        """Begin the copy, after `fence` has passed. `over` is called with whether everything has arrived."""
        self.done = False
        copied = {each.pool: each.sources for each in units}
        unused = {pool: np.setdiff1d(at, copied.get(pool, at[:0])) for pool, at in slots.items()}
        context.device_work.retire(unused, fence)
        self.slots = {pool: np.setdiff1d(at, unused[pool]) for pool, at in slots.items()}
        """Slots that the copy may still read, by pool."""
        self.pins = list(pins)
        self._context, self._hold, self._fence, self._over = context, hold, fence, over
        context.in_flight.begin(self)
        hold.use()
        after = context.device_work.fences((each.pool, each.sources) for each in units)
        ticket = context.begin_store(units, [*after, *([] if fence is None else [fence])])
        ticket.add_done_callback(self._background_copied)

    def _background_copied(self, ticket: Ticket) -> None:
        self._context.events.post(partial(self._land, ticket.error))

    def _land(self, error: TransferError | None) -> None:
        if error is not None:
            _log.warning("a copy of a parked request failed; it will be computed again: %s", error)
        # A copy that failed before its fence does not show that the device has passed the fence.
        self._context.device_work.retire(self.slots, self._fence, self.pins)
        self.slots, self.pins = {}, []
        self._hold.leave()
        self.done = True
        self._context.in_flight.end(self)
        self._over(error is None)


class ParkWrite:
    """Write of a parked request from host to storage, one parcel after the other.

    It ends at the first parcel that storage does not take. A call that hangs keeps the host objects in use
    until it returns; `flush` and `close` do not wait for it.
    """

    kind = "park"

    def __init__(
        self,
        context: ControllerContext,
        hold: HostHold,
        parcels: Sequence[Parcel],
        host: Places,
        keys: Sequence[bytes],
        value: float,
        over: Callable[[bool, bool], None],
    ) -> None:
        """Begin. `over` is called with whether storage has everything, and whether it may have anything.

        After a call that hangs, `over` is called a second time when that call returns.
        """
        self.done = False
        self._context, self._hold, self._over = context, hold, over
        self._was_offered = False
        self._left = list(parcels)
        self._host, self._keys, self._value = host, keys, value
        context.in_flight.begin(self)
        self._next()

    def stop(self) -> None:
        """Write nothing more. A call that has begun goes on."""
        self._left.clear()

    def _next(self) -> None:
        if not self._left:
            self._end(whole=True)
            return
        self._hold.use()
        parcel, storage = self._left.pop(0), self._context.storage
        assert storage is not None
        # No small write could stand for this one: a store that answers a lookup is offered the next write.
        probe = partial(storage.probe, parcel.pools[0], self._keys[parcel.start], read=False)
        self._context.writes.submit(
            StoreCall(
                partial(self._background_store, parcel),
                landed=self._land,
                lost=self._lose,
                late=self._land_late,
                probe=probe,
            )
        )

    def _background_store(self, parcel: Parcel) -> Mapping[PoolName, Sequence[Outcome]]:
        transfers, keys = [], self._keys
        pages = range(parcel.start, parcel.end)
        for pool in parcel.pools:
            is_state = pool in self._context.index.state_pools
            transfers.append(
                PoolTransfer(
                    pool,
                    keys=[keys[i] for i in pages],
                    handles=self._host[pool][parcel.start : parcel.end],
                    hit_policy=HitPolicy.TRAILING_PAGES if is_state else HitPolicy.ALL_PAGES,
                    depths=[i + 1 for i in pages],
                    parents=[keys[i - 1] if i else b"" for i in pages],
                    values=[self._value for _ in pages],
                )
            )
        return self._context.call_storage(
            lambda storage: storage.batch_set_v2(transfers),
            {pool: [Outcome.ERROR] * (parcel.end - parcel.start) for pool in parcel.pools},
            "writing a parked request to storage",
        )

    def _land(self, outcomes: Mapping[PoolName, Sequence[Outcome]]) -> bool:
        found = [outcome for each in outcomes.values() for outcome in each]
        for pool, each in outcomes.items():
            for outcome in each:
                self._context.metrics.increment("storage_sets_total", pool, outcome)
        self._was_offered = True
        self._hold.leave()
        if all(outcome in TAKEN for outcome in found):
            self._next()
        else:
            self._end(whole=False)
        return any(outcome is not Outcome.ERROR for outcome in found)

    def _lose(self, reason: Reason, begun: bool) -> None:
        if begun:
            self._was_offered = True
            self._context.in_flight.strand(self)
            self._over(False, True)
        else:
            self._hold.leave()
            self._end(whole=False)

    def _land_late(self, _: object) -> None:
        self._hold.leave()
        self._end(whole=False)

    def _end(self, *, whole: bool) -> None:
        self.done = True
        self._context.in_flight.end(self)
        self._over(whole, self._was_offered)


class ParkDeletion:
    """Deletion of a parked request from storage. While calls of storage are suspended, it waits.

    A daemon may refuse deletions to a worker. The objects then get the value 0, and are evicted first.
    """

    kind = "park"

    def __init__(self, context: ControllerContext, wanted: Mapping[PoolName, Sequence[bytes]]) -> None:
        self.done = False
        self._context, self._wanted = context, wanted
        context.in_flight.begin(self)
        call = StoreCall(self._background_forget, landed=self._land, lost=self._lose, patient=True)
        context.writes.submit(call)

    def _background_forget(self) -> bool:
        storage = self._context.storage
        assert storage is not None
        try:
            storage.forget(self._wanted)
        except Exception as error:  # noqa: BLE001
            # a refusal, an outage, or a store that breaks its contract: what is left is evicted in time
            _log.info("a parked request could not be deleted from storage: %s", error)
            return isinstance(error, RefusedError) and self._background_devalue(storage)
        return True

    def _background_devalue(self, storage: HybridStorage) -> bool:
        try:
            storage.advise({pool: dict.fromkeys(keys, 0.0) for pool, keys in self._wanted.items()})
        except Exception:  # noqa: BLE001  a hint that is lost
            return False
        return True

    def _land(self, well: bool) -> bool:
        self.done = True
        self._context.in_flight.end(self)
        return well

    def _lose(self, reason: Reason, begun: bool) -> None:
        self._land(False)


class Arrival:
    """Reads and loads that fill the slots of a resumed request.

    Objects come in parcels. Of those that are read from storage, as many are under way as there are read
    threads, and one more, so that reads and loads overlap. After the first failure nothing more begins.
    """

    kind = "resume"

    def __init__(
        self,
        context: ControllerContext,
        holds: HostHolds,
        keys: Sequence[bytes],
        hold: HostHold | None,
        host: Places,
        parcels: Sequence[Parcel],
        device: Places,
        wanted: Mapping[PoolName, Mask],
    ) -> None:
        """Begin to fill the slots `device` where `wanted` says so.

        `keys` are those of the request's pages in storage. `hold` and `host` are its objects on the host, if
        it has all of them; otherwise `hold` is None.
        """
        self.done = False
        self.reason = Reason.NONE
        """Why not everything has arrived; valid once `done`."""
        self.is_whole = False
        """Whether everything has arrived."""
        self.left_behind: tuple[Mapping[PoolName, Locations], Sequence[Pin], Fence | None] | None = None
        """Slots and pins of a request that was released while copies were under way, and its fence."""
        self._context, self._holds, self._keys = context, holds, keys
        self._device, self._wanted = device, wanted
        self._waiting = [parcel for parcel in parcels if any(m.any() for m in parcel.flags(wanted).values())]
        self._reads: list[StoreCall] = []
        self._under_way = 0
        self._is_stopped = False
        context.in_flight.begin(self)
        if hold is not None:
            waiting, self._waiting = self._waiting, []
            for parcel in waiting:
                self._load(parcel, parcel.pick(host, wanted), hold)
        self._go_on()

    def stop(self, reason: Reason) -> None:
        """Begin nothing more; `reason` says why, unless something failed before."""
        if self.done:
            return
        self._is_stopped = True
        if self.reason is Reason.NONE:
            self.reason = reason
        self._waiting.clear()
        for call in list(self._reads):
            self._context.reads.cancel(call)
        self._go_on()

    def leave_behind(
        self, slots: Mapping[PoolName, Locations], pins: Sequence[Pin], fence: Fence | None
    ) -> None:
        """Free the slots, and release the pins, once no copy writes to the slots any more."""
        self.left_behind = slots, pins, fence
        self.stop(Reason.NONE)

    def _go_on(self) -> None:
        while self._waiting and self._under_way <= self._context.options.read_threads:
            # While calls of storage are suspended, a read is lost before `_read` returns; nothing waits then.
            parcel = self._waiting.pop(0)
            if not self._read(parcel):
                if not self._is_stopped:
                    self._waiting.insert(0, parcel)
                break
        if not self._under_way and not self._waiting and not self.done:
            self.done = True
            self.is_whole = not self._is_stopped
            self._context.in_flight.end(self)
            if self.left_behind is not None:
                slots, pins, fence = self.left_behind
                self.left_behind = None
                self._context.device_work.retire(slots, fence, pins)

    def _fail(self, reason: Reason) -> None:
        self._is_stopped = True
        if self.reason is Reason.NONE:
            self.reason = reason
        self._waiting.clear()

    def _read(self, parcel: Parcel) -> bool:
        """Begin to read a parcel; return False if it must wait until another one has made room."""
        wanted = parcel.flags(self._wanted)
        try:
            hold = self._holds.take(counts(wanted))
        except PoolFullError:
            if not self._under_way:
                self._fail(Reason.BUSY)
            return False
        hold.use()
        self._under_way += 1
        storage = self._context.storage
        assert storage is not None
        call = StoreCall(
            partial(self._background_read, parcel, hold),
            landed=lambda outcomes: self._land_read(call, parcel, hold, outcomes),
            lost=lambda reason, begun: self._lose(call, hold, reason, begun),
            late=lambda _: hold.leave(),
            probe=partial(storage.probe, parcel.pools[0], self._keys[parcel.start], read=True),
        )
        self._reads.append(call)
        self._context.reads.submit(call)
        return True

    def _background_read(self, parcel: Parcel, hold: HostHold) -> Mapping[PoolName, Sequence[Outcome]]:
        keys = self._keys[parcel.start : parcel.end]
        chosen = {
            pool: list(compress(keys, mask.tolist())) for pool, mask in parcel.flags(self._wanted).items()
        }
        transfers = [PoolTransfer(pool, each, hold.own[pool]) for pool, each in chosen.items()]
        return self._context.call_storage(
            lambda storage: storage.batch_get_v2(transfers),
            {pool: [Outcome.ERROR] * len(each) for pool, each in chosen.items()},
            "reading a parked request",
        )

    def _land_read(
        self, call: StoreCall, parcel: Parcel, hold: HostHold, outcomes: Mapping[PoolName, Sequence[Outcome]]
    ) -> bool:
        self._reads.remove(call)
        self._under_way -= 1
        found = [outcome for each in outcomes.values() for outcome in each]
        for pool, each in outcomes.items():
            for outcome in each:
                self._context.metrics.increment("storage_gets_total", pool, outcome)
        bad = next((outcome for outcome in found if outcome is not Outcome.HIT), None)
        if bad is not None:
            self._fail(bad.reason)
        elif not self._is_stopped:
            self._load(parcel, hold.own, hold)
        hold.leave()
        hold.close()  # the load has counted itself as a user
        self._go_on()
        return any(outcome is not Outcome.ERROR for outcome in found)

    def _lose(self, call: StoreCall, hold: HostHold, reason: Reason, begun: bool) -> None:
        if call in self._reads:
            self._reads.remove(call)
        self._under_way -= 1
        self._fail(reason)  # NONE if the call was cancelled, after `stop`
        if not begun:
            hold.leave()
        hold.close()
        self._go_on()

    def _load(self, parcel: Parcel, host: Mapping[PoolName, Locations], hold: HostHold) -> None:
        """Copy a parcel to the device; `host` has its handles."""
        hold.use()
        self._under_way += 1
        device = parcel.pick(self._device, self._wanted)
        units = [CacheTransferUnits(pool, host[pool], at) for pool, at in device.items() if len(at)]
        ticket = self._context.begin_load(units, self._context.device_work.fences(device.items()))
        ticket.add_done_callback(partial(self._background_loaded, hold))

    def _background_loaded(self, hold: HostHold, ticket: LayerTicket) -> None:
        self._context.events.post(partial(self._land_load, hold, ticket.error))

    def _land_load(self, hold: HostHold, error: TransferError | None) -> None:
        self._under_way -= 1
        if error is not None:
            _log.warning("a load of a parked request failed: %s", error)
            self._fail(Reason.IO_ERROR)
        hold.leave()
        self._go_on()
