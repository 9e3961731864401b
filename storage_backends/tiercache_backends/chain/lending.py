"""Buffers for calls that may be given up.

A call that hangs may use its buffers long after its caller has gone on. Two kinds of memory allow that:
attached memory, whose owner is told to withhold the places, and private memory, which nobody else uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from threading import Lock
from typing import Final, Generic, TypeVar

import numpy as np

from tiercache.core import BLOCK_ALIGN, Outcome
from tiercache.storage.attached import AttachedMemory, SharedExtent, align, locate, quarantine
from tiercache.storage.base import GetItem, SetItem, meta_of
from tiercache.storage.vectors import address_of, copy_in, copy_out

Item = TypeVar("Item", GetItem, SetItem)

_MAX_KEPT: Final = 128 << 20
"""Maximum bytes of private memory that a tier keeps between calls."""


class PrivateMemory:
    """Memory for the calls of one tier, kept for later calls: the first touch of new memory costs more than
    the copy.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview:
        """Return memory of at least `nbytes` bytes that begins at a multiple of BLOCK_ALIGN."""
        with self._lock:
            fits = [view for view in self._free if view.nbytes >= nbytes]
            if fits:
                found = min(fits, key=len)
                self._free = [view for view in self._free if view is not found]
                return found
        memory = memoryview(np.empty(nbytes + BLOCK_ALIGN, np.uint8).data)
        start = -address_of(memory) % BLOCK_ALIGN
        return memory[start : start + nbytes]

    def give(self, memory: memoryview) -> None:
        """Take memory back that nothing uses any more."""
        with self._lock:
            self._free.append(memory)
            while sum(view.nbytes for view in self._free) > _MAX_KEPT:
                self._free.pop(0)


class Loan(Generic[Item]):
    """Buffers of one batch, lent to a call that may be given up: pass `items` to the store.

    Items are lent as they are if they are all in attached memory, and with private memory otherwise. After a
    call that has ended, call `end`; when the call is given up, call `give_up` instead.

    Thread safety: one thread at a time.
    """

    def __init__(
        self, given: Sequence[Item], memories: Sequence[AttachedMemory], private: PrivateMemory
    ) -> None:
        self._given: Final[Sequence[Item]] = given
        self._memories: Final = memories
        self._private: Final = private
        self._extents: Final = _extents(given, memories)
        self._memory: memoryview | None = None
        self._views: Final[list[memoryview]] = self._split() if self._extents is None else []
        """Private memory of each item; empty if the items are lent as they are."""
        self.items: Sequence[Item] = given
        if self._views:
            lent = zip(given, self._views, strict=True)
            self.items = [item._replace(buffers=[view]) for item, view in lent]

    def end(self) -> None:
        """Give private memory back, for later calls."""
        if self._memory is not None:
            self._private.give(self._memory)
            self._memory = None

    def give_up(self) -> Callable[[], None]:
        """Withhold attached buffers from their owner; return the function that ends this."""
        ends = quarantine(self._extents or (), self._memories)

        def end() -> None:
            for each in ends:
                each()

        return end

    def _split(self) -> list[memoryview]:
        """Return private memory for each item, at addresses that direct I/O can use.

        item 0: 5000 bytes            item 1: 4096 bytes
        |0 ........ 5000 | padding    |8192 ......... 12288|
        """
        sizes = [align(_length(item)) for item in self._given]
        self._memory = memory = self._private.take(sum(sizes))
        return [memory[stop - size : stop] for stop, size in zip(accumulate(sizes), sizes, strict=True)]


class LentGets(Loan[GetItem]):
    """Buffers of a get; pass the store's outcomes to `collect`."""

    def collect(self, outcomes: Sequence[Outcome]) -> None:
        """Copy the payloads that are HIT from private memory into the caller's buffers, and end."""
        if self._views:
            for item, view, outcome in zip(self._given, self._views, outcomes, strict=True):
                if outcome is Outcome.HIT:
                    copy_out(view[: item.length], item.buffers)
        self.end()


class LentSets(Loan[SetItem]):
    """Buffers of a set.

    A payload in attached memory is lent with its checksum. A store that computed the checksum itself, in a
    call that was given up, might do so after the caller has written something else there.
    """

    def __init__(
        self, given: Sequence[SetItem], memories: Sequence[AttachedMemory], private: PrivateMemory
    ) -> None:
        super().__init__(given, memories, private)
        if self._views:
            for item, view in zip(given, self._views, strict=True):
                copy_in(view[: item.meta.length], item.buffers)
        else:
            self.items = [item._replace(meta=meta_of(item)) for item in given]


def _length(item: GetItem | SetItem) -> int:
    return item.length if isinstance(item, GetItem) else item.meta.length


def _extents(
    items: Sequence[GetItem] | Sequence[SetItem], memories: Sequence[AttachedMemory]
) -> list[SharedExtent] | None:
    """Return the places of all buffers in attached memory; None if a buffer is not in it."""
    found: list[SharedExtent] = []
    for item in items:
        places = locate(item.buffers, memories) if memories else None
        if places is None:
            return None
        found += places
    return found
