"""Names under the prefix, and their bytes."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

_MAX_RUBBISH: Final = 1 << 16
"""Number of useless names that are remembered, at some 150 bytes of memory each."""


class Ledger:
    """The names that are known, with their bytes: packs, tombstones, and rubbish.

    Rubbish is what cannot be read, and packs of which no object is known here. Only so much of it is
    remembered: the rest counts nothing, and is found anew by each sweep.

    Thread safety: none of its own; the directory calls it under its mutex.
    """

    def __init__(self) -> None:
        self.used = 0
        """Bytes of all names."""
        self._sizes: dict[str, int] = {}
        self._coming: set[str] = set()
        """Names that this process is writing."""
        self._rubbish: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    @property
    def rubbish(self) -> AbstractSet[str]:
        """The rubbish that is remembered."""
        return self._rubbish

    def size(self, name: str) -> int:
        """Return the bytes of a name that is known."""
        return self._sizes[name]

    def settled(self) -> set[str]:
        """Return all names, without those that this process is writing."""
        return self._sizes.keys() - self._coming

    def expect(self, name: str, size: int, limit: int) -> bool:
        """Enter a name that this process is about to write, unless there would be more bytes than `limit`.

        A limit of 0 is none.
        """
        if limit and self.used + size > limit:
            return False
        self.enter(name, size)
        self._coming.add(name)
        return True

    def enter(self, name: str, size: int) -> None:
        """Enter a name, or settle one that was expected."""
        self.used += size - self._sizes.get(name, 0)
        self._sizes[name] = size
        self._coming.discard(name)

    def enter_rubbish(self, name: str, size: int) -> None:
        """Enter a name as rubbish, unless there is too much of it already."""
        if len(self._rubbish) < _MAX_RUBBISH:
            self.enter(name, size)
            self._rubbish.add(name)

    def strike(self, name: str) -> None:
        """Take out a name, whether it is known or not."""
        self.used -= self._sizes.pop(name, 0)
        self._coming.discard(name)
        self._rubbish.discard(name)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all bytes add up."""
        assert self.used == sum(self._sizes.values())
        assert self._rubbish | self._coming <= self._sizes.keys()
