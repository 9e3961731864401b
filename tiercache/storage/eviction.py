"""Eviction order of every store: unrestorable objects first, then the units of the lowest rank.

1. Dead objects, the least recently used first. Some of these could be restored in the past, but can no longer
   be restored. The others have waited too long for the object that would make them useful.
2. Units. A unit is a leaf (a page that no page follows), with its states and with the earlier pages that
   become useless without the leaf. A state in the middle of a path may be a unit as well, which is evicted
   without its page. Values that callers gave rank the units, or else the policy does (`units.Ranking`).
3. Waiting objects: recent KV that may still get its state, and recent states that may still get their KV. A
   new object that has to wait evicts units of group 2 only while waiting objects take at most three quarters
   of all bytes. Without this limit, a conversation without any state would evict everything that can be
   restored.

A page stays while another page follows it. A conversation therefore loses its end first, and its beginning
can still be restored. When a page is evicted, the page before it gets the later of the two times of last use
and the higher of the two ranks. A page is therefore never ranked below a page that followed it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from math import inf
from typing import Final, Protocol

import numpy as np

from tiercache.policy import Policy
from tiercache.policy.order import Front
from tiercache.storage.coldest import Survey
from tiercache.storage.pages import BROKEN, NONE, QUEUED, Ints
from tiercache.storage.residents import Residents
from tiercache.storage.units import Ranking

_FRONT: Final = 1024
"""Minimum number of units that a pass over the columns puts into the queue of live pages (see `Front`)."""
# Flags of a node by queue. _WAITING is indexed by kind: False for a state without KV, True for KV without a
# state.
_LIVE, _DEAD, _WAITING = QUEUED, 2 * QUEUED, (4 * QUEUED, 8 * QUEUED)
_ANY_WAITING: Final = _WAITING[False] | _WAITING[True]


class Taker(Protocol):
    """The store's side of an eviction, which removes objects and says when to stop.

    Thread safety: the store's mutex is held.
    """

    def take(self, rows: list[int]) -> None:
        """Remove these objects of one page; the implementation calls `Residents.leave` for each."""

    def enough(self) -> bool:
        """Return whether there is enough room now. Called between units."""

    def full(self) -> bool:
        """Return whether this eviction has removed as many objects as it may. Called between pages."""


class EvictionOrder:
    """Queues of the pages of a store, in the order in which they are evicted.

    An entry may be out of date, and is checked when it comes to the front of its queue. This class reads the
    tables of the store; the tables note which pages may have become evictable, and never call this class.

    Live pages (here: pages that a restore can use) are ordered by rank (`Ranking`): the lowest rank is
    evicted first. When the queue of live pages is empty, a pass over the columns of the page table ranks all
    units, and queues the units of the lowest ranks (see `Front`). A steady rank (`Policy.steady`) depends on
    its unit alone. If it has risen since the pass, the unit is put back. If a value has made it fall, the
    unit is queued a second time, and the later of the two entries is dropped or put back in its turn.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self, residents: Residents, policy: Policy, page_tokens: int = 1) -> None:
        self._residents = residents
        self._ranking = Ranking(residents, policy, page_tokens)
        self._live: Front[tuple[float, int]] = Front(policy, _FRONT)
        self._dead: list[tuple[int, int]] = []
        self._waiting: tuple[list[tuple[int, int]], ...] = [], []
        """Heaps of waiting pages, by kind: states that wait for KV, and KV that waits for a state.

        An entry has the page's `number` (see `PageTable`) and the page's node.
        """
        self.unfinished = False
        """Whether the last eviction stopped in the middle of a unit.

        The rest of that unit is useless: call `sweep` to evict the rest.
        """
        self.not_worth = False
        """Whether the last eviction stopped at a unit of a higher rank than the new objects."""

    def _offer(self, node: int) -> None:
        """Put a page into the queue to which it belongs, if it is a leaf or has a state to evict alone."""
        residents = self._residents
        if not residents.pages.is_leaf(node):
            if self._ranking.by_value and self._ranking.stands_alone(node):
                self._offer_live(node)
            return
        flags = residents.pages.flags
        if residents.is_dead(node):
            self._push_dead(node)
        elif residents.pages.is_useless(node):
            self._push_waiting(node)
        elif self._ranking.by_value or (self._live.steady and not flags[node] & _LIVE):
            self._offer_live(node)

    def _offer_live(self, node: int) -> None:
        """Put a unit into the queue of live pages if its rank is within the horizon."""
        rank = self._ranking.rank_of(node)
        if self._live.admits(rank):
            self._push_live(rank, node)

    def evict(
        self,
        taker: Taker,
        write_parents: Iterable[int] = (),
        *,
        promising: bool = True,
        rank: float | None = None,
    ) -> None:
        """Evict units until the taker has enough, or no unit is left.

        `rank`: the rank of the new objects that need the room (`Residents.rank`), None if they have no value.
        If the next unit has a higher rank, the eviction stops, and sets `not_worth`.

        `promising` says that a restore can use the new objects as soon as they are stored. Other objects
        evict nothing that can be restored while more than three quarters of all bytes are unproven
        (`Residents.is_mostly_unproven`). A byte is unproven until a restore can use it.

        `write_parents` are the pages whose next page is being written now. The nearest state at or before
        each of these pages stays. Without that state, all pages after it would be useless until the next
        state is stored. Pages that are being read or held stay too.
        """
        self.not_worth = False
        if taker.enough():
            return
        residents = self._residents
        self._refresh()
        spared: list[tuple[float, int]] = []
        states_to_keep = self._states_to_keep(write_parents)
        highest = inf if rank is None else rank
        while not taker.enough() and not taker.full():
            self._catch_up()
            if self._take_dead(taker):
                continue
            # While most bytes are unproven, new objects that are not promising replace no live page.
            keep_live = residents.is_mostly_unproven and not promising
            if not keep_live and self._take_live(taker, spared, states_to_keep, highest):
                continue
            if self.not_worth or not self._take_waiting(taker):
                break
        for rank, node in spared:
            self._push_live(rank, node)

    def sweep(self, taker: Taker) -> None:
        """Evict objects that no restore can use, until none is left or the taker is full."""
        self._catch_up()
        while not taker.full() and self._take_dead(taker):
            self._catch_up()
        self.unfinished = taker.full()

    def is_worth(self, rank: float) -> bool:
        """Return whether new objects of this rank would be stored if room had to be made for them.

        They are, unless there is something to evict, and all of it is of use and has a higher rank.
        """
        self._refresh()
        if self._dead:
            return True
        self.not_worth = False
        spared: list[tuple[float, int]] = []
        # No unit has a rank below minus infinity, so the first one stays, and is put back into the queue.
        self._take_live(None, spared, set(), -inf)
        for entry in spared:
            self._push_live(*entry)
        return not self.not_worth or self._live.lowest[0] <= rank

    def survey(self) -> Survey:
        """Return copies of all columns that say what is evicted next; this changes no order."""
        return Survey(self._residents, self._ranking)

    def _refresh(self) -> None:
        """Bring the queues up to date, before an eviction."""
        residents = self._residents
        steady, self._live.steady = self._live.steady, self._ranking.steady
        if (
            residents.pages.recount_orphans()
            or steady is not self._live.steady
            or (self._ranking.by_value and residents.pages.values.settle())
            or self._live.is_outdated(residents.clock)
            or self._has_stale_entries()
        ):
            self._start_again()
        self._catch_up()

    def _catch_up(self) -> None:
        """Queue the pages that may have become evictable since the last call.

        These pages are not known at the first call, nor when there were too many to note. The queues are then
        rebuilt from all pages.
        """
        noted = self._residents.pages.take_evictable()
        if noted is None:
            self._start_again()
        if self._live.horizon == -inf:
            self._scan()
        else:
            self._offer_all(noted or ())

    def _offer_all(self, noted: Collection[int]) -> None:
        """Queue those of these pages that belong in a queue."""
        if not self._ranking.by_value:
            for node in noted:
                self._offer(node)
            return
        # Values come in batches of thousands, most of them for units of high ranks.
        units, others = self._sorted(np.fromiter(noted, np.int64, len(noted)))
        for node in others.tolist():
            self._offer(node)
        if len(units):
            ranks = self._ranking.rank(units)
            low = ranks <= self._live.horizon
            for rank, node in zip(ranks[low].tolist(), units[low].tolist(), strict=True):
                self._push_live(rank, node)

    def _take_dead(self, taker: Taker) -> bool:
        """Evict the dead page that was used least recently; return False if there is none."""
        residents, flags, pages = self._residents, self._residents.pages.flags, self._residents.pages
        for kind in (False, True):
            while self._waiting[kind] and residents.is_overdue(self._waiting[kind][0][0], kv=kind):
                self._offer(self._pop_waiting(kind))
        # Pages that are being read are put aside until the loop ends. Otherwise the loop would not end.
        pinned: list[tuple[int, int]] = []
        taken = False
        while self._dead and not taken:
            tick, node = heapq.heappop(self._dead)
            flags[node] &= 0xFF ^ _DEAD
            if not residents.pages.is_leaf(node) or not residents.is_dead(node):
                self._offer(node)
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

    def _take_live(
        self, taker: Taker | None, spared: list[tuple[float, int]], states_to_keep: set[int], highest: float
    ) -> bool:
        """Evict the live unit with the lowest rank; return False if there is none, or if it is `not_worth`.

        It is if its rank is above `highest`. Entries of units that must stay during this eviction are moved
        to `spared`.
        """
        residents, pages = self._residents, self._residents.pages
        # The branches below decide on the page with the lowest rank:
        #   1. it has no object, or is a useless leaf           the leaf goes to another queue
        #   2. it is no leaf, and has no state to evict alone   it is queued again once it is a leaf
        #   3. its rank has risen (steady ranks)                it is put back, or waits for the next pass
        #   4. it is being read, or a writer needs its state    it is put aside until this eviction ends
        #   5. it is worth more than the new objects            it is put back, and nothing is evicted
        #   6. otherwise                                        it is evicted
        while self._live or self._scan():
            rank, node = self._live.pop()
            pages.flags[node] &= 0xFF ^ _LIVE
            leaf = residents.pages.is_leaf(node)
            if pages.first[node] < 0 or (residents.pages.is_useless(node) and leaf):
                self._offer(node)
            elif not leaf and not self._ranking.stands_alone(node):
                continue
            elif self._live.steady and (now := self._ranking.rank_of(node)) > rank:
                if self._live.admits(now):
                    self._push_live(now, node)
            elif residents.is_pinned(node) or (not leaf and (node in states_to_keep or pages.holds[node])):
                spared.append((rank, node))
                pages.flags[node] |= _LIVE
            elif rank > highest or taker is None:
                self._push_live(rank, node)
                self.not_worth = True
                return False
            else:
                self._ranking.evicted(rank)
                self._take_unit(node, taker, leaf=leaf)
                return True
        return False

    def _take_unit(self, node: int, taker: Taker, *, leaf: bool) -> None:
        """Evict a leaf and the pages that are useless without it. Of any other page, evict the states."""
        residents, up = self._residents, self._residents.pages.parent_node
        if not leaf:
            taker.take([row for row in residents.rows_of(node) if residents.attached[row]])
            return
        while node >= 0 and not taker.full():
            # page    1 <- 2 <- 3 [state] <- 4 <- 5 [state]    without 5, page 4 is useless and is evicted
            #                                                  as well; 3 has a state and stays
            above = up[node]
            taker.take(residents.rows_of(node))
            alone = (
                above >= 0
                and residents.pages.is_leaf(above)
                and residents.pages.is_useless(above)
                and not residents.is_pinned(above)
            )
            node = above if alone else NONE
        self.unfinished = node >= 0

    def _take_waiting(self, taker: Taker) -> bool:
        """Evict the waiting page with the lowest number; return False if there is none."""
        residents = self._residents
        pinned: list[int] = []
        taken = False
        while not taken:
            kinds = [kind for kind in (False, True) if self._waiting[kind]]
            if not kinds:
                break
            node = self._pop_waiting(min(kinds, key=lambda kind: self._waiting[kind][0]))
            if not residents.pages.is_leaf(node) or not residents.pages.is_useless(node):
                continue
            if residents.is_pinned(node):
                pinned.append(node)
            else:
                taker.take(residents.rows_of(node))
                taken = True
        for node in pinned:
            self._push_waiting(node)
        return taken

    def _states_to_keep(self, write_parents: Iterable[int]) -> set[int]:
        """Return the nearest page with a state at or before each of `write_parents`.

        The result is empty for a steady policy, under which no state is evicted without its page.
        """
        found: set[int] = set()
        if self._ranking.steady and not self._ranking.by_value:
            return found
        pages = self._residents.pages
        # Pages of one conversation share their path. A walk ends where an earlier walk has been.
        seen: set[int] = set()
        for node in write_parents:
            while node >= 0 and node not in seen:
                seen.add(node)
                if pages.states[node]:
                    found.add(node)
                    break
                node = pages.parent_node[node]
        return found

    def _scan(self) -> bool:
        """Queue the live units with the lowest ranks, and all other leaves that are in no queue.

        Returns whether live units were queued.
        """
        residents, pages = self._residents, self._residents.pages
        # The horizon is the highest rank that belongs in the queue. If there is nothing to rank now, every
        # later unit belongs in the queue.
        self._live.horizon = inf
        flags = pages.columns["flags"]
        units, others = self._sorted(np.arange(pages.used))
        for node in others.tolist():
            self._offer(node)
        nodes = units[flags[units] & _LIVE == 0]
        if not len(nodes):
            return False
        ranks = self._ranking.rank(nodes)
        chosen = self._live.choose(ranks)
        nodes, ranks = nodes[chosen], ranks[chosen]
        flags[nodes] |= _LIVE
        self._live.fill(list(zip(ranks.tolist(), nodes.tolist(), strict=True)), residents.clock)
        return True

    def _sorted(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Return those of the pages that are live units, and the other leaves that are in no queue."""
        columns = self._residents.pages.columns
        first, children, holds, flags, live = (
            columns[name][nodes] for name in ("first", "children", "holds", "flags", "live")
        )
        there = first >= 0
        leaf = there & (children == 0) & (holds == 0)
        useful = (live > 0) & (flags & BROKEN == 0)
        inner = there & ~leaf & self._ranking.stand_alone(nodes)
        return nodes[(leaf & useful) | inner], nodes[leaf & ~useful & (flags & (_DEAD | _ANY_WAITING) == 0)]

    def _push_live(self, rank: float, node: int) -> None:
        self._residents.pages.flags[node] |= _LIVE
        self._live.push((rank, node))

    def _push_dead(self, node: int) -> None:
        pages = self._residents.pages
        if not pages.flags[node] & _DEAD:
            pages.flags[node] |= _DEAD
            heapq.heappush(self._dead, (pages.tick[node], node))

    def _push_waiting(self, node: int) -> None:
        pages = self._residents.pages
        kind = pages.kv[node] > 0
        if not pages.flags[node] & _WAITING[kind]:
            pages.flags[node] |= _WAITING[kind]
            heapq.heappush(self._waiting[kind], (pages.number[node], node))

    def _pop_waiting(self, kind: bool) -> int:
        _, node = heapq.heappop(self._waiting[kind])
        self._residents.pages.flags[node] &= 0xFF ^ _WAITING[kind]
        return node

    def _has_stale_entries(self) -> bool:
        # Entries of deleted pages stay in the queues. Without this check, the queues of a store in which
        # objects are only stored and deleted would grow without limit.
        return (
            len(self._live) + len(self._dead) + sum(map(len, self._waiting))
            > 3 * len(self._residents) + _FRONT
        )

    def _start_again(self) -> None:
        self._residents.pages.columns["flags"] &= 0xFF ^ (_LIVE | _DEAD | _ANY_WAITING)
        self._live.clear()
        self._dead, self._waiting = [], ([], [])
