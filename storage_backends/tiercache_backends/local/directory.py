"""The directory of a local store: its ownership, its format, and whether the LMDB environment inside can be trusted.

DIR/LOCK        locked with flock: exclusively by a single owner, or shared by several owners or by read-only openers (`looks`);
                a single owner writes its pid into it, in ASCII
DIR/OPENING     shared stores only, locked with flock: exclusively while an owner opens or closes the store; shared by read-only openers
                that found no owner, for as long as they are open
DIR/format      JSON {"kind": ..., "version": N, ...}: written when the store is created
DIR/state       JSON {"boot_id": ..., "database": [size, mtime_ns] after a clean shutdown, null while open, "capacity": where it is known,
                "suspect": true if the environment is damaged and has not been repaired yet}
DIR/<database>/ the LMDB environment
DIR/<database>.damaged, .damaged.1, ... damaged environments that were put aside
"""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from errno import EDQUOT, ENOENT, ENOSPC, ESTALE
from itertools import count
from typing import Any, Final

from tiercache.errors import ConfigError, StorageError, StoreFormatError, StoreLockedError
from tiercache.storage.env import Env, let_go
from tiercache.storage.vectors import read_all, write_all
from tiercache_backends.local import check
from tiercache_backends.local.lmdb_file import LmdbFile, UnsoundError

_log = logging.getLogger(__name__)

LARGEST_CAPACITY: Final = (1 << 48) - 1
"""Largest capacity of a store in bytes, 256 TiB less one: blocks of slabs can be numbered, and LMDB can map, up to it on every machine."""
_CHECK_SECONDS: Final = 120.0
"""Seconds that the check in a child process may take before the environment counts as damaged."""
_OPENING_SECONDS: Final = _CHECK_SECONDS + 30
"""Seconds to wait for another process that opens or closes a shared store; it may be running its check."""
_POLL_SECONDS: Final = 0.01
_LMDB_MAGIC: Final = 0xBEEFC0DE
_LMDB_META: Final = struct.Struct("<16xIIQQI92xQQ")
"""LMDB head page: page header; magic, version, address, map size, page size; rest of two tree roots; last page, transaction."""


def sync_directory(env: Env, path: str) -> None:
    """Flush the names in a directory to the medium, so that they survive a power cut. Raises OSError."""
    fd = env.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        env.fsync(fd)
    finally:
        let_go(env, fd)


def tree_bytes(env: Env, path: str) -> int:
    """Return the bytes that a path and everything below it take on the disk; what is removed meanwhile counts as 0. Raises OSError."""
    try:
        found = env.lstat(path)
        inner = env.listdir(path) if stat.S_ISDIR(found.st_mode) else []
    except FileNotFoundError:
        return 0
    return found.st_blocks * 512 + sum(tree_bytes(env, os.path.join(path, name)) for name in inner)


