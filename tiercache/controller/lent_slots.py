"""Cache over slots that an engine lends: for engines that keep the slots of their requests themselves.

Such an engine makes no admissions. It matches and pins in the index, hands over what its requests have
computed, and asks for room when its own allocator, the `SlotSource` of a pool, runs out:

    slots of the tensors   =   free   +   used by requests   +   held by the index
                                  -- allocation -->    -- adopt -->
                               <---- release ------
                               <------------- make_room ------------
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.depths import deepest_on_device, near_depth
from tiercache.controller.operations import Load, PageRun, gather_runs
from tiercache.controller.prefetch import PrefetchTicket
from tiercache.controller.ranks.landings import Ends
from tiercache.controller.restore import Sources, count_restore, filling
from tiercache.controller.writes import Write
from tiercache.core import ABSENT, Locations, PoolName, Reason, Tier, TokenArray, as_tokens
from tiercache.errors import InputError, SlotError
from tiercache.index import HybridIndex, Inserted, Match, Node, Origin, Span
from tiercache.policy import CheckpointKind
from tiercache.transfer import Fence

Pages = Mapping[PoolName, Locations]
"""Slots of the pages from page 0 on, by pool: int64, shape [pages]."""
States = Mapping[int, Mapping[PoolName, int]]
"""Slot of each state, by depth and then by pool."""


class Taken(NamedTuple):
    """History of the slots that a request hands over."""

    checkpoints: Mapping[int, CheckpointKind] = {}
    """Reasons for the states, by depth in pages; END for those that are not named."""
    origin: Origin = Origin()
    """Answer of the index's `touch` for the request."""
    after: Node | None = None
    """Pinned node up to whose end the slots are the cache's own already."""


class LentLoad:
    """Copies to the device that bring one prefix."""

    def __init__(self, loads: Iterable[Load]) -> None:
        self._loads = list(loads)

    @property
    def done(self) -> bool:
        """Whether all copies have ended, and the index knows it."""
        return all(load.done for load in self._loads)

    @property
    def failed(self) -> bool:
        """Whether a copy has failed."""
        return any(load.ticket.error is not None for load in self._loads)

    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        """Return once all of `layer` is in its slots, as `Admission.wait_layer` does.

        Raises TransferError if the layer cannot be loaded.
        """
        for load in self._loads:
            load.ticket.wait_layer(layer, stream=stream)


