"""Moves of a parked request: from device to host and on to storage, and back.

park      device --ParkCopy--> host --ParkWrite--> storage      ParkDeletion, when it is over
resume    device <----------- Arrival ------------ host or storage
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress

from tiercache.controller.context import ControllerContext
from tiercache.controller.continuation.holds import HostHold, HostHolds, Parcel, Places, counts, cut_parcels
from tiercache.controller.operations import set_of
from tiercache.controller.store_calls import TAKEN, StoreCall
from tiercache.core import CacheTransferUnits, Locations, Mask, Outcome, PoolName, PoolTransfer, Reason
from tiercache.errors import PoolFullError, RefusedError, TransferError
from tiercache.index import Pin
from tiercache.transfer import Fence, LayerTicket, Ticket

_log = logging.getLogger(__name__)
_Outcomes = Mapping[PoolName, Sequence[Outcome]]


class _Move:
    """Part of a parked request that is under way. `flush` and `close` wait for it."""

    kind = "park"

    def __init__(self, context: ControllerContext) -> None:
        self.done = False
        self.slots: Mapping[PoolName, Locations] = {}
        """Slots, by pool, that are freed at the end."""
        self.pins: Sequence[Pin] = ()
        """Pins that are released at the end."""
        self._fence: Fence | None = None
        self._context = context
        context.in_flight.begin(self)

    def take_over(self, slots: Places, pins: Sequence[Pin], fence: Fence | None) -> None:
        """Let go of slots and pins of a request when this is over and the device has passed `fence`."""
        self.slots, self.pins, self._fence = slots, pins, fence

    def _end(self) -> None:
        self.done = True
        self._context.in_flight.end(self)
        self._context.device_work.retire(self.slots, self._fence, self.pins)
        self.slots, self.pins = {}, ()

    def _count(self, metric: str, outcomes: _Outcomes) -> list[Outcome]:
        """Count the outcomes of a call, and return them."""
        for pool, each in outcomes.items():
            for outcome in each:
                self._context.metrics.increment(metric, pool, outcome)
        return [outcome for each in outcomes.values() for outcome in each]


class ParkCopy(_Move):
    """Copy of a request's own objects from device to host."""

    def __init__(
        self,
        context: ControllerContext,
        hold: HostHold,
        units: Sequence[CacheTransferUnits],
        fence: Fence | None,
        over: Callable[[bool], None],
    ) -> None:
        """Begin the copy, after `fence` has passed. `over` is called with whether everything has arrived."""
        super().__init__(context)
        self._hold, self._over = hold, over
        hold.use()
        after = context.device_work.fences((each.pool, each.sources) for each in units)
        ticket = context.begin_store(units, [*after, *([] if fence is None else [fence])])
        ticket.add_done_callback(self._background_copied)

    def _background_copied(self, ticket: Ticket) -> None:
        self._context.events.post(partial(self._land, ticket.error))

    def _land(self, error: TransferError | None) -> None:
        if error is not None:
            _log.warning("a copy of a parked request failed; it will be computed again: %s", error)
        self._hold.leave()
        self._end()
        self._over(error is None)


class ParkWrite(_Move):
    """Write of a parked request from host to storage, one parcel after the other.

    It ends at the first parcel that storage does not take. A call that hangs keeps the host objects in use
    until it returns; `flush` and `close` do not wait for it.
    """

    def __init__(
        self,
        context: ControllerContext,
        hold: HostHold,
        keys: Sequence[bytes],
        value: float,
        over: Callable[[bool, bool], None],
    ) -> None:
        """Begin. `over` is called with whether storage has everything, and whether it may have anything.

        After a call that hangs, `over` is called a second time when that call returns.
        """
        super().__init__(context)
        self._hold, self._over = hold, over
        self._was_offered = False
        self._left = cut_parcels(context, len(keys))
        self._keys, self._value = keys, value
        self._next()

    def stop(self) -> None:
        """Write nothing more. A call that has begun goes on."""
        self._left.clear()

    def _next(self) -> None:
        if not self._left:
            self._finish(whole=True)
            return
        self._hold.use()
        parcel, storage = self._left.pop(0), self._context.storage
        assert storage is not None
        # No small write could stand for this one: a store that answers a lookup is offered the next write.
        probe = partial(storage.probe, parcel.pools[0], self._keys[parcel.start], read=False)
        work = partial(self._background_store, parcel)
        self._context.writes.submit(StoreCall(work, self._land, self._lose, self._land_late, probe))

    def _background_store(self, parcel: Parcel) -> _Outcomes:
        pages, places = range(parcel.start, parcel.end), self._hold.places
        transfers = [
            set_of(self._context, pool, self._keys, pages, handles, [self._value] * len(pages))
            for pool, handles in ((pool, places[pool][parcel.start : parcel.end]) for pool in parcel.pools)
        ]
        return self._context.call_storage(
            lambda storage: storage.batch_set_v2(transfers),
            {pool: [Outcome.ERROR] * (parcel.end - parcel.start) for pool in parcel.pools},
            "writing a parked request to storage",
        )

    def _land(self, outcomes: _Outcomes) -> bool:
        found = self._count("storage_sets_total", outcomes)
        self._was_offered = True
        self._hold.leave()
        if all(outcome in TAKEN for outcome in found):
            self._next()
        else:
            self._finish(whole=False)
        return any(outcome is not Outcome.ERROR for outcome in found)

    def _lose(self, reason: Reason, begun: bool) -> None:
        if begun:
            self._was_offered = True
            self._context.in_flight.strand(self)
            self._over(False, True)
        else:
            self._hold.leave()
            self._finish(whole=False)

    def _land_late(self, _: object) -> None:
        self._hold.leave()
        self._finish(whole=False)

    def _finish(self, *, whole: bool) -> None:
        self._end()
        self._over(whole, self._was_offered)


