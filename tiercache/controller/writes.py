"""Writes from device to host and on to storage, which a commit starts in the background."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.operations import Operation, PageRun
from tiercache.controller.store_calls import StoreCall
from tiercache.core import HitPolicy, Outcome, PoolName, PoolTransfer, Reason, Tier
from tiercache.errors import TransferError
from tiercache.index import Pin
from tiercache.transfer import Ticket

_log = logging.getLogger(__name__)

_TAKEN: Final = (Outcome.STORED, Outcome.HIT)
"""Outcomes of a set that show that the object is in storage."""
_FIRST_PAUSE_S: Final = 0.1
"""Seconds before the first retry of objects that a busy or failed store did not take."""
_PAUSE_GROWTH: Final = 4
"""Factor from one pause before a retry to the next: 0.1 s, 0.4 s, 1.6 s."""


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


class Write(Operation):
    """Background write from device to host to storage.

    First, `runs` are copied from device to host. Then `runs` and `held` are written to storage, unless
    `host_only` is set. The objects of `held` are on the host already; their destinations are the handles.

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
        *,
        device_pins: Iterable[Pin],
        host_pins: Iterable[Pin],
        host_only: bool = False,
    ) -> None:
        super().__init__(context, runs, host_pins)
        self._device_pins = list(device_pins)
        self._blocks = sum(run.blocks(context) for run in (*runs, *held))
        self._share = context.in_flight.copying if host_only else context.in_flight.writing
        self._share.take(self._blocks)
        self._stored = [] if host_only else [*runs, *held]
        self._chain = chain
        self._pauses = (_FIRST_PAUSE_S * _PAUSE_GROWTH**i for i in range(context.options.write_retries))
        self._mark_storing(True)
        self._reserve()
        # Some pages may come from another request, whose work in another stream has not written them yet.
        after = context.device_work.fences((p.pool, p.sources) for p in runs)
        try:
            ticket = context.engine.store([p.units() for p in runs], after=after)
        except Exception as error:  # noqa: BLE001
            # an engine may raise any exception; the copy then counts as failed
            ticket = Ticket()
            ticket.finish(TransferError(f"the copy could not begin: {error}"))
        ticket.add_done_callback(self._background_copied)

    @property
    def pins(self) -> list[Pin]:  # noqa: D102
        return [*self._pins, *self._device_pins]

    @property
    def objects(self) -> int:
        """Number of objects that storage has not taken yet."""
        return sum(len(run.destinations) for run in self._stored)

    @property
    def stays_on_host(self) -> bool:
        """Whether a later flush finds the objects on the host if this write fails."""
        return self._chain.stays_on_host

    def _background_copied(self, ticket: Ticket) -> None:
        # A thread of the transfer engine runs this method. The storage write is submitted here, because the
        # owner's thread may be busy with a forward pass for a long time. `_land_copied` is posted first, so
        # that the owner publishes the host objects before the result of the storage write is applied.
        self._context.events.post(partial(self._land_copied, ticket.error))
        if ticket.error is None and self._stored:
            self._context.writes.submit(self._call())
        else:
            self._context.events.post(self._end)

    def _land_copied(self, error: TransferError | None) -> None:
        metrics, copied = self._context.metrics, error is None
        if not copied:
            _log.warning("a copy to the host failed, its write-through is skipped: %s", error)
            # The marks are cleared before the handles are freed: the next write may mark the same handles.
            self._mark_storing(False)
            for run in self._stored or self.runs:
                self._give_up(run, "transfer_failed")
            self._stored = []
        for run in self.runs:
            if copied:
                self._publish(run)
                metrics.increment("written_objects_total", "host", run.pool, by=len(run.destinations))
            else:
                self._cancel(run)
                self._context.allocator.free_host(run.pool, run.destinations)
        for pin in self._device_pins:
            pin.release()
        self._device_pins.clear()

    def _call(self) -> StoreCall:
        objects = sum(len(run.destinations) for run in self._stored)
        return StoreCall(
            self._background_store,
            landed=self._land_stored,
            lost=self._lose,
            late=self._land_late,
            patient=True,
            objects=objects,
        )

    def _background_store(self) -> list[Sequence[Outcome]]:
        """Offer all objects in one call, so that storage can write each state after its pages.

        Returns the outcomes of each run in `_stored`, one outcome per object. A state that is held back has
        the outcome THROTTLED, so that it is offered again.
        """
        storage, chain = self._context.storage, self._chain
        assert storage is not None
        outcomes: list[Sequence[Outcome]] = [
            [Outcome.THROTTLED] * len(run.destinations) for run in self._stored
        ]
        offered = [
            i
            for i, run in enumerate(self._stored)
            if not self._is_state(run) or self._can_follow_its_pages(run)
        ]
        try:
            answer = (
                storage.batch_set_v2(self._transfers([self._stored[i] for i in offered])) if offered else {}
            )
            # The answer has one list of outcomes per pool. The list begins with the outcomes of the pool's
            # first run, then come those of the second run, and so on. `read` is the number of outcomes, by
            # pool, that belong to earlier runs.
            read = dict.fromkeys(answer, 0)
            for i in offered:
                run = self._stored[i]
                start = read[run.pool]
                read[run.pool] += len(run.destinations)
                outcomes[i] = answer[run.pool][start : read[run.pool]]
        except Exception:  # noqa: BLE001
            # an exception breaks the store's contract; only this write fails, and counts as ERROR below
            _log.exception("writing to storage failed")
            outcomes = [[Outcome.ERROR] * len(run.destinations) for run in self._stored]
        for run, results in zip(self._stored, outcomes, strict=True):
            if not self._is_state(run):
                pages = range(run.span.start, run.span.end)
                chain.refused.difference_update(pages)
                chain.refused.update(
                    page for page, outcome in zip(pages, results, strict=True) if outcome not in _TAKEN
                )
        return outcomes

    def _is_state(self, run: PageRun) -> bool:
        return run.pool in self._context.index.state_pools

    def _can_follow_its_pages(self, state: PageRun) -> bool:
        """Return whether each refused page up to the end of this state is offered again in the same call."""
        with_it = {
            page
            for run in self._stored
            if not self._is_state(run)
            for page in range(run.span.start, run.span.end)
        }
        # The loop runs over a copy of `refused`, because another write thread may change the set meanwhile.
        return not any(page <= state.span.start and page not in with_it for page in list(self._chain.refused))

    def _transfers(self, offered: Sequence[PageRun]) -> list[PoolTransfer]:
        """Return one transfer per pool, which joins the pool's runs in order."""
        transfers, keys = [], self._chain.keys
        for pool in dict.fromkeys(p.pool for p in offered):
            runs = [p for p in offered if p.pool is pool]
            at = np.concatenate([np.arange(p.span.start, p.span.end) for p in runs]).tolist()
            values = self._chain.values.get(pool, {})
            transfers.append(
                PoolTransfer(
                    pool,
                    keys=[keys[i] for i in at],
                    handles=np.concatenate([p.destinations for p in runs]),
                    hit_policy=HitPolicy.TRAILING_PAGES if self._is_state(runs[0]) else HitPolicy.ALL_PAGES,
                    depths=[i + 1 for i in at],
                    parents=[keys[i - 1] if i else b"" for i in at],
                    values=[values.get(keys[i]) for i in at],
                )
            )
        return transfers

    def _land_stored(self, outcomes: Sequence[Sequence[Outcome]]) -> bool:
        """Record what storage took, and offer the other objects again after a pause.

        After the last retry, the other objects are given up. Returns whether the store did its work: False if
        all outcomes are errors.
        """
        refused = self._note(outcomes)
        self._mark_storing(False)
        self._stored = refused
        pause = next(self._pauses, None) if refused else None
        if pause is not None:
            self._mark_storing(True)
            self._context.events.later(pause, lambda: self._context.writes.submit(self._call()))
        else:
            for run in refused:
                self._give_up(run, "refused")
            self._end()
        return any(outcome is not Outcome.ERROR for results in outcomes for outcome in results)

    def _lose(self, reason: Reason, begun: bool) -> None:
        """Give up a write that hangs.

        Its objects stay on the host, because the store may still read them. `flush` and `close` no longer
        wait for the write.
        """
        assert begun, "a patient call is lost only when it hangs"
        for run in self._stored:
            self._give_up(run, str(reason))
            if not self._is_state(run):
                self._chain.refused.update(range(run.span.start, run.span.end))
        self._context.in_flight.strand(self)

    def _land_late(self, outcomes: Sequence[Sequence[Outcome]]) -> None:
        self._note(outcomes)
        self._mark_storing(False)
        self._end()

    def _note(self, outcomes: Sequence[Sequence[Outcome]]) -> list[PageRun]:
        """Record the outcomes in the index and the metrics; return the runs that storage did not take."""
        refused: list[PageRun] = []
        for run, results in zip(self._stored, outcomes, strict=True):
            for part, there in run.cut(np.array([o in _TAKEN for o in results])):
                if there:
                    part.note_stored(self._context.index, True)
                    self._context.metrics.increment(
                        "written_objects_total", "storage", part.pool, by=len(part.destinations)
                    )
                    self._context.stored += len(part.destinations)
                else:
                    refused.append(part)
            for outcome, count in Counter(results).items():
                self._context.metrics.increment("storage_sets_total", run.pool, outcome, by=count)
        return refused

    def _give_up(self, run: PageRun, reason: str) -> None:
        self._context.give_up(run.pool, reason, len(run.destinations), final=not self.stays_on_host)

    def _end(self) -> None:
        self._share.give(self._blocks)
        self._finish()

    def _mark_storing(self, storing: bool) -> None:
        for run in self._stored:
            self._context.in_flight.storing[run.pool][run.destinations] = storing
