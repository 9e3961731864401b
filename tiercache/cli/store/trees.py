"""Trees of stored pages as text: runs of pages with the same objects, and the stored part of one prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import numpy as np
from rich.tree import Tree

from tiercache.cli.store.forest import Forest, Page
from tiercache.cli.store.names import is_attached
from tiercache.cli.terminal import SHORT, SHORTER, count_text, ranges, ranges_text, safe
from tiercache.core import (
    HitPolicy,
    ObjectKey,
    PoolName,
    PoolPresence,
    TokenArray,
    restorable_prefixes,
    reusable_pages,
)
from tiercache.keys import object_key, page_keys, sglang_page_keys
from tiercache.text import readable_size


@dataclass(slots=True)
class Run:
    """Consecutive pages with objects of the same pools and layouts.

        pages      1 ─ 2 ─ 3 ─ 4        run 0: pages 1..2
                       └─ 3' ─ 4'       run 1: pages 3..4, parent 0; run 2: pages 3'..4', parent 0

    Thread safety: one thread.
    """

    first: Page
    last: Page
    start: int
    """Depth of the first page, in pages.

    If no object records the depth, it is one more than the last depth of the parent run, or 1 at a root.
    """
    parent: int | None
    """Number of the run before this one; None at a root, or if the page before this run is not stored."""
    pools: tuple[tuple[str, str], ...]
    """Pools of the page objects, each with its layout in hex."""
    pages: int = 0
    nbytes: int = 0
    states: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Depths of states and other objects that are attached to pages, by pool and layout (hex)."""
    missing: bytes | None = None
    """Key of the missing page that makes the run unreachable; None if the run is reachable."""
    children: list[int] = field(default_factory=list)
    """Numbers of the runs that continue this one."""

    def append(self, page: Page) -> None:
        """Append the next page to the run."""
        for entry in page.entries if page.is_states_alone else page.states:
            self.states.setdefault((str(entry.key.pool), entry.key.layout.hex()), []).append(
                self.start + self.pages
            )
        self.last = page
        self.pages += 1
        self.nbytes += sum(entry.meta.length for entry in page.entries)

    def record(self, number: int) -> dict[str, Any]:
        """Return the fields for JSON; `number` is this run's number."""
        return {
            "run": number,
            "parent_run": self.parent,
            "first_depth": self.start,
            "last_depth": self.start + self.pages - 1,
            "first_page": self.first.key.hex(),
            "last_page": self.last.key.hex(),
            "pools": [{"pool": pool, "layout": layout} for pool, layout in self.pools],
            "states": [
                {"pool": pool, "layout": layout, "depths": depths}
                for (pool, layout), depths in sorted(self.states.items())
            ],
            "bytes": self.nbytes,
            "orphan": self.missing is not None,
            "missing": None if self.missing is None else self.missing.hex(),
        }


def runs_of(forest: Forest, keys: Iterable[bytes]) -> list[Run]:
    """Return the runs of these roots and of all pages below, each after its parent."""
    runs: list[Run] = []
    # Pages that begin a run, each with the number of its parent run.
    waiting: list[tuple[bytes, int | None]] = [(key, None) for key in reversed(list(keys))]
    while waiting:
        key, parent = waiting.pop()
        page = forest.pages[key]
        run = Run(
            page, page, _depth(page, runs[parent] if parent is not None else None), parent, _pools(page)
        )
        run.missing = forest.broken.get(key) or (None if page.pages else key)
        run.append(page)
        while len(page.children) == 1:
            following = forest.pages[page.children[0]]
            if not _continues(forest, run, following):
                break
            page = following
            run.append(page)
        if parent is not None:
            runs[parent].children.append(len(runs))
        waiting += [(child, len(runs)) for child in reversed(page.children)]
        runs.append(run)
    return runs


