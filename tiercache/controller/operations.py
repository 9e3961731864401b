"""Transfers of objects between two tiers: `Write` (device -> host -> storage), `Fetch` (storage -> host), `Load` (host -> device).

When it is made, an operation pins the path that it works on and marks its destinations pending in the index. It lands on the owner's
thread: objects whose transfer was acknowledged are published, the others are undone, and the pins are released. An operation outlives the
request that caused it: objects that arrive late are still published, for later requests.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from tiercache.controller.state import ControllerState
from tiercache.controller.store_calls import StoreCall
from tiercache.core import CacheTransferUnits, HitPolicy, Locations, Mask, Outcome, PoolName, PoolTransfer, Reason, Tier
from tiercache.errors import TransferError
from tiercache.index import HybridIndex, Node, Pin, Span
from tiercache.storage.hybrid import is_outage
from tiercache.transfer import LayerTicket, Ticket

_log = logging.getLogger(__name__)

PART_BYTES: Final = 32 << 20
"""Most payload bytes of one store call, or one larger object. With the shortest deadline, 1 s, a store as slow as 32 MiB/s still works."""
_TAKEN: Final = (Outcome.STORED, Outcome.HIT)
_FIRST_PAUSE_S: Final = 0.1
"""Seconds before objects that a busy or failed store did not take are offered to it for the second time."""
_PAUSE_GROWTH: Final = 4
"""Factor from one pause before a retry to the next."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring objects of one pool that move together. The span of a state is the one page on which the state ends."""

    pool: PoolName
    span: Span
    sources: Locations
    destinations: Locations

    def units(self) -> CacheTransferUnits:
        """Return this piece as transfer units."""
        return CacheTransferUnits(self.pool, self.sources, self.destinations)

    def reserve(self, index: HybridIndex, tier: Tier) -> None:
        """Mark the destinations as pending in `tier`."""
        if self.pool in index.state_pools:
            index.reserve_state(self.span.node, self.pool, tier, int(self.destinations[0]))
        else:
            index.reserve_pages(self.span, self.pool, tier, self.destinations)

    def publish(self, index: HybridIndex, tier: Tier) -> None:
        """Mark the destinations as filled: the bytes have arrived in `tier`."""
        if self.pool in index.state_pools:
            index.publish_state(self.span.node, self.pool, tier, int(self.destinations[0]))
        else:
            index.publish_pages(self.span, self.pool, tier, self.destinations)

    def cancel(self, index: HybridIndex, tier: Tier) -> None:
        """Undo `reserve`, because the bytes will not arrive. The destinations belong to the caller again."""
        if self.pool in index.state_pools:
            index.cancel_state(self.span.node, self.pool, tier, int(self.destinations[0]))
        else:
            index.cancel_pages(self.span, self.pool, tier, self.destinations)

    def note_stored(self, index: HybridIndex, stored: bool) -> None:
        """Note in the index whether the store was seen to have these objects."""
        if self.pool in index.state_pools:
            (index.mark_state_stored if stored else index.forget_state_stored)(self.span.node, self.pool)
        else:
            (index.mark_stored if stored else index.forget_stored)(self.span, self.pool, np.ones(len(self.destinations), np.bool_))

    def split(self, size: int) -> list[Piece]:
        """Split this piece into parts of at most `size` objects."""
        return [self._part(at, min(at + size, len(self.sources))) for at in range(0, len(self.sources), size)]

    def blocks(self, state: ControllerState) -> int:
        """Return the number of host blocks that its objects take."""
        return state.blocks_of(self.pool, len(self.destinations))

    def _part(self, start: int, end: int) -> Piece:
        at = self.span
        return Piece(self.pool, Span(at.node, at.start + start, at.start + end), self.sources[start:end], self.destinations[start:end])


