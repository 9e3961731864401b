"""The LMDB environment of a store: its transactions, the lock of its writers, its limits, and its failures.

A process has at most one open environment per directory. Failures of LMDB become OSErrors here.

In these files "page" means an LMDB page where limits are concerned. LMDB never overwrites a page: a
transaction copies each page that it changes, and gives up the old copy. Two transactions later LMDB can use
the old page again. If a reader began before that page was given up, LMDB has to wait until the reader ends.

When the map is full, even deletions fail, because they change pages too. Therefore a part of the map, the
reserve, is never filled with objects. Transactions take their new pages from the reserve while given-up pages
cannot be used yet. One transaction changes less than half as many pages as the reserve has. It may change
more if much of the map is free, or if a single object needs more.
"""

from __future__ import annotations

import logging
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EAGAIN, EDQUOT, EIO, ENOSPC, ESTALE
from threading import Lock
from typing import Any, Final, TypeVar

import lmdb

from tiercache.core import Outcome
from tiercache.errors import ClosedError, StorageError
from tiercache.storage.env import Env, close_quietly
from tiercache_backends.local.failures import DamagedError, FileLength, PutAsideError, os_error

T = TypeVar("T")
_log = logging.getLogger(__name__)

_READERS: Final = 1024
"""Slots for read transactions of all processes together; a slot takes 64 bytes of the lock file."""
_SPARE: Final = 8
"""Number of ended read transactions that the LMDB binding keeps for reuse."""
_DATABASES: Final = ("objects", "parts", "ages", "namespaces", "facts")
_FAILURES: Final = (lmdb.Error, SystemError)
"""Exceptions that a call of LMDB raises; its binding raises SystemError for entries of impossible sizes."""
_MET: Final = (*_FAILURES, struct.error, DamagedError, PutAsideError)
"""Exceptions of a transaction; struct.error comes of an entry of a wrong length."""
_open: Final[set[tuple[int, int, int]]] = set()
"""Process id, device and inode of each environment that is open in this process.

LMDB's own locks do not work between two openers of one environment in the same process.
"""
_open_lock: Final = Lock()
BATCH_BYTES: Final = 8 << 20
"""Maximum bytes that one transaction changes, unless a single object needs more."""
_BATCH_OBJECTS: Final = 256
"""Maximum number of objects that one transaction removes or touches."""
_RESERVE_SHARE: Final = 18
"""Divisor of the map's pages: one page in 18 belongs to the reserve."""
_BURST_SHARE: Final = 4 / 9
"""Share of the reserve that one transaction may change, so that two transactions fit in the reserve.

Two such shares leave a ninth of the reserve unused. This ninth makes up for free pages that cannot be used,
because too few of them are adjacent.
"""
_MIN_RESERVE: Final = 24
"""Minimum number of pages in the reserve."""
_LOWER_LIMITS: Final = 5
"""Number of reduced limits on the pages in use, which a write tries in turn if too few pages are free."""
MAX_WAIT_SECONDS: Final = 5.0
"""Seconds that a writer waits for other writers before it gives up."""
_MAX_WAIT_AFTER_TIMEOUT_SECONDS: Final = 0.05
"""Seconds that a writer waits if the previous wait of this process was in vain."""
_PAUSE_SECONDS: Final = 0.0001, 0.0005
"""First and longest pause, in seconds, between two tries for the lock. Each pause is twice the one before."""
_KINDS: Final = {ENOSPC: "full", EDQUOT: "full", EAGAIN: "busy"}
"""Names by errno of the failures that may pass: a full disk or map, and a lock that is held too long."""


class MapFullError(OSError):
    """LMDB found no free pages, or not enough adjacent free pages; the transaction is undone.

    A page that a reader may still need is not free.
    """


