"""Admissions that go on where their request was parked."""

from __future__ import annotations

import numpy as np

from tiercache.controller.admission import Admission
from tiercache.controller.context import ControllerContext
from tiercache.controller.continuation.holds import all_objects
from tiercache.controller.continuation.moves import Arrival
from tiercache.controller.continuation.parked import Parked, ParkedStatus, Parking
from tiercache.controller.lookup import Lookup, look_up
from tiercache.controller.waiting import Poll, Status
from tiercache.core import Reason, TokenArray, leading
from tiercache.errors import PoolFullError
from tiercache.index import Node
from tiercache.transfer import Fence


class ResumedAdmission(Admission):
    """Admission that goes on where its request was parked, with the same pages and the same live state.

    It is PENDING until everything has arrived in slots of its own; then it is READY, `resumed` is True,
    and `live_states` has the slots of the state at its end. If something is lost, corrupt or late, it
    becomes an ordinary admission for the same tokens: it restores the deepest depth that can be restored, or
    none. `poll` then raises PoolFullError as long as there are too few slots for that.
    """

    def __init__(
        self,
        context: ControllerContext,
        parking: Parking,
        parked: Parked,
        tokens: int,
        states: int,
        deadline: float,
    ) -> None:
        self.resumed = False
        """Whether the request goes on where it was parked."""
        self._parking = parking
        self._parked: Parked | None = parked
        """The parked request; None once this is decided."""
        self._arrival: Arrival | None = None
        self._ordinary = tokens, states, deadline
        self._missed: Reason | None = None
        """Why the request could not be resumed, until there were slots to go on as an ordinary one."""
        sequence, extra = parked.tokens, parked.ticket.extra
        node = _deepest_on_device(context, sequence, extra)
        match = context.index.match(sequence, extra)
        lookup = Lookup(sequence, extra, match, node.end * context.page_size)
        super().__init__(context, lookup, tokens, states, deadline, shared=node)
        if context.index.state_pools:
            self.live_states = self.slots.take_states()
        self.status, self._frozen = Status.PENDING, False
        parking.take(parked)

    @property
    def depth(self) -> int:
        """Restored depth in tokens, as of the last poll: all tokens of the parked request once `resumed`."""
        return len(self.lookup.tokens) if self.resumed else super().depth

    def close(self, fence: Fence | None = None) -> None:  # noqa: D102
        if self._parked is not None:
            parked, self._parked = self._parked, None
            if self._arrival is not None and not self._arrival.done:
                self._arrival.take_over(*self.hand_over(), fence)
                self._arrival.stop(Reason.NONE)
            else:
                super().close(fence)
            self._parking.finish(parked, whole=False)
        else:
            super().close(fence)

    def _proceed(self, *, freeze: bool, late: bool = False) -> Poll:
        if self._parked is not None:
            if not self._is_decided(self._parked, stop=freeze, late=late):
                return Poll(Status.PENDING, 0, self.reason)
            self._decide(self._parked)
        if self._missed is not None:
            self._become_ordinary()
        return super()._proceed(freeze=freeze, late=late)

    def _is_decided(self, parked: Parked, *, stop: bool, late: bool) -> bool:
        """Begin what can begin, and return whether it is known if the request can be resumed."""
        reason = Reason.TIMEOUT if late else Reason.NONE
        if self._arrival is None and parked.status is ParkedStatus.COPYING and not stop:
            return False
        if self._arrival is None and (stop or parked.status is ParkedStatus.LOST):
            self._missed = reason if stop else Reason.IO_ERROR
            return True
        if self._arrival is None:
            self._arrival = self._begin(parked)
        if stop:
            self._arrival.stop(reason)
        return self._arrival.done

    def _begin(self, parked: Parked) -> Arrival:
        context, pages = self._context, len(parked.keys)
        wanted = all_objects(context, pages)
        device = {pool: table[:pages] for pool, table in self.slots.table.items()}
        for pool in device:
            wanted[pool] &= self.slots.own[pool][:pages]
        for pool, slot in self.live_states.items():
            device[pool] = np.full(pages, slot, np.int64)
        return Arrival(context, self._parking.holds, parked.keys, parked.hold, device, wanted)

    def _decide(self, parked: Parked) -> None:
        """Go on where the request was parked, or note why that is not possible."""
        if self._missed is None:
            assert self._arrival is not None
            if self._arrival.is_whole:
                self.resumed = self._frozen = True
                self.status = Status.READY
            else:
                self._missed = self._arrival.reason
        self._parked = None
        self._parking.finish(parked, whole=self.resumed)

    def _become_ordinary(self) -> None:
        """Give back the slots, and begin anew as an admission without a parked request.

        Raises PoolFullError if there are too few slots; the admission then holds none, and tries again at the
        next poll. No copy writes to the slots any more, and nobody has used them.
        """
        assert self._missed is not None
        tokens, states, deadline = self._ordinary
        context, before = self._context, self.lookup
        context.device_work.retire(self.slots.close(), None, [self._pin])
        reason, self._missed = self._missed, None
        try:
            lookup = look_up(context, before.tokens, before.extra)
            super().__init__(context, lookup, tokens, states, deadline)
        except PoolFullError:
            root = context.index.node_at(before.match, 0)
            super().__init__(context, before, 0, 0, deadline, shared=root)
            self.status, self._missed = Status.PENDING, reason
            raise
        if reason is not Reason.NONE:
            self._fail(reason)


def _deepest_on_device(context: ControllerContext, sequence: TokenArray, extra: bytes) -> Node:
    """Return the node that ends where the pages of the sequence on the device end; the root if none.

    The caller pins it at once: it may be new, because an edge was split there.
    """
    index = context.index
    match = index.match(sequence, extra)
    pages = index.locations(match, match.path_depth).pages
    run = min((leading(at.device >= 0) for at in pages.values()), default=0)
    node = index.node_at(match, run)
    return node if node.end == run else index.extend_path(sequence, run, extra)
