"""The verb `tiercache doctor`: checks of this machine and of a store's disk, with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer

from tiercache.cli.checks import SHARED, Finding, Level, Needs, findings
from tiercache.cli.store.options import StoreOption
from tiercache.cli.store.target import DEFAULT_DIRECTORY, LIVE
from tiercache.cli.terminal import Exit, Output, OutputOption, clean, console, records, safe, table
from tiercache.config.urls import section_of
from tiercache.errors import ConfigError
from tiercache.storage.registry import backend_type

_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(store: StoreOption = "", output: OutputOption = Output.TABLE) -> None:
    """Check this machine: kernel, memory, the store's disk, GPU and engines. Exit code 6 if anything fails.

    No store on a disk is opened, and nothing is left behind: the disk is checked
    with an unnamed file, and the store need not be there yet. Of an s3 or
    mooncake store, library, settings and credentials are checked, and whether
    it answers. Whether a configuration can be served, says `config check`.

        tiercache doctor

        tiercache doctor -s /var/lib/tiercache -o json

    JSON fields of each check: name, level (ok, warn or fail), found, fix (empty
    if the level is ok).
    """
    found = list(findings({Needs.MACHINE: None, **_subject(store)}))
    if output is Output.TABLE:
        _print(found)
    else:
        records((one.record() for one in found), output)
    if any(one.level is Level.FAIL for one in found):
        raise typer.Exit(Exit.NO)


def _subject(store: str) -> dict[Needs, object]:
    """Return what is checked besides the machine; raises ConfigError if there is no such directory."""
    kind = store.partition("://")[0] if "://" in store else ""
    if kind in SHARED:
        return {Needs.SHARED_STORE: store}
    path = store
    if kind and kind != LIVE:
        backend_type(store)  # raises for a type that there is not
        path = section_of(store).get("path", "")
        if not path:
            shown = clean(store.partition("?")[0])
            raise ConfigError(f"--store {shown} has no directory; name the directory to be checked")
    if not store or kind == LIVE:  # the disk of a daemon may be that of another machine
        default = Path(DEFAULT_DIRECTORY)
        return {Needs.DIRECTORY: default if default.is_dir() else Path.cwd()}
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"--store {clean(str(directory))} is not a directory; name the directory where the store is or"
            " will be"
        )
    return {Needs.DIRECTORY: directory.resolve()}


def _print(found: list[Finding]) -> None:
    shown = table(("check", "", "found", "what to do"), left=("check", "", "found", "what to do"))
    for one in found:
        colour = _COLOURS[one.level]
        shown.add_row(one.name, f"[{colour}]{one.level}[/]", safe(one.found), safe(one.fix))
    to = console()
    to.print(shown)
    to.print(
        ", ".join(f"{sum(one.level is level for one in found)} {level}" for level in Level), markup=False
    )
