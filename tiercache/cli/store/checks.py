"""Checks of the machine that `doctor` makes: versions, limits, memory, GPU. A check changes nothing."""

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

from tiercache.cli.terminal import count_text
from tiercache.errors import install_line
from tiercache.memory import create_memfd, kernel_text, read_memory
from tiercache.text import readable_size
from tiercache_distribution import DISTRIBUTION, foreign_sentence

if TYPE_CHECKING:
    from tiercache.transfer.cuda import Calibration

_PACKAGES: Final = (DISTRIBUTION, "numpy", "lmdb", "msgpack", "blake3", "xxhash")
_OPTIONAL_PACKAGES: Final = ("grpcio", "protobuf")
"""Packages that are not needed in every installation. The check lists the installed ones."""
_ENGINES: Final = ("sglang", "vllm", "transformers", "torch")
_CUPY_PACKAGES: Final = ("cupy", "cupy-cuda13x", "cupy-cuda12x")
"""Packages that contain cupy, from source or for one version of CUDA."""
_SEAL_FUTURE_WRITE: Final = 0x10
"""The seal F_SEAL_FUTURE_WRITE, for which Python's fcntl module has no name."""
_MIN_PYTHON: Final = (3, 11)
_MIN_KERNEL: Final = (5, 1)
"""The first Linux kernel with F_SEAL_FUTURE_WRITE: (major, minor)."""
_CACHESTAT_KERNEL: Final = (6, 5)
"""The first Linux kernel with the system call cachestat: (major, minor)."""
_RECOMMENDED_MEMORY: Final = 1 << 30
"""Bytes of available memory; with fewer the check warns."""
_MIN_FILES, _RECOMMENDED_FILES = 256, 4096
"""Numbers of open files: the check fails if the soft limit is below the first, and warns below the second."""
_YEAR_2026: Final = 1_767_225_600
"""Start of the year 2026 in seconds since 1970; a clock that shows an earlier time is wrong."""


