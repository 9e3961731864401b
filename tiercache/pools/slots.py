"""Allocator for the numbers of a fixed range, such as slots of a device pool or blocks of the host arena."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tiercache.core import Locations
from tiercache.errors import ConfigError, PoolFullError, SlotError


def as_locations(values: Any, capacity: int, noun: str) -> Locations:
    """Return `values` as int64, shape [n], each in [0, capacity).

    Raises SlotError for a value out of range, and for an array of another shape or dtype. The message calls
    one value a `noun`.
    """
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SlotError(
            f"{noun}s come as a one-dimensional array of integers, not {array.dtype} of shape {array.shape}"
        )
    array = array.astype(np.int64, copy=False)
    # Read as unsigned, negative numbers are the largest. Counting is faster than a maximum.
    if np.count_nonzero(array.view(np.uint64) >= capacity):
        outside = (array < 0) | (array >= capacity)
        raise SlotError(f"{noun} {array[outside][0]} is out of range; there are {capacity}")
    return array


class SlotSource(Protocol):
    """Source of the slots of a device pool: a `SlotAllocator`, or the allocator of an engine that lends them.

    Thread safety: one owner thread.
    """

    @property
    def available(self) -> int:
        """Number of free slots."""

    def alloc(self, n: int) -> Locations:
        """Take `n` slots: int64, shape [n]. Raises PoolFullError, with nothing taken, if fewer are free."""

    def free(self, slots: npt.ArrayLike) -> None:
        """Give slots back."""


class SlotAllocator:
    """Allocator of the numbers 0 .. capacity - 1, which are called slots here.

    A stack has the free slots, and a bitmap marks the used ones. Slots that were freed together are handed
    out together and in the same order. Neighbours therefore stay neighbours, and their copies can be merged.

    Error messages call a slot a `noun`. Raises ConfigError for a negative capacity.

    Thread safety: only one owner thread calls `alloc` and `free`.
    """

    def __init__(self, capacity: int, *, noun: str = "slot") -> None:
        if capacity < 0:
            raise ConfigError(f"a capacity of {capacity} {noun}s is not possible; use 0 or more")
        self._noun = noun
        # The top of the stack is on the right, at index `available - 1`:
        #   5 4 3 2 1 0      alloc(2) returns 0 1, read from the right
        #   5 4 3 2 . .      free([0, 1]) puts 1 0 behind the 2 again
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._available = capacity
        self._used = np.zeros(capacity, np.bool_)

    @property
    def capacity(self) -> int:
        """Number of all slots, free and used."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Number of free slots."""
        return self._available

    def alloc(self, n: int) -> Locations:
        """Take `n` slots: int64, shape [n].

        Raises PoolFullError, with nothing taken, if fewer are free, and SlotError for a negative `n`.
        """
        if n < 0:
            raise SlotError(f"cannot take {n} {self._noun}s; use 0 or more")
        if n > self._available:
            raise PoolFullError(
                f"{n} {self._noun}s are wanted and {self._available} of {self.capacity} are free; evict first"
            )
        start = self._available - n
        slots = self._free[start : self._available][::-1].copy()
        self._available = start
        self._used[slots] = True
        return slots

    def free(self, slots: npt.ArrayLike) -> None:
        """Give slots back.

        Raises SlotError, with nothing freed, if a slot is out of range, is named twice or is free already.
        """
        array = as_locations(slots, self.capacity, self._noun)
        used = self._used[array]
        if np.count_nonzero(used) < len(used):
            raise SlotError(f"{self._noun} {array[~used][0]} is free already; give each back once")
        # All these slots are in use. If a slot was named twice, clearing the bits lowers the number of used
        # slots by less than the length of `array`. This finds duplicates without a sort.
        self._used[array] = False
        end = self._available + len(array)
        if self.capacity - int(np.count_nonzero(self._used)) != end:
            self._used[array] = True
            raise SlotError(
                f"one call gives back {len(array)} {self._noun}s and names one twice; give each back once"
            )
        self._free[self._available : end] = array[::-1]
        self._available = end

    def allocated(self, slots: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which of `slots` are handed out: bool, shape [n]. Raises SlotError for one out of range."""
        return self._used[as_locations(slots, self.capacity, self._noun)]
