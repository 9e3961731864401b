"""Device slots that a request holds: its table of pages and its spare state slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tiercache.controller.state import ControllerState, Fence
from tiercache.core import ABSENT, Locations, Mask, PoolName, pending
from tiercache.errors import PoolFullError, SlotError
from tiercache.index import Inserted, PageLocations


class RequestSlots:
    """Device slots of one admission.

    `table[pool][i]` is the slot of page i. Where `own[pool][i]` is set, only this request uses the slot and frees it at its end; elsewhere
    the index owns it and the request's pins keep it in place. A state slot belongs to the request until a commit moves it to the index.

    Thread safety: the owner's thread.
    """

    def __init__(self, state: ControllerState, pages: int, resident: Mapping[PoolName, int], states: int) -> None:
        self._state = state
        self._total = pages
        self._open = True
        need = {p: pages - resident[p] for p in state.index.page_pools} | dict.fromkeys(state.index.state_pools, states)
        taken = state.take_device(need)
        self.table: dict[PoolName, Locations] = {p: np.empty(0, np.int64) for p in state.index.page_pools}
        self.own: dict[PoolName, Mask] = {p: np.empty(0, np.bool_) for p in state.index.page_pools}
        self._unused = {p: taken[p] for p in state.index.page_pools}
        self._spare: dict[PoolName, list[int]] = {p: taken[p].tolist() for p in state.index.state_pools}
        self._is_laid_out = False
        self._handed_out: dict[PoolName, set[int]] = {p: set() for p in state.index.state_pools}

    def lay_out(self, located: Mapping[PoolName, PageLocations]) -> dict[PoolName, Mask]:
        """Make the table for a restore of the `located` pages: the index's slots where it has some, this request's for all the rest.

        Returns, per pool, which of the located pages need a load; their slots belong to the index from now on. Raises PoolFullError,
        without any change, if there are too few slots.
        """
        more = {p: int((at.device == ABSENT).sum()) + self._total - len(at.device) - len(self._mine(p)) for p, at in located.items()}
        taken = self._state.take_device({p: max(0, n) for p, n in more.items()})
        need: dict[PoolName, Mask] = {}
        for pool, at in located.items():
            mine = np.concatenate([self._mine(pool), taken[pool]])
            depth = len(at.device)
            need[pool] = at.device == ABSENT
            table, mask = np.empty(self._total, np.int64), np.ones(self._total, np.bool_)
            table[:depth] = np.where(at.device < ABSENT, pending(at.device), at.device)
            mask[:depth] = need[pool]
            count = int(np.count_nonzero(mask))
            table[mask] = mine[:count]
            # When a layer failed, work that was computed from it may still be running on the device. Slots that are not needed any more
            # are therefore not freed now but at the end of the request.
            self._unused[pool] = mine[count:] if self._is_laid_out else mine[:0]
            if not self._is_laid_out:
                self._state.free_device(pool, mine[count:])
            self.table[pool] = table
            mask[:depth] = False
            self.own[pool] = mask
        self._is_laid_out = True
        return need

    def take_back(self, pool: PoolName, slots: Locations) -> None:
        """Take slots back from the index after the load that was to fill them failed.

        Page slots are kept, to compute pages into them instead. State slots are freed: no state is restored a second time. After `close`,
        all are freed.
        """
        if self._open and pool in self._unused:
            self._unused[pool] = np.concatenate([self._unused[pool], slots])
        else:
            self._state.free_device(pool, slots)

    def _mine(self, pool: PoolName) -> Locations:
        return np.concatenate([self._unused[pool], self.table[pool][self.own[pool]]])

    def extend(self, pages: int, states: int) -> None:
        """Cover `pages` pages, and hold `states` more state slots; raise PoolFullError, without any change, if there are too few."""
        more = max(0, pages - self._total)
        taken = self._state.take_device(dict.fromkeys(self.table, more) | dict.fromkeys(self._spare, states))
        for pool in self.table:
            self.table[pool] = np.concatenate([self.table[pool], taken[pool]])
            self.own[pool] = np.concatenate([self.own[pool], np.ones(more, np.bool_)])
        for pool, spare in self._spare.items():
            spare += taken[pool].tolist()
        self._total += more

    def give_state(self, pool: PoolName) -> int:
        """Hand one spare state slot of `pool` to the index."""
        return self._spare[pool].pop()

    def keep_states(self, count: int) -> None:
        """Keep at most `count` spare slots of each state pool, and free the others."""
        for pool, spare in self._spare.items():
            if spare[count:]:
                self._state.free_device(pool, np.array(spare[count:], np.int64))
                del spare[count:]

    def take_states(self) -> dict[PoolName, int]:
        """Hand out one spare slot of each state pool, for the engine to fill; raise PoolFullError if a pool has none left."""
        if not all(self._spare.values()):
            raise PoolFullError("this admission has no spare state slot left; commit one, or extend the admission by more states")
        taken = {p: spare.pop() for p, spare in self._spare.items()}
        for pool, slot in taken.items():
            self._handed_out[pool].add(slot)
        return taken

    def check_states(self, states: Iterable[Mapping[PoolName, int]]) -> None:
        """Raise SlotError unless every slot was handed out by `take_states`, one for each state pool, none twice."""
        seen: set[tuple[PoolName, int]] = set()
        for slots in states:
            if set(slots) != set(self._spare):
                raise SlotError(f"a state needs a slot of each of {sorted(self._spare)}, not of {sorted(slots)}")
            for pool, slot in slots.items():
                if slot not in self._handed_out[pool] or (pool, slot) in seen:
                    raise SlotError(f"state slot {slot} of pool {pool} is not this admission's; commit slots from take_states, each once")
                seen.add((pool, slot))

    def settle(self, inserted: Inserted, fence: Fence | None) -> None:
        """Follow an insert: the index owns adopted slots, duplicates are freed behind `fence`, and rejected states are spare again."""
        duplicates: dict[PoolName, Locations] = {}
        for pool, pages in inserted.pages.items():
            table, own = self.table[pool].copy(), self.own[pool][: inserted.depth]
            if (mine := pages.duplicate & own).any():
                duplicates[pool] = table[: inserted.depth][mine]
            own &= ~(pages.adopted | pages.duplicate)
            table[: inserted.depth] = pages.table
            self.table[pool] = table
        if duplicates:
            self._state.retire(duplicates, fence)
        for _, pool, slot in inserted.adopted_states:
            self._handed_out[pool].discard(slot)
        for _, pool, slot in inserted.rejected_states:
            self._handed_out[pool].discard(slot)
            self._spare[pool].append(slot)

    def private(self) -> dict[PoolName, Locations]:
        """Return, per pool, every slot that belongs to this request alone."""
        states = {p: np.array([*spare, *self._handed_out[p]], np.int64) for p, spare in self._spare.items()}
        return {p: self._mine(p) for p in self.table} | states

    def close(self) -> dict[PoolName, Locations]:
        """Return every slot that belongs to this request alone, for the caller to free, and take none back from now on."""
        self._open = False
        return self.private()