class Level(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """Finding of one check."""

    name: str
    level: Level
    found: str
    fix: str = ""
    """Advice about the finding; empty if the level is OK."""

    def record(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"name": self.name, "level": str(self.level), "found": self.found, "fix": self.fix}


def make_check(name: str, found: str, level: Level, fix: str) -> Check:
    """Return a check, with an empty `fix` if the level is OK."""
    return Check(name, level, found, "" if level is Level.OK else fix)


def machine_checks() -> Iterator[Check]:
    """Run all checks except those of the disk."""
    yield _python()
    yield _packages()
    yield from _foreign()
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
    good = (int(found[0]), int(found[1])) >= _MIN_PYTHON
    text = f"{platform.python_implementation()} {platform.python_version()}"
    return make_check("python", text, Level.OK if good else Level.FAIL, "use Python 3.11 or newer")


def _packages() -> Check:
    there = {name: installed(name) for name in _PACKAGES}
    missing = [name for name, found in there.items() if not found]
    there |= {name: installed(name) for name in _OPTIONAL_PACKAGES}
    text = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    return make_check(
        "packages",
        text,
        Level.FAIL if missing else Level.OK,
        f"install {' and '.join(missing)}, or {DISTRIBUTION} again from its checkout or wheel",
    )


def _foreign() -> Iterator[Check]:
    if sentence := foreign_sentence():
        found, _, fix = sentence.partition("; ")
        yield Check("import name", Level.FAIL, found, fix)


def _kernel() -> Check:
    found = kernel_version()
    text = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux" or found < _MIN_KERNEL:
        return Check(
            "kernel",
            Level.FAIL,
            text,
            "use Linux 5.1 or newer: a daemon shares memory with workers by a memfd seal of that version",
        )
    level = Level.OK if found >= _CACHESTAT_KERNEL else Level.WARN
    return make_check(
        "kernel",
        text,
        level,
        "use Linux 6.5 or newer, which reports what is in the page cache without mapping the file",
    )


def _memfd() -> Check:
    try:
        fd = create_memfd("tiercache-doctor", mmap.PAGESIZE)
    except (OSError, AttributeError) as error:
        fix = "allow memfd_create in the sandbox; /dev/shm is not needed"
        return Check("memfd", Level.FAIL, f"cannot be made: {error}", fix)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError as error:
        fix = "use Linux 5.1 or newer; a daemon refuses memory that can change size"
        return Check("memfd", Level.FAIL, f"cannot be sealed: {error}", fix)
    finally:
        os.close(fd)
    return Check("memfd", Level.OK, "with seals against resizing and later writers; /dev/shm is not needed")


def _memlock() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY:
        return Check(
            "memlock",
            Level.OK,
            "no limit"
            if soft == resource.RLIM_INFINITY
            else f"{readable_size(soft)}, which does not apply to root",
        )
    fix = (
        "raise it if you register host memory with RDMA: ulimit -l unlimited, or LimitMEMLOCK=infinity; CUDA"
        " does not need it"
    )
    return Check("memlock", Level.WARN, f"{readable_size(soft)} (at most {_limit(hard)})", fix)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = (
        Level.FAIL if 0 <= soft < _MIN_FILES else Level.WARN if 0 <= soft < _RECOMMENDED_FILES else Level.OK
    )
    found = f"{soft:,} (at most {hard:,})" if soft >= 0 else "no limit"
    return make_check(
        "open files",
        found,
        level,
        "raise it to 4096 or more: ulimit -n, or LimitNOFILE=; a slab needs two open files, a client one",
    )


def _memory() -> Check:
    found = read_memory()
    free, total = found.available or 0, found.total or 0
    level = Level.OK if free >= _RECOMMENDED_MEMORY else Level.WARN
    fix = "free some memory: the host arena is pinned at its full size"
    return make_check("memory", f"{readable_size(free)} available of {readable_size(total)}", level, fix)


def _cgroup() -> Check:
    found = read_memory()
    if found.tightest is None:
        return Check("cgroup memory", Level.OK, "no limit")
    level = Level.OK if found.tightest >= _RECOMMENDED_MEMORY else Level.WARN
    fix = "raise the container's memory: the host arena and the page cache that it fills count towards it"
    figure = f"{readable_size(found.tightest)} ({found.tightest_group})"
    return make_check("cgroup memory", figure, level, fix)


def _huge_pages() -> Check:
    mode = next(
        (
            word[1:-1]
            for word in kernel_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")).split()
            if word.startswith("[")
        ),
        "unknown",
    )
    reserved = kernel_text(Path("/proc/sys/vm/nr_hugepages")) or "0"
    shmem = next(
        (
            word[1:-1]
            for word in kernel_text(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")).split()
            if word.startswith("[")
        ),
        "unknown",
    )
    found = f"{reserved} reserved; transparent: {mode}, for shared memory: {shmem}"
    good = reserved != "0" or shmem in ("always", "within_size", "advise", "force")
    return make_check(
        "huge pages",
        found,
        Level.OK if good else Level.WARN,
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _numa() -> Check:
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    cores = len(os.sched_getaffinity(0))
    found = f"{count_text(max(1, len(nodes)), 'node')}, {count_text(cores, 'core')} for this process"
    fix = "start each worker on the node of its GPU: numactl --cpunodebind=N --membind=N"
    return make_check("NUMA", found, Level.OK if len(nodes) <= 1 else Level.WARN, fix)


def _clock() -> Check:
    now = time.time()
    source = (
        kernel_text(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")) or "unknown"
    )
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC, clock source {source}"
    if now < _YEAR_2026:
        return Check("clock", Level.FAIL, found, "set it: ages of objects and certificates depend on it")
    return make_check(
        "clock",
        found,
        Level.OK if _synchronised() else Level.WARN,
        "start a time service such as chrony, because none synchronises the clock",
    )


def _synchronised() -> bool:
    """Return whether the kernel reports a synchronised clock; True if the kernel cannot be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        # The buffer is larger than any `struct timex`. The result is 5 (TIME_ERROR) for a clock that is not
        # synchronised (adjtimex(2)).
        return 0 <= int(libc.adjtimex(ctypes.create_string_buffer(512))) < 5
    except (OSError, AttributeError):
        return True


def _gpu() -> Iterator[Check]:
    driver = next(iter(kernel_text(Path("/proc/driver/nvidia/version")).splitlines()), "")
    cupy = next((f"{name} {installed(name)}" for name in _CUPY_PACKAGES if installed(name)), "")
    if not driver:
        yield Check(
            "GPU", Level.OK, "no NVIDIA driver; a daemon does not need one" + (f"; {cupy}" if cupy else "")
        )
    else:
        cards = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        model = next(
            (word for word in driver.partition("Kernel Module")[2].split() if word[0].isdigit()), "unknown"
        )
        found = f"{count_text(cards, 'GPU')}, driver {model}{_cuda_text()}" + (
            f", {cupy}" if cupy else ", no cupy"
        )
        yield make_check(
            "GPU",
            found,
            Level.OK if cupy else Level.WARN,
            f"workers need cupy to copy by kernels: {install_line('cuda')}",
        )
    yield from _calibrations(expected=bool(driver))


def _cuda_text() -> str:
    """Return the driver's CUDA version as " for CUDA 12.4", read without initialising CUDA; "" if unknown."""
    number = ctypes.c_int(0)
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f" for CUDA {number.value // 1000}.{number.value % 1000 // 10}" if code == 0 else ""


def _calibrations(*, expected: bool) -> Iterator[Check]:
    """Yield a check for each calibration file of this user (the measured choice of copy methods on a GPU).

    `expected` says whether there is a GPU. If there is a GPU but no file, the only check says how to
    calibrate.
    """
    # Imported here, because other verbs do not need it.
    from tiercache.transfer.cuda import calibration_directory, read_calibration

    # A damaged file is reported below, so the log line about it is not printed.
    logging.getLogger("tiercache.transfer.cuda").addHandler(logging.NullHandler())
    paths = sorted(calibration_directory().glob("calibration-*.json"))
    for path in paths:
        known = read_calibration(path)
        if known is None or not known.cells:
            yield Check(
                "copies",
                Level.WARN,
                f"{path} is no calibration",
                "remove it; the next worker on that GPU calibrates again",
            )
        else:
            yield Check("copies", Level.OK, f"{known.card}: {_choices(known)}; kept in {path}")
    if expected and not paths:
        found = "not calibrated yet; the first worker or `tiercache bench device` does it in about a second"
        yield Check("copies", Level.OK, f"{found}, and keeps the result in {calibration_directory()}")


def _choices(known: Calibration) -> str:
    """Return the best copy method by copy length, for the largest measured number of copies.

    An example: "device_to_host: batch from 64 KiB, kernel below".
    """
    said = []
    for direction in dict.fromkeys(cell.direction for cell in known.cells):
        cells = sorted(
            (cell for cell in known.cells if cell.direction is direction),
            key=lambda cell: (cell.length, cell.count),
        )
        # Cells are sorted, so the largest count of each length comes last and overwrites the others.
        best = {cell.length: cell.best for cell in cells}
        starts = [(method, next(lengths)[0]) for method, lengths in groupby(best.items(), key=itemgetter(1))]
        below = f"{starts[0][0]} below" if len(starts) > 1 else f"{starts[0][0]}"
        above = [
            f"{method} from {readable_size(length).replace('.0 ', ' ')}"
            for method, length in reversed(starts[1:])
        ]
        said.append(f"{direction}: {', '.join([*above, below])}")
    return "; ".join(said)


def _engines() -> Iterator[Check]:
    there = {name: installed(name) for name in _ENGINES}
    text = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    yield Check("engines", Level.OK, text or "none installed; a daemon does not need one")


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else readable_size(value)
