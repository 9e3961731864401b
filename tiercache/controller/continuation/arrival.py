"""Return of a parked request: from storage to host if need be, and from host to device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

from tiercache.controller.allocation import DeviceFence
from tiercache.controller.context import ControllerContext
from tiercache.controller.continuation.holds import HostHold, HostHolds
from tiercache.controller.continuation.parcels import Parcel, Places, counts
from tiercache.controller.store_calls import StoreCall
from tiercache.core import CacheTransferUnits, Locations, Mask, Outcome, PoolName, PoolTransfer, Reason
from tiercache.errors import PoolFullError, TransferError
from tiercache.index import Pin
from tiercache.transfer import LayerTicket

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ParkedSource:
    """Places of the objects of a parked request."""

    keys: Sequence[bytes]
    """Keys of its pages in storage."""
    hold: HostHold | None
    """Hold of its objects on the host; None if only storage has them."""
    host: Places
    """Handles of all its objects, if they are on the host."""


class Arrival:
    """Reads and loads that fill the slots of a resumed request.

    Objects come in parcels. Of those that are read from storage, as many are under way as there are read
    threads, and one more, so that reads and loads overlap. After the first failure nothing more begins.

    Thread safety: the owner's thread. Only methods named `_background_*` run on other threads.
    """

    kind = "resume"
    pins = ()

    def __init__(
        self,
        context: ControllerContext,
        holds: HostHolds,
        source: ParkedSource,
        parcels: Sequence[Parcel],
        device: Places,
        wanted: Mapping[PoolName, Mask],
    ) -> None:
        self.done = False
        self.reason = Reason.NONE
        """Why not everything has arrived; valid once `done`."""
        self.is_whole = False
        """Whether everything has arrived."""
        self.left_behind: tuple[Mapping[PoolName, Locations], Sequence[Pin], DeviceFence | None] | None = None
        """Slots and pins of a request that was released while copies were under way, and its fence."""
        self._context, self._holds, self._source = context, holds, source
        self._device, self._wanted = device, wanted
        self._waiting = [parcel for parcel in parcels if any(m.any() for m in parcel.flags(wanted).values())]
        self._reads: list[StoreCall] = []
        self._under_way = 0
        self._is_stopped = False
        context.in_flight.begin(self)
        if source.hold is not None:
            waiting, self._waiting = self._waiting, []
            for parcel in waiting:
                self._load(parcel, parcel.pick(source.host, wanted), source.hold)
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
        self, slots: Mapping[PoolName, Locations], pins: Sequence[Pin], fence: DeviceFence | None
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
            probe=partial(storage.probe, parcel.pools[0], self._source.keys[parcel.start], read=True),
        )
        self._reads.append(call)
        self._context.reads.submit(call)
        return True

    def _background_read(self, parcel: Parcel, hold: HostHold) -> Mapping[PoolName, Sequence[Outcome]]:
        storage, keys = self._context.storage, self._source.keys[parcel.start : parcel.end]
        assert storage is not None
        chosen = {
            pool: list(compress(keys, mask.tolist())) for pool, mask in parcel.flags(self._wanted).items()
        }
        try:
            return storage.batch_get_v2([PoolTransfer(p, each, hold.own[p]) for p, each in chosen.items()])
        except Exception:  # noqa: BLE001
            # an exception breaks the store's contract; the request is then restored as any other
            _log.exception("reading a parked request failed")
            return {pool: [Outcome.ERROR] * len(each) for pool, each in chosen.items()}

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
        try:
            ticket = self._context.engine.load(units, after=self._context.device_work.fences(device.items()))
        except Exception as error:  # noqa: BLE001
            # an engine may raise any exception; the load then counts as failed
            ticket = LayerTicket(range(self._context.layers))
            ticket.finish(TransferError(f"the load could not begin: {error}"))
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