class WriterLock:
    """Lock for writers, a context manager: only one thread of all processes holds the lock at a time.

    LMDB's own lock is a robust mutex in shared memory, which can lose a wake-up:

        1. Processes B and C sleep on the mutex. A releases the mutex, and the kernel wakes B.
        2. Process D takes the mutex before B runs.
        3. B is killed before it takes the mutex or sleeps again.
        4. D releases the mutex, no process is woken, and C sleeps for ever.

    In a test with four writers, one of which was killed, this happened in one of forty runs. A file lock
    (flock) cannot lose a waiter in this way. So a writer takes the file lock first, and then always finds
    LMDB's mutex free. A thread can also give up waiting for a file lock, which is necessary if the process
    that holds the lock is stopped.

    Lock order: first the lock between the threads of this process (`_ours`), then the file lock.

    Entering the context raises OSError; its errno is EAGAIN after too long a wait.

    Thread safety: any thread may enter; a thread that is inside must not enter again.
    """

    def __init__(self, env: Env, path: str) -> None:
        self._env = env
        self._path = path
        self._ours = Lock()
        self._fd = -1
        self._timed_out = False

    def __enter__(self) -> None:
        max_wait = _MAX_WAIT_AFTER_TIMEOUT_SECONDS if self._timed_out else MAX_WAIT_SECONDS
        if not self._ours.acquire(timeout=max_wait):
            raise self._busy()
        try:
            self._wait(max_wait)
        except BaseException:
            self._ours.release()
            raise

    def __exit__(self, *exc: object) -> None:
        # Unlock before closing: a forked child may have a copy of the descriptor, which would keep the lock.
        with suppress(OSError):
            self._env.unlock(self._fd)
        close_quietly(self._env, self._fd)
        self._ours.release()

    def _wait(self, max_wait: float) -> None:
        # Each use of the lock opens a descriptor of its own, which `__exit__` unlocks and closes.
        self._fd = self._env.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            deadline = self._env.monotonic() + max_wait
            pause, longest = _PAUSE_SECONDS
            while not self._env.try_lock(self._fd):
                if self._env.monotonic() > deadline:
                    self._timed_out = True
                    raise self._busy()
                self._env.sleep(pause)
                pause = min(longest, 2 * pause)
            self._timed_out = False
        except BaseException:
            close_quietly(self._env, self._fd)
            raise

    def _busy(self) -> OSError:
        return OSError(EAGAIN, f"{self._path} is held by another writer, which makes no progress")