def add_runs(tree: Tree, runs: list[Run], limit: int) -> None:
    """Add at most `limit` runs to a tree.

    Several runs may continue the same run. One of them, whose subtree has the most pages, is indented like
    the run that it continues. The others are indented one level more:

        pages 1..2
            branch, pages 3..4
        pages 3..90                  has more pages than the branch
    """
    weights = [run.pages for run in runs]  # pages of each run and of all runs below
    for number in range(len(runs) - 1, -1, -1):
        parent = runs[number].parent
        if parent is not None:
            weights[parent] += weights[number]
    several = _pools_with_several_layouts(runs)
    stack = [(n, tree, False) for n in range(len(runs) - 1, -1, -1) if runs[n].parent is None]
    shown = 0
    while stack and shown < limit:
        number, host, aside = stack.pop()
        node = host.add(_label(runs[number], several, aside=aside))
        shown += 1
        heaviest = sorted(runs[number].children, key=lambda child: -weights[child])
        stack += [(child, host, False) for child in heaviest[:1]]
        stack += [(child, node, True) for child in reversed(heaviest[1:])]
    if shown < len(runs):
        tree.add(f"[dim]and {len(runs) - shown:,} more; raise --limit, or use -o json[/]")


def _label(run: Run, several: set[str], *, aside: bool) -> str:
    end = run.start + run.pages - 1
    pages = f"pages {run.start}..{end}" if run.pages > 1 else f"page {run.start}"
    pools = ", ".join(pool_text(pool, layout, several) for pool, layout in run.pools)
    if not pools:
        pools = "[dim]no pages are kept[/]" if run.first.is_states_alone else "[red]not stored[/]"
    states = "".join(
        f"; {pool_text(p, layout, several)} at {ranges_text(depths)}"
        for (p, layout), depths in sorted(run.states.items())
    )
    branch = "branch, " if aside else ""
    lost = f" [red]ORPHAN: page {run.missing.hex()[:SHORT]} is missing[/]" if run.missing is not None else ""
    return (
        f"{branch}{pages} {pools}{states} [dim]{readable_size(run.nbytes)}, ends with"
        f" {run.last.key.hex()[:SHORT]}[/]{lost}"
    )


def pool_text(pool: str, layout: str, several: set[str]) -> str:
    """Return the name of a pool for display, with its layout if the pool is one of `several`.

    `several` are the names of all pools with several layouts.
    """
    return f"{safe(pool)}:{layout[:SHORTER]}" if pool in several else safe(pool)


def _pools_with_several_layouts(runs: list[Run]) -> set[str]:
    layouts: dict[str, set[str]] = {}
    for run in runs:
        for pool, layout in (*run.pools, *run.states):
            layouts.setdefault(pool, set()).add(layout)
    return {pool for pool, found in layouts.items() if len(found) > 1}


def _pools(page: Page) -> tuple[tuple[str, str], ...]:
    return (
        ()
        if page.is_states_alone
        else tuple(sorted((str(entry.key.pool), entry.key.layout.hex()) for entry in page.pages))
    )


def _continues(forest: Forest, run: Run, page: Page) -> bool:
    missing = forest.broken.get(page.key) or (None if page.pages else page.key)
    return (
        _pools(page) == run.pools
        and missing == run.missing
        and page.depth in (None, run.start + run.pages)  # a wrong depth on record begins a new run
    )


def _depth(page: Page, before: Run | None) -> int:
    if page.depth is not None:
        return page.depth
    return before.start + before.pages if before is not None else 1


def summary(forest: Forest, keys: Iterable[bytes]) -> str:
    """Return the numbers of pages, states and bytes of these pages as one line."""
    pages = [forest.pages[key] for key in keys]
    stored = sum(bool(page.pages) and not page.is_states_alone for page in pages)
    states = sum(len(page.entries if page.is_states_alone else page.states) for page in pages)
    nbytes = sum(entry.meta.length for page in pages for entry in page.entries)
    return f"{count_text(stored, 'page')}, {count_text(states, 'state')}, {readable_size(nbytes)}"


_COMBINATIONS: Final = 16
"""Maximum number of combinations of layouts that are shown, and of branches that are shown below one node.

A combination has one layout of each pool. Two layouts of one pool may be shards, which a restore needs
together, or dtypes, of which a restore needs only one. Layout digests do not say which of the two they are,
so the restorable depths are shown for each combination."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Objects of one pool and one layout (geometry and shard) along the prompt."""

    pool: PoolName
    layout: bytes
    """Layout digest."""
    presence: PoolPresence
    """Whether the object of each page is stored: `present[0]` is that of the first page, at depth 1."""
    has_pages: bool
    """Whether the objects belong to pages: they are pages, or attached to pages as states are."""

    def key_of(self, page: bytes) -> ObjectKey:
        """Return the key of this layout's object on a page."""
        return object_key(self.pool, self.layout, page)


