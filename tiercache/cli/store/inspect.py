"""The verb `tiercache inspect`: shows a page with its objects, or the tree of a namespace."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer
from rich.tree import Tree

from tiercache.cli.store.batches import ObjectReader
from tiercache.cli.store.forest import Forest, Page
from tiercache.cli.store.names import (
    KEY_DIGITS,
    Namespaces,
    check_hex,
    object_header,
    object_record,
    object_row,
    one_key,
)
from tiercache.cli.store.options import MacKeyOption, StoresOption
from tiercache.cli.store.target import Target, check_answered, opened, resolve_all
from tiercache.cli.terminal import (
    SHORT,
    SHORTER,
    Exit,
    Output,
    OutputOption,
    console,
    count_text,
    document,
    line,
    ranges_text,
    safe,
    whole,
)
from tiercache.core import Outcome
from tiercache.errors import ConfigError
from tiercache.storage.base import StorageBackend
from tiercache.text import readable_size

_CHAIN: Final = 3
"""Number of ancestors of a page that a table shows; JSON has all."""


def inspect(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="First digits of a page key, or all 128 digits of an object's key.",
            show_default=False,
        ),
    ] = "",
    store: StoresOption = None,
    namespace: Annotated[str, typer.Option(help="Show the tree of this namespace.")] = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check the page's objects; a daemon drops corrupt ones.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of lines of a tree.")] = 500,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one page and its objects, or the tree of a namespace.

    Show a page of a stopped store, and check its objects; show everything
    stored of a model:

        tiercache inspect 3fa9c2 -s /var/lib/tiercache --verify

        tiercache inspect --namespace qwen3 -s grpc://n7:7070

    What is stored of a prompt, and why not more, says `tiercache explain`.

    JSON fields of a page: page_key, namespace, label, depth, objects (the
    fields of ls, and verified: the outcome, such as hit or corrupt; null
    without --verify), chain (keys of the page's ancestors, nearest first),
    chain_ends (root, missing or unknown), missing (key of the missing page),
    children, pages_below.

    JSON fields of a namespace: namespace, label, identity, runs (run,
    parent_run, first_depth, last_depth, first_page, last_page, pools, states,
    bytes, orphan, missing). jsonl has one line for each run.
    """
    if bool(key) == bool(namespace):
        raise ConfigError(
            "inspect needs either a page KEY or a --namespace; `tiercache ls` shows both, and `tiercache"
            " explain` finds the pages of a prompt"
        )
    if verify and not key:
        raise ConfigError("--verify needs a KEY; use `tiercache verify --namespace` for more than one page")
    digits = check_hex(key, "KEY", 2 * KEY_DIGITS) if key else ""
    target = resolve_all(store, mac_key)
    with opened(target) as found:
        names = Namespaces.of(found)
        if namespace:
            _namespace(found, names, namespace, limit, output)
        else:
            _page(target, found, names, digits, verify, output)


def _page(
    target: Target, store: StorageBackend, names: Namespaces, digits: str, verify: bool, output: Output
) -> None:
    forest = Forest(store.scan_all())
    page = forest.pages[_page_key(forest, digits)]
    entries = [
        entry
        for entry in page.entries
        if len(digits) <= KEY_DIGITS or entry.key.digest.hex().startswith(digits)
    ]
    outcomes: list[str | None] = [None] * len(entries)
    if verify:
        found = [checked.outcome for batch in ObjectReader(store).check(entries) for checked in batch]
        check_answered(target, found)
        outcomes = [str(outcome) for outcome in found]
    ends, missing = forest.end_of(page.key)
    record = {
        "page_key": page.key.hex(),
        "namespace": page.namespace.hex(),
        "label": names.label(page.namespace),
        "depth": page.depth,
        "objects": [
            {**object_record(entry), "verified": outcome}
            for entry, outcome in zip(entries, outcomes, strict=True)
        ],
        "chain": [above.hex() for above in forest.chain(page.key)],
        "chain_ends": ends,
        "missing": None if missing is None else missing.hex(),
        "children": [child.hex() for child in page.children],
        "pages_below": len(forest.below([page.key])) - 1,
    }
    if output is Output.TABLE:
        _print(record, [object_row(entry, time.time()) for entry in entries])
    else:
        whole(record, output)
    if Outcome.CORRUPT in outcomes:
        raise typer.Exit(Exit.CORRUPT)


