"""Checks of this machine for `tiercache doctor`, and how checks are made."""

from __future__ import annotations

import ctypes
import enum
import fcntl
import mmap
import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeVar

from tiercache.cli.terminal import count_text
from tiercache.errors import install_line
from tiercache.memory import create_memfd, kernel_text, read_memory
from tiercache.text import readable_size
from tiercache_distribution import DISTRIBUTION, foreign_sentence

_Make = TypeVar("_Make", bound=Callable[..., Any])

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
class Finding:
    """Result of a check, and what was found."""

    level: Level
    found: str
    fix: str = ""
    """Advice. If it is empty, the sentence of the check stands for it; it is empty if the level is OK."""
    name: str = ""
    """Name of the finding; if it is empty, that of the check stands for it."""

    def record(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"name": self.name, "level": str(self.level), "found": self.found, "fix": self.fix}


def ok_or(level: Level, is_good: bool, found: str, fix: str = "") -> Finding:
    """Return a finding whose level is OK if it `is_good`, otherwise `level`."""
    return Finding(Level.OK if is_good else level, found, fix)


class Checks:
    """Checks of one subject, in the order in which they are made.

    Thread safety: immutable once the module is imported.
    """

    def __init__(self) -> None:
        self._checks: list[tuple[str, str, Callable[..., Finding | Iterable[Finding]]]] = []

    def add(self, name: str, fix: str = "") -> Callable[[_Make], _Make]:
        """Add the function below; `fix` is the advice for its findings that have none of their own."""

        def add(make: _Make) -> _Make:
            self._checks.append((name, fix, make))
            return make

        return add

    def findings(self, *subject: Any) -> Iterator[Finding]:
        """Make all checks, and yield what was found, with names and advice."""
        for name, fix, make in self._checks:
            made = make(*subject)
            for found in [made] if isinstance(made, Finding) else made:
                advice = "" if found.level is Level.OK else found.fix or fix
                yield replace(found, name=found.name or name, fix=advice)


MACHINE: Final = Checks()
"""Checks of this machine."""


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


@MACHINE.add("python", "use Python 3.11 or newer")
def _python() -> Finding:
    found = platform.python_version_tuple()
    text = f"{platform.python_implementation()} {platform.python_version()}"
    return ok_or(Level.FAIL, (int(found[0]), int(found[1])) >= _MIN_PYTHON, text)


@MACHINE.add("packages")
def _packages() -> Finding:
    there = {name: installed(name) for name in _PACKAGES}
    missing = [name for name, found in there.items() if not found]
    there |= {name: installed(name) for name in _OPTIONAL_PACKAGES}
    text = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    again = f"install {' and '.join(missing)}, or {DISTRIBUTION} again from its checkout or wheel"
    return ok_or(Level.FAIL, not missing, text, again)


@MACHINE.add("import name")
def _foreign_packages() -> Iterator[Finding]:
    if sentence := foreign_sentence():
        found, _, fix = sentence.partition("; ")
        yield Finding(Level.FAIL, found, fix)


@MACHINE.add(
    "kernel", "use Linux 6.5 or newer, which reports what is in the page cache without mapping the file"
)
def _kernel() -> Finding:
    found = kernel_version()
    text = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux" or found < _MIN_KERNEL:
        fix = "use Linux 5.1 or newer: a daemon shares memory with workers by a memfd seal of that version"
        return Finding(Level.FAIL, text, fix)
    return ok_or(Level.WARN, found >= _CACHESTAT_KERNEL, text)


@MACHINE.add("memfd", "allow memfd_create in the sandbox; /dev/shm is not needed")
def _memfd() -> Finding:
    try:
        fd = create_memfd("tiercache-doctor", mmap.PAGESIZE)
    except (OSError, AttributeError) as error:
        return Finding(Level.FAIL, f"cannot be made: {error}")
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError as error:
        fix = "use Linux 5.1 or newer; a daemon refuses memory that can change size"
        return Finding(Level.FAIL, f"cannot be sealed: {error}", fix)
    finally:
        os.close(fd)
    return Finding(Level.OK, "with seals against resizing and later writers; /dev/shm is not needed")


@MACHINE.add(
    "memlock",
    "raise it if you register host memory with RDMA: ulimit -l unlimited, or LimitMEMLOCK=infinity; CUDA"
    " does not need it",
)
def _memlock() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(Level.OK, "no limit")
    if os.geteuid() == 0:
        return Finding(Level.OK, f"{readable_size(soft)}, which does not apply to root")
    return Finding(Level.WARN, f"{readable_size(soft)} (at most {_limit(hard)})")


