"""Write-through: which objects a commit sends to host and storage, and the commits that wait for room."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Final

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.operations import PART_BYTES, PageRun, gather_runs
from tiercache.controller.options import WRITE_BACK
from tiercache.controller.values import Values
from tiercache.controller.writes import Chain, UnitWrite, Write
from tiercache.core import ABSENT, Locations, Mask, PoolName, Tier, TokenArray, pending
from tiercache.errors import PoolFullError
from tiercache.index import Node
from tiercache.index.node import STORED

_MAX_WAITING: Final = 256
"""Maximum number of commits that wait for room. A waiting commit keeps its tokens, at 8 bytes per token."""


class _Plan:
    """List of the objects of a path that storage lacks, in the order in which they are written.

    Pages are written from the start of the path, and each state after the page on which it ends. The place in
    this order is called a position: page i has position 2i, and the states that end with page i have position
    2i + 1. The plan begins at position `at`.

    For example, let a path have three pages of 4 blocks each, and states of 6 blocks at depths 2 and 3. If
    storage has only the first page, the plan is:

        position     0    1    2    3    4    5
        object       p0   -    p1   s2   p2   s3
        blocks       0    0    4    6    4    6
        `_costs`     0    0    0    4   10   14   20     sum of the blocks before each position; last, of all

    A write takes the positions [at, end). Their blocks, `_costs[end] - _costs[at]`, must fit.
    """

    def __init__(
        self,
        context: ControllerContext,
        node: Node,
        depth: int,
        state_depths: Iterable[int],
        at: int,
        *,
        to_storage: bool = True,
    ) -> None:
        """Plan the pages up to `depth` and the states at `state_depths`, from position `at` on.

        Without `to_storage`, what is on the host needs no write.
        """
        self.at = at = min(at, 2 * depth)
        """First position for which no write has begun."""
        self.is_full = False
        """Whether the host had no room for the next objects."""
        self._context = context
        self._node = node
        self._end = 2 * depth
        """Position at which the plan ends, exclusive."""
        self.gone: Counter[PoolName] = Counter()
        """Number of objects from position `at` on that no tier has, by pool."""
        self._pages = len(context.index.page_pools)
        """Number of the first row of states in the tables, in which a row is a pool, and a column a page."""
        self._where = self._locate(depth, state_depths)
        """Locations, as `where[tier, pool, page]`. A state has the entry of its last page."""
        # What becomes of an object that storage lacks depends on where it is:
        #   on the device, not on the host        `_copies`: copied to the host, then written to storage
        #   on the host, no write is storing it   `_held`: written to storage
        #   on its way to the host only           `_arriving`: the plan ends before it, and goes on when
        #                                         a fetch or a copy has brought it to the host
        #   in no tier                            `gone`: counted, and left out
        # An object that another write is storing is in none of these masks.
        device, host, stored = self._where
        lacking = stored == ABSENT
        away = lacking & (host == ABSENT)
        self._copies = away & (device >= 0)
        self._held, self._arriving = lacking & (host >= 0), lacking & (host < ABSENT)
        gone = away & (device == ABSENT)
        if np.count_nonzero(lacking > away) or np.count_nonzero(gone):
            for row, pool in enumerate(context.index.pools):
                held, arriving = self._held[row], self._arriving[row]
                storing = context.in_flight.storing[pool]
                held[held] = ~storing[host[row][held]] & to_storage & (context.storage is not None)
                # An object whose handle is marked in `storing` is on its way to storage as well.
                arriving[arriving] = ~storing[pending(host[row][arriving])]
                if arriving.any():
                    self._end = min(self._end, 2 * int(arriving.argmax()) + (row >= self._pages))
                self.gone[pool] += int(np.count_nonzero(gone[row, self._places(row, at)]))
        blocks = np.array([context.allocator.blocks_of(pool, 1) for pool in context.index.pools])
        wanted, costs = self._copies | self._held, np.zeros(2 * depth + 1, np.int64)
        self._lacking = wanted | self._arriving
        """Mask of all these objects, but those that are gone."""
        costs[1::2] = blocks[: self._pages] @ wanted[: self._pages]
        costs[2::2] = blocks[self._pages :] @ wanted[self._pages :]
        costs[: at + 1] = 0
        self._costs = costs.cumsum()

    def _locate(self, depth: int, state_depths: Iterable[int]) -> Locations:
        """Return where the pages and the states are; where there is no state to write, it counts as stored.

        A state whose depth is not on the path, or at which no node ends, is gone.
        """
        index, first = self._context.index, self._pages
        where = np.full((len(Tier), len(index.pools), depth), ABSENT)
        where[:, :first] = index.page_locations(self._node, depth)
        where[Tier.STORAGE, first:] = STORED
        for end in state_depths:
            if 2 * end - 1 < self.at:  # a write of this state's position has begun
                continue
            node = self._node.covering(end) if end <= depth else None
            if node is None or node.end != end:
                self.gone.update(index.state_pools)
            else:
                where[:, first:, end - 1] = ABSENT if node.states is None else node.states
        return where

    def _places(self, row: int, start: int, end: int | None = None) -> slice:
        """Return the columns of a row that belong to positions [start, end)."""
        more = row < self._pages
        return slice((start + more) // 2, None if end is None else (end + more) // 2)

    @property
    def first_page(self) -> int:
        """First page that this plan writes: at once, or later if the page is still on its way to the host."""
        return min(int(self._costs.searchsorted(0, "right")) - 1, self._end) // 2

    @property
    def begun_blocks(self) -> int:
        """Number of host blocks of the objects whose writes have begun."""
        return int(self._costs[self.at])

    @property
    def blocks(self) -> int:
        """Number of host blocks of all objects of the plan."""
        return int(self._costs[-1])

    @property
    def fits(self) -> bool:
        """Whether the host could take the whole plan, by evicting everything that is not in use."""
        try:
            self._context.allocator.require_host(self.blocks)
        except PoolFullError:
            return False
        return True

    def left(self) -> Counter[PoolName]:
        """Return the number of objects for which no write has begun, by pool."""
        found = Counter[PoolName]()
        for row, pool in enumerate(self._context.index.pools):
            if count := int(np.count_nonzero(self._lacking[row, self._places(row, self.at)])):
                found[pool] = count
        return found

    def begin(self, chain: Chain, *, host_only: bool = False) -> bool:
        """Begin as many writes as there is room for, in order; return whether any began.

        With `host_only`, objects are copied to the host and not written to storage.
        """
        context, begun = self._context, False
        share = context.in_flight.copying if host_only else context.in_flight.writing
        # `part` is the maximum number of host blocks in one write. `limit` is the same number, reduced for
        # the next write if the host has too little room for `part` blocks.
        part = limit = max(PART_BYTES // context.arena.block_bytes, context.allocator.widest)
        while self._costs[self._end] > self._costs[self.at]:
            done = self._costs[self.at]
            # Take as many positions as fit into `limit` and into the blocks that writes may still hold.
            fitting = self._costs.searchsorted(done + min(share.left, limit), "right")
            end = min(self._end, int(fitting) - 1)
            if self._costs[end] == done:
                break
            try:
                may_evict = self._begin(end, chain, host_only=host_only)
            except PoolFullError:
                self.is_full = True
                # The write that found no room would take `tried` blocks. The smallest possible write, which
                # has the objects of the first position only, takes `least` blocks.
                behind_first = self._costs.searchsorted(done, "right")
                tried, least = int(self._costs[end] - done), int(self._costs[behind_first] - done)
                if tried == least:
                    break
                # Objects in use leave no room for this write, but a write of fewer objects may still fit.
                limit = max(tried // 2, least)
                continue
            begun, self.at, limit = True, end, part
            if may_evict and any(mask[self._places(row, end)].any() for row, mask in enumerate(self._held)):
                # A later write would read what may be gone from the host. The next plan looks again where
                # everything is.
                break
        return begun

    def _begin(self, end: int, chain: Chain, *, host_only: bool) -> bool:
        """Begin one write of the positions [at, end).

        Returns whether objects of the path may have been evicted from the host to make room.
        """
        context, index, reads = self._context, self._context.index, False
        need, parts = dict[PoolName, int](), list[tuple[PoolName, int, slice, Mask, Mask]]()
        nodes = {self._node: None}  # a dict, because ranks that agree need one order
        for row, pool in enumerate(index.pools):
            here = self._places(row, self.at, end)
            copies, held = self._copies[row, here], self._held[row, here]
            parts.append((pool, row, here, copies, held))
            if count := int(np.count_nonzero(copies)):
                need[pool] = count
            reads |= not host_only and bool(np.count_nonzero(held))
            if row >= self._pages:
                pages = (copies | held).nonzero()[0].tolist()
                nodes |= dict.fromkeys(self._node.covering(here.start + page + 1) for page in pages)
        if host_only and not need:
            return False
        # While room is made on the host, pins keep the nodes in the tree. They keep their objects on the host
        # in two cases: this write reads objects of the path there, or it copies the path to the host only. In
        # all other cases objects of the path that are in storage already can make room for the next objects.
        kept = (Tier.HOST,) if reads or host_only else ()
        pins = [index.pin(node, *kept) for node in nodes]
        try:
            handles = context.allocator.take_host(need)
            device_pins, host_pins = (
                [index.pin(node, tier) for node in nodes] for tier in (Tier.DEVICE, Tier.HOST)
            )
        finally:
            for pin in reversed(pins):
                pin.release()
        copied, stored = list[PageRun](), list[PageRun]()
        for pool, row, here, copies, held in parts:
            gather = partial(gather_runs, pool, self._node, here.start, are_states=row >= self._pages)
            if pool in need:
                copied += gather(self._where[Tier.DEVICE, row, here], copies, handles[pool])
            if reads:
                stored += gather(self._where[Tier.HOST, row, here], held)
        Write(context, copied, stored, chain, device_pins, host_pins, host_only=host_only)
        return not kept


@dataclass(eq=False)
class _Waiting:
    """A commit with objects for which no write has begun.

    No pin protects these objects. If they are evicted before their write begins, storage never gets them.
    """

    tokens: TokenArray
    extra: bytes
    states: set[int]
    """Depths, in pages, of the states to send."""
    chain: Chain
    at: int = 0
    """First position (see `_Plan`) for which no write to storage has begun."""
    gone: Counter[PoolName] | None = None
    """Number of objects that no tier had at the last attempt, by pool; None before the first attempt."""
    is_for_host: bool = False
    """Whether the objects go to the host only, because they are written back later."""
    is_kept: bool = False
    """Whether `tokens` is the commit's own copy, and not the caller's array."""
    is_on_host: bool = False
    """Whether the host has all objects, and the commit waits only because calls of storage are suspended."""


class WriteThrough:
    """Sender of committed objects to host and storage.

    Pages are sent from the start of the sequence, and a state after its pages. Objects are sent in waves. A
    wave has as many objects as fit into the host blocks that writes may hold. Later waves use the same blocks
    again, so even a prompt larger than the host reaches storage as a whole. Objects for which there is no
    room wait until an operation has landed.

    While calls of the store are suspended after failures, objects are still copied to the host. The store
    gets these objects when it works again.

    Thread safety: the owner's thread (the engine's thread, which calls the controller). No method waits.
    """

    def __init__(self, context: ControllerContext, values: Values) -> None:
        self._context = context
        self._values = values
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no commit waits, or all must wait because calls of storage are suspended."""
        return not self._waiting or self._context.writes.is_held_up

    @property
    def waits(self) -> bool:
        """Whether commits have objects that are not on their way to storage."""
        return bool(self._waiting)

    def send(self, node: Node, tokens: TokenArray, extra: bytes, state_depths: Iterable[int]) -> None:
        """Send the whole pages of `tokens`, and the states at `state_depths` (in pages).

        `node` covers the last page.
        """
        depth = len(tokens) // self._context.page_size
        commit = _Waiting(tokens, extra, {end for end in state_depths if 0 < end <= depth}, Chain({}))
        # A sequence that does not fit on the host is written through, whatever the options say.
        commit.is_for_host = self._context.storage is not None and self._context.options.write == WRITE_BACK
        if self._waiting:
            # A waiting commit of a prefix of this sequence is dropped: the new commit covers the pages of the
            # prefix, and takes over the states.
            for before in [other for other in self._waiting if _begins(commit, other)]:
                commit.states |= before.states
                self._waiting.remove(before)
        self._offer(commit, node, depth)

    def write_unit(self, node: Node) -> UnitWrite:
        """Begin the writes of the state at the node's end, and of the pages up to it that storage lacks.

        A unit of which a part is in no tier is not written; without state pools, its leading pages are. What
        there is no room for is given up if nothing is under way that could make room.
        """
        depth = node.end if node.state_pools else node.start + node.complete_pages
        plan = _Plan(self._context, node, depth, [depth], 0)
        if plan.gone.total() or not plan.left():
            return UnitWrite(0, 0, is_over=True)
        chain = Chain({}, stays_on_host=True)
        self._describe(chain, plan, node, depth)
        plan.begin(chain)
        left = plan.left()
        if left and not self._context.under_way:
            for pool, count in left.items():
                self._context.give_up(pool, "host_full", count, final=False)
            left.clear()
        return UnitWrite(plan.begun_blocks, plan.blocks, is_over=not left)

    def retry_waiting(self) -> None:
        """Offer the waiting commits again, after an operation has landed and may have made room."""
        for _ in range(len(self._waiting)):
            commit = self._waiting.popleft()
            if commit.is_on_host and self._context.writes.is_held_up:
                self._waiting.append(commit)
                continue
            match = self._context.index.match(commit.tokens, commit.extra)
            depth = min(len(commit.tokens) // self._context.page_size, match.path_depth)
            if not self._offer(commit, self._context.index.node_at(match, depth), depth, is_new=False):
                return  # later commits must not take the room for which this commit waits

    def _offer(self, commit: _Waiting, node: Node, depth: int, *, is_new: bool = True) -> bool:
        """Begin as many writes of a commit as there is room for, and let the other objects wait.

        Returns whether the next commit may be offered. The answer is False if this commit waits for room and
        none of its writes could begin.
        """
        context, held_up = self._context, self._context.writes.is_held_up
        to_storage = context.storage is not None and not commit.is_for_host
        lowest = Tier.STORAGE if to_storage else Tier.HOST
        if is_new and _is_settled(node, commit.states if context.index.state_pools else (), lowest):
            return True  # the usual case of a sequence that was served before: nothing to plan
        plan = _Plan(context, node, depth, commit.states, commit.at, to_storage=to_storage)
        if is_new and commit.is_for_host and not plan.fits:
            to_storage, commit.is_for_host = True, False
            plan = _Plan(context, node, depth, commit.states, commit.at)
        self._count_gone(commit, plan, depth)
        if to_storage and plan.left():
            self._describe(commit.chain, plan, node, depth)
        # Without storage, a part of the path is useless on the host: it could not be restored, but would
        # evict other objects.
        if context.storage is None and is_new and not plan.fits:
            self._give_up(plan.left(), "host_full")
            return True
        begun = not held_up and plan.begin(commit.chain, host_only=not to_storage)
        commit.at, left = plan.at, plan.left()
        # Objects that cannot be written to storage now are at least copied to the host. While calls of
        # storage work, this is done for a new commit only.
        if left and (held_up or is_new):
            begun |= plan.begin(commit.chain, host_only=True)
        commit.is_on_host = held_up and not plan.left()
        if not left:
            return True
        if plan.is_full and not context.under_way:  # nothing is pending that could make room
            self._give_up(left, "host_full")
        elif len(self._waiting) >= _MAX_WAITING:
            self._give_up(left, "too_many")
        else:
            if not commit.is_kept:
                commit.tokens, commit.is_kept = commit.tokens.copy(), True
            self._waiting.append(commit)
            return begun or commit.is_on_host
        return True

    def _describe(self, chain: Chain, plan: _Plan, node: Node, depth: int) -> None:
        """Enter the keys and the values of what the plan writes."""
        first = plan.first_page
        before = max(0, first - 1)  # the first page's parent is the page before it
        if before not in chain.keys:
            chain.keys.update(enumerate(self._context.index.page_keys(node, depth, before), before))
        # Not a page's own value alone: a page is worth as much as the unit in which it would be evicted.
        path = takewhile(lambda one: one.end > first, node.path())
        for pool, values in self._values.of(path).items():
            chain.values.setdefault(pool, {}).update(values)

    def _count_gone(self, commit: _Waiting, plan: _Plan, depth: int) -> None:
        """Give up the objects that were evicted since the last attempt, while they waited for their write."""
        beyond = len(commit.tokens) // self._context.page_size - max(depth, (commit.at + 1) // 2)
        if beyond > 0:
            plan.gone.update(dict.fromkeys(self._context.index.page_pools, beyond))
        if commit.gone is not None:
            self._give_up(plan.gone - commit.gone, "evicted")
        commit.gone = plan.gone

    def _give_up(self, objects: Counter[PoolName], reason: str) -> None:
        for pool, count in objects.items():
            self._context.give_up(pool, reason, count)


def _is_settled(node: Node, state_depths: Iterable[int], tier: Tier) -> bool:
    """Return whether `tier` has all pages of the path to `node`, and the states at these depths."""
    left = set(state_depths)
    for at in node.path():
        if not at.has_pages(tier) or (at.end in left and not at.has_state(tier)):
            return False
        left.discard(at.end)
    return not left


def _begins(commit: _Waiting, other: _Waiting) -> bool:
    """Return whether the sequence of `other` is that of `commit` or a prefix of it."""
    return commit.extra == other.extra and np.array_equal(commit.tokens[: len(other.tokens)], other.tokens)
