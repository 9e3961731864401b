"""The one eviction order of every store: first what cannot be restored, then what the policy ranks lowest.

1. Dead KV and orphans, the least recently used first.
2. Units. A unit is a page that nothing follows, with its states and all pages that served them alone. A policy may also rank a state in the
   middle of a path as a unit, which goes without its page.
3. Recent objects that may yet become useful: KV whose state may be on its way, or a state whose KV may be. Such bytes may push out units of
   group 2 only until they take three quarters of all bytes: a conversation without any state must not push out all that can be restored.

A page stays while another page follows it, so a conversation shrinks from its end and what is left of it can be restored. The use of a page
that is given up counts for the page before it, so a page is never older than the last use of anything that followed it.
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
"""Limit on a pass over the columns: it fetches at least 1,024 units, and at least one in 64, as far as there are so many."""
_LIVE, _DEAD, _COMING = QUEUED, 2 * QUEUED, (4 * QUEUED, 8 * QUEUED)
_ANY_COMING: Final = _COMING[False] | _COMING[True]  # indices: False for states that wait for their KV, True for KV that waits


class Taker(Protocol):
    """The store's side of an eviction: it removes objects and says when to stop.

    Thread safety: that of the order.
    """

    def take(self, rows: list[int]) -> None:
        """Give up these objects of one page: each must `leave`."""

    def enough(self) -> bool:
        """Return whether there is as much room as was wanted. Called between units."""

    def full(self) -> bool:
        """Return whether no more objects may go this time. Called between the pages of a unit."""


class EvictionOrder:
    """The pages of a store in the order in which they are given up, kept lazily: an entry is corrected when it comes to the front.

    The front of the live pages is a heap of the units whose rank is at or below the horizon. When it is empty, one pass over the columns
    fetches the next units, so a million objects cost nothing until something must go. With a steady policy a unit whose rank has risen goes
    back; as ranks never fall while a unit is untouched, no unit outside the front can come before it. The order of any other policy is that
    of the last pass, which is repeated after as many ticks as the front had units.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self, residents: Residents, policy: Policy, page_tokens: int = 1) -> None:
        self._residents = residents
        self._policy = policy
        self._page_tokens = page_tokens
        self._live: list[tuple[float, int]] = []
        self._dead: list[tuple[int, int]] = []
        self._coming: tuple[list[tuple[int, int]], ...] = [], []
        """Heaps of (number, node): states that wait for their KV, and KV that waits for a state, each kind with its own time to wait."""
        self._horizon = -inf
        self._until = 0
        self.unfinished = False
        """Whether the last eviction stopped within a unit. What is left of that unit is useless: `sweep` it."""
        residents.exposed = self.offer

    def offer(self, node: int) -> None:
        """Put a page into the queue where it belongs.

        Called when the page has something new, or nothing follows it any more, or nothing can use it any more.
        """
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

        `promising`: what is to be stored is useful as soon as it is stored. For anything else, nothing that can be restored is given up
        while more than three quarters of all bytes are unproven (`Residents.is_strewn`).

        Pages that are being read or held stay. So does the nearest state at or before each page of `attached`, behind which a call is
        writing: without that state, all that is there would be useless until the next state comes.
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
        """Give up a leaf page, all that lies on it and the pages before it that served it alone; or just the states of an inner page."""
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
        """Return the nearest page with a state at or before each of `attached`.

        Empty for a steady policy: with one, no state goes without its page.
        """
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
        """Fetch the next live units, and all other pages that are in no queue yet; return False if there are no new live units."""
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
        # Deleted pages leave their entries behind: without this check the queues of a store that only sets and deletes would grow for ever.
        return len(self._live) + len(self._dead) + sum(map(len, self._coming)) > 3 * len(self._residents) + _FRONT

    def _start_again(self) -> None:
        self._residents.pages.columns["flags"] &= 0xFF ^ (_LIVE | _DEAD | _ANY_COMING)
        self._live, self._dead, self._coming, self._horizon = [], [], ([], []), -inf


class StoredUnits(StoredColumns):
    """Units of a store as a policy sees them, by the node of their page. See `Units`; a column that a store does not know is 0.

    Thread safety: use it during one call of the policy only.
    """

    def __init__(self, residents: Residents, nodes: Ints, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._residents = residents
        self._nodes = nodes

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def now(self) -> int:
        """The store's clock in ticks."""
        return self._residents.clock

    @property
    def kind(self) -> Column:
        """`UnitKind` of each: LEAF for a page that nothing follows or holds, which goes with all that lies on it; otherwise STATE."""
        return np.where((self._column("children") > 0) | (self._column("holds") > 0), UnitKind.STATE, UnitKind.LEAF)

    @property
    def last_access(self) -> Column:
        """Tick of the store at which the page, an object on it, or a page that was given up below it was last used or made."""
        return self._column("tick")

    @property
    def hits(self) -> Column:
        """Reads of the most-read object of the page since the store was opened."""
        rows = self._residents.residents()
        hits = np.zeros(self._residents.pages.used, np.uint32)
        np.maximum.at(hits, self._residents.columns["page"][rows], self._residents.columns["hits"][rows])
        return hits[self._nodes]

    @property
    def depth(self) -> Column:
        """Pages from the start of the sequence to the unit's end; 0 where the caller gave none."""
        return self._column("depth")

    @property
    def children(self) -> Column:
        """Number of stored pages that follow."""
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
        """Return a mask by node: True where a restore can end."""
        residents = self._residents
        used = residents.pages.used
        return (residents.pages.columns["states"][:used] > 0) | residents.sustains()[:used]

    def _upwards(self, until: npt.NDArray[np.bool_], step: Column | None = None) -> Column:
        """Return for each unit the sum of `step` (None: 1 each) over its page and those before it, ending before one that `until` marks."""
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
