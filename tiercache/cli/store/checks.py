"""The checks of the machine that `doctor` makes: versions, limits, memory, GPU. Each check gives a result and changes nothing."""

from __future__ import annotations

import ctypes
import enum
import fcntl
import logging
import mmap
import os
import platform
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiercache.cli.output import count_text, size_text
from tiercache.config.machine import memory, read

if TYPE_CHECKING:
    from tiercache.transfer.cuda import Calibration

_PACKAGES: Final = ("tiercache", "numpy", "lmdb", "blake3", "xxhash", "grpcio", "protobuf")
_ENGINES: Final = ("sglang", "vllm", "transformers", "torch")
_SEAL_FUTURE_WRITE: Final = 0x10
"""The seal F_SEAL_FUTURE_WRITE, which the fcntl module of Python does not name."""
_OLDEST_PYTHON: Final = (3, 11)
_OLDEST_KERNEL: Final = (5, 1)
"""The first Linux kernel with F_SEAL_FUTURE_WRITE: (major, minor)."""
_CACHESTAT_KERNEL: Final = (6, 5)
"""The first Linux kernel with the system call cachestat: (major, minor)."""
_MEMORY_ENOUGH: Final = 1 << 30
"""Bytes of memory below which a check warns."""
_FILES_FEW, _FILES_ENOUGH = 256, 4096
"""Open files: a soft limit below the first fails the check, one below the second gives a warning."""
_YEAR_2026: Final = 1_767_225_600
"""The start of 2026 in seconds since 1970; a clock before it is wrong."""


