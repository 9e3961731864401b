"""Names under the prefix with their bytes, and the tombstones among them: which entries were removed."""

from __future__ import annotations

from collections.abc import Container, Mapping
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


class Tombstones:
    """The tombstones in the bucket, and what they say of each pack.

    Thread safety: none of its own; the directory calls it under its mutex.
    """

    def __init__(self, limit: int) -> None:
        """Make room for so many removed entries."""
        self._limit = limit
        self._entries = 0
        self._dead: dict[str, Mapping[str, set[int]]] = {}
        self._of_pack: dict[str, set[str]] = {}

    def add(self, name: str, dead: Mapping[str, set[int]]) -> bool:
        """Take in a tombstone; return False if there is no room for what it says."""
        entries = sum(map(len, dead.values()))
        if self._entries + entries > self._limit:
            return False
        self._entries += entries
        self._dead[name] = dead
        for pack in dead:
            self._of_pack.setdefault(pack, set()).add(name)
        return True

    def remove(self, name: str) -> None:
        """Take out a tombstone, whether it is known or not."""
        dead = self._dead.pop(name, {})
        self._entries -= sum(map(len, dead.values()))
        for pack in dead:
            self._of_pack[pack].discard(name)
            if not self._of_pack[pack]:
                del self._of_pack[pack]

    def of(self, pack: str) -> set[int]:
        """Return the entries of a pack that were removed."""
        return set().union(*(self._dead[name][pack] for name in self._of_pack.get(pack, ())))

    def forsaken(self, packs: Container[str]) -> dict[str, set[str]]:
        """Return the tombstones none of whose packs is among `packs`, and the names of these packs."""
        return {
            name: set(dead) for name, dead in self._dead.items() if not any(pack in packs for pack in dead)
        }
