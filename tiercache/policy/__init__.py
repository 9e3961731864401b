"""Eviction policies: which evictable unit is worth least. One contract for the index and for stores."""

from tiercache.policy.base import Policy, Unit, UnitKind
from tiercache.policy.lru import Lru

__all__ = ["Lru", "Policy", "Unit", "UnitKind"]
