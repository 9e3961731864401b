"""The directory of a `file` store: who owns it, which format it has, whether its catalog can be trusted, how large its parts may be."""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from typing import Any, Final

from tiercache.core import BLOCK_ALIGN
from tiercache.errors import ConfigError, StorageError, StoreFormatError, StoreLockedError
from tiercache.storage.env import Env
from tiercache_backends.file import check
from tiercache_backends.file.slabs import sync_directory

_log = logging.getLogger(__name__)

KIND: Final = "tiercache.file"
VERSION: Final = 1
SMALLEST_CAPACITY: Final = 4 << 20
_SMALLEST_SLAB: Final = 1 << 20
_SMALLEST_MAP: Final = 2 << 20
_SLABS: Final = 64
_FIXED_BYTES: Final = 256 << 10
"""Kept free of slabs for the small files, the directories and the file system's own bookkeeping of the large ones."""
_CHECK_SECONDS: Final = 120.0
_LMDB_MAGIC: Final = 0xBEEFC0DE
_LMDB_META: Final = struct.Struct("<16xIIQQI92xQQ")
"""Page header; magic, version, address, map size, page size; the rest of two tree roots; last page, transaction."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How a capacity is divided. Slabs and catalog together never exceed it, whatever the catalog's file really needs."""

    slab_blocks: int
    budget_blocks: int
    map_bytes: int


