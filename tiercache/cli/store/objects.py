"""The verbs `tiercache ls` and `tiercache inspect`: the objects of a store, and those of one page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Final

import typer

from tiercache.cli.store.forest import Forest, is_attached
from tiercache.cli.store.selection import (
    KEY_DIGITS,
    Filter,
    MacKeyOption,
    NamespaceOption,
    Namespaces,
    NewerOption,
    OlderOption,
    PoolOption,
    StoresOption,
    check_hex,
    make_filter,
    one_key,
)
from tiercache.cli.store.target import opened, resolve_all
from tiercache.cli.terminal import (
    SHORT,
    SHORTER,
    Output,
    OutputOption,
    clean,
    console,
    count_text,
    records,
    safe,
    say,
    table,
    whole,
)
from tiercache.errors import ConfigError
from tiercache.storage.base import ScanEntry, StorageBackend
from tiercache.text import readable_age, readable_size

_WIDTHS: Final = (
    ("page key", -SHORT),
    ("pool", -8),
    ("namespace", -9),
    ("depth", 7),
    ("size", 10),
    ("stored", 7),
    ("parent", -SHORT),
    ("layout", -8),
)
"""Columns with their widths in characters; the width of a left-aligned column is negative.

The widths are fixed, because the first rows are printed before the scan has found the widest ones.
"""


def object_record(entry: ScanEntry) -> dict[str, Any]:
    """Return the object's fields for JSON."""
    key, meta = entry.key, entry.meta
    return {
        "page_key": key.page_key.hex(),
        "pool": str(key.pool),
        "namespace": meta.namespace.hex(),
        "depth": meta.depth,
        "bytes": meta.length,
        "stored_at": entry.stored_at,
        "parent": None if meta.parent is None else meta.parent.hex(),
        "layout": key.layout.hex(),
        "checksum": meta.checksum.hex(),
        "tier": entry.tier or None,
    }


def object_header(*, tiers: bool = False) -> str:
    """Return the line with the names of the columns; `tiers`: with the column of tiers."""
    return _joined([name for name, _ in _WIDTHS]) + "  tier" * tiers


def object_row(entry: ScanEntry, now: float) -> str:
    """Return the object as one line of text; `now` is in seconds since 1970."""
    key, meta = entry.key, entry.meta
    row = _joined(
        [
            key.page_key.hex()[:SHORT],
            clean(str(key.pool)),
            meta.namespace.hex()[:SHORTER],
            "-" if meta.depth is None else str(meta.depth),
            readable_size(meta.length),
            readable_age(None if entry.stored_at is None else now - entry.stored_at),
            "-" if meta.parent is None else "(own page)" if is_attached(entry) else meta.parent.hex()[:SHORT],
            key.layout.hex()[:SHORTER],
        ]
    )
    return f"{row}  {clean(entry.tier)}" if entry.tier else row


def _joined(cells: list[str]) -> str:
    padded = (
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, (_, width) in zip(cells, _WIDTHS, strict=True)
    )
    return "  ".join(padded).rstrip()


class Sort(StrEnum):
    """Field by which rows are sorted."""

    KEY = "key"
    SIZE = "size"
    AGE = "age"
    DEPTH = "depth"


_ORDERS: Final[dict[Sort, Callable[[ScanEntry], Any]]] = {
    Sort.KEY: lambda entry: (entry.key.page_key, entry.key.layout),
    Sort.SIZE: lambda entry: (-entry.meta.length, entry.key.page_key),
    Sort.AGE: lambda entry: (entry.stored_at is None, entry.stored_at or 0.0, entry.key.page_key),
    Sort.DEPTH: lambda entry: (entry.meta.depth is None, entry.meta.depth or 0, entry.key.page_key),
}


