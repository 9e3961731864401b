"""Sets of a `file` store: reserve blocks -> write -> one catalog transaction -> publish, with the evictions that they need."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from errno import EIO
from threading import Lock
from typing import Final

from tiercache.core import Outcome
from tiercache.storage.base import SetItem
from tiercache.storage.checksum import NO_MAC, Seal, Sealed
from tiercache.storage.env import Env
from tiercache_backends.file.catalog import Catalog
from tiercache_backends.file.holdings import Claim, Claims, Departure, Holdings
from tiercache_backends.file.movement import Mover
from tiercache_backends.file.objects import Facts
from tiercache_backends.file.records import MAX_EXTENTS
from tiercache_backends.file.removal import Removal
from tiercache_backends.file.runs import Movement
from tiercache_backends.file.slabs import Slabs

BATCH: Final = 4096
"""Most objects per catalog transaction."""
_LOW_WATER: Final = 64
"""With less than 1/64 of its blocks free, a store evicts in the transaction of the next set, so later sets need not wait for blocks."""
_LEAST: Final = 16
"""Records that one transaction may remove in any case, however full the catalog is."""
_FEW: Final = 1024
"""Most objects that a set evicts in its own transaction, so that it is not delayed for long."""


class Writer:
    """Writer of what batches have claimed. With `power`, a set is on the medium before it is acknowledged.

    Thread safety: any thread may call.
    """

    def __init__(
        self, env: Env, catalog: Catalog, slabs: Slabs, mover: Mover, holdings: Holdings, removal: Removal, seal: Seal, *, power: bool
    ) -> None:
        self._env = env
        self._catalog = catalog
        self._slabs = slabs
        self._mover = mover
        self._holdings = holdings
        self._removal = removal
        self._seal = seal
        self._power = power
        self._growth = Lock()
        self._cramped = False

    def store(self, items: Sequence[SetItem], claims: Claims, outcomes: list[Outcome]) -> None:
        """Write what is claimed, set the outcomes by item index, and settle every claim, whatever happens."""
        facts: dict[int, Facts] = {}
        try:
            self._reserve(claims.fresh)
            placed = _rooted(claims.fresh, {claim.index for claim in claims.fresh if not 0 < len(claim.extents) <= MAX_EXTENTS})
            for claim in claims.fresh:
                outcomes[claim.index] = Outcome.THROTTLED
            facts = self._write(items, placed, outcomes)
        finally:
            self._holdings.publish(claims, facts)
        self._sweep()

    def _reserve(self, claims: Sequence[Claim]) -> None:
        """Allocate blocks for the claims, by growing the slabs first and then by evicting. Claims that get none keep no extents."""
        fitting = [c for c in claims if c.blocks <= self._slabs.budget_blocks]
        if self._catalog.removable(len(claims)) <= 0:
            self._evict(0, len(claims), claims)
        blocks = sum(c.blocks for c in fitting)
        while True:
            if self._holdings.needs_second_slab(blocks):
                self._grow()
            missing = self._holdings.allocate(fitting)
            if not missing or not (self._grow() or self._evict(missing, 1, claims)):
                break

    def _grow(self) -> bool:
        """Preallocate one more slab, or a missing end of one; return False where the budget or the disk is used up."""
        with self._growth:
            try:
                extent = self._slabs.grow()
            except OSError as error:
                if not self._cramped:
                    self._removal.failed("grow", error)
                self._cramped = True
                return False
            if extent is None:
                return False
            self._cramped = False
            self._holdings.grow(extent)
            return True

    def _evict(self, blocks: int, objects: int, claims: Sequence[Claim]) -> bool:
        """Evict objects for `blocks` blocks and `objects` objects, as far as one separate transaction can; False if none was removed."""
        most = min(BATCH, max(_LEAST, self._catalog.removable(0)))
        departure = self._holdings.evict(blocks, objects, most, claims)
        if not self._removal.forget(departure) or not departure.leavers:
            return False
        self._holdings.count("evicted", len(departure.leavers))
        return True

    def _sweep(self) -> None:
        """Remove the rest of an evicted conversation that was too large for one transaction."""
        while (departure := self._holdings.sweep(min(BATCH, max(_LEAST, self._catalog.removable(0))))).leavers:
            if not self._removal.forget(departure):
                return
            self._holdings.count("evicted", len(departure.leavers))

    def _ahead(self, changes: int) -> Departure:
        """Take out objects to remove in the transaction that stores `changes` objects, so that the next set finds free blocks."""
        short = self._holdings.shortage(None if self._cramped else self._slabs.budget_blocks, _LOW_WATER)
        most = min(_FEW, max(_LEAST, changes, self._catalog.removable(changes)))
        return self._holdings.evict(short, 1, most) if short > 0 else Departure()

    def _write(self, items: Sequence[SetItem], claims: Sequence[Claim], outcomes: list[Outcome]) -> dict[int, Facts]:
        """Write the bytes of the claims, add them to the catalog in one transaction, and return the facts of what is stored, by item."""
        with ExitStack() as stack:
            try:
                fds = stack.enter_context(self._slabs.witnesses(e for c in claims for e in c.extents)) if self._power else []
                written = self._move(items, claims, outcomes)
                self._slabs.sync(fds)
                return self._acknowledge(items, written, outcomes) if written else {}
            except OSError as error:
                outcome = self._removal.failed("set", error)
                for claim in claims:
                    outcomes[claim.index] = outcome
                return {}

    def _move(self, items: Sequence[SetItem], claims: Sequence[Claim], outcomes: list[Outcome]) -> list[tuple[Claim, Sealed]]:
        """Write the bytes; return the claims for which that succeeded, with the seals of their objects."""
        movements: list[Movement] = []
        for claim in claims:
            key, buffers, meta = items[claim.index]
            proof = None if meta.checksum and not self._seal.fingerprint else self._seal.proof(key, meta.length)
            movements.append(Movement(claim.extents, buffers, meta.length, proof))
        self._mover.write(movements)
        written: dict[int, Sealed] = {}
        for claim, movement in zip(claims, movements, strict=True):
            given = items[claim.index].meta.checksum
            if movement.error is None:
                checksum, mac = movement.proof.seal() if movement.proof else (given, NO_MAC)
                written[claim.index] = Sealed(given or checksum, mac)
                continue
            outcomes[claim.index] = self._removal.failed("set", movement.error)
            if movement.error.errno == EIO:
                extents, claim.extents = claim.extents, ()
                self._removal.settle(extents)
        rooted = claims if len(written) == len(claims) else _rooted(claims, {c.index for c in claims} - written.keys())
        return [(claim, written[claim.index]) for claim in rooted]

    def _acknowledge(self, items: Sequence[SetItem], written: Sequence[tuple[Claim, Sealed]], outcomes: list[Outcome]) -> dict[int, Facts]:
        """Add what was written to the catalog, and remove what is evicted ahead of need, in one transaction; return the facts.

        Raises OSError where the transaction fails.
        """
        metas = [items[claim.index].meta for claim, _ in written]
        records, further = self._catalog.pack(
            [items[claim.index] for claim, _ in written],
            [claim.extents for claim, _ in written],
            [sealed for _, sealed in written],
            self._env.time_ns(),
        )
        departure = self._ahead(len(written))
        try:
            self._catalog.apply(records, further, removals=departure.numbers)
        except OSError:
            self._holdings.restored(departure)
            raise
        self._holdings.count("evicted", len(departure.leavers))
        self._removal.settle(self._holdings.removed(departure))
        facts: dict[int, Facts] = {}
        for (claim, sealed), meta, number in zip(written, metas, records["number"].tolist(), strict=True):
            facts[claim.index] = Facts(number, meta.length, meta.depth or 0, claim.wanted.space, sealed)
            outcomes[claim.index] = Outcome.STORED
        return facts


def _rooted(claims: Sequence[Claim], failed: AbstractSet[int]) -> list[Claim]:
    """Return the claims that did not fail and follow none that did. `claims`: parents before what follows them."""
    if not failed:
        return list(claims)
    rooted: list[Claim] = []
    missing: set[int] = set()
    for claim in claims:
        if claim.index not in failed and claim.parent not in missing:
            rooted.append(claim)
        elif claim.is_page:
            missing.add(claim.node)
    return rooted
