"""Objects that are taken out of a directory, and the packs that can be removed with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiercache_backends.s3.directory.ledger import Ledger
from tiercache_backends.s3.directory.notes import Pack, PackRemoval, RemovedObject
from tiercache_backends.s3.directory.objects import PackedObjects

_SPREAD: Final = 8 << 20
"""Bytes of objects in packs with others that one eviction may forget without winning any room."""


class PackTaker:
    """Removal in the making. See `eviction.Taker`.

    Thread safety: none of its own; used only under the mutex of the directory.
    """

    def __init__(self, objects: PackedObjects) -> None:
        self._objects = objects
        self._taken: list[RemovedObject] = []
        self._touched: dict[str, Pack] = {}
        self._whole: list[Pack] = []
        self._nbytes = 0
        """Payload bytes of the objects."""

    def take(self, rows: Sequence[int]) -> None:
        """Take out these objects, all copies included."""
        for row in rows:
            self._nbytes += self._objects.residents.length[row]
            removed = self._objects.take(row)
            self._taken.append(removed)
            for pack, _ in removed.places:
                self._touched[pack.name] = pack
                if not pack.live and not pack.condemned:
                    self._condemn(pack)

    def removal(self) -> PackRemoval:
        """Return what was taken out."""
        dead: dict[str, set[int]] = {
            name: set() for name, pack in self._touched.items() if not pack.condemned
        }
        for found in self._taken:
            for pack, number in found.places:
                if pack.name in dead:
                    dead[pack.name].add(number)
        return PackRemoval(self._taken, self._whole, dead)

    def _condemn(self, pack: Pack) -> None:
        pack.condemned = True
        self._whole.append(pack)


class PackEvicter(PackTaker):
    """Removal that makes room: also of packs that are of no use.

    Thread safety: as `PackTaker`.
    """

    def __init__(
        self, objects: PackedObjects, ledger: Ledger, *, nbytes: int, limit: int, count: int, most: int
    ) -> None:
        """Make room for `nbytes` bytes within `limit`, and for `count` objects within `most`."""
        super().__init__(objects)
        self._ledger = ledger
        self._wanted = nbytes
        self._limit = limit
        self._count = count
        self._most = most
        self._rubbish = [*ledger.rubbish]
        self._freed = sum(map(ledger.size, self._rubbish))
        if objects.copies:  # else each pack has the object of one of its keys
            for pack in objects.packs.values():
                if not pack.live and not pack.condemned:
                    self._condemn(pack)

    def enough(self) -> bool:
        """Return whether there is room for the new objects."""
        return (
            self._ledger.used - self._freed + self._wanted <= self._limit
            and self._objects.residents.count + self._count <= self._most
        )

    def full(self) -> bool:
        """Return whether much more was taken out than is needed, without a pack that is dead as a whole."""
        return self._nbytes > 4 * (self._wanted + _SPREAD) + self._freed

    def removal(self) -> PackRemoval:
        """Return what was taken out: no tombstone is needed for what nobody wants."""
        return super().removal()._replace(dead={}, rubbish=self._rubbish)

    def _condemn(self, pack: Pack) -> None:
        super()._condemn(pack)
        self._freed += pack.size