class LentSlots:
    """Cache of a controller for an engine that keeps the slots of its requests itself (see the module).

    The caller guarantees what `HybridCacheController` says of commits. Thread safety: the owner's thread.
    """

    def __init__(
        self,
        context: ControllerContext,
        send: Callable[[Node, TokenArray, bytes, Iterable[int]], None],
        enter: Callable[..., None],
    ) -> None:
        """`send` is that of `WriteThrough`.

        `enter` raises ClosedError after a `close`, and applies events, except with `drain` False.
        """
        self._context = context
        self._send = send
        self._enter = enter

    @property
    def index(self) -> HybridIndex:
        """Index, in which the engine matches, touches, pins and extends paths, and changes nothing else."""
        return self._context.index

    def agree_by(self, least: Callable[[Ends], Ends]) -> None:
        """Keep this cache like those of other ranks, whose engines decide alike, each by its own cache.

        The ranks call everything alike; `adopt` and the controller's `tick` call `least` (see
        `AgreedLandings`). This is the first call of all. Each rank has its own objects in storage. Raises
        InputError for a controller that weighs loads by its own speeds.
        """
        if self._context.options.load_or_recompute:
            raise InputError("the speeds of ranks differ; make their controllers without load_or_recompute")
        self._context.agree_by(least)

    def now(self) -> float:
        """Return the time in seconds by which all ranks measure alike."""
        return self._context.clock()

    def adopt(
        self,
        tokens: Any,
        pages: Pages,
        states: States | None = None,
        extra: bytes = b"",
        *,
        taken: Taken = Taken(),  # noqa: B008 (immutable)
        fence: Fence | None = None,
    ) -> Inserted:
        """Take over slots that the engine has filled: those of leading pages of `tokens`, and of states.

        `states` has the slots by depth in tokens. The answer says what became of each slot: the cache owns
        what it has adopted, and everything else stays the engine's; none is `private`, because copies into
        the same pages are waited for. The device passes `fence` when it has finished writing the slots; None
        means that it has finished already. Write-through starts in the background.

        Raises SlotError or InputError, with nothing changed, for slots out of range and for depths that are
        not whole pages.
        """
        context = self._context
        self._enter()
        if fence is not None:
            context.engine.check_fences([fence])
        sequence = as_tokens(tokens)
        by_depth = states_by_page(states or {}, len(sequence), context.page_size)
        for pool, slots in _used(pages, by_depth):
            if pool not in context.device:
                raise InputError(f"there is no pool {pool} here; the pools are {', '.join(context.device)}")
            if not (type(slots) is int and 0 <= slots < context.device[pool].capacity):
                context.device[pool].checked(np.atleast_1d(np.asarray(slots)))
        if context.in_flight.count("load"):
            self._await_loads(sequence, extra)
        inserted = insert(context, sequence, pages, by_depth, extra, taken, fence)
        if context.has_host:
            depths = {*by_depth, 0 if taken.after is None else taken.after.end}
            self._send(inserted.node, sequence[: inserted.depth * context.page_size], extra, depths)
        return inserted

    def _await_loads(self, tokens: TokenArray, extra: bytes) -> None:
        """Wait until no copy to the device brings pages of this sequence, which takes milliseconds.

        Of a page that is on its way into another slot, nobody could say whose the request's slot is.
        """
        context, match = self._context, self.index.match(tokens, extra)
        for pool, at in self.index.locations(match, match.path_depth).pages.items():
            for load in filling(context, pool, at.device):
                load.ticket.wait()
                while context.landings is not None and not load.done:
                    context.agree()
        context.drain()

    @property
    def copies(self) -> int:
        """Number of copies from and to the device that have not ended, and hold slots."""
        return self._context.in_flight.count("load") + self._saves

    @property
    def is_saving(self) -> bool:
        """Whether a copy from the device has not ended."""
        return self._saves > 0

    @property
    def _saves(self) -> int:
        operations = self._context.in_flight.operations.values()
        return sum(isinstance(o, Write) and o.is_copying for o in operations)

    def device_depth(self, match: Match) -> int:
        """Return the deepest depth, in pages, that the device restores alone."""
        return deepest_on_device(self.index, match)

    def near_depth(self, match: Match, held: int) -> int:
        """Return the depth to restore from the host; `held`, which the engine has, if computing is faster."""
        return near_depth(self._context, match, held)

    def load(
        self,
        where: Node | Match,
        depth: int,
        given: Mapping[PoolName, Locations] | None = None,
        *,
        fence: Fence | None = None,
    ) -> LentLoad:
        """Begin to load what only the host has of pages [0, depth) of the path to `where`, and its state.

        The slots are `given`, by pool, one for each page and state that the device lacks; by default they
        come from the pools' sources, after evictions. They are the cache's from now on. The answer also waits
        for objects that an earlier load brings. The caller pins the path before it is used. The copies wait
        for `fence`, behind which the device no longer writes to slots that the engine has freed; None means
        that it writes to none.

        Raises PoolFullError or SlotError, with nothing changed, for too few slots.
        """
        self._enter(drain=False)
        context, index = self._context, self._context.index
        node = index.node_at(where, depth)
        with index.pinned(node, Tier.DEVICE, Tier.HOST):
            located = index.locations(node, depth)
            masks = {pool: at.device == ABSENT for pool, at in located.pages.items()}
            lacking = [pool for pool, one in located.states.items() if depth and one.device == ABSENT]
            need = {pool: int(np.count_nonzero(mask)) for pool, mask in masks.items()}
            need |= dict.fromkeys(lacking, 1)
            if given is None:
                given = context.allocator.take_device(need)
            elif any(len(given.get(pool, ())) != count for pool, count in need.items()):
                raise SlotError(f"the load needs exactly these numbers of slots: {need}")
            context.device_work.note(fence, given.items())
            loads = {load for pool, at in located.pages.items() for load in filling(context, pool, at.device)}
            for pool, one in located.states.items():
                loads.update(filling(context, pool, np.array([one.device])))
            runs = [
                run
                for pool, mask in masks.items()
                for run in gather_runs(pool, node, 0, located.pages[pool].host, mask, given[pool])
            ]
            last, states = Span(node, depth - 1, depth), located.states
            runs += [PageRun(pool, last, np.array([states[pool].host]), given[pool]) for pool in lacking]
            if runs:
                pin = index.pin(node, Tier.DEVICE, Tier.HOST)
                loads.add(Load(context, runs, [pin], context.allocator.free_device))
        return LentLoad(loads)

    def count(
        self, match: Match, tokens: int, own: int, depth: int, ticket: PrefetchTicket | None, why: Reason
    ) -> None:
        """Count what a request of `tokens` tokens got: `own` pages of the engine's, and loads up to `depth`.

        `match` is that of the request now, `ticket` the prefetch that it has waited for, and `why` the reason
        if the host has more.
        """
        sources, fetched = Sources(), {} if ticket is None else ticket.fetched
        for pool in self.index.page_pools:
            stored = int(np.count_nonzero(fetched[pool][own:depth])) if pool in fetched else 0
            sources.add(Tier.DEVICE, pool, own)
            sources.add(Tier.STORAGE, pool, stored)
            sources.add(Tier.HOST, pool, depth - own - stored)
        for pool in self.index.state_pools if depth else ():
            below = Tier.STORAGE if pool in fetched and fetched[pool][depth - 1] else Tier.HOST
            sources.add(Tier.DEVICE if depth == own else below, pool, 1)
        page_size = self._context.page_size
        located = self.index.locations(match, min(match.path_depth, (tokens - 1) // page_size)).pages
        held = {
            Tier.HOST: frozenset(pool for pool, at in located.items() if (at.host >= 0).any()),
            Tier.STORAGE: frozenset(pool for pool, at in located.items() if at.stored.any()),
        }
        reasons = {Tier.HOST: why} if depth < match.near_depth else {}
        if ticket is not None and (ticket.fetched or ticket.reason is not Reason.NONE):  # storage was asked
            reasons[Tier.STORAGE] = ticket.reason
        count_restore(self._context, sources, held, reasons, tokens, depth * page_size, own * page_size)

    def clear(self) -> None:
        """Evict all from device and host that nothing uses; what waits to be written begins no copy now."""
        self._enter(drain=False)
        for tier in (Tier.DEVICE, Tier.HOST):
            self._context.allocator.evict_all(tier)

    def make_room(self, need: Mapping[PoolName, int]) -> Mapping[PoolName, int]:
        """Evict up to `need[pool]` device objects of each pool, and give their slots to the pools' sources.

        Takes nothing that a pin or a copy uses. Returns the number of slots by pool. It is lower than asked
        for if too little can be evicted, and higher only if a unit with a state goes, whose pages are of no
        use without it. Raises InputError for an unknown pool.
        """
        self._enter(drain=False)
        # Events are applied only where they may help: they begin writes of what waits, which hold objects
        # that the engine has just counted as evictable.
        freed = self._context.allocator.make_room(need)
        if left := {p: n - freed.get(p, 0) for p, n in need.items() if n > freed.get(p, 0)}:
            self._context.drain()
            for pool, count in self._context.allocator.make_room(left).items():
                freed[pool] = freed.get(pool, 0) + count
        return freed


def branch_of(
    plan: Mapping[int, CheckpointKind], origin: Origin, restored: int, page_size: int, grid: int
) -> int | None:
    """Return the depth in tokens at which the next prefill should leave a state, if not at its end.

    The engine takes one state in each pass, at multiples of `grid` tokens. A place that two prompts have
    shared goes before one that the ghosts remember. Where the evicted prefix is a whole earlier prompt, the
    request goes on with that one, and the next will go on from the end of this. Without states, no place is
    planned.
    """
    for kind in (CheckpointKind.BRANCH, CheckpointKind.GHOST):
        for depth, why in plan.items():
            at = depth * page_size // grid * grid
            goes_on = why is CheckpointKind.GHOST and origin.lineage and depth == origin.known
            if why is kind and at > restored and not goes_on:
                return at
    return None


def states_by_page(states: States, tokens: int, page_size: int) -> dict[int, dict[PoolName, int]]:
    """Return the slots of states by depth in pages, given by depth in tokens.

    Raises InputError for a depth that is not whole pages of the `tokens` tokens.
    """
    for depth in states:
        if depth % page_size or not 0 < depth <= tokens:
            raise InputError(
                f"a state at {depth} tokens cannot be committed; use multiples of {page_size} up to the"
                f" {tokens} tokens given"
            )
    return {depth // page_size: dict(slots) for depth, slots in states.items()}


def insert(
    context: ControllerContext,
    tokens: TokenArray,
    pages: Pages,
    states: States,
    extra: bytes,
    taken: Taken,
    fence: Fence | None,
) -> Inserted:
    """Enter slots into the index, which the device may use until it passes `fence`; depths are in pages."""
    context.device_work.note(fence, () if fence is None else _used(pages, states))
    return context.index.insert(
        tokens, pages, states, extra, checkpoints=taken.checkpoints, origin=taken.origin, after=taken.after
    )


def _used(pages: Pages, states: States) -> list[tuple[PoolName, Locations | int]]:
    """Return each pool with its slots of pages, and with its slot of each state."""
    return [*pages.items(), *(pair for slots in states.values() for pair in slots.items())]