class Operation:
    """Base of the three kinds: holds pins, and is one of the operations that `flush` and `close` wait for.

    Thread safety: made and landed on the owner's thread; methods named `_run*` run on a background thread and touch nothing but the store.
    """

    kind: str
    destination: Tier
    """Tier whose locations are pending while the operation runs."""

    def __init__(self, state: ControllerState, pieces: Sequence[Piece], pins: Iterable[Pin]) -> None:
        self.done = False
        self.pieces = pieces
        self._state = state
        self._pins = list(pins)
        state.begin(self)

    def _finish(self) -> None:
        self.done = True
        for pin in self._pins:
            pin.release()
        self._pins.clear()
        self._state.end(self)

    @property
    def pins(self) -> list[Pin]:
        """Pins that the operation holds in the index."""
        return self._pins

    def _reserve(self) -> None:
        for piece in self.pieces:
            piece.reserve(self._state.index, self.destination)
            self._state.claim(self, self.destination, piece.pool, piece.destinations)

    def _publish(self, piece: Piece) -> None:
        self._state.unclaim(self.destination, piece.pool, piece.destinations)
        piece.publish(self._state.index, self.destination)

    def _cancel(self, piece: Piece) -> None:
        """Undo the reservation of one piece. The operation must give its destinations back afterwards."""
        self._state.unclaim(self.destination, piece.pool, piece.destinations)
        piece.cancel(self._state.index, self.destination)


class Load(Operation):
    """Copy from host to device, layer by layer.

    The slots of a load that failed are passed to `give_back`, which returns them to the request that reserved them.
    """

    kind = "load"
    destination = Tier.DEVICE

    def __init__(
        self, state: ControllerState, pieces: Sequence[Piece], pins: Iterable[Pin], give_back: Callable[[PoolName, Locations], None]
    ) -> None:
        super().__init__(state, pieces, pins)
        self._give_back = give_back
        self._reserve()
        after = state.fences((p.pool, p.destinations) for p in pieces)
        try:
            self.ticket: LayerTicket = state.engine.load([p.units() for p in pieces], after=after)
        except Exception as error:  # noqa: BLE001  whatever it raises: a load that cannot begin is one that failed
            self.ticket = LayerTicket(range(state.layers))
            self.ticket.finish(TransferError(f"the load could not begin: {error}"))
        self.ticket.add_done_callback(lambda _: state.post(self._land))

    def _land(self) -> None:
        if self.ticket.error is not None:
            _log.warning("a load to the device failed, its requests recompute: %s", self.ticket.error)
        for piece in self.pieces:
            if self.ticket.error is None:
                self._publish(piece)
            else:
                self._cancel(piece)
                self._give_back(piece.pool, piece.destinations)
        self._finish()


