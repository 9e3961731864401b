"""The verb `tiercache doctor`: checks of this machine and of a store's disk, with advice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkstemp
from typing import Annotated, Final

import typer

from tiercache.cli.store.checks import Check, Level, kernel_version, machine_checks, make_check
from tiercache.cli.store.options import StoreOption
from tiercache.cli.store.target import DEFAULT_DIRECTORY
from tiercache.cli.terminal import Exit, Output, OutputOption, clean, console, records, safe, table
from tiercache.config.urls import section_of
from tiercache.core import BLOCK_ALIGN, DIGEST_BYTES, ObjectKey, PoolName
from tiercache.errors import ConfigError, StorageError
from tiercache.memory import kernel_text
from tiercache.storage.env import Env, cached_bytes, moves_direct
from tiercache.storage.registry import check_backend, open_backend
from tiercache.text import readable_size

_SHARED: Final = {"s3": "bucket", "mooncake": "pool"}
"""Types of stores that have no directory on this machine, and what each one is kept in."""
_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(
    store: StoreOption = "",
    directory: Annotated[
        Path | None,
        typer.Option("--directory", "-d", help="Check the disk of this directory instead of a store's."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check this machine: kernel, memory, the store's disk, GPU and engines. Exit code 6 if anything fails.

    No store on a disk is opened, and nothing is left behind: the disk is checked
    with an unnamed file. Of an s3 or mooncake store, library, settings and
    credentials are checked, and whether it answers.

        tiercache doctor

        tiercache doctor --directory /var/lib/tiercache -o json

    JSON fields of each check: name, level (ok, warn or fail), found, fix (empty
    if the level is ok).
    """
    if directory is None and store.partition("://")[0] in _SHARED:
        checks = [*machine_checks(), *shared_checks(store)]
    else:
        checks = [*machine_checks(), *directory_checks(_directory(store, directory))]
    if output is Output.TABLE:
        _print(checks)
    else:
        records((check.record() for check in checks), output)
    if any(check.level is Level.FAIL for check in checks):
        raise typer.Exit(Exit.NO)


def _directory(store: str, path: Path | None) -> Path:
    """Return the directory whose disk is checked; raises ConfigError if it does not exist on this machine."""
    if path is None and "://" in store:
        there = Path(section_of(store).get("path", ""))
        if there.is_absolute() and there.is_dir():
            store = str(there)
        elif store == os.environ.get("TIERCACHE_STORE"):
            store = ""  # the variable names a remote store, for the other verbs
        else:
            raise ConfigError(
                f"doctor checks disks of this machine, not {clean(store.partition('?')[0])}; give"
                " --directory a directory"
            )
    chosen = (
        path
        if path is not None
        else Path(store or (DEFAULT_DIRECTORY if os.path.isdir(DEFAULT_DIRECTORY) else "."))
    )
    if not chosen.is_dir():
        option = "--store" if path is None else "--directory"
        raise ConfigError(
            f"{option} {clean(str(chosen))} is not a directory; name the directory where the store is"
            " or will be"
        )
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


_MIN_SPACE: Final = 64 << 20
"""Free bytes below which the check fails."""
_RECOMMENDED_SPACE: Final = 1 << 30
"""Free bytes below which the check warns."""
_FULL: Final = 0.95
"""Used share of the disk, from 0 to 1, above which the check warns."""
_IN_MEMORY: Final = ("tmpfs", "ramfs")
"""Types of file systems in memory, about which the check warns."""
_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "lustre")
"""Types of network file systems, for which the check fails."""