class Directory:
    """One directory, owned by this object from `claim` to `release`.

    Thread rule: one caller at a time; the store calls it while it opens and closes.
    """

    def __init__(self, env: Env, path: str) -> None:
        self._env = env
        self.path: Final = os.path.abspath(path)
        self.slabs: Final = self._at("slabs")
        self.catalog: Final = self._at("catalog")
        self._lock_fd: int | None = None

    def claim(self) -> None:
        """Make the directory where it is missing and become its owner; raises StorageError, StoreLockedError or StoreFormatError."""
        try:
            self._make(self.path, parents=True)
            names = self._env.listdir(self.path)
            if "LOCK" not in names and names:
                raise StorageError(f"{self.path} is not empty and holds no tiercache store; give the store an empty directory of its own")
            self._lock()
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"the store in {self.path} cannot be opened: {error}") from error

    def prepare(self, capacity: int) -> Shares:
        """Read or write the format, make the parts, put a damaged catalog aside, and divide the capacity."""
        slab_blocks = self._format(capacity)
        for path in (self.slabs, self.catalog):
            self._make(path)
            self._env.chmod(path, 0o700)
        if not self._trusted() and self._damaged():
            self._set_aside()
        self._mark_open()
        map_bytes = max(_SMALLEST_MAP, capacity // 32 // BLOCK_ALIGN * BLOCK_ALIGN, self._size("catalog/data.mdb"))
        budget = (capacity - map_bytes - _FIXED_BYTES - self._foreign_bytes()) // BLOCK_ALIGN
        if capacity < SMALLEST_CAPACITY or budget < _SMALLEST_SLAB // BLOCK_ALIGN:
            raise ConfigError(
                f"the store in {self.path} cannot work in {capacity} bytes: {capacity - budget * BLOCK_ALIGN} of them go to its catalog and"
                f" to other files there; set capacity to {max(SMALLEST_CAPACITY, capacity + _SMALLEST_SLAB - budget * BLOCK_ALIGN)} or more"
            )
        return Shares(slab_blocks, budget, map_bytes)

    def release(self, *, clean: bool) -> None:
        """Give up the ownership. `clean`: the catalog was closed in order, and the next owner need not check it."""
        try:
            if clean and (found := self._stat("catalog/data.mdb")) is not None:
                self._write("state", {"boot_id": self._env.boot_id(), "catalog": [found.st_size, found.st_mtime_ns]})
        except OSError as error:
            _log.warning("%s cannot be marked as closed in order, so its catalog will be checked: %s", self.path, error)
        finally:
            if self._lock_fd is not None:
                self._env.close(self._lock_fd)
                self._lock_fd = None

    def _lock(self) -> None:
        fd = self._env.open(self._at("LOCK"), os.O_RDWR | os.O_CREAT)
        try:
            if not self._env.try_lock(fd):
                owner = bytearray(32)
                self._env.preadv(fd, [memoryview(owner)], 0)
                pid = owner.rstrip(b"\0").decode("ascii", "replace").strip() or "unknown"
                who = "this process" if pid == str(self._env.getpid()) else f"process {pid}"
                raise StoreLockedError(
                    f"{self.path} is in use by {who} (pid {pid}); close that store, or give this one a directory of its own"
                )
            with suppress(OSError):  # the pid is for people; a full disk must not keep a store from opening
                self._env.ftruncate(fd, 0)
                self._env.pwritev(fd, [memoryview(f"{self._env.getpid()}\n".encode())], 0)
        except BaseException:
            self._env.close(fd)
            raise
        self._lock_fd = fd

    def _format(self, capacity: int) -> int:
        """The blocks of a slab, as they were settled when the store was made."""
        if self._stat("format") is None:
            self._env.chmod(self.path, 0o700)
            wanted = max(_SMALLEST_SLAB, 1 << (capacity // _SLABS).bit_length()) // BLOCK_ALIGN
            self._write("format", {"kind": KIND, "version": VERSION, "block": BLOCK_ALIGN, "slab_blocks": wanted})
        found = self._read("format")
        if found.get("kind") != KIND or not isinstance(found.get("version"), int):
            raise StoreFormatError(f"{self._at('format')} cannot be read; remove {self.path} to start with an empty store")
        if found["version"] > VERSION:
            raise StoreFormatError(
                f"{self.path} has format {found['version']} and this tiercache knows formats up to {VERSION};"
                " upgrade tiercache, or use another directory"
            )
        blocks = found.get("slab_blocks")
        if found.get("block") != BLOCK_ALIGN or not isinstance(blocks, int) or blocks < 1:
            raise StoreFormatError(f"{self._at('format')} names impossible sizes; remove {self.path} to start with an empty store")
        return blocks

    def _mark_open(self) -> None:
        """Say that the catalog is in use; where even that does not fit on the disk, say nothing, which is not trusted either."""
        try:
            self._write("state", {"boot_id": self._env.boot_id(), "catalog": None})
        except OSError as error:
            if error.errno not in (ENOSPC, EDQUOT):
                raise
            with suppress(FileNotFoundError):
                self._env.unlink(self._at("state"))

    def _trusted(self) -> bool:
        """Can the catalog be opened in this process at once?

        After a clean shutdown, if the file is as it was left; and after any death of the owner within this boot, because what LMDB has
        written is in the page cache. Its two head pages must be plausible in any case.
        """
        found = self._stat("catalog/data.mdb")
        if found is None:
            return True
        state = self._read("state")
        if not self._plausible(found.st_size):
            return False
        if state.get("catalog") is not None:
            return bool(state["catalog"] == [found.st_size, found.st_mtime_ns])
        return bool(state.get("boot_id")) and state["boot_id"] == self._env.boot_id()

    def _plausible(self, size: int) -> bool:
        """Do LMDB's two head pages look right, and is the file as long as the newer one says?"""
        fd = self._env.open(self._at("catalog/data.mdb"), os.O_RDONLY)
        try:
            heads = []
            page = 0
            for _ in range(2):
                raw = bytearray(_LMDB_META.size)
                self._env.preadv(fd, [memoryview(raw)], page)
                magic, _, _, _, page, last, txn = _LMDB_META.unpack(raw)
                heads.append((magic == _LMDB_MAGIC, txn, (last + 1) * page))
            return all(right for right, _, _ in heads) and size >= max(heads, key=lambda h: h[1])[2]
        finally:
            self._env.close(fd)

    def _damaged(self) -> bool:
        """Ask a child process, because a damaged catalog ends whoever reads it."""
        status = self._env.run([sys.executable, "-P", check.__file__, self.catalog], _CHECK_SECONDS)
        if status:
            _log.error("the catalog in %s is damaged (its check ended with status %d)", self.catalog, status)
        return status != 0

    def _set_aside(self) -> None:
        """Keep one damaged catalog for a look at it; the slabs stay and are filled anew."""
        aside = self._at("catalog.damaged")
        if self._stat("catalog.damaged") is not None:
            for name in self._env.listdir(aside):
                self._env.unlink(os.path.join(aside, name))
        self._env.rename(self.catalog, aside)
        self._make(self.catalog)
        _log.error("%s was put aside as %s; the store starts empty", self.catalog, aside)

    def _foreign_bytes(self) -> int:
        """Bytes of whatever else lies in the directory; they count towards the cap as well."""
        own = {"LOCK", "format", "state", "slabs", "catalog"}
        return sum(self._tree_bytes(self._at(name)) for name in self._env.listdir(self.path) if name not in own)

    def _tree_bytes(self, path: str) -> int:
        found = self._env.lstat(path)
        inner = self._env.listdir(path) if stat.S_ISDIR(found.st_mode) else []
        return found.st_blocks * 512 + sum(self._tree_bytes(os.path.join(path, name)) for name in inner)

    def _make(self, path: str, *, parents: bool = False) -> None:
        """Make a directory of ours, or find one there; raises StorageError where something else is in its place."""
        if parents and not self._is_there(os.path.dirname(path)):
            self._make(os.path.dirname(path), parents=True)
        if not self._is_there(path):
            self._env.mkdir(path)
        # Where the store lies may be a link of the administrator's; what lies inside may not.
        elif not stat.S_ISDIR(self._env.lstat(os.path.realpath(path) if parents else path).st_mode):
            raise StorageError(f"{path} is not a directory; remove it, or give the store a directory of its own")

    def _is_there(self, path: str) -> bool:
        try:
            self._env.lstat(path)
        except FileNotFoundError:
            return False
        return True

    def _stat(self, name: str) -> os.stat_result | None:
        """A regular file or a directory of ours; raises StorageError for a link or anything else."""
        try:
            found = self._env.lstat(self._at(name))
        except FileNotFoundError:
            return None
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise StorageError(f"{self._at(name)} is neither a file nor a directory; a store follows no links, so remove it")
        return found

    def _size(self, name: str) -> int:
        found = self._stat(name)
        return found.st_size if found else 0

    def _read(self, name: str) -> dict[str, Any]:
        """A small JSON file; empty where it is missing or malformed."""
        raw = bytearray(min(self._size(name), 4096))
        if not raw:
            return {}
        fd = self._env.open(self._at(name), os.O_RDONLY)
        try:
            self._env.preadv(fd, [memoryview(raw)], 0)
            value = json.loads(raw.rstrip(b"\0"))
        except ValueError:
            return {}
        finally:
            self._env.close(fd)
        return value if isinstance(value, dict) else {}

    def _write(self, name: str, value: dict[str, Any]) -> None:
        """Replace a small JSON file atomically."""
        fd = self._env.open(self._at(name + ".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._env.pwritev(fd, [memoryview(json.dumps(value).encode())], 0)
            self._env.fsync(fd)
        finally:
            self._env.close(fd)
        self._env.rename(self._at(name + ".new"), self._at(name))
        sync_directory(self._env, self.path)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)
