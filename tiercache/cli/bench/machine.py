"""What the figures depend on: the file system, its page cache, the processor."""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_STRIDE: Final = 4 << 20
MEMORY: Final = ("tmpfs", "ramfs")
"""File systems whose files are memory."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine in general terms.

    Thread safety: immutable.
    """

    cores: int
    system: str
    file_system: str
    direct: bool

    @property
    def in_memory(self) -> bool:
        """Are files here memory?"""
        return self.file_system in MEMORY

    def __str__(self) -> str:
        direct = "possible" if self.direct else "not possible"
        return f"{self.cores} cores, {self.system}, {self.file_system}, O_DIRECT {direct}"


def machine(directory: Path, *, direct: bool) -> Machine:
    """This machine, as seen from a directory."""
    release = ".".join(platform.release().split("-")[0].split(".")[:2])
    return Machine(len(os.sched_getaffinity(0)), f"{platform.system()} {release}", _file_system(directory), direct)


def _file_system(directory: Path) -> str:
    """The type of the file system that holds a directory: that of the last mount whose mount point is the longest above it."""
    longest, kind = -1, "unknown file system"
    path = os.path.join(os.path.realpath(directory), "")
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return kind
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        point = os.path.join(before.split()[4].replace("\\040", " "), "")
        if path.startswith(point) and len(point) >= longest:
            longest, kind = len(point), behind.split()[0]
    return kind


def free_bytes(directory: Path) -> int:
    """What an ordinary user may still write here."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def data_files(directory: Path) -> Iterator[Path]:
    """Every file below a directory that holds data."""
    for path in sorted(directory.rglob("*")):
        # Closing any descriptor of a file drops the process's own record locks on it, and LMDB keeps some on its lock file.
        if path.is_file() and "lock" not in path.name.lower():
            yield path


def settle(directory: Path) -> None:
    """Return once everything below a directory is on the medium, so that no write-back disturbs what is timed next."""
    for path in data_files(directory):
        _with_file(path, drop=False)


def drop(directory: Path) -> None:
    """Settle, and take everything below a directory out of the page cache. What is mapped at the moment stays there."""
    for path in data_files(directory):
        _with_file(path, drop=True)


def warm(directory: Path) -> None:
    """Read everything below a directory through the page cache."""
    with mmap.mmap(-1, _STRIDE) as scratch, memoryview(scratch) as view:
        for path in data_files(directory):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while os.readv(fd, [view]):
                    pass
            finally:
                os.close(fd)


def _with_file(path: Path, *, drop: bool) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
        if drop:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
