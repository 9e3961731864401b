"""Host arena: one sealed, pre-faulted memory region cut into uniform blocks, and the rules for its size."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from tiercache.core import BLOCK_ALIGN, Locations
from tiercache.errors import ClosedError, ConfigError, SlotError
from tiercache.pools.blocks import BlockArena

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module does not name it, and its madvise keeps the GIL
_TOUCH_BYTES: Final = 64 << 20  # bytes that a thread faults in per system call: enough to be efficient, few enough to share out evenly
_UNLIMITED: Final = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class MemoryReadings:
    """Memory figures of the system, in bytes; None where the system gives none.

    `available` is MemAvailable; `limit` and `usage` are those of the cgroup that leaves least room, its usage without reclaimable page
    cache; `huge_free` is the reserved and free part of the huge page pool, which MemAvailable does not count.
    """

    available: int | None
    limit: int | None = None
    usage: int | None = None
    huge_free: int = 0

    @property
    def usable(self) -> int | None:
        """Bytes that a process can still take without swapping or being killed; None if nothing is known."""
        rooms = [] if self.available is None else [self.available]
        if self.limit is not None:
            rooms.append(max(0, self.limit - (self.usage or 0)))
        return min(rooms, default=None)

    def __str__(self) -> str:
        memory = "MemAvailable unknown" if self.available is None else f"MemAvailable {_size(self.available)}"
        if self.limit is None:
            return f"{memory}, no cgroup limit"
        return f"{memory}, cgroup limit {_size(self.limit)} of which {_size(self.usage or 0)} used"


@dataclass(frozen=True, slots=True)
class SizePlan:
    """Size of an arena in bytes, and the reason for it in words."""

    nbytes: int
    reason: str


def read_memory(root: Path = Path("/")) -> MemoryReadings:
    """Read /proc/meminfo and the limits of this process's cgroups (v1 or v2) below `root`. What cannot be read is taken as not limited."""
    info = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+)", _text(root / "proc/meminfo"), re.MULTILINE)}
    groups = min(_cgroups(root), key=lambda group: group[0] - group[1], default=(None, None))
    return MemoryReadings(
        available=info["MemAvailable"] * 1024 if "MemAvailable" in info else None,
        limit=groups[0],
        usage=groups[1],
        huge_free=max(0, info.get("HugePages_Free", 0) - info.get("HugePages_Rsvd", 0)) * info.get("Hugepagesize", 0) * 1024,
    )


def plan_auto_size(readings: MemoryReadings, *, fraction: float = 0.5, reserve: int = 2 << 30) -> SizePlan:
    """Return the size for `auto`: `fraction` of what is usable, but leave at least `reserve` bytes free. Never rounded up.

    Raises ConfigError if nothing is known or nothing would be left.
    """
    usable = readings.usable
    if usable is None:
        raise ConfigError("the available memory cannot be read, so the arena cannot choose its size; give it a number of bytes")
    nbytes = min(int(usable * fraction), usable - reserve)
    if nbytes <= 0:
        raise ConfigError(
            f"{_size(usable)} of memory is usable and {_size(reserve)} is to stay free, which leaves no arena; give it a number of bytes"
        )
    rule = (
        f"{fraction:.0%} of {_size(usable)} usable"
        if nbytes == int(usable * fraction)
        else f"{_size(usable)} usable less {_size(reserve)} reserve"
    )
    return SizePlan(nbytes, f"auto: {rule} ({readings})")


def plan_size(nbytes: int | Literal["auto"], readings: MemoryReadings, *, fraction: float = 0.5, reserve: int = 2 << 30) -> SizePlan:
    """Return the size for a number of bytes, or for `auto`.

    Raises ConfigError for more bytes than are usable, unless that many are free in the huge page pool.
    """
    if nbytes == "auto":
        return plan_auto_size(readings, fraction=fraction, reserve=reserve)
    usable = readings.usable
    if usable is not None and nbytes > max(usable, readings.huge_free):
        raise ConfigError(
            f"an arena of {_size(nbytes)} ({nbytes} bytes) is wanted and only {_size(usable)} ({usable} bytes) is available; ask for less"
        )
    return SizePlan(nbytes, "as asked for")


