"""Resources of this machine: its memory, and the disk of a directory that may not exist yet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NO_LIMIT: Final = 1 << 60
"""Bytes from which a memory limit of cgroups version 1 means that there is no limit."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine in bytes: in total, and available (free, or possible to free).

    `limit` is the tightest limit of a container, or None; `limited_by` says where it is set.
    """

    total: int
    available: int
    limit: int | None
    limited_by: str

    @property
    def most(self) -> int:
        """Most bytes that a process here can ever have; 0 if unknown."""
        return self.total if self.limit is None else min(self.total or self.limit, self.limit)


def memory() -> Memory:
    """Return the memory of this machine as the kernel reports it; 0 for a figure that it does not report."""
    figures = dict(row.split(":", 1) for row in read("/proc/meminfo").splitlines() if ":" in row)
    limit, where = _cgroup_limit()
    return Memory(_kib(figures.get("MemTotal", "")), _kib(figures.get("MemAvailable", "")), limit, where)


def read(path: str) -> str:
    """Return the stripped text of a small kernel file; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a directory that may not exist; `there` is the directory itself, or the nearest one above it that exists."""

    path: Path
    there: Path

    @property
    def is_directory(self) -> bool:
        """Whether `there` is a directory; false if a file is in the way."""
        return self.there.is_dir()

    @property
    def can_be_written(self) -> bool:
        """Whether this user may create files there, and the directories that are missing."""
        return os.access(self.there, os.W_OK | os.X_OK, effective_ids=True)

    def disk_bytes(self) -> tuple[int, int]:
        """Return the size of the file system and its free bytes for this user; zeros if it does not report them."""
        found = os.statvfs(self.there)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def place_of(path: Path) -> Place:
    """Return the place of a directory, made absolute; symbolic links are followed when the place is examined."""
    path = Path(os.path.abspath(path))
    return Place(path, next(above for above in (path, *path.parents) if os.path.lexists(above)))


def _cgroup_limit() -> tuple[int | None, str]:
    """Return the tightest memory limit in bytes of this process's cgroup and those above it, and where it is set."""
    own = next((row[3:] for row in read("/proc/self/cgroup").splitlines() if row.startswith("0::")), "/")
    group = Path("/sys/fs/cgroup", own.lstrip("/"))
    limits: list[tuple[int, str]] = []
    for above in (group, *group.parents):
        text = read(str(above / "memory.max"))
        if text.isdigit():
            limits.append((int(text), str(above)))
    old = read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    if old.isdigit() and int(old) < _NO_LIMIT:
        limits.append((int(old), "version 1"))
    return min(limits) if limits else (None, "")


def _kib(text: str) -> int:
    digits = text.split()[0] if text.split() else "0"
    return int(digits) * 1024 if digits.isdigit() else 0
