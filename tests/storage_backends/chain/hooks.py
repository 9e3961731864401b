"""Conformance hooks of a chain: those of the stores that are its tiers, each in a directory of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tiercache_backends.chain import TierChain
from tiercache_backends.chain.settings import TierSettings, WritePolicy
from tiercache_backends.chain.tier import Tier

from tests.storage.backends import OwnConformance
from tiercache.core import ObjectKey, ObjectMeta
from tiercache.settings import settings_in
from tiercache.storage.base import Capabilities, StorageBackend, TierReport, Usage
from tiercache.storage.env import Env


class QuickClock(Env):
    """A clock on which the pauses between examinations of a tier pass thirty times as fast."""

    def monotonic(self):
        return 30 * super().monotonic()


class Settled(TierChain):
    """A chain that has copied what is to be copied before a call returns, as the suite expects of a store."""

    def get(self, items):
        outcomes = super().get(items)
        self.settle()
        return outcomes

    def set(self, items):
        outcomes = super().set(items)
        self.settle()
        return outcomes

    def settle(self):
        # private: a flush also flushes the stores
        for mover in self._lineups.current.movers.values():
            mover.drain(time.monotonic() + 60)


def tier_of(
    store: Callable[[], StorageBackend], capabilities: Capabilities, env: Env | None = None, **settings: Any
) -> Tier:
    """A tier over the store that `store` opens, with short deadlines."""
    settings.setdefault("deadline", 30.0)
    if isinstance(policy := settings.get("write"), WritePolicy):
        settings["write"] = {"": policy}
    return Tier(TierSettings(**settings), store, capabilities, env or Env())


class ChainHooks(OwnConformance):
    """Conformance hooks of a chain of `parts`, the last with half of the capacity, and `sick` ones."""

    parts: Sequence[type[OwnConformance]]
    sick: Sequence[int] = ()
    settings: Sequence[dict[str, Any]] = ({}, {}, {})

    @property
    def copies(self) -> int:
        return len(self.parts) - len(self.sick)

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        path.mkdir(exist_ok=True)
        self.hooks = [part() for part in self.parts]
        well = [n for n in range(len(self.parts)) if n not in self.sick]
        tiers = []
        for n, hooks in enumerate(self.hooks):
            share = None if capacity is None else capacity // len(well)
            tiers.append(self.tier(n, partial(hooks.open_store, path / str(n), share)))
        return Settled(tiers)

    def tier(self, n: int, open_store: Callable[[], StorageBackend]) -> Tier:
        opened = open_store()
        opened.close()
        settings = {"name": f"{n}-{type(opened).__name__}", **self.settings[n]}
        if n in self.sick:  # one that promises a copy of every object would fail each flush
            settings["write"] = WritePolicy.SELECTIVE
        return tier_of(refuse if n in self.sick else open_store, opened.capabilities, **settings)

    def each(self, store: StorageBackend, k: ObjectKey) -> list[tuple[OwnConformance, StorageBackend]]:
        """The tiers that have an object, with their hooks, when nothing is on its way."""
        chain = chain_of(store)
        chain.flush()
        return [
            (hooks, inner)
            for hooks, inner in zip(self.hooks, map(store_of, chain.tiers), strict=True)
            if inner is not None and inner.exists([k]) == [True]
        ]

    def corrupt(self, store: StorageBackend, k: ObjectKey) -> None:
        for hooks, inner in self.each(store, k):
            hooks.corrupt(inner, k)

    def flip(self, store: StorageBackend, k: ObjectKey, bit: int) -> None:
        for hooks, inner in self.each(store, k):
            hooks.flip(inner, k, bit)

    def swap(self, store: StorageBackend, a: ObjectKey, b: ObjectKey) -> None:
        self.each(store, b)
        for hooks, inner in self.each(store, a):
            hooks.swap(inner, a, b)

    @property
    def obeys_values(self) -> bool:
        return all(part.obeys_values for part in self.parts)

    def pass_time(self, store: StorageBackend, seconds: float) -> None:
        for hooks, tier in zip(self.hooks, chain_of(store).tiers, strict=True):
            if (inner := store_of(tier)) is not None:
                hooks.pass_time(inner, seconds)

    def check(self, store: StorageBackend) -> None:
        chain_of(store).flush()
        for hooks, tier in zip(self.hooks, chain_of(store).tiers, strict=True):
            if (inner := store_of(tier)) is not None:
                hooks.check(inner)

    def usage(self, store: StorageBackend) -> Usage:
        said = store.usage()
        entries = list(store.scan_all())
        return replace(
            said,
            objects=len(entries),
            payload_bytes=sum(e.meta.length for e in entries),
            details=next(tier.details for tier in said.tiers if tier.health != "out"),
        )

    def media(self, store: StorageBackend) -> Sequence[TierReport]:
        return [tier for tier in store.usage().tiers if tier.health != "out"]

    def scanned(self, meta: ObjectMeta) -> ObjectMeta:
        return self.parts[-1]().scanned(meta)


def is_ahead(upper: StorageBackend, lower: StorageBackend) -> bool:
    """Whether the lower tier has what the upper one evicts next, if that is nearly full.

    The upper tier is looked at after every quarter of a fifth of its capacity, so a tenth is always copied in
    the end.
    """
    usage = upper.usage()
    if usage.used_bytes <= 0.86 * usage.capacity_bytes:
        return True
    coldest = upper.coldest(usage.capacity_bytes // 10)
    assert coldest is not None
    return all(lower.exists([entry.key for entry in coldest]))


def listed(store: Any) -> dict[str, Any]:
    """The tiers of a chain: a section of each that opens it again, by name, in order."""
    return {tier.name: section(tier.settings) for tier in chain_of(store).tiers if not tier.leaving}


def section(settings: TierSettings) -> dict[str, Any]:
    """The section of a tier with these settings."""
    own = {name: getattr(settings, name) for name in settings_in(TierSettings)}
    own["write"] = ",".join(f"{pool}:{policy}" if pool else policy for pool, policy in own["write"].items())
    own["write_per_day"] = own["write_per_day"] or "unlimited"
    if settings.read_only:  # nothing can be written
        own = {name: value for name, value in own.items() if not name.startswith("write")}
    return {**settings.section, **{f"tier_{name}": value for name, value in own.items()}}


def relist(store: Any, specs: Iterable[Any], drop: Collection[str] = ()) -> None:
    """Give a chain another list, and wait until the tiers that are not in it have left."""
    chain_of(store).retier(list(specs), drop).left.result(120)


def add(store: Any, spec: Any, at: int | None = None) -> None:
    """Let a tier join, as the last or at a position."""
    specs = list(listed(store).values())
    specs.insert(len(specs) if at is None else at, spec)
    relist(store, specs)


def remove(store: Any, name: str, *, drop: bool = False) -> None:
    """Let a tier leave, or drop it."""
    relist(store, [url for other, url in listed(store).items() if other != name], [name] if drop else [])


def replace_tier(store: Any, name: str, spec: Any) -> None:
    """Let a tier take the place of another one, or take other settings."""
    relist(store, (listed(store) | {name: spec}).values())


def refuse() -> StorageBackend:
    raise OSError("the disk is not there")


def chain_of(store: StorageBackend) -> TierChain:
    assert isinstance(store, TierChain)
    return store


def store_of(tier: Tier) -> StorageBackend | None:
    """The store of a tier that is open."""
    # private: what lies behind the chain's back is read and damaged there
    return tier._store
