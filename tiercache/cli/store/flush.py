"""The verb `tiercache flush`: deletes the objects that match its options, unless other objects need them."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import typer

from tiercache.cli.store.forest import Forest
from tiercache.cli.store.objects import object_record
from tiercache.cli.store.selection import (
    KEY_DIGITS,
    Filter,
    MacKeyOption,
    Namespaces,
    OlderOption,
    PoolOption,
    StoresOption,
    check_hex,
    make_filter,
    one_key,
)
from tiercache.cli.store.target import Target, check_removable, opened, resolve_all
from tiercache.cli.terminal import (
    Exit,
    Output,
    OutputOption,
    clean,
    console,
    count_text,
    line,
    progress,
    records,
    safe,
    table,
)
from tiercache.errors import ConfigError, RefusedError, StorageError, UnavailableError
from tiercache.storage.base import ScanEntry, StorageBackend
from tiercache.text import readable_size

_DELETED_OBJECTS: Final = 256
"""Maximum number of objects of one `delete` call."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a flush."""

    to_delete: Sequence[ScanEntry]
    """Objects to delete, in order of removal."""
    kept: Sequence[ScanEntry]
    """Objects that match the options, but stay because objects that do not match depend on them."""
    names: Namespaces


def flush(
    store: StoresOption = None,
    namespace: Annotated[
        str,
        typer.Option(
            help="Objects of this namespace; give the first digits of its id, or an unambiguous part of"
            " its label."
        ),
    ] = "",
    tenant: Annotated[str, typer.Option(help="Objects of this tenant's namespaces.")] = "",
    pool: PoolOption = "",
    prefix: Annotated[
        str, typer.Option(metavar="KEY", help="Objects of this page and all pages below.")
    ] = "",
    older: OlderOption = "",
    everything: Annotated[bool, typer.Option("--all", help="All objects.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete the objects that match all of the given options.

    The deepest objects are deleted first, so that an interruption leaves no
    orphans. Objects that other objects need are kept, such as an old page
    before a new page; --prefix deletes a page with all that needs it.

        tiercache flush -s /var/lib/tiercache --tenant acme --dry-run

        tiercache flush -s grpc://node7:7070 --namespace qwen3 --older 7d --yes

    All copies of an object in the tiers of a chain are deleted. A stopped chain
    is named with all of its tiers; one that is out would keep its copies.

    Of a store that cannot list its objects, only --all is possible: it deletes
    what has the store's own prefix, and the names of its namespaces with it.

    JSON fields: dry_run, objects, bytes (null if not known), deleted, failed, kept (objects that
    others need), groups (namespace, label, pool, objects, bytes), tiers (of a
    chain: objects by the first tier that had each). jsonl has one
    line for each object (deleted, and the fields of ls), and a last line with
    summary.
    """
    if not (namespace or tenant or pool or prefix or older or everything):
        raise ConfigError(
            "flush without --namespace, --tenant, --pool, --prefix or --older would delete everything; give"
            " --all if you want that"
        )
    if everything and (namespace or tenant or pool or prefix or older):
        raise ConfigError("--all cannot be combined with other filters; omit --all or the others")
    if not (dry_run or yes or sys.stdin.isatty()):
        raise ConfigError(
            "flush asks before it deletes, and there is no terminal to ask on; give --yes, or --dry-run to"
            " see what would be deleted"
        )
    wanted = make_filter(time.time(), pool=pool, older=older)
    digits = check_hex(prefix, "--prefix", KEY_DIGITS) if prefix else ""
    target = resolve_all(store, mac_key)
    with opened(target) as found:
        if not dry_run:
            check_removable(target, found)
        clears = everything and not (dry_run or target.live or found.capabilities.listed)
        where = _place(target, found)
        plan = None if clears else _plan(found, wanted, namespace, tenant, digits)
    if plan is None:
        _clear_all(target, where, yes, output)
        return
    if dry_run or not plan.to_delete:
        _report(plan, plan.to_delete, [], output, dry_run=dry_run)
        return
    # The store is not open here, so that it is not locked while the operator thinks.
    if not yes:
        _ask(plan, target.name)
    deleted: list[ScanEntry] = []
    failed: list[ScanEntry] = []
    with (
        opened(target, change=True) as found,
        progress("deleting", sum(entry.meta.length for entry in plan.to_delete)) as advance,
    ):
        for removed in remove(found, plan.to_delete):
            left = {entry.key.digest for entry in removed.failed}
            deleted += (entry for entry in removed.entries if entry.key.digest not in left)
            failed += removed.failed
            if output is Output.JSONL:
                _lines(removed.entries, left)
            advance(sum(entry.meta.length for entry in removed.entries))
    _report(plan, deleted, failed, output, dry_run=False)
    _check_deleted(len(failed), target.name)


def _place(target: Target, store: StorageBackend) -> str:
    """Return the name of a store in messages, with the prefixes under which its objects are."""
    usage = store.usage()
    details = [usage.details, *(tier.details for tier in usage.tiers)]
    found = [one["prefix"] for one in details if "prefix" in one]
    return f"{target.name} (prefix {', '.join(map(str, found))})" if found else target.name


def _clear_all(target: Target, where: str, yes: bool, output: Output) -> None:
    """Delete everything from a store that cannot list, or from all tiers of a chain that has one."""
    if not yes:
        typer.echo(f"everything in {where} will be deleted; how much that is cannot be known", err=True)
        _go_on()
    with ExitStack() as stack:
        tiers = target.tiers or (target,)
        # Every tier is open, and has listed what it can, before the first of them is changed.
        ways = [_way_to_clear(one, stack.enter_context(opened(one, change=True))) for one in tiers]
        count = sum(clear() for clear in ways)
    if output is Output.TABLE:
        console().print(f"{count:,} objects and records of namespaces deleted from {where}", markup=False)
        return
    summary: dict[str, Any] = {
        "dry_run": False, "objects": count, "bytes": None, "deleted": count, "failed": 0, "kept": 0,
        "groups": [], "tiers": {},
    }  # fmt: skip
    records([{"summary": summary}], output, summary)


def _way_to_clear(target: Target, store: StorageBackend) -> Callable[[], int]:
    """Return the function that deletes everything from a store, and returns how many objects that were."""
    clear: Callable[[], int] | None = getattr(store, "clear", None)
    if clear is not None:
        return clear
    entries = _plan(store, make_filter(time.time()), "", "", "").to_delete

    def delete() -> int:
        batches = list(remove(store, entries))
        _check_deleted(sum(len(batch.failed) for batch in batches), target.name)
        return len(entries)

    return delete


class Removed(NamedTuple):
    """Batch of objects for which `delete` was called."""

    entries: Sequence[ScanEntry]
    """All objects of the batch."""
    failed: Sequence[ScanEntry]
    """Objects of the batch that are still stored."""


def remove(
    store: StorageBackend, ordered: Sequence[ScanEntry], at_once: int = _DELETED_OBJECTS
) -> Iterator[Removed]:
    """Delete objects in the given order, `at_once` objects per call, and yield each batch when it is done.

    The store is flushed at the end, so that the deletion is durable. What is deleted stays deleted if the
    store cannot say that, such as a chain in which copies of other objects wait.
    """
    for start in range(0, len(ordered), at_once):
        batch = ordered[start : start + at_once]
        answers = store.delete([entry.key for entry in batch])
        # If `delete` did not remove an object, the object may have been gone before, which is no failure.
        doubtful = [entry for entry, gone in zip(batch, answers, strict=True) if not gone]
        there = store.exists([entry.key for entry in doubtful]) if doubtful else []
        yield Removed(batch, [entry for entry, still in zip(doubtful, there, strict=True) if still])
    if ordered:
        try:
            store.flush()
        except (UnavailableError, RefusedError):
            raise
        except StorageError as error:
            typer.echo(f"deleted, but a power cut could undo it: {clean(str(error))}", err=True)


def _check_deleted(failed: int, name: str) -> None:
    if failed:
        raise StorageError(
            f"{count_text(failed, 'object')} could not be deleted from {name}; see the store's log, and try"
            " again"
        )


def _plan(store: StorageBackend, wanted: Filter, namespace: str, tenant: str, prefix: str) -> Plan:
    """Choose the objects to delete."""
    names = Namespaces.of(store)
    forest = Forest(store.scan_all())
    entries = [entry for key in forest.order for entry in forest.pages[key].entries]
    present = {entry.meta.namespace for entry in entries}
    if namespace:
        only = names.one(namespace, present)
        entries = [entry for entry in entries if entry.meta.namespace == only]
    if tenant:
        owned = _owned(names, tenant)
        entries = [entry for entry in entries if entry.meta.namespace in owned]
    if prefix:
        below = set(forest.below([one_key(prefix, forest.pages, "--prefix")]))
        entries = [entry for entry in entries if entry.key.page_key in below]
    chosen = [entry for entry in entries if wanted.admits(entry)]
    kept = forest.needed(chosen)
    held = {entry.key.digest for entry in kept}
    return Plan(forest.removal_order(entry for entry in chosen if entry.key.digest not in held), kept, names)


def _owned(names: Namespaces, tenant: str) -> set[bytes]:
    owned = {namespace for namespace, identity in names.records.items() if identity.get("tenant") == tenant}
    if not owned:
        known = sorted(
            {clean(str(identity.get("tenant") or "")) for identity in names.records.values()} - {""}
        )
        raise ConfigError(
            f"--tenant {clean(tenant)!r} has no namespace in this store; its tenants:"
            f" {', '.join(known) or 'none'}"
        )
    return owned


def _ask(plan: Plan, name: str) -> None:
    typer.echo(f"{_sum(plan.to_delete)} will be deleted from {name}:", err=True)
    for group in _groups(plan.to_delete, plan.names):
        typer.echo(
            f"  {group['label']} {clean(group['pool'])}: {group['objects']:,},"
            f" {readable_size(group['bytes'])}",
            err=True,
        )
    _go_on()


def _go_on() -> None:
    typer.echo("Go on? [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        typer.echo("nothing was deleted", err=True)
        raise typer.Exit(Exit.NO)


def _report(
    plan: Plan, gone: Sequence[ScanEntry], failed: Sequence[ScanEntry], output: Output, *, dry_run: bool
) -> None:
    summary = {
        "dry_run": dry_run,
        "objects": len(plan.to_delete),
        "bytes": sum(entry.meta.length for entry in plan.to_delete),
        "deleted": 0 if dry_run else len(gone),
        "failed": len(failed),
        "kept": len(plan.kept),
        "groups": _groups(gone, plan.names),
        "tiers": dict(Counter(entry.tier for entry in gone if entry.tier)),
    }
    if output is Output.TABLE:
        _print(plan, gone, summary)
        return
    if dry_run and output is Output.JSONL:
        _lines(plan.to_delete, {entry.key.digest for entry in plan.to_delete})
    records([{"summary": summary}], output, summary)


def _print(plan: Plan, gone: Sequence[ScanEntry], summary: dict[str, Any]) -> None:
    to = console()
    if gone:
        shown = table(("namespace", "pool", "objects", "bytes"), left=("namespace", "pool"))
        for group in summary["groups"]:
            name = f"{group['namespace'][:8]} {group['label']}"
            shown.add_row(
                safe(name), safe(group["pool"]), f"{group['objects']:,}", readable_size(group["bytes"])
            )
        to.print(shown)
    done = "would be deleted" if summary["dry_run"] and gone else "deleted"
    to.print(f"{_sum(gone)} {done}" if gone else "nothing to delete", markup=False)
    if summary["tiers"]:
        counts = ", ".join(f"{tier} {count:,}" for tier, count in summary["tiers"].items())
        to.print(f"by the first tier that has an object: {counts}", markup=False)
    if plan.kept:
        to.print(
            f"{_sum(plan.kept)} are kept, because other objects depend on them; --prefix KEY deletes a page"
            " with all that needs it",
            markup=False,
        )


def _lines(entries: Iterable[ScanEntry], left: set[bytes]) -> None:
    for entry in entries:
        line({"deleted": entry.key.digest not in left, **object_record(entry)})


def _groups(entries: Iterable[ScanEntry], names: Namespaces) -> list[dict[str, Any]]:
    totals: dict[tuple[bytes, str], list[int]] = {}
    for entry in entries:
        total = totals.setdefault((entry.meta.namespace, str(entry.key.pool)), [0, 0])
        total[0] += 1
        total[1] += entry.meta.length
    return [
        {
            "namespace": namespace.hex(),
            "label": names.label(namespace),
            "pool": pool,
            "objects": count,
            "bytes": nbytes,
        }
        for (namespace, pool), (count, nbytes) in sorted(totals.items())
    ]


def _sum(entries: Sequence[ScanEntry]) -> str:
    return (
        f"{count_text(len(entries), 'object')}, {readable_size(sum(entry.meta.length for entry in entries))}"
    )
