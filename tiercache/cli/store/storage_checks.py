"""The checks of a store's directory that `doctor` makes: space, O_DIRECT, page cache queries. They leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from tempfile import mkstemp
from typing import Final

from tiercache.cli.output import size_text
from tiercache.cli.store.checks import Check, Level, judged, kernel_version
from tiercache.config.machine import read
from tiercache.core import BLOCK_ALIGN
from tiercache.storage.pagecache import cached_bytes

_SPACE_FEW: Final = 64 << 20
"""Free bytes below which the check fails."""
_SPACE_ENOUGH: Final = 1 << 30
"""Free bytes below which the check warns."""
_FULL: Final = 0.95
"""Share of used disk space above which the check warns."""
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "lustre")


def directory_checks(directory: Path) -> Iterator[Check]:
    """Run the checks of one directory, which must exist."""
    yield _file_system(directory)
    yield _space(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        yield Check("O_DIRECT", Level.FAIL, f"{directory} cannot be written", "run this as the store's user, or give it the directory")
        return
    try:
        with _nameless(directory) as fd:
            yield _direct(directory, fd)
            yield _cachestat(fd)
    except OSError as error:
        yield Check("O_DIRECT", Level.FAIL, f"no file can be made in {directory}: {error.strerror}", "free space, or choose another disk")


def file_system_of(directory: Path) -> str:
    """Return the kernel's name for the type of the file system that holds `directory`; "unknown" if it is not found."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for row in read("/proc/self/mountinfo").splitlines():
        fields = row.split()
        if fields[2:3] == [wanted] and "-" in fields:
            return fields[fields.index("-") + 1]
    return "unknown"


def _file_system(directory: Path) -> Check:
    kind = file_system_of(directory)
    if kind in _NETWORK:
        return Check(
            "file system", Level.FAIL, f"{kind} at {directory}", "use a local disk: locks and maps of LMDB do not hold over a network"
        )
    fix = "it is memory: nothing survives a reboot, and it takes what the host tier could have"
    return judged("file system", f"{kind} at {directory}", Level.WARN if kind in _IN_MEMORY else Level.OK, fix)


def _space(directory: Path) -> Check:
    found = os.statvfs(directory)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    used = 1 - free / size if size else 0.0
    level = Level.FAIL if free < _SPACE_FEW else Level.WARN if free < _SPACE_ENOUGH or used > _FULL else Level.OK
    return judged("disk space", f"{size_text(free)} free of {size_text(size)}", level, "free some, or lower the store's capacity")


@contextmanager
def _nameless(directory: Path) -> Iterator[int]:
    """Open a file of one block without a name; where O_TMPFILE is not supported, create a named one and unlink it at once."""
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
    fix = f"the store goes through the page cache there; put it on ext4 or xfs (this is {file_system_of(directory)})"
    block = memoryview(mmap(-1, BLOCK_ALIGN))
    try:
        straight = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            moved = os.pwritev(straight, [block], 0) == os.preadv(straight, [block], 0) == BLOCK_ALIGN
        finally:
            os.close(straight)
    except OSError as error:
        return Check("O_DIRECT", Level.WARN, f"refused: {error.strerror}", fix)
    return judged("O_DIRECT", "works" if moved else "moves less than a block", Level.OK if moved else Level.WARN, fix)


def _cachestat(fd: int) -> Check:
    way = "cachestat" if kernel_version() >= (6, 5) else "mincore"
    try:
        cached_bytes(fd, 0, BLOCK_ALIGN)
    except OSError as error:
        fix = "allow the calls cachestat or mincore in the sandbox; without them the store never goes past the page cache"
        return Check("page cache", Level.WARN, f"cannot be asked: {error.strerror}", fix)
    return Check("page cache", Level.OK, f"can be asked ({way})")