class StoreDirectory:
    """One store directory, locked by this object from `claim` to `release`.

    Call in this order: `claim`, `settle`, `prove`, open the environment, `opened`; at the end close the environment, then `release`. With
    `as_found` nothing is created or started anew: where that would be needed, StorageError is raised. With `looks` (read-only, needs
    `as_found`) nothing at all is written.

    Thread safety: one caller at a time, while the store opens and closes; any thread may call `check_there`.
    """

    def __init__(self, env: Env, path: str, *, kind: str, version: int, database: str, as_found: bool = False, looks: bool = False) -> None:
        assert as_found or not looks, "who looks finds"
        self._env = env
        self._looks = looks
        self._kind = kind
        self._version = version
        self._as_found = as_found
        self.path: Final = os.path.abspath(path)
        self.database: Final = self.at(database)
        self.sole = True
        """Whether no other process has the store open. Always true for an exclusive owner; for a shared one it holds until `opened`."""
        self.suspect = False
        """Whether the environment was found to contradict itself, now or by the last owner. Known from `prove` on, until `healed`."""
        self.capacity: int | None = None
        """Capacity of the last owner's store in bytes, None where it is not known. Set by `prove`."""
        self._shared = False
        self._lock_fd: int | None = None
        self._opening_fd: int | None = None

    def check_place(self) -> None:
        """Raise ConfigError or StoreFormatError if the directory holds something that `claim` or `settle` would refuse. Changes nothing."""
        try:
            names = self._env.listdir(self.path)
            found = self._read("format") if "format" in names else {}
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be looked into ({error.strerror or error}); name a directory of this user's") from error
        if names and "LOCK" not in names and not self._as_found:
            raise ConfigError(f"{self.path} is not empty and holds no tiercache store; give the store an empty directory of its own")
        if isinstance(found.get("kind"), str):
            self._check_format(found)

    def claim(self, *, shared: bool = False) -> None:
        """Lock the directory, exclusively or (`shared`) as one of several owners; create it where it is missing.

        Raises StorageError or StoreLockedError.
        """
        self._shared = shared
        try:
            if self._as_found and not self._is_there(self.at("format")):
                raise StorageError(f"{self.path} holds no tiercache store; name the directory of one, or give a capacity to make one there")
            if self._looks:
                self._look()
                return
            self._make(self.path, parents=True)
            names = self._env.listdir(self.path)
            if "LOCK" not in names and names:
                raise StorageError(f"{self.path} is not empty and holds no tiercache store; give the store an empty directory of its own")
            self._lock_fd = self._env.open(self.at("LOCK"), os.O_RDWR | os.O_CREAT)
            if shared:
                self._join()
            else:
                self._own()
            self._identity = self._env.fstat(self._lock_fd)
        except OSError as error:
            self._let_go()
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"the store in {self.path} cannot be opened: {error}") from error
        except BaseException:
            self._let_go()
            raise

    def settle(self, fresh: Mapping[str, Any]) -> dict[str, Any]:
        """Return the store's format: the one written when it was created, or `fresh` if it is created now or has an older version.

        The environment of an older version is put aside; with `as_found` such a store raises StoreFormatError instead. Raises
        StoreFormatError also for a newer version, another kind of store, or a format file that is unreadable or incomplete.
        """
        if self.stat("format") is None:
            self._env.chmod(self.path, 0o700)
            return self.settle_anew(fresh)
        found = self._read("format")
        version = found.get("version")
        if not isinstance(version, int) or not isinstance(found.get("kind"), str):
            raise StoreFormatError(f"{self.at('format')} cannot be read; remove {self.path} to start with an empty store")
        self._check_format(found)
        if version < self._version:
            if self._as_found:
                raise StoreFormatError(
                    f"{self.path} has format {version}, which this tiercache does not read any more; look at it with the one that made it"
                )
            _log.error("%s has format %d, which this tiercache does not read any more", self.path, version)
            if self.stat(os.path.basename(self.database)) is not None:
                self.set_aside()
            return self.settle_anew(fresh)
        if not fresh.keys() <= found.keys():
            raise StoreFormatError(f"{self.at('format')} is incomplete; remove {self.path} to start with an empty store")
        return found

    def settle_anew(self, fresh: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return the format of a store that holds nothing."""
        settled = {"kind": self._kind, "version": self._version, **fresh}
        self._write("format", settled)
        return settled

    def prove(self, *, closely: bool) -> bool:
        """Create the environment's directory if it is missing; return whether the environment in it can be opened safely.

        LMDB maps its file, so opening a damaged one ends the process. A damaged environment stays `suspect`, also for the next owner, until
        `healed`. `closely`: check every page, even after a clean shutdown. While another process has the store open, nothing is checked.
        """
        self.part(self.database)
        if not self.sole:
            return True
        state = self._read("state")
        kept = state.get("capacity")
        self.capacity = kept if isinstance(kept, int) and 0 < kept <= LARGEST_CAPACITY else None
        self.suspect = bool(state.get("suspect"))
        found = self._data()
        sound = found is None or self._is_sound(found, state, closely)
        self.suspect |= not sound
        if not self._looks:
            self._mark_open()
        return sound

    def healed(self) -> None:
        """Record that the environment is a new one or was repaired."""
        self.suspect = False
        self._mark_open()

    def check_there(self) -> None:
        """Raise OSError if the directory that was opened is no longer found under its name."""
        try:
            found = self._env.lstat(self.at("LOCK"))
        except FileNotFoundError as error:
            raise OSError(ENOENT, f"{self.path} was removed or moved while it was open; close the store and open it again") from error
        if (found.st_dev, found.st_ino) != (self._identity.st_dev, self._identity.st_ino):
            raise OSError(ESTALE, f"{self.path} was replaced while it was open; close the store and open it again")

    def replace(self, path: str) -> None:
        """Put a new environment's file, which must be complete and on the medium, atomically in the place of the old one."""
        self._env.rename(path, os.path.join(self.database, "data.mdb"))
        sync_directory(self._env, self.database)

    def remove(self, path: str) -> None:
        """Remove a file that a process may have left incomplete when it died; a missing file is no error."""
        with suppress(FileNotFoundError):
            self._env.unlink(path)

    def set_aside(self) -> None:
        """Rename a useless environment, so that it can be examined later, and create an empty one in its place.

        Environments that were put aside earlier are kept. Raises StorageError with `as_found`.
        """
        if self._as_found:
            raise StorageError(f"{self.database} is damaged and says nothing any more; whoever opens the store to use it starts empty")
        if self._env.listdir(self.database):
            aside = next(name for n in count() if self.stat(name := self._aside(n)) is None)
            self._env.rename(self.database, self.at(aside))
            _log.error("%s was put aside as %s; the store starts empty", self.database, aside)
        self._make(self.database)
        sync_directory(self._env, self.path)

    def asides(self) -> list[str]:
        """Return the paths of the environments that were put aside, oldest first."""
        found: list[str] = []
        while self.stat(name := self._aside(len(found))) is not None:
            found.append(self.at(name))
        return found

    def keep(self, capacity: int) -> None:
        """Record the capacity in bytes with which the store opens, for a later opener with `as_found`."""
        if capacity != self.capacity:
            self.capacity = capacity
            self._mark_open()

    def part(self, path: str, *, make: bool = False) -> None:
        """Create a directory of the store if it is missing, and set its mode to 0700.

        With `as_found` a missing one is a StorageError, unless `make` is set. With `looks` nothing is created or changed.
        """
        if self._as_found and not make and not self._is_there(path):
            raise StorageError(f"{path} is missing, so nothing was stored in {self.path} yet, or it was removed; nothing can be shown")
        if self._looks:
            return
        self._make(path)
        self._env.chmod(path, 0o700)

    def opened(self) -> None:
        """Let other processes open a shared store, now that the environment is open.

        A read-only opener that found no owner keeps them out until `release`.
        """
        if not (self._looks and self.sole):
            self._close(self._opening_fd)
            self._opening_fd = None

    def release(self, *, clean: bool, suspect: bool = False) -> None:
        """Unlock the directory, and record how the environment was left.

        `clean`: the environment was closed in order, and the next owner need not check it; `suspect`: the next owner must check it, even
        within this boot.
        """
        try:
            if self._looks:
                return
            if suspect or self.suspect:
                self.suspect = True
                self._write_state(None)
            elif clean and (not self._shared or self._is_last()) and (found := self._data()) is not None:
                self._write_state([found.st_size, found.st_mtime_ns])
        except OSError as error:
            _log.warning("%s cannot be marked as it was left: %s", self.path, error)
        finally:
            self._let_go()

    def database_bytes(self) -> int:
        """Return the length of the environment's file in bytes; 0 if there is none."""
        found = self._data()
        return found.st_size if found else 0

    def foreign_bytes(self, own: Iterable[str] = ()) -> int:
        """Return the disk bytes of foreign names in the directory: neither the files of this class nor the parts named in `own`.

        They count towards a capacity as well.
        """
        ours = {"LOCK", "OPENING", "format", "state", os.path.basename(self.database), *own}
        return sum(tree_bytes(self._env, self.at(name)) for name in self._env.listdir(self.path) if name not in ours)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the status of a regular file or directory in the store, None if it is missing; raises StorageError for anything else."""
        try:
            found = self._env.lstat(self.at(name))
        except FileNotFoundError:
            return None
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise StorageError(f"{self.at(name)} is neither a file nor a directory; a store follows no links, so remove it")
        return found

    def at(self, name: str) -> str:
        """Return the path of a name in the directory."""
        return os.path.join(self.path, name)

    def _look(self) -> None:
        """Keep writers out without writing anything.

        An exclusive store: share its LOCK. A shared store: share OPENING while it has no owner, or else share LOCK with the owners.
        """
        if not self._shared:
            if not self._is_there(self.at("LOCK")):
                return  # a copy of a store that was never opened
            self._lock_fd = self._env.open(self.at("LOCK"), os.O_RDONLY)
            if not self._env.try_share(self._lock_fd):
                raise self._locked(self._lock_fd)
            return
        if not self._is_there(self.at("OPENING")) or not self._is_there(self.at("LOCK")):
            return
        self._begin(os.O_RDONLY)
        self._lock_fd = self._env.open(self.at("LOCK"), os.O_RDONLY)
        self.sole = self._env.try_lock(self._lock_fd)
        if self.sole:
            # The exclusive lock must not stay: other read-only openers have to find the store without an owner as well.
            self._close(self._lock_fd)
            self._lock_fd = None
        elif not self._env.try_share(self._lock_fd):
            raise self._locked(self._lock_fd)

    def _locked(self, fd: int) -> StoreLockedError:
        owner = bytearray(32)
        self._env.preadv(fd, [memoryview(owner)], 0)
        pid = owner.rstrip(b"\0").decode("ascii", "replace").strip() or "unknown"
        who = "this process" if pid == str(self._env.getpid()) else f"process {pid}"
        return StoreLockedError(f"{self.path} is in use by {who} (pid {pid}); close that store, or give this one a directory of its own")

    def _own(self) -> None:
        fd = self._held()
        if not self._env.try_lock(fd):
            if self._env.try_share(fd):
                raise StoreLockedError(f"{self.path} is being looked at by another process; try again when that is done")
            raise self._locked(fd)
        with suppress(OSError):  # the pid is for error messages only; a full disk must not keep a store from opening
            self._env.ftruncate(fd, 0)
            self._env.pwritev(fd, [memoryview(f"{self._env.getpid()}\n".encode())], 0)

    def _join(self) -> None:
        """Become one of the owners. No other process opens or closes the store until `opened`, so `sole` cannot change until then."""
        self._begin()
        fd = self._held()
        self.sole = self._env.try_lock(fd)
        if not self._env.try_share(fd):
            raise StoreLockedError(f"{self.path} is in use by a process that shares it with nobody; close that one first")

    def _begin(self, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        self._opening_fd = self._env.open(self.at("OPENING"), flags)
        take = self._env.try_share if self._looks else self._env.try_lock
        deadline = self._env.monotonic() + _OPENING_SECONDS
        while not take(self._opening_fd):
            if self._env.monotonic() > deadline:
                raise StoreLockedError(f"{self.path} is being opened or closed by another process that does not get on; end that one")
            self._env.sleep(_POLL_SECONDS)

    def _is_last(self) -> bool:
        self._begin()
        return self._env.try_lock(self._held())

    def _held(self) -> int:
        assert self._lock_fd is not None, "the directory is claimed"
        return self._lock_fd

    def _let_go(self) -> None:
        for fd in (self._lock_fd, self._opening_fd):
            if fd is not None:
                with suppress(OSError):  # closing alone keeps the lock where a forked process has the descriptor too
                    self._env.unlock(fd)
                self._close(fd)
        self._lock_fd = self._opening_fd = None

    def _close(self, fd: int | None) -> None:
        if fd is not None:
            let_go(self._env, fd)

    def _mark_open(self) -> None:
        """Record that the environment is in use. On a full disk, remove the record instead: without one it is not trusted either."""
        try:
            self._write_state(None)
        except OSError as error:
            if error.errno not in (ENOSPC, EDQUOT):
                raise
            with suppress(FileNotFoundError):
                self._env.unlink(self.at("state"))

    def _write_state(self, database: list[int] | None) -> None:
        known: dict[str, Any] = {} if self.capacity is None else {"capacity": self.capacity}
        if self.suspect:
            known["suspect"] = True
        self._write("state", {"boot_id": self._env.boot_id(), "database": database, **known})

    def _is_sound(self, found: os.stat_result, state: Mapping[str, Any], closely: bool) -> bool:
        trusted = not self.suspect and self._trusted(found, state)
        clean = trusted and state.get("database") is not None
        if (closely or not clean or not self._plausible(found.st_size)) and not self._is_whole():
            return False
        return trusted or not self._damaged()

    def _is_whole(self) -> bool:
        """Return whether every page of the environment's file, including its list of free pages, has the form that LMDB gives it."""
        try:
            with closing(LmdbFile(self._env, os.path.join(self.database, "data.mdb"))) as file:
                file.check()
        except UnsoundError as error:
            _log.error("the database in %s is damaged: %s", self.database, error)
            return False
        return True

    def _trusted(self, found: os.stat_result, state: Mapping[str, Any]) -> bool:
        """Return whether the environment is as LMDB left it.

        After a clean shutdown it is, if the file's size and mtime are unchanged. After a crash of the owner it is within the same boot,
        because everything that LMDB has written is in the page cache.
        """
        if state.get("database") is not None:
            return bool(state["database"] == [found.st_size, found.st_mtime_ns])
        return bool(state.get("boot_id")) and state["boot_id"] == self._env.boot_id()

    def _plausible(self, size: int) -> bool:
        """Return whether LMDB's two head pages look right and the file is as long as the newer one says.

        An intact file may be shorter too, where its last pages are free; False therefore only asks for a closer check.
        """
        fd = self._env.open(os.path.join(self.database, "data.mdb"), os.O_RDONLY)
        try:
            heads = []
            page = 0
            for _ in range(2):
                raw = bytearray(_LMDB_META.size)
                read_all(self._env, fd, [memoryview(raw)], page)
                magic, _, _, _, page, last, txn = _LMDB_META.unpack(raw)
                heads.append((magic == _LMDB_MAGIC, txn, (last + 1) * page))
            return all(right for right, _, _ in heads) and size >= max(heads, key=lambda h: h[1])[2]
        finally:
            let_go(self._env, fd)

    def _damaged(self) -> bool:
        """Return whether a child process finds damage; a child, because reading a damaged environment may end the process."""
        status = self._env.run([sys.executable, "-P", check.__file__, self.database], _CHECK_SECONDS)
        if status:
            _log.error("the database in %s is damaged (its check ended with status %d)", self.database, status)
        return status != 0

    def _aside(self, n: int) -> str:
        return os.path.basename(self.database) + ".damaged" + (f".{n}" if n else "")

    def _data(self) -> os.stat_result | None:
        return self.stat(os.path.join(os.path.basename(self.database), "data.mdb"))

    def _make(self, path: str, *, parents: bool = False) -> None:
        """Create a directory of the store unless it exists; raises StorageError if something else is in its place."""
        if parents and not self._is_there(os.path.dirname(path)):
            self._make(os.path.dirname(path), parents=True)
        if not self._is_there(path):
            with suppress(FileExistsError):  # another opener of a shared store may have made it since the check
                self._env.mkdir(path)
        # The path of the store itself may be a link made by the administrator; directories inside the store may not be links.
        elif not stat.S_ISDIR(self._env.lstat(os.path.realpath(path) if parents else path).st_mode):
            raise StorageError(f"{path} is not a directory; remove it, or give the store a directory of its own")

    def _is_there(self, path: str) -> bool:
        try:
            self._env.lstat(path)
        except FileNotFoundError:
            return False
        return True

    def _check_format(self, found: Mapping[str, Any]) -> None:
        if found["kind"] != self._kind:
            raise StoreFormatError(f"{self.path} holds a store of kind {found['kind']}, not {self._kind}; use another directory")
        version = found.get("version")
        if isinstance(version, int) and version > self._version:
            raise StoreFormatError(
                f"{self.path} has format {version} and this tiercache knows formats up to {self._version};"
                " upgrade tiercache, or use another directory"
            )

    def _read(self, name: str) -> dict[str, Any]:
        """Return the content of a small JSON file, of which 4096 bytes are read; an empty dict if it is missing or malformed."""
        found = self.stat(name)
        raw = bytearray(min(found.st_size if found else 0, 4096))
        if not raw:
            return {}
        fd = self._env.open(self.at(name), os.O_RDONLY)
        try:
            read_all(self._env, fd, [memoryview(raw)], 0)
            value = json.loads(raw.rstrip(b"\0"))
        except ValueError:
            return {}
        finally:
            let_go(self._env, fd)
        return value if isinstance(value, dict) else {}

    def _write(self, name: str, value: dict[str, Any]) -> None:
        """Replace a small JSON file atomically."""
        fd = self._env.open(self.at(name + ".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._env, fd, [memoryview(json.dumps(value).encode())], 0)
            self._env.fsync(fd)
        finally:
            let_go(self._env, fd)
        self._env.rename(self.at(name + ".new"), self.at(name))
        sync_directory(self._env, self.path)
