"""The LMDB environment of a store: its transactions, the lock of its writers, its limits, and its failures.

A process has at most one open environment per directory; LMDB's binding refuses another. Failures of LMDB
become OSErrors here.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from errno import EAGAIN, EDQUOT, EFBIG, EIO, ENOSPC
from itertools import islice
from threading import Lock
from typing import Any, Final, TypeVar

import lmdb

from tiercache.core import DIGEST_BYTES, Outcome
from tiercache.storage.env import Env, close_quietly
from tiercache_backends.lmdb.records import FACTS, RECORD, Facts
from tiercache_backends.local.directory import check_named, is_full
from tiercache_backends.local.ownership import wait_for_lock

T = TypeVar("T")
_log = logging.getLogger(__name__)

_READERS: Final = 1024
"""Slots for read transactions of all processes together; a slot takes 64 bytes of the lock file."""
_SPARE: Final = 8
"""Number of ended read transactions that the LMDB binding keeps for reuse."""
_DATABASES: Final = ("objects", "parts", "ages", "gone", "namespaces", "facts")
_FAILURES: Final = (lmdb.Error, SystemError, struct.error)
"""Exceptions for a failure of LMDB; its binding raises SystemError for entries of impossible sizes."""
_HARMLESS: Final = (
    lmdb.MapFullError,
    lmdb.ReadersFullError,
    lmdb.TxnFullError,
    lmdb.MapResizedError,
    lmdb.DiskError,
    lmdb.LockError,
    lmdb.MemoryError,
    lmdb.ReadonlyError,
    lmdb.PanicError,
)
"""Exceptions that do not mean damage; for errors of the system LMDB's binding raises `lmdb.Error` itself."""
_FULL_BYTES: Final = 64 << 10
"""Number of free bytes of a file system below which a short write is attributed to a full disk."""
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
_SPARE_PAGES: Final = 64
"""Minimum number of pages that are allocated on the disk in advance, behind the last used page."""
_SPARE_SHARE: Final = 64
"""Divisor of the map's pages: one page in 64 is allocated on the disk in advance."""
_MAX_LOGGED: Final = 8192
_MIN_LOGGED: Final = 256
"""Bounds of the number of removals that are logged; between them it is that of the map's LMDB pages."""
_FULL_SECONDS: Final = 10.0
"""Seconds after a full disk until the file may try to grow again."""
MAX_WAIT_SECONDS: Final = 5.0
"""Seconds that a writer waits for other writers before it gives up."""
_MAX_WAIT_AFTER_TIMEOUT_SECONDS: Final = 0.05
"""Seconds that a writer waits if the previous wait of this process was in vain."""
_PAUSE_SECONDS: Final = 0.0005
"""Longest pause, in seconds, between two tries for the lock."""
_KINDS: Final = {ENOSPC: "full", EDQUOT: "full", EAGAIN: "busy"}
"""Names by errno of the failures that may pass: a full disk or map, and a lock that is held too long."""


class MapFullError(OSError):
    """LMDB found no free pages, or not enough adjacent free pages; the transaction is undone.

    A page that a reader may still need is not free.
    """


class DamagedError(OSError):
    """The LMDB environment or its content is damaged and must not be trusted any more."""


