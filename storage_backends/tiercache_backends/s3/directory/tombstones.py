"""Tombstones that are known: which entries of which packs were removed."""

from __future__ import annotations

from collections.abc import Container, Mapping


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
