"""Transfers of objects between two tiers: `Fetch` (storage -> host) and `Load` (host -> device).

`writes` has the third kind, `Write` (device -> host -> storage).

A new operation pins the path that it works on, and marks its destinations as pending in the index. When its
transfer is over, the operation *lands*: objects that arrived are published, reservations of the others are
cancelled, and the pins are released. This happens on the owner's thread (the engine's thread, which calls the
controller). The request that caused an operation may end before the operation lands. The objects that arrive
are published all the same, for later requests.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.ranks.landings import outcome_codes
from tiercache.controller.store_calls import StoreCall
from tiercache.core import CacheTransferUnits, Locations, Mask, Outcome, PoolName, PoolTransfer, Reason, Tier
from tiercache.errors import TransferError
from tiercache.index import HybridIndex, Node, Pin, Span
from tiercache.transfer import LayerTicket

_log = logging.getLogger(__name__)
PART_BYTES: Final = 32 << 20
"""Maximum payload bytes of one store call. A larger object has a call to itself.

With a deadline of 1 s, a store must move 32 MiB/s to be in time.
"""
_GONE: Final = (Outcome.MISS, Outcome.CORRUPT)
"""Outcomes of a get that prove that the object is gone. After any other outcome it may still be stored."""


class PageRun(NamedTuple):
    """Neighbouring objects of one pool that move together."""

    pool: PoolName
    span: Span
    """Pages of these objects on the path. The span of a state is the one page on which the state ends."""
    sources: Locations
    """Location of each object in the tier that it moves from."""
    destinations: Locations
    """Location of each object in the tier that it moves to."""

    def units(self) -> CacheTransferUnits:
        """Return this run as transfer units."""
        return CacheTransferUnits(self.pool, self.sources, self.destinations)

    def note_stored(self, index: HybridIndex, stored: bool) -> None:
        """Record in the index whether the store has these objects, as `stored` says."""
        note = index.residency.mark_stored if stored else index.residency.forget_stored
        note(self.span, self.pool, np.ones(len(self.destinations), np.bool_))

    def split(self, size: int) -> list[PageRun]:
        """Split this run into parts of at most `size` objects."""
        return [self.part(at, at + size) for at in range(0, len(self.sources), size)]

    def blocks(self, context: ControllerContext) -> int:
        """Return the number of host blocks that the objects of this run take."""
        return context.allocator.blocks_of(self.pool, len(self.destinations))

    def part(self, start: int, end: int) -> PageRun:
        """Return the objects [start, end) of this run; `end` may lie behind the last."""
        end = min(end, len(self.sources))
        if not start and end == len(self.sources):
            return self
        span = Span(self.span.node, self.span.start + start, self.span.start + end)
        return PageRun(self.pool, span, self.sources[start:end], self.destinations[start:end])

    def cut(self, flags: Mask) -> list[tuple[PageRun, bool]]:
        """Cut this run where `flags` (one flag per object) changes; return each part with its flag."""
        #   run     a b c d e f
        #   flags   1 1 1 0 0 1
        #   cuts    0     3   5 6     -> (a b c, True), (d e, False), (f, True)
        cuts = [0, *((flags[1:] != flags[:-1]).nonzero()[0] + 1).tolist(), len(flags)]
        return [(self.part(a, b), bool(flags[a])) for a, b in pairwise(cuts) if b > a]


def gather_runs(
    pool: PoolName,
    node: Node,
    start: int,
    sources: Locations,
    wanted: Mask,
    destinations: Locations | None = None,
    *,
    are_states: bool = False,
) -> list[PageRun]:
    """Return runs of neighbouring objects that are marked in `wanted`.

    `sources` and `wanted` have one entry for each page of the path to `node`, from page `start` on.
    `destinations` has one entry for each wanted object. If it is None, the destinations are the sources. With
    `are_states`, each object is the state at the end of its page, and has a run of its own.
    """
    if not np.count_nonzero(wanted):
        return []
    placed = sources
    if destinations is not None:
        placed = sources.copy()
        placed[wanted] = destinations
    if are_states:
        return [
            PageRun(pool, Span(node.covering(end), end - 1, end), sources[at : at + 1], placed[at : at + 1])
            for at, end in ((at, start + at + 1) for at in wanted.nonzero()[0].tolist())
        ]
    whole = PageRun(pool, Span(node, start, start + len(sources)), sources, placed)
    return [run for run, there in whole.cut(wanted) if there]


def set_of(
    context: ControllerContext,
    pool: PoolName,
    keys: Sequence[bytes] | Mapping[int, bytes],
    pages: Sequence[int],
    handles: Locations,
    values: Sequence[float | None],
) -> PoolTransfer:
    """Return the write to storage of the objects of these pages, with the page before each as its parent."""
    return PoolTransfer(
        pool,
        keys=[keys[i] for i in pages],
        handles=handles,
        hit_policy=context.host[pool].geometry.hit_policy,
        depths=[i + 1 for i in pages],
        parents=[keys[i - 1] if i else b"" for i in pages],
        values=values,
    )


class Operation:
    """Base class of `Fetch`, `Load` and `Write`.

    An operation holds pins until it has landed. `flush` and `close` of the controller wait for operations.
    """

    kind: str
    destination: Tier
    """Tier whose locations are pending while the operation runs."""

    def __init__(self, context: ControllerContext, runs: Sequence[PageRun], pins: Iterable[Pin]) -> None:
        self.done = False
        self.runs = runs
        self._context = context
        self.pins = list(pins)
        """Pins that the operation holds in the index."""
        context.in_flight.begin(self)

    def _finish(self) -> None:
        self.done = True
        for pin in self.pins:
            pin.release()
        self.pins.clear()
        self._context.in_flight.end(self)

    def _reserve(self) -> None:
        residency, tier = self._context.index.residency, self.destination
        for run in self.runs:
            residency.reserve(run.span, run.pool, tier, run.destinations)
            self._context.in_flight.claim(self, tier, run.pool, run.destinations)

    def _publish(self, run: PageRun) -> None:
        self._context.in_flight.unclaim(self.destination, run.pool, run.destinations)
        self._context.index.residency.publish(run.span, run.pool, self.destination, run.destinations)

    def _cancel(self, run: PageRun) -> None:
        """Undo the reservation of one run. The operation must free the run's destinations afterwards."""
        self._context.in_flight.unclaim(self.destination, run.pool, run.destinations)
        self._context.index.residency.cancel(run.span, run.pool, self.destination, run.destinations)


