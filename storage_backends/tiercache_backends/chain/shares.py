"""Shares of a chain: quotas and guarantees are divided among its tiers by their capacities.

    chain     quota 300 GiB                            300 GiB of 1200 GiB: a quarter of each tier
    tiers     memory 200 GiB    file 1000 GiB
    parts     50 GiB            250 GiB                every copy counts, as in `usage`

So the sum over the tiers never exceeds the quota. Tiers whose stores keep no shares have no part: what is
there does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from tiercache.errors import ConfigError, StorageError
from tiercache.storage.base import no_shares
from tiercache.storage.registry import backend_type, capabilities_of
from tiercache.storage.shares import OwnerUse, Share, Shares
from tiercache_backends.chain.settings import TierSettings
from tiercache_backends.chain.tier import Tier
from tiercache_backends.local.settings import given_capacity

_CANARY_ROOM: Final = 64 << 10
"""Bytes of each tier that are guaranteed to nobody, so that an examination can store its object."""


def check_tiers(shares: Shares, tiers: Sequence[TierSettings]) -> None:
    """Raise ConfigError if the tiers of these settings cannot keep the shares."""
    keeping = [tier for tier in tiers if not tier.read_only and capabilities_of(tier.section).shares]
    parts = _divide(shares, [str(tier.section["type"]) for tier in tiers],
                    {tier.name: given_capacity(tier.section) for tier in keeping})  # fmt: skip
    for tier in keeping:
        section = {name: value for name, value in tier.section.items() if name != "type"}
        backend_type(tier.section).check_shares(section, parts[tier.name])


def _divide(shares: Shares, kinds: Sequence[str], capacities: Mapping[str, int]) -> Mapping[str, Shares]:
    """Return the part of each tier that keeps shares, by name; raises ConfigError if they cannot be kept.

    `kinds`: storage types of all tiers. `capacities`: those of the tiers that keep shares; 0 if not known.
    """
    if not shares.is_limiting:
        return dict.fromkeys(capacities, shares)
    if not capacities:
        raise ConfigError(no_shares(" and ".join(kinds), shares))
    for name, capacity in capacities.items():
        if not capacity:
            raise ConfigError(
                f"tier {name!r} has no capacity in its URL, by which quotas and guarantees of tenants are"
                " divided among the tiers; add ?capacity=..."
            )
    whole = sum(capacities.values())
    shares.check(whole - len(capacities) * _CANARY_ROOM, "the tiers that keep shares")
    return {name: shares.of(capacity, whole) for name, capacity in capacities.items()}


def _capacity_of(tier: Tier) -> int:
    """Return the capacity of a tier: that of its settings, or else that of its open store."""
    capacity = given_capacity(tier.settings.section)
    if not capacity and tier.is_readable:
        with suppress(StorageError):
            capacity = tier.call("usage", lambda store: store.usage()).capacity_bytes
    return capacity


class ChainShares:
    """Shares of a chain, which its tiers keep.

    Thread safety: one call at a time; `summed` any thread.
    """

    def __init__(self) -> None:
        self.current: Shares | None = None
        """Shares that are kept now."""

    def share(self, shares: Shares, tiers: Sequence[Tier]) -> None:
        """Let the tiers keep their parts of these shares, all or none; see `StorageBackend.share`."""
        was, self.current = self.current, shares
        try:
            self._tell(shares, tiers)
        except ConfigError:
            self.current = was
            if was is not None:
                self._tell(was, tiers)
            raise

    def follow(self, tiers: Sequence[Tier]) -> None:
        """Divide the shares among other tiers; raises ConfigError if they cannot keep them."""
        if self.current is not None:
            self._tell(self.current, tiers)

    def check(self, shares: Shares | None, tiers: Sequence[Tier]) -> None:
        """Raise ConfigError if these tiers cannot keep the shares."""
        if shares is not None:
            self._parts(shares, tiers)

    def summed(self, tiers: Sequence[Tier]) -> Mapping[str, OwnerUse]:
        """Return what each owner had in all tiers at their last reports; limits are those of the chain."""
        shares = self.current
        if shares is None:
            return {}
        found: dict[str, OwnerUse] = {name: OwnerUse() for name in ("", *shares.limits)}
        for tier in tiers:
            for name, use in tier.owners.items():
                found[name] = found.get(name, OwnerUse()) + use
        limits = {name: shares.limits.get(name, Share()) for name in found}
        return {
            name: replace(use, quota_bytes=limits[name].quota, guarantee_bytes=limits[name].guarantee)
            for name, use in found.items()
        }

    def _tell(self, shares: Shares, tiers: Sequence[Tier]) -> None:
        parts = self._parts(shares, tiers)
        for tier in tiers:
            if tier.name in parts:
                tier.share(parts[tier.name])

    @staticmethod
    def _parts(shares: Shares, tiers: Sequence[Tier]) -> Mapping[str, Shares]:
        keeping = [tier for tier in tiers if not tier.settings.read_only and tier.capabilities.shares]
        capacities = {tier.name: _capacity_of(tier) for tier in keeping}
        return _divide(shares, [tier.kind for tier in tiers], capacities)