def directory_checks(directory: Path) -> Iterator[Check]:
    """Run the checks of one directory, which must exist."""
    yield _file_system(directory)
    yield _space(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        yield Check(
            "O_DIRECT",
            Level.FAIL,
            f"{directory} cannot be written",
            "run this as the store's user, or make the directory writable for this user",
        )
        return
    try:
        with _unnamed_file(directory) as fd:
            yield _direct(directory, fd)
            yield _cachestat(fd)
    except OSError as error:
        yield Check(
            "O_DIRECT",
            Level.FAIL,
            f"no file can be made in {directory}: {error.strerror}",
            "free space, or choose another disk",
        )


def shared_checks(url: str) -> Iterator[Check]:
    """Run the checks of a store that hosts share: its library and settings, and whether it answers."""
    section = section_of(url)
    kind = section["type"]
    place = f"{kind} {_SHARED[kind]}"
    if kind == "s3":
        section.pop("capacity", None)  # without it, opening the store writes nothing
    try:
        check_backend(section)
    except ConfigError as error:
        yield Check(f"{kind} settings", Level.FAIL, *_halves(error))
        return
    yield Check(f"{kind} settings", Level.OK, clean(url.partition("?")[0]))
    try:
        with open_backend(section) as opened:
            opened.exists([ObjectKey(PoolName.KV, bytes(DIGEST_BYTES))])
            found = opened.usage()
            listed = opened.capabilities.listed
            told = opened.watch(lambda digests, stored: None)
    except StorageError as error:
        yield Check(place, Level.FAIL, *_halves(error))
        return
    holds = (
        f"{found.objects:,} objects, {readable_size(found.used_bytes)}"
        if listed
        else f"it answers, but {clean(str(found.details.get('unlisted', 'it cannot list its objects')))}"
    )
    yield Check(place, Level.OK, holds)
    yield Check(
        "KV events", Level.OK, "told" if told else f"none: a {kind} store loses objects without a word"
    )


def _halves(error: Exception) -> tuple[str, str]:
    """Return what a message says is wrong, and what it says to do."""
    wrong, _, advice = clean(str(error)).rpartition("; ")
    return (wrong, advice) if wrong else (advice, "see the message")


def file_system_of(directory: Path) -> str:
    """Return the kernel's name for the type of the file system of `directory`, or "unknown"."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for row in kernel_text(Path("/proc/self/mountinfo")).splitlines():
        fields = row.split()
        if fields[2:3] == [wanted] and "-" in fields:
            return fields[fields.index("-") + 1]
    return "unknown"


def _file_system(directory: Path) -> Check:
    kind = file_system_of(directory)
    if kind in _NETWORK:
        return Check(
            "file system",
            Level.FAIL,
            f"{kind} at {directory}",
            "use a local disk: LMDB's locks and memory maps do not work over a network",
        )
    fix = "use a disk: this is memory, which a reboot empties, and which the host tier could use"
    return make_check(
        "file system", f"{kind} at {directory}", Level.WARN if kind in _IN_MEMORY else Level.OK, fix
    )


def _space(directory: Path) -> Check:
    found = os.statvfs(directory)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    used = 1 - free / size if size else 0.0
    level = (
        Level.FAIL
        if free < _MIN_SPACE
        else Level.WARN
        if free < _RECOMMENDED_SPACE or used > _FULL
        else Level.OK
    )
    return make_check(
        "disk space",
        f"{readable_size(free)} free of {readable_size(size)}",
        level,
        "free some, or lower the store's capacity",
    )


@contextmanager
def _unnamed_file(directory: Path) -> Iterator[int]:
    """Open an unnamed file of one 4 KiB page, so that the directory does not change.

    Where O_TMPFILE is not supported, a named file is created and unlinked at once.
    """
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        fd, name = mkstemp(prefix=".doctor-", dir=directory)
        os.unlink(name)
    try:
        os.posix_fallocate(fd, 0, BLOCK_ALIGN)
        yield fd
    finally:
        os.close(fd)


def _direct(directory: Path, fd: int) -> Check:
    fix = (
        "put the store on ext4 or xfs, because on this file system it must use the page cache"
        f" ({file_system_of(directory)})"
    )
    try:
        # Not by `Env.open`, which refuses links: the unnamed file has no other path.
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            moved = moves_direct(Env(), direct)
        finally:
            os.close(direct)
    except OSError as error:
        return Check("O_DIRECT", Level.WARN, f"refused: {error.strerror}", fix)
    return make_check(
        "O_DIRECT", "works" if moved else "moves less than a block", Level.OK if moved else Level.WARN, fix
    )


def _cachestat(fd: int) -> Check:
    way = "cachestat" if kernel_version() >= (6, 5) else "mincore"
    try:
        cached_bytes(fd, 0, BLOCK_ALIGN)
    except OSError as error:
        fix = (
            "allow the system call cachestat or mincore in the sandbox; without them the store never bypasses"
            " the page cache"
        )
        return Check("page cache", Level.WARN, f"cannot be queried: {error.strerror}", fix)
    return Check("page cache", Level.OK, f"can be queried ({way})")
