"""Embargoes on blocks that another process may still write to: they are not handed out again, even if their owner frees them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import numpy as np
import numpy.typing as npt

from tiercache.core import Locations, Mask
from tiercache.errors import SlotError
from tiercache.pools.slots import SlotAllocator, as_locations


class Embargoes:
    """Embargoes on the slots of one allocator.

    A slot under an embargo that is free, or is freed, is withheld: the allocator counts it as still in use, and to all other code it is
    gone. It goes back to the allocator with the owner's first `settle` after the last lift. `active` is False while no embargo is in force,
    no slot is withheld and no change waits for `settle`; the owner may then use the allocator directly.

    Thread safety: `begin` and the callable that it returns may be called, and `active` may be read, from any thread. The rest belongs to
    the allocator's owner. Either side holds the lock for the length of a few numpy calls.
    """

    def __init__(self, allocator: SlotAllocator, *, noun: str) -> None:
        self.active = False
        self._allocator = allocator
        self._noun = noun
        self._lock = Lock()
        self._counts: npt.NDArray[np.int32] = np.empty(0, np.int32)  # embargoes by slot; sized, like the next, with the first one
        self._withheld: Mask = np.empty(0, np.bool_)
        self._held = 0
        self._under_way = 0
        self._changes: list[Locations] = []
        """Slots whose count changed since the owner's last `settle`."""

    @property
    def withheld(self) -> int:
        """Slots that would be free without their embargo, as of the last `settle`."""
        return self._held

    def begin(self, slots: Locations) -> Callable[[], None]:
        """Put distinct slots under an embargo until the returned callable is called; calling it again is harmless."""
        with self._lock:
            if not len(self._counts):
                self._counts = np.zeros(self._allocator.capacity, np.int32)
                self._withheld = np.zeros(self._allocator.capacity, np.bool_)
            self._change(slots, 1)
        pending = [slots]

        def lift() -> None:
            with self._lock:
                if pending:
                    self._change(pending.pop(), -1)

        return lift

    def settle(self) -> None:
        """Withhold the free slots of new embargoes, and give back the slots that lifted embargoes withheld."""
        with self._lock:
            changes, self._changes = self._changes, []
            changed = np.unique(np.concatenate(changes)) if changes else np.empty(0, np.int64)
            barred = self._counts[changed] > 0
        back = changed[~barred & self._withheld[changed]]
        self._mark(back, False)
        self._allocator.free(back)
        self._withdraw(changed[barred & ~self._allocator.allocated(changed)])
        with self._lock:
            # A change that another thread made since the first `with` keeps `active` True, and waits for the next `settle`.
            self.active = bool(self._under_way or self._held or self._changes)

    def free(self, slots: npt.ArrayLike) -> None:
        """Free slots as the allocator does, but withhold those under an embargo. All or nothing: raises the allocator's SlotErrors."""
        self.settle()
        if not self.active:
            self._allocator.free(slots)
            return
        array = as_locations(slots, self._allocator.capacity, self._noun)
        spent = self._withheld[array] | ~self._allocator.allocated(array)
        if spent.any():
            raise SlotError(f"{self._noun} {array[spent][0]} is free already; give each back once")
        with self._lock:
            barred = self._counts[array] > 0
        mine = array[barred]
        if len(np.unique(mine)) != len(mine):
            raise SlotError(f"the {len(array)} {self._noun}s of one call name one of them twice; give each back once")
        self._allocator.free(array[~barred])
        self._mark(mine, True)

    def check_integrity(self) -> None:
        """Check that withheld slots are under an embargo and not free, and free slots under none. Raises AssertionError otherwise."""
        self.settle()
        with self._lock:
            counts = self._counts.copy()
            assert not self._changes, f"an embargo on {self._noun}s came or went during the check"
        assert (counts >= 0).all(), f"an embargo on a {self._noun} was lifted twice"
        assert self._under_way or not counts.any(), f"a {self._noun} is under an embargo that nobody can lift"
        assert self._held == int(np.count_nonzero(self._withheld)), f"{self._noun}s that are withheld are counted right"
        used = self._allocator.allocated(np.arange(len(counts)))
        assert used[self._withheld].all(), f"a {self._noun} that is withheld is on the free stack"
        assert (counts[self._withheld] > 0).all(), f"a {self._noun} is withheld without an embargo"
        assert not counts[~used].any(), f"a {self._noun} under an embargo is on the free stack"

    def _change(self, slots: Locations, by: int) -> None:
        self._counts[slots] += by
        self._under_way += by
        self._changes.append(slots)
        self.active = True

    def _withdraw(self, slots: Locations) -> None:
        """Take these slots off the free stack, and leave the others on it in their order."""
        if not len(slots):
            return
        self._mark(slots, True)
        free = self._allocator.alloc(self._allocator.available)
        self._allocator.free(free[~self._withheld[free]])

    def _mark(self, slots: Locations, withheld: bool) -> None:
        self._withheld[slots] = withheld
        self._held += len(slots) if withheld else -len(slots)