class Load(Operation):
    """Copy from host to device, layer by layer.

    If the load fails, its slots go to `give_back`, which returns them to the request that reserved them.
    """

    kind = "load"
    destination = Tier.DEVICE

    def __init__(
        self,
        context: ControllerContext,
        runs: Sequence[PageRun],
        pins: Iterable[Pin],
        give_back: Callable[[PoolName, Locations], None],
    ) -> None:
        super().__init__(context, runs, pins)
        self._give_back = give_back
        self._reserve()
        after = context.device_work.fences((p.pool, p.destinations) for p in runs)
        self._waits = bool(after)
        self._begun = context.clock()
        self._end = context.copy_end(self._land)
        self.ticket = context.begin_load([p.units() for p in runs], after)
        self.ticket.add_done_callback(self._background_done)

    def _background_done(self, ticket: LayerTicket) -> None:
        # A load that has waited for other requests' work on the device says nothing of the speed of copies.
        runs = () if self._waits or ticket.error else self.runs
        nbytes = sum(len(run.sources) * self._context.host[run.pool].geometry.nbytes for run in runs)
        self._context.speeds.note_load(nbytes, self._begun)
        self._end(ticket.error)

    def _land(self, error: TransferError | None) -> None:
        if error is not None:
            _log.warning("a load to the device failed; its tokens are computed again: %s", error)
        for run in self.runs:
            if error is None:
                self._publish(run)
            else:
                self._cancel(run)
                self._give_back(run.pool, run.destinations)
        self._finish()


