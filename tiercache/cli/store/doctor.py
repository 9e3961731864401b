"""`tiercache doctor`: checks of this machine, each with one line on what to do about a finding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from tiercache.cli.exits import Exit
from tiercache.cli.output import Output, OutputOption, clean, console, records, safe, table
from tiercache.cli.store.checks import Check, Level, machine_checks
from tiercache.cli.store.options import StoreOption
from tiercache.cli.store.storage_checks import directory_checks
from tiercache.cli.store.target import DEFAULT_DIRECTORY
from tiercache.config.urls import section_of
from tiercache.errors import ConfigError

_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(
    store: StoreOption = "",
    directory: Annotated[
        Path | None, typer.Option("--directory", "-d", help="Look at the disk of this directory instead of a store's.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check this machine: kernel, memory, the store's disk, GPU and engines. Exit code 6 if anything fails.

    It opens no store and leaves nothing behind; the disk is tried with a file
    that has no name.

        tiercache doctor

        tiercache doctor --directory /var/lib/tiercache -o json

    JSON fields of each check: name, level (ok, warn or fail), found, fix (empty
    where it is ok).
    """
    checks = [*machine_checks(), *directory_checks(_directory(store, directory))]
    if output is Output.TABLE:
        _print(checks)
    else:
        records((check.record() for check in checks), output)
    if any(check.level is Level.FAIL for check in checks):
        raise typer.Exit(Exit.NO)


def _directory(store: str, path: Path | None) -> Path:
    """Return the directory whose disk is checked; raises ConfigError if there is none on this machine."""
    if path is None and "://" in store:
        there = Path(section_of(store).get("path", ""))
        if there.is_absolute() and there.is_dir():
            store = str(there)
        elif store == os.environ.get("TIERCACHE_STORE"):
            store = ""  # the variable is meant for the other verbs
        else:
            raise ConfigError(
                f"doctor looks at this machine's disks, not at {clean(store.partition('?')[0])}; give --directory a directory"
            )
    chosen = path if path is not None else Path(store or (DEFAULT_DIRECTORY if os.path.isdir(DEFAULT_DIRECTORY) else "."))
    if not chosen.is_dir():
        option = "--store" if path is None else "--directory"
        raise ConfigError(f"{option} {clean(str(chosen))} is not a directory; name the one that the store is in, or will be in")
    return chosen.resolve()


def _print(checks: list[Check]) -> None:
    shown = table(("check", "", "found", "what to do"), left=("check", "", "found", "what to do"))
    for check in checks:
        colour = _COLOURS[check.level]
        shown.add_row(check.name, f"[{colour}]{check.level}[/]", safe(check.found), safe(check.fix))
    to = console()
    to.print(shown)
    counts = [f"{sum(check.level is level for check in checks)} {level}" for level in Level]
    to.print(", ".join(counts), markup=False)
