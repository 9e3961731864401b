"""Every disk and clock call that a store makes.

A store calls the methods of its `Env`, and never `os` or `time`. A test can therefore make disk calls fail
without patching anything: it gives the store a `tiercache.testing.FaultEnv`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from mmap import MAP_SHARED, PAGESIZE, PROT_READ, PROT_WRITE, mmap
from typing import Final, Protocol

from tiercache.core import BLOCK_ALIGN

IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
"""Largest number of buffers that one `preadv` or `pwritev` takes (Linux: 1024)."""
_CACHESTAT: Final = 451
"""Number of the system call `cachestat`, the same on x86-64 and on arm64."""
# struct cachestat_range: offset and length in bytes. struct cachestat: five counts of pages; the first count
# is the number of cached pages.
_Range: Final = ctypes.c_uint64 * 2
_Statistics: Final = ctypes.c_uint64 * 5
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Committable(Protocol):
    """The part of a catalog's transaction that `Env.commit` needs."""

    def commit(self) -> None:
        """Make the transaction's changes durable."""


class Env:
    """Real calls of the operating system. Each method raises OSError if its call fails.

    `open`, `lstat`, `unlink` and `rename` do not follow a symbolic link in the last part of a path; `chmod`,
    `listdir`, `realpath` and `statvfs` do.

    Thread safety: stateless; share it freely.
    """

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Open a file; return a new descriptor, which is closed on exec."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into `buffers`, in order; return the number of bytes read (fewer at the end of the file)."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write from `buffers`, in order; return the number of bytes written, perhaps fewer than given."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """Return once the file's data is on the medium."""
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        """Return once a file, or the entries of a directory, are on the medium."""
        os.fsync(fd)

    def cached(self, fd: int, offset: int, length: int) -> bool:
        """Return whether a range of whole 4 KiB pages is completely in the page cache now.

        The call reads nothing into the cache.
        """
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
        """Move a file or directory atomically; an existing target file is replaced."""
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

    def realpath(self, path: str) -> str:
        """Return a path with all symbolic links followed, as far as they can be."""
        return os.path.realpath(path)

    def lstat(self, path: str) -> os.stat_result:
        """Return the status of a path; for a symbolic link, the status of the link itself."""
        return os.lstat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """Return the status of an open descriptor."""
        return os.fstat(fd)

    def statvfs(self, path: str) -> os.statvfs_result:
        """Return the file system's sizes."""
        return os.statvfs(path)

    def try_lock(self, fd: int) -> bool:
        """Try to take the exclusive lock of a file.

        The lock belongs to the opened file, not to the process. Returns False if the same file is locked
        through another `open`, in this process or another.
        """
        return _flock(fd, fcntl.LOCK_EX)

    def try_share(self, fd: int) -> bool:
        """Try to take the shared lock of a file, or to turn the exclusive lock into the shared lock.

        Returns False if the exclusive lock was taken through another `open` of the same file.
        """
        return _flock(fd, fcntl.LOCK_SH)

    def unlock(self, fd: int) -> None:
        """Give up the lock of a file, even if a forked process still has a copy of the descriptor."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def commit(self, transaction: Committable) -> None:
        """Commit a catalog's transaction.

        LMDB writes its own file here. All other writes go through the other methods of this class.
        """
        transaction.commit()

    def run(self, arguments: Sequence[str], timeout: float) -> int:
        """Run a child process, and return its exit status.

        The status is negative if a signal ended the process, or if the process was killed because it ran
        longer than `timeout` seconds.
        """
        try:
            # The caller passes its own interpreter and its own file: nothing here comes from a user.
            return subprocess.run(  # noqa: S603
                arguments, stdin=subprocess.DEVNULL, timeout=timeout, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return -1

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
        """Suspend this thread for `seconds`."""
        time.sleep(seconds)


def close_quietly(env: Env, fd: int) -> None:
    """Close a descriptor, ignoring errors; the caller guarantees that no write is pending.

    Linux closes the descriptor even if the call reports an error. A second call could close a file that
    another thread has opened meanwhile under the same number.
    """
    with suppress(OSError):
        env.close(fd)


def write_all(env: Env, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write every byte of `buffers` at `offset`; return the number of bytes. Raises OSError if that fails."""
    left = list(buffers)
    start = offset
    while left:
        done = env.pwritev(fd, left[:IOV_MAX], offset)
        if done <= 0:
            raise OSError(errno.EIO, "the disk took no bytes")
        offset += done
        left = _after(left, done)
    return offset - start


def read_all(env: Env, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill `buffers` with the bytes of a file from `offset` on; return the number of bytes read.

    The number is smaller than the size of the buffers only at the end of the file. Raises OSError.
    """
    left = list(buffers)
    start = offset
    while left:
        done = env.preadv(fd, left[:IOV_MAX], offset)
        if done <= 0:
            break
        offset += done
        left = _after(left, done)
    return offset - start


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Return `buffers` without their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[index + 1 :]] if done else buffers[index:]
        done -= buffer.nbytes
    return []


def moves_direct(env: Env, fd: int) -> bool:
    """Return whether a file opened with O_DIRECT can be written and read; overwrite its first 4 KiB.

    Raises OSError if a call fails.
    """
    block = memoryview(mmap(-1, BLOCK_ALIGN))  # O_DIRECT needs aligned memory; a mapping begins on a page
    return env.pwritev(fd, [block], 0) == env.preadv(fd, [block], 0) == BLOCK_ALIGN


def cached_bytes(fd: int, offset: int, length: int) -> int:
    """Return how many bytes of a range of whole 4 KiB pages are in the page cache, and change nothing there.

    This calls `cachestat` (Linux 6.5). Where `cachestat` is not possible, it calls `mincore` on a mapping
    that is never read. `preadv2` with RWF_NOWAIT would change the cache: the kernel starts to read a missing
    page, and brings in pages that were never written. Raises OSError.
    """
    found = _Statistics()
    failed = _libc.syscall(
        ctypes.c_long(_CACHESTAT),
        ctypes.c_uint(fd),
        ctypes.byref(_Range(offset, length)),
        ctypes.byref(found),
        0,
    )
    if not failed:
        return int(found[0]) * PAGESIZE
    number = ctypes.get_errno()
    # cachestat is not possible here: an older kernel, a sandbox, or a file system without support.
    if number in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
        return mincore_bytes(fd, offset, length)
    raise OSError(number, os.strerror(number))


def mincore_bytes(fd: int, offset: int, length: int) -> int:
    """Return the same as `cached_bytes`, by `mincore` alone."""
    pages = (ctypes.c_ubyte * (length // PAGESIZE))()
    with mmap(fd, length, MAP_SHARED, PROT_READ | PROT_WRITE, offset=offset) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        try:
            if _libc.mincore(ctypes.byref(start), ctypes.c_size_t(length), pages):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            del start  # a mapping cannot be closed while an object is exported from its buffer
    return sum(page & 1 for page in pages) * PAGESIZE  # bit 0 of each byte: the page is in the page cache


def _flock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
