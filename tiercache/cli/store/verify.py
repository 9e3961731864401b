"""The verb `tiercache verify`: reads every object, and reports damaged, missing and unreachable objects."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer

from tiercache.cli.store.batches import Checked, ObjectReader, check_removable, remove
from tiercache.cli.store.forest import Forest
from tiercache.cli.store.objects import object_record
from tiercache.cli.store.selection import (
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
from tiercache.cli.store.target import Target, check_answered, opened, resolve_all
from tiercache.cli.terminal import (
    SHORT,
    SHORTER,
    Exit,
    Output,
    OutputOption,
    clean,
    console,
    count_text,
    document,
    line,
    progress,
    say,
    working,
)
from tiercache.core import ObjectKey, Outcome
from tiercache.errors import ConfigError, RefusedError, StorageError, StoreDamagedError, UnlistedError
from tiercache.storage.base import ScanEntry, StorageBackend
from tiercache.text import readable_size

_RESULT_OF: Final = {
    Outcome.HIT: "ok",
    Outcome.CORRUPT: "corrupt",
    Outcome.MISS: "missing",
    Outcome.ERROR: "unreadable",
    Outcome.THROTTLED: "unreadable",
}
_ORPHANS: Final = 20
"""Maximum number of lines about orphans in a table; one missing page can make thousands of orphans."""
_RESULTS: Final = ("ok", "corrupt", "missing", "unreadable", "orphan")


def verify(
    store: StoresOption = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Remove corrupt objects, and orphans (objects of pages with missing ancestors)."
        ),
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
    """Read and check every object. Exit code 4 if an object was corrupt, 1 if one could not be read.

    Objects of a slab file that is missing or truncated count as corrupt. A
    damaged catalog gives exit code 4 too. Without --repair a stopped store is
    not changed, and every run has the same result. --repair removes corrupt
    objects and rewrites a damaged catalog, and puts a damaged database of lmdb
    aside; the run with --repair still has exit code 4, but the next run has 0.
    A daemon always drops the objects that it finds corrupt, so that they can be
    stored again. So a second run does not find these objects any more.

    Orphans are objects that cannot be reached, because a page before them is
    missing. Orphans use space, but do no harm. They can be reached again when
    the missing page is stored again.

        tiercache verify -s /var/lib/tiercache

        tiercache verify -s grpc://node7:7070 --namespace qwen3 --repair -o jsonl

    The tiers of a stopped chain are checked one after the other, every copy of
    an object by itself. Through a daemon, an object of a chain is ok if any of
    its copies is.

        tiercache verify -s file:///ssd/kv?tier_name=ssd -s /hdd/kv

    JSON fields: found (the objects that are not ok: result = corrupt, missing,
    unreadable or orphan; action = dropped, listed (still stored), deleted or
    none; and the fields of ls), summary (objects, bytes, seconds,
    bytes_per_second, ok, corrupt, missing, unreadable, orphan, removed (from a
    live store after they were listed, which is no damage), repaired, catalog =
    sound, damaged or unknown (to this caller), unread_copies). jsonl prints one line for each
    object of found at once, and summary as the last line.
    """
    wanted = make_filter(
        time.time(), namespace=namespace, pool=pool, depth=depth, min_size=min_size, max_size=max_size,
        older=older, newer=newer
    )  # fmt: skip
    target = resolve_all(store, mac_key)
    tally = VerifyCounts()
    found: list[dict[str, Any]] = []
    orphans = 0
    for record in _verify(target, wanted, repair, tally):
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
    if tally.counts["unreadable"] or tally.is_partial:
        raise typer.Exit(Exit.FAILED)


def _verify(target: Target, wanted: Filter, repair: bool, tally: VerifyCounts) -> Iterator[dict[str, Any]]:
    """Check a store, or every tier of a chain by itself, so that every copy of an object is checked.

    Orphans are looked for when all tiers have been read, because an object that is corrupt in one tier may be
    whole in another. While a tier is out, they cannot be told.
    """
    with ExitStack() as stack:
        checks: list[_StoreCheck] = []
        for one in target.tiers or [target]:
            try:
                with working(f"listing the objects of {one.name}"):
                    check = _begin(one, wanted, repair, tally, stack)
            except (StorageError, ConfigError) as error:
                if not target.tiers:
                    raise
                state = "cannot list" if isinstance(error, UnlistedError) else "is out"
                say(f"tier {one.tier} {state}, and its objects are not checked: {error}")
                tally.is_partial = True
                continue
            checks.append(check)
            tally.counts["corrupt"] += len(check.dropped)
            yield from (_record("corrupt", "dropped", entry) for entry in check.dropped)
            yield from _check_objects(check, tally)
        for check in () if tally.is_partial else checks:
            others = [entry for other in checks if other is not check for entry in other.whole]
            yield from _report_orphans(check, others, repair, tally)


@dataclass(slots=True)
class _StoreCheck:
    """A store that is open while it is checked.

    Thread safety: one thread.
    """

    target: Target
    store: StorageBackend
    everything: Sequence[ScanEntry]
    """All objects of the store."""
    wanted: Sequence[ScanEntry]
    """Those of them that are to be checked."""
    dropped: Sequence[ScanEntry]
    """Objects to be checked that were lost when the store was opened."""
    gone: set[bytes] = field(default_factory=set)
    """Digests of objects that are corrupt, or not stored any more."""

    @property
    def whole(self) -> list[ScanEntry]:
        """All objects but those that are gone."""
        return [entry for entry in self.everything if entry.key.digest not in self.gone]


def _begin(
    target: Target, wanted: Filter, repair: bool, tally: VerifyCounts, stack: ExitStack
) -> _StoreCheck:
    """Open one store until `stack` ends, and list its objects."""
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
    return _StoreCheck(
        target,
        store,
        everything,
        wanted=list(wanted.scan(store, everything)),
        dropped=list(wanted.scan(store, dropped)),
    )


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
            "objects": sum(self.counts[name] for name in (*_RESULTS[:-1], "removed")),
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 6),
            "bytes_per_second": round(self.nbytes / self.seconds) if self.seconds else 0,
            **{name: self.counts[name] for name in (*_RESULTS, "removed", "repaired")},
            "catalog": "damaged" if self.damaged else "sound" if self.is_known else "unknown",
            "unread_copies": self.unread_copies,
        }


def _check_objects(check: _StoreCheck, tally: VerifyCounts) -> Iterator[dict[str, Any]]:
    """Check all wanted objects of a store; yield a record for each object that is not ok.

    A record is yielded as soon as its object is found. All objects are counted in `tally`.
    """
    with progress("checking", sum(entry.meta.length for entry in check.wanted)) as advance:
        started = time.monotonic() - tally.seconds  # as if the tiers before this one were part of this run
        for batch in ObjectReader(check.store).check(check.wanted):
            nbytes = sum(checked.entry.meta.length for checked in batch)
            tally.nbytes, tally.seconds = tally.nbytes + nbytes, time.monotonic() - started
            check_answered(check.target, [checked.outcome for checked in batch])
            bad = [checked for checked in batch if checked.outcome is not Outcome.HIT]
            tally.counts["ok"] += len(batch) - len(bad)
            for record in _bad_records(check, bad):
                tally.counts[record["result"]] += 1
                if record["result"] != "removed":
                    yield record
            advance(nbytes)


def _report_orphans(
    check: _StoreCheck, others: Sequence[ScanEntry], repair: bool, tally: VerifyCounts
) -> Iterator[dict[str, Any]]:
    """Yield a record for each orphan among the wanted objects of a store; with `repair`, delete them.

    An object whose ancestors are among `others`, in other tiers, is no orphan.
    """
    own = check.whole
    digests = {entry.key.digest for entry in own}
    others = [entry for entry in others if entry.key.digest not in digests]
    wanted = {entry.key.digest for entry in check.wanted} - check.gone
    lost = _orphans(check.store, [*own, *others], wanted, check.gone)
    tally.counts["orphan"] += len(lost)
    kept = set(_delete_orphans(check.target, check.store, lost)) if repair else set()
    for entry in lost:
        deleted = repair and entry.key.digest not in kept
        tally.counts["repaired"] += deleted
        yield _record("orphan", "deleted" if deleted else "none", entry)


def _bad_records(check: _StoreCheck, bad: Sequence[Checked]) -> Iterator[dict[str, Any]]:
    there = check.store.exists([checked.entry.key for checked in bad]) if bad else []
    for (entry, outcome), still in zip(bad, there, strict=True):
        if not still or outcome is Outcome.CORRUPT:
            check.gone.add(entry.key.digest)
        action = "none" if outcome is not Outcome.CORRUPT else "listed" if still else "dropped"
        # A daemon goes on evicting while its objects are read; nobody evicts from a stopped store.
        removed = check.target.live and outcome is Outcome.MISS and not still
        yield _record("removed" if removed else _RESULT_OF[outcome], action, entry)


def _orphans(
    store: StorageBackend, everything: Sequence[ScanEntry], wanted: set[bytes], gone: set[bytes]
) -> list[ScanEntry]:
    """Return the wanted objects of `everything` that cannot be reached, in order of removal.

    An orphan of the scan is left out if it can be reached by now:

        1. The scan finds page C, but not its parent B.
        2. A worker stores B, so that C can be reached.
        3. `exists` finds B here, and C is left out.
    """
    forest = Forest(everything)
    lost = forest.orphans()
    if not lost:
        return []
    layouts = {(entry.key.pool, entry.key.layout) for page in forest.pages.values() for entry in page.pages}
    ancestors = {forest.missing_ancestor(entry) for entry in lost}
    absent = sorted(missing for missing in ancestors if missing is not None)
    keys = [ObjectKey(pool, layout + page) for page in absent for pool, layout in sorted(layouts)]
    # Pages that are stored now; a corrupt page does not count.
    came = {
        key.page_key
        for key, there in zip(keys, store.exists(keys), strict=True)
        if there and key.digest not in gone
    }
    return forest.removal_order(
        entry for entry in lost if entry.key.digest in wanted and forest.missing_ancestor(entry) not in came
    )


def _delete_orphans(target: Target, store: StorageBackend, lost: Sequence[ScanEntry]) -> Iterator[bytes]:
    """Delete orphans; yield the digests of the orphans that are still stored."""
    with progress("deleting", sum(entry.meta.length for entry in lost)) as advance:
        for removed in remove(target, store, lost):
            yield from (entry.key.digest for entry in removed.failed)
            advance(sum(entry.meta.length for entry in removed.entries))


def _record(result: str, action: str, entry: ScanEntry) -> dict[str, Any]:
    return {"result": result, "action": action, **object_record(entry)}


def _print(record: dict[str, Any]) -> None:
    happened = {"dropped": ", dropped", "listed": ", still listed", "deleted": ", deleted"}.get(
        record["action"], ""
    )
    tier = f"in tier {record['tier']}: " if record["tier"] else ""
    where = (
        f"{tier}page {record['page_key'][:SHORT]} {record['pool']} {record['namespace'][:SHORTER]} layout"
        f" {record['layout'][:SHORTER]}"
    )
    depth = "" if record["depth"] is None else f" depth {record['depth']}"
    typer.echo(clean(f"{record['result']}{happened}: {where}{depth} {readable_size(record['bytes'])}"))


def _finish(found: list[dict[str, Any]], summary: dict[str, Any], output: Output) -> None:
    if output is Output.JSON:
        document({"found": found, "summary": summary})
    elif output is Output.JSONL:
        line({"summary": summary})
    else:
        rate = f"{summary['bytes_per_second'] / 1e9:.2f} GB/s"
        parts = ", ".join(
            f"{summary[name]:,} {name}" for name in (*_RESULTS, "repaired") if summary[name] or name == "ok"
        )
        if summary["removed"]:
            parts += f"; {summary['removed']:,} were evicted or deleted meanwhile, which is no damage"
        if summary["orphan"] > _ORPHANS:
            console().print(
                f"and {summary['orphan'] - _ORPHANS:,} more orphans; -o jsonl lists all", markup=False
            )
        console().print(
            f"{count_text(summary['objects'], 'object')}, {readable_size(summary['bytes'])}, {rate}: {parts}",
            markup=False,
        )
        if summary["catalog"] == "damaged":
            console().print(
                "the catalog was damaged: the objects that could be read from it are listed; --repair"
                " rewrites it",
                markup=False,
            )
        if summary["orphan"] > summary["repaired"]:
            console().print("orphans cannot be reached any more; verify --repair deletes them", markup=False)