@dataclass(frozen=True, slots=True)
class PromptPath:
    """Stored part of a prompt in one namespace.

    Depths count pages, from 1.
    """

    namespace: bytes
    page_size: int
    """Tokens of a page."""
    tokens: int
    """Number of tokens of the prompt."""
    keys: Sequence[bytes]
    """Page key of each page of the prompt."""
    layouts: Sequence[Layout]
    branches: Sequence[tuple[int, int]]
    """Pairs (depth, pages). After `depth`, `pages` stored pages leave the prompt for other prompts."""
    orphans: Sequence[int]
    """Depths of the prompt's stored pages that cannot be reached, because a page before them is missing."""

    @property
    def is_states_alone(self) -> bool:
        """Whether the namespace has objects, and all are states without pages."""
        return bool(self.layouts) and not any(found.has_pages for found in self.layouts)

    @property
    def matched(self) -> int:
        """Number of pages of the prompt with at least one stored object."""
        return int(
            np.logical_or.reduce(
                [np.zeros(len(self.keys), np.bool_), *(found.presence.present for found in self.layouts)]
            ).sum()
        )

    def restorable(self) -> list[tuple[Sequence[Layout], Sequence[int]]]:
        """Return combinations of layouts (one for each pool), each with its restorable depths in pages.

        There are at most _COMBINATIONS. A depth that leaves no token to compute is not included.
        """
        limit = reusable_pages(self.tokens, self.page_size)
        by_pool: dict[PoolName, list[Layout]] = {}
        for found in self.layouts:
            by_pool.setdefault(found.pool, []).append(found)
        anchor = None if self.is_states_alone else PoolName.KV
        if anchor and anchor not in by_pool:
            return []
        choices: list[tuple[Sequence[Layout], Sequence[int]]] = []
        for choice, _ in zip(product(*by_pool.values()), range(_COMBINATIONS), strict=False):
            depths = restorable_prefixes(
                {found.pool: found.presence for found in choice}, anchor
            ).restorable_prefix_pages
            choices.append((choice, [depth for depth in depths if depth <= limit]))
        return choices

    def record(self) -> dict[str, Any]:
        """Return the fields for JSON, except those of the namespace."""
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


def keys_of_prompt(
    namespace: bytes, tokens: TokenArray, page_size: int, extra: bytes, known: Callable[[bytes], bool]
) -> list[bytes]:
    """Return the page keys of a prompt: those of SGLang if only they are `known`, otherwise tiercache's own.

    `extra` are the bytes that the page keys include for adapters and images (`keys.sequence_extra`).
    """
    own = page_keys(namespace, tokens, page_size, extra=extra)
    if extra or not own or any(map(known, own)):
        return own
    others = sglang_page_keys(namespace, tokens, page_size)
    return others if any(map(known, others)) else own


def follow(forest: Forest, namespace: bytes, tokens: TokenArray, page_size: int, extra: bytes) -> PromptPath:
    """Return the stored part of a prompt in one namespace; `extra` as for `keys_of_prompt`."""
    keys = keys_of_prompt(namespace, tokens, page_size, extra, forest.pages.__contains__)
    return follow_keys(forest, namespace, tokens, page_size, keys)


