"""The verb `tiercache ls`: lists the objects of a store, in the order of the store or sorted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Final

import typer

from tiercache.cli.store.names import Namespaces, object_header, object_record, object_row
from tiercache.cli.store.options import (
    DepthOption,
    Filter,
    MacKeyOption,
    MaxSizeOption,
    MinSizeOption,
    NamespaceOption,
    NewerOption,
    OlderOption,
    PoolOption,
    StoresOption,
    make_filter,
)
from tiercache.cli.store.target import opened, resolve_all
from tiercache.cli.terminal import (
    SHORTER,
    Output,
    OutputOption,
    console,
    count_text,
    records,
    safe,
    say,
    table,
)
from tiercache.storage.base import ScanEntry, StorageBackend
from tiercache.text import readable_size


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
    depth: DepthOption = "",
    min_size: MinSizeOption = "",
    max_size: MaxSizeOption = "",
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
    wanted = make_filter(
        now, namespace=namespace, pool=pool, depth=depth, min_size=min_size, max_size=max_size, older=older,
        newer=newer
    )  # fmt: skip
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
    found = [_record(names, name, pools) for name, pools in sorted(counts.items())]
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


def _record(names: Namespaces, namespace: bytes, pools: dict[str, list[int]]) -> dict[str, Any]:
    return {
        **names.record(namespace),
        "objects": sum(objects for objects, _ in pools.values()),
        "bytes": sum(nbytes for _, nbytes in pools.values()),
        "pools": [
            {"pool": pool, "objects": objects, "bytes": nbytes}
            for pool, (objects, nbytes) in sorted(pools.items())
        ],
    }
