"""`tiercache flush`: deletes the objects that its options name, except those that other objects still need."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tiercache.cli.exits import Exit
from tiercache.cli.output import Output, OutputOption, clean, console, count_text, document, line, progress, safe, size_text, table
from tiercache.cli.store import rows
from tiercache.cli.store.filters import Filter, make_filter
from tiercache.cli.store.forest import Forest
from tiercache.cli.store.names import Namespaces, check_hex, one_key
from tiercache.cli.store.options import MacKeyOption, OlderOption, PoolOption, StoreOption
from tiercache.cli.store.removal import check_removable, remove
from tiercache.cli.store.target import opened, resolve
from tiercache.errors import ConfigError, StorageError
from tiercache.storage.base import ScanEntry, StorageBackend

_KEY_DIGITS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """The objects to delete, in order of removal; `kept`: chosen objects that stay, because a remaining object depends on them."""

    going: Sequence[ScanEntry]
    kept: Sequence[ScanEntry]
    names: Namespaces


def flush(
    store: StoreOption = "",
    namespace: Annotated[
        str, typer.Option(help="Of this namespace: the first digits of its id or a part of its label, if no other has it.")
    ] = "",
    tenant: Annotated[str, typer.Option(help="Of this tenant's namespaces.")] = "",
    pool: PoolOption = "",
    prefix: Annotated[str, typer.Option(metavar="KEY", help="Of this page and of everything below it.")] = "",
    older: OlderOption = "",
    everything: Annotated[bool, typer.Option("--all", help="All objects.")] = False,
    cascade: Annotated[bool, typer.Option("--cascade", help="What depends on them goes too; without it, what is needed stays.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete objects: those that meet all of the options given.

    It deletes the deepest first, so that one that is interrupted leaves no
    orphans. Objects that others need, such as an old page in front of a new
    one, stay unless --cascade takes the others along.

        tiercache flush -s /var/lib/tiercache --tenant acme --dry-run

        tiercache flush -s grpc://node7:7070 --namespace qwen3 --older 7d --yes

    JSON fields: dry_run, objects, bytes, deleted, failed, kept (they are
    needed), groups (namespace, label, pool, objects, bytes). With jsonl one
    line per object: deleted, and the fields of ls; and a last line with
    summary.
    """
    if not (namespace or tenant or pool or prefix or older or everything):
        raise ConfigError(
            "flush without --namespace, --tenant, --pool, --prefix or --older would delete everything; say --all if you mean that"
        )
    if everything and (namespace or tenant or pool or prefix or older):
        raise ConfigError("--all goes with no other filter; leave one of them away")
    if not (dry_run or yes or sys.stdin.isatty()):
        raise ConfigError("flush asks before it deletes, and there is no terminal to ask on; give --yes, or --dry-run to see what would go")
    wanted = make_filter(time.time(), pool=pool, older=older)
    digits = check_hex(prefix, "--prefix", _KEY_DIGITS) if prefix else ""
    target = resolve(store, mac_key)
    with opened(target) as found:
        if not dry_run:
            check_removable(target, found)
        plan = _plan(found, wanted, namespace, tenant, digits, cascade)
    if dry_run or not plan.going:
        _report(plan, plan.going, [], output, dry_run=dry_run)
        return
    if not yes:
        _ask(plan, target.name)
    deleted: list[ScanEntry] = []
    failed: list[ScanEntry] = []
    with opened(target, change=True) as found, progress("deleting", sum(entry.meta.length for entry in plan.going)) as advance:
        for removed in remove(target, found, plan.going):
            left = {entry.key.digest for entry in removed.failed}
            deleted += (entry for entry in removed.entries if entry.key.digest not in left)
            failed += removed.failed
            if output is Output.JSONL:
                _lines(removed.entries, left)
            advance(sum(entry.meta.length for entry in removed.entries))
    _report(plan, deleted, failed, output, dry_run=False)
    if failed:
        raise StorageError(
            f"{count_text(len(failed), 'object')} could not be deleted from {target.name}; see the store's log, and try again"
        )


