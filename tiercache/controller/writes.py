"""Writes from device to host and on to storage, which a commit starts in the background."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Final, NamedTuple

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.operations import Operation, PageRun, set_of
from tiercache.controller.ranks.landings import Codes, Landing, outcome_codes
from tiercache.controller.store_calls import TAKEN, StoreCall
from tiercache.core import Outcome, PoolName, PoolTransfer, Reason, Tier
from tiercache.errors import TransferError
from tiercache.index import Pin
from tiercache.storage.hybrid import HybridStorage
from tiercache.transfer import Ticket

_FIRST_BYTES: Final = 8 << 20
"""Size in bytes of the first piece of a commit, or `piece_bytes` of the options if that is less."""
_MAX_BYTES: Final = 32 << 20
"""Size in bytes up to which pieces grow."""


class Chain:
    """Page keys of one commit, and the pages that storage refused. All writes of a commit share one chain.

    Thread safety: the owner's thread (the engine's thread, which calls the controller) adds `keys`. Write
    threads update `refused`, and so does the owner's thread when a write hangs. If several writes of a chain
    run at the same time, a state may be offered before a page that it needs.
    """

    def __init__(self, keys: dict[int, bytes], *, stays_on_host: bool = False) -> None:
        self.keys = keys
        """Page keys by page number."""
        self.stays_on_host = stays_on_host
        """Whether a later flush finds on the host what storage does not take now, and offers it again."""
        self.values: dict[PoolName, dict[bytes, float]] = {}
        """Values of the objects (see `Values`), by pool and page key."""
        self.refused: set[int] = set()
        """Numbers of the pages that storage was offered and has not confirmed as stored."""
        self.piece_bytes = 0
        """Number of bytes of the next piece; 0 before the first."""


@dataclass(eq=False, slots=True)
class Piece:
    """Objects of one write that move together."""

    copied: list[PageRun] = field(default_factory=list)
    """Runs to copy from device to host."""
    stored: list[PageRun] = field(default_factory=list)
    """Runs to write to storage, once all are on the host."""
    is_on_host: bool = False
    """Whether all of the piece is on the host."""


def cut_pieces(
    context: ControllerContext, chain: Chain, copied: Iterable[PageRun], held: Iterable[PageRun]
) -> list[Piece]:
    """Return the pieces of one write, in the order of the path. There is one at least.

    `held` are runs that are on the host already. The first piece of a commit has `_FIRST_BYTES`, so that
    storage begins early. Each further piece is twice as large, up to `_MAX_BYTES`, because a
    piece costs a call of the transfer engine, and one of the store if that waits for it.
    """
    chain.piece_bytes = chain.piece_bytes or min(_FIRST_BYTES, context.options.piece_bytes)
    # A state comes after the page on which it ends.
    order = sorted(
        [*((run, True) for run in copied), *((run, False) for run in held)],
        key=lambda one: (one[0].span.start, one[0].pool in context.index.state_pools),
    )
    pieces, left = [Piece()], chain.piece_bytes
    for run, is_copied in order:
        each, at = context.host[run.pool].geometry.nbytes, 0
        while at < len(run.destinations):
            if left <= 0:
                pieces.append(Piece())
                chain.piece_bytes = left = max(chain.piece_bytes, min(2 * chain.piece_bytes, _MAX_BYTES))
            part = run.part(at, at - -left // each)
            pieces[-1].stored.append(part)
            if is_copied:
                pieces[-1].copied.append(part)
            at += len(part.destinations)
            left -= len(part.destinations) * each
    return pieces


_log = logging.getLogger(__name__)
_FIRST_PAUSE_S: Final = 0.1
"""Seconds before the first retry of objects that a busy or failed store did not take."""
_PAUSE_GROWTH: Final = 4
"""Factor from one pause before a retry to the next: 0.1 s, 0.4 s, 1.6 s."""


class _Answer(NamedTuple):
    """Answer of storage to the runs of some pieces."""

    pieces: list[Piece]
    runs: list[PageRun]
    outcomes: list[Sequence[Outcome]]
    """Outcomes of each run, one per object."""


class Write(Operation):
    """Background write from device to host to storage.

    `runs` are copied from device to host. Then `runs` and `held` are written to storage, unless `host_only`
    is set. The objects of `held` are on the host already; their destinations are the handles.

    This is done in pieces. A piece that has reached the host is written to storage while the next pieces are
    copied. If a copy fails, later pieces are not written to storage, because they follow what failed.

    Objects that storage does not take are offered again up to `write_retries` times, and then given up. While
    calls of the store are suspended after failures, the objects wait on the host. A state is held back while
    storage lacks a page that the state needs, unless the same call offers this page again.
    """

    kind = "write"
    destination = Tier.HOST

    def __init__(
        self,
        context: ControllerContext,
        runs: Sequence[PageRun],
        held: Sequence[PageRun],
        chain: Chain,
        device_pins: Iterable[Pin],
        host_pins: Iterable[Pin],
        *,
        host_only: bool = False,
    ) -> None:
        self._device_pins = list(device_pins)
        super().__init__(context, runs, [*host_pins, *self._device_pins])
        self._blocks = sum(run.blocks(context) for run in (*runs, *held))
        self._share = context.in_flight.copying if host_only else context.in_flight.writing
        self._share.take(self._blocks)
        self._chain = chain
        retries = range(context.options.write_retries)
        self._pauses: Iterator[float] = (_FIRST_PAUSE_S * _PAUSE_GROWTH**i for i in retries)
        self._is_lost = False
        """Whether a call hung, and the objects were given up."""
        self._refused: list[PageRun] = []
        """Runs that storage has not taken, and that will be offered again with the others."""
        pieces = [Piece(list(runs), [])] if host_only else cut_pieces(context, chain, runs, held)
        self._open = list(pieces)
        """Pieces whose end is not known."""
        self._copying = len(pieces)
        """Number of pieces whose copy has not landed."""
        # `_lock` guards `_waiting` and `_is_called`. No callback and no call of the store runs under it.
        self._lock = threading.Lock()
        self._waiting = [] if host_only else list(pieces)
        """Pieces that no call has taken and that are to be written to storage, on the host or not."""
        self._is_called = False
        """Whether a call that will take what has reached the host is queued or under way."""
        for piece in pieces:
            self._mark_storing(piece.stored, True)
        self._reserve()
        # Some pages may come from another request, whose work in another stream has not written them yet.
        after = context.device_work.fences((p.pool, p.sources) for p in runs)
        self._agrees = context.landings is not None
        """Whether ranks agree on what happens: then the owner's thread chooses what a call takes."""
        for piece in pieces:
            end = context.copy_end(partial(self._end_copy, piece)) if self._agrees else None
            ticket = context.begin_store([p.units() for p in piece.copied], after)
            ticket.add_done_callback(partial(self._background_copied, piece, end))

    @property
    def is_copying(self) -> bool:
        """Whether device slots are still read."""
        return bool(self._device_pins)

    def _background_copied(self, piece: Piece, end: Landing | None, ticket: Ticket) -> None:
        # A thread of the transfer engine runs this method. The storage write is submitted here, because the
        # owner's thread may be busy with a forward pass for a long time. `_land_copied` is posted before a
        # call can take the piece, so that the owner publishes the host objects before the result of the
        # storage write is applied.
        if end is not None:
            end(ticket.error)
            return
        with self._lock:
            self._note_copied(piece, ticket.error)
            land = partial(self._land_copied, piece, piece.is_on_host, ticket.error)
            self._context.events.post(land)
        self._call()

    def _note_copied(self, piece: Piece, error: TransferError | None) -> None:
        if error is not None:
            self._waiting = [other for other in self._waiting if other.is_on_host]
        piece.is_on_host = piece in self._waiting

    def _end_copy(self, piece: Piece, error: TransferError | None) -> None:
        """Apply the end of a copy on which all ranks agree."""
        self._note_copied(piece, error)
        self._land_copied(piece, piece.is_on_host, error)
        self._call()

    def _call(self) -> None:
        """Submit a call for what has reached the host, unless one that will take it is there already."""
        with self._lock:
            if self._is_called or not any(piece.is_on_host for piece in self._waiting):
                return
            self._is_called = True
        taken = self._take() if self._agrees else []
        runs = [run for piece in taken for run in piece.stored]
        call = StoreCall(
            partial(self._background_store, taken), self._land_stored, self._lose, self._land_stored,
            codes=_codes(taken, runs), patient=True,
            is_held=lambda: self._context.is_quarantined((run.pool, run.destinations) for run in runs),
        )  # fmt: skip
        self._context.writes.submit(call)

    def _land_copied(self, piece: Piece, is_stored: bool, error: TransferError | None) -> None:
        if error is not None:
            _log.warning("a copy to the host failed, its write-through is skipped: %s", error)
        if not is_stored:
            # The marks are cleared before the handles are freed: the next write may mark the same handles.
            self._mark_storing(piece.stored, False)
            for run in piece.stored or (piece.copied if error is not None else ()):
                self._give_up(run, "transfer_failed")
            self._open.remove(piece)
        for run in piece.copied:
            if error is None:
                self._publish(run)
                self._count_written(Tier.HOST, run)
            else:
                self._cancel(run)
                self._context.allocator.free_host(run.pool, run.destinations)
        self._copying -= 1
        if not self._copying:
            for pin in self._device_pins:
                pin.release()
                self.pins.remove(pin)
            self._device_pins.clear()
            self._strand_if_lost()
        self._settle()

    def _background_store(self, taken: list[Piece]) -> _Answer:
        """Write what is on the host, and what arrives there meanwhile; after a failure, nothing more.

        If ranks agree, only what is `taken` is written.
        """
        answer, is_well = _Answer([], [], []), True
        pieces = taken or self._take()
        while pieces:
            runs = [run for piece in pieces for run in piece.stored]
            outcomes = _errors(runs)
            if is_well:
                offer = partial(self._offer, runs)
                outcomes = self._context.call_storage(offer, outcomes, "writing to storage")
            is_well = _is_well(outcomes)
            for run, results in zip(runs, outcomes, strict=True):
                if not self._is_state(run):
                    pages = range(run.span.start, run.span.end)
                    self._chain.refused.difference_update(pages)
                    self._chain.refused.update(
                        page for page, outcome in zip(pages, results, strict=True) if outcome not in TAKEN
                    )
            answer.pieces.extend(pieces)
            answer.runs.extend(runs)
            answer.outcomes.extend(outcomes)
            pieces = [] if taken else self._take()
        return answer

    def _take(self) -> list[Piece]:
        """Return what has reached the host and no call has taken; without any, the call under way ends."""
        with self._lock:
            taken = [piece for piece in self._waiting if piece.is_on_host]
            self._waiting = [piece for piece in self._waiting if not piece.is_on_host]
            self._is_called = bool(taken)
        return taken

    def _offer(self, runs: Sequence[PageRun], storage: HybridStorage) -> list[Sequence[Outcome]]:
        """Offer all objects in one call, so that storage can write each state after its pages.

        Returns the outcomes of each run, one outcome per object. A state that is held back has the outcome
        THROTTLED, so that it is offered again.
        """
        outcomes: list[Sequence[Outcome]] = [[Outcome.THROTTLED] * len(run.destinations) for run in runs]
        for i, run in enumerate(runs):
            if run.pool in self._context.elsewhere:
                outcomes[i] = self._ask(storage, run)
        mine = [i for i, run in enumerate(runs) if run.pool not in self._context.elsewhere]
        lacking = self._lacking_elsewhere(runs, outcomes)
        offered = [
            i
            for i in mine
            if not self._is_state(runs[i])
            or (runs[i].span.start < lacking and self._can_follow_its_pages(runs[i], runs))
        ]
        answer = storage.batch_set_v2(self._transfers([runs[i] for i in offered])) if offered else {}
        # The answer has one list of outcomes per pool. The list begins with the outcomes of the pool's
        # first run, then come those of the second run, and so on. `read` is the number of outcomes, by
        # pool, that belong to earlier runs.
        read = dict.fromkeys(answer, 0)
        for i in offered:
            run = runs[i]
            start = read[run.pool]
            read[run.pool] += len(run.destinations)
            outcomes[i] = answer[run.pool][start : read[run.pool]]
        return outcomes

    def _ask(self, storage: HybridStorage, run: PageRun) -> list[Outcome]:
        """Return HIT for each object that another rank has written, and THROTTLED for the others."""
        keys = [self._chain.keys[page] for page in range(run.span.start, run.span.end)]
        there, _ = storage.holds({run.pool: keys})
        return [Outcome.HIT if stored else Outcome.THROTTLED for stored in there[run.pool]]

    def _lacking_elsewhere(self, runs: Sequence[PageRun], outcomes: Sequence[Sequence[Outcome]]) -> float:
        """Return the first page that another rank has not written yet; infinity if there is none."""
        lacking = (
            run.span.start + place
            for run, results in zip(runs, outcomes, strict=True)
            if run.pool in self._context.elsewhere and not self._is_state(run)
            for place, outcome in enumerate(results)
            if outcome not in TAKEN
        )
        return min(lacking, default=math.inf)

    def _is_state(self, run: PageRun) -> bool:
        return run.pool in self._context.index.state_pools

    def _can_follow_its_pages(self, state: PageRun, runs: Sequence[PageRun]) -> bool:
        """Return whether each refused page up to the end of this state is among `runs`, offered again."""
        spans = [run.span for run in runs if not self._is_state(run)]
        with_it = {page for span in spans for page in range(span.start, span.end)}
        # The loop runs over a copy of `refused`, because another write thread may change the set meanwhile.
        return not any(page <= state.span.start and page not in with_it for page in list(self._chain.refused))

    def _transfers(self, offered: Sequence[PageRun]) -> list[PoolTransfer]:
        """Return one transfer per pool, which joins the pool's runs in order."""
        transfers, keys = [], self._chain.keys
        for pool in dict.fromkeys(p.pool for p in offered):
            runs = [p for p in offered if p.pool is pool]
            at = np.concatenate([np.arange(p.span.start, p.span.end) for p in runs]).tolist()
            handles, known = np.concatenate([p.destinations for p in runs]), self._chain.values.get(pool, {})
            values = [known.get(keys[i]) for i in at]
            transfers.append(set_of(self._context, pool, keys, at, handles, values))
        return transfers

    def _land_stored(self, answer: _Answer) -> bool:
        """Record what storage took, and return whether the store did its work."""
        for run, outcomes in zip(answer.runs, answer.outcomes, strict=True):
            self._note(run, outcomes)
        for piece in answer.pieces:
            self._open.remove(piece)
        if self._agrees:
            self._is_called = False
            self._call()
        self._settle()
        return _is_well(answer.outcomes)

    def _settle(self) -> None:
        """Once the end of all pieces is known, offer what storage has not taken again after a pause.

        After the last retry, or if a call hung, the write ends.
        """
        if self._open or self._copying:
            return
        refused, self._refused = self._refused, []
        pause = next(self._pauses, None) if refused else None
        if pause is not None:
            again = Piece([], refused, is_on_host=True)
            self._open = [again]
            self._context.events.later(pause, partial(self._offer_again, again))
            return
        self._mark_storing(refused, False)
        for run in refused:
            self._give_up(run, "refused")
        self._share.give(self._blocks)
        self._finish()

    def _offer_again(self, piece: Piece) -> None:
        with self._lock:
            self._waiting.append(piece)
        self._call()

    def _lose(self, reason: Reason, begun: bool) -> None:
        """Give up a write that hangs.

        Its objects stay on the host, because the store may still read them. `flush` and `close` no longer
        wait for the write.
        """
        assert begun, "a patient call is lost only when it hangs"
        with self._lock:
            left, self._waiting = self._waiting, []
        for run in [*self._refused, *(run for piece in self._open for run in piece.stored)]:
            self._give_up(run, str(reason))
            if not self._is_state(run):
                self._chain.refused.update(range(run.span.start, run.span.end))
        self._is_lost, self._pauses = True, iter(())
        for piece in left:
            if piece.is_on_host:  # the others end when their copy does
                self._mark_storing(piece.stored, False)
                self._open.remove(piece)
        self._strand_if_lost()

    def _strand_if_lost(self) -> None:
        # While a copy is under way, other operations may wait for this one.
        if self._is_lost and self._open and not self._copying:
            self._context.in_flight.strand(self)

    def _note(self, run: PageRun, outcomes: Sequence[Outcome]) -> None:
        """Record the outcomes of one run in the index and the metrics; keep what storage did not take."""
        for part, there in run.cut(np.array([o in TAKEN for o in outcomes])):
            if there:
                self._mark_storing([part], False)
                part.note_stored(self._context.index, True)
                self._count_written(Tier.STORAGE, part)
            else:
                self._refused.append(part)
        for outcome, count in Counter(outcomes).items():
            self._context.metrics.increment("storage_sets_total", run.pool, outcome, by=count)

    def _count_written(self, tier: Tier, run: PageRun) -> None:
        count, nbytes = len(run.destinations), self._context.host[run.pool].geometry.nbytes
        self._context.metrics.increment("written_objects_total", str(tier), run.pool, by=count)
        self._context.metrics.increment("written_bytes_total", str(tier), run.pool, by=count * nbytes)

    def _give_up(self, run: PageRun, reason: str) -> None:
        if not self._is_lost:  # after a hang, everything was given up already
            is_final, count = not self._chain.stays_on_host, len(run.destinations)
            self._context.give_up(run.pool, reason, count, final=is_final)

    def _mark_storing(self, runs: Iterable[PageRun], storing: bool) -> None:
        for run in runs:
            self._context.in_flight.storing[run.pool][run.destinations] = storing


def _codes(pieces: list[Piece], runs: list[PageRun]) -> Codes:
    counts = [len(run.destinations) for run in runs]
    codes = outcome_codes(sum(counts))

    def unpack(found: Sequence[int]) -> _Answer:
        outcomes = iter(codes.unpack(found))
        return _Answer(pieces, runs, [[*islice(outcomes, count)] for count in counts])

    return Codes(codes.size, lambda answer: codes.pack([*chain(*answer.outcomes)]), unpack)


def _errors(runs: Iterable[PageRun]) -> list[Sequence[Outcome]]:
    return [[Outcome.ERROR] * len(run.destinations) for run in runs]


def _is_well(outcomes: Iterable[Sequence[Outcome]]) -> bool:
    """Return whether a store did its work: False if all outcomes are errors."""
    return any(outcome is not Outcome.ERROR for results in outcomes for outcome in results)


class UnitWrite(NamedTuple):
    """Answer to the attempt to write a unit."""

    blocks: int
    """Number of host blocks of the objects whose writes have begun."""
    needed: int
    """Number of host blocks of all the unit's objects that storage lacks."""
    is_over: bool
    """Whether nothing is left to begin; else the rest waits for room."""