class HostArena(BlockArena):
    """Blocks of one shared, sealed memfd, `blocks` of `block_bytes` bytes each: the only byte budget on the host, for all kinds of objects.

    `nbytes` (or "auto", see `plan_auto_size`) is rounded down to whole blocks. The region is faulted in by `threads` threads before the
    constructor returns, on huge pages where the system has them; `report` describes the result in words. Another process maps the same
    bytes through `fd`; the seals prevent every process from resizing it. /dev/shm is not used. Raises ConfigError for a size that is not
    possible.

    Thread safety: `alloc`, `free`, `available`, `withheld` and `close` belong to one owner thread; `view`, `hold`, `embargo`, `address`,
    `nbytes` and `fd` may be used from any.
    """

    def __init__(
        self,
        nbytes: int | Literal["auto"],
        block_bytes: int,
        *,
        huge_pages: bool = True,
        threads: int | None = None,
        fraction: float = 0.5,
        reserve: int = 2 << 30,
        readings: MemoryReadings | None = None,
    ) -> None:
        if block_bytes < 1 or block_bytes % BLOCK_ALIGN:
            raise ConfigError(f"a block of {block_bytes} bytes is not possible; use a multiple of {BLOCK_ALIGN}")
        readings = readings or read_memory()
        if not huge_pages:
            readings = replace(readings, huge_free=0)
        plan = plan_size(nbytes, readings, fraction=fraction, reserve=reserve)
        blocks = plan.nbytes // block_bytes
        if blocks < 1:
            raise ConfigError(f"an arena of {_size(plan.nbytes)} does not hold one block of {_size(block_bytes)}; make it larger")
        super().__init__(blocks, block_bytes)
        region = _map(blocks * block_bytes, readings, huge_pages)
        self.fd = region.fd
        self._close_fd = weakref.finalize(self, os.close, region.fd)
        self._map: mmap.mmap | None = region.map
        self._view = memoryview(region.map)[: blocks * block_bytes]
        self.address = _address_of(region.map)
        started = time.monotonic()
        try:
            workers, method = _touch(self.address, self._view, threads or min(16, len(os.sched_getaffinity(0))))
        except BaseException:
            self.close()
            raise
        self.report = (
            f"host arena: {_size(self.nbytes)} in {blocks} blocks of {_size(block_bytes)}, {plan.reason}; {region.pages}; "
            f"ready in {time.monotonic() - started:.2f} s with {workers} threads ({method})"
        )

    def view(self, block: int) -> memoryview:
        """Return the bytes of a block. The region stays mapped for as long as a view lives."""
        self._check_open()
        if not 0 <= block < self.blocks:
            raise SlotError(f"arena block {block} is out of range; there are {self.blocks}")
        return self._view[block * self.block_bytes : (block + 1) * self.block_bytes]

    def alloc(self, n_blocks: int) -> Locations:  # noqa: D102
        self._check_open()
        return super().alloc(n_blocks)

    def hold(self) -> memoryview:  # noqa: D102
        self._check_open()
        return self._view[:]

    def close(self) -> None:
        """Release the region; twice is harmless. Where views are still in use, it is unmapped when the last of them is gone."""
        if self._map is None:
            return
        self._close_fd()
        # While a view is exported, these raise BufferError and the view keeps the map referenced: the last view then unmaps it.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        self._map = None

    def _check_open(self) -> None:
        if self._map is None:
            raise ClosedError("the host arena was closed")


@dataclass(frozen=True, slots=True)
class _Region:
    fd: int
    map: mmap.mmap
    pages: str


