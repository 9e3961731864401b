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

With shares (`shares`) the pages of each owner have queues of their own, and the lowest entry of those that
may be evicted is next. An owner that has no more than its guarantee is passed over by the writes of others. A
set beyond its owner's quota evicts pages of that owner only.

A page stays while another page follows it. A conversation therefore loses its end first, and its beginning
can still be restored. When a page is evicted, the page before it gets the later of the two times of last use
and the higher of the two ranks. A page is therefore never ranked below a page that followed it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

import numpy as np

from tiercache.policy import Policy
from tiercache.policy.base import Ranks
from tiercache.storage.coldest import Survey
from tiercache.storage.lanes import Lane, first_dead, first_live, lanes_for, turns
from tiercache.storage.pages import BROKEN, NONE, QUEUED, Ints
from tiercache.storage.residents import Residents
from tiercache.storage.shares import Writer
from tiercache.storage.units import Ranking

_FEW_ENTRIES: Final = 1024
"""Number of entries up to which outdated entries in the queues do not matter."""
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


@dataclass(slots=True)
class _Eviction:
    """One eviction: for whom it makes room, and what it has put aside."""

    taker: Taker | None
    """Receiver of the objects; None to look only."""
    writer: Writer | None
    states_to_keep: set[int] = field(default_factory=set)
    spared: list[tuple[float, int]] = field(default_factory=list)
    """Entries of live units that must stay during this eviction."""


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
        self._owners = residents.owners
        self._policy = policy
        self._ranking = Ranking(residents, policy, page_tokens)
        self._lanes: Sequence[Lane] = [Lane(0, policy)]
        """Queues by number of the owner."""
        self._pushes_left = 0
        """Number of entries that may be added before the queues are looked at for stale ones."""
        self.unfinished = False
        """Whether the last eviction stopped in the middle of a unit.

        The rest of that unit is useless: call `sweep` to evict the rest.
        """
        self.not_worth = False
        """Whether the last eviction stopped at a unit of a higher rank than the new objects."""

    def __len__(self) -> int:
        """Return the number of entries in the queues, also of those that are out of date."""
        return sum([len(lane) for lane in self._lanes])

    def restart(self) -> None:
        """Fill the queues anew at the next eviction; call this when the owners have changed."""
        self._start_again()

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
        elif self._ranking.by_value or (self._lanes[0].live.steady and not flags[node] & _LIVE):
            self._offer_live(node)

    def _offer_live(self, node: int) -> None:
        """Put a unit into the queue of live pages if its rank is within the horizon."""
        rank = self._ranking.rank_of(node)
        if self._lane_of(node).live.admits(rank):
            self._push_live(rank, node)

    def evict(
        self,
        taker: Taker,
        write_parents: Iterable[int] = (),
        *,
        promising: bool = True,
        rank: float | None = None,
        writer: Writer | None = None,
    ) -> None:
        """Evict units until the taker has enough, or no unit is left that may be evicted.

        `rank`: the rank of the new objects that need the room (`Residents.rank`), None if they have no value.
        If the next unit has a higher rank, the eviction stops, and sets `not_worth`.

        `promising` says that a restore can use the new objects as soon as they are stored. Other objects
        evict nothing that can be restored while more than three quarters of all bytes are unproven
        (`Residents.is_mostly_unproven`). A byte is unproven until a restore can use it.

        `write_parents` are the pages whose next page is being written now. The nearest state at or before
        each of these pages stays. Without that state, all pages after it would be useless until the next
        state is stored. Pages that are being read or held stay too.

        `writer`: whose objects need the room, which decides what may be evicted if there are shares; None if
        nobody's do.
        """
        self.not_worth = False
        if taker.enough():
            return
        self._refresh()
        eviction = _Eviction(taker, writer, self._states_to_keep(write_parents))
        highest = inf if rank is None else rank
        while not taker.full() and self._take_next(eviction, highest, promising=promising):
            if taker.enough():
                break
            self._catch_up()
        for spared in eviction.spared:
            self._push_live(*spared)

    def _take_next(self, eviction: _Eviction, highest: float, *, promising: bool) -> bool:
        """Evict one unit; return False if there is none that may be evicted."""
        lanes = lanes_for(self._lanes, self._owners, eviction.writer)
        if self._take_dead(eviction, lanes):
            return True
        if not self._owners.active:
            if promising or not self._residents.is_mostly_unproven:
                return self._take_live(eviction, lanes, highest) or (
                    not self.not_worth and self._take_waiting(eviction, lanes)
                )
            return self._take_waiting(eviction, lanes)
        # While most bytes are unproven, new objects that are not promising replace no live page, unless the
        # unproven bytes are of owners that are passed over.
        keep_live = self._residents.is_mostly_unproven and not promising
        if keep_live and self._take_waiting(eviction, lanes):
            return True
        if keep_live and len(lanes) == len(self._lanes):
            return False
        for group, highest_here in turns(lanes, self._owners, eviction.writer, highest):
            if self._take_live(eviction, group, highest_here):
                return True
            if not self.not_worth and self._take_waiting(eviction, group):
                return True
        return False

    def sweep(self, taker: Taker) -> None:
        """Evict objects that no restore can use, until none is left or the taker is full."""
        self._catch_up()
        eviction = _Eviction(taker, None)
        while not taker.full() and self._take_dead(
            eviction, lanes_for(self._lanes, self._owners, eviction.writer)
        ):
            self._catch_up()
        self.unfinished = taker.full()

    def is_worth(self, rank: float, writer: Writer | None = None) -> bool:
        """Return whether new objects of this rank would be stored if room had to be made for them.

        They are, unless there is something to evict, and all of it is of use and has a higher rank.
        """
        self._refresh()
        lanes = lanes_for(self._lanes, self._owners, writer)
        if any(lane.dead for lane in lanes) or len(turns(lanes, self._owners, writer, rank)) > 1:
            return True
        self.not_worth = False
        eviction = _Eviction(None, writer)
        # No unit has a rank below minus infinity, so the first one stays, and is put back into the queue.
        self._take_live(eviction, lanes, -inf)
        for entry in eviction.spared:
            self._push_live(*entry)
        return not self.not_worth or min(lane.live.lowest[0] for lane in lanes if lane.live) <= rank

    def survey(self) -> Survey:
        """Return copies of all columns that say what is evicted next; this changes no order."""
        return Survey(self._residents, self._ranking)

    def _refresh(self) -> None:
        """Bring the queues up to date, before an eviction."""
        residents, lanes, steady = self._residents, self._lanes, self._ranking.steady
        if (
            residents.pages.recount_orphans()
            or steady is not lanes[0].live.steady
            or (self._ranking.by_value and residents.pages.values.settle())
            or (not steady and self._is_outdated())
            or self._has_stale_entries()
        ):
            self._start_again()
        self._catch_up()

    def _is_outdated(self) -> bool:
        """Return whether the order of any lane is out of date; an empty one beside others does not count."""
        clock = self._residents.clock
        return any(lane.live.is_outdated(clock) for lane in self._lanes if lane.live or not lane.owner)

    def _catch_up(self) -> None:
        """Queue the pages that may have become evictable since the last call.

        These pages are not known at the first call, nor when there were too many to note. The queues are then
        rebuilt from all pages.
        """
        noted = self._residents.pages.take_evictable()
        if noted is None:
            self._start_again()
        if self._lanes[0].live.horizon == -inf:
            self._scan(self._lanes)
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
            low = ranks <= max(lane.live.horizon for lane in self._lanes)
            for rank, node in zip(ranks[low].tolist(), units[low].tolist(), strict=True):
                if self._lane_of(node).live.admits(rank):
                    self._push_live(rank, node)

    def _take_dead(self, eviction: _Eviction, lanes: Sequence[Lane]) -> bool:
        """Evict the dead page that was used least recently; return False if there is none."""
        residents, flags, pages = self._residents, self._residents.pages.flags, self._residents.pages
        for lane in lanes:
            for kind in (False, True):
                while lane.waiting[kind] and residents.is_overdue(lane.waiting[kind][0][0], kv=kind):
                    self._offer(self._pop_waiting(lane, kind))
        # Pages that are being read are put aside until the loop ends. Otherwise the loop would not end.
        pinned: list[tuple[int, int]] = []
        taken = False
        while not taken and (first := first_dead(lanes)) is not None:
            tick, node = heapq.heappop(first.dead)
            flags[node] &= 0xFF ^ _DEAD
            if not residents.pages.is_leaf(node) or not residents.is_dead(node):
                self._offer(node)
            elif pages.tick[node] > tick:
                self._push_dead(node)
            elif residents.is_pinned(node) or not self._take(eviction, residents.rows_of(node)):
                pinned.append((tick, node))
            else:
                taken = True
        for entry in pinned:
            self._push_dead(entry[1])
        return taken

    def _take(self, eviction: _Eviction, rows: list[int]) -> int:
        """Evict these objects of one page; return how many of them may be evicted.

        Each is taken only if its owner may still lose one: the states of a page come before its KV, which is
        of no use with them gone, but stays if it is all that its owner is guaranteed.
        """
        taker, writer, owners, residents = eviction.taker, eviction.writer, self._owners, self._residents
        assert taker is not None, "an eviction has a receiver"
        if not owners.active:
            taker.take(rows)
            return len(rows)
        mine = None if writer is None else writer.owner
        only_mine = writer is not None and writer.for_quota
        taken = 0
        if len(rows) > 1:
            rows = sorted(rows, key=lambda row: not residents.attached[row])
        for row in rows:
            owner = owners.of(residents.namespace[row])
            if owner != mine and (only_mine or not owners.is_above(owner)):
                continue
            taker.take([row])
            taken += 1
        return taken

    def _take_live(self, eviction: _Eviction, lanes: Sequence[Lane], highest: float) -> bool:
        """Evict the live unit with the lowest rank; return False if there is none, or if it is `not_worth`.

        It is if its rank is above `highest`.
        """
        residents, pages = self._residents, self._residents.pages
        # The branches below decide on the page with the lowest rank:
        #   1. it has no object, or is a useless leaf           the leaf goes to another queue
        #   2. it is no leaf, and has no state to evict alone   it is queued again once it is a leaf
        #   3. its rank has risen (steady ranks)                it is put back, or waits for the next pass
        #   4. it is being read, or a writer needs its state    it is put aside until this eviction ends
        #   5. it is worth more than the new objects            it is put back, and nothing is evicted
        #   6. otherwise                                        it is evicted
        while (lane := self._lowest(lanes)) is not None:
            rank, node = lane.live.pop()
            pages.flags[node] &= 0xFF ^ _LIVE
            leaf = residents.pages.is_leaf(node)
            if pages.first[node] < 0 or (residents.pages.is_useless(node) and leaf):
                self._offer(node)
            elif not leaf and not self._ranking.stands_alone(node):
                continue
            elif lane.live.steady and (now := self._ranking.rank_of(node)) > rank:
                if lane.live.admits(now):
                    self._push_live(now, node)
            elif residents.is_pinned(node) or (
                not leaf and (node in eviction.states_to_keep or pages.holds[node])
            ):
                eviction.spared.append((rank, node))
                pages.flags[node] |= _LIVE
            elif rank > highest or eviction.taker is None:
                self._push_live(rank, node)
                self.not_worth = True
                return False
            elif self._take_unit(node, eviction, leaf=leaf):
                self._ranking.evicted(rank)
                lane.taken += 1
                return True
            else:
                eviction.spared.append((rank, node))
                pages.flags[node] |= _LIVE
        return False

    def _lowest(self, lanes: Sequence[Lane]) -> Lane | None:
        """Return the lane with the live unit of the lowest rank; None if there is no live unit."""
        if not self._owners.active:
            return lanes[0] if lanes[0].live or self._scan(lanes) else None
        clock = self._residents.clock
        empty = [lane for lane in lanes if not lane.live and not lane.is_barren(self._owners, clock)]
        if empty:
            self._scan(empty)
        return first_live(lanes)

    def _take_unit(self, node: int, eviction: _Eviction, *, leaf: bool) -> bool:
        """Evict a leaf and the pages that are useless without it. Of any other page, evict the states.

        Returns False if nothing was evicted.
        """
        residents, up = self._residents, self._residents.pages.parent_node
        taker = eviction.taker
        assert taker is not None, "an eviction has a receiver"
        if not leaf:
            return (
                self._take(eviction, [row for row in residents.rows_of(node) if residents.attached[row]]) > 0
            )
        some = False
        while node >= 0 and not taker.full():
            # page    1 <- 2 <- 3 [state] <- 4 <- 5 [state]    without 5, page 4 is useless and is evicted
            #                                                  as well; 3 has a state and stays
            above = up[node]
            rows = residents.rows_of(node)
            taken = self._take(eviction, rows)
            some = some or taken > 0
            if taken < len(rows):
                return some
            alone = (
                above >= 0
                and residents.pages.is_leaf(above)
                and residents.pages.is_useless(above)
                and not residents.is_pinned(above)
            )
            node = above if alone else NONE
        self.unfinished = node >= 0
        return some

    def _take_waiting(self, eviction: _Eviction, lanes: Sequence[Lane]) -> bool:
        """Evict the waiting page with the lowest number; return False if there is none."""
        residents = self._residents
        pinned: list[int] = []
        taken = False
        while not taken:
            filled = [(lane, kind) for lane in lanes for kind in (False, True) if lane.waiting[kind]]
            if not filled:
                break
            node = self._pop_waiting(*min(filled, key=lambda one: one[0].waiting[one[1]][0]))
            if not residents.pages.is_leaf(node) or not residents.pages.is_useless(node):
                continue
            if residents.is_pinned(node) or not self._take(eviction, residents.rows_of(node)):
                pinned.append(node)
            else:
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

    def _scan(self, lanes: Sequence[Lane]) -> bool:
        """Queue the live units with the lowest ranks of these lanes, and their leaves that are in no queue.

        Returns whether live units were queued.
        """
        residents, pages = self._residents, self._residents.pages
        nodes = np.arange(pages.used)
        if len(lanes) < len(self._lanes):
            of = self._owners.of_all(pages.columns["namespace_id"][nodes])
            nodes = nodes[np.isin(of, [lane.owner for lane in lanes])]
        for lane in lanes:
            # The horizon is the highest rank that belongs in the queue. If there is nothing to rank now,
            # every later unit belongs in the queue.
            lane.live.horizon = inf
            lane.barren_at = (residents.clock, lane.taken)
        flags = pages.columns["flags"]
        units, others = self._sorted(nodes)
        for node in others.tolist():
            self._offer(node)
        nodes = units[flags[units] & _LIVE == 0]
        if not len(nodes):
            return False
        ranks = self._ranking.rank(nodes)
        owners = self._owners.of_all(pages.columns["namespace_id"][nodes]) if self._owners.active else None
        for lane in lanes:
            mine = slice(None) if owners is None else owners == lane.owner
            if len(nodes[mine]):
                self._fill(lane, nodes[mine], ranks[mine], len(nodes))
        return True

    def _fill(self, lane: Lane, nodes: Ints, ranks: Ranks, found: int) -> None:
        """Queue the lowest of these live units of one lane; a pass over the columns has found `found`."""
        chosen = lane.live.choose(ranks)
        rest = found - len(nodes)
        nodes, ranks = nodes[chosen], ranks[chosen]
        self._residents.pages.columns["flags"][nodes] |= _LIVE
        # The lanes are out of date together, or small ones would make passes for all.
        now = self._residents.clock + (rest if lane.live.horizon == inf else 0)
        lane.live.fill(list(zip(ranks.tolist(), nodes.tolist(), strict=True)), now)

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

    def _lane_of(self, node: int) -> Lane:
        if not self._owners.active:
            return self._lanes[0]
        return self._lanes[self._owners.of(self._residents.pages.namespace_id[node])]

    def _push_live(self, rank: float, node: int) -> None:
        self._residents.pages.flags[node] |= _LIVE
        self._pushes_left -= 1
        self._lane_of(node).live.push((rank, node))

    def _push_dead(self, node: int) -> None:
        pages = self._residents.pages
        if not pages.flags[node] & _DEAD:
            pages.flags[node] |= _DEAD
            self._pushes_left -= 1
            heapq.heappush(self._lane_of(node).dead, (pages.tick[node], node))

    def _push_waiting(self, node: int) -> None:
        pages = self._residents.pages
        kind = pages.kv[node] > 0
        if not pages.flags[node] & _WAITING[kind]:
            pages.flags[node] |= _WAITING[kind]
            self._pushes_left -= 1
            heapq.heappush(self._lane_of(node).waiting[kind], (pages.number[node], node))

    def _pop_waiting(self, lane: Lane, kind: bool) -> int:
        _, node = heapq.heappop(lane.waiting[kind])
        self._residents.pages.flags[node] &= 0xFF ^ _WAITING[kind]
        return node

    def _has_stale_entries(self) -> bool:
        # Entries of deleted pages stay in the queues. Without this check, the queues of a store in which
        # objects are only stored and deleted would grow without limit.
        if self._pushes_left > 0:
            return False
        self._pushes_left = 3 * self._residents.count + _FEW_ENTRIES - len(self)
        return self._pushes_left < 0

    def _start_again(self) -> None:
        self._residents.pages.columns["flags"] &= 0xFF ^ (_LIVE | _DEAD | _ANY_WAITING)
        self._lanes = [Lane(owner, self._policy) for owner in range(len(self._owners.names))]
        for lane in self._lanes:
            lane.live.steady = self._ranking.steady
