"""A chain of tiers: a store over stores, the fastest first."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Self, TypeVar

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import StorageError, UnavailableError
from tiercache.settings import Kind, read_values
from tiercache.storage.base import (
    FLUSH_SECONDS,
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    SharedMemory,
    StorageBackend,
    StoreContext,
    Usage,
)
from tiercache.storage.env import Env
from tiercache.storage.history import History, TierHistory
from tiercache.storage.registry import capabilities_of
from tiercache.storage.shares import Shares
from tiercache.storage.tiers import ObservedTier, TierChange
from tiercache_backends.chain.batches import Offers, SetBatch, read_batch
from tiercache_backends.chain.changes import Changes, tier_of
from tiercache_backends.chain.lineup import Lineup, Lineups
from tiercache_backends.chain.movement import Deletions, Digests
from tiercache_backends.chain.scans import Scans
from tiercache_backends.chain.settings import TierSettings, parse_tiers
from tiercache_backends.chain.shares import ChainShares, check_tiers
from tiercache_backends.chain.tier import Tier, check_stores

T = TypeVar("T")

KIND: Final = "chain"
_COPIES_S: Final = FLUSH_SECONDS / 3
"""Maximum seconds that a flush waits for copies to lower tiers; the rest is for the stores themselves.

It is less than three default deadlines, which a chain in another daemon has as a tier of this one.
"""
_CLOSE_S: Final = 10.0
"""Maximum seconds that a close waits for copies to lower tiers."""


class TierChain(StorageBackend):
    """Store over stores: a get is answered by the first tier that has the object, a set by the first that
    takes it.

    Other tiers get copies in the background: lower ones as their write policy says, upper ones by promotion.
    Tiers can change while the chain serves: each call is bound to the tiers with which it began. What the
    chain has at its opening of `persistent` and `shared` is promised: a tier without it cannot join.

    A tier that is out is not asked, so its objects are misses until it is back. An object is present as long
    as one tier has it. Every copy counts in `usage`.

    Thread safety: as `StorageBackend`. `Deletions.changed` is the only lock that calls share; it is not held
    while a tier is called.
    """

    def __init__(self, tiers: Sequence[Tier], env: Env | None = None) -> None:
        """Open the tiers, the fastest first.

        A tier that cannot be opened is left out until it can. Raises StorageError if none can be opened.
        """
        self._env: Final = env or Env()
        self._deletions: Final = Deletions()
        self._offers: Final = Offers()
        self._scans: Final = Scans()
        try:
            for opened in [tier.begin_open() for tier in tiers]:
                opened()
            if not any(tier.is_readable for tier in tiers):
                raise StorageError(f"no tier can be opened: {_reasons(tiers)}")
        except BaseException:  # whatever it is, no tier stays open, and it is raised again
            for tier in tiers:
                tier.close()
            raise
        self._lineups: Final = Lineups(tiers, self._deletions, self._env)
        self._promised: Final = Capabilities.common(tier.capabilities for tier in tiers)
        self._shares: Final = ChainShares()
        self._changes: Final = Changes(
            self._lineups, self._deletions, self._promised, self._shares, self._env
        )

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        # All settings are checked before the first tier has threads or is open.
        tiers = check_stores(_tiers_of(section), context.env)
        return cls([tier_of(settings, context.env) for settings in tiers], context.env)

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        check_stores(_tiers_of(section), context.env)

    @classmethod
    def capabilities_of(cls, section: Mapping[str, Any]) -> Capabilities:
        able = [capabilities_of(tier.section) for tier in _tiers_of(section)]
        return replace(Capabilities.common(able), shares=any(one.shares for one in able))

    @classmethod
    def check_shares(cls, section: Mapping[str, Any], shares: Shares) -> None:
        check_tiers(shares, _tiers_of(section))

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that all tiers have now; `persistent` and `shared` only if they were promised.

        Otherwise a tier without them may join at any time.
        """
        now = Capabilities.common(tier.capabilities for tier in self.tiers)
        return replace(
            now,
            persistent=now.persistent and self._promised.persistent,
            shared=now.shared and self._promised.shared,
            shares=any(tier.capabilities.shares for tier in self.tiers),
        )

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers, the first first."""
        return self._lineups.current.tiers

    # --- changes while serving
    # --------------------------------------------------------------------------------------------------------

    def observed_tiers(self) -> Sequence[ObservedTier]:
        return [
            ObservedTier(tier.name, store, tier)
            for tier in self.tiers
            if (store := tier.opened) is not None and tier.is_readable
        ]

    def retier(
        self,
        tiers: Sequence[str | Mapping[str, Any]],
        drop: Collection[str] = (),
        shares: Shares | None = None,
    ) -> TierChange:
        return self._changes.retier(tiers, drop, shares)

    # --- calls with payload
    # --------------------------------------------------------------------------------------------------------

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._lineups.bound() as lineup, self._deletions.watch() as deleted:
            return read_batch(lineup, self._offers, items, deleted)

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._lineups.bound() as lineup, self._deletions.watch() as deleted:
            return read_batch(lineup, self._offers, items, deleted, is_use=False)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._lineups.bound() as lineup, self._deletions.watch() as deleted:
            return SetBatch(lineup, self._offers, items, deleted).store()

    # --- calls without payload
    # --------------------------------------------------------------------------------------------------------

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._lineups.bound() as lineup:
            return _asked(lineup, keys, Tier.exists, False)

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._lineups.bound() as lineup:
            return _asked(lineup, keys, Tier.describe, None)

    def history(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
        with self._lineups.bound() as lineup:
            _answering(lineup)
            return History([_presence(tier, keys) for tier in lineup.tiers])

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        with self._lineups.bound() as lineup:
            lineup.advise(keys, values, worker)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        digests = {key.digest for key in keys}
        with self._lineups.bound() as lineup, self._deletions.note(digests):
            _answering(lineup)
            self._withdraw(lineup, digests)
            gone = [False] * len(keys)
            # The last tier comes first, so that a scan, which goes downwards, does not name an object twice.
            for tier in reversed(lineup.tiers):
                gone = [one or other for one, other in zip(gone, tier.delete(keys), strict=True)]
            return gone

    def _withdraw(self, lineup: Lineup, digests: Digests) -> None:
        """Withdraw objects from all copies; raises UnavailableError if a copy of them does not end.

        Movers of tiers that have just joined the chain may have copies under way too.
        """
        movers = {*lineup.movers.values(), *self._lineups.current.movers.values()}
        with self._deletions.changed:
            for mover in movers:
                mover.withdraw(digests)
            patience = max(tier.settings.deadline for tier in lineup.tiers) * 4
            if not self._deletions.changed.wait_for(
                lambda: not any(mover.is_copying(digests) for mover in movers), patience
            ):
                raise UnavailableError("an object is being copied to a tier that does not answer; try again")

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._lineups.bound() as lineup:
            return self._scans.page(lineup.tiers, _answering(lineup), namespace, cursor)

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._lineups.bound() as lineup:
            for tier in lineup.tiers:
                tier.register_namespace(record)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._lineups.bound() as lineup:
            found: dict[bytes, NamespaceRecord] = {}
            for tier in reversed(_answering(lineup)):
                for record in tier.call("namespaces", lambda store: store.namespaces()):
                    found[record.namespace] = record.over(found.get(record.namespace))
            return list(found.values())

    def usage(self) -> Usage:
        with self._lineups.bound() as lineup:
            _answering(lineup)
            reports = [tier.report(lineup.movers[tier].waiting) for tier in lineup.tiers]
            capacities = [report.capacity_bytes for report in reports if report.health != "out"]
            return Usage(
                objects=sum(report.objects for report in reports),
                payload_bytes=sum(report.payload_bytes for report in reports),
                used_bytes=sum(report.used_bytes for report in reports),
                capacity_bytes=sum(capacities) if all(capacities) else 0,
                tiers=reports,
                owners=self._shares.summed(lineup.tiers),
            )

    def flush(self) -> None:
        with self._lineups.bound() as lineup:
            _answering(lineup)
            until = time.monotonic() + _COPIES_S
            for tier in lineup.readable():
                lineup.movers[tier].drain(until)
            faults = [
                f"tier {tier.name!r} lacks {lineup.movers[tier].missing or 'an unknown number of'} objects"
                f" that are written through to it: {tier.why or 'it has not caught up'}"
                for tier in _keepers(lineup)
                if not lineup.movers[tier].drain(until, caught_up=True)
            ]
            failed = _flushed(lineup.tiers)
            faults += [
                f"tier {tier.name!r} has not flushed {tier.unflushed} objects: {why}"
                for tier, why in failed.items()
                if tier.unflushed
            ]
            if faults:
                raise StorageError(f"{'; '.join(faults)}; flush again when it serves and has caught up")

    def share(self, shares: Shares) -> None:
        """Divide these shares among the tiers by their capacities; those that keep none have no part.

        Every copy counts, as in `usage`.
        """
        self._changes.share(shares)

    def attach(self, memory: SharedMemory) -> None:
        with self._lineups.bound() as lineup:
            for tier in lineup.tiers:
                tier.attach(memory)

    def close(self) -> None:
        if not self._changes.close():
            return
        self._lineups.current.gate.close()
        movers = self._lineups.current.movers
        until = time.monotonic() + _CLOSE_S
        for mover in movers.values():
            mover.drain(until)
        for mover in movers.values():
            mover.stop()
        for mover in movers.values():
            mover.close()
        for tier in movers:
            tier.close()


def _answering(lineup: Lineup) -> list[Tier]:
    """Return the tiers that are asked; raises UnavailableError if there are none."""
    tiers = lineup.readable()
    if not tiers:
        raise UnavailableError(f"no tier answers: {_reasons(lineup.tiers)}")
    return tiers


def _presence(tier: Tier, keys: Sequence[ObjectKey]) -> TierHistory:
    why = tier.why
    if tier.is_readable:
        try:
            return TierHistory(tier.name, [entry is not None for entry in tier.describe(keys)])
        except StorageError as error:
            why = str(error)
    return TierHistory(tier.name, [], why=why or "it does not answer")


def _keepers(lineup: Lineup) -> list[Tier]:
    """Return the tiers that promise to keep a copy of what the tiers above them acknowledge."""
    return [
        tier
        for tier in lineup.tiers[1:]
        if tier.capabilities.persistent and not tier.settings.read_only and tier.settings.writes_through
    ]


def _flushed(tiers: Sequence[Tier]) -> dict[Tier, str]:
    """Flush all tiers at the same time; return why, for those that could not be flushed."""
    failed: dict[Tier, str] = {}
    ends: dict[Tier, Callable[[], None]] = {}
    for tier in tiers:
        try:
            ends[tier] = tier.begin_flush()
        except StorageError as error:
            failed[tier] = str(error)
    for tier, end in ends.items():
        try:
            end()
        except StorageError as error:
            failed[tier] = str(error)
    return failed


def _tiers_of(section: Mapping[str, Any]) -> list[TierSettings]:
    # `parse_tiers` is called outside `read_values`, because its messages name tiers, not settings of a chain.
    values = read_values(f"storage type {KIND!r}", section, {"tiers": Kind(lambda tiers: tiers)})
    return parse_tiers(values.get("tiers"))


def _asked(
    lineup: Lineup, keys: Sequence[ObjectKey], ask: Callable[[Tier, list[ObjectKey]], list[T]], nothing: T
) -> list[T]:
    """Return for each key what the first tier answers that has the object, or `nothing`."""
    found = [nothing] * len(keys)
    for tier in _answering(lineup):
        left = [i for i, one in enumerate(found) if not one]
        with suppress(StorageError):
            for i, one in zip(left, ask(tier, [keys[i] for i in left]), strict=True):
                found[i] = one
    return found


def _reasons(tiers: Iterable[Tier]) -> str:
    return "; ".join(f"{tier.name}: {tier.why}" for tier in tiers)