def ls(
    store: StoresOption = None,
    namespace: NamespaceOption = "",
    pool: PoolOption = "",
    older: OlderOption = "",
    newer: NewerOption = "",
    sort: Annotated[
        Sort | None,
        typer.Option(
            help="Sort rows (size, age: largest and oldest first). Unsorted rows are printed at once."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of rows; 0: all.")] = 0,
    namespaces: Annotated[
        bool, typer.Option("--namespaces", help="Count objects and bytes by namespace and pool instead.")
    ] = False,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """List the stored objects.

    List the hundred largest states of a daemon; list the pages of a model that
    are older than a day, for a script:

        tiercache ls -s /var/lib/tiercache --pool mamba --sort size --limit 100

        tiercache ls -s grpc://node7:7070 --namespace qwen3 --older 1d -o jsonl

    JSON fields: page_key, pool, namespace, depth (pages), bytes, stored_at
    (seconds since 1970), parent (the object's own page key if the object is
    attached to that page, as a state is), layout, checksum, tier (of a chain). A field is null if
    its value is not known. With --namespaces the fields are: namespace, label,
    identity, objects, bytes, pools (pool, objects, bytes).
    """
    now = time.time()
    wanted = make_filter(now, namespace=namespace, pool=pool, older=older, newer=newer)
    with opened(resolve_all(store, mac_key)) as found:
        if namespaces:
            _namespaces(wanted, found, limit, output)
            return
        entries: Iterator[ScanEntry] | Iterable[ScanEntry] = wanted.scan(found)
        if sort is not None:
            entries = sorted(entries, key=_ORDERS[sort])
        _show(islice(entries, limit) if limit else entries, now, output)


def _show(entries: Iterable[ScanEntry], now: float, output: Output) -> None:
    if output is not Output.TABLE:
        records(map(object_record, entries), output)
    else:
        count = nbytes = 0
        for entry in entries:
            if not count:
                sys.stdout.write(object_header(tiers=bool(entry.tier)) + "\n")
            sys.stdout.write(object_row(entry, now) + "\n")
            count, nbytes = count + 1, nbytes + entry.meta.length
        say(f"{count_text(count, 'object')}, {readable_size(nbytes)}")


def _namespaces(wanted: Filter, store: StorageBackend, limit: int, output: Output) -> None:
    counts: dict[bytes, dict[str, list[int]]] = {}
    for entry in wanted.scan(store):
        total = counts.setdefault(entry.meta.namespace, {}).setdefault(str(entry.key.pool), [0, 0])
        total[0] += 1
        total[1] += entry.meta.length
    names = wanted.names
    for name in names.records:
        if not wanted.namespace or names.fits(name, wanted.namespace):
            counts.setdefault(name, {})
    found = [_namespace_record(names, name, pools) for name, pools in sorted(counts.items())]
    found.sort(key=lambda record: -record["bytes"])
    found = found[: limit or None]
    if output is not Output.TABLE:
        records(found, output)
        return
    columns = ("namespace", "label", "page", "pool", "objects", "bytes")
    shown = table(columns, left=("namespace", "label", "pool"))
    for record in found:
        page = str(record["identity"].get("page_size", "-"))
        start = (record["namespace"][:SHORTER], safe(record["label"]), safe(page))
        for pool in record["pools"] or [{"pool": "-", "objects": 0, "bytes": 0}]:
            shown.add_row(*start, safe(pool["pool"]), f"{pool['objects']:,}", readable_size(pool["bytes"]))
            start = ("", "", "")
    console().print(shown)


def _namespace_record(names: Namespaces, namespace: bytes, pools: dict[str, list[int]]) -> dict[str, Any]:
    return {
        **names.record(namespace),
        "objects": sum(objects for objects, _ in pools.values()),
        "bytes": sum(nbytes for _, nbytes in pools.values()),
        "pools": [
            {"pool": pool, "objects": objects, "bytes": nbytes}
            for pool, (objects, nbytes) in sorted(pools.items())
        ],
    }


_CHAIN: Final = 3
"""Number of ancestors of a page that a table shows; JSON has all."""


def inspect(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="First digits of a page key, or all 128 digits of an object's key."
        ),
    ],
    store: StoresOption = None,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one page, its objects, and what is above and below it.

        tiercache inspect 3fa9c2 -s /var/lib/tiercache

    What is stored of a prompt, and why not more, says `tiercache explain`; what
    is stored of a model, `tiercache ls --namespaces`.

    JSON fields: page_key, namespace, label, depth, objects (the
    fields of ls), chain (keys of the page's ancestors, nearest first),
    chain_ends (root, missing or unknown), missing (key of the missing page),
    children, pages_below.
    """
    digits = check_hex(key, "KEY", 2 * KEY_DIGITS)
    with opened(resolve_all(store, mac_key)) as found:
        names, forest = Namespaces.of(found), Forest(found.scan_all())
    page = forest.pages[_page_key(forest, digits)]
    entries = [
        entry
        for entry in page.entries
        if len(digits) <= KEY_DIGITS or entry.key.digest.hex().startswith(digits)
    ]
    ends, missing = forest.end_of(page.key)
    record = {
        "page_key": page.key.hex(),
        "namespace": page.namespace.hex(),
        "label": names.label(page.namespace),
        "depth": page.depth,
        "objects": [object_record(entry) for entry in entries],
        "chain": [above.hex() for above in forest.chain(page.key)],
        "chain_ends": ends,
        "missing": None if missing is None else missing.hex(),
        "children": [child.hex() for child in page.children],
        "pages_below": len(forest.below([page.key])) - 1,
    }
    if output is Output.TABLE:
        _print_page(record, [object_row(entry, time.time()) for entry in entries])
    else:
        whole(record, output)


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


def _print_page(record: dict[str, Any], lines: list[str]) -> None:
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
    for text in lines:
        to.print(text, markup=False, soft_wrap=True)