@dataclass(frozen=True, slots=True)
class PageBudget:
    """Limits for a file of `map_pages` LMDB pages.

        0                                        limit                map_pages
        |----------- may be in use --------------|----- reserve -------|
                                     |<- slack ->|

    `slack` is the number of pages that an eviction frees in addition to the pages that are needed now.

    Two transactions in a row may each change nearly half of the reserve. The third transaction can use the
    pages that the first gave up.
    """

    map_pages: int
    """Number of pages of the whole map; fewer if the disk had no room for the whole map."""
    page_bytes: int
    """Size of one page in bytes."""
    is_short: bool = False
    """Whether these are the pages that the file has on a full disk."""

    @property
    def reserve(self) -> int:
        """Pages that stay free, for use while given-up pages are not usable yet: 5.6 %, and at least 24."""
        return max(_MIN_RESERVE, self.map_pages // _RESERVE_SHARE)

    @property
    def limit(self) -> int:
        """Maximum number of pages in use."""
        return self.map_pages - self.reserve

    @property
    def lower_limits(self) -> list[int]:
        """Limits on the pages in use, in falling order, to try if `limit` leaves too few pages free."""
        return [self.limit - self.reserve * step for step in range(1, _LOWER_LIMITS + 1)]

    @property
    def slack(self) -> int:
        """Pages that an eviction frees beyond the need, so that the next sets need not evict."""
        return self.map_pages // 256

    @property
    def changes(self) -> int:
        """Maximum number of objects that one transaction may remove or touch."""
        return max(8, min(_BATCH_OBJECTS, self.reserve // 6))

    def burst(self, used: int) -> int:
        """Return the number of pages that one transaction may change while `used` pages are in use.

        A transaction for a single object may change more pages.
        """
        # A quarter of the free pages, but at least the share of the reserve, and at most 8 MiB.
        least = int((self.reserve - self.slack) * _BURST_SHARE)
        return min(BATCH_BYTES // self.page_bytes, max(least, (self.map_pages - used) // 4))


class Environment:
    """Open LMDB environment, whose failures are OSErrors.

    In a forked child every transaction raises ClosedError.

    `map_bytes`: size of the map; 0 means the size that the last writer stored in the file. `last_sync`: each
    commit also syncs LMDB's head page, so that the last transaction survives a power cut. `read_only`: no
    call changes the environment. `alone`: no other process has the environment open. With both `read_only`
    and `alone`, LMDB's lock file is not used.

    Thread safety: any thread may call. Of all processes one thread writes at a time; readers never wait.
    """

    def __init__(
        self,
        env: Env,
        path: str,
        map_bytes: int,
        *,
        last_sync: bool,
        read_only: bool = False,
        alone: bool = False,
    ) -> None:
        self._env = env
        self._pid = env.getpid()
        self._writer_lock = WriterLock(env, os.path.join(path, "WRITER"))
        self._last_sync = last_sync
        self.read_only: Final = read_only
        self._lock = not (read_only and alone)
        self.path: Final = path
        self.is_broken = False
        """Whether LMDB must be opened again: damage was met, or the environment is of no more use."""
        self.is_damaged = False
        """Whether an entry or a page was met that is not as it was written."""
        self._claim()
        try:
            self._open(map_bytes)
        except BaseException:
            self._close_files()
            raise

    def _open(self, map_bytes: int) -> None:
        self._kept = 0
        """Number of LMDB pages, counted from the file's start, that `reserve` has allocated on the disk."""
        try:
            self._lmdb = lmdb.open(
                self.path,
                map_size=map_bytes,
                max_dbs=len(_DATABASES),
                max_readers=_READERS,
                max_spare_txns=_SPARE,
                mode=0o600,
                metasync=self._last_sync,
                readonly=self.read_only,
                lock=self._lock,
                create=not self.read_only,
            )
        except _FAILURES as error:
            raise self._os_error(error) from error
        try:
            self._length = FileLength(self._env, os.path.join(self.path, "data.mdb"), self._lmdb)
        except BaseException:
            self._lmdb.close()
            raise
        try:
            found = self._present() if self.read_only else self.write(self._databases)
            self.objects, self.parts, self.ages, self.names, self.facts = found
            self.page_bytes: int = self._lmdb.stat()["psize"]
            self._map_is(int(self._lmdb.info()["map_size"]))
        except BaseException:
            self._length.close()
            self._lmdb.close()
            raise

    def _map_is(self, map_bytes: int) -> None:
        self.map_bytes = map_bytes
        """Size of the map in bytes."""
        self.budget = PageBudget(map_bytes // self.page_bytes, self.page_bytes)
        """Limits for the whole map."""

    def reopen(self, between: Callable[[], None]) -> None:
        """Close LMDB, call `between`, and open what lies at the path then.

        The caller guarantees that no transaction is under way. Raises OSError; LMDB may be closed then, and
        every other call raises OSError until the next `reopen`.
        """
        self._length.close()
        self._lmdb.close()
        self._close_files()
        between()
        self._claim()
        self._open(self.map_bytes)
        self.is_damaged = False

    def read(self, work: Callable[[Any], T]) -> T:
        """Run `work` in a read transaction, and return its result. Raises OSError.

        `work` must be brief, because LMDB reuses no given-up pages while `work` runs. The values that `work`
        reads are views of the map. Do not use these views after the transaction.
        """
        self._check_process()
        try:
            self._length.check()
            with self._begin() as txn:
                return work(txn)
        except _MET as error:
            raise self._os_error(error) from None

    def write(self, work: Callable[[Any], T]) -> T:
        """Run `work` in a write transaction, which is committed as a whole or not at all.

        Raises OSError for a failure; after an error nothing is committed.
        """
        self._check_process()
        with self._writer_lock:
            try:
                self._length.check()
                txn = self._lmdb.begin(write=True)
                try:
                    result = work(txn)
                    self._env.commit(txn)
                except BaseException:
                    txn.abort()
                    raise
            except _MET as error:
                raise self._os_error(error) from None
            return result

    def resize(self, map_bytes: int) -> None:
        """Change the map's size to `map_bytes`; no transaction of this process may be under way.

        Raises OSError.
        """
        with self._as_os_error():
            self._lmdb.set_mapsize(map_bytes)
        self._map_is(map_bytes)

    def used_pages(self, txn: Any) -> int:
        """Return the number of LMDB pages in use in this transaction.

        The pages that hold LMDB's list of free pages are not counted.
        """
        stats = [
            self._lmdb.stat(),
            *(txn.stat(db) for db in (self.objects, self.parts, self.ages, self.names, self.facts)),
        ]
        # Add the two head pages (LMDB's "meta pages"), which are in no tree.
        return 2 + sum(int(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)

    def clear_readers(self) -> None:
        """Clear the slots of readers that died.

        While such a slot exists, LMDB reuses no page that its reader might have read.
        """
        with suppress(*_FAILURES):
            self._lmdb.reader_check()

    def readers(self) -> list[int]:
        """Return the id of the newest commit that each read transaction now under way in any process sees.

        Ids rise by one with each commit.
        """
        # LMDB lists readers as lines of "pid thread txnid", after a heading; an idle slot shows "-".
        with self._as_os_error():
            lines = self._lmdb.readers().splitlines()[1:]
        return [int(line.split()[2]) for line in lines if line.split()[2].isdigit()]

    def is_held_back(self) -> bool:
        """Return whether a read transaction began two or more commits ago.

        Pages that were given up after that cannot be reused before it ends. Call `clear_readers` first, so
        that only transactions of living processes count.
        """
        with self._as_os_error():
            newest = int(self._lmdb.info()["last_txnid"])
        return any(seen + 1 < newest for seen in self.readers())

    def reserve(self, least: int, pages: int) -> None:
        """Allocate `pages` LMDB pages on the disk behind the last used page, if fewer than `least` are left.

        Raises OSError. Even a deletion needs new LMDB pages. When other programs have filled the disk, only
        pages that were allocated before are available for a deletion.
        """
        #   | pages that the file has used | allocated in advance |          |
        #   0                            there                 _kept     end of the map
        with self._as_os_error():
            there = int(self._lmdb.info()["last_pgno"]) + 1
        if self._kept >= min(there + least, self.budget.map_pages):
            return
        wanted = min(there + pages, self.budget.map_pages)
        with self._data_file() as fd:
            self._env.fallocate(fd, 0, wanted * self.page_bytes)
            self._env.fdatasync(fd)
        self._kept = wanted

    def pages_on_disk(self) -> int:
        """Return the number of LMDB pages allocated on the disk, whether used or free. Raises OSError."""
        found = self._env.lstat(os.path.join(self.path, "data.mdb"))
        # st_blocks counts units of 512 bytes, whatever the file system's block size.
        return min(found.st_size, found.st_blocks * 512) // self.page_bytes

    def sync(self) -> None:
        """Return when all data of the file is on the medium; raises OSError if that fails."""
        # LMDB's own sync does the same, but not through the store's Env. A new descriptor will do: a sync of
        # any descriptor of a file writes all cached data of the file.
        with self._data_file() as fd:
            self._env.fdatasync(fd)

    @contextmanager
    def _data_file(self) -> Iterator[int]:
        fd = self._env.open(os.path.join(self.path, "data.mdb"), os.O_RDWR)
        try:
            yield fd
        finally:
            close_quietly(self._env, fd)

    def note_damage(self) -> None:
        """Note that an entry was found that this store cannot have written."""
        self.is_broken = self.is_damaged = True

    def is_ours(self) -> bool:
        """Return whether this process opened the environment; False in a forked child."""
        return self._env.getpid() == self._pid

    def close(self) -> None:
        """Close the environment."""
        self._length.close()
        self._lmdb.close()
        self._close_files()

    def _databases(self, txn: Any) -> list[Any]:
        # All five are made in one transaction. An empty one in the place of one that is not found would hide
        # what the store has.
        is_new = not self._lmdb.stat()["entries"]
        try:
            return [self._lmdb.open_db(name.encode(), txn, create=is_new) for name in _DATABASES]
        except lmdb.NotFoundError as error:
            raise DamagedError(EIO, f"a database is missing: {error}") from error

    def _present(self) -> list[Any]:
        try:
            self._length.check()
            return [self._lmdb.open_db(name.encode(), create=False) for name in _DATABASES]
        except _FAILURES as error:
            raise self._os_error(error) from error

    def _begin(self) -> Any:
        try:
            return self._lmdb.begin(buffers=True)
        except lmdb.ReadersFullError:
            self.clear_readers()
            return self._lmdb.begin(buffers=True)

    def _check_process(self) -> None:
        if self._env.getpid() != self._pid:
            raise ClosedError(
                f"the store in {self.path} was opened before this process was forked; open it again in this"
                " process"
            )

    def is_in_place(self) -> bool:
        """Return whether the directory that was opened last is still at its path. Raises OSError."""
        try:
            found = self._env.lstat(self.path)
        except FileNotFoundError:
            return False
        return (self._pid, found.st_dev, found.st_ino) == self._identity

    def check_there(self) -> None:
        """Raise OSError unless the file is still at the path where it was opened."""
        if not self._length.same():
            raise OSError(
                ESTALE, f"{self.path} was replaced while it was open; close the store and open it again"
            )

    def _claim(self) -> None:
        found = self._env.lstat(self.path)
        self._identity = (self._pid, found.st_dev, found.st_ino)
        with _open_lock:
            if self._identity in _open:
                raise StorageError(
                    f"{self.path} is open in this process already; use that store from all threads, or close"
                    " it first"
                )
            _open.add(self._identity)

    def _close_files(self) -> None:
        with _open_lock:
            _open.discard(self._identity)

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            raise self._os_error(error) from error

    def _os_error(self, error: Exception) -> OSError:
        """Return the OSError for a failure of a transaction, and record what it says of the environment."""
        if isinstance(error, lmdb.MapFullError):
            return MapFullError(ENOSPC, str(error))
        if isinstance(error, lmdb.PanicError):  # the write of a head page failed, as on a disk that went away
            error = OSError(EIO, str(error))
            self.is_broken = True
        if isinstance(error, struct.error):
            error = DamagedError(EIO, f"an entry is malformed: {error}")
        if isinstance(error, _FAILURES):
            error = os_error(error, self._env, self.path)
        assert isinstance(error, OSError)
        if isinstance(error, DamagedError):
            self.note_damage()
        self.is_broken |= isinstance(error, PutAsideError)
        return error


class ErrorCounters:
    """Counters of failed calls of this process, by kind.

        full               the disk or the map was full
        busy               another writer held the lock for too long
        failures           all other failures
        refused_...        objects that a set refused, by the reason (see `Attempt`)

    Thread safety: any thread may call.
    """

    def __init__(self, path: str) -> None:
        self._path: Final = path
        self._mutex = Lock()
        self._counts: Counter[str] = Counter()

    def count(self, what: str, by: int = 1) -> None:
        """Add `by` to the count named `what`."""
        with self._mutex:
            self._counts[what] += by

    def failed(self, what: str, error: OSError) -> Outcome:
        """Count and log a failure, and return the outcome of the objects concerned.

        The outcome is THROTTLED if the failure may pass, so that the same set may succeed later; else ERROR.
        """
        kind = _KINDS.get(error.errno or 0, "failures")
        self.count(kind)
        _log.warning("%s in %s failed: %s", what, self._path, error)
        return Outcome.ERROR if kind == "failures" else Outcome.THROTTLED

    def figures(self) -> dict[str, int]:
        """Return all counts by name."""
        with self._mutex:
            return {"full": 0, "busy": 0, "failures": 0, **self._counts}
