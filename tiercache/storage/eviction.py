"""What a full store gives up first: what cannot be restored, and then by the policy's word. The one order of every store.

1. Dead KV and orphans, the least recently used first.
2. Units: a page at which nothing goes on, with its states and all pages that served them alone; of a policy that ranks them so also a
   state in the middle of a path, without its page. The policy says which.
3. What came lately and may yet become of use: KV whose state is on its way, a state whose KV is. It takes three quarters of all bytes at
   most at the expense of 2: a conversation without any state must not push out all that can be restored.

What follows from a page keeps it in place, so a conversation shrinks from its end and what is left of it can be restored. The use of a page
that is given up counts for the page before it: nothing is older than what was last used of its path.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from tiercache.policy import Policy, UnitKind
from tiercache.policy.base import Column
from tiercache.policy.stored import StoredColumns
from tiercache.storage.pages import BROKEN, NONE, QUEUED, Ints
from tiercache.storage.residents import Residents

_FRONT: Final = 1024
_SHARE: Final = 64
"""A pass fetches at least 1,024 units, and at least one in 64."""
_LIVE, _DEAD, _COMING = QUEUED, 2 * QUEUED, (4 * QUEUED, 8 * QUEUED)
_ANY_COMING: Final = _COMING[False] | _COMING[True]


class Taker(Protocol):
    """What an eviction asks of a store.

    Thread safety: that of the order.
    """

    def take(self, rows: list[int]) -> None:
        """These objects of one page are given up: each must `leave`."""

    def enough(self) -> bool:
        """Is there as much room as was wanted? Asked between units."""

    def full(self) -> bool:
        """May no more go this time? Asked between pages of a unit."""


class EvictionOrder:
    """The pages of a store in the order in which they are given up, lazily: an entry is put right when it comes to the front.

    The front of the live is a heap of the units whose rank lies at or below the horizon; when it runs out one pass over the columns fetches
    the next few thousand, so a million objects cost nothing until something must go. With a steady policy a unit whose rank has risen goes
    back, and as ranks never fall while a unit is untouched, nothing outside the front may come before it. Another policy's order is as of
    the last pass, which is repeated after as many ticks as the front had units.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self, residents: Residents, policy: Policy, page_tokens: int = 1) -> None:
        self._residents = residents
        self._policy = policy
        self._page_tokens = page_tokens
        self._live: list[tuple[float, int]] = []
        self._dead: list[tuple[int, int]] = []
        self._coming: tuple[list[tuple[int, int]], ...] = [], []
        """States that wait for their KV, and KV that waits for a state: each kind is waited for in its own time."""
        self._horizon = -inf
        self._until = 0
        self.unfinished = False
        """Did the last eviction stop within a unit? What is left of that is worth nothing: `sweep` it."""
        residents.exposed = self.offer

    def offer(self, node: int) -> None:
        """This page has something new, or nothing follows it any more, or nothing can use it: it joins the queue where it belongs."""
        residents = self._residents
        if self._horizon == -inf or not residents.is_leaf(node):
            return
        flags = residents.pages.flags
        if residents.is_due(node):
            self._push_dead(node)
        elif residents.is_useless(node):
            self._push_coming(node)
        elif self._policy.steady and not flags[node] & _LIVE and (rank := self._rank(node)) <= self._horizon:
            self._push_live(rank, node)

    def evict(self, taker: Taker, attached: Iterable[int] = (), *, promising: bool = True) -> None:
        """Give up units until the taker has enough, or none is left.

        `promising`: what is to be stored is of use as soon as it is there. For anything else nothing that can be restored is given up while
        too much is stored already that never could be.
        Pages that are being read or held stay. So does the nearest state before each page of `attached`, behind which somebody is writing:
        if it went, all that is there would be worth nothing until the next state comes.
        """
        if taker.enough():
            return
        residents = self._residents
        if residents.mend() or (not self._policy.steady and residents.clock > self._until) or self._is_littered():
            self._start_again()
        if self._horizon == -inf:
            self._scan()
        spared: list[tuple[float, int]] = []
        footholds = self._footholds(attached)
        while not taker.enough() and not taker.full():
            if self._take_dead(taker):
                continue
            spoilt = residents.is_strewn and not promising
            if not ((not spoilt and self._take_live(taker, spared, footholds)) or self._take_coming(taker)):
                break
        for rank, node in spared:
            self._push_live(rank, node)

    def sweep(self, taker: Taker) -> None:
        """Give up what cannot be restored, until none is left or the taker is full."""
        while not taker.full() and self._take_dead(taker):
            pass
        self.unfinished = taker.full()

    def _take_dead(self, taker: Taker) -> bool:
        residents, flags, pages = self._residents, self._residents.pages.flags, self._residents.pages
        for kind in (False, True):
            while self._coming[kind] and residents.is_overdue(self._coming[kind][0][0], kv=kind):
                self.offer(self._pop_coming(kind))
        pinned: list[tuple[int, int]] = []
        taken = False
        while self._dead and not taken:
            tick, node = heapq.heappop(self._dead)
            flags[node] &= 0xFF ^ _DEAD
            if not residents.is_leaf(node) or not residents.is_due(node):
                self.offer(node)
            elif pages.tick[node] > tick:
                self._push_dead(node)
            elif residents.is_pinned(node):
                pinned.append((tick, node))
            else:
                taker.take(residents.rows_of(node))
                taken = True
        for entry in pinned:
            flags[entry[1]] |= _DEAD
            heapq.heappush(self._dead, entry)
        return taken

    def _take_live(self, taker: Taker, spared: list[tuple[float, int]], footholds: set[int]) -> bool:
        residents, pages = self._residents, self._residents.pages
        while self._live or self._scan():
            rank, node = heapq.heappop(self._live)
            pages.flags[node] &= 0xFF ^ _LIVE
            leaf = residents.is_leaf(node)
            if pages.first[node] < 0 or (residents.is_useless(node) and leaf):
                self.offer(node)
            elif not leaf and (self._policy.steady or not pages.states[node]):
                continue
            elif self._policy.steady and (now := self._rank(node)) > rank:
                if now <= self._horizon:
                    self._push_live(now, node)
            elif residents.is_pinned(node) or (not leaf and (node in footholds or pages.holds[node])):
                spared.append((rank, node))
                pages.flags[node] |= _LIVE
            else:
                self._policy.evicted(rank)
                self._take_unit(node, taker, leaf=leaf)
                return True
        return False

    def _take_unit(self, node: int, taker: Taker, *, leaf: bool) -> None:
        """A page with all that lies on it, and the pages before it that served nothing else; or the states of an inner page alone."""
        residents, up = self._residents, self._residents.pages.up
        if not leaf:
            taker.take([row for row in residents.rows_of(node) if residents.hangs[row]])
            return
        while node >= 0 and not taker.full():
            above = up[node]
            taker.take(residents.rows_of(node))
            alone = above >= 0 and residents.is_leaf(above) and residents.is_useless(above) and not residents.is_pinned(above)
            node = above if alone else NONE
        self.unfinished = node >= 0

    def _take_coming(self, taker: Taker) -> bool:
        residents = self._residents
        pinned: list[int] = []
        taken = False
        while not taken and (kinds := [kind for kind in (False, True) if self._coming[kind]]):
            node = self._pop_coming(min(kinds, key=lambda kind: self._coming[kind][0]))
            if not residents.is_leaf(node) or not residents.is_useless(node):
                continue
            if residents.is_pinned(node):
                pinned.append(node)
            else:
                taker.take(residents.rows_of(node))
                taken = True
        for node in pinned:
            self._push_coming(node)
        return taken

    def _footholds(self, attached: Iterable[int]) -> set[int]:
        """The nearest page with a state before each of these, where the policy may choose it."""
        found: set[int] = set()
        if self._policy.steady:
            return found
        pages = self._residents.pages
        seen: set[int] = set()
        for node in attached:
            while node >= 0 and node not in seen:
                seen.add(node)
                if pages.states[node]:
                    found.add(node)
                    break
                node = pages.up[node]
        return found

    def _scan(self) -> bool:
        """Fetch what comes next of the live, and what no queue has of the rest; False if there is nothing new."""
        residents, pages = self._residents, self._residents.pages
        first, children, holds, flags, live, states = (
            pages.columns[name][: pages.used] for name in ("first", "children", "holds", "flags", "live", "states")
        )
        there = first >= 0
        leaf = there & (children == 0) & (holds == 0)
        useful = (live > 0) & (flags & BROKEN == 0)
        self._horizon = inf
        for node in np.flatnonzero(leaf & ~useful & (flags & (_DEAD | _ANY_COMING) == 0)).tolist():
            self.offer(node)
        inner = np.zeros(len(leaf), np.bool_) if self._policy.steady else there & ~leaf & (states > 0)
        nodes = np.flatnonzero(((leaf & useful) | inner) & (flags & _LIVE == 0))
        if not len(nodes):
            return False
        ranks = self._policy.rank(StoredUnits(residents, nodes, self._page_tokens))
        wanted = max(_FRONT, len(nodes) // _SHARE)
        if wanted < len(nodes):
            self._horizon = float(np.partition(ranks, wanted)[wanted])
            least = ranks <= self._horizon
            nodes, ranks = nodes[least], ranks[least]
        flags[nodes] |= _LIVE
        self._live = list(zip(ranks.tolist(), nodes.tolist(), strict=True))
        heapq.heapify(self._live)
        self._until = residents.clock + len(nodes)
        return True

    def _rank(self, node: int) -> float:
        return float(self._policy.rank(StoredUnits(self._residents, np.array([node]), self._page_tokens))[0])

    def _push_live(self, rank: float, node: int) -> None:
        self._residents.pages.flags[node] |= _LIVE
        heapq.heappush(self._live, (rank, node))

    def _push_dead(self, node: int) -> None:
        pages = self._residents.pages
        if not pages.flags[node] & _DEAD:
            pages.flags[node] |= _DEAD
            heapq.heappush(self._dead, (pages.tick[node], node))

    def _push_coming(self, node: int) -> None:
        pages = self._residents.pages
        kind = pages.kv[node] > 0
        if not pages.flags[node] & _COMING[kind]:
            pages.flags[node] |= _COMING[kind]
            heapq.heappush(self._coming[kind], (pages.number[node], node))

    def _pop_coming(self, kind: bool) -> int:
        _, node = heapq.heappop(self._coming[kind])
        self._residents.pages.flags[node] &= 0xFF ^ _COMING[kind]
        return node

    def _is_littered(self) -> bool:
        # Pages that are deleted leave their entries behind: without this a store that only ever sets and deletes would grow for ever.
        return len(self._live) + len(self._dead) + sum(map(len, self._coming)) > 3 * len(self._residents) + _FRONT

    def _start_again(self) -> None:
        self._residents.pages.columns["flags"] &= 0xFF ^ (_LIVE | _DEAD | _ANY_COMING)
        self._live, self._dead, self._coming, self._horizon = [], [], ([], []), -inf


class StoredUnits(StoredColumns):
    """Units of a store as a policy sees them, by the node of their page. See `Units`; what a store does not know of them is 0.

    Thread safety: during one call of the policy.
    """

    def __init__(self, residents: Residents, nodes: Ints, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._residents = residents
        self._nodes = nodes

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def now(self) -> int:
        """The store's clock."""
        return self._residents.clock

    @property
    def kind(self) -> Column:
        """A page at which nothing goes on goes with all that lies on it; a state in the middle goes alone."""
        return np.where((self._column("children") > 0) | (self._column("holds") > 0), UnitKind.STATE, UnitKind.LEAF)

    @property
    def last_access(self) -> Column:
        """The store's tick when the page, what lies on it, or what was given up below it was last used or made."""
        return self._column("tick")

    @property
    def hits(self) -> Column:
        """How often an object of the page was read since the store was opened, at most."""
        rows = self._residents.residents()
        hits = np.zeros(self._residents.pages.used, np.uint32)
        np.maximum.at(hits, self._residents.columns["page"][rows], self._residents.columns["hits"][rows])
        return hits[self._nodes]

    @property
    def depth(self) -> Column:
        """Pages from the start of the sequence to the unit's end; 0 where the caller did not say."""
        return self._column("depth")

    @property
    def children(self) -> Column:
        """How many stored pages follow."""
        return self._column("children")

    @property
    def replay(self) -> Column:
        """Pages from the nearest restorable page above, or from the start of what is known."""
        return self._upwards(self._sustained())

    @property
    def nbytes(self) -> Column:
        """Payload bytes that go with the unit, at least 1."""
        residents = self._residents
        rows = residents.residents()
        rows = rows[residents.columns["hangs"][rows] != 0]
        used = residents.pages.used
        own = np.bincount(residents.columns["page"][rows], residents.columns["length"][rows], used)[self._nodes]
        whole = residents.pages.columns["nbytes"][:used].astype(np.int64)
        shared = self._sustained() | (residents.pages.columns["children"][:used] > 1)
        return np.maximum(np.where(self.kind == UnitKind.LEAF, self._upwards(shared, whole), own).astype(np.int64), 1)

    def _sustained(self) -> npt.NDArray[np.bool_]:
        """By node: can a restore end here?"""
        residents = self._residents
        used = residents.pages.used
        return (residents.pages.columns["states"][:used] > 0) | residents.sustains()[:used]

    def _upwards(self, until: npt.NDArray[np.bool_], step: Column | None = None) -> Column:
        """For each unit the sum of `step` (None: of ones) over its page and the pages before it, up to one that `until` says."""
        pages = self._residents.pages
        up = pages.columns["up"][: pages.used]
        found = np.ones(len(self), np.int64) if step is None else step[self._nodes]
        left, at = np.arange(len(self)), up[self._nodes]
        for _ in range(pages.used):
            on = at >= 0
            on[on] = ~until[at[on]]
            left, at = left[on], at[on]
            if not len(left):
                break
            found[left] += 1 if step is None else step[at]
            at = up[at]
        return found

    def _column(self, name: str) -> Column:
        found: Column = self._residents.pages.columns[name][self._nodes]
        return found
