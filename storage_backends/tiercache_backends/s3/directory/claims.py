"""Claims of sets on keys: each object is written by one call of this process at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.core import Outcome
from tiercache.storage.base import SetItem
from tiercache.storage.residents import parents_first
from tiercache.storage.restorable import Admissibility
from tiercache_backends.s3.directory.notes import PackClaim, WritePlan, Writing
from tiercache_backends.s3.directory.objects import PackedObjects


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
