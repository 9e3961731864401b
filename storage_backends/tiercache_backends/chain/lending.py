"""Buffers for calls that may be given up.

A call that hangs may use its buffers long after its caller has gone on. Two kinds of memory allow that:
attached memory, whose owner is told to withhold the places, and private memory, which nobody else uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, TypeVar

import numpy as np

from tiercache.core import BLOCK_ALIGN, Outcome
from tiercache.storage.attached import AttachedMemory, SharedExtent, locate, quarantine
from tiercache.storage.base import GetItem, SetItem, meta_of
from tiercache.storage.vectors import address_of, take

Item = TypeVar("Item", GetItem, SetItem)

Payload = tuple[Sequence[memoryview], int]
"""Buffers of an object, and the bytes of them that are its payload."""


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


class Loan:
    """Buffers of one batch, lent to a call that may be given up.

    `buffers` has the buffers to pass to the store, one sequence per item. After a call that has ended, call
    `end`; when the call is given up, call `give_up` instead. `is_private`: whether the buffers are copies, so
    that the caller's own stay free.

    Thread safety: one thread at a time.
    """

    def __init__(
        self, payloads: Sequence[Payload], memories: Sequence[AttachedMemory], private: PrivateMemory
    ) -> None:
        self._memories: Final = memories
        self._private: Final = private
        self._extents: Final = _extents(payloads, memories)
        self.is_private: Final = self._extents is None
        self._memory: memoryview | None = None
        self.buffers: Final = (
            self._split([length for _, length in payloads])
            if self._extents is None
            else [buffers for buffers, _ in payloads]
        )

    def end(self) -> None:
        """Give private memory back, for later calls."""
        if self._memory is not None:
            self._private.give(self._memory)
            self._memory = None

    def _split(self, lengths: Sequence[int]) -> list[Sequence[memoryview]]:
        """Return one private buffer per payload, each at an address that direct I/O can use.

        payload 0: 5000 bytes         payload 1: 4096 bytes
        |0 ........ 5000 | padding    |8192 ......... 12288|
        """
        sizes = [-(-length // BLOCK_ALIGN) * BLOCK_ALIGN for length in lengths]
        self._memory = self._private.take(sum(sizes))
        views: list[Sequence[memoryview]] = []
        at = 0
        for size in sizes:
            views.append([self._memory[at : at + size]])
            at += size
        return views

    def give_up(self) -> Callable[[], None]:
        """Withhold attached buffers from their owner; return the function that ends this."""
        ends = quarantine(self._extents or (), self._memories)

        def end() -> None:
            for each in ends:
                each()

        return end


class LentGets(Loan):
    """Buffers of a get: pass `items` to the store, and then its outcomes to `collect`."""

    def __init__(
        self, given: Sequence[GetItem], memories: Sequence[AttachedMemory], private: PrivateMemory
    ) -> None:
        super().__init__([(item.buffers, item.length) for item in given], memories, private)
        self.given: Final = given
        self.items: Final = _lent(given, self.buffers)

    def collect(self, outcomes: Sequence[Outcome]) -> None:
        """Copy the payloads that are HIT from private memory into the caller's buffers, and end."""
        if self.is_private:
            for item, [source], outcome in zip(self.given, self.buffers, outcomes, strict=True):
                if outcome is Outcome.HIT:
                    for target in take(item.buffers, 0, item.length):
                        target[:] = source[: target.nbytes]
                        source = source[target.nbytes :]
        self.end()


class LentSets(Loan):
    """Buffers of a set: pass `items` to the store."""

    def __init__(
        self,
        given: Sequence[SetItem],
        memories: Sequence[AttachedMemory],
        private: PrivateMemory,
        *,
        owned: bool = False,
    ) -> None:
        """Lend the payloads; those that are neither `owned` nor in attached memory are copied.

        A payload in attached memory is lent with its checksum. A store that computed the checksum itself, in
        a call that was given up, might do so after the caller has written something else there.
        """
        payloads = [] if owned else [(item.buffers, item.meta.length) for item in given]
        super().__init__(payloads, memories, private)
        if owned:
            self.items: Sequence[SetItem] = given
            return
        if self.is_private:
            for item, [target] in zip(given, self.buffers, strict=True):
                for source in take(item.buffers, 0, item.meta.length):
                    target[: source.nbytes] = source
                    target = target[source.nbytes :]
            self.items = _lent(given, self.buffers)
        else:
            self.items = [item._replace(meta=meta_of(item)) for item in given]


def _extents(payloads: Sequence[Payload], memories: Sequence[AttachedMemory]) -> list[SharedExtent] | None:
    """Return the places of all buffers in attached memory; None if a buffer is not in it."""
    found: list[SharedExtent] = []
    for buffers, _ in payloads:
        places = locate(buffers, memories) if memories else None
        if places is None:
            return None
        found += places
    return found


def _lent(given: Sequence[Item], buffers: Sequence[Sequence[memoryview]]) -> list[Item]:
    return [item._replace(buffers=lent) for item, lent in zip(given, buffers, strict=True)]
