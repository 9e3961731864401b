"""What this machine can give: its memory, and the disk below a directory that may not be there yet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NO_LIMIT: Final = 1 << 60
"""From here on a limit of the first version of cgroups is none."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory: the machine's, those that are free or can be freed, and the tightest limit of a container, with where it is set."""

    total: int
    available: int
    limit: int | None
    limited_by: str

    @property
    def most(self) -> int:
        """What a process here can have at the very most; 0 where that is not known."""
        return self.total if self.limit is None else min(self.total or self.limit, self.limit)


def memory() -> Memory:
    """The memory of this machine, as the kernel tells it; 0 where it does not."""
    figures = dict(row.split(":", 1) for row in read("/proc/meminfo").splitlines() if ":" in row)
    limit, where = _cgroup_limit()
    return Memory(_kib(figures.get("MemTotal", "")), _kib(figures.get("MemAvailable", "")), limit, where)


def read(path: str) -> str:
    """A small file of the kernel's, or nothing."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a directory is or would be made: `there` is it, or the nearest one above it that exists."""

    path: Path
    there: Path

    @property
    def is_directory(self) -> bool:
        """False where a file is in the way."""
        return self.there.is_dir()

    @property
    def can_be_written(self) -> bool:
        """May this user make files, and the directories that are missing?"""
        return os.access(self.there, os.W_OK | os.X_OK, effective_ids=True)

    def disk_bytes(self) -> tuple[int, int]:
        """The size of the file system and what is free of it for this user; zeros where it does not say."""
        found = os.statvfs(self.there)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def place_of(path: Path) -> Place:
    """The place of a directory; links are followed."""
    path = Path(os.path.abspath(path))
    return Place(path, next(above for above in (path, *path.parents) if os.path.lexists(above)))


def _cgroup_limit() -> tuple[int | None, str]:
    """The tightest limit on the way up from this process's own group."""
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
