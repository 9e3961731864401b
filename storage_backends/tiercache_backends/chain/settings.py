"""Settings of a chain and of its tiers, as URLs and sections give them."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Final

from tiercache.config.urls import section_of
from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.settings import (
    FLAG,
    LIVE,
    Kind,
    duration,
    matching,
    one_of,
    read_attributes,
    settings_in,
    size,
    whole,
)
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import backend_type, capabilities_of
from tiercache.storage.tiers import PREFIX, free_name
from tiercache.text import shown

CANARY: Final = b"tiercache canary"
"""Namespace of the objects by which stores are examined, and begin of their layout digest.

An object of it is left by a process that died.
"""
_MAX_TIERS: Final = 8
_WRITES: Final = frozenset({"write", "write_after", "write_per_day"})
"""Settings that a tier has no use for if nothing is written to it."""


class WritePolicy(enum.StrEnum):
    """When an object of the tiers above is copied to a tier."""

    THROUGH = "write_through"
    """At once, in the background."""
    SELECTIVE = "write_through_selective"
    """After `tier_write_after` reads."""
    BACK = "write_back"
    """When the tier above is nearly full and will evict the object soon."""


class Promotion(enum.StrEnum):
    """When an object that a tier has answered is copied to the tiers above it."""

    SECOND = "second"
    """At its second read: an object that is read only once costs no write."""
    ALWAYS = "always"
    NEVER = "never"


def _read_policies(value: Any) -> dict[str, WritePolicy]:
    """Read a policy ("write_back"), or policies by pool ("kv:write_back,mamba:write_through").

    Pools that are not named have the policy without a pool, or else `write_through`.
    """
    policies: dict[str, WritePolicy] = {}
    for part in str(value).split(","):
        pool, _, policy = part.strip().rpartition(":")
        known = [str(one) for one in WritePolicy]
        if policy not in known or pool in policies:
            raise ConfigError(
                f"{shown(value)} is not possible; use {', '.join(known)}, or give each pool a policy of its"
                " own as in kv:write_through,mamba:write_back"
            )
        policies[pool] = WritePolicy(policy)
    return {"": policies.pop("", WritePolicy.THROUGH)} | policies


def _read_per_day(value: Any) -> int | None:
    if value == "unlimited":
        return None
    nbytes = int(size().parse(value))
    if not nbytes:
        raise ConfigError("a budget of 0 bytes a day allows no write; give more, or set tier_read_only=yes")
    return nbytes


_NAME: Final = matching(
    "[A-Za-z0-9][A-Za-z0-9._-]{0,31}", "is no name; use 1 to 32 letters, digits, dots, dashes or underscores"
)
_POLICIES: Final = Kind(_read_policies)
_PER_DAY: Final = Kind(_read_per_day)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Settings of one tier. A URL has them with the prefix `tier_`, beside the settings of the store."""

    name: Annotated[str, _NAME]
    """Name of the tier in messages, metrics and commands."""
    section: Mapping[str, Any] = field(default_factory=dict)
    """Section of the tier's store, without the tier's own settings."""
    place: str = ""
    """Absolute path or address of the tier's store; empty if it has neither."""
    write: Annotated[Mapping[str, WritePolicy], _POLICIES, LIVE] = field(
        default_factory=lambda: {"": WritePolicy.THROUGH}
    )
    """When objects of the tiers above come here: policies by pool name; "" has that of the other pools."""
    write_after: Annotated[int, whole(1, 255, "reads"), LIVE] = 1
    """Number of reads after which `write_through_selective` copies an object."""
    promote: Annotated[Promotion, one_of(*Promotion), LIVE] = Promotion.SECOND
    """When objects of this tier are copied to the tiers above."""
    read_only: Annotated[bool, FLAG, LIVE] = False
    """Whether nothing is ever written to this tier."""
    deadline: Annotated[float, duration(0.01, 3600)] = 10.0
    """Seconds that a call may take, plus the time for its bytes at 32 MiB/s."""
    threads: Annotated[int, whole(1, 64, "threads")] = 4
    """Number of calls that run at the same time."""
    in_flight: Annotated[int, size(1 << 20)] = 512 << 20
    """Maximum bytes of the gets and sets that are under way at the same time."""
    write_per_day: Annotated[int | None, _PER_DAY, LIVE] = None
    """Maximum bytes written in a day, for the endurance of a disk; None: no limit."""

    def write_policy(self, pool: PoolName) -> WritePolicy:
        """Return the write policy of a pool."""
        return self.write.get(str(pool), self.write[""])

    @property
    def writes_through(self) -> bool:
        """Whether any pool is written through."""
        return WritePolicy.THROUGH in self.write.values()

    @property
    def writes_back(self) -> bool:
        """Whether any pool is written back."""
        return WritePolicy.BACK in self.write.values()