class ParkDeletion(_Move):
    """Deletion of a parked request from storage. While calls of storage are suspended, it waits.

    A daemon may refuse deletions to a worker. The objects then get the value 0, and are evicted first.
    """

    def __init__(self, context: ControllerContext, wanted: Mapping[PoolName, Sequence[bytes]]) -> None:
        super().__init__(context)
        self._wanted = wanted
        call = StoreCall(self._background_forget, self._land, lambda *_: self._end(), patient=True)
        context.writes.submit(call)

    def _background_forget(self) -> bool:
        storage = self._context.storage
        assert storage is not None
        try:
            storage.forget(self._wanted)
        except Exception as error:  # noqa: BLE001
            # a refusal, an outage, or a store that breaks its contract: what is left is evicted in time
            _log.info("a parked request could not be deleted from storage: %s", error)
            if not isinstance(error, RefusedError):
                return False
            with suppress(Exception):  # a hint that is lost
                storage.advise({pool: dict.fromkeys(keys, 0.0) for pool, keys in self._wanted.items()})
        return True

    def _land(self, well: bool) -> bool:
        self._end()
        return well


class Arrival(_Move):
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
        device: Places,
        wanted: Mapping[PoolName, Mask],
    ) -> None:
        """Begin to fill the slots `device` where `wanted` says so.

        `keys` are those of the request's pages in storage. `hold` has its objects on the host, and is None if
        they are not there.
        """
        super().__init__(context)
        self.reason = Reason.NONE
        """Why not everything has arrived; valid once `done`."""
        self.is_whole = False
        """Whether everything has arrived."""
        self._holds, self._keys = holds, keys
        self._device, self._wanted = device, wanted
        self._waiting = [
            parcel
            for parcel in cut_parcels(context, len(keys))
            if any(mask.any() for mask in parcel.flags(wanted).values())
        ]
        self._reads: dict[HostHold, StoreCall] = {}
        self._under_way = 0
        self._is_stopped = False
        if hold is not None:
            waiting, self._waiting = self._waiting, []
            for parcel in waiting:
                self._load(parcel, parcel.pick(hold.places, wanted), hold)
        self._go_on()

    def stop(self, reason: Reason) -> None:
        """Begin nothing more; `reason` says why, unless something failed before."""
        if self.done:
            return
        self._fail(reason)
        for call in list(self._reads.values()):
            self._context.reads.cancel(call)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._under_way <= self._context.options.read_threads:
            # While calls of storage are suspended, a read is lost before `_read` returns; nothing waits then.
            parcel = self._waiting.pop(0)
            if not self._read(parcel):
                if not self._is_stopped:
                    self._waiting.insert(0, parcel)
                break
        if not self._under_way and not self._waiting and not self.done:
            self.is_whole = not self._is_stopped
            self._end()

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
        self._reads[hold] = call = StoreCall(
            partial(self._background_read, parcel, hold),
            landed=partial(self._land_read, parcel, hold),
            lost=partial(self._lose, hold),
            late=lambda _: hold.leave(),
            probe=partial(storage.probe, parcel.pools[0], self._keys[parcel.start], read=True),
        )
        self._context.reads.submit(call)
        return True

    def _background_read(self, parcel: Parcel, hold: HostHold) -> _Outcomes:
        keys = self._keys[parcel.start : parcel.end]
        flags = parcel.flags(self._wanted)
        chosen = {pool: list(compress(keys, mask.tolist())) for pool, mask in flags.items()}
        transfers = [PoolTransfer(pool, each, hold.own[pool]) for pool, each in chosen.items()]
        return self._context.call_storage(
            lambda storage: storage.batch_get_v2(transfers),
            {pool: [Outcome.ERROR] * len(each) for pool, each in chosen.items()},
            "reading a parked request",
        )

    def _land_read(self, parcel: Parcel, hold: HostHold, outcomes: _Outcomes) -> bool:
        del self._reads[hold]
        self._under_way -= 1
        found = self._count("storage_gets_total", outcomes)
        bad = next((outcome for outcome in found if outcome is not Outcome.HIT), None)
        if bad is not None:
            self._fail(bad.reason)
        elif not self._is_stopped:
            self._load(parcel, hold.own, hold)
        hold.leave()
        hold.close()  # the load has counted itself as a user
        self._go_on()
        return any(outcome is not Outcome.ERROR for outcome in found)

    def _lose(self, hold: HostHold, reason: Reason, begun: bool) -> None:
        del self._reads[hold]
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
