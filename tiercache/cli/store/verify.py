"""The verb `tiercache verify`: reads every object, and reports those that are damaged or cannot be read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from mmap import mmap
from typing import Annotated, Any, Final

import typer

from tiercache.cli.store.objects import object_record
from tiercache.cli.store.selection import (
    Filter,
    MacKeyOption,
    NamespaceOption,
    NewerOption,
    OlderOption,
    PoolOption,
    StoresOption,
    make_filter,
)
from tiercache.cli.store.target import Target, check_answered, check_removable, opened, resolve_all
from tiercache.cli.terminal import (
    SHORT,
    SHORTER,
    Exit,
    Output,
    OutputOption,
    clean,
    console,
    count_text,
    line,
    progress,
    records,
    say,
    working,
)
from tiercache.core import BLOCK_ALIGN, Outcome
from tiercache.errors import ConfigError, RefusedError, StorageError, StoreDamagedError, UnlistedError
from tiercache.storage.base import GetItem, ScanEntry, StorageBackend
from tiercache.storage.vectors import batches
from tiercache.text import readable_size

BATCH_BYTES: Final = 64 << 20
"""Maximum bytes of a batch; a larger object is a batch of its own."""
_BATCH_OBJECTS: Final = 512
"""Maximum number of objects of a batch."""
_TRIES: Final = 20
"""Maximum number of attempts to read a throttled object."""
_PAUSE: Final = 0.1
"""Seconds between two attempts, in which a busy daemon can make progress."""
_RESULT_OF: Final = {
    Outcome.HIT: "ok",
    Outcome.CORRUPT: "corrupt",
    Outcome.MISS: "missing",
    Outcome.ERROR: "unreadable",
    Outcome.THROTTLED: "unreadable",
}
_RESULTS: Final = ("ok", "corrupt", "missing", "unreadable")


def verify(
    store: StoresOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove corrupt objects, and rewrite a damaged catalog.")
    ] = False,
    namespace: NamespaceOption = "",
    pool: PoolOption = "",
    older: OlderOption = "",
    newer: NewerOption = "",
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Read and check every object. Exit code 4 if an object was corrupt, 1 if one could not be read.

    Objects of a slab file that is missing or truncated count as corrupt. A
    damaged catalog gives exit code 4 too. Without --repair a stopped store is
    not changed, and every run has the same result. --repair removes corrupt
    objects and rewrites a damaged catalog, and puts a damaged database of lmdb
    aside; the run with --repair still has exit code 4, but the next run has 0.
    A daemon always drops the objects that it finds corrupt, so that they can be
    stored again. So a second run does not find these objects any more.

        tiercache verify -s /var/lib/tiercache

        tiercache verify -s grpc://node7:7070 --namespace qwen3 --repair -o jsonl

    The tiers of a stopped chain are checked one after the other, every copy of
    an object by itself. Through a daemon, an object of a chain is ok if any of
    its copies is.

        tiercache verify -s file:///ssd/kv?tier_name=ssd -s /hdd/kv

    JSON fields: found (the objects that are not ok: result = corrupt, missing
    or unreadable; action = dropped, listed (still stored) or none; and the
    fields of ls), summary (objects, bytes, seconds, bytes_per_second, ok,
    corrupt, missing, unreadable, removed (from a live store after they were
    listed, which is no damage), catalog = sound, damaged or unknown (to this
    caller), unread_copies). jsonl prints one line for each object of found at
    once, and summary as the last line.
    """
    wanted = make_filter(time.time(), namespace=namespace, pool=pool, older=older, newer=newer)
    target = resolve_all(store, mac_key)
    tally = VerifyCounts()
    found: list[dict[str, Any]] = []
    for record in _verify(target, wanted, repair, tally):
        if output is Output.JSONL:
            line(record)
        elif output is Output.JSON:
            found.append(record)
        else:
            _print(record)
    _finish(found, tally.summary(), output)
    if tally.counts["corrupt"] or tally.damaged:
        raise typer.Exit(Exit.CORRUPT)
    if tally.counts["unreadable"] or tally.is_partial:
        raise typer.Exit(Exit.FAILED)


