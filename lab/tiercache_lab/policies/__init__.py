"""Eviction policies of other papers, to compare with: entry points make them by name.

Principles:

1. A rival ranks as its paper says; where it cannot, its docstring says how it differs.
2. What a rival remembers is bounded.
3. Entry points make rivals by name; nothing of the product imports one.

There is one file per policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tiercache.errors import ConfigError
from tiercache.policy import Costs, Lru, Policy
from tiercache.policy.hvd import HitValueDensity
from tiercache_lab.policies.lpc import Lpc
from tiercache_lab.policies.marconi import Marconi
from tiercache_lab.policies.seglen import SegLen, SegLenAdditive

MAIN: Final = (Lru.name, SegLen.name, Marconi.name, HitValueDensity.name)
"""Names of the policies that a replay compares if none are named."""
RIVALS: Final = (Lpc.name,)
"""Names of the policies of papers that are compared by name only."""
VARIANTS: Final = (SegLenAdditive.name,)
"""Names of other readings of a main policy, compared by name only."""


def _plain(name: str, make: Callable[[Costs], Policy]) -> Callable[[Costs, str], Policy]:
    """Return the maker of a policy that has no parameter."""

    def made(costs: Costs, parameter: str) -> Policy:
        if parameter:
            raise ConfigError(f"policy {name!r} has no parameter; leave out {parameter!r}")
        return make(costs)

    return made


lpc: Final = _plain(Lpc.name, lambda costs: Lpc())
marconi: Final = _plain(Marconi.name, Marconi)
seglen: Final = _plain(SegLen.name, lambda costs: SegLen())
seglen_additive: Final = _plain(SegLenAdditive.name, lambda costs: SegLenAdditive())
