"""All checks in one table, for `doctor`, `config check` and `serve`.

Each check names what it needs. Those that need what is given are made, in the order of the table:

    doctor          MACHINE, and DIRECTORY or SHARED_STORE
    config check    SETTINGS, and FILES and PORTS unless told otherwise
    serve           FILES, SETTINGS and PORTS

Nothing is left behind: a disk is checked with an unnamed file, and ports are bound for a moment.
"""

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import mkstemp
from typing import TYPE_CHECKING, Any, Final

from tiercache.cli import readiness
from tiercache.cli.terminal import clean, count_text
from tiercache.config.files import check_certificates, check_files
from tiercache.config.rules import warnings
from tiercache.config.urls import section_of
from tiercache.core import BLOCK_ALIGN, DIGEST_BYTES, ObjectKey, PoolName
from tiercache.errors import ConfigError, StorageError, install_line
from tiercache.memory import create_memfd, kernel_text, read_memory
from tiercache.storage.env import Env, cached_bytes, moves_direct
from tiercache.storage.registry import check_backend, open_backend
from tiercache.text import readable_size
from tiercache_distribution import DISTRIBUTION, foreign_sentence

if TYPE_CHECKING:
    from tiercache.transfer.cuda import Calibration

SHARED: Final = {"s3": "bucket", "mooncake": "pool"}
"""Types of stores that have no directory on this machine, and what each one is kept in."""
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
_MIN_SPACE: Final = 64 << 20
"""Free bytes below which the check fails."""
_RECOMMENDED_SPACE: Final = 1 << 30
"""Free bytes below which the check warns."""
_FULL: Final = 0.95
"""Used share of the disk, from 0 to 1, above which the check warns."""
_IN_MEMORY: Final = ("tmpfs", "ramfs")
"""Types of file systems in memory, about which the check warns."""
_NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "lustre")
"""Types of network file systems, for which the check fails."""


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


def _ok_or(level: Level, is_good: bool, found: str, fix: str = "") -> Finding:
    """Return a finding whose level is OK if it `is_good`, otherwise `level`."""
    return Finding(Level.OK if is_good else level, found, fix)


class Needs(enum.Enum):
    """Subject of a check, which is the argument of its function."""

    MACHINE = "nothing but this machine"
    DIRECTORY = "Path of a directory that exists"
    SHARED_STORE = "URL of a store that hosts share"
    FILES = "Settings, whose files with secrets and certificates are read"
    SETTINGS = "Settings"
    PORTS = "Settings, whose addresses and sockets must be free"


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    name: str
    needs: Needs
    make: Callable[..., Finding | Iterable[Finding | str] | None]
    """Function that makes the check: it returns findings, or warnings as text, or raises an error."""
    fix: str = ""
    """Advice for findings that have none of their own."""


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


def _python() -> Finding:
    found = platform.python_version_tuple()
    text = f"{platform.python_implementation()} {platform.python_version()}"
    return _ok_or(Level.FAIL, (int(found[0]), int(found[1])) >= _MIN_PYTHON, text)


def _packages() -> Finding:
    there = {name: installed(name) for name in _PACKAGES}
    missing = [name for name, found in there.items() if not found]
    there |= {name: installed(name) for name in _OPTIONAL_PACKAGES}
    text = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    again = f"install {' and '.join(missing)}, or {DISTRIBUTION} again from its checkout or wheel"
    return _ok_or(Level.FAIL, not missing, text, again)


def _foreign_packages() -> Iterator[Finding]:
    if sentence := foreign_sentence():
        found, _, fix = sentence.partition("; ")
        yield Finding(Level.FAIL, found, fix)


def _kernel() -> Finding:
    found = kernel_version()
    text = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux" or found < _MIN_KERNEL:
        fix = "use Linux 5.1 or newer: a daemon shares memory with workers by a memfd seal of that version"
        return Finding(Level.FAIL, text, fix)
    return _ok_or(Level.WARN, found >= _CACHESTAT_KERNEL, text)


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


