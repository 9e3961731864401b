"""Conditions of a measurement: the file system, its page cache, and the processor."""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiercache.cli.store.doctor import file_system_of

_STRIDE: Final = 4 << 20
"""Bytes of one read in `warm`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Description of the machine."""

    cores: int
    system: str
    """Operating system and its release, such as "Linux 6.8"."""
    file_system: str
    direct: bool

    @property
    def in_memory(self) -> bool:
        """Whether the file system keeps its files in memory."""
        return self.file_system in ("tmpfs", "ramfs")

    def __str__(self) -> str:
        direct = "possible" if self.direct else "not possible"
        return f"{self.cores} cores, {self.system}, {self.file_system}, O_DIRECT {direct}"


def machine(directory: Path, *, direct: bool) -> Machine:
    """Return the description of this machine and of the file system of a directory."""
    release = ".".join(platform.release().split("-")[0].split(".")[:2])
    return Machine(
        len(os.sched_getaffinity(0)), f"{platform.system()} {release}", file_system_of(directory), direct
    )


def free_bytes(directory: Path) -> int:
    """Return the bytes that unprivileged users can still write to a directory's file system."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def data_files(directory: Path) -> Iterator[Path]:
    """Yield every file below a directory, except lock files."""
    for path in sorted(directory.rglob("*")):
        # When a process closes any descriptor of a file, it loses all of its record locks on this file. LMDB
        # holds such locks on its lock file.
        if path.is_file() and "lock" not in path.name.lower():
            yield path


def drop(directory: Path) -> None:
    """Write all files below a directory to the disk and drop them from the page cache.

    Pages that a process has mapped stay in the page cache.
    """
    for path in data_files(directory):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm(directory: Path) -> None:
    """Read all files below a directory through the page cache."""
    with mmap.mmap(-1, _STRIDE) as scratch, memoryview(scratch) as view:
        for path in data_files(directory):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while os.readv(fd, [view]):
                    pass
            finally:
                os.close(fd)