@dataclass(slots=True)
class VerifyCounts:
    """Counts of objects by result, and the bytes and seconds of reading them.

    Thread safety: one thread.
    """

    counts: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    seconds: float = 0.0
    damaged: bool = False
    """Whether the catalog was damaged when this run began."""
    is_known: bool = True
    """Whether the store lets this caller know its catalog and its totals."""
    is_partial: bool = False
    """Whether a tier was out, so that its objects were not checked."""

    unread_copies: int = 0
    """Number of copies in the tiers of a daemon's chain beyond the one of each object that is read."""

    def check_catalog(self, store: StorageBackend) -> None:
        """Set `damaged` if the store reports a damaged catalog; a tenant may not know."""
        try:
            self.damaged |= bool(store.usage().details.get("catalog_damaged"))
        except RefusedError:
            self.is_known = False

    def count_copies(self, store: StorageBackend, objects: int) -> None:
        """Count the copies that a chain of tiers has beyond these objects, and say that they are not read."""
        copies = sum(tier.objects for tier in store.usage().tiers)
        self.unread_copies = max(0, copies - objects)
        if self.unread_copies:
            say(
                "this daemon serves a chain of tiers, and one copy of each object is read:"
                f" {self.unread_copies} other copies are not checked; to check them all, stop the daemon and"
                " name each tier with -s"
            )

    def summary(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "objects": sum(self.counts.values()),
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 6),
            "bytes_per_second": round(self.nbytes / self.seconds) if self.seconds else 0,
            **{name: self.counts[name] for name in (*_RESULTS, "removed")},
            "catalog": "damaged" if self.damaged else "sound" if self.is_known else "unknown",
            "unread_copies": self.unread_copies,
        }


def _verify(target: Target, wanted: Filter, repair: bool, tally: VerifyCounts) -> Iterator[dict[str, Any]]:
    """Check a store, or every tier of a stopped chain; yield a record for each object that is not ok.

    A tier that cannot be opened or listed is left out.
    """
    for one in target.tiers or [target]:
        with ExitStack() as stack:
            try:
                with working(f"listing the objects of {one.name}"):
                    store, entries, dropped = _begin(one, wanted, repair, tally, stack)
            except (StorageError, ConfigError) as error:
                if not target.tiers:
                    raise
                state = "cannot list" if isinstance(error, UnlistedError) else "is out"
                say(f"tier {one.tier} {state}, and its objects are not checked: {error}")
                tally.is_partial = True
                continue
            tally.counts["corrupt"] += len(dropped)
            yield from (_record("corrupt", "dropped", entry) for entry in dropped)
            yield from _check_objects(one, store, entries, tally)


def _begin(
    target: Target, wanted: Filter, repair: bool, tally: VerifyCounts, stack: ExitStack
) -> tuple[StorageBackend, Sequence[ScanEntry], Sequence[ScanEntry]]:
    """Open one store until `stack` ends; return it, the wanted objects, and those lost by the opening."""
    listed: list[ScanEntry] = []
    if repair and not target.live:
        # Opening a store for change drops the entries of objects whose slab is missing. Therefore the store
        # is first opened for reading, to list these entries.
        can_be_read = False
        with suppress(StoreDamagedError), opened(target) as looked:
            can_be_read = True
            listed = _entries_of(target, looked)
            tally.check_catalog(looked)
        tally.damaged |= not can_be_read
    store = stack.enter_context(_opened(target, repair))
    if repair:
        check_removable(target, store)
    tally.check_catalog(store)
    everything = _entries_of(target, store)
    if target.live and tally.is_known:
        tally.count_copies(store, len(everything))
    there = {entry.key.digest for entry in everything}
    dropped = [entry for entry in listed if entry.key.digest not in there]
    return store, list(wanted.scan(store, everything)), list(wanted.scan(store, dropped))


def _entries_of(target: Target, store: StorageBackend) -> list[ScanEntry]:
    """Return all objects of a store, with its name if it is a tier of a chain."""
    found = store.scan_all()
    return [entry._replace(tier=target.tier) for entry in found] if target.tier else list(found)


@contextmanager
def _opened(target: Target, repair: bool) -> Iterator[StorageBackend]:
    """Open the store; exit with the code for corruption if it is too damaged to be read."""
    try:
        with opened(target, change=repair) as store:
            yield store
    except StoreDamagedError as error:
        typer.echo(f"{clean(str(error))}; `tiercache verify --repair` repairs the store", err=True)
        raise typer.Exit(Exit.CORRUPT) from error


def _check_objects(
    target: Target, store: StorageBackend, entries: Sequence[ScanEntry], tally: VerifyCounts
) -> Iterator[dict[str, Any]]:
    """Read objects and count them in `tally`; yield a record for each that is not ok at once."""
    with progress("checking", sum(entry.meta.length for entry in entries)) as advance:
        started = time.monotonic() - tally.seconds  # as if the tiers before this one were part of this run
        for batch, outcomes in _read_all(store, entries):
            nbytes = sum(entry.meta.length for entry in batch)
            tally.nbytes, tally.seconds = tally.nbytes + nbytes, time.monotonic() - started
            check_answered(target, outcomes)
            bad = [pair for pair in zip(batch, outcomes, strict=True) if pair[1] is not Outcome.HIT]
            tally.counts["ok"] += len(batch) - len(bad)
            for record in _bad_records(target, store, bad):
                tally.counts[record["result"]] += 1
                if record["result"] != "removed":
                    yield record
            advance(nbytes)