class Fetch(Operation):
    """Verified read from storage to host, in parts that run in parallel. Each object succeeds or fails on its own.

    Host objects that a hung read may still write to stay quarantined until the read returns. When no admission waits for the fetch any
    more (see `leave`), the parts that have not begun are cancelled.
    """

    kind = "fetch"
    destination = Tier.HOST
    part = 64
    """Most objects in one read. Smaller parts would split a prompt of 4k tokens among threads, and lose more to hand-overs than they gain
    (15 ms instead of 13 ms).
    """

    def __init__(self, state: ControllerState, pieces: Sequence[Piece], keys: Sequence[bytes], pins: Iterable[Pin]) -> None:
        super().__init__(state, pieces, pins)
        self.failed: dict[tuple[PoolName, bytes], Reason] = {}
        """Reasons why objects did not arrive, by (pool, page key): a waiting admission may be on another path from some page on."""
        state.fetching.take(sum(piece.blocks(state) for piece in pieces))
        self._reserve()
        self._waiting: set[object] = set()
        parts = [part for piece in pieces for part in piece.split(self._part_of(piece.pool))]
        self._left = len(parts)
        self._calls = [self._call(part, keys[part.span.start : part.span.end]) for part in parts]
        for call in self._calls:
            state.reads.submit(call)

    def join(self, who: object) -> None:
        """Register `who` as waiting for this fetch."""
        self._waiting.add(who)

    def leave(self, who: object) -> None:
        """Note that `who` no longer waits; cancel what has not begun if it was the last."""
        self._waiting.discard(who)
        if not self._waiting and not self.done:
            for call in self._calls:
                self._state.reads.cancel(call)

    def _part_of(self, pool: PoolName) -> int:
        return max(1, min(self.part, PART_BYTES // self._state.host[pool].geometry.nbytes))

    def _call(self, part: Piece, keys: Sequence[bytes]) -> StoreCall:
        storage = self._state.storage
        assert storage is not None
        return StoreCall(
            partial(self._run, part, keys),
            landed=lambda answer: self._land(part, keys, *answer),
            lost=partial(self._lose, part, keys),
            late=lambda _: self._release(part),
            probe=partial(storage.probe, part.pool, keys[0], read=True),
        )

    def _run(self, part: Piece, keys: Sequence[bytes]) -> tuple[Sequence[Outcome], Mapping[Outcome, Reason]]:
        storage = self._state.storage
        assert storage is not None
        try:
            outcomes = storage.batch_get_v2([PoolTransfer(part.pool, keys, part.destinations)])[part.pool]
            return outcomes, {outcome: storage.reason_of(outcome) for outcome in set(outcomes)}
        except Exception:  # noqa: BLE001  a store that breaks its contract costs this read, never the thread; counted as ERROR below
            _log.exception("reading %d objects of pool %s failed", len(keys), part.pool)
            return [Outcome.ERROR] * len(keys), {Outcome.ERROR: Reason.IO_ERROR}

    def _land(self, part: Piece, keys: Sequence[bytes], outcomes: Sequence[Outcome], reasons: Mapping[Outcome, Reason]) -> bool:
        index = self._state.index
        away = any(map(is_outage, reasons.values()))
        # Only MISS and CORRUPT show that an object is gone. After an outage, a busy answer or an error it may still be stored.
        gone = set() if away else {Outcome.MISS, Outcome.CORRUPT}
        for run, hit in _runs(part, np.array([o is Outcome.HIT for o in outcomes])):
            if hit:
                self._publish(run)
                run.note_stored(index, True)
            else:
                self._cancel(run)
                self._state.free_host(run.pool, run.destinations)
        for run, absent in _runs(part, np.array([o in gone for o in outcomes])):
            if absent:
                run.note_stored(index, False)
        for outcome, count in Counter(outcomes).items():
            self._state.metrics.increment("storage_gets_total", part.pool, outcome, by=count)
        self.failed |= {(part.pool, key): reasons[o] for key, o in zip(keys, outcomes, strict=True) if o is not Outcome.HIT}
        self._state.fetching.give(part.blocks(self._state))
        self._end_part()
        return away or any(outcome is not Outcome.ERROR for outcome in outcomes)

    def _lose(self, part: Piece, keys: Sequence[bytes], reason: Reason, begun: bool) -> None:
        self._cancel(part)
        if begun:
            self._state.quarantined[part.pool] += len(keys)
        else:
            self._release(part, quarantined=False)
        self.failed |= {(part.pool, key): reason for key in keys}
        self._end_part()

    def _release(self, part: Piece, *, quarantined: bool = True) -> None:
        """Free the destinations of a lost part, once no read can write to them any more."""
        if quarantined:
            self._state.quarantined[part.pool] -= len(part.destinations)
        self._state.free_host(part.pool, part.destinations)
        self._state.fetching.give(part.blocks(self._state))

    def _end_part(self) -> None:
        self._left -= 1
        if not self._left:
            self._finish()


class _Answer(NamedTuple):
    """Answer of storage to a write: outcomes by piece and object, and whether the store itself reported an outage."""

    outcomes: Sequence[Sequence[Outcome]]
    away: bool


class Chain:
    """State shared by the successive writes of one commit: its page keys, and the pages that storage has refused so far.

    Thread safety: the owner's thread adds `keys`; write threads update `refused`, and so does the owner's thread when a write hangs. If
    several writes of a chain run at the same time, a state may be offered a moment too early.
    """

    def __init__(self, keys: dict[int, bytes]) -> None:
        self.keys = keys
        """Page keys by page number."""
        self.refused: set[int] = set()
        """Page numbers that storage has not taken."""


class Write(Operation):
    """Background write from device to host to storage.

    `pieces` are copied from device to host first. Then they and `held` (pieces that the host has already, destinations = handles) are
    written to storage, unless `near` is set. Objects that storage does not take are offered again `write_retries` times and then given up;
    while the store is left alone after failures they wait. The host keeps them meanwhile. A state is offered once all pages before it in
    its chain were taken, or together with the pages that are still missing.
    """

    kind = "write"
    destination = Tier.HOST

    def __init__(
        self,
        state: ControllerState,
        pieces: Sequence[Piece],
        held: Sequence[Piece],
        chain: Chain,
        *,
        device_pins: Iterable[Pin],
        host_pins: Iterable[Pin],
        near: bool = False,
    ) -> None:
        super().__init__(state, pieces, host_pins)
        self._device_pins = list(device_pins)
        self._blocks = sum(piece.blocks(state) for piece in (*pieces, *held))
        self._share = state.copying if near else state.writing
        self._share.take(self._blocks)
        self._stored = [] if near else [*pieces, *held]
        self._chain = chain
        self._pauses = (_FIRST_PAUSE_S * _PAUSE_GROWTH**i for i in range(state.options.write_retries))
        self._mark_storing(True)
        self._reserve()
        # Some pages may belong to another request whose work, in another stream, has not written them yet.
        after = state.fences((p.pool, p.sources) for p in pieces)
        try:
            ticket = state.engine.store([p.units() for p in pieces], after=after)
        except Exception as error:  # noqa: BLE001  whatever it raises: a copy that cannot begin is one that failed
            ticket = Ticket()
            ticket.finish(TransferError(f"the copy could not begin: {error}"))
        ticket.add_done_callback(self._run_copied)

    @property
    def pins(self) -> list[Pin]:  # noqa: D102
        return [*self._pins, *self._device_pins]

    def _run_copied(self, ticket: Ticket) -> None:
        # The storage write is submitted here, without the owner's thread, which may be busy with a forward pass for a long time.
        self._state.post(partial(self._land_copied, ticket.error))
        if ticket.error is None and self._stored:
            self._state.writes.submit(self._call())
        else:
            self._state.post(self._end)

    def _land_copied(self, error: TransferError | None) -> None:
        metrics, copied = self._state.metrics, error is None
        if not copied:
            _log.warning("a copy to the host failed, its write-through is skipped: %s", error)
            self._mark_storing(False)  # before the handles are freed: their next owner may mark them itself
            for piece in self._stored or self.pieces:
                self._state.give_up(piece.pool, "transfer_failed", len(piece.destinations))
            self._stored = []
        for piece in self.pieces:
            if copied:
                self._publish(piece)
                metrics.increment("written_objects_total", "host", piece.pool, by=len(piece.destinations))
            else:
                self._cancel(piece)
                self._state.free_host(piece.pool, piece.destinations)
        for pin in self._device_pins:
            pin.release()
        self._device_pins.clear()

    def _call(self) -> StoreCall:
        objects = sum(len(piece.destinations) for piece in self._stored)
        return StoreCall(self._run_store, landed=self._land_stored, lost=self._lose, late=self._land_late, patient=True, objects=objects)

    def _run_store(self) -> _Answer:
        """Offer all objects in one call, so that storage can put each state behind the pages that it depends on."""
        storage, chain = self._state.storage, self._chain
        assert storage is not None
        outcomes, away = [[Outcome.THROTTLED] * len(piece.destinations) for piece in self._stored], False
        offered = [i for i, piece in enumerate(self._stored) if not self._is_state(piece) or self._is_whole(piece)]
        try:
            answer = storage.batch_set_v2(self._transfers([self._stored[i] for i in offered])) if offered else {}
            taken = dict.fromkeys(answer, 0)
            for i in offered:
                piece = self._stored[i]
                start = taken[piece.pool]
                taken[piece.pool] += len(piece.destinations)
                outcomes[i] = answer[piece.pool][start : taken[piece.pool]]
            away = is_outage(storage.reason_of(Outcome.ERROR))
        except Exception:  # noqa: BLE001  a store that breaks its contract costs this write, never the thread; counted as ERROR below
            _log.exception("writing to storage failed")
            outcomes = [[Outcome.ERROR] * len(piece.destinations) for piece in self._stored]
        for piece, results in zip(self._stored, outcomes, strict=True):
            if not self._is_state(piece):
                pages = range(piece.span.start, piece.span.end)
                chain.refused.difference_update(pages)
                chain.refused.update(page for page, outcome in zip(pages, results, strict=True) if outcome not in _TAKEN)
        return _Answer(outcomes, away)

    def _is_state(self, piece: Piece) -> bool:
        return piece.pool in self._state.index.state_pools

    def _is_whole(self, state: Piece) -> bool:
        """Whether every refused page up to this state is offered again together with it."""
        with_it = {page for piece in self._stored if not self._is_state(piece) for page in range(piece.span.start, piece.span.end)}
        return not any(page <= state.span.start and page not in with_it for page in list(self._chain.refused))

    def _transfers(self, offered: Sequence[Piece]) -> list[PoolTransfer]:
        """Return one transfer per pool, with the pool's pieces in order."""
        transfers, keys = [], self._chain.keys
        for pool in dict.fromkeys(p.pool for p in offered):
            pieces = [p for p in offered if p.pool is pool]
            at = np.concatenate([np.arange(p.span.start, p.span.end) for p in pieces]).tolist()
            transfers.append(
                PoolTransfer(
                    pool,
                    keys=[keys[i] for i in at],
                    handles=np.concatenate([p.destinations for p in pieces]),
                    hit_policy=HitPolicy.TRAILING_PAGES if self._is_state(pieces[0]) else HitPolicy.ALL_PAGES,
                    depths=[i + 1 for i in at],
                    parents=[keys[i - 1] if i else b"" for i in at],
                )
            )
        return transfers

    def _land_stored(self, answer: _Answer) -> bool:
        refused = self._note(answer)
        self._mark_storing(False)
        self._stored = refused
        pause = next(self._pauses, None) if refused else None
        if pause is not None:
            self._mark_storing(True)
            self._state.later(pause, lambda: self._state.writes.submit(self._call()))
        else:
            for piece in refused:
                self._state.give_up(piece.pool, "refused", len(piece.destinations))
            self._end()
        return answer.away or any(outcome is not Outcome.ERROR for results in answer.outcomes for outcome in results)

    def _lose(self, reason: Reason, begun: bool) -> None:
        """Give up on a write that hangs. Its objects stay in place, because the store may still read them, but nothing waits for it."""
        assert begun, "a patient call is lost only when it hangs"
        for piece in self._stored:
            self._state.give_up(piece.pool, str(reason), len(piece.destinations))
            if not self._is_state(piece):
                self._chain.refused.update(range(piece.span.start, piece.span.end))
        self._state.strand(self)

    def _land_late(self, answer: _Answer) -> None:
        self._note(answer)
        self._mark_storing(False)
        self._end()

    def _note(self, answer: _Answer) -> list[Piece]:
        """Note the outcomes in the index and the metrics; return the pieces that storage did not take."""
        refused: list[Piece] = []
        for piece, results in zip(self._stored, answer.outcomes, strict=True):
            for run, there in _runs(piece, np.array([o in _TAKEN for o in results])):
                if there:
                    run.note_stored(self._state.index, True)
                    self._state.metrics.increment("written_objects_total", "storage", run.pool, by=len(run.destinations))
                    self._state.stored += len(run.destinations)
                else:
                    refused.append(run)
            for outcome, count in Counter(results).items():
                self._state.metrics.increment("storage_sets_total", piece.pool, outcome, by=count)
        return refused

    def _end(self) -> None:
        self._share.give(self._blocks)
        self._finish()

    def _mark_storing(self, storing: bool) -> None:
        for piece in self._stored:
            self._state.storing[piece.pool][piece.destinations] = storing


def _runs(piece: Piece, flags: Mask) -> list[tuple[Piece, bool]]:
    """Cut `piece` where `flags` (one per object) changes; return each run with its flag."""
    cuts = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    return [(piece._part(a, b), bool(flags[a])) for a, b in pairwise(cuts) if b > a]


def gather_pieces(
    pool: PoolName, node: Node, start: int, sources: Locations, wanted: Mask, destinations: Locations | None = None
) -> list[Piece]:
    """Return the runs of `wanted` among neighbouring objects as pieces. The first object is on page `start`.

    `destinations` has one entry per wanted object; without it, the destinations are the sources.
    """
    if not wanted.any():
        return []
    placed = sources
    if destinations is not None:
        placed = sources.copy()
        placed[wanted] = destinations
    whole = Piece(pool, Span(node, start, start + len(sources)), sources, placed)
    return [run for run, there in _runs(whole, wanted) if there]