class Level(enum.StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """The finding of one check; `fix` says what to do about it and is empty if the level is OK."""

    name: str
    level: Level
    found: str
    fix: str = ""

    def record(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"name": self.name, "level": str(self.level), "found": self.found, "fix": self.fix}


def judged(name: str, found: str, level: Level, fix: str) -> Check:
    """Return a check; its `fix` is left empty if the level is OK."""
    return Check(name, level, found, "" if level is Level.OK else fix)


def machine_checks() -> Iterator[Check]:
    """Run all checks except those of the disk."""
    yield _python()
    yield _packages()
    yield _kernel()
    yield _memfd()
    yield _memlock()
    yield _files()
    yield _memory()
    yield _cgroup()
    yield _huge_pages()
    yield _numa()
    yield _clock()
    yield from _gpu()
    yield from _engines()


def installed(package: str) -> str:
    """Return the version of a package without importing it; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def kernel_version() -> tuple[int, int]:
    """Return (major, minor) of the running kernel; (0, 0) if its release cannot be parsed."""
    major, _, rest = platform.release().partition(".")
    minor = "".join(c if c.isdigit() else " " for c in rest).split()
    return (int(major), int(minor[0])) if major.isdigit() and minor else (0, 0)


def _python() -> Check:
    found = platform.python_version_tuple()
    good = (int(found[0]), int(found[1])) >= _OLDEST_PYTHON
    text = f"{platform.python_implementation()} {platform.python_version()}"
    return judged("python", text, Level.OK if good else Level.FAIL, "use Python 3.11 or newer")


def _packages() -> Check:
    there = {name: installed(name) for name in _PACKAGES}
    missing = [name for name, found in there.items() if not found]
    text = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    return judged("packages", text, Level.FAIL if missing else Level.OK, f"install {' and '.join(missing)}: pip install tiercache")


def _kernel() -> Check:
    found = kernel_version()
    text = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux" or found < _OLDEST_KERNEL:
        return Check("kernel", Level.FAIL, text, "use Linux 5.1 or newer: a daemon shares memory with workers through seals that came then")
    level = Level.OK if found >= _CACHESTAT_KERNEL else Level.WARN
    return judged("kernel", text, level, "Linux 6.5 and newer tell what is in the page cache without mapping the file")


def _memfd() -> Check:
    try:
        fd = os.memfd_create("tiercache-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        return Check("memfd", Level.FAIL, f"cannot be made: {error}", "allow memfd_create in the sandbox; nothing here needs /dev/shm")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError as error:
        return Check(
            "memfd", Level.FAIL, f"cannot be sealed: {error}", "use Linux 5.1 or newer; a daemon refuses memory that can change size"
        )
    finally:
        os.close(fd)
    return Check("memfd", Level.OK, "with seals against resizing and later writers; /dev/shm is not needed")


def _memlock() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY:
        return Check("memlock", Level.OK, "no limit" if soft == resource.RLIM_INFINITY else f"{size_text(soft)}, which root is free of")
    fix = "raise it if you register host memory with RDMA: ulimit -l unlimited, or LimitMEMLOCK=infinity; CUDA does not need it"
    return Check("memlock", Level.WARN, f"{size_text(soft)} (at most {_limit(hard)})", fix)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = Level.FAIL if 0 <= soft < _FILES_FEW else Level.WARN if 0 <= soft < _FILES_ENOUGH else Level.OK
    found = f"{soft:,} (at most {hard:,})" if soft >= 0 else "no limit"
    return judged(
        "open files", found, level, "raise it to 4096 or more: ulimit -n, or LimitNOFILE=; every slab takes two, every client one"
    )


def _memory() -> Check:
    there = memory()
    free = there.available
    found = f"{size_text(free)} available of {size_text(there.total)}"
    return judged(
        "memory", found, Level.OK if free >= _MEMORY_ENOUGH else Level.WARN, "the host arena is pinned at its full size: free some"
    )


def _cgroup() -> Check:
    there = memory()
    limit, where = there.limit, there.limited_by
    if limit is None:
        return Check("cgroup memory", Level.OK, "no limit")
    level = Level.OK if limit >= _MEMORY_ENOUGH else Level.WARN
    fix = "raise the container's memory: the host arena and the page cache that it fills count towards it"
    return judged("cgroup memory", f"{size_text(limit)} ({where})", level, fix)


def _huge_pages() -> Check:
    mode = next((word[1:-1] for word in read("/sys/kernel/mm/transparent_hugepage/enabled").split() if word.startswith("[")), "unknown")
    reserved = read("/proc/sys/vm/nr_hugepages") or "0"
    shmem = next(
        (word[1:-1] for word in read("/sys/kernel/mm/transparent_hugepage/shmem_enabled").split() if word.startswith("[")), "unknown"
    )
    found = f"{reserved} reserved; transparent: {mode}, for shared memory: {shmem}"
    good = reserved != "0" or shmem in ("always", "within_size", "advise", "force")
    return judged("huge pages", found, Level.OK if good else Level.WARN, "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled")


def _numa() -> Check:
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    cores = len(os.sched_getaffinity(0))
    found = f"{count_text(max(1, len(nodes)), 'node')}, {count_text(cores, 'core')} for this process"
    fix = "start each worker on the node of its GPU: numactl --cpunodebind=N --membind=N"
    return judged("NUMA", found, Level.OK if len(nodes) <= 1 else Level.WARN, fix)


def _clock() -> Check:
    now = time.time()
    source = read("/sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC, clock source {source}"
    if now < _YEAR_2026:
        return Check("clock", Level.FAIL, found, "set it: ages of objects and certificates depend on it")
    return judged("clock", found, Level.OK if _synchronised() else Level.WARN, "no time service keeps it right: start chrony or the like")


def _synchronised() -> bool:
    """Whether the kernel reports a synchronised clock; its state is TIME_ERROR (5) otherwise. True if adjtimex cannot be called."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return 0 <= int(libc.adjtimex(ctypes.create_string_buffer(512))) < 5
    except (OSError, AttributeError):
        return True


def _gpu() -> Iterator[Check]:
    driver = next(iter(read("/proc/driver/nvidia/version").splitlines()), "")
    cupy = next((f"{name} {found}" for name in ("cupy", "cupy-cuda13x", "cupy-cuda12x") if (found := installed(name))), "")
    if not driver:
        yield Check("GPU", Level.OK, "no NVIDIA driver; a daemon needs none" + (f"; {cupy}" if cupy else ""))
    else:
        cards = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        model = next((word for word in driver.partition("Kernel Module")[2].split() if word[0].isdigit()), "unknown")
        found = f"{count_text(cards, 'GPU')}, driver {model}{_cuda_text()}" + (f", {cupy}" if cupy else ", no cupy")
        yield judged("GPU", found, Level.OK if cupy else Level.WARN, "workers copy by kernels with it: pip install 'tiercache[cuda]'")
    yield from _calibrations(expected=bool(driver))


def _cuda_text() -> str:
    """Return a phrase with the CUDA version of the driver, read without initialising CUDA; empty if the driver cannot be asked."""
    number = ctypes.c_int(0)
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f" for CUDA {number.value // 1000}.{number.value % 1000 // 10}" if code == 0 else ""


def _calibrations(*, expected: bool) -> Iterator[Check]:
    """Yield a check per calibration file of this user; without any, if a card is `expected`, one that says how to get a calibration."""
    # Imported here, so that other verbs do not load it.
    from tiercache.transfer.cuda import calibration_directory, read_calibration

    logging.getLogger("tiercache.transfer.cuda").addHandler(logging.NullHandler())  # a broken file is reported below instead
    paths = sorted(calibration_directory().glob("calibration-*.json"))
    for path in paths:
        known = read_calibration(path)
        if known is None or not known.cells:
            yield Check("copies", Level.WARN, f"{path} is no calibration", "remove it; the next worker on its card measures anew")
        else:
            yield Check("copies", Level.OK, f"{known.card}: {_choices(known)}; kept in {path}")
    if expected and not paths:
        found = "not calibrated yet; the first worker does it in a second, as does `tiercache bench device`"
        yield Check("copies", Level.OK, f"{found}, and it is kept in {calibration_directory()}")


def _choices(known: Calibration) -> str:
    """Return the best method by copy length, at the largest count measured: "device_to_host: batch from 64 KiB, kernel below"."""
    said = []
    for direction in dict.fromkeys(cell.direction for cell in known.cells):
        cells = sorted((cell for cell in known.cells if cell.direction is direction), key=lambda cell: (cell.length, cell.count))
        best = {cell.length: cell.best for cell in cells}  # the largest count comes last and overwrites the others
        starts = [(method, next(lengths)[0]) for method, lengths in groupby(best.items(), key=itemgetter(1))]
        below = f"{starts[0][0]} below" if len(starts) > 1 else f"{starts[0][0]}"
        above = [f"{method} from {size_text(length).replace('.0 ', ' ')}" for method, length in reversed(starts[1:])]
        said.append(f"{direction}: {', '.join([*above, below])}")
    return "; ".join(said)


def _engines() -> Iterator[Check]:
    there = {name: installed(name) for name in _ENGINES}
    text = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    yield Check("engines", Level.OK, text or "none installed; a daemon needs none")


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else size_text(value)
