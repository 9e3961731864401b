"""The plainest index there can be, and the measure of the real one: a dictionary entry per page prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tiercache.core import ABSENT, PoolName, Tier, TokenArray
from tiercache.index import Node

PAGE = 2
Path = tuple[int, ...]
"""A page stands for itself as one small number."""
Prefix = tuple[bytes, Path]
"""extra, and the pages from the start."""


def tokens_of(path: Path, tail: int = 0) -> TokenArray:
    """The tokens of whole pages, and `tail` tokens of a further one."""
    return np.array([page for page in path for _ in range(PAGE)] + [99] * tail, np.uint64)


def path_of(node: Node) -> Path:
    edges = [np.frombuffer(at.edge, np.uint64)[::PAGE].tolist() for at in node.path()]
    return tuple(page for edge in reversed(edges) for page in edge)


@dataclass
class Model:
    page_pools: tuple[PoolName, ...]
    state_pools: tuple[PoolName, ...]
    pages: dict[Prefix, dict[PoolName, list[int]]] = field(default_factory=dict)
    states: dict[Prefix, dict[PoolName, list[int]]] = field(default_factory=dict)
    """By prefix and pool: the location in each tier."""

    def page(self, at: Prefix, pool: PoolName) -> list[int]:
        return self.pages.setdefault(at, {}).setdefault(pool, [ABSENT] * 3)

    def state(self, at: Prefix, pool: PoolName) -> list[int]:
        return self.states.setdefault(at, {}).setdefault(pool, [ABSENT] * 3)

    def entry(self, at: Prefix, pool: PoolName) -> list[int]:
        return self.page(at, pool) if pool in self.page_pools else self.state(at, pool)

    def entries(self, pool: PoolName) -> Iterator[tuple[Prefix, list[int]]]:
        for at, by_pool in (self.pages if pool in self.page_pools else self.states).items():
            if pool in by_pool:
                yield at, by_pool[pool]

    def held_prefixes(self) -> set[Prefix]:
        """Every prefix at or above which something is, or is being brought."""
        return {
            (extra, path[:cut])
            for table in (self.pages, self.states)
            for (extra, path), by_pool in table.items()
            if any(at != ABSENT for tiers in by_pool.values() for at in tiers)
            for cut in range(1, len(path) + 1)
        }

    def complete(self, at: Prefix, tiers: Iterable[Tier] = Tier) -> bool:
        return all(any(self.state(at, pool)[tier] >= 0 for tier in tiers) for pool in self.state_pools)

    def whole(self, at: Prefix, tiers: Iterable[Tier] = Tier) -> bool:
        return all(any(self.page(at, pool)[tier] >= 0 for tier in tiers) for pool in self.page_pools)

    def restorable(self, extra: bytes, path: Path, limit: int, tiers: tuple[Tier, ...]) -> list[int]:
        depths = []
        for depth in range(1, min(limit, len(path)) + 1):
            if not self.whole((extra, path[:depth]), tiers):
                break
            if self.complete((extra, path[:depth]), tiers):
                depths.append(depth)
        return depths

    def dead(self) -> set[Prefix]:
        """Pages that no surviving state can use."""
        if not self.state_pools:
            return set()
        useful = {
            (extra, path[:cut])
            for extra, path in list(self.states)
            if self.complete((extra, path))
            for cut in range(len(path) + 1)
        }
        return set(self.pages) - useful
