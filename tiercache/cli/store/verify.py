"""`tiercache verify`: reads every object and reports those that are not as they were stored."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, Final

import typer

from tiercache.cli.exits import Exit
from tiercache.cli.output import SHORT, SHORTER, Output, OutputOption, clean, console, count_text, document, line, progress, size_text
from tiercache.cli.store import rows
from tiercache.cli.store.filters import make_filter
from tiercache.cli.store.forest import Forest
from tiercache.cli.store.options import (
    DepthOption,
    MacKeyOption,
    MaxSizeOption,
    MinSizeOption,
    NamespaceOption,
    NewerOption,
    OlderOption,
    PoolOption,
    StoreOption,
)
from tiercache.cli.store.reading import Checked, Reading
from tiercache.cli.store.removal import check_removable, remove
from tiercache.cli.store.target import Target, check_reached, opened, resolve
from tiercache.core import ObjectKey, Outcome
from tiercache.errors import StoreDamagedError
from tiercache.storage.base import ScanEntry, StorageBackend

_WORDS: Final = {
    Outcome.HIT: "ok",
    Outcome.CORRUPT: "corrupt",
    Outcome.MISS: "missing",
    Outcome.ERROR: "unreadable",
    Outcome.THROTTLED: "unreadable",
}
_ORPHANS: Final = 20
"""Lines about orphans in a table at most; one missing page can make thousands of orphans."""
_RESULTS: Final = ("ok", "corrupt", "missing", "unreadable", "orphan")


def verify(
    store: StoreOption = "",
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is corrupt, and orphans: objects of pages whose ancestors are gone.")
    ] = False,
    namespace: NamespaceOption = "",
    pool: PoolOption = "",
    depth: DepthOption = "",
    min_size: MinSizeOption = "",
    max_size: MaxSizeOption = "",
    older: OlderOption = "",
    newer: NewerOption = "",
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Read every object and check it. Exit code 4 if one was corrupt, 1 if one could not be read.

    Corrupt is also what lay in a slab that is missing or was cut, and a catalog
    that is damaged. Of a stopped store nothing is changed, so that every run
    says the same until --repair removes what is corrupt and writes a damaged
    catalog anew; that run still has exit code 4, and the next one 0. A daemon
    cannot be looked at only: it drops what it finds corrupt by itself, so that
    it is stored anew the next time, and a second run finds nothing.

    Orphans are objects that nothing can reach, because a page in front of them
    is gone: they take room and do no harm, and are of use again once that page
    is stored anew.

        tiercache verify -s /var/lib/tiercache

        tiercache verify -s grpc://node7:7070 --namespace qwen3 --repair -o jsonl

    JSON fields: found (the objects that are not ok: result = corrupt, missing,
    unreadable or orphan; action = dropped, listed, deleted or none; and the
    fields of ls), summary (objects, bytes, seconds, bytes_per_second, ok,
    corrupt, missing, unreadable, orphan, repaired, catalog = sound or damaged).
    With jsonl each of found on
    a line as it is found, and a last line with summary.
    """
    wanted = make_filter(
        time.time(), namespace=namespace, pool=pool, depth=depth, min_size=min_size, max_size=max_size, older=older, newer=newer
    )  # fmt: skip
    target = resolve(store, mac_key)
    tally = Tally()
    found: list[dict[str, Any]] = []
    listed: list[ScanEntry] = []
    if repair and not target.live:
        # A store that is opened for change drops entries whose place is gone; opened for reading before, it still lists them.
        tally.damaged = True
        with suppress(StoreDamagedError), opened(target) as looked:
            tally.damaged = False
            listed = list(looked.scan_all())
            tally.look(looked)
    with _opened(target, repair) as opened_store:
        if repair:
            check_removable(target, opened_store)
        tally.look(opened_store)
        everything = list(opened_store.scan_all())
        there = {entry.key.digest for entry in everything}
        dropped = list(wanted.scan(opened_store, [entry for entry in listed if entry.key.digest not in there]))
        wanted_entries = list(wanted.scan(opened_store, everything))
        orphans = 0
        tally.counts["corrupt"] += len(dropped)
        records = _all(target, opened_store, everything, wanted_entries, repair, tally)
        for record in chain((_record("corrupt", "dropped", entry) for entry in dropped), records):
            orphans += record["result"] == "orphan"
            if output is Output.JSONL:
                line(record)
            elif output is Output.JSON:
                found.append(record)
            elif orphans <= _ORPHANS:
                _print(record)
    _finish(found, tally.summary(), output)
    if tally.counts["corrupt"] or tally.damaged:
        raise typer.Exit(Exit.CORRUPT)
    if tally.counts["unreadable"]:
        raise typer.Exit(Exit.FAILED)


@contextmanager
def _opened(target: Target, repair: bool) -> Iterator[StorageBackend]:
    """Open the store; exit with the code for corruption if it is too damaged to be read."""
    try:
        with opened(target, change=repair) as store:
            yield store
    except StoreDamagedError as error:
        typer.echo(f"{clean(str(error))}; verify --repair does", err=True)
        raise typer.Exit(Exit.CORRUPT) from error