def _plan(store: StorageBackend, wanted: Filter, namespace: str, tenant: str, prefix: str, cascade: bool) -> Plan:
    """Choose the objects, put them into the order of removal, and set aside those that remaining objects depend on."""
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
    if cascade:
        return Plan(forest.removal_order([*chosen, *forest.dependents(chosen)]), [], names)
    kept = forest.needed(chosen)
    held = {entry.key.digest for entry in kept}
    return Plan(forest.removal_order(entry for entry in chosen if entry.key.digest not in held), kept, names)


def _owned(names: Namespaces, tenant: str) -> set[bytes]:
    owned = {namespace for namespace, identity in names.records.items() if identity.get("tenant") == tenant}
    if not owned:
        known = sorted({clean(str(identity.get("tenant") or "")) for identity in names.records.values()} - {""})
        raise ConfigError(f"--tenant {clean(tenant)!r} has no namespace here; tenants are {', '.join(known) or 'not used in this store'}")
    return owned


def _ask(plan: Plan, name: str) -> None:
    typer.echo(f"{_sum(plan.going)} will be deleted from {name}:", err=True)
    for group in _groups(plan.going, plan.names):
        typer.echo(f"  {group['label']} {clean(group['pool'])}: {group['objects']:,}, {size_text(group['bytes'])}", err=True)
    typer.echo("Go on? [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        typer.echo("nothing was deleted", err=True)
        raise typer.Exit(Exit.NO)


def _report(plan: Plan, gone: Sequence[ScanEntry], failed: Sequence[ScanEntry], output: Output, *, dry_run: bool) -> None:
    summary = {
        "dry_run": dry_run,
        "objects": len(plan.going),
        "bytes": sum(entry.meta.length for entry in plan.going),
        "deleted": 0 if dry_run else len(gone),
        "failed": len(failed),
        "kept": len(plan.kept),
        "groups": _groups(gone, plan.names),
    }
    if output is Output.JSON:
        document(summary)
    elif output is Output.JSONL:
        if dry_run:
            _lines(plan.going, {entry.key.digest for entry in plan.going})
        line({"summary": summary})
    else:
        _print(plan, gone, summary)


def _print(plan: Plan, gone: Sequence[ScanEntry], summary: dict[str, Any]) -> None:
    to = console()
    if gone:
        shown = table(("namespace", "pool", "objects", "bytes"), left=("namespace", "pool"))
        for group in summary["groups"]:
            name = f"{group['namespace'][:8]} {group['label']}"
            shown.add_row(safe(name), safe(group["pool"]), f"{group['objects']:,}", size_text(group["bytes"]))
        to.print(shown)
    done = "would be deleted" if summary["dry_run"] and gone else "deleted"
    to.print(f"{_sum(gone)} {done}" if gone else "nothing to delete", markup=False)
    if plan.kept:
        to.print(f"{_sum(plan.kept)} stay: what is not meant depends on them; --cascade takes that along", markup=False)


def _lines(entries: Iterable[ScanEntry], left: set[bytes]) -> None:
    for entry in entries:
        line({"deleted": entry.key.digest not in left, **rows.record(entry)})


def _groups(entries: Iterable[ScanEntry], names: Namespaces) -> list[dict[str, Any]]:
    totals: dict[tuple[bytes, str], list[int]] = {}
    for entry in entries:
        total = totals.setdefault((entry.meta.namespace, str(entry.key.pool)), [0, 0])
        total[0] += 1
        total[1] += entry.meta.length
    return [
        {"namespace": namespace.hex(), "label": names.label(namespace), "pool": pool, "objects": count, "bytes": nbytes}
        for (namespace, pool), (count, nbytes) in sorted(totals.items())
    ]


def _sum(entries: Sequence[ScanEntry]) -> str:
    return f"{count_text(len(entries), 'object')}, {size_text(sum(entry.meta.length for entry in entries))}"
