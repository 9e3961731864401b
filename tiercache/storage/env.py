"""Every disk and clock call that a store makes.

A store is handed an `Env` and calls nothing of `os` or `time` itself, so that a test can hand it `tiercache.testing.FaultEnv` instead and
decide what the disk does. Nothing is ever patched.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tiercache.storage.pagecache import cached_bytes


class Transaction(Protocol):
    """A catalog's transaction, as far as `Env` needs it."""

    def commit(self) -> None:
        """Make the transaction's changes durable."""


class Env:
    """Real calls of the operating system. Each raises OSError like the call that it names.

    `open`, `lstat`, `unlink` and `rename` do not follow a symbolic link in the last part of a path; `chmod`, `listdir` and `statvfs` do.

    Thread safety: stateless; share it freely.
    """

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file; return a new descriptor, which is closed on exec."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into `buffers`, in order; return the bytes read, fewer at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write from `buffers`, in order; return the bytes written, perhaps fewer than given."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """Return once the file's data is on the medium."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """Return once a file, or the entries of a directory, are on the medium."""
        os.fsync(fd)

    def forget(self, fd: int, offset: int, length: int) -> None:
        """Drop a range from the page cache, so that the next read comes from the medium."""
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    def cached(self, fd: int, offset: int, length: int) -> bool:
        """Return whether all of a range of whole pages is in the page cache now. This brings nothing into the cache."""
        return cached_bytes(fd, offset, length) == length

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve disk space for these bytes of the file, so that writing them cannot run out of space."""
        os.posix_fallocate(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        """Cut or extend a file."""
        os.ftruncate(fd, length)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory, atomically, over a file that is there."""
        os.rename(source, target)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        """Make a directory."""
        os.mkdir(path, mode)

    def chmod(self, path: str, mode: int) -> None:
        """Set the permissions of a file or directory."""
        os.chmod(path, mode)

    def listdir(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        return sorted(os.listdir(path))

    def lstat(self, path: str) -> os.stat_result:
        """Return the status of what is at a path; a symbolic link is reported as such."""
        return os.lstat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """Return the status of an open descriptor."""
        return os.fstat(fd)

    def statvfs(self, path: str) -> os.statvfs_result:
        """Return the file system's sizes."""
        return os.statvfs(path)

    def try_lock(self, fd: int) -> bool:
        """Take the exclusive lock of an open file; return False where another open file has it, in this process or another."""
        return _flock(fd, fcntl.LOCK_EX)

    def try_share(self, fd: int) -> bool:
        """Take the shared lock of an open file, or turn an exclusive lock into it; return False where another has the exclusive one."""
        return _flock(fd, fcntl.LOCK_SH)

    def unlock(self, fd: int) -> None:
        """Give up the lock of an open file, also for descriptors of it that a forked process inherited."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def commit(self, transaction: Transaction) -> None:
        """Commit a catalog's transaction. This is the one place where a database, and not this class, writes."""
        transaction.commit()

    def run(self, arguments: Sequence[str], timeout: float) -> int:
        """Run a child process; return its exit status, negative where a signal ended it or it ran past `timeout` seconds."""
        try:
            # The caller passes its own interpreter and its own file: nothing here comes from a user.
            return subprocess.run(arguments, stdin=subprocess.DEVNULL, timeout=timeout, check=False).returncode  # noqa: S603
        except subprocess.TimeoutExpired:
            return -1

    def boot_id(self) -> str:
        """Return a text that changes with every boot of the machine; empty where the system has none."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""

    def getpid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def time_ns(self) -> int:
        """Return wall-clock nanoseconds since 1970."""
        return time.time_ns()

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let this thread wait for `seconds`."""
        time.sleep(seconds)


def let_go(env: Env, fd: int) -> None:
    """Close a descriptor on which nothing is pending, and ignore errors.

    The descriptor is gone even where the call reports an error, and closing it again would be a bug.
    """
    with suppress(OSError):
        env.close(fd)


def _flock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