def _map(nbytes: int, readings: MemoryReadings, huge_pages: bool) -> _Region:
    """Create a sealed memfd and map it: on reserved huge pages, else on transparent ones, else on ordinary ones."""
    if not huge_pages:
        return _map_memfd(nbytes, 0, "huge pages off")
    if nbytes <= readings.huge_free:
        # Reserving the pages fails here, not at first touch; other processes may have taken them since the reading.
        with contextlib.suppress(OSError):
            return _map_memfd(-(-nbytes // _huge_size()) * _huge_size(), os.MFD_HUGETLB, "reserved huge pages")
        plan_size(nbytes, replace(readings, huge_free=0))
    region = _map_memfd(nbytes, 0, "")
    setting = _text(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    if re.search(r"\[(always|within_size|advise|force)\]", setting):
        with contextlib.suppress(OSError):
            region.map.madvise(mmap.MADV_HUGEPAGE)
            return _Region(region.fd, region.map, "transparent huge pages asked for")
    mode = re.search(r"\[(\w+)\]", setting)
    why = f"{_size(readings.huge_free)} reserved, shmem_enabled={mode[1] if mode else 'unknown'}"
    return _Region(region.fd, region.map, f"ordinary pages because huge ones are not available ({why})")


def _map_memfd(nbytes: int, flags: int, pages: str) -> _Region:
    fd = os.memfd_create("tiercache-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, nbytes)
        # No F_SEAL_SEAL: a daemon that maps the arena adds F_SEAL_FUTURE_WRITE and F_SEAL_SEAL itself, so that no process can punch
        # holes into what it reads.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        region = mmap.mmap(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    with contextlib.suppress(OSError):
        region.madvise(mmap.MADV_DONTDUMP)  # a core dump of a server should not carry its cache
    return _Region(fd, region, pages)


def _touch(address: int, view: memoryview, threads: int) -> tuple[int, str]:
    """Fault in every page of the region, in parallel; return how many threads were used, and the method."""
    pieces = [(start, min(_TOUCH_BYTES, len(view) - start)) for start in range(0, len(view), _TOUCH_BYTES)]
    threads = min(threads, len(pieces))

    def populate(piece: tuple[int, int]) -> int:
        result: int = _libc.madvise(address + piece[0], piece[1], _MADV_POPULATE_WRITE)  # CDLL: the GIL is released
        return ctypes.get_errno() if result else 0

    with ThreadPoolExecutor(threads, "tiercache-touch") as pool:
        refusals = set(pool.map(populate, pieces)) - {0}
        if not refusals:
            return threads, "MADV_POPULATE_WRITE"
        if refusals != {errno.EINVAL}:  # not an older kernel, but too little memory: touching it would kill the process
            reason = os.strerror(max(refusals))
            raise ConfigError(f"{_size(len(view))} for the arena could not be faulted in ({reason}); ask for less")
        pages = np.frombuffer(view, np.uint8)[::BLOCK_ALIGN]
        step = _TOUCH_BYTES // BLOCK_ALIGN
        list(pool.map(lambda start: pages[start : start + step].fill(0), range(0, len(pages), step)))
        return threads, "touched page by page"


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, usage) in bytes of every memory cgroup above this process that has a limit.

    Inner groups of a container may not be visible.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
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
                yield from _limit_of(mount.joinpath(*parts[:depth]), *names)


def _limit_of(group: Path, limit_file: str, usage_file: str, cache_key: str) -> Iterator[tuple[int, int]]:
    limit, usage = _text(group / limit_file).strip(), _text(group / usage_file).strip()
    if not limit.isdigit() or int(limit) >= _UNLIMITED or not usage.isdigit():
        return
    cache = re.search(rf"^{cache_key} (\d+)", _text(group / "memory.stat"), re.MULTILINE)
    yield int(limit), max(0, int(usage) - int(cache[1] if cache else 0))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _huge_size() -> int:
    found = re.search(r"^Hugepagesize:\s+(\d+)", _text(Path("/proc/meminfo")), re.MULTILINE)
    return int(found[1]) * 1024 if found else 2 << 20


def _address_of(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


def _size(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} B"
