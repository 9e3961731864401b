"""Cache of an engine that keeps its blocks: what requests find, load into lent blocks, and leave there.

The engine keeps the blocks. The device tier of the index is empty between steps: it has the blocks of a step
while they are copied to the host, and those of a load until it has ended. Whatever goes wrong costs hits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, RLock, Thread
from typing import Final, NamedTuple

import numpy as np

from tiercache.controller import HybridCacheController
from tiercache.controller.lent_slots import LentLoad, Taken
from tiercache.controller.prefetch import PrefetchTicket
from tiercache.core import ABSENT, Locations, PoolName, Reason, Tier, TokenArray
from tiercache.errors import TierCacheError
from tiercache.index import Node, Origin, Pin
from tiercache.integrations.vllm_connector.blocks import BlockPool, WindowPool
from tiercache.metrics import CONTROLLER
from tiercache.metrics.instruments import Counter
from tiercache.policy import CheckpointKind
from tiercache.transfer import Fence

_log = logging.getLogger(__name__)

_TICK_S: Final = 0.05
"""Seconds between two looks at what is under way in the background."""
_IDLE_S: Final = 1.0
"""Seconds between two looks when nothing is under way."""
COUNTED: Final = [row for row in CONTROLLER if row.kind is Counter and not row.name.startswith("events_")]
"""Metrics that the engine exports."""
Fencing = Callable[[], Fence | None]
"""Function that returns a point of the device's work for which copies have to wait; None for no wait."""
Blocks = Mapping[PoolName, Locations]
"""Blocks of the engine by pool: int64, shape [groups, objects]."""


class Ask(NamedTuple):
    """Question of an engine, how many pages of a prompt a request can have."""

    number: int
    """Number that the answer refers to."""
    request: str
    tokens: TokenArray
    extra: bytes
    begin: int
    """Number of leading pages that the engine has itself."""
    limit: int
    """Number of pages, at most, that are of use."""


class BlockSave(NamedTuple):
    """Whole pages and states that a request has computed by the end of a step."""

    request: str
    begin: int
    """Number of leading pages of which an earlier save has told."""
    tokens: TokenArray
    """Tokens of the pages from there on."""
    extra: bytes
    pages: Locations
    """Blocks of the pages from there on: shape [groups, pages]."""
    states: Mapping[int, Locations]
    """Blocks of recurrent states by depth in tokens: shape [groups, 1]."""
    windows: Locations = np.zeros((0, 0), np.int64)
    """Blocks of groups with a window, as `pages`; 0 for pages that have left it."""
    is_last: bool = False
    """Whether the request is over."""

    def after(self, before: BlockSave) -> BlockSave:
        """Return the save of all pages from the first one on; `before` has those of the earlier saves."""
        tokens = np.concatenate([before.tokens, self.tokens])
        pages, windows = (
            np.concatenate(rows, axis=1)
            for rows in ((before.pages, self.pages), (before.windows, self.windows))
        )
        return self._replace(begin=0, tokens=tokens, pages=pages, windows=windows)


class BlockLoad(NamedTuple):
    """Restore of a prefix into blocks that the engine has given to a request."""

    request: str
    tokens: TokenArray
    extra: bytes
    begin: int
    """Number of leading pages that the engine has in these blocks already."""
    depth: int
    """Number of pages to restore, those included."""
    tables: Blocks
    """Blocks of the request from its begin on, each state at the last of its pages; 0 stands for none."""


@dataclass(slots=True, eq=False)
class _Running:
    """Load that has been told of."""

    load: BlockLoad
    pin: Pin | None
    copies: LentLoad | None = None
    """Copies; None if they cannot begin."""


