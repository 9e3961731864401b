"""The verb `tiercache doctor`: checks of this machine and of a store's disk, with advice.

Nothing is left behind: a disk is checked with an unnamed file. `readiness` has the checks of a configuration.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Final

import typer

from tiercache.cli.store.machine import MACHINE, Checks, Finding, Level, kernel_version, ok_or
from tiercache.cli.store.selection import StoreOption
from tiercache.cli.store.target import DEFAULT_DIRECTORY, LIVE
from tiercache.cli.terminal import Exit, Output, OutputOption, clean, console, records, safe, table
from tiercache.config.urls import section_of
from tiercache.core import BLOCK_ALIGN, DIGEST_BYTES, ObjectKey, PoolName
from tiercache.errors import ConfigError, StorageError
from tiercache.memory import kernel_text
from tiercache.storage.env import Env, cached_bytes, moves_direct
from tiercache.storage.registry import backend_type, check_backend, open_backend
from tiercache.text import readable_size

_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
SHARED: Final = {"s3": "bucket", "mooncake": "pool"}
"""Types of stores that have no directory on this machine, and what each one is kept in."""
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
DISK: Final = Checks()
"""Checks of the disk of a directory that exists."""


@DISK.add("file system")
def _file_system(directory: Path) -> Finding:
    kind = file_system_of(directory)
    found = f"{kind} at {directory}"
    if kind in _NETWORK:
        fix = "use a local disk: LMDB's locks and memory maps do not work over a network"
        return Finding(Level.FAIL, found, fix)
    fix = "use a disk: this is memory, which a reboot empties, and which the host tier could use"
    return ok_or(Level.WARN, kind not in _IN_MEMORY, found, fix)


def file_system_of(directory: Path) -> str:
    """Return the kernel's name for the type of the file system of `directory`, or "unknown"."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for row in kernel_text(Path("/proc/self/mountinfo")).splitlines():
        fields = row.split()
        if fields[2:3] == [wanted] and "-" in fields:
            return fields[fields.index("-") + 1]
    return "unknown"


@DISK.add("disk space", "free some, or lower the store's capacity")
def _space(directory: Path) -> Finding:
    found = os.statvfs(directory)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    used = 1 - free / size if size else 0.0
    level = Level.FAIL if free < _MIN_SPACE else Level.WARN
    text = f"{readable_size(free)} free of {readable_size(size)}"
    return ok_or(level, free >= _RECOMMENDED_SPACE and used <= _FULL, text)


@DISK.add("O_DIRECT")
def _past_page_cache(directory: Path) -> Finding:
    if not os.access(directory, os.W_OK | os.X_OK):
        fix = "run this as the store's user, or make the directory writable for this user"
        return Finding(Level.FAIL, f"{directory} cannot be written", fix)
    try:
        with _unnamed_file(directory) as fd:
            return _direct(directory, fd)
    except OSError as error:
        fix = "free space, or choose another disk"
        return Finding(Level.FAIL, f"no file can be made in {directory}: {error.strerror}", fix)


def _direct(directory: Path, fd: int) -> Finding:
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
        return Finding(Level.WARN, f"refused: {error.strerror}", fix)
    return ok_or(Level.WARN, moved, "works" if moved else "moves less than a block", fix)


@DISK.add(
    "page cache",
    "allow the system call cachestat or mincore in the sandbox; without them the store never bypasses the"
    " page cache",
)
def _page_cache(directory: Path) -> Iterator[Finding]:
    with suppress(OSError), _unnamed_file(directory) as fd:
        try:
            cached_bytes(fd, 0, BLOCK_ALIGN)
        except OSError as error:
            yield Finding(Level.WARN, f"cannot be queried: {error.strerror}")
        else:
            way = "cachestat" if kernel_version() >= (6, 5) else "mincore"
            yield Finding(Level.OK, f"can be queried ({way})")


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


def _shared_store(url: str) -> Iterator[Finding]:
    """Check library, settings and credentials of a store that hosts share, and whether it answers."""
    section = section_of(url)
    kind = section["type"]
    settings, place = f"{kind} settings", f"{kind} {SHARED[kind]}"
    if kind == "s3":
        section.pop("capacity", None)  # without it, opening the store writes nothing
    try:
        check_backend(section)
    except ConfigError as error:
        yield Finding(Level.FAIL, *_halves(error), settings)
        return
    yield Finding(Level.OK, clean(url.partition("?")[0]), name=settings)
    try:
        with open_backend(section) as opened:
            opened.exists([ObjectKey(PoolName.KV, bytes(DIGEST_BYTES))])
            found = opened.usage()
            listed = opened.capabilities.listed
            told = opened.watch(lambda digests, stored: None)
    except StorageError as error:
        yield Finding(Level.FAIL, *_halves(error), place)
        return
    holds = (
        f"{found.objects:,} objects, {readable_size(found.used_bytes)}"
        if listed
        else f"it answers, but {clean(str(found.details.get('unlisted', 'it cannot list its objects')))}"
    )
    yield Finding(Level.OK, holds, name=place)
    silent = f"none: a {kind} store loses objects without a word"
    yield Finding(Level.OK, "told" if told else silent, name="KV events")


def _halves(error: Exception) -> tuple[str, str]:
    """Return what a message says is wrong, and what it says to do."""
    wrong, _, advice = clean(str(error)).rpartition("; ")
    return (wrong, advice) if wrong else (advice, "see the message")


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
    about = _subject(store)
    found = [
        *MACHINE.findings(),
        *(DISK.findings(about) if isinstance(about, Path) else _shared_store(about)),
    ]
    if output is Output.TABLE:
        _print(found)
    else:
        records((one.record() for one in found), output)
    if any(one.level is Level.FAIL for one in found):
        raise typer.Exit(Exit.NO)


def _subject(store: str) -> Path | str:
    """Return what is checked besides the machine: a directory, or the URL of a store that hosts share.

    Raises ConfigError if there is no such directory.
    """
    kind = store.partition("://")[0] if "://" in store else ""
    if kind in SHARED:
        return store
    path = store
    if kind and kind != LIVE:
        backend_type(store)  # raises for a type that there is not
        path = section_of(store).get("path", "")
        if not path:
            shown = clean(store.partition("?")[0])
            raise ConfigError(f"--store {shown} has no directory; name the directory to be checked")
    if not store or kind == LIVE:  # the disk of a daemon may be that of another machine
        default = Path(DEFAULT_DIRECTORY)
        return default if default.is_dir() else Path.cwd()
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"--store {clean(str(directory))} is not a directory; name the directory where the store is or"
            " will be"
        )
    return directory.resolve()


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