def _memlock() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(Level.OK, "no limit")
    if os.geteuid() == 0:
        return Finding(Level.OK, f"{readable_size(soft)}, which does not apply to root")
    return Finding(Level.WARN, f"{readable_size(soft)} (at most {_limit(hard)})")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 0:
        return Finding(Level.OK, "no limit")
    level = Level.FAIL if soft < _MIN_FILES else Level.WARN
    return _ok_or(level, soft >= _RECOMMENDED_FILES, f"{soft:,} (at most {hard:,})")


def _memory() -> Finding:
    found = read_memory()
    free, total = found.available or 0, found.total or 0
    text = f"{readable_size(free)} available of {readable_size(total)}"
    return _ok_or(Level.WARN, free >= _RECOMMENDED_MEMORY, text)


def _cgroup() -> Finding:
    found = read_memory()
    if found.tightest is None:
        return Finding(Level.OK, "no limit")
    figure = f"{readable_size(found.tightest)} ({found.tightest_group})"
    return _ok_or(Level.WARN, found.tightest >= _RECOMMENDED_MEMORY, figure)


def _huge_pages() -> Finding:
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    mode, shmem = (
        next((word[1:-1] for word in kernel_text(folder / name).split() if word.startswith("[")), "unknown")
        for name in ("enabled", "shmem_enabled")
    )
    reserved = kernel_text(Path("/proc/sys/vm/nr_hugepages")) or "0"
    good = reserved != "0" or shmem in ("always", "within_size", "advise", "force")
    return _ok_or(Level.WARN, good, f"{reserved} reserved; transparent: {mode}, for shared memory: {shmem}")


def _numa() -> Finding:
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    cores = len(os.sched_getaffinity(0))
    found = f"{count_text(max(1, len(nodes)), 'node')}, {count_text(cores, 'core')} for this process"
    return _ok_or(Level.WARN, len(nodes) <= 1, found)