def follow_keys(
    forest: Forest, namespace: bytes, tokens: TokenArray, page_size: int, keys: Sequence[bytes]
) -> PromptPath:
    """Return the stored part of a prompt, whose pages have these keys."""
    # All layouts of the namespace, each with whether its objects are attached to pages, as states are, and
    # whether they belong to pages at all.
    layouts: dict[tuple[PoolName, bytes], tuple[bool, bool]] = {}
    for page in forest.pages.values():
        alone = page.is_states_alone
        for entry in page.entries:
            if entry.meta.namespace == namespace:
                place = (entry.key.pool, entry.key.layout)
                attached, has_pages = layouts.get(place, (False, False))
                layouts[place] = attached or is_attached(entry), has_pages or not alone
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
        elsewhere = [child for child in here.children if child != following]
        if elsewhere:
            branches.append((n + 1, len(forest.below(elsewhere))))
        if key in forest.broken or not here.pages:
            orphans.append(n + 1)
    made = [
        Layout(
            PoolName(pool),
            layout,
            PoolPresence(
                HitPolicy.ALL_PAGES if has_pages and not attached else HitPolicy.TRAILING_PAGES,
                found[pool, layout],
            ),
            has_pages,
        )
        for (pool, layout), (attached, has_pages) in sorted(layouts.items())
    ]
    return PromptPath(namespace, page_size, len(tokens), keys, made, branches, orphans)


def draw(path: PromptPath, label: str, limit: int) -> Tree:
    """Return the path as a tree: its runs of pages with their states and branches, and its restorable depths.

    The tree shows at most `limit` runs. `label` is the text of the root, in the markup of rich.
    """
    several = _repeated_pools(path.layouts)
    whole = f"{count_text(path.tokens, 'token')}, {count_text(len(path.keys), 'page')} of {path.page_size}"
    tree = Tree(f"[bold]{label}[/] {whole}, {path.matched:,} stored")
    states = [found for found in path.layouts if found.presence.hit_policy is HitPolicy.TRAILING_PAGES]
    lost = set(path.orphans)
    branches = dict(path.branches)
    stretches = _stretches(path)
    for first, last, here in stretches[:limit]:
        pages = f"pages {first}..{last}" if last > first else f"page {first}"
        pools = ", ".join(pool_text(str(found.pool), found.layout.hex(), several) for found in here)
        orphan = " [red]ORPHAN[/]" if first in lost else ""
        missing = "[dim]no pages are kept[/]" if path.is_states_alone else "[red]missing[/]"
        node = tree.add(
            f"{pages} {pools or missing}{orphan} [dim]ends with {path.keys[last - 1].hex()[:SHORT]}[/]"
        )
        for found in states:
            at = np.flatnonzero(found.presence.present[first - 1 : last])  # counted from the run's first page
            if at.size:
                node.add(
                    f"{pool_text(str(found.pool), found.layout.hex(), several)} at"
                    f" {ranges_text((at + first).tolist())}"
                )
        aside = [(depth, branches[depth]) for depth in range(first, last + 1) if depth in branches]
        for depth, count in aside[:_COMBINATIONS]:
            node.add(f"[dim]branch after page {depth}: {count_text(count, 'page')} off this prompt[/]")
        if len(aside) > _COMBINATIONS:
            node.add(f"[dim]and {len(aside) - _COMBINATIONS} more branches[/]")
    if len(stretches) > limit:
        tree.add(f"[dim]and {len(stretches) - limit:,} more; raise --limit, or use -o json[/]")
    choices = path.restorable()
    for choice, depths in choices:
        of = (
            " with " + " + ".join(pool_text(str(f.pool), f.layout.hex(), several) for f in choice)
            if len(choices) > 1
            else ""
        )
        deepest = f", the deepest {depths[-1] * path.page_size:,} tokens" if depths else ""
        tree.add(
            f"[green]restorable{of}[/] at pages {ranges_text(depths)}{deepest}"
            if depths
            else f"[yellow]restorable{of}[/] at no depth"
        )
    if not choices:
        tree.add("[yellow]restorable[/] at no depth: this namespace has no kv pages")
    return tree


def _stretches(path: PromptPath) -> list[tuple[int, int, list[Layout]]]:
    """Divide the prompt into runs of pages: (first depth, last depth, layouts that are stored there).

    A new run begins at a page if its objects have other layouts than the objects of the page before it, or
    if only one of these two pages is an orphan. States and other objects that are attached to pages make no
    difference.
    """
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


def _repeated_pools(layouts: Sequence[Layout]) -> set[str]:
    names = [str(found.pool) for found in layouts]
    return {name for name in names if names.count(name) > 1}