def _page_key(forest: Forest, digits: str) -> bytes:
    """Return the key of the page that `digits` name.

    `digits` are the first digits of the page key, or all digits of the key of one of the page's objects.
    """
    if len(digits) <= KEY_DIGITS:
        return one_key(digits, forest.pages, "KEY")
    if len(digits) < 2 * KEY_DIGITS:
        raise ConfigError(
            f"KEY has {len(digits)} digits; a page key has 64, and an object's key (layout and page key) 128"
        )
    key = one_key(digits[KEY_DIGITS:], forest.pages, "KEY")
    if not any(entry.key.digest.hex() == digits for entry in forest.pages[key].entries):
        raise ConfigError(
            f"KEY {digits[:SHORT]}... names a stored page in a layout that is not stored; give the page key"
            " alone to see it"
        )
    return key


def _print(record: dict[str, Any], lines: list[str]) -> None:
    to = console()
    above = record["chain"]
    if record["chain_ends"] == "missing":
        end = f"[red]page {record['missing'][:SHORT]}, which is missing: an ORPHAN[/]"
    else:
        end = "the root" if record["chain_ends"] == "root" else "a page that does not record its parent"
    some = " > ".join(key[:SHORT] for key in above[:_CHAIN]) + (" > ..." if len(above) > _CHAIN else "")
    to.print(f"[bold]page {record['page_key']}[/]", soft_wrap=True)
    to.print(
        f"namespace {record['namespace'][:8]} {safe(record['label'])}, depth {record['depth'] or 'unknown'}",
        soft_wrap=True,
    )
    to.print(
        f"above: {count_text(len(above), 'page')} up to {end}" + (f" [dim]({some})[/]" if above else ""),
        soft_wrap=True,
    )
    to.print(
        f"below: {len(record['children'])} children, {count_text(record['pages_below'], 'page')} in all",
        soft_wrap=True,
    )
    tiers = any(found["tier"] for found in record["objects"])
    to.print(object_header(tiers=tiers), markup=False, soft_wrap=True)
    for text, found in zip(lines, record["objects"], strict=True):
        outcome = found["verified"]
        judged = {None: "", "hit": "  [green]verified[/]", "corrupt": "  [red]CORRUPT[/]"}.get(
            outcome, f"  [yellow]{outcome}[/]"
        )
        to.print(safe(text) + judged, soft_wrap=True)


def _namespace(store: StorageBackend, names: Namespaces, text: str, limit: int, output: Output) -> None:
    everything = Forest(store.scan_all())
    chosen = names.one(text, {page.namespace for page in everything.pages.values()})
    forest = Forest(
        entry
        for page in everything.pages.values()
        for entry in page.entries
        if entry.meta.namespace == chosen
    )
    runs = runs_of(forest, forest.roots)
    if output is Output.TABLE:
        tree = Tree(f"[bold]{safe(names.named(chosen))}[/] {summary(forest, forest.order)}")
        add_runs(tree, runs, limit)
        console().print(tree, soft_wrap=True)
    elif output is Output.JSON:
        document({**names.record(chosen), "runs": [run.record(n) for n, run in enumerate(runs)]})
    else:
        for n, run in enumerate(runs):
            line(run.record(n))


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
    pools = ", ".join(_pool_text(pool, layout, several) for pool, layout in run.pools)
    if not pools:
        pools = "[dim]no pages are kept[/]" if run.first.is_states_alone else "[red]not stored[/]"
    states = "".join(
        f"; {_pool_text(p, layout, several)} at {ranges_text(depths)}"
        for (p, layout), depths in sorted(run.states.items())
    )
    branch = "branch, " if aside else ""
    lost = f" [red]ORPHAN: page {run.missing.hex()[:SHORT]} is missing[/]" if run.missing is not None else ""
    return (
        f"{branch}{pages} {pools}{states} [dim]{readable_size(run.nbytes)}, ends with"
        f" {run.last.key.hex()[:SHORT]}[/]{lost}"
    )


def _pool_text(pool: str, layout: str, several: set[str]) -> str:
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
