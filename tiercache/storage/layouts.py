"""Table that gives a small number to each layout digest, the first half of the digest of an object.

A store has few layouts. In the table of objects (`residents`), a number of 4 bytes replaces the 32 bytes of a
layout digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tiercache.core import DIGEST_BYTES
from tiercache.storage.pages import NONE, PAGE_KEY_BYTES, Links, Words, groups_of

LAYOUT_BYTES: Final = DIGEST_BYTES - PAGE_KEY_BYTES


class Layouts:
    """Table from layout digest to a small number; a layout is dropped with its last object.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._counts: list[int] = []
        self._free: list[int] = []

    def load(self, layouts: Words) -> Links:
        """Fill an empty table with these layouts, shape (n, 4); return the number of each."""
        numbers, distinct = np.zeros(len(layouts), np.int32), layouts[:1]
        if (layouts != distinct).any():
            order, begins = groups_of(layouts)
            numbers[order] = np.cumsum(begins) - 1
            distinct = layouts[order[begins]]
        self._names = [row.tobytes() for row in distinct]
        self._ids = {name: i for i, name in enumerate(self._names)}
        self._counts = np.bincount(numbers, minlength=len(self._names)).tolist()
        return numbers

    def find(self, layout: bytes) -> int:
        """Return the number of a layout, or NONE."""
        return self._ids.get(layout, NONE)

    def find_many(self, layouts: Words, digests: Sequence[bytes]) -> Links:
        """Return the number of each layout, or NONE.

        `layouts`: the first halves of `digests`, shape (n, 4).
        """
        # A batch has the objects of one pool together, so equal layouts are mostly neighbours. One look-up
        # serves each run of equal layouts.
        if (layouts == layouts[0]).all():
            return np.full(len(layouts), self.find(digests[0][:LAYOUT_BYTES]), np.int32)
        starts = np.concatenate([[0], np.flatnonzero((layouts[1:] != layouts[:-1]).any(1)) + 1])
        numbers = np.fromiter(
            (self.find(digests[start][:LAYOUT_BYTES]) for start in starts.tolist()), np.int32, len(starts)
        )
        return np.repeat(numbers, np.diff(starts, append=len(digests)))

    def name(self, number: int) -> bytes:
        """Return the layout with this number."""
        return self._names[number]

    def obtain(self, layout: bytes, count: int = 1) -> int:
        """Count `count` more objects of a layout; return its number."""
        number = self._ids.get(layout)
        if number is None:
            number = self._free.pop() if self._free else len(self._names)
            if number == len(self._names):
                self._names.append(layout)
                self._counts.append(0)
            self._names[number] = layout
            self._ids[layout] = number
        self._counts[number] += count
        return number

    def release(self, number: int) -> None:
        """Subtract one object of the layout with this number; if none is left, drop the layout."""
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._ids[self._names[number]]
            self._free.append(number)
