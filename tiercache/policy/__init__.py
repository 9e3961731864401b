"""Eviction policies: which evictable unit is worth least. One contract for the index and for stores."""

from tiercache.errors import ConfigError
from tiercache.policy.base import Policy, Unit, UnitKind, Units
from tiercache.policy.lru import Lru

__all__ = ["Lru", "Policy", "Unit", "UnitKind", "Units", "policy_named"]

_POLICIES = {policy.name: policy for policy in (Lru,)}


def policy_named(name: str) -> Policy:
    """A new policy of this name; raises ConfigError for a name that there is not."""
    if name not in _POLICIES:
        raise ConfigError(f"there is no eviction policy {name!r}; use {', '.join(sorted(_POLICIES))}")
    return _POLICIES[name]()
