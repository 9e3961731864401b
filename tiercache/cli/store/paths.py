"""The stored part of one prompt in a namespace: its pages and states, the restorable depths, and branches off its path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from rich.tree import Tree

from tiercache.cli.output import SHORT, count_text, ranges, ranges_text
from tiercache.cli.store.forest import Forest
from tiercache.cli.store.rows import hangs
from tiercache.cli.store.runs import pool_text
from tiercache.core import HitPolicy, PoolName, PoolPresence, TokenArray, restorable_prefixes, reusable_pages
from tiercache.keys import page_keys

_COMBINATIONS: Final = 16
"""Combinations of one layout per pool that are shown at most; also the branches drawn at most under one node of the tree.

Several layouts of a pool are ranks, which are needed together, or dtypes, which are alternatives; so every combination is shown.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The objects of one pool, geometry and shard along the prompt; `presence.present[i]` says whether that of page i is stored."""

    pool: PoolName
    layout: bytes
    presence: PoolPresence


@dataclass(frozen=True, slots=True)
class PromptPath:
    """The stored part of a prompt in one namespace.

    Depths count pages, from 1. `branches`: (depth, number of stored pages that continue from there off the prompt). `orphans`: depths of
    stored pages that cannot be reached.
    """

    namespace: bytes
    page_size: int
    tokens: int
    keys: Sequence[bytes]
    layouts: Sequence[Layout]
    branches: Sequence[tuple[int, int]]
    orphans: Sequence[int]

    @property
    def matched(self) -> int:
        """Number of pages of the prompt under which any object is stored."""
        return int(np.logical_or.reduce([np.zeros(len(self.keys), np.bool_), *(found.presence.present for found in self.layouts)]).sum())

    def restorable(self) -> list[tuple[Sequence[Layout], Sequence[int]]]:
        """Return, per combination of one layout per pool, the restorable depths in pages; one token at least is left to compute."""
        limit = reusable_pages(self.tokens, self.page_size)
        by_pool: dict[PoolName, list[Layout]] = {}
        for found in self.layouts:
            by_pool.setdefault(found.pool, []).append(found)
        if PoolName.KV not in by_pool:
            return []
        choices: list[tuple[Sequence[Layout], Sequence[int]]] = []
        for choice, _ in zip(product(*by_pool.values()), range(_COMBINATIONS), strict=False):
            depths = restorable_prefixes({found.pool: found.presence for found in choice}).restorable_prefix_pages
            choices.append((choice, [depth for depth in depths if depth <= limit]))
        return choices

    def record(self) -> dict[str, Any]:
        """Return the fields for JSON, without those of the namespace."""
        return {
            "page_size": self.page_size,
            "tokens": self.tokens,
            "pages": len(self.keys),
            "matched_pages": self.matched,
            "layouts": [
                {
                    "pool": str(found.pool),
                    "layout": found.layout.hex(),
                    "policy": str(found.presence.hit_policy),
                    "present": ranges(_depths(found)),
                }
                for found in self.layouts
            ],
            "restorable": [
                {
                    "layouts": {str(found.pool): found.layout.hex() for found in choice},
                    "pages": list(depths),
                    "tokens": [depth * self.page_size for depth in depths],
                }
                for choice, depths in self.restorable()
            ],
            "branches": [{"depth": depth, "pages": pages} for depth, pages in self.branches],
            "orphans": ranges(self.orphans),
            "page_keys": [key.hex() for key in self.keys],
        }


def follow(forest: Forest, namespace: bytes, tokens: TokenArray, page_size: int, extra: bytes) -> PromptPath:
    """Compare a prompt with the stored pages of one namespace."""
    keys = page_keys(namespace, tokens, page_size, extra=extra)
    layouts: dict[tuple[PoolName, bytes], bool] = {}
    for page in forest.pages.values():
        for entry in page.entries:
            if entry.meta.namespace == namespace:
                place = (entry.key.pool, entry.key.layout)
                layouts[place] = layouts.get(place, False) or hangs(entry)
    found = {place: np.zeros(len(keys), np.bool_) for place in layouts}
    branches: list[tuple[int, int]] = []
    orphans: list[int] = []
    for n, key in enumerate(keys):
        here = forest.pages.get(key)
        if here is None:
            continue
        for entry in here.entries:
            found[entry.key.pool, entry.key.layout][n] = True
        following = keys[n + 1] if n + 1 < len(keys) else None
        if elsewhere := [child for child in here.children if child != following]:
            branches.append((n + 1, len(forest.below(elsewhere))))
        if key in forest.broken or not here.pages:
            orphans.append(n + 1)
    made = [
        Layout(PoolName(pool), layout, PoolPresence(HitPolicy.TRAILING_PAGES if hanging else HitPolicy.ALL_PAGES, found[pool, layout]))
        for (pool, layout), hanging in sorted(layouts.items())
    ]
    return PromptPath(namespace, page_size, len(tokens), keys, made, branches, orphans)


def draw(path: PromptPath, label: str, most: int) -> Tree:
    """Return the path as a tree: at most `most` runs of pages with the same objects, with their states, branches and orphans.

    `label` is rich markup.
    """
    several = _several(path.layouts)
    whole = f"{count_text(path.tokens, 'token')}, {count_text(len(path.keys), 'page')} of {path.page_size}"
    tree = Tree(f"[bold]{label}[/] {whole}, {path.matched:,} stored")
    states = [found for found in path.layouts if found.presence.hit_policy is HitPolicy.TRAILING_PAGES]
    lost = set(path.orphans)
    branches = dict(path.branches)
    stretches = _stretches(path)
    for first, last, here in stretches[:most]:
        pages = f"pages {first}..{last}" if last > first else f"page {first}"
        pools = ", ".join(pool_text(str(found.pool), found.layout.hex(), several) for found in here)
        orphan = " [red]ORPHAN[/]" if first in lost else ""
        node = tree.add(f"{pages} {pools or '[red]missing[/]'}{orphan} [dim]ends with {path.keys[last - 1].hex()[:SHORT]}[/]")
        for found in states:
            if (hung := np.flatnonzero(found.presence.present[first - 1 : last])).size:
                node.add(f"{pool_text(str(found.pool), found.layout.hex(), several)} at {ranges_text((hung + first).tolist())}")
        aside = [(depth, branches[depth]) for depth in range(first, last + 1) if depth in branches]
        for depth, count in aside[:_COMBINATIONS]:
            node.add(f"[dim]branch after page {depth}: {count_text(count, 'page')} off this prompt[/]")
        if len(aside) > _COMBINATIONS:
            node.add(f"[dim]and {len(aside) - _COMBINATIONS} more branches[/]")
    if len(stretches) > most:
        tree.add(f"[dim]and {len(stretches) - most:,} more; raise --limit, or use -o json[/]")
    choices = path.restorable()
    for choice, depths in choices:
        of = " with " + " + ".join(pool_text(str(f.pool), f.layout.hex(), several) for f in choice) if len(choices) > 1 else ""
        deepest = f", the deepest {depths[-1] * path.page_size:,} tokens" if depths else ""
        tree.add(
            f"[green]restorable{of}[/] at pages {ranges_text(depths)}{deepest}" if depths else f"[yellow]restorable{of}[/] at no depth"
        )
    if not choices:
        tree.add("[yellow]restorable[/] at no depth: this namespace has no kv pages")
    return tree


def _stretches(path: PromptPath) -> list[tuple[int, int, list[Layout]]]:
    """Return runs of pages as (first depth, last depth, layouts of the page objects); objects attached to pages do not divide a run."""
    pages = [found for found in path.layouts if found.presence.hit_policy is HitPolicy.ALL_PAGES]
    lost = set(path.orphans)
    made: list[tuple[int, int, list[Layout]]] = []
    for depth in range(1, len(path.keys) + 1):
        here = [found for found in pages if found.presence.present[depth - 1]]
        if made and made[-1][2] == here and (made[-1][0] in lost) == (depth in lost):
            made[-1] = (made[-1][0], depth, here)
        else:
            made.append((depth, depth, here))
    return made


def _depths(found: Layout) -> list[int]:
    return (np.flatnonzero(found.presence.present) + 1).tolist()


def _several(layouts: Sequence[Layout]) -> set[str]:
    names = [str(found.pool) for found in layouts]
    return {name for name in names if names.count(name) > 1}