class WriterLock:
    """Lock for writers: only one thread of all processes holds it at a time.

    LMDB's own lock is a robust mutex in shared memory, which can lose a wake-up: (1) B and C sleep on it, A
    releases it, and the kernel wakes B. (2) D takes it before B runs. (3) B is killed. (4) D releases it,
    nobody is woken, and C sleeps for ever. So a writer takes a file lock (flock) first, which cannot lose a
    waiter and for which a thread can give up waiting, and then always finds LMDB's mutex free.

    Lock order: first the lock between the threads of this process (`_ours`), then the file lock.

    Thread safety: any thread may call; a thread that holds the lock must not take it again.
    """

    def __init__(self, env: Env, path: str) -> None:
        self._env = env
        self._path = path
        self._ours = Lock()
        self._timed_out = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; raises OSError, whose errno is EAGAIN after too long a wait."""
        most = _MAX_WAIT_AFTER_TIMEOUT_SECONDS if self._timed_out else MAX_WAIT_SECONDS
        busy = OSError(EAGAIN, f"{self._path} is held by another writer, which makes no progress")
        if not self._ours.acquire(timeout=most):
            raise busy
        with ExitStack() as undo:
            undo.callback(self._ours.release)
            fd = self._env.open(self._path, os.O_RDWR | os.O_CREAT)
            undo.callback(close_quietly, self._env, fd)
            self._timed_out = not wait_for_lock(self._env, self._env.try_lock, fd, most, _PAUSE_SECONDS)
            if self._timed_out:
                raise busy
            try:
                yield
            finally:
                # Unlock before closing: a copy of the descriptor in a forked child would keep the lock.
                with suppress(OSError):
                    self._env.unlock(fd)


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

    After damage was met, every transaction raises DamagedError, so that nothing of the map is touched again.

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
        self._writer_lock = WriterLock(env, os.path.join(path, "WRITER"))
        self.read_only: Final = read_only
        self.path: Final = path
        self._data: Final = os.path.join(path, "data.mdb")
        self.broken = ""
        """Why LMDB must be opened again: damage was met, or a head page was not written; else empty."""
        self.is_damaged = False
        """Whether an entry or a page was met that is not as it was written."""
        self._length = 0
        """Greatest length of the file that was seen, in bytes."""
        self._allocated = 0
        """Number of LMDB pages, from the file's start, that `keep_ahead` has allocated on the disk."""
        self._grow_at = 0.0
        """Time at which a full disk is tried again, in seconds of the monotonic clock."""
        self.budget: PageBudget
        """Limits for the whole map or, while the disk is full, for the pages that the file has on it.

        The disk may be smaller than the capacity, or other programs may have filled it.
        """
        with self._as_os_error():
            self._lmdb = lmdb.open(
                path,
                map_size=map_bytes,
                max_dbs=len(_DATABASES),
                max_readers=_READERS,
                max_spare_txns=_SPARE,
                mode=0o600,
                metasync=last_sync,
                readonly=read_only,
                lock=not (read_only and alone),
                create=not read_only,
            )
        self._fd = -1
        try:
            self._fd = self._env.open(self._data, os.O_RDONLY if self.read_only else os.O_RDWR)
            with self._as_os_error():
                self._check_length()
                if self.read_only:
                    found = [self._lmdb.open_db(name.encode(), create=False) for name in _DATABASES]
                else:
                    found = self.write(self._databases)
            self._opened = found
            self.objects, self.parts, self.ages, self.gone, self.names, self.facts = found
            self.page_bytes: int = self._lmdb.stat()["psize"]
            self.resize(int(self._lmdb.info()["map_size"]))
        except BaseException:  # whatever it is, nothing stays open, and it is raised again
            self.close()
            raise

    @property
    def logged(self) -> int:
        """Maximum number of removals that the store keeps in `gone`."""
        return max(_MIN_LOGGED, min(_MAX_LOGGED, self._whole.map_pages))

    def try_growing(self) -> None:
        """Let the file grow again, if it is some time since the disk was found full."""
        if self.budget.is_short and self._env.monotonic() >= self._grow_at:
            self.budget = self._whole

    def note_full(self) -> None:
        """Record that the disk is full. Raises OSError if that fails."""
        found = self._env.fstat(self._fd)
        # st_blocks counts units of 512 bytes, whatever the file system's block size.
        pages = min(found.st_size, found.st_blocks * 512) // self.page_bytes
        if not self.budget.is_short:
            _log.warning(
                "the disk of %s is full; the store continues with the %d pages that its file has",
                self.path,
                pages,
            )
        self._grow_at = self._env.monotonic() + _FULL_SECONDS
        self.budget = PageBudget(min(pages, self._whole.map_pages), self.page_bytes, is_short=True)

    def read(self, work: Callable[[Any], T]) -> T:
        """Run `work` in a read transaction, and return its result. Raises OSError.

        `work` must be brief, because LMDB reuses no given-up pages while `work` runs. The values that `work`
        reads are views of the map. Do not use these views after the transaction.
        """
        self._check_usable()
        with self._as_os_error():
            self._check_length()
            with self._begin() as txn:
                return work(txn)

    def write(self, work: Callable[[Any], T]) -> T:
        """Run `work` in a write transaction, which is committed as a whole or not at all.

        Raises OSError for a failure; after an error nothing is committed.
        """
        self._check_usable()
        with self._writer_lock.held(), self._as_os_error():
            self._check_length()
            txn = self._lmdb.begin(write=True)
            try:
                result = work(txn)
                self._env.commit(txn)
            except BaseException:
                txn.abort()
                raise
            return result

    def resize(self, map_bytes: int) -> None:
        """Change the map's size to `map_bytes`; no transaction of this process may be under way.

        Raises OSError.
        """
        with self._as_os_error():
            if map_bytes != self._lmdb.info()["map_size"]:
                self._lmdb.set_mapsize(map_bytes)
        self._whole = PageBudget(map_bytes // self.page_bytes, self.page_bytes)
        self.budget = self._whole

    def facts_in(self, txn: Any) -> Facts:
        """Return what a transaction knows of the store as a whole."""
        return Facts.unpack(txn.get(FACTS, db=self.facts))

    def objects_after(self, txn: Any, digest: bytes, most: int) -> list[tuple[bytes, bytes]]:
        """Return digest and record of the objects that follow a digest in order; b"": of the first ones."""
        with txn.cursor(self.objects) as walk:
            there = islice(walk, most) if walk.set_range(digest + b"\0") else ()
            found = [(bytes(key), bytes(value)) for key, value in there]
        if any(len(key) != DIGEST_BYTES or len(value) != RECORD.itemsize for key, value in found):
            raise struct.error("the entry of an object has another length")
        return found

    def used_pages(self, txn: Any) -> int:
        """Return the number of LMDB pages in use in this transaction.

        The pages that hold LMDB's list of free pages are not counted.
        """
        stats = [self._lmdb.stat(), *map(txn.stat, self._opened)]
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

    def keep_ahead(self) -> None:
        """Allocate LMDB pages on the disk behind the last used one, so that a full disk stops no deletion.

        Even a deletion needs new pages. If the disk has no room, it counts as full.
        """
        #   | pages that the file has used | allocated in advance |          |
        #   0                            there              _allocated   end of the map
        spare = max(_SPARE_PAGES, self._whole.map_pages // _SPARE_SHARE)
        with self._as_os_error():
            there = int(self._lmdb.info()["last_pgno"]) + 1
        # Allocate when less than a quarter is left, and not for every few pages.
        if self.budget.is_short or self._allocated >= min(there + spare // 4, self._whole.map_pages):
            return
        wanted = min(there + spare, self._whole.map_pages)
        try:
            self._env.fallocate(self._fd, 0, wanted * self.page_bytes)
            self._env.fdatasync(self._fd)
            self._allocated = wanted
        except OSError as error:
            if is_full(error):
                self.note_full()

    def sync(self) -> None:
        """Return when all data of the file is on the medium; raises OSError if that fails."""
        # LMDB's own sync does the same, but not through the store's Env.
        self._env.fdatasync(self._fd)

    def check_there(self) -> None:
        """Raise OSError unless the file is still at the path where it was opened."""
        check_named(self._env, self._data, self._fd)

    def close(self) -> None:
        """Close the environment."""
        if self._fd >= 0:
            close_quietly(self._env, self._fd)
        self._lmdb.close()

    def _databases(self, txn: Any) -> list[Any]:
        # All are made in one transaction. An empty one in the place of one that is not found would hide
        # what the store has.
        is_new = not self._lmdb.stat()["entries"]
        return [self._lmdb.open_db(name.encode(), txn, create=is_new) for name in _DATABASES]

    def _begin(self) -> Any:
        try:
            return self._lmdb.begin(buffers=True)
        except lmdb.ReadersFullError:
            self.clear_readers()
            return self._lmdb.begin(buffers=True)

    def _check_usable(self) -> None:
        if self.broken:
            raise DamagedError(
                EIO, f"{self.path} must be closed, in all processes, and opened again: {self.broken}"
            )

    def _check_length(self) -> None:
        """Raise DamagedError if the file was cut; LMDB never shortens it.

        LMDB maps the file, and a read of the map behind the end of the file ends the process. A cut between
        this check and the end of the transaction is not noticed.
        """
        longest = self._length  # read first: another thread may see a longer file meanwhile
        size = self._env.fstat(self._fd).st_size
        if size < longest:
            raise DamagedError(EIO, f"{self._data} was cut to {size} bytes while it was open")
        self._length = max(self._length, size)

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except (*_FAILURES, DamagedError) as error:
            raise self._os_error(error) from error

    def _os_error(self, error: Exception) -> OSError:
        """Return the OSError for a failure of LMDB, and record what it says of the environment.

        On a full disk the last write is short, and LMDB reports a short write as EIO. So for EIO this method
        looks up the free space of the file system.
        """
        text = str(error)
        if isinstance(error, lmdb.MapFullError):
            return MapFullError(ENOSPC, text)
        if isinstance(error, lmdb.PanicError):  # the write of a head page failed, as on a disk that went away
            self.broken = text
        if type(error) is not lmdb.Error and not isinstance(error, _HARMLESS):
            self.is_damaged, self.broken = True, f"it is damaged ({text})"
            return error if isinstance(error, DamagedError) else DamagedError(EIO, text)
        full = isinstance(error, lmdb.DiskError) or any(
            os.strerror(number) in text for number in (ENOSPC, EDQUOT, EFBIG)
        )
        if not full and os.strerror(EIO) in text:
            with suppress(OSError):
                found = self._env.statvfs(self.path)
                full = found.f_bavail * found.f_frsize < _FULL_BYTES
        return OSError(ENOSPC if full else EIO, text)


class ErrorCounters:
    """Counters of failed calls of this process, by kind.

        full               the disk or the map was full
        busy               another writer held the lock for too long
        failures           all other failures
        refused_...        objects that a set refused, by the reason

    Thread safety: any thread may call.
    """

    def __init__(self, path: str) -> None:
        self._path: Final = path
        self._mutex = Lock()
        self._counts: Counter[str] = Counter()

    def count(self, names: Iterable[str]) -> None:
        """Add 1 to the count of each of these names."""
        with self._mutex:
            self._counts.update(names)

    def failed(self, what: str, error: OSError) -> Outcome:
        """Count and log a failure, and return the outcome of the objects concerned.

        The outcome is THROTTLED if the failure may pass, so that the same set may succeed later; else ERROR.
        """
        kind = _KINDS.get(error.errno or 0, "failures")
        self.count([kind])
        _log.warning("%s in %s failed: %s", what, self._path, error)
        return Outcome.ERROR if kind == "failures" else Outcome.THROTTLED

    def figures(self) -> dict[str, int]:
        """Return all counts by name."""
        with self._mutex:
            return {"full": 0, "busy": 0, "failures": 0, **self._counts}
