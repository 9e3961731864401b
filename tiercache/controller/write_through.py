"""Write-through: which objects a commit sends down, the operations that carry them, and the commits that wait for their turn."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np

from tiercache.controller.operations import PART_BYTES, Chain, Piece, Write, gather_pieces
from tiercache.controller.state import ControllerState
from tiercache.core import ABSENT, Locations, Mask, PoolName, Tier, TokenArray, pending
from tiercache.errors import PoolFullError
from tiercache.index import Node, PageLocations, Span

_MOST_WAITING: Final = 256
"""Most commits that may wait for their turn at a time. Each keeps its tokens, at eight bytes per token."""


@dataclass(frozen=True, slots=True)
class _State:
    """A state that is to be written down, and where it is now."""

    pool: PoolName
    node: Node
    location: int
    held: bool
    """Whether it is on the host already; `location` is a host handle then, and a device slot otherwise."""

    @property
    def page(self) -> int:
        return self.node.end - 1

    def piece(self, handle: int) -> Piece:
        return Piece(self.pool, Span(self.node, self.page, self.page + 1), np.array([self.location]), np.array([handle]))


class _Plan:
    """Plan of a path's objects that storage lacks, in the order in which they go there: pages from the start, states behind their page.

    Page i is position 2i, the states that end with it are position 2i + 1; the plan begins at position `at`.
    """

    def __init__(self, state: ControllerState, node: Node, depth: int, state_depths: Iterable[int], at: int) -> None:
        self.at = at = min(at, 2 * depth)
        """First position for which no write has begun."""
        self.is_full = False
        """Whether the host had no room for the next objects."""
        self._state = state
        self._node = node
        self._depth = depth
        self.located = state.index.locations(node, depth).pages
        self.copies: dict[PoolName, Mask] = {}
        self.held: dict[PoolName, Mask] = {}
        self.coming: dict[PoolName, Mask] = {}
        """Pages that are on their way to the host but not to storage. The plan ends before the first of them."""
        self._coming_states: list[PoolName] = []
        self._end = 2 * depth
        self.gone: Counter[PoolName] = Counter()
        """Number of objects from position `at` on that no tier has, by pool."""
        self.states: list[_State] = []
        self._stored: list[_State] = []
        """States that storage and the device have, and the host does not."""
        for pool, where in self.located.items():
            near = where.device >= 0
            self.copies[pool] = ~where.stored & near & (where.host == ABSENT)
            self.held[pool] = self._idle(pool, where)
            self.coming[pool] = coming = ~where.stored & (where.host < ABSENT)
            coming[coming] = ~state.storing[pool][pending(where.host[coming])]
            if coming.any():
                self._end = min(self._end, 2 * int(coming.argmax()))
            lost = ~where.stored & (where.device == ABSENT) & (where.host == ABSENT)
            self.gone[pool] = int(np.count_nonzero(lost[(at + 1) // 2 :]))
        for end in sorted(state_depths):
            if 2 * end <= at:
                continue
            if end <= depth and (ending := state.index.node_at(node, end)).end == end:
                self.states += self._states_of(ending)
            else:
                self.gone.update(state.index.state_pools)
        self._costs = self._sum_up()

    def _idle(self, pool: PoolName, at: PageLocations) -> Mask:
        """Return which pages the host has, storage lacks, and no write is storing."""
        if self._state.storage is None:
            return np.zeros(len(at.host), np.bool_)
        return ~at.stored & (at.host >= 0) & ~self._state.storing[pool][np.maximum(at.host, 0)]

    def _states_of(self, node: Node) -> list[_State]:
        found = []
        state = self._state
        for number, pool in enumerate(state.index.state_pools):
            device, host = node.state(Tier.DEVICE, number), node.state(Tier.HOST, number)
            if node.state(Tier.STORAGE, number) != ABSENT:
                if device >= 0 and host == ABSENT:
                    self._stored.append(_State(pool, node, device, held=False))
            elif device >= 0 and host == ABSENT and not self._is_worth_loading(node, pool):
                state.metrics.increment("write_through_skipped_total", pool, "cheap_to_recompute")
            elif device >= 0 and host == ABSENT:
                found.append(_State(pool, node, device, held=False))
            elif host >= 0 and state.storage is not None and not state.storing[pool][host]:
                found.append(_State(pool, node, host, held=True))
            elif device == host == ABSENT:
                self.gone[pool] += 1
            elif host < ABSENT and not state.storing[pool][pending(np.array([host]))[0]]:
                self._coming_states.append(pool)
                self._end = min(self._end, 2 * node.end - 1)
        return found

    def _is_worth_loading(self, node: Node, pool: PoolName) -> bool:
        """Whether computing the state again, from the nearest restorable depth above it, would take at least as long as loading it."""
        state = self._state
        load = state.options.load_flops_per_byte * state.host[pool].geometry.nbytes
        end = node.end * state.page_size
        return not load or state.profile.flops(end - node.replay * state.page_size, end) >= load

    def _sum_up(self) -> Locations:
        """Return, for each position, the host blocks of all objects that go before it; shape (2 * depth + 1,)."""
        costs = np.zeros(2 * self._depth, np.int64)
        for pool in self.located:
            costs[::2] += (self.copies[pool] | self.held[pool]) * self._state.blocks_of(pool, 1)
        for one in self.states:
            costs[2 * one.page + 1] += self._state.blocks_of(one.pool, 1)
        costs[: self.at] = 0
        return np.concatenate([[0], np.cumsum(costs)])

    @property
    def first_page(self) -> int:
        """First page that is to be written now, or once it has landed on the host."""
        return min(int(np.searchsorted(self._costs, 0, "right")) - 1, self._end) // 2

    @property
    def fits(self) -> bool:
        """Whether the host could take the whole plan by evicting everything that is not in use."""
        try:
            self._state.require_host(int(self._costs[-1]))
        except PoolFullError:
            return False
        return True

    def left(self) -> Counter[PoolName]:
        """Return the number of objects for which no write has begun, by pool."""
        page = (self.at + 1) // 2
        left = Counter(self._coming_states)
        left.update(one.pool for one in self.states if 2 * one.page + 1 >= self.at)
        for pool in self.located:
            left[pool] = int(np.count_nonzero((self.copies[pool] | self.held[pool] | self.coming[pool])[page:]))
        return +left

    def begin(self, chain: Chain, *, near: bool = False) -> bool:
        """Begin as many of the next writes as there is room for; return whether there were any. With `near`, only copy to the host."""
        state, begun = self._state, False
        share = state.copying if near else state.writing
        part = most = max(PART_BYTES // state.arena.block_bytes, state.widest)
        while self._costs[self._end] > self._costs[self.at]:
            done = self._costs[self.at]
            end = min(self._end, int(np.searchsorted(self._costs, done + min(share.left, most), "right")) - 1)
            if self._costs[end] == done:
                break
            try:
                self._begin(end, chain, near=near)
            except PoolFullError:
                self.is_full = True
                tried, least = (int(self._costs[i] - done) for i in (end, np.searchsorted(self._costs, done, "right")))
                if tried == least:
                    break
                most = max(tried // 2, least)  # objects in use cannot be evicted; a smaller part may still fit
                continue
            begun, self.at, most = True, end, part
        return begun

    def copy_stored(self) -> None:
        """Copy objects that storage has and the host lacks from the device to the host, as far as there are free blocks."""
        state = self._state
        self.held, self.states, self.at = {pool: np.zeros(self._depth, np.bool_) for pool in self.located}, self._stored, 0
        self.copies = {pool: at.stored & (at.device >= 0) & (at.host == ABSENT) for pool, at in self.located.items()}
        self._costs = self._sum_up()
        blocks = min(state.arena.available, state.copying.left)
        if blocks and (end := int(np.searchsorted(self._costs, blocks, "right")) - 1):
            self._begin(end, Chain({}), near=True)

    def _begin(self, end: int, chain: Chain, *, near: bool) -> None:
        """Begin one write of the positions from `at` up to `end`, exclusive."""
        state, start, stop = self._state, (self.at + 1) // 2, (end + 1) // 2
        states = [one for one in self.states if self.at <= 2 * one.page + 1 < end]
        need = Counter({pool: int(np.count_nonzero(self.copies[pool][start:stop])) for pool in self.located})
        need.update(one.pool for one in states if not one.held)
        if near and not need.total():
            return
        nodes = {self._node, *(one.node for one in states)}
        reads = not near and (any(self.held[pool][start:stop].any() for pool in self.located) or any(one.held for one in states))
        # Objects that this write reads on the host must not be evicted to make room, and a copy to the host alone must not evict its own
        # path: hence the pins. Otherwise objects of the path that are stored already may be evicted for the next ones.
        with ExitStack() as pins:
            for node in nodes if reads or near else ():
                pins.enter_context(state.index.pinned(node, Tier.HOST))
            handles = state.take_host(need)
            device_pins, host_pins = ([state.index.pin(node, tier) for node in nodes] for tier in (Tier.DEVICE, Tier.HOST))
        copies, held = list[Piece](), list[Piece]()
        here = slice(start, stop)
        for pool, at in self.located.items():
            copies += gather_pieces(pool, self._node, start, at.device[here], self.copies[pool][here], handles[pool])
            held += gather_pieces(pool, self._node, start, at.host[here], self.held[pool][here])
        unused = {pool: iter(places.tolist()) for pool, places in handles.items()}
        for one in states:
            if one.held:
                held.append(one.piece(one.location))
            else:
                copies.append(one.piece(next(unused[one.pool])))
        Write(state, copies, [] if near else held, chain, device_pins=device_pins, host_pins=host_pins, near=near)


@dataclass(eq=False)
class _Waiting:
    """A commit of which some objects are not on their way yet. Nothing pins its objects: those evicted before their turn are lost."""

    tokens: TokenArray
    extra: bytes
    states: set[int]
    chain: Chain
    at: int = 0
    """First position (see `_Plan`) for which no write to storage has begun."""
    left: int = 0
    """Number of objects that are not on their way to storage."""
    gone: Counter[PoolName] | None = None
    """Number of objects that no tier had at the last attempt, by pool; None before the first attempt."""
    is_kept: bool = False
    """Whether `tokens` is a copy of its own, and not the caller's array."""
    is_near: bool = False
    """Whether the host has all of it, so that nothing can be done while storage is left alone."""


