"""The verbs `tiercache tier ...`: show the tiers of a daemon's store, and change them while it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer

from tiercache.cli.store.selection import StoreOption
from tiercache.cli.store.status import tier_table
from tiercache.cli.store.target import Target, opened, resolve_daemon
from tiercache.cli.terminal import Output, OutputOption, clean, console, document, progress, records
from tiercache.errors import ConfigError, RefusedError
from tiercache.storage.base import StorageBackend
from tiercache.storage.tiers import NO_CHAIN, Progress, Report, TierControl, tier_control

tier = typer.Typer(no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the tier, as `tiercache tier list` shows it.")
]
UrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="URL of the tier, with the settings of a tier, such as"
        " 'file:///data/kv?capacity=2TiB&tier_name=ssd'. The path is one of the daemon's machine.",
    ),
]
DropOption = Annotated[
    bool,
    typer.Option(
        "--drop", help="Copy nothing: what only this tier has is lost to the cache (its files stay)."
    ),
]


@tier.callback(
    help="""Show the tiers of a daemon's store, and change them while it serves.

    Each command names the daemon by its directory or address, as the other verbs do (--store), and needs the
    verb admin there, without a tenant or namespaces. The daemon checks a change before its first effect, and
    makes one change at a time. If a change fails, or is interrupted with Ctrl-C, the tiers are as before. If
    this command is killed, the change goes on in the daemon; `tiercache tier cancel` gives it up.

    The daemon does not write its configuration: a change lasts until the daemon ends. Each command prints the
    setting `storage` that makes it last.

    A daemon that serves a single store without tiers is started with --chain to take part.
    """
)
def _group() -> None:
    pass


@tier.command("list")
def list_tiers(store: StoreOption = "", output: OutputOption = Output.TABLE) -> None:
    """Show the tiers of a daemon's store, the fastest first, and the URL of each.

    The URLs have the settings that are in force, and make the setting `storage`:

        tiercache tier list -s grpc:///var/lib/tiercache/run

    JSON fields: tiers (the fields of `tiercache status`, and url), storage (the
    URLs, to be written into the daemon's configuration); both are empty for one
    store without tiers. jsonl has one line for each tier.
    """
    with _daemon(store) as (_, found):
        _report(found, output)


@tier.command()
def add(
    url: UrlArgument,
    at: Annotated[
        int | None,
        typer.Option("--at", min=0, metavar="N", help="Position: 0 is the first. Default: the last."),
    ] = None,
    store: StoreOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Add a tier. What it has already becomes part of the store.

    The new tier is opened and examined first; if it cannot be, nothing changes:

        tiercache tier add 'file:///ssd/kv?capacity=100GiB&tier_name=ssd' --at 0

    A tier that was removed from the store and is added again has missed the
    deletions of the meantime: it serves those objects again.

    JSON fields: as of `tiercache tier list`.
    """
    with _daemon(store) as (control, found):
        control.add_tier(url, at)
        _report(found, output, changed=True)


@tier.command()
def remove(
    name: NameArgument, drop: DropOption = False, store: StoreOption = "", output: OutputOption = Output.TABLE
) -> None:
    """Remove a tier, after what only it has was copied to the others.

    The tier answers until all is copied, but takes no new objects. If the
    others have no room for its objects, it stays. Its files are kept:

        tiercache tier remove ssd

    JSON fields: as of `tiercache tier list`.
    """
    with _daemon(store) as (control, found), _progress() as report:
        control.remove_tier(name, keep_contents=not drop, progress=report)
        _report(found, output, changed=True)


@tier.command()
def replace(
    name: NameArgument,
    url: UrlArgument,
    drop: DropOption = False,
    store: StoreOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Replace a tier by another one, in the same place of the order.

    The new tier is filled from the old one, which is then removed:

        tiercache tier replace ssd 'file:///nvme/kv?capacity=1TiB&tier_name=nvme'

    With the same directory or address, the tier is closed and opened again
    with the new settings; what only it has is a miss meanwhile.

    JSON fields: as of `tiercache tier list`.
    """
    with _daemon(store) as (control, found), _progress() as report:
        control.replace_tier(name, url, keep_contents=not drop, progress=report)
        _report(found, output, changed=True)


@tier.command()
def order(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="All tiers by name, the fastest first.")
    ],
    store: StoreOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Bring the tiers into another order, the fastest first.

    Name every tier once:

        tiercache tier order nvme hdd

    JSON fields: as of `tiercache tier list`.
    """
    with _daemon(store) as (control, found):
        control.reorder(names)
        _report(found, output, changed=True)


@tier.command("set")
def set_values(
    name: NameArgument,
    settings: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help="Settings: write, write_after, promote, read_only, write_per_day, deadline and threads of"
            " the tier, and those of its store, such as capacity.",
        ),
    ],
    store: StoreOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Change settings of a tier, or of its store.

    Policies and the write budget change at once ("unlimited" ends a limit):

        tiercache tier set ssd promote=always write_per_day=500GiB

    For all other settings the tier is closed and opened again, and what only
    it has is a miss meanwhile. A smaller capacity evicts:

        tiercache tier set ssd capacity=2TiB

    JSON fields: as of `tiercache tier list`.
    """
    changes = _settings(settings)
    with _daemon(store) as (control, found):
        control.change_tier(name, **changes)
        _report(found, output, changed=True)


@tier.command()
def cancel(store: StoreOption = "", output: OutputOption = Output.TABLE) -> None:
    """Give up the change that is under way, whoever began it; the tiers are then as before.

    A removal or replacement ends after the objects that it is just copying:

        tiercache tier cancel

    JSON fields: as of `tiercache tier list`.
    """
    with _daemon(store) as (control, found):
        give_up = cast("Callable[[], str] | None", getattr(control, "give_up_change", None))
        if give_up is None:
            raise ConfigError("this store makes no changes that could be given up; name a daemon")
        what = give_up()
        if output is Output.TABLE:
            typer.echo(f"given up: {clean(what)}")
        _report(found, output)


@contextmanager
def _daemon(name: str) -> Iterator[tuple[TierControl, StorageBackend]]:
    """Yield the tiers and the store of a daemon; raises ConfigError for a store that no daemon serves."""
    target = resolve_daemon(name, "the tiers of a stopped store are those of the setting storage")
    with opened(target, tells=False) as store:
        try:
            yield tier_control(store), store
        except RefusedError as error:
            raise _translated(error, target) from error


def _translated(error: RefusedError, target: Target) -> RefusedError:
    """Return an error whose sentence names the option of the command line."""
    text = str(error).replace(
        "give the objects up with keep_contents=False", "give the objects up with --drop"
    )
    return RefusedError(
        text.replace("or give it up", f"or give it up: tiercache tier cancel -s {target.name}")
    )


def _settings(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        key, sign, value = word.partition("=")
        key = key.removeprefix("tier_")
        if not sign or not key:
            raise ConfigError(f"{clean(word)!r} is no setting; write KEY=VALUE, such as capacity=2TiB")
        if key in found:
            raise ConfigError(f"{clean(key)!r} is given twice; keep one")
        found[key] = value
    return found


@contextmanager
def _progress() -> Iterator[Report]:
    """Yield a function that shows the progress of a change as a bar on stderr, once objects are copied."""
    with ExitStack() as bar:
        advance: Callable[[int], None] | None = None
        shown = 0

        def report(done: Progress) -> None:
            nonlocal advance, shown
            if advance is None:
                advance = bar.enter_context(progress("copying", done.nbytes))
            advance(done.copied_bytes - shown)
            shown = done.copied_bytes

        yield report


def _report(store: StorageBackend, output: Output, *, changed: bool = False) -> None:
    tiers = store.usage().tiers
    if not tiers and output is Output.TABLE:
        console().print(NO_CHAIN, markup=False, soft_wrap=True)
        return
    rows = [asdict(tier) for tier in tiers]
    urls = [tier.url for tier in tiers]
    if output is Output.JSONL:
        records(rows, output)
    elif output is Output.JSON:
        document({"tiers": rows, "storage": urls})
    else:
        _print(rows, urls, changed=changed)


def _print(rows: Sequence[dict[str, Any]], urls: Sequence[str], *, changed: bool) -> None:
    to = console()
    to.print(tier_table(rows, time.time()), soft_wrap=True)
    if not all(urls):
        to.print("only an operator of the daemon is told the URLs of the tiers", markup=False)
        return
    if changed:
        to.print("This lasts until the daemon ends. To make it last, set in its configuration:", markup=False)
    listed = ",\n".join(f"  {json.dumps(url)}" for url in urls)
    to.print(f"storage = [\n{listed},\n]", markup=False, soft_wrap=True)