@dataclass(slots=True)
class Tally:
    """Counts of objects by result, and the bytes and seconds of reading them.

    Thread safety: one thread.
    """

    counts: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    seconds: float = 0.0
    damaged: bool = False
    """Whether the catalog is damaged, or was at the start of this run."""

    def look(self, store: StorageBackend) -> None:
        """Record whether the store reports a damaged catalog."""
        self.damaged |= bool(store.usage().details.get("catalog_damaged"))

    def summary(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "objects": sum(self.counts[name] for name in _RESULTS[:-1]),
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 6),
            "bytes_per_second": round(self.nbytes / self.seconds) if self.seconds else 0,
            **{name: self.counts[name] for name in (*_RESULTS, "repaired")},
            "catalog": "damaged" if self.damaged else "sound",
        }


def _all(
    target: Target,
    store: StorageBackend,
    everything: Sequence[ScanEntry],
    wanted: Sequence[ScanEntry],
    repair: bool,
    tally: Tally,
) -> Iterator[dict[str, Any]]:
    """Yield a record for each object that is not sound, as it is found; count all in `tally`, and delete orphans with `repair`."""
    gone: set[bytes] = set()
    with progress("checking", sum(entry.meta.length for entry in wanted)) as advance:
        started = time.monotonic()
        for batch in Reading(store).check(wanted):
            nbytes = sum(checked.entry.meta.length for checked in batch)
            tally.nbytes, tally.seconds = tally.nbytes + nbytes, time.monotonic() - started
            if all(checked.outcome is not Outcome.HIT for checked in batch):
                check_reached(target, store)
            tally.counts.update(_WORDS[checked.outcome] for checked in batch)
            yield from _bad(store, [checked for checked in batch if checked.outcome is not Outcome.HIT], gone)
            advance(nbytes)
    lost = _orphans(store, everything, {entry.key.digest for entry in wanted} - gone, gone)
    tally.counts["orphan"] = len(lost)
    kept = set(_kept(target, store, lost)) if repair else set()
    for entry in lost:
        deleted = repair and entry.key.digest not in kept
        tally.counts["repaired"] += deleted
        yield _record("orphan", "deleted" if deleted else "none", entry)


def _bad(store: StorageBackend, bad: Sequence[Checked], gone: set[bytes]) -> Iterator[dict[str, Any]]:
    there = store.exists([checked.entry.key for checked in bad]) if bad else []
    for (entry, outcome), still in zip(bad, there, strict=True):
        if not still or outcome is Outcome.CORRUPT:
            gone.add(entry.key.digest)
        action = "none" if outcome is not Outcome.CORRUPT else "listed" if still else "dropped"
        yield _record(_WORDS[outcome], action, entry)


def _orphans(store: StorageBackend, everything: Sequence[ScanEntry], wanted: set[bytes], gone: set[bytes]) -> list[ScanEntry]:
    """Return the wanted unreachable objects in order of removal, without those whose missing page was stored since the scan."""
    forest = Forest(entry for entry in everything if entry.key.digest not in gone)
    lost = forest.orphans()
    if not lost:
        return []
    layouts = {(entry.key.pool, entry.key.layout) for page in forest.pages.values() for entry in page.pages}
    absent = sorted({missing for entry in lost if (missing := forest.cut_off_by(entry)) is not None})
    keys = [ObjectKey(pool, layout + page) for page in absent for pool, layout in sorted(layouts)]
    came = {key.page_key for key, there in zip(keys, store.exists(keys), strict=True) if there and key.digest not in gone}
    return forest.removal_order(entry for entry in lost if entry.key.digest in wanted and forest.cut_off_by(entry) not in came)


def _kept(target: Target, store: StorageBackend, lost: Sequence[ScanEntry]) -> Iterator[bytes]:
    """Delete these objects; yield the digests of those that are still stored."""
    with progress("deleting", sum(entry.meta.length for entry in lost)) as advance:
        for removed in remove(target, store, lost):
            yield from (entry.key.digest for entry in removed.failed)
            advance(sum(entry.meta.length for entry in removed.entries))


def _record(result: str, action: str, entry: ScanEntry) -> dict[str, Any]:
    return {"result": result, "action": action, **rows.record(entry)}


def _print(record: dict[str, Any]) -> None:
    happened = {"dropped": ", dropped", "listed": ", still listed", "deleted": ", deleted"}.get(record["action"], "")
    where = f"page {record['page_key'][:SHORT]} {record['pool']} {record['namespace'][:SHORTER]} layout {record['layout'][:SHORTER]}"
    depth = "" if record["depth"] is None else f" depth {record['depth']}"
    typer.echo(clean(f"{record['result']}{happened}: {where}{depth} {size_text(record['bytes'])}"))


def _finish(found: list[dict[str, Any]], summary: dict[str, Any], output: Output) -> None:
    if output is Output.JSON:
        document({"found": found, "summary": summary})
    elif output is Output.JSONL:
        line({"summary": summary})
    else:
        rate = f"{summary['bytes_per_second'] / 1e9:.2f} GB/s"
        parts = ", ".join(f"{summary[name]:,} {name}" for name in (*_RESULTS, "repaired") if summary[name] or name == "ok")
        if summary["orphan"] > _ORPHANS:
            console().print(f"and {summary['orphan'] - _ORPHANS:,} more orphans, which -o jsonl lists", markup=False)
        console().print(f"{count_text(summary['objects'], 'object')}, {size_text(summary['bytes'])}, {rate}: {parts}", markup=False)
        if summary["catalog"] == "damaged":
            console().print("the catalog was damaged: what could be read of it is listed, and --repair writes it anew", markup=False)
        if summary["orphan"] > summary["repaired"]:
            console().print("orphans cannot be reached any more; verify --repair deletes them", markup=False)
