"""Changes of a directory in the making: keys that sets have claimed, and objects that are taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiercache.core import Outcome
from tiercache.storage.base import SetItem
from tiercache.storage.residents import parents_first
from tiercache.storage.restorable import Admissibility
from tiercache_backends.s3.directory.ledger import Ledger
from tiercache_backends.s3.directory.objects import (
    Pack,
    PackClaim,
    PackedObjects,
    PackRemoval,
    RemovedObject,
    WritePlan,
    Writing,
)


class WriteClaims:
    """Sorting of the items of sets, and notes on what calls of this process are writing.

    Thread safety: none of its own; the directory calls it under its mutex.
    """

    def __init__(self, objects: PackedObjects, limit: int, *, bounded: bool) -> None:
        """`limit`: objects that may be known; a bounded store evicts some, others take no more."""
        self._objects = objects
        self._limit = limit
        self._bounded = bounded
        self._writing: dict[bytes, Writing] = {}

    def plan(self, items: Sequence[SetItem]) -> WritePlan:
        """Sort items of different keys, and claim those that are to be written; `release` must follow."""
        plan = WritePlan([None] * len(items))
        batch = [(item.key.page_key, item.meta.parent) for item in items]
        missing: set[bytes] = set()
        pages = self._objects.residents.pages
        nodes = {
            page: pages.hold(page) for page in {page for pair in batch for page in pair if page is not None}
        }
        plan.held += nodes.values()
        for i in parents_first(batch):
            item, (page, above) = items[i], batch[i]
            node, parent = nodes[page], None if above is None else nodes[above]
            plan.outcomes[i] = outcome = self._verdict(plan, i, item, node, parent, page in missing)
            if outcome in (Outcome.THROTTLED, Outcome.ERROR) and node != parent:
                missing.add(page)
        pages.refuse(missing)
        return plan

    def end(self, claim: PackClaim, outcome: Outcome) -> None:
        """End a claim; calls that wait for its object get this outcome."""
        claim.writing.outcome = outcome
        del self._writing[claim.item.key.digest]
        if claim.is_page:
            pages = self._objects.residents.pages
            pages.expected(claim.node)
            if outcome is Outcome.THROTTLED:
                pages.refuse([claim.item.key.page_key])
        claim.writing.ended.set()

    def release(self, plan: WritePlan) -> None:
        """Let go of the pages that a plan holds."""
        for node in plan.held:
            self._objects.residents.pages.release(node)

    def check_integrity(self) -> None:
        """Raise AssertionError if anything is still claimed."""
        assert not self._writing, "nothing is being written"

    def _verdict(
        self, plan: WritePlan, i: int, item: SetItem, node: int, parent: int | None, refused: bool
    ) -> Outcome | None:
        """Return the outcome of an item that is not written; None if it was claimed, or waits for another."""
        residents, meta = self._objects.residents, item.meta
        row = residents.find(item.key.digest)
        if row >= 0:
            residents.renew(row)
            residents.hint(row, meta.value, meta.worker)
            return Outcome.HIT
        writing = self._writing.get(item.key.digest)
        if writing is not None:
            plan.waits.append((i, writing))
            return None
        namespace_id = self._objects.namespace_id(meta.namespace)
        admissibility = residents.pages.admissibility(
            node, parent, meta.depth or 0, namespace_id, refused=refused
        )
        if admissibility is Admissibility.IMPOSSIBLE:
            return Outcome.ERROR
        full = residents.count >= self._limit and not self._bounded
        if admissibility is not Admissibility.FINE or full:
            return Outcome.THROTTLED
        claim = PackClaim(i, item, node, parent, Writing())
        self._writing[item.key.digest] = claim.writing
        plan.claims.append(claim)
        if claim.is_page:
            residents.pages.expect(node, meta.depth or 0, namespace_id)
        return None


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
