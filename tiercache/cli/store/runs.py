"""A compact view of a forest: consecutive pages with the same objects become one run, and runs are drawn as a tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.tree import Tree

from tiercache.cli.output import SHORT, SHORTER, count_text, ranges_text, safe, size_text
from tiercache.cli.store.forest import Forest, Page


@dataclass(slots=True)
class Run:
    """Consecutive pages with objects of the same pools and layouts. `parent`: number of the run before it; None at a root or if cut off.

    Thread safety: one thread.
    """

    first: Page
    last: Page
    start: int
    """Depth of the first page in pages; if no object records it, one more than the end of the run before it, or 1 at a root."""
    parent: int | None
    pools: tuple[tuple[str, str], ...]
    """Pools of the page objects, each with its layout in hex."""
    pages: int = 0
    nbytes: int = 0
    states: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Depths at which objects are attached to pages, by pool and layout (hex)."""
    missing: bytes | None = None
    """Key of the missing page that makes the run unreachable; None if it is reachable."""
    children: list[int] = field(default_factory=list)
    """Numbers of the runs that follow."""

    def take(self, page: Page) -> None:
        """Append the next page to the run."""
        for entry in page.states:
            self.states.setdefault((str(entry.key.pool), entry.key.layout.hex()), []).append(self.start + self.pages)
        self.last = page
        self.pages += 1
        self.nbytes += sum(entry.meta.length for entry in page.entries)

    def record(self, number: int) -> dict[str, Any]:
        """Return the fields for JSON; `number` is that of this run."""
        return {
            "run": number,
            "parent_run": self.parent,
            "first_depth": self.start,
            "last_depth": self.start + self.pages - 1,
            "first_page": self.first.key.hex(),
            "last_page": self.last.key.hex(),
            "pools": [{"pool": pool, "layout": layout} for pool, layout in self.pools],
            "states": [{"pool": pool, "layout": layout, "depths": depths} for (pool, layout), depths in sorted(self.states.items())],
            "bytes": self.nbytes,
            "orphan": self.missing is not None,
            "missing": None if self.missing is None else self.missing.hex(),
        }


def runs_of(forest: Forest, keys: Iterable[bytes]) -> list[Run]:
    """Return the runs from these roots down, each after its parent."""
    runs: list[Run] = []
    waiting: list[tuple[bytes, int | None]] = [(key, None) for key in reversed(list(keys))]
    while waiting:
        key, parent = waiting.pop()
        page = forest.pages[key]
        run = Run(page, page, _depth(page, runs[parent] if parent is not None else None), parent, _pools(page))
        run.missing = forest.broken.get(key) or (None if page.pages else key)
        run.take(page)
        while len(page.children) == 1 and _alike(forest, run, following := forest.pages[page.children[0]]):
            page = following
            run.take(page)
        if parent is not None:
            runs[parent].children.append(len(runs))
        waiting += [(child, len(runs)) for child in reversed(page.children)]
        runs.append(run)
    return runs


def plant(tree: Tree, runs: list[Run], most: int) -> None:
    """Add at most `most` runs to a tree. The branch with the most pages stays at the same indentation as the run before it."""
    weights = [run.pages for run in runs]
    for number in range(len(runs) - 1, -1, -1):
        parent = runs[number].parent
        if parent is not None:
            weights[parent] += weights[number]
    several = _ambiguous(runs)
    stack = [(n, tree, False) for n in range(len(runs) - 1, -1, -1) if runs[n].parent is None]
    shown = 0
    while stack and shown < most:
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
    pools = ", ".join(pool_text(pool, layout, several) for pool, layout in run.pools) or "[red]not stored[/]"
    states = "".join(f"; {pool_text(p, layout, several)} at {ranges_text(depths)}" for (p, layout), depths in sorted(run.states.items()))
    branch = "branch, " if aside else ""
    lost = f" [red]ORPHAN: page {run.missing.hex()[:SHORT]} is missing[/]" if run.missing is not None else ""
    return f"{branch}{pages} {pools}{states} [dim]{size_text(run.nbytes)}, ends with {run.last.key.hex()[:SHORT]}[/]{lost}"


def pool_text(pool: str, layout: str, several: set[str]) -> str:
    """Return the name of a pool for display, with its layout if the pool is one of `several`, those with more than one layout."""
    return f"{safe(pool)}:{layout[:SHORTER]}" if pool in several else safe(pool)


def _ambiguous(runs: list[Run]) -> set[str]:
    layouts: dict[str, set[str]] = {}
    for run in runs:
        for pool, layout in (*run.pools, *run.states):
            layouts.setdefault(pool, set()).add(layout)
    return {pool for pool, found in layouts.items() if len(found) > 1}


def _pools(page: Page) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(entry.key.pool), entry.key.layout.hex()) for entry in page.pages))


def _alike(forest: Forest, run: Run, page: Page) -> bool:
    cut = forest.broken.get(page.key) or (None if page.pages else page.key)
    return _pools(page) == run.pools and cut == run.missing and page.depth in (None, run.start + run.pages)


def _depth(page: Page, before: Run | None) -> int:
    if page.depth is not None:
        return page.depth
    return before.start + before.pages if before is not None else 1


def summary(forest: Forest, keys: Iterable[bytes]) -> str:
    """Return the numbers of pages, states and bytes of these pages as one line."""
    pages = [forest.pages[key] for key in keys]
    stored = sum(bool(page.pages) for page in pages)
    states = sum(len(page.states) for page in pages)
    nbytes = sum(entry.meta.length for page in pages for entry in page.entries)
    return f"{count_text(stored, 'page')}, {count_text(states, 'state')}, {size_text(nbytes)}"
