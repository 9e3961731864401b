"""The verb `tiercache doctor`: checks of this machine and of a store's disk, with advice.

Nothing is left behind: a disk is checked with an unnamed file. `readiness` has the checks of a configuration.
"""

from __future__ import annotations

import ctypes
import enum
import fcntl
import mmap
import os
import platform
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import mkstemp
from typing import Any, Final, TypeVar

import typer

from tiercache.cli.store.selection import StoreOption
from tiercache.cli.store.target import DEFAULT_DIRECTORY, LIVE
from tiercache.cli.terminal import (
    Exit,
    Output,
    OutputOption,
    clean,
    console,
    count_text,
    records,
    safe,
    table,
)
from tiercache.config.urls import section_of
from tiercache.core import BLOCK_ALIGN
from tiercache.errors import ConfigError, install_line
from tiercache.memory import create_memfd, kernel_text, read_memory
from tiercache.storage.env import Env, cached_bytes, moves_direct
from tiercache.storage.registry import backend_type
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
_MIN_KERNEL: Final = (5, 1)
"""The first Linux kernel with F_SEAL_FUTURE_WRITE: (major, minor)."""
_CACHESTAT_KERNEL: Final = (6, 5)
"""The first Linux kernel with the system call cachestat: (major, minor)."""
_RECOMMENDED_MEMORY: Final = 1 << 30
"""Bytes of available memory; with fewer the check warns."""
_MIN_FILES, _RECOMMENDED_FILES = 256, 4096
"""Numbers of open files: the check fails if the soft limit is below the first, and warns below the second."""


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


@MACHINE.add("packages")
def _packages() -> Finding:
    there = {name: installed(name) for name in _PACKAGES}
    missing = [name for name, found in there.items() if not found]
    there |= {name: installed(name) for name in _OPTIONAL_PACKAGES}
    python = f"{platform.python_implementation()} {platform.python_version()}"
    text = ", ".join([python, *(f"{name} {found}" for name, found in there.items() if found)])
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
    most = "no limit" if hard == resource.RLIM_INFINITY else readable_size(hard)
    return Finding(Level.WARN, f"{readable_size(soft)} (at most {most})")


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


@MACHINE.add(
    "memory",
    "free some memory, or raise the container's: the host arena is pinned at its full size, and with the page"
    " cache that it fills it counts towards the container's limit",
)
def _memory() -> Finding:
    found = read_memory()
    usable = found.usable or 0
    text = f"{readable_size(usable)} available of {readable_size(found.ceiling or 0)}"
    if found.tightest is not None:
        text += f", with the limit of {found.tightest_group}"
    return ok_or(Level.WARN, usable >= _RECOMMENDED_MEMORY, text)


@MACHINE.add("huge pages", "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled")
def _huge_pages() -> Finding:
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    mode, shmem = (
        next((word[1:-1] for word in kernel_text(folder / name).split() if word.startswith("[")), "unknown")
        for name in ("enabled", "shmem_enabled")
    )
    good = shmem in ("always", "within_size", "advise", "force")
    return ok_or(Level.WARN, good, f"transparent: {mode}, for shared memory: {shmem}")


@MACHINE.add("NUMA", "start each worker on the node of its GPU: numactl --cpunodebind=N --membind=N")
def _numa() -> Finding:
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    cores = len(os.sched_getaffinity(0))
    found = f"{count_text(max(1, len(nodes)), 'node')}, {count_text(cores, 'core')} for this process"
    return ok_or(Level.WARN, len(nodes) <= 1, found)


@MACHINE.add("GPU")
def _gpu() -> Finding:
    driver = kernel_text(Path("/proc/driver/nvidia/version")).partition("\n")[0]
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


_COLOURS: Final = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
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
DISK: Final = Checks()
"""Checks of the disk of a directory that exists."""


@DISK.add("file system")
def _file_system(directory: Path) -> Finding:
    kind = file_system_of(directory)
    found = f"{kind} at {directory}"
    if kind in _NETWORK:
        fix = "use a local disk: LMDB's locks and memory maps do not work over a network"
        return Finding(Level.FAIL, found, fix)
    fix = "use a disk: this is memory, which a reboot empties, and which the host tier could use"
    return ok_or(Level.WARN, kind not in _IN_MEMORY, found, fix)


def file_system_of(directory: Path) -> str:
    """Return the kernel's name for the type of the file system of `directory`, or "unknown"."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for row in kernel_text(Path("/proc/self/mountinfo")).splitlines():
        fields = row.split()
        if fields[2:3] == [wanted] and "-" in fields:
            return fields[fields.index("-") + 1]
    return "unknown"


@DISK.add("disk space", "free some, or lower the store's capacity")
def _space(directory: Path) -> Finding:
    found = os.statvfs(directory)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    used = 1 - free / size if size else 0.0
    level = Level.FAIL if free < _MIN_SPACE else Level.WARN
    text = f"{readable_size(free)} free of {readable_size(size)}"
    return ok_or(level, free >= _RECOMMENDED_SPACE and used <= _FULL, text)


@DISK.add("O_DIRECT")
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
    return ok_or(Level.WARN, moved, "works" if moved else "moves less than a block", fix)


@DISK.add(
    "page cache",
    "allow the system call cachestat or mincore in the sandbox; without them the store never bypasses the"
    " page cache",
)
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


def doctor(store: StoreOption = "", output: OutputOption = Output.TABLE) -> None:
    """Check this machine: kernel, memory, the store's disk, GPU and engines. Exit code 6 if anything fails.

    No store is opened, and nothing is left behind: the disk is checked with an
    unnamed file, and the store need not be there yet. Whether a configuration
    can be served, says `config check`; whether an s3 or mooncake store answers,
    `status`.

        tiercache doctor

        tiercache doctor -s /var/lib/tiercache -o json

    JSON fields of each check: name, level (ok, warn or fail), found, fix (empty
    if the level is ok).
    """
    found = [*MACHINE.findings(), *DISK.findings(_directory_of(store))]
    if output is Output.TABLE:
        _print(found)
    else:
        records((one.record() for one in found), output)
    if any(one.level is Level.FAIL for one in found):
        raise typer.Exit(Exit.NO)


def _directory_of(store: str) -> Path:
    """Return the directory whose disk is checked; raises ConfigError if there is none."""
    kind = store.partition("://")[0] if "://" in store else ""
    path = store
    if kind and kind != LIVE:
        backend_type(store)  # raises for a type that there is not
        path = section_of(store).get("path", "")
        if not path:
            shown = clean(store.partition("?")[0])
            raise ConfigError(
                f"--store {shown} has no directory; name the one to be checked, or call `tiercache status`"
            )
    if not store or kind == LIVE:  # the disk of a daemon may be that of another machine
        default = Path(DEFAULT_DIRECTORY)
        return default if default.is_dir() else Path.cwd()
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"--store {clean(str(directory))} is not a directory; name the directory where the store is or"
            " will be"
        )
    return directory.resolve()


def _print(found: list[Finding]) -> None:
    shown = table(("check", "", "found", "what to do"), left=("check", "", "found", "what to do"))
    for one in found:
        colour = _COLOURS[one.level]
        shown.add_row(one.name, f"[{colour}]{one.level}[/]", safe(one.found), safe(one.fix))
    to = console()
    to.print(shown)
    to.print(
        ", ".join(f"{sum(one.level is level for one in found)} {level}" for level in Level), markup=False
    )
