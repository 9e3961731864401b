"""Eviction policies, which decide which evictable unit is worth least.

One contract serves the index and the stores.

Reading order: `base` (the contract), `costs`, one file per policy, `order` (the front of an eviction order,
common to the index and the stores), `stored` (the columns that a store cannot fill), `history` (what policies
with queues of their own remember).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tiercache.errors import ConfigError
from tiercache.models.profile import PROFILES, ModelProfile, profile_named, profile_of
from tiercache.policy.arc import Arc
from tiercache.policy.base import LEARN_EVERY, CheckpointKind, Ending, Policy, Reuse, UnitKind, Units
from tiercache.policy.costs import Costs
from tiercache.policy.gdsf import Gdsf
from tiercache.policy.hvd import HitValueDensity
from tiercache.policy.lpc import Lpc
from tiercache.policy.lru import Lru
from tiercache.policy.marconi import Marconi
from tiercache.policy.marconi_artifact import ArtifactScore, MarconiArtifact
from tiercache.policy.s3fifo import S3Fifo
from tiercache.policy.seglen import SegLen
from tiercache.policy.sieve import Sieve
from tiercache.policy.ttl import Ttl

__all__ = [
    "DEFAULT_PROFILE",
    "LEARN_EVERY",
    "POLICIES",
    "PROFILES",
    "RIVALS",
    "VARIANTS",
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
    SegLen.name: lambda costs: SegLen(),
    Marconi.name: Marconi,
    Gdsf.name: Gdsf,
    HitValueDensity.name: HitValueDensity,
}
_MAKE_RIVAL: Final[Mapping[str, Callable[[Costs], Policy]]] = {
    S3Fifo.name: lambda costs: S3Fifo(),
    Sieve.name: lambda costs: Sieve(),
    Arc.name: lambda costs: Arc(),
    Ttl.name: Ttl,
    Lpc.name: lambda costs: Lpc(),
}
POLICIES: Final = tuple(_MAKE)
"""Names of the main policies, without parameters."""
RIVALS: Final = tuple(_MAKE_RIVAL)
"""Names of the other policies, which are published ones to compare with."""
VARIANTS: Final = ("seglen:additive", MarconiArtifact.name)
"""Names of policies with a parameter that is not a number."""


def policy_named(name: str, costs: Costs | None = None) -> Policy:
    """Return a new policy of this name, which weighs by `costs` (default: those of `DEFAULT_PROFILE`).

    The name may have a parameter:

    - `seglen:0.7` sets the weight, and `seglen:additive` chooses the additive sum (see `SegLen`).
    - `marconi:1.5` sets alpha, and `marconi:artifact:0.3` does so for the score of Marconi's artifact.

    Raises ConfigError for an unknown name or parameter.
    """
    base, _, parameter = name.partition(":")
    if base not in POLICIES + RIVALS:
        raise ConfigError(f"there is no eviction policy {name!r}; use {', '.join(POLICIES + RIVALS)}")
    costs = costs or Costs(profile_named(DEFAULT_PROFILE))
    if not parameter:
        return (_MAKE.get(base) or _MAKE_RIVAL[base])(costs)
    if name in ("marconi:best", MarconiArtifact.name):
        raise ConfigError(
            f"{name} searches its alpha in simulated caches, so only tiercache replay can use it; use an"
            " alpha such as marconi:0.5"
        )
    if name == "seglen:additive":
        return SegLen(additive=True)
    by_artifact = base == Marconi.name and parameter.startswith("artifact:")
    try:
        value = float(parameter.removeprefix("artifact:") if by_artifact else parameter)
    except ValueError:
        raise ConfigError(
            f"the parameter of policy {name!r} is not a number; use one such as seglen:0.7"
        ) from None
    if base == SegLen.name:
        return SegLen(value)
    if by_artifact:
        return ArtifactScore(costs, value)
    if base == Marconi.name:
        return Marconi(costs, value)
    raise ConfigError(f"policy {base!r} has no parameter; seglen has a weight and marconi an alpha")