class Fetch(Operation):
    """Verified read from storage to host, in parts that run in parallel.

    Each object succeeds or fails on its own. Host objects to which a hung read may still write stay in
    quarantine until the read returns. When no admission waits for the fetch any more (see `leave`), the parts
    that have not begun are cancelled.
    """

    kind = "fetch"
    destination = Tier.HOST
    part = 64
    """Maximum number of objects in one read. Smaller parts cost more hand-overs between threads."""

    def __init__(
        self, context: ControllerContext, runs: Sequence[PageRun], keys: Sequence[bytes], pins: Iterable[Pin]
    ) -> None:
        super().__init__(context, runs, pins)
        self.failed: dict[tuple[PoolName, bytes], Reason] = {}
        """Reasons why objects did not arrive, by pool and page key.

        The entries have page keys and not depths, because two admissions with different prompts may wait for
        this fetch. At the same depth, their prompts can have different pages.
        """
        context.in_flight.fetching.take(sum(run.blocks(context) for run in runs))
        self._reserve()
        self._waiting: set[object] = set()
        parts = self._in_order([part for run in runs for part in run.split(self.part_of(context, run.pool))])
        self._left = len(parts)
        self.landed = 0
        """Number of parts whose objects are on the host by now."""
        self._calls = [self._call(part, keys[part.span.start : part.span.end]) for part in parts]
        for call in self._calls:
            context.reads.submit(call)

    # Admissions that want the same objects share a fetch: one that finds pages pending joins.

    def join(self, waiter: object) -> None:
        """Register `waiter` as waiting for this fetch."""
        self._waiting.add(waiter)

    def leave(self, waiter: object) -> None:
        """Record that `waiter` no longer waits. If nobody waits now, cancel the parts that have not begun."""
        self._waiting.discard(waiter)
        if not self._waiting and not self.done:
            for call in self._calls:
                self._context.reads.cancel(call)

    def _in_order(self, parts: Sequence[PageRun]) -> Sequence[PageRun]:
        """Return the parts in the order in which they are read: states in the middle of the pages.

        A state is one large part, whose copy to the device can only be hidden behind later reads. It is of
        use only if all pages arrive, and so the first pages go before it.
        """
        states = [part for part in parts if part.pool in self._context.index.state_pools]
        pages = [part for part in parts if part.pool in self._context.index.page_pools]
        half = (len(pages) + 1) // 2
        return [*pages[:half], *states, *pages[half:]]

    @classmethod
    def part_of(cls, context: ControllerContext, pool: PoolName) -> int:
        """Return the maximum number of objects of `pool` in one read."""
        nbytes = min(PART_BYTES, context.options.piece_bytes)
        return max(1, min(cls.part, nbytes // context.host[pool].geometry.nbytes))

    @classmethod
    def part_bytes(cls, context: ControllerContext) -> int:
        """Return the maximum number of bytes in one read."""
        return max(cls.part_of(context, p) * context.host[p].geometry.nbytes for p in context.pools)

    def _call(self, part: PageRun, keys: Sequence[bytes]) -> StoreCall:
        storage = self._context.storage
        assert storage is not None
        return StoreCall(
            partial(self._background_read, part, keys),
            landed=partial(self._land, part, keys),
            lost=partial(self._lose, part, keys),
            late=lambda _: self._release(part),
            probe=partial(storage.probe, part.pool, keys[0], read=True),
            codes=outcome_codes(len(keys)),
            is_held=partial(self._context.is_quarantined, [(part.pool, part.destinations)]),
        )

    def _background_read(self, part: PageRun, keys: Sequence[bytes]) -> Sequence[Outcome]:
        begun = self._context.clock()
        transfer = PoolTransfer(part.pool, keys, part.destinations)
        outcomes = self._context.call_storage(
            lambda storage: storage.batch_get_v2([transfer])[part.pool],
            [Outcome.ERROR] * len(keys),
            f"reading {len(keys)} objects of pool {part.pool}",
        )
        if all(outcome is Outcome.HIT for outcome in outcomes):
            nbytes = len(keys) * self._context.host[part.pool].geometry.nbytes
            self._context.speeds.note_read(nbytes, self._context.clock() - begun)
        return outcomes

    def _land(self, part: PageRun, keys: Sequence[bytes], outcomes: Sequence[Outcome]) -> bool:
        index = self._context.index
        for run, hit in part.cut(np.array([o is Outcome.HIT for o in outcomes])):
            if hit:
                self._publish(run)
                run.note_stored(index, True)
            else:
                self._cancel(run)
                self._context.allocator.free_host(run.pool, run.destinations)
        for run, absent in part.cut(np.array([o in _GONE for o in outcomes])):
            if absent:
                run.note_stored(index, False)
        for outcome, count in Counter(outcomes).items():
            self._context.metrics.increment("storage_gets_total", part.pool, outcome, by=count)
        self.failed |= {
            (part.pool, key): o.reason for key, o in zip(keys, outcomes, strict=True) if o is not Outcome.HIT
        }
        self._context.in_flight.fetching.give(part.blocks(self._context))
        self.landed += 1
        self._end_part()
        return any(outcome is not Outcome.ERROR for outcome in outcomes)

    # Host objects of a read that hangs are in quarantine until the read returns: the store may still write to
    # them, and would overwrite another page in their blocks.

    def _lose(self, part: PageRun, keys: Sequence[bytes], reason: Reason, begun: bool) -> None:
        self._cancel(part)
        if begun:
            self._context.in_flight.quarantined[part.pool] += len(keys)
        else:
            self._release(part, quarantined=False)
        if reason is Reason.NONE:  # cancelled: storage has the objects, and another fetch may want them
            nbytes = len(keys) * self._context.host[part.pool].geometry.nbytes
            self._context.metrics.increment("prefetch_aborted_bytes_total", by=nbytes)
        else:
            self.failed |= {(part.pool, key): reason for key in keys}
        self._end_part()

    def _release(self, part: PageRun, *, quarantined: bool = True) -> None:
        """Free the destinations of a lost part, once no read can write to them any more."""
        if quarantined:
            self._context.in_flight.quarantined[part.pool] -= len(part.destinations)
        self._context.allocator.free_host(part.pool, part.destinations)
        self._context.in_flight.fetching.give(part.blocks(self._context))

    def _end_part(self) -> None:
        self._left -= 1
        if not self._left:
            self._finish()
