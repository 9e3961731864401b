"""Which objects a commit sends down, the operations that take them there, and what waits for its turn."""

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
"""Commits that may wait for their turn at a time. Each keeps its tokens, eight bytes each."""


@dataclass(frozen=True, slots=True)
class _State:
    """A state that is to go down: the page on which it ends, and where it is now."""

    pool: PoolName
    node: Node
    location: int
    held: bool
    """Is it on the host already?"""

    @property
    def page(self) -> int:
        return self.node.end - 1

    def piece(self, handle: int) -> Piece:
        return Piece(self.pool, Span(self.node, self.page, self.page + 1), np.array([self.location]), np.array([handle]))


class _Plan:
    """What of a path is not in storage, in the order in which it goes there: pages from the start, each state behind its page.

    Page i is position 2i, the states that end with it are position 2i + 1; the plan begins at position `at`.
    """

    def __init__(self, state: ControllerState, node: Node, depth: int, state_depths: Iterable[int], at: int) -> None:
        self.at = at = min(at, 2 * depth)
        """The first position of which no write has begun."""
        self.is_full = False
        """Had the host no room for what was next?"""
        self._state = state
        self._node = node
        self._depth = depth
        self.located = state.index.locations(node, depth).pages
        self.copies: dict[PoolName, Mask] = {}
        self.held: dict[PoolName, Mask] = {}
        self.coming: dict[PoolName, Mask] = {}
        """Pages on their way to the host, and no further: the plan ends before the first of them."""
        self._coming_states: list[PoolName] = []
        self._end = 2 * depth
        self.gone: Counter[PoolName] = Counter()
        """Objects that no tier has."""
        self.states: list[_State] = []
        self._stored: list[_State] = []
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
        """Which pages the host has, storage lacks, and nothing is storing."""
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
        """Would computing the state again, from the nearest one above, take longer than bringing it up?"""
        state = self._state
        load = state.options.load_flops_per_byte * state.host[pool].geometry.nbytes
        end = node.end * state.page_size
        return not load or state.profile.flops(end - node.replay * state.page_size, end) >= load

    def _sum_up(self) -> Locations:
        """Host blocks of what is to go before each position."""
        costs = np.zeros(2 * self._depth, np.int64)
        for pool in self.located:
            costs[::2] += (self.copies[pool] | self.held[pool]) * self._state.blocks_of(pool, 1)
        for one in self.states:
            costs[2 * one.page + 1] += self._state.blocks_of(one.pool, 1)
        costs[: self.at] = 0
        return np.concatenate([[0], np.cumsum(costs)])

    @property
    def first_page(self) -> int:
        """The first page that is wanted, or will be when it has landed."""
        return min(int(np.searchsorted(self._costs, 0, "right")) - 1, self._end) // 2

    @property
    def fits(self) -> bool:
        """Could the host take all of it, if nobody else needed it?"""
        try:
            self._state.require_host(int(self._costs[-1]))
        except PoolFullError:
            return False
        return True

    def left(self) -> Counter[PoolName]:
        """Objects of which no write has begun, by pool."""
        page = (self.at + 1) // 2
        left = Counter(self._coming_states)
        left.update(one.pool for one in self.states if 2 * one.page + 1 >= self.at)
        for pool in self.located:
            left[pool] = int(np.count_nonzero((self.copies[pool] | self.held[pool] | self.coming[pool])[page:]))
        return +left

    def begin(self, chain: Chain, *, near: bool = False) -> bool:
        """Begin the next writes, as many as may be now: was there any? With `near` only copies to the host."""
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
                most = max(tried // 2, least)  # what is in use may leave room for less
                continue
            begun, self.at, most = True, end, part
        return begun

    def copy_stored(self) -> None:
        """Copy to the host what storage has and the host not, as far as there are blocks that nobody uses."""
        state = self._state
        self.held, self.states, self.at = {pool: np.zeros(self._depth, np.bool_) for pool in self.located}, self._stored, 0
        self.copies = {pool: at.stored & (at.device >= 0) & (at.host == ABSENT) for pool, at in self.located.items()}
        self._costs = self._sum_up()
        blocks = min(state.arena.available, state.copying.left)
        if blocks and (end := int(np.searchsorted(self._costs, blocks, "right")) - 1):
            self._begin(end, Chain({}), near=True)

    def _begin(self, end: int, chain: Chain, *, near: bool) -> None:
        """Begin one write, of the positions up to `end`."""
        state, start, stop = self._state, (self.at + 1) // 2, (end + 1) // 2
        states = [one for one in self.states if self.at <= 2 * one.page + 1 < end]
        need = Counter({pool: int(np.count_nonzero(self.copies[pool][start:stop])) for pool in self.located})
        need.update(one.pool for one in states if not one.held)
        if near and not need.total():
            return
        nodes = {self._node, *(one.node for one in states)}
        reads = not near and (any(self.held[pool][start:stop].any() for pool in self.located) or any(one.held for one in states))
        # What is read on the host must not be evicted to make room; what went there before, and is stored, may be: it is the same path.
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
    """A commit of which not everything is on its way. Nothing holds its objects: what is evicted before its turn is lost."""

    tokens: TokenArray
    extra: bytes
    states: set[int]
    chain: Chain
    at: int = 0
    """The first position (see `_Plan`) that was not offered to storage yet."""
    left: int = 0
    gone: Counter[PoolName] | None = None
    is_kept: bool = False
    """Are the tokens a copy of the caller's?"""
    is_near: bool = False
    """Has the host all of it, so that nothing can be done while storage is left alone?"""


class WriteThrough:
    """Sends what was committed to host and storage, in waves of at most the blocks that writes may hold.

    Pages go from the start of the sequence, each state behind its pages, so that a prompt larger than the host goes down whole. What has no
    turn yet waits, and goes on when an operation has landed. While storage is left alone, copies to the host are made all the same, and
    storage gets them when it is back. What storage has, and the host not, is copied to the host if that has blocks to spare.

    Thread safety: the owner's thread; nothing here waits.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_idle(self) -> bool:
        """Is nothing waiting that could go on by itself now?"""
        return not self._waiting or self._is_held_up

    @property
    def objects(self) -> int:
        """How many objects of the commits that wait are not on their way to storage."""
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
        """Is storage left alone, and a write there already to try it with?"""
        return self._state.writes.is_away and bool(self._state.writes.waiting)

    def go_on(self) -> None:
        """An operation has landed: there may be room now."""
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
        """Begin as many writes of a commit as may be, and let what is left of it wait: may the next one be offered, too?"""
        state, held_up = self._state, self._is_held_up
        plan = _Plan(state, node, depth, commit.states, commit.at)
        self._count_gone(commit, plan, depth)
        if state.storage is not None and plan.left():
            first = max(0, plan.first_page - 1)  # a page names the one before it
            if first not in commit.chain.keys:
                commit.chain.keys.update(enumerate(state.index.page_keys(node, depth, first), first))
        if state.storage is None and is_new and not plan.fits:  # part of it would be in the way of others, and could not be restored
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
        """Count what was evicted from the device while it waited for its turn."""
        beyond = len(commit.tokens) // self._state.page_size - max(depth, (commit.at + 1) // 2)
        gone = plan.gone + Counter(dict.fromkeys(self._state.index.page_pools, max(0, beyond)))
        if commit.gone is not None:
            self._give_up(gone - commit.gone, "evicted")
        commit.gone = gone

    def _give_up(self, objects: Counter[PoolName], reason: str) -> None:
        for pool, count in objects.items():
            self._state.give_up(pool, reason, count)


def _begins(commit: _Waiting, other: _Waiting) -> bool:
    """Is `other` the same sequence, or the beginning of it?"""
    return commit.extra == other.extra and np.array_equal(commit.tokens[: len(other.tokens)], other.tokens)