def _clock() -> Finding:
    now = time.time()
    source = (
        kernel_text(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")) or "unknown"
    )
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC, clock source {source}"
    if now < _YEAR_2026:
        return Finding(Level.FAIL, found, "set it: ages of objects and certificates depend on it")
    return _ok_or(Level.WARN, _synchronised(), found)


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
    return _ok_or(
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


def _calibrations() -> Iterator[Finding]:
    """Yield a finding for each calibration file of this user (the measured choice of copy methods on a GPU).

    If there is a GPU but no file, the only finding says how to calibrate.
    """
    # Imported here, because other verbs do not need it.
    from tiercache.transfer.cuda import calibration_directory, read_calibration

    # A damaged file is reported below, so the log line about it is not printed.
    logging.getLogger("tiercache.transfer.cuda").addHandler(logging.NullHandler())
    paths = sorted(calibration_directory().glob("calibration-*.json"))
    for path in paths:
        known = read_calibration(path)
        if known is None or not known.cells:
            yield Finding(Level.WARN, f"{path} is no calibration")
        else:
            yield Finding(Level.OK, f"{known.card}: {_choices(known)}; kept in {path}")
    if _driver() and not paths:
        found = "not calibrated yet; the first worker or `tiercache bench device` does it in about a second"
        yield Finding(Level.OK, f"{found}, and keeps the result in {calibration_directory()}")


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


def _engines() -> Finding:
    there = {name: installed(name) for name in _ENGINES}
    text = ", ".join(f"{name} {found}" for name, found in there.items() if found)
    return Finding(Level.OK, text or "none installed; a daemon does not need one")


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else readable_size(value)


def _file_system(directory: Path) -> Finding:
    kind = file_system_of(directory)
    found = f"{kind} at {directory}"
    if kind in _NETWORK:
        fix = "use a local disk: LMDB's locks and memory maps do not work over a network"
        return Finding(Level.FAIL, found, fix)
    fix = "use a disk: this is memory, which a reboot empties, and which the host tier could use"
    return _ok_or(Level.WARN, kind not in _IN_MEMORY, found, fix)


def file_system_of(directory: Path) -> str:
    """Return the kernel's name for the type of the file system of `directory`, or "unknown"."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for row in kernel_text(Path("/proc/self/mountinfo")).splitlines():
        fields = row.split()
        if fields[2:3] == [wanted] and "-" in fields:
            return fields[fields.index("-") + 1]
    return "unknown"


def _space(directory: Path) -> Finding:
    found = os.statvfs(directory)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    used = 1 - free / size if size else 0.0
    level = Level.FAIL if free < _MIN_SPACE else Level.WARN
    text = f"{readable_size(free)} free of {readable_size(size)}"
    return _ok_or(level, free >= _RECOMMENDED_SPACE and used <= _FULL, text)


def _past_page_cache(directory: Path) -> Finding:
    if not os.access(directory, os.W_OK | os.X_OK):
        fix = "run this as the store's user, or make the directory writable for this user"
        return Finding(Level.FAIL, f"{directory} cannot be written", fix)
    try:
        with _unnamed_file(directory) as fd:
            return _direct(directory, fd)
    except OSError as error:
        fix = "free space, or choose another disk"
        return Finding(Level.FAIL, f"no file can be made in {directory}: {error.strerror}", fix)


def _direct(directory: Path, fd: int) -> Finding:
    fix = (
        "put the store on ext4 or xfs, because on this file system it must use the page cache"
        f" ({file_system_of(directory)})"
    )
    try:
        # Not by `Env.open`, which refuses links: the unnamed file has no other path.
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            moved = moves_direct(Env(), direct)
        finally:
            os.close(direct)
    except OSError as error:
        return Finding(Level.WARN, f"refused: {error.strerror}", fix)
    return _ok_or(Level.WARN, moved, "works" if moved else "moves less than a block", fix)


def _page_cache(directory: Path) -> Iterator[Finding]:
    with suppress(OSError), _unnamed_file(directory) as fd:
        try:
            cached_bytes(fd, 0, BLOCK_ALIGN)
        except OSError as error:
            yield Finding(Level.WARN, f"cannot be queried: {error.strerror}")
        else:
            way = "cachestat" if kernel_version() >= (6, 5) else "mincore"
            yield Finding(Level.OK, f"can be queried ({way})")


@contextmanager
def _unnamed_file(directory: Path) -> Iterator[int]:
    """Open an unnamed file of one 4 KiB page, so that the directory does not change.

    Where O_TMPFILE is not supported, a named file is created and unlinked at once.
    """
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


def _shared_store(url: str) -> Iterator[Finding]:
    section = section_of(url)
    kind = section["type"]
    settings, place = f"{kind} settings", f"{kind} {SHARED[kind]}"
    if kind == "s3":
        section.pop("capacity", None)  # without it, opening the store writes nothing
    try:
        check_backend(section)
    except ConfigError as error:
        yield Finding(Level.FAIL, *_halves(error), settings)
        return
    yield Finding(Level.OK, clean(url.partition("?")[0]), name=settings)
    try:
        with open_backend(section) as opened:
            opened.exists([ObjectKey(PoolName.KV, bytes(DIGEST_BYTES))])
            found = opened.usage()
            listed = opened.capabilities.listed
            told = opened.watch(lambda digests, stored: None)
    except StorageError as error:
        yield Finding(Level.FAIL, *_halves(error), place)
        return
    holds = (
        f"{found.objects:,} objects, {readable_size(found.used_bytes)}"
        if listed
        else f"it answers, but {clean(str(found.details.get('unlisted', 'it cannot list its objects')))}"
    )
    yield Finding(Level.OK, holds, name=place)
    silent = f"none: a {kind} store loses objects without a word"
    yield Finding(Level.OK, "told" if told else silent, name="KV events")


def _halves(error: Exception) -> tuple[str, str]:
    """Return what a message says is wrong, and what it says to do."""
    wrong, _, advice = clean(str(error)).rpartition("; ")
    return (wrong, advice) if wrong else (advice, "see the message")


CHECKS: Final = (
    Check("python", Needs.MACHINE, _python, "use Python 3.11 or newer"),
    Check("packages", Needs.MACHINE, _packages),
    Check("import name", Needs.MACHINE, _foreign_packages),
    Check(
        "kernel", Needs.MACHINE, _kernel,
        "use Linux 6.5 or newer, which reports what is in the page cache without mapping the file",
    ),
    Check("memfd", Needs.MACHINE, _memfd, "allow memfd_create in the sandbox; /dev/shm is not needed"),
    Check(
        "memlock", Needs.MACHINE, _memlock,
        "raise it if you register host memory with RDMA: ulimit -l unlimited, or LimitMEMLOCK=infinity; CUDA"
        " does not need it",
    ),
    Check(
        "open files", Needs.MACHINE, _open_files,
        "raise it to 4096 or more: ulimit -n, or LimitNOFILE=; a slab needs two open files, a client one",
    ),
    Check(
        "memory", Needs.MACHINE, _memory,
        "free some memory: the host arena is pinned at its full size",
    ),
    Check(
        "cgroup memory", Needs.MACHINE, _cgroup,
        "raise the container's memory: the host arena and the page cache that it fills count towards it",
    ),
    Check(
        "huge pages", Needs.MACHINE, _huge_pages,
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    ),
    Check(
        "NUMA", Needs.MACHINE, _numa,
        "start each worker on the node of its GPU: numactl --cpunodebind=N --membind=N",
    ),
    Check(
        "clock", Needs.MACHINE, _clock,
        "start a time service such as chrony, because none synchronises the clock",
    ),
    Check("GPU", Needs.MACHINE, _gpu),
    Check(
        "copies", Needs.MACHINE, _calibrations,
        "remove it; the next worker on that GPU calibrates again",
    ),
    Check("engines", Needs.MACHINE, _engines),
    Check("file system", Needs.DIRECTORY, _file_system),
    Check("disk space", Needs.DIRECTORY, _space, "free some, or lower the store's capacity"),
    Check("O_DIRECT", Needs.DIRECTORY, _past_page_cache),
    Check(
        "page cache", Needs.DIRECTORY, _page_cache,
        "allow the system call cachestat or mincore in the sandbox; without them the store never bypasses the"
        " page cache",
    ),
    Check("shared store", Needs.SHARED_STORE, _shared_store),
    Check("secrets", Needs.FILES, check_files),
    Check("certificates", Needs.FILES, check_certificates),
    Check("directories", Needs.SETTINGS, readiness.check_directories),
    Check("sockets", Needs.SETTINGS, readiness.check_sockets),
    Check("store", Needs.SETTINGS, readiness.check_store),
    Check("intent", Needs.SETTINGS, warnings),
    Check("memory needed", Needs.SETTINGS, readiness.check_memory),
    Check("quotas", Needs.SETTINGS, readiness.check_quotas),
    Check("ports", Needs.PORTS, readiness.check_ports),
)  # fmt: skip
"""All checks, in the order in which they are made."""


def findings(about: Mapping[Needs, Any]) -> Iterator[Finding]:
    """Make the checks that need what is given.

    Raises the ConfigError (for a wrong setting) or the StorageError (for a condition of this machine) of the
    first check that raises one.
    """
    for check in CHECKS:
        if check.needs in about:
            made = check.make(*([] if check.needs is Needs.MACHINE else [about[check.needs]]))
            for one in [made] if isinstance(made, Finding) else made or ():
                found = one if isinstance(one, Finding) else Finding(Level.WARN, one)
                fix = "" if found.level is Level.OK else found.fix or check.fix
                yield replace(found, name=found.name or check.name, fix=fix)


def warnings_about(settings: Any, *, files: bool = True, ports: bool = True) -> list[str]:
    """Return warnings about a configuration; raise as `findings` does if it cannot be served here now."""
    wanted = {Needs.FILES: files, Needs.SETTINGS: True, Needs.PORTS: ports}
    found = findings({needs: settings for needs, is_wanted in wanted.items() if is_wanted})
    return [one.found for one in found if one.level is Level.WARN]