class WriteThrough:
    """Sender of committed objects to host and storage, in waves of at most the blocks that writes may hold.

    Pages go from the start of the sequence, each state behind its pages, so that a prompt larger than the host goes down whole. Objects
    without room wait, and go on when an operation has landed. While the store is left alone after failures, copies to the host are still
    made, and the store gets them when it is back. Objects that storage has and the host lacks are copied to the host if it has free blocks.

    Thread safety: the owner's thread; no method waits.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no commit is waiting that could go on by itself now."""
        return not self._waiting or self._is_held_up

    @property
    def objects(self) -> int:
        """Number of objects of waiting commits that are not on their way to storage."""
        return sum(commit.left for commit in self._waiting)

    def send(self, node: Node, tokens: TokenArray, extra: bytes, state_depths: Iterable[int]) -> None:
        """Send the full pages `tokens`, the last of which `node` covers, and the states at `state_depths` (in pages)."""
        depth = len(tokens) // self._state.page_size
        commit = _Waiting(tokens, extra, {end for end in state_depths if 0 < end <= depth}, Chain({}))
        if self._waiting:
            for before in [other for other in self._waiting if _begins(commit, other)]:
                commit.states |= before.states
                self._waiting.remove(before)
        self._offer(commit, node, depth)

    @property
    def _is_held_up(self) -> bool:
        """Whether storage is left alone and a waiting write is there already to try it with."""
        return self._state.writes.is_away and bool(self._state.writes.waiting)

    def go_on(self) -> None:
        """Offer the waiting commits again, after an operation has landed and may have made room."""
        for _ in range(len(self._waiting)):
            commit = self._waiting.popleft()
            if commit.is_near and self._is_held_up:
                self._waiting.append(commit)
                continue
            match = self._state.index.match(commit.tokens, commit.extra)
            depth = min(len(commit.tokens) // self._state.page_size, match.path_depth)
            if not self._offer(commit, self._state.index.node_at(match, depth), depth, is_new=False):
                return

    def _offer(self, commit: _Waiting, node: Node, depth: int, *, is_new: bool = True) -> bool:
        """Begin as many writes of a commit as there is room for, and let the rest wait; return whether the next commit may be offered."""
        state, held_up = self._state, self._is_held_up
        plan = _Plan(state, node, depth, commit.states, commit.at)
        self._count_gone(commit, plan, depth)
        if state.storage is not None and plan.left():
            first = max(0, plan.first_page - 1)  # the key of the page before is needed, too: it is the parent
            if first not in commit.chain.keys:
                commit.chain.keys.update(enumerate(state.index.page_keys(node, depth, first), first))
        if state.storage is None and is_new and not plan.fits:  # a part would take room from others, and could not be restored
            self._give_up(plan.left(), "host_full")
            return True
        begun = not held_up and plan.begin(commit.chain, near=state.storage is None)
        commit.at, left = plan.at, plan.left()
        if left and (held_up or is_new):
            begun |= plan.begin(commit.chain, near=True)
        commit.left, commit.is_near = left.total(), held_up and not plan.left()
        if not left:
            plan.copy_stored()
        elif plan.is_full and not state.under_way:
            self._give_up(left, "host_full")
        elif len(self._waiting) >= _MOST_WAITING:
            self._give_up(left, "too_many")
        else:
            if not commit.is_kept:
                commit.tokens, commit.is_kept = commit.tokens.copy(), True
            self._waiting.append(commit)
            return begun or commit.is_near
        return True

    def _count_gone(self, commit: _Waiting, plan: _Plan, depth: int) -> None:
        """Count the objects that were lost to eviction while they waited for their turn."""
        beyond = len(commit.tokens) // self._state.page_size - max(depth, (commit.at + 1) // 2)
        gone = plan.gone + Counter(dict.fromkeys(self._state.index.page_pools, max(0, beyond)))
        if commit.gone is not None:
            self._give_up(gone - commit.gone, "evicted")
        commit.gone = gone

    def _give_up(self, objects: Counter[PoolName], reason: str) -> None:
        for pool, count in objects.items():
            self._state.give_up(pool, reason, count)


def _begins(commit: _Waiting, other: _Waiting) -> bool:
    """Whether the sequence of `other` is that of `commit` or the beginning of it."""
    return commit.extra == other.extra and np.array_equal(commit.tokens[: len(other.tokens)], other.tokens)