@MACHINE.add(
    "open files",
    "raise it to 4096 or more: ulimit -n, or LimitNOFILE=; a slab needs two open files, a client one",
)
def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 0:
        return Finding(Level.OK, "no limit")
    level = Level.FAIL if soft < _MIN_FILES else Level.WARN
    return ok_or(level, soft >= _RECOMMENDED_FILES, f"{soft:,} (at most {hard:,})")


@MACHINE.add("memory", "free some memory: the host arena is pinned at its full size")
def _memory() -> Finding:
    found = read_memory()
    free, total = found.available or 0, found.total or 0
    text = f"{readable_size(free)} available of {readable_size(total)}"
    return ok_or(Level.WARN, free >= _RECOMMENDED_MEMORY, text)


@MACHINE.add(
    "cgroup memory",
    "raise the container's memory: the host arena and the page cache that it fills count towards it",
)
def _cgroup() -> Finding:
    found = read_memory()
    if found.tightest is None:
        return Finding(Level.OK, "no limit")
    figure = f"{readable_size(found.tightest)} ({found.tightest_group})"
    return ok_or(Level.WARN, found.tightest >= _RECOMMENDED_MEMORY, figure)


@MACHINE.add("huge pages", "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled")
def _huge_pages() -> Finding:
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    mode, shmem = (
        next((word[1:-1] for word in kernel_text(folder / name).split() if word.startswith("[")), "unknown")
        for name in ("enabled", "shmem_enabled")
    )
    reserved = kernel_text(Path("/proc/sys/vm/nr_hugepages")) or "0"
    good = reserved != "0" or shmem in ("always", "within_size", "advise", "force")
    return ok_or(Level.WARN, good, f"{reserved} reserved; transparent: {mode}, for shared memory: {shmem}")


@MACHINE.add("NUMA", "start each worker on the node of its GPU: numactl --cpunodebind=N --membind=N")
def _numa() -> Finding:
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    cores = len(os.sched_getaffinity(0))
    found = f"{count_text(max(1, len(nodes)), 'node')}, {count_text(cores, 'core')} for this process"
    return ok_or(Level.WARN, len(nodes) <= 1, found)


@MACHINE.add("clock", "start a time service such as chrony, because none synchronises the clock")
def _clock() -> Finding:
    now = time.time()
    source = (
        kernel_text(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")) or "unknown"
    )
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC, clock source {source}"
    if now < _YEAR_2026:
        return Finding(Level.FAIL, found, "set it: ages of objects and certificates depend on it")
    return ok_or(Level.WARN, _synchronised(), found)


def _synchronised() -> bool:
    """Return whether the kernel reports a synchronised clock; True if the kernel cannot be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        # The buffer is larger than any `struct timex`. The result is 5 (TIME_ERROR) for a clock that is not
        # synchronised (adjtimex(2)).
        return 0 <= int(libc.adjtimex(ctypes.create_string_buffer(512))) < 5
    except (OSError, AttributeError):
        return True


def _driver() -> str:
    """Return the first line of the NVIDIA driver's version; empty if there is no driver."""
    return next(iter(kernel_text(Path("/proc/driver/nvidia/version")).splitlines()), "")


@MACHINE.add("GPU")
def _gpu() -> Finding:
    driver = _driver()
    cupy = next((f"{name} {installed(name)}" for name in _CUPY_PACKAGES if installed(name)), "")
    if not driver:
        more = f"; {cupy}" if cupy else ""
        return Finding(Level.OK, f"no NVIDIA driver; a daemon does not need one{more}")
    cards = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    words = driver.partition("Kernel Module")[2].split()
    model = next((word for word in words if word[0].isdigit()), "unknown")
    found = f"{count_text(cards, 'GPU')}, driver {model}{_cuda_text()}, {cupy or 'no cupy'}"
    return ok_or(
        Level.WARN, bool(cupy), found, f"workers need cupy to copy by kernels: {install_line('cuda')}"
    )


def _cuda_text() -> str:
    """Return the driver's CUDA version as " for CUDA 12.4", read without initialising CUDA; "" if unknown."""
    number = ctypes.c_int(0)
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f" for CUDA {number.value // 1000}.{number.value % 1000 // 10}" if code == 0 else ""


@MACHINE.add("engines")
def _engines() -> Finding:
    there = {name: installed(name) for name in _ENGINES}
    text = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    return Finding(Level.OK, text or "none installed; a daemon does not need one")


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else readable_size(value)
