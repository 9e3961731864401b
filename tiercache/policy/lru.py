"""Least recently used."""

from __future__ import annotations

from typing import ClassVar

from tiercache.policy.base import Policy, Unit


class Lru(Policy):
    """The unit that was hit, or made, longest ago goes first.

    How far up a hit counts is not decided here: see `refresh` of `HybridIndex`. Thread rule: stateless, any thread.
    """

    name: ClassVar[str] = "lru"

    def rank(self, unit: Unit) -> float:
        """The time of the last access."""
        return unit.last_access
