"""Memory of the machine: readings of its size and use, and regions shared through a memfd."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiercache.text import readable_size

_UNLIMITED: Final = 1 << 60
"""A cgroup with a limit of this many bytes or more counts as unlimited.

Version 1 of cgroups reports a number near 2**63 for a group without a limit.
"""
_MADV_POPULATE_WRITE: Final = 23
"""Advice to madvise(2) that makes the kernel fault pages in. Linux knows this advice since version 5.14.

Python's `mmap` module has no name for this advice, and `mmap.madvise` does not release the GIL.
"""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class MemoryReadings:
    """Memory figures of the system, in bytes. A figure that the system does not report is None."""

    available: int | None
    """MemAvailable of /proc/meminfo."""
    limit: int | None = None
    """Limit of the cgroup with the least free memory, among those that contain this process."""
    usage: int | None = None
    """Usage of the cgroup to which `limit` belongs, without page cache that the kernel can reclaim."""
    total: int | None = None
    """MemTotal of /proc/meminfo."""
    tightest: int | None = None
    """Lowest limit of any cgroup that contains this process."""
    tightest_group: str = ""
    """Name of the cgroup to which `tightest` belongs."""

    @property
    def usable(self) -> int | None:
        """Bytes that a process can still take without swapping or being killed; None if nothing is known."""
        rooms = [] if self.available is None else [self.available]
        if self.limit is not None:
            rooms.append(max(0, self.limit - (self.usage or 0)))
        return min(rooms, default=None)

    @property
    def ceiling(self) -> int | None:
        """Maximum bytes that a process here can ever have; None if nothing is known."""
        return min((figure for figure in (self.total, self.tightest) if figure is not None), default=None)

    def __str__(self) -> str:
        available = self.available
        memory = "MemAvailable unknown" if available is None else f"MemAvailable {readable_size(available)}"
        if self.limit is None:
            return f"{memory}, no cgroup limit"
        used = readable_size(self.usage or 0)
        return f"{memory}, cgroup limit {readable_size(self.limit)} of which {used} used"


def read_memory(root: Path = Path("/")) -> MemoryReadings:
    """Read /proc/meminfo and the limits of this process's cgroups (v1 or v2) below `root`.

    A cgroup whose limit cannot be read counts as unlimited.
    """
    rows = re.findall(r"^(\w+):\s+(\d+)", kernel_text(root / "proc/meminfo"), re.MULTILINE)
    info = {name: int(figure) for name, figure in rows}
    groups = list(_cgroups(root))
    fullest = min(groups, key=lambda group: group.limit - group.usage, default=None)
    tightest = min(groups, key=lambda group: group.limit, default=None)
    return MemoryReadings(
        available=info["MemAvailable"] * 1024 if "MemAvailable" in info else None,
        limit=fullest.limit if fullest else None,
        usage=fullest.usage if fullest else None,
        total=info["MemTotal"] * 1024 if "MemTotal" in info else None,
        tightest=tightest.limit if tightest else None,
        tightest_group=tightest.name if tightest else "",
    )


def kernel_text(path: Path) -> str:
    """Return the stripped text of a small kernel file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    limit: int
    usage: int


def _cgroups(root: Path) -> Iterator[_Group]:
    """Yield every memory cgroup above this process that has a limit.

    A process in a container may not see all of its cgroups. Those that it cannot see are skipped.
    """
    # A line is number:controllers:path. The limits of /a/b, /a and / all apply to a process in /a/b.
    #   0::/a/b            version 2, one hierarchy for all controllers
    #   4:memory:/a/b      version 1, one hierarchy for each controller
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield from _group_at(mount.joinpath(*parts[:depth]), *names)


def _group_at(path: Path, limit_file: str, usage_file: str, cache_key: str) -> Iterator[_Group]:
    limit, usage = kernel_text(path / limit_file), kernel_text(path / usage_file)
    if not limit.isdigit() or int(limit) >= _UNLIMITED:
        return
    # Inactive file pages count as page cache that the kernel can reclaim.
    cache = re.search(rf"^{cache_key} (\d+)", kernel_text(path / "memory.stat"), re.MULTILINE)
    used = int(usage) if usage.isdigit() else 0
    yield _Group(str(path), int(limit), max(0, used - int(cache[1] if cache else 0)))


# ----------------------------------------------------------------------------------------------------------
# shared regions


def create_memfd(name: str, nbytes: int) -> int:
    """Create a memfd of `nbytes` bytes, sealed against resizing. Raises OSError.

    The memfd has no memory until a mapping of it is written to; `populate` allocates all of it at once.

    F_SEAL_SEAL is not set, so that seals can be added. A daemon that maps the memfd adds F_SEAL_FUTURE_WRITE
    and F_SEAL_SEAL; then no process can punch holes into the memfd.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def address_of(mapped: mmap.mmap) -> int:
    """Return the address of a mapping's first byte in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def populate(address: int, nbytes: int) -> None:
    """Fault in every page of a writable mapping, without the GIL. Raises OSError.

    The error code EINVAL means that the kernel is older than Linux 5.14. Any other code means that memory is
    short.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Region:
    """A mapped memfd.

    `view` gives access to the bytes from `address` on. `close` drops the region's own view, and the memory
    stays mapped until the last view of it is gone.

    Thread safety: any thread may use `view`; one thread calls `close`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` bytes of the memfd `fd`. Raises OSError if that fails.

        The caller still owns `fd` and closes it.
        """
        self.nbytes: Final = nbytes
        mapped = mmap.mmap(fd, nbytes)
        self.view = memoryview(mapped)
        self.address: Final = address_of(mapped)

    def populate(self) -> None:
        """Fault every page into this mapping; raises OSError where memory is short. Releases the GIL."""
        populate(self.address, self.nbytes)

    def close(self) -> None:
        """Drop the region's own view. A second call does nothing."""
        self.view = memoryview(b"")
