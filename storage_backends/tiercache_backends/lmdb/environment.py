"""The LMDB environment of a store: one per directory and process, its transactions, and its failures as OSErrors."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from errno import EIO, ENOSPC, ESTALE
from threading import Lock
from typing import Any, Final, TypeVar

import lmdb

from tiercache.errors import ClosedError, StorageError
from tiercache.storage.env import Env, let_go
from tiercache_backends.lmdb.queue import Queue
from tiercache_backends.local.failures import DamagedError, FileLength, os_error

T = TypeVar("T")

_READERS: Final = 1024
"""Slots for read transactions of all processes together; 64 bytes each, in the lock file."""
_SPARE: Final = 8
"""Ended read transactions that the LMDB binding keeps to begin the next ones with."""
_NAMES: Final = ("objects", "parts", "ages", "namespaces", "facts")
_open: Final[set[tuple[int, int, int]]] = set()
"""Process id, device and inode of each environment open here: LMDB's locks do not tell two openers in one process apart."""
_open_lock: Final = Lock()


class MapFullError(OSError):
    """LMDB found too few free pages, or too few that lie together, that no reader still needs; the transaction is undone."""


class Environment:
    """An open LMDB environment, whose failures are OSErrors; after a fork a transaction in the child raises ClosedError.

    `map_bytes`: size of the map. `last_sync`: whether each commit also syncs LMDB's head page, so that the last transaction survives a
    power cut. `looks`: the environment is only read. `alone`: no other process has it open; with `looks` LMDB's lock file is not used then.

    Thread safety: any thread may call; one thread writes at a time, among all processes. Readers never wait.
    """

    def __init__(self, env: Env, path: str, map_bytes: int, *, last_sync: bool, looks: bool = False, alone: bool = False) -> None:
        self._env = env
        self._pid = env.getpid()
        self._queue = Queue(env, os.path.join(path, "WRITER"))
        self._damaged = False
        self._kept = 0
        self.path: Final = path
        self._claim()
        try:
            self._lmdb = lmdb.open(
                path,
                map_size=map_bytes,
                max_dbs=len(_NAMES),
                max_readers=_READERS,
                max_spare_txns=_SPARE,
                mode=0o600,
                metasync=last_sync,
                readonly=looks,
                lock=not (looks and alone),
                create=not looks,
            )
        except lmdb.Error as error:
            self._let_go()
            raise self._os_error(error) from error
        except BaseException:
            self._let_go()
            raise
        try:
            self._length = FileLength(env, os.path.join(path, "data.mdb"), self._lmdb)
        except BaseException:
            self._lmdb.close()
            self._let_go()
            raise
        try:
            found = self._present() if looks else self.write(self._databases)
            self.objects, self.parts, self.ages, self.names, self.facts = found
            self.page_bytes: int = self._lmdb.stat()["psize"]
        except BaseException:
            self.close()
            raise

    def read(self, work: Callable[[Any], T]) -> T:
        """Run `work`, which is brief, in a read transaction. Raises OSError.

        The values that it reads are views of the map, and none may outlive the transaction.
        """
        self._check_process()
        try:
            self._check_length()
            with self._begin() as txn:
                return work(txn)
        except lmdb.Error as error:
            raise self._os_error(error) from error
        except struct.error as error:
            raise self._unreadable(error) from error

    def write(self, work: Callable[[Any], T]) -> T:
        """Run `work` in a write transaction: all of it is committed on return, or nothing is and an OSError is raised."""
        self._check_process()
        with self._queue:
            try:
                self._check_length()
                txn = self._lmdb.begin(write=True)
                try:
                    result = work(txn)
                    self._env.commit(txn)
                except BaseException:
                    txn.abort()
                    raise
            except lmdb.Error as error:
                raise self._os_error(error) from error
            except struct.error as error:
                raise self._unreadable(error) from error
            return result

    def resize(self, map_bytes: int) -> None:
        """Change the map's size to `map_bytes`; no transaction of this process may be under way. Raises OSError."""
        try:
            self._lmdb.set_mapsize(map_bytes)
        except lmdb.Error as error:
            raise self._os_error(error) from error

    def used_pages(self, txn: Any) -> int:
        """Return the LMDB pages in use as the transaction sees them, without those of LMDB's own list of free pages."""
        stats = [self._lmdb.stat(), *(txn.stat(db) for db in (self.objects, self.parts, self.ages, self.names, self.facts))]
        # The two head pages are in no tree.
        return 2 + sum(int(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)

    def clear_readers(self) -> int:
        """Clear the slots of readers that died, and return how many those were; until then no page that they might read is reused."""
        with suppress(lmdb.Error):
            return int(self._lmdb.reader_check())
        return 0

    def lagging(self) -> int:
        """Return the number of read transactions that began two or more transactions ago: they hold back pages given up since.

        `clear_readers` comes first, so that only those of living processes count.
        """
        newest = self._lmdb.info()["last_txnid"]
        began = [int(line.split()[2]) for line in self._lmdb.readers().splitlines()[1:] if line.split()[2].isdigit()]
        return sum(1 for txn in began if txn + 1 < newest)

    def readers(self) -> int:
        """Return the number of read transactions now under way in all processes."""
        return sum(line.split()[2].isdigit() for line in self._lmdb.readers().splitlines()[1:])

    def map_bytes(self) -> int:
        """Return the size of the map in bytes."""
        return int(self._lmdb.info()["map_size"])

    def reserve(self, least: int, pages: int) -> None:
        """Allocate `pages` LMDB pages on the disk behind the file's last one, if fewer than `least` are known to be there; raises OSError.

        Deletions need new pages as well, and on a disk that other programs have filled there are no others.
        """
        there = int(self._lmdb.info()["last_pgno"]) + 1
        if self._kept >= min(there + least, self.map_bytes() // self.page_bytes):
            return
        wanted = min(there + pages, self.map_bytes() // self.page_bytes)
        fd = self._env.open(os.path.join(self.path, "data.mdb"), os.O_RDWR)
        try:
            self._env.fallocate(fd, 0, wanted * self.page_bytes)
            self._env.fdatasync(fd)
        finally:
            let_go(self._env, fd)
        self._kept = wanted

    def pages_on_disk(self) -> int:
        """Return the number of the file's pages that are allocated on the disk, whether in use or not; raises OSError."""
        found = self._env.lstat(os.path.join(self.path, "data.mdb"))
        return min(found.st_size, found.st_blocks * 512) // self.page_bytes

    def sync(self) -> None:
        """Return once all data of the file is on the medium; raises OSError."""
        # The same as LMDB's own sync, through the store's Env: any descriptor of the file syncs the same cached pages.
        fd = self._env.open(os.path.join(self.path, "data.mdb"), os.O_RDWR)
        try:
            self._env.fdatasync(fd)
        finally:
            let_go(self._env, fd)

    def is_damaged(self) -> bool:
        """Return whether a damaged page was met since the environment was opened."""
        return self._damaged

    def is_ours(self) -> bool:
        """Return whether the environment was opened in this process, and not before a fork."""
        return self._env.getpid() == self._pid

    def close(self) -> bool:
        """Close the environment; return False where it was found damaged while it was open."""
        self._length.close()
        self._lmdb.close()
        self._let_go()
        return not self._damaged

    def _databases(self, txn: Any) -> list[Any]:
        return [self._lmdb.open_db(name.encode(), txn) for name in _NAMES]

    def _present(self) -> list[Any]:
        try:
            self._check_length()
            return [self._lmdb.open_db(name.encode(), create=False) for name in _NAMES]
        except lmdb.Error as error:
            raise self._os_error(error) from error

    def _begin(self) -> Any:
        try:
            return self._lmdb.begin(buffers=True)
        except lmdb.ReadersFullError:
            self.clear_readers()
            return self._lmdb.begin(buffers=True)

    def _check_process(self) -> None:
        if self._env.getpid() != self._pid:
            raise ClosedError(f"the store in {self.path} was opened before this process was forked; open it again in this process")

    def check_there(self) -> None:
        """Raise OSError unless the file still lies where it was opened."""
        if not self._length.same():
            raise OSError(ESTALE, f"{self.path} was replaced while it was open; close the store and open it again")

    def _check_length(self) -> None:
        try:
            self._length.check()
        except DamagedError:
            self._damaged = True
            raise

    def _claim(self) -> None:
        found = self._env.lstat(self.path)
        self._identity = (self._pid, found.st_dev, found.st_ino)
        with _open_lock:
            if self._identity in _open:
                raise StorageError(f"{self.path} is open in this process already; use that store from all threads, or close it first")
            _open.add(self._identity)

    def _let_go(self) -> None:
        with _open_lock:
            _open.discard(self._identity)

    def _os_error(self, error: lmdb.Error) -> OSError:
        """Return the OSError that an error of LMDB's stands for, and note damage."""
        if isinstance(error, lmdb.MapFullError):
            return MapFullError(ENOSPC, str(error))
        found = os_error(error, self._env, self.path)
        self._damaged = self._damaged or isinstance(found, DamagedError)
        return found

    def _unreadable(self, error: struct.error) -> DamagedError:
        """Return the error for an entry whose length is not the one that was written, and note the damage."""
        self._damaged = True
        return DamagedError(EIO, f"an entry has another length than it was written with: {error}")