def _read_all(
    store: StorageBackend, entries: Iterable[ScanEntry]
) -> Iterator[tuple[list[ScanEntry], list[Outcome]]]:
    """Read each object, and yield the outcomes of each batch; this is no use of the objects.

    HIT: the object is intact. MISS: it was removed after the scan. ERROR, THROTTLED: it could not be read. A
    store that was opened for change drops the objects that it finds corrupt.
    """
    buffer = memoryview(mmap(-1, BATCH_BYTES))
    for batch in batches(entries, _padded, _BATCH_OBJECTS, BATCH_BYTES):
        found = [Outcome.THROTTLED] * len(batch)
        for tried in range(_TRIES):
            again = [n for n, outcome in enumerate(found) if outcome is Outcome.THROTTLED]
            if not again:
                break
            if tried:
                time.sleep(_PAUSE)
            for n, outcome in zip(again, _read(store, [batch[n] for n in again], buffer), strict=True):
                found[n] = outcome
        yield batch, found


def _read(store: StorageBackend, batch: list[ScanEntry], buffer: memoryview) -> list[Outcome]:
    try:
        if _padded(batch[0]) > BATCH_BYTES:
            buffer = memoryview(mmap(-1, _padded(batch[0])))
    except (OSError, OverflowError, MemoryError):
        # The batch is a single object, and its recorded length is more than this machine can map.
        return [Outcome.ERROR] * len(batch)
    items: list[GetItem] = []
    start = 0
    for entry in batch:
        items.append(GetItem(entry.key, [buffer[start : start + _padded(entry)]], entry.meta.length))
        start += _padded(entry)
    return store.peek(items)


def _padded(entry: ScanEntry) -> int:
    """Return the size in bytes of an object's buffer: whole pages of 4 KiB, which O_DIRECT needs."""
    return max(1, -(-entry.meta.length // BLOCK_ALIGN)) * BLOCK_ALIGN


def _bad_records(
    target: Target, store: StorageBackend, bad: Sequence[tuple[ScanEntry, Outcome]]
) -> Iterator[dict[str, Any]]:
    there = store.exists([entry.key for entry, _ in bad]) if bad else []
    for (entry, outcome), still in zip(bad, there, strict=True):
        action = "none" if outcome is not Outcome.CORRUPT else "listed" if still else "dropped"
        # A daemon goes on evicting while its objects are read; nobody evicts from a stopped store.
        removed = target.live and outcome is Outcome.MISS and not still
        yield _record("removed" if removed else _RESULT_OF[outcome], action, entry)


def _record(result: str, action: str, entry: ScanEntry) -> dict[str, Any]:
    return {"result": result, "action": action, **object_record(entry)}


def _print(record: dict[str, Any]) -> None:
    happened = {"dropped": ", dropped", "listed": ", still listed"}.get(record["action"], "")
    tier = f"in tier {record['tier']}: " if record["tier"] else ""
    where = (
        f"{tier}page {record['page_key'][:SHORT]} {record['pool']} {record['namespace'][:SHORTER]} layout"
        f" {record['layout'][:SHORTER]}"
    )
    depth = "" if record["depth"] is None else f" depth {record['depth']}"
    typer.echo(clean(f"{record['result']}{happened}: {where}{depth} {readable_size(record['bytes'])}"))


def _finish(found: list[dict[str, Any]], summary: dict[str, Any], output: Output) -> None:
    if output is not Output.TABLE:
        records([{"summary": summary}], output, {"found": found, "summary": summary})
        return
    rate = f"{summary['bytes_per_second'] / 1e9:.2f} GB/s"
    parts = ", ".join(f"{summary[name]:,} {name}" for name in _RESULTS if summary[name] or name == "ok")
    if summary["removed"]:
        parts += f"; {summary['removed']:,} were evicted or deleted meanwhile, which is no damage"
    size = readable_size(summary["bytes"])
    console().print(f"{count_text(summary['objects'], 'object')}, {size}, {rate}: {parts}", markup=False)
    if summary["catalog"] == "damaged":
        console().print(
            "the catalog was damaged: the objects that could be read from it are listed; --repair"
            " rewrites it",
            markup=False,
        )