LIVE_SETTINGS: Final = frozenset(name for name, one in settings_in(TierSettings).items() if one.is_live)
"""Settings of a tier that can change while it is open."""


def parse_tiers(tiers: Any) -> list[TierSettings]:
    """Return the settings of a chain's tiers, which are URLs or sections, from the fastest to the slowest.

    Raises ConfigError for a setting that is wrong, and for tiers that contradict each other.
    """
    if isinstance(tiers, str | Mapping) or not isinstance(tiers, Sequence) or not tiers:
        raise ConfigError("a chain of tiers is a list of storage URLs, the fastest first; give one or more")
    if len(tiers) > _MAX_TIERS:
        raise ConfigError(f"{len(tiers)} tiers are more than the {_MAX_TIERS} that a chain can have")
    found: list[TierSettings] = []
    for spec in tiers:
        found.append(parse_tier(spec, [tier.name for tier in found]))
    check_together(found)
    return found


def parse_tier(spec: Any, taken: Sequence[str] = ()) -> TierSettings:
    """Return the settings of one tier.

    A tier without `tier_name` is named after its store's type, with a number if that name is in `taken`.
    """
    if not isinstance(spec, str | Mapping):
        raise ConfigError(f"{shown(spec)} is no tier; write a storage URL or a table with a type")
    section = section_of(spec) if isinstance(spec, str) else dict(spec)
    kind = section.get("type")
    if not isinstance(kind, str):
        raise ConfigError(f"tier {shown(spec)} has no type; write it like file:///var/lib/tiercache")
    if kind == "chain":
        raise ConfigError("a tier cannot be a chain itself; list all tiers in one chain")
    own = {name.removeprefix(PREFIX): section.pop(name) for name in list(section) if name.startswith(PREFIX)}
    given = read_attributes(TierSettings, f"tier {str(own.get('name', kind))!r}", own, PREFIX)
    values = {"name": free_name(kind, taken), **given}
    tier = TierSettings(section=section, place=_place(section), **values)
    _check_read_only(tier, own)
    return tier


def is_live_change(was: TierSettings, to: TierSettings) -> bool:
    """Return whether a tier takes these settings while its store is open, which is at the same place."""
    fixed = {"name", *settings_in(TierSettings)} - LIVE_SETTINGS
    return _of_store(was) == _of_store(to) and all(getattr(was, name) == getattr(to, name) for name in fixed)


def _of_store(tier: TierSettings) -> Mapping[str, str]:
    """Return the settings of a tier's store, without its place."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in tier.section.items()
        if name not in ("path", "address")
    }


def _check_read_only(tier: TierSettings, own: Mapping[str, Any]) -> None:
    if tier.read_only and not _WRITES.isdisjoint(own):
        raise ConfigError(
            f"tier {tier.name!r} is read-only, so nothing can be written through or back to it; remove"
            " tier_read_only, or the settings of its writes"
        )


def check_together(tiers: Sequence[TierSettings]) -> None:
    """Raise ConfigError if two tiers share a name or a place, or if nothing can be written back to one."""
    for n, tier in enumerate(tiers):
        for other in tiers[:n]:
            if tier.name == other.name:
                raise ConfigError(f"two tiers are named {tier.name!r}; give each a tier_name of its own")
            if tier.place and tier.place == other.place:
                raise ConfigError(
                    f"tiers {other.name!r} and {tier.name!r} are both at {tier.place}; a directory or daemon"
                    " can be one tier only"
                )
    if tiers and tiers[0].writes_back:
        raise ConfigError(
            f"tier {tiers[0].name!r} is the first, so nothing can be written back to it; set tier_write on a"
            " tier below it"
        )
    for above, tier in pairwise(tiers):
        if tier.writes_back:
            _check_evicts(above, tier.name)


def _check_evicts(tier: TierSettings, below: str) -> None:
    """Raise ConfigError if a tier evicts nothing, or cannot say what, so that nothing can be written back."""
    if tier.read_only:
        raise ConfigError(
            f"tier {below!r} is written back, but tier {tier.name!r} above it is read-only and evicts"
            " nothing; set tier_write=write_through, or order the tiers differently"
        )
    if backend_type(tier.section).coldest is StorageBackend.coldest:
        raise ConfigError(
            f"tier {below!r} cannot be written back, because tier {tier.name!r} above it cannot say what it"
            " evicts next; set tier_write=write_through"
        )
    if not capabilities_of(tier.section).bounded:
        raise ConfigError(
            f"tier {below!r} is written back, but tier {tier.name!r} above it has no capacity and evicts"
            " nothing; give it a capacity, or set tier_write=write_through"
        )


def _place(section: Mapping[str, Any]) -> str:
    """Return where a store is, without a look at the disk, which may hang."""
    path = section.get("path")
    return str(section.get("address", "")) + (os.path.abspath(path) if isinstance(path, str) else "")
