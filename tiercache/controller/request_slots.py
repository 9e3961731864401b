"""Device slots that a request holds: its slot table for pages, and its state slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.core import ABSENT, Locations, Mask, PoolName, leading, pending
from tiercache.errors import PoolFullError, SlotError
from tiercache.index import Inserted, PathLocations
from tiercache.transfer import Fence


class RequestSlots:
    """Device slots of one admission.

    A slot belongs either to the request alone or to the index. The request frees its own slots at its end.
    The request's pins keep the index's slots in place.
    """

    def __init__(
        self,
        context: ControllerContext,
        pages: int,
        resident: Mapping[PoolName, int],
        states: int,
        *,
        loads_state: bool,
    ) -> None:
        """Reserve slots for `pages` pages and `states` states, and one for a restored state if `loads_state`.

        `resident` pages of each pool need no slot, because they are on the device or on their way there.
        Raises PoolFullError, with nothing changed, if there are too few slots.
        """
        self._context = context
        self.pages = pages
        """Number of pages that the admission covers; without page pools they take no slots."""
        self._open = True
        need = {p: pages - resident[p] for p in context.index.page_pools}
        need |= dict.fromkeys(context.index.state_pools, states + loads_state)
        self._states = states
        taken = context.allocator.take_device(need)
        self.table: dict[PoolName, Locations] = {p: np.empty(0, np.int64) for p in context.index.page_pools}
        """Device slot of each page, by pool."""
        self.own: dict[PoolName, Mask] = {p: np.empty(0, np.bool_) for p in context.index.page_pools}
        """Mask of the pages whose slot belongs to this request alone, by pool."""
        self._unused = {p: taken[p] for p in context.index.page_pools}
        """Page slots of this request that are not in the table."""
        self._spare: dict[PoolName, list[int]] = {p: taken[p].tolist() for p in context.index.state_pools}
        """State slots of this request that are free to use."""
        self._has_table = False
        self._handed_out: dict[PoolName, set[int]] = {p: set() for p in context.index.state_pools}
        """State slots that the engine has taken and that are not committed yet."""

    def unused(self, pool: PoolName) -> int:
        """Return how many slots of `pool` a load may take before there is a slot table.

        Slots for the states of the caller are not among them.
        """
        if pool in self._spare:
            return max(0, len(self._spare[pool]) - self._states)
        return len(self._unused[pool])

    def give_pages(self, pool: PoolName, count: int) -> Locations:
        """Hand `count` of the `unused` slots of a page pool to the index, for a load ahead of the table."""
        given, self._unused[pool] = self._unused[pool][:count], self._unused[pool][count:]
        return given

    def build_slot_table(self, located: PathLocations) -> dict[PoolName, Mask]:
        """Build the table for a restore of the `located` pages; return the mask of pages to load, by pool.

        The slots of pages to load belong to the index from now on. The first table also makes sure of a slot
        for each located state that must be loaded. Raises PoolFullError, with nothing changed, if there are
        too few slots.
        """
        #   page       0                  depth          total
        #   located    | dev  dev  pend  no |              |   on the device, on its way there, or neither
        #   table      |  i    i    i    r  |  r    r   r  |   i: slot of the index, r: of this request
        #   need       |  -    -    -    x  |              |   the load that begins next fills these slots
        #   own        |  -    -    -    -  |  x    x   x  |   this request computes into these slots
        # More slots to take = pages to load + pages behind the depth - slots that this request has.
        need = {p: at.device == ABSENT for p, at in located.pages.items()}
        mine = {p: self._mine(p) for p in need}
        count = {p: int(np.count_nonzero(mask)) + self.pages - len(mask) for p, mask in need.items()}
        more = {p: n - len(mine[p]) for p, n in count.items()}
        if not self._has_table:
            # A state that was loaded before the table may belong to another depth.
            more |= {
                p: self._states + (one.device == ABSENT and one.host >= 0) - len(self._spare[p])
                for p, one in located.states.items()
            }
        taken = self._context.allocator.take_device({p: n for p, n in more.items() if n > 0})
        for pool, slots in taken.items():
            if pool in mine:
                mine[pool] = np.concatenate([mine[pool], slots])
            else:
                self._spare[pool] += slots.tolist()
        for pool, at in located.pages.items():
            used, depth = mine[pool][: count[pool]], len(at.device)
            self.own[pool] = own = np.zeros(self.pages, np.bool_)
            own[depth:] = True
            self.table[pool] = table = np.empty(self.pages, np.int64)
            # A pending slot is below ABSENT, and its decoded number above.
            np.maximum(at.device, pending(at.device), out=table[:depth])
            table[:depth][need[pool]] = used[: len(used) + depth - self.pages]
            table[depth:] = used[len(used) + depth - self.pages :]
            # A second table is built after a layer has failed. Work that uses the failed layer may still run
            # on the device, so slots that are no longer needed are freed only at the end of the request.
            left = mine[pool][len(used) :]
            self._unused[pool] = left if self._has_table else left[:0]
            if not self._has_table:
                self._context.allocator.free_device(pool, left)
        self._has_table = True
        return need

    def first_own(self, limit: int) -> int:
        """Return the first page below `limit` whose slot belongs to this request alone; `limit` if none."""
        return min((leading(~own[:limit]) for own in self.own.values()), default=limit)

    def take_back(self, pool: PoolName, slots: Locations) -> None:
        """Take slots back from the index, because the load that should fill them has failed.

        Page slots are kept, so that pages can be computed into them. State slots are kept until there is a
        table, and freed after that, because no state is loaded again then. After `close`, all are freed.
        """
        if self._open and pool in self._unused:
            self._unused[pool] = np.concatenate([self._unused[pool], slots])
        elif self._open and not self._has_table:
            self._spare[pool] += slots.tolist()
        else:
            self._context.allocator.free_device(pool, slots)

    def _mine(self, pool: PoolName) -> Locations:
        own = self.table[pool][self.own[pool]]
        return np.concatenate([self._unused[pool], own]) if len(own) else self._unused[pool]

    def extend(self, pages: int, states: int) -> None:
        """Extend the table to `pages` pages, and reserve `states` more state slots.

        Raises PoolFullError, with nothing changed, if there are too few slots.
        """
        more = max(0, pages - self.pages)
        need = dict.fromkeys(self.table, more) | dict.fromkeys(self._spare, states)
        taken = self._context.allocator.take_device(need)
        for pool in self.table:
            self.table[pool] = np.concatenate([self.table[pool], taken[pool]])
            self.own[pool] = np.concatenate([self.own[pool], np.ones(more, np.bool_)])
        for pool, spare in self._spare.items():
            spare += taken[pool].tolist()
        self.pages += more

    def give_state(self, pool: PoolName) -> int:
        """Hand one spare state slot of `pool` to the index."""
        return self._spare[pool].pop()

    def keep_states(self) -> None:
        """Keep the spare state slots for the states of the caller, and free the others."""
        for pool, spare in self._spare.items():
            if spare[self._states :]:
                self._context.allocator.free_device(pool, np.array(spare[self._states :], np.int64))
                del spare[self._states :]

    def take_states(self) -> dict[PoolName, int]:
        """Hand out one spare slot of each state pool, for the engine to fill.

        Raises PoolFullError if a pool has none left.
        """
        if not all(self._spare.values()):
            raise PoolFullError(
                "this admission has no spare state slot left; commit one, or extend the admission by more"
                " states"
            )
        taken = {p: spare.pop() for p, spare in self._spare.items()}
        for pool, slot in taken.items():
            self._handed_out[pool].add(slot)
        return taken

    def check_states(self, states: Iterable[Mapping[PoolName, int]]) -> None:
        """Raise SlotError unless each state has one slot of each state pool, all given out by `take_states`.

        No slot may occur twice.
        """
        seen: set[tuple[PoolName, int]] = set()
        for slots in states:
            needed, given = sorted(self._spare), sorted(slots)
            if needed != given:
                raise SlotError(f"a state needs a slot of each of {needed}, not of {given}")
            for pool, slot in slots.items():
                if slot not in self._handed_out[pool] or (pool, slot) in seen:
                    raise SlotError(
                        f"state slot {slot} of pool {pool} is not this admission's; commit slots from"
                        " take_states, each once"
                    )
                seen.add((pool, slot))

    def check_pages(self, full: int) -> None:
        """Raise SlotError unless the table has `full` pages."""
        if full > self.pages:
            raise SlotError(
                f"the tokens fill more than the {self.pages} pages of this admission; extend it before"
                " computing them"
            )

    def apply_insert(self, inserted: Inserted, fence: Fence | None) -> None:
        """Update the slots after a commit.

        The index owns *adopted* slots from now on. The slots of *rejected* states are spare again. A page is
        a *duplicate* if the index has the page in another slot. The slot of this request is then freed when
        the device has passed `fence`; until then, the device may write to the slot.
        """
        #   page        0         inserted.start        inserted.depth     total
        #   own         |  -   -   -   |  -   x   x   x   |   x   x   x   |   before the commit
        #   adopted     |              |      x       x   |               |   the index took the slot
        #   duplicate   |              |          x       |               |   the index has the page elsewhere
        #   table       |  i   i   i   |  i   i   i   i   |   r   r   r   |   i: slot of the index, r: own
        #   own         |  -   -   -   |  -   -   -   -   |   x   x   x   |   after the commit
        here = slice(inserted.start, inserted.depth)
        duplicates: dict[PoolName, Locations] = {}
        for pool, pages in inserted.pages.items():
            table, own = self.table[pool].copy(), self.own[pool][here]
            if (mine := pages.duplicate & own).any():
                duplicates[pool] = table[here][mine]
            own &= ~(pages.adopted | pages.duplicate)
            table[here] = pages.table
            self.table[pool] = table
        if duplicates:
            self._context.device_work.retire(duplicates, fence)
        for _, pool, slot in inserted.adopted_states:
            self._handed_out[pool].discard(slot)
        for _, pool, slot in inserted.rejected_states:
            self._handed_out[pool].discard(slot)
            self._spare[pool].append(slot)

    def private(self) -> dict[PoolName, Locations]:
        """Return every slot that belongs to this request alone, by pool."""
        states = {p: np.array([*spare, *self._handed_out[p]], np.int64) for p, spare in self._spare.items()}
        return {p: self._mine(p) for p in self.table} | states

    def close(self) -> dict[PoolName, Locations]:
        """Return every slot that belongs to this request alone. The caller frees these slots.

        Slots that `take_back` gets later are freed at once.
        """
        self._open = False
        return self.private()