@dataclass(slots=True, eq=False)
class _Search:
    """Search of a waiting request, and what the request has been promised."""

    tokens: TokenArray
    extra: bytes
    origin: Origin
    known: int
    """Depth, in pages, that has been counted as a hit."""
    until: float | None = None
    """Time of the clock after which the request waits no longer for storage; None before it waits."""
    plan: Mapping[int, CheckpointKind] = field(default_factory=dict)
    """Depths, in pages, at which others may begin, or this prompt again."""
    ticket: PrefetchTicket | None = None
    begin: int = 0
    depth: int = 0
    pin: Pin | None = None
    is_counted: bool = False
    taken: int = 0
    """Depth, in pages, of the last state of the windows that was saved."""

    def history(self, depths: Iterable[int]) -> Taken:
        """Return the history of states at these depths, in pages."""
        end = max(self.plan, default=0)
        others = {depth: CheckpointKind.INTERVAL for depth in depths if depth < end}
        return Taken(others | {**self.plan}, self.origin)

    def release(self) -> None:
        """Promise nothing any more."""
        if self.pin is not None:
            self.pin.release()
        self.pin, self.depth = None, 0


class EngineCache:
    """Cache of one engine, over `pools` of the engine's blocks; owns the controller.

    `find` says what a request can have, or `ask` and then `answers`. If the engine has blocks for what was
    promised, it gives them to `load`; `ended` says when that is over. Otherwise it calls `decline`. `save` is
    called while the blocks have what the step has computed, and `forget` when the request is over.

    Thread safety: any thread.
    """

    def __init__(
        self,
        controller: HybridCacheController,
        pools: Mapping[PoolName, BlockPool],
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience`: seconds that a request may wait for storage."""
        self.page_size = controller.page_size
        self._controller, self._lent, self._index = controller, controller.lent, controller.lent.index
        self._pools = pools
        windows = pools.get(PoolName.SWA)
        self._windows = windows if isinstance(windows, WindowPool) else None
        self._patience = patience
        self._clock = clock
        self._searches: dict[str, _Search] = {}
        self._asks: dict[str, Ask] = {}
        """Questions without an answer."""
        self._loads: dict[str, _Running] = {}
        self._saves: dict[str, BlockSave] = {}
        """All that has been told of each request's pages."""
        self._failed: set[str] = set()
        """Requests of which a load has failed, and which therefore compute everything."""
        self._counted: dict[str, float] = {}
        self._next_count = clock()
        self._lock = RLock()
        self._stop = Event()
        self._thread = Thread(target=self._background, name="tiercache-idle", daemon=True)
        self._thread.start()

    def _background(self) -> None:
        """Apply what has happened while the engine is idle, and calls nothing; writes go on by that."""
        busy = True
        while not self._stop.wait(_TICK_S if busy else _IDLE_S):
            try:
                with self._lock:
                    if not self._stop.is_set():
                        busy = self._controller.tick()
            except Exception:  # noqa: BLE001  the thread must not end
                busy = False
                _log.exception("tiercache: what has happened in the background could not be noted")

    def find(self, ask: Ask) -> int | None:
        """Return how many pages a request can have, of which the engine has `begin`; None: ask again.

        The promise holds until `load`, `decline` or `forget`, or the next answer.
        """
        request, tokens, extra, begin = ask.request, ask.tokens, ask.extra, ask.begin
        with self._lock:
            if request in self._failed:
                return begin
            self._controller.tick()
            search = self._search(request, tokens, extra)
            search.release()
            search.begin = begin
            if begin >= ask.limit:
                return begin
            if search.ticket is None:
                search.ticket = self._controller.prefetch(tokens[:-1], extra)
            if search.until is None:
                search.until = self._clock() + self._patience
            if not search.ticket.done and self._clock() < search.until:
                return None
            if not search.ticket.done:
                search.ticket.cancel()
                search.ticket.reason = Reason.TIMEOUT
            match = self._index.match(tokens, extra)
            if match.depth > search.known:  # in the store, which had not answered at the first look
                search.origin, search.known = self._index.touch(match, tokens), match.depth
            useful = self._index.match(tokens, extra, limit=ask.limit)
            depth = self._lent.near_depth(useful, begin)
            search.plan = self._index.plan_checkpoints(match, tokens, depth).depths
            if depth <= begin:
                return begin
            search.depth = depth
            search.pin = self._index.pin(self._index.node_at(useful, depth), Tier.HOST)
            return depth

    def ask(self, ask: Ask) -> None:
        """Take a question, to which `answers` will have the answer of `find`, once."""
        with self._lock:
            self._asks[ask.request] = ask

    def answers(self) -> list[tuple[str, int, int]]:
        """Return the request, the question's number and the depth of each question that can be answered."""
        with self._lock:
            found = [(ask, self.find(ask)) for ask in list(self._asks.values())]
            told = [(ask.request, ask.number, depth) for ask, depth in found if depth is not None]
            for request, _, _ in told:
                del self._asks[request]
            return told

    def expect(self, request: str, tokens: TokenArray, extra: bytes) -> None:
        """Begin the search of a request that the engine lets wait behind others."""
        with self._lock:
            search = self._search(request, tokens, extra)
            if search.ticket is None:
                search.ticket = self._controller.prefetch(tokens[:-1], extra)

    def _search(self, request: str, tokens: TokenArray, extra: bytes) -> _Search:
        """Return the search of a request; the first call counts a hit, also one in the engine's own cache."""
        if request not in self._searches:
            match = self._index.match(tokens, extra)
            plan = self._index.plan_checkpoints(match, tokens, match.near_depth).depths
            origin = self._index.touch(match, tokens)
            self._searches[request] = _Search(tokens, extra, origin, match.depth, plan=plan)
        return self._searches[request]

    def note_pass(self, computed: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record that a pass of the model, which took `seconds`, has computed these ranges of tokens."""
        with self._lock:
            self._controller.note_pass(computed, seconds)

    def decline(self, request: str) -> None:
        """End the promise to a request, which computes all that the engine does not have itself."""
        with self._lock:
            if request in self._searches:
                self._searches[request].release()
                self._count(request, self._searches[request].begin, self._searches[request].begin)

    def _count(self, request: str, own: int, depth: int, why: Reason = Reason.NOT_WORTH) -> None:
        """Count once what a request has got, as `LentSlots.count` does."""
        search = self._searches.get(request)
        if search is not None and not search.is_counted:
            search.is_counted = True
            match = self._index.match(search.tokens, search.extra)
            self._lent.count(match, len(search.tokens), own, depth, search.ticket, why)

    def counted(self) -> dict[str, float]:
        """Return what has been counted since the last answer, by metric and labels, joined by `|`.

        An answer comes once a second at most, and is empty before. The first one has all, also zeros.
        """
        if (now := self._clock()) < self._next_count:
            return {}
        self._next_count, before = now + 1.0, self._counted
        self._counted = {
            "|".join((row.name, *sample.labels.values())): sample.value
            for row in COUNTED
            for sample in self._controller.metrics.samples(row)
        }
        return {
            key: value - before.get(key, 0.0)
            for key, value in self._counted.items()
            if value != before.get(key)
        }

    def load(self, load: BlockLoad, fence: Fencing = lambda: None) -> None:
        """Begin a load; `ended` tells how it went, also if this raises. The copies wait for `fence`."""
        with self._lock:
            search = self._searches.get(load.request)
            pin = None if search is None else search.pin
            running = self._loads[load.request] = _Running(load, pin)
            if search is None or pin is None:
                return
            search.pin = None
            # With states, no other depth than the promised one can be restored.
            is_part = load.depth < search.depth and self._pools.keys() == {PoolName.KV}
            if not (load.depth == search.depth or is_part):
                return
            blocks = {pool: self._given(pool, load) for pool in self._pools}
            given = {pool: at for pool, at in blocks.items() if at is not None}
            if given.keys() == blocks.keys():
                running.copies = self._copies(load, given, fence())

    def _given(self, pool: PoolName, load: BlockLoad) -> Locations | None:
        """Return the blocks of a request into which a pool's objects go; None if one is missing."""
        table = load.tables.get(pool)
        if table is None or table.shape[1] < load.depth:
            return None
        if pool is PoolName.SWA:
            assert self._windows is not None
            return self._windows.seen(table, load.depth, load.begin)
        first = load.depth - 1 if pool is PoolName.MAMBA else 0
        blocks = table[:, first : load.depth]
        return blocks if blocks.all() else None

    def _copies(self, load: BlockLoad, blocks: Blocks, fence: Fence | None) -> LentLoad | None:
        """Begin the copies of a load; None if the index has other pages than were promised."""
        kv = blocks.get(PoolName.KV)
        if load.begin and kv is not None:  # what the engine has is not written to
            known = load.tokens[: load.begin * self.page_size]
            self._adopt(known, load.extra, kv[:, : load.begin], {}, Taken(), fence)
        match = self._index.match(load.tokens, load.extra)
        if match.path_depth < load.depth:
            return None
        lacking = np.arange(load.depth) >= load.begin
        if kv is not None:
            here = self._index.locations(match, load.depth).pages[PoolName.KV].device
            if (here[lacking] != ABSENT).any() or (here[~lacking] < 0).any():
                return None
        given: dict[PoolName, Locations] = {}
        try:
            for pool, at in blocks.items():
                given[pool] = self._pools[pool].lend(at[:, lacking] if pool is PoolName.KV else at)
            return self._lent.load(match, load.depth, given, fence=fence)
        except BaseException:
            for pool, slots in given.items():
                self._pools[pool].free(slots)
            raise

    def ended(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended since the last call, and which of them have failed."""
        with self._lock:
            self._controller.tick()
            done = {
                name: running
                for name, running in self._loads.items()
                if (running.copies is None or running.copies.done)
                and not (running.load.begin and self._lent.is_saving)  # of what the engine had
            }
            failed = {name for name, one in done.items() if one.copies is None or one.copies.failed}
            for name, running in done.items():
                if running.pin is not None:
                    running.pin.release()
                if name in failed:  # all is computed
                    self._controller.metrics.increment("restore_failures_total", Reason.IO_ERROR)
                    self._count(name, 0, 0, Reason.IO_ERROR)
                self._count(name, running.load.begin, running.load.depth)
                del self._loads[name]
            if done:  # from now on the engine has these pages itself
                self._controller.evict(Tier.DEVICE)
            self._failed |= failed & self._searches.keys()
            return set(done), failed

    def save(self, saves: Sequence[BlockSave], fence: Fencing = lambda: None) -> None:
        """Copy what the host lacks of pages and states, and return when others may have the blocks.

        The copies wait for `fence`. What has been copied is written to the store in the background.
        """
        with self._lock:
            try:
                point = fence()
                for told in saves:
                    self._save(told, point)
            finally:  # whatever has failed, no copy reads a block that others have
                while self._lent.is_saving:  # loads go on
                    self._controller.tick(_TICK_S)
                self._controller.evict(Tier.DEVICE)
                for told in saves:
                    if told.is_last:
                        self.forget(told.request)

    def _save(self, told: BlockSave, fence: Fence | None) -> None:
        before = self._saves.get(told.request)
        if told.begin and (before is None or before.pages.shape[1] != told.begin):
            return  # a save before it has failed
        save = told if before is None or not told.begin else told.after(before)
        self._saves[told.request] = save
        search = self._searches.get(save.request)
        states = self._states(save, search)
        if not states and PoolName.KV not in self._pools:
            return
        depths = (depth // self.page_size for depth in states)
        taken = Taken() if search is None else search.history(depths)
        with self._held(save) as after:
            taken = taken._replace(after=after)
            self._adopt(save.tokens, save.extra, save.pages, states, taken, fence)

    @contextmanager
    def _held(self, save: BlockSave) -> Iterator[Node | None]:
        """Yield the end of the leading pages that the host has, pinned; None if it lacks the first."""
        match, count = self._index.match(save.tokens, save.extra), 0
        if PoolName.KV in self._pools and match.on_host:
            at = self._index.locations(match, min(match.path_depth, save.pages.shape[1])).pages[PoolName.KV]
            lacking = np.flatnonzero(at.host < 0)
            count = int(lacking[0]) if len(lacking) else len(at.host)
        if not count:
            yield None
            return
        node = self._index.extend_path(save.tokens, count, save.extra)
        with self._index.pinned(node, Tier.HOST):
            yield node

    def _states(self, save: BlockSave, search: _Search | None) -> dict[int, Mapping[PoolName, Locations]]:
        """Return the blocks of the states to save, by depth in tokens.

        A recurrent state is where the engine has taken it. Windows move on with each page; they are taken
        where others may begin, and else once they have nothing in common with the last that was taken.
        """
        found = {depth: {PoolName.MAMBA: at} for depth, at in save.states.items()}
        if self._windows is None:
            return dict(found)
        if search is not None and PoolName.MAMBA not in self._pools:
            end = len(save.tokens) // self.page_size
            due = {depth for depth in search.plan if search.taken < depth <= end}
            if end - max(due, default=search.taken) >= self._windows.reach:
                due.add(end)
            search.taken = max(due, default=search.taken)
            found = {depth * self.page_size: {} for depth in due}
        seen = {depth: self._windows.seen(save.windows, depth // self.page_size) for depth in found}
        return {depth: found[depth] | {PoolName.SWA: at} for depth, at in seen.items() if at is not None}

    def _adopt(
        self,
        tokens: TokenArray,
        extra: bytes,
        pages: Locations,
        states: Mapping[int, Mapping[PoolName, Locations]],
        taken: Taken,
        fence: Fence | None,
    ) -> None:
        """Enter the blocks behind `taken.after` into the index, unless there are too few slots for them."""
        held = 0 if taken.after is None else taken.after.end
        if min(pool.available for pool in self._pools.values()) < pages.shape[1] - held + len(states):
            return
        slots = {}
        if PoolName.KV in self._pools:
            lent = self._pools[PoolName.KV].lend(pages[:, held:])
            slots[PoolName.KV] = np.concatenate([np.zeros(held, np.int64), lent])
        by_depth = {
            depth: {pool: int(self._pools[pool].lend(at)[0]) for pool, at in kinds.items()}
            for depth, kinds in states.items()
        }
        made = self._lent.adopt(tokens, slots, by_depth, extra, taken=taken, fence=fence)
        for pool, at in slots.items():
            self._pools[pool].free(at[made.start :][~made.pages[pool].adopted])
        for state in made.rejected_states:
            self._pools[state.pool].free(np.array([state.slot]))

    def forget(self, request: str) -> None:
        """End everything for a request that is over, but a load, which goes on to its end."""
        with self._lock:
            self._failed.discard(request)
            self._asks.pop(request, None)
            self._saves.pop(request, None)
            search = self._searches.pop(request, None)
            if search is not None:
                if search.ticket is not None:
                    search.ticket.cancel()
                search.release()

    def keep(
        self, tokens: TokenArray, prompt: int, extra: bytes, pin: float | None, expected_in: float | None
    ) -> None:
        """Follow hints of a request that is over, in seconds.

        `pin`: the host keeps the first `prompt` tokens so long; 0 ends that. `expected_in`: a prompt that
        goes on with `tokens` will come. What has no effect is logged.
        """
        with self._lock:
            try:
                if pin:
                    self._controller.pin(tokens[:prompt], pin, extra)
                elif pin is not None:
                    self._controller.unpin(tokens[:prompt], extra)
                if expected_in:
                    self._controller.hint(tokens, expected_in, extra)
            except TierCacheError as error:
                _log.info("tiercache: hints of a request have no effect: %s", error)

    def reset(self) -> bool:
        """Empty the host, and leave the store; return whether nothing was under way, and all is gone."""
        with self._lock:
            busy = self._controller.tick()
            self._controller.evict(Tier.DEVICE)
            self._controller.evict(Tier.HOST)
            return not busy

    def close(self) -> None:
        """Write what is left, and close the controller; a second call does nothing."""
        self._stop.set()
        with self._lock:
            for request in list(self._searches):
                self.forget(request)
            self._controller.close()
