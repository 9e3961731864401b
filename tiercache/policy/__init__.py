"""Eviction policies, which decide which evictable unit is worth least.

Principles:

1. A policy sees columns of units, never tokens, keys or bytes.
2. It ranks what may go now; whether anything goes is decided by who owns the units.
3. Equal history gives equal ranks: there is no clock but ticks, and no randomness.

One contract serves the index and the stores.

Reading order: `base` (the contract, the costs and LRU), `hvd`, `order` (the front of an eviction order,
common to the index and the stores).

Another package adds a policy by an entry point of the group `tiercache.policies`. Its name is the policy's,
with a dot for a colon, and its value is called with the costs and the parameter ("" without one):

    [project.entry-points."tiercache.policies"]
    oldest = "my_package.policies:oldest"      # oldest(costs: Costs, parameter: str) -> Policy
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tiercache.entries import entries, load
from tiercache.errors import ConfigError
from tiercache.models.profile import PROFILES, ModelProfile, profile_named, profile_of
from tiercache.policy.base import (
    LEARN_EVERY,
    CheckpointKind,
    Costs,
    Ending,
    Lru,
    Policy,
    Reuse,
    UnitKind,
    Units,
)
from tiercache.policy.hvd import HitValueDensity

__all__ = [
    "DEFAULT_PROFILE",
    "LEARN_EVERY",
    "POLICIES",
    "PROFILES",
    "CheckpointKind",
    "Costs",
    "Ending",
    "Lru",
    "ModelProfile",
    "Policy",
    "Reuse",
    "UnitKind",
    "Units",
    "policy_named",
    "profile_named",
    "profile_of",
]
DEFAULT_PROFILE: Final = "qwen3-next-80b-a3b"
"""Name of the model profile that is used where none is given."""
_MAKE: Final[Mapping[str, Callable[[Costs], Policy]]] = {
    Lru.name: lambda costs: Lru(),
    HitValueDensity.name: HitValueDensity,
}
POLICIES: Final = tuple(_MAKE)
"""Names of the policies of this package."""
GROUP: Final = "tiercache.policies"
"""Group of the entry points of other packages' policies."""


def policy_named(name: str, costs: Costs | None = None) -> Policy:
    """Return a new policy of this name, which weighs by `costs` (default: those of `DEFAULT_PROFILE`).

    The policy of another package may have a parameter behind a colon.

    Raises ConfigError for an unknown name or parameter.
    """
    base = name.partition(":")[0]
    costs = costs or Costs(profile_named(DEFAULT_PROFILE))
    if name in _MAKE:
        return _MAKE[name](costs)
    others = entries(GROUP)
    parts = name.split(":")
    for end in range(len(parts), 0, -1):
        if "." not in base and (entry := others.get(".".join(parts[:end]))):
            made = load(entry, f"the eviction policy {name!r}")(costs, ":".join(parts[end:]))
            if isinstance(made, Policy):
                return made
            raise ConfigError(
                f"the eviction policy {name!r} is {entry.value}, which makes no Policy; fix its entry point"
            )
    if base in _MAKE:
        raise ConfigError(f"policy {base!r} has no parameter; leave out {name[len(base) :]!r}")
    known = (*POLICIES, *(other.replace(".", ":") for other in others))
    raise ConfigError(
        f"there is no eviction policy {name!r}; use {', '.join(known)}, or install the package that has it"
    )
