"""Directory of a local store: its lock, its format, its capacity, and what was put aside.

DIR/LOCK, OPENING   see `ownership.py`
DIR/format          JSON {"kind": ..., "version": N, ...}: written when the store is created
DIR/state           JSON {"capacity": bytes, ...}: what the store remembers, none of which it must have
DIR/<database>/     the store's catalog or database
DIR/<database>.damaged, .damaged.1, ...   damaged ones that were put aside
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from errno import EACCES, EDQUOT, EFBIG, ELOOP, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, ESTALE
from itertools import count, takewhile
from typing import Any, Final

from tiercache.errors import ConfigError, StorageError, StoreFormatError, UnavailableError
from tiercache.storage.env import Env, close_quietly, read_all, write_all
from tiercache_backends.local.ownership import OwnerLock

_log = logging.getLogger(__name__)

MAX_CAPACITY: Final = (1 << 48) - 1
"""Maximum capacity of a store in bytes: 256 TiB less one byte.

Up to this capacity, block numbers and map sizes fit into the integer fields in which they are stored.
"""
_MISTAKES: Final = frozenset({EACCES, EPERM, ENOTDIR, ELOOP, ENAMETOOLONG})
"""Errors of a path that another path would not have; other errors are those of a disk."""
_FULL: Final = frozenset({ENOSPC, EDQUOT, EFBIG})
"""Errors of a full disk, an exhausted quota, or the process's limit on the size of a file."""


def is_full(error: OSError) -> bool:
    """Return whether an error says that a disk, a quota or the maximum size of a file is used up."""
    return error.errno in _FULL


def sync_directory(env: Env, path: str) -> None:
    """Flush the names in a directory to the medium, so that they survive a power cut.

    Raises OSError if that fails.
    """
    fd = env.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        env.fsync(fd)
    finally:
        close_quietly(env, fd)


def check_named(env: Env, path: str, fd: int) -> None:
    """Raise OSError unless a path still names an open file: what is written to another file would be lost."""
    held, how = env.fstat(fd), "replaced"
    try:
        named = env.lstat(path)
    except FileNotFoundError:
        how = "removed or moved"
    else:
        if (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):
            return
    raise OSError(ESTALE, f"{path} was {how} while it was open; close the store and open it again")


def tree_bytes(env: Env, path: str) -> int:
    """Return the bytes that a path and everything below it take on the disk.

    Files that are removed during the call count as 0. Raises OSError.
    """
    try:
        found = env.lstat(path)
        inner = env.listdir(path) if stat.S_ISDIR(found.st_mode) else []
    except FileNotFoundError:
        return 0
    return found.st_blocks * 512 + sum(tree_bytes(env, os.path.join(path, name)) for name in inner)


class StoreDirectory(OwnerLock):
    """Directory of one store, locked from `claim` to `release`.

    Order of the calls:

        opening    `claim`, `settle_format`, open what is inside, `admit_others`
        closing    close what is inside, `release`

    With `must_exist` nothing is created; if anything is missing, StorageError is raised. With `read_only`,
    which needs `must_exist`, nothing is written at all.

    Thread safety: one caller at a time, while the store opens and closes; any thread may call `check_there`.
    """

    def __init__(
        self,
        env: Env,
        path: str,
        *,
        kind: str,
        version: int,
        database: str,
        must_exist: bool = False,
        read_only: bool = False,
    ) -> None:
        assert must_exist or not read_only, "a read-only opener creates nothing"
        super().__init__(env, os.path.abspath(path), read_only=read_only)
        self._kind = kind
        self._version = version
        self._must_exist = must_exist
        self.database: Final = self.at(database)
        self.capacity: int | None = None
        """Capacity of the last owner in bytes; None if it is not known. `settle_format` sets it."""

    def check_place(self) -> None:
        """Raise ConfigError or StoreFormatError if `claim` or `settle_format` would refuse the directory.

        Changes nothing. Raises UnavailableError if the disk fails, so that nothing can be said.
        """
        try:
            names = self._env.listdir(self.path)
            if "format" in names:
                self._check_format(self._read("format"))
        except FileNotFoundError:
            return
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            if error.errno not in _MISTAKES:
                raise UnavailableError(f"{self.path} cannot be looked into now: {error}") from error
            raise ConfigError(
                f"{self.path} cannot be looked into ({error.strerror or error}); name a directory of this"
                " user's"
            ) from error
        if names and "LOCK" not in names and not self._must_exist:
            raise ConfigError(self._foreign())

    def claim(self, *, shared: bool = False) -> None:
        """Lock the directory, exclusively or (`shared`) as one of several owners.

        Creates the directory if it is missing. Raises StorageError or StoreLockedError.
        """
        try:
            if self._must_exist and self.stat("format") is None:
                raise StorageError(
                    f"{self.path} holds no tiercache store; name the directory of one, or give a capacity to"
                    " make one there"
                )
            if self._read_only:
                self.look(shared=shared)
                return
            self._make(self.path, parents=True)
            names = self._env.listdir(self.path)
            if "LOCK" not in names and names:
                raise StorageError(self._foreign())
            self.take(shared=shared)
        except OSError as error:
            self.release()
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"the store in {self.path} cannot be opened: {error}") from error
        except BaseException:
            self.release()
            raise

    def settle_format(self, fresh: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored format; for a new store or an older version, store and return `fresh`.

        What an older version stored is put aside; with `must_exist`, StoreFormatError is raised
        instead. StoreFormatError is also raised for a newer version, for another kind of store, and for a
        format file that is unreadable or incomplete.
        """
        if self.sole:
            kept = self.state().get("capacity")
            self.capacity = kept if isinstance(kept, int) and 0 < kept <= MAX_CAPACITY else None
        found = self._read("format")
        if self.stat("format") is None:
            self._env.chmod(self.path, 0o700)
        elif not self._check_format(found):
            if self._must_exist:
                raise StoreFormatError(
                    f"{self.path} has format {found['version']}, which this tiercache does not read any more;"
                    " look at it with the one that made it"
                )
            _log.error("%s has format %d, which is not read any more", self.path, found["version"])
            if self.stat(os.path.basename(self.database)) is not None:
                self.set_aside()
        elif not fresh.keys() <= found.keys():
            raise StoreFormatError(
                f"{self.at('format')} is incomplete; remove {self.path} to start with an empty store"
            )
        else:
            return found
        settled = {"kind": self._kind, "version": self._version, **fresh}
        self._write("format", settled)
        return settled

    def check_there(self) -> None:
        """Raise OSError if the directory that was opened is no longer found under its name."""
        check_named(self._env, self.at("LOCK"), self.fd)

    def remove(self, path: str) -> None:
        """Remove a file that a dead process may have left incomplete; a missing file is no error."""
        with suppress(FileNotFoundError):
            self._env.unlink(path)

    def set_aside(self) -> None:
        """Move what is useless aside, where it can be examined, and make an empty directory for new contents.

        What was put aside earlier is kept.
        """
        if self._env.listdir(self.database):
            aside = next(name for name in self._asides() if self.stat(name) is None)
            self._env.rename(self.database, self.at(aside))
            _log.error("%s was put aside as %s; the store starts empty", self.database, aside)
        self._make(self.database)
        sync_directory(self._env, self.path)

    def asides(self) -> list[str]:
        """Return the paths of what was put aside, oldest first."""
        return [self.at(name) for name in takewhile(lambda name: self.stat(name), self._asides())]

    def _asides(self) -> Iterator[str]:
        aside = os.path.basename(self.database) + ".damaged"
        return (f"{aside}.{n}" if n else aside for n in count())

    def record_capacity(self, capacity: int) -> None:
        """Record the capacity of the store in bytes; later openers with `must_exist` use it."""
        if capacity != self.capacity:
            self.capacity = capacity
            self.remember(capacity=capacity)

    def state(self) -> dict[str, Any]:
        """Return what the store remembers; empty if it is not known."""
        return self._read("state")

    def remember(self, **changes: Any) -> None:
        """Change what the store remembers; on a full disk it forgets everything. Raises OSError."""
        try:
            self._write("state", {**self.state(), **changes})
        except OSError as error:
            if not is_full(error):
                raise
            self.remove(self.at("state"))

    def make_part(self, path: str) -> None:
        """Create a directory of the store if it is missing, and set its mode to 0700.

        With `read_only` nothing is created or changed, and a missing directory raises StorageError.
        """
        if not self._read_only:
            self._make(path)
            self._env.chmod(path, 0o700)
        elif self.stat(os.path.relpath(path, self.path)) is None:
            raise StorageError(
                f"{path} is missing, so nothing was stored in {self.path} yet, or it was removed; nothing can"
                " be shown"
            )

    def foreign_bytes(self, own: Iterable[str] = ()) -> int:
        """Return the disk bytes of foreign files in the directory, which also count towards the capacity.

        All names are foreign except the files of this class, the database, and the names in `own`.
        """
        ours = {"LOCK", "OPENING", "format", "state", os.path.basename(self.database), *own}
        return sum(
            tree_bytes(self._env, self.at(name)) for name in self._env.listdir(self.path) if name not in ours
        )

    def stat(self, name: str) -> os.stat_result | None:
        """Return the status of a regular file or directory in the store; None if it is missing.

        Raises StorageError for anything else.
        """
        try:
            found = self._env.lstat(self.at(name))
        except FileNotFoundError:
            return None
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise StorageError(
                f"{self.at(name)} is neither a file nor a directory; a store follows no links, so remove it"
            )
        return found

    def _make(self, path: str, *, parents: bool = False) -> None:
        """Create a directory of the store unless it exists.

        Raises StorageError if something else is in its place.
        """
        try:
            self._env.mkdir(path)
        except FileExistsError:
            # The store's own path may be a link that the administrator made. Directories inside the store
            # must not be links.
            found = self._env.lstat(self._env.realpath(path) if parents else path)
            if not stat.S_ISDIR(found.st_mode):
                raise StorageError(
                    f"{path} is not a directory; remove it, or give the store a directory of its own"
                ) from None
        except FileNotFoundError:
            if not parents or path == os.path.dirname(path):
                raise
            self._make(os.path.dirname(path), parents=True)
            self._make(path)  # where nothing can be made, as in /proc, this raises

    def _foreign(self) -> str:
        return (
            f"{self.path} is not empty and holds no tiercache store; give the store an empty directory of its"
            " own"
        )

    def _check_format(self, found: Mapping[str, Any]) -> bool:
        """Return whether this version reads the format; raise StoreFormatError for a foreign one."""
        kind, version = found.get("kind"), found.get("version")
        if not isinstance(version, int) or not isinstance(kind, str):
            raise StoreFormatError(
                f"{self.at('format')} cannot be read; remove {self.path} to start with an empty store"
            )
        if kind != self._kind:
            raise StoreFormatError(
                f"{self.path} holds a store of kind {kind}, not {self._kind}; use another directory"
            )
        if version > self._version:
            raise StoreFormatError(
                f"{self.path} has format {version} and this tiercache knows formats up to {self._version};"
                " upgrade tiercache, or use another directory"
            )
        return version == self._version

    def _read(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file of at most 4096 bytes.

        Returns an empty dict if the file is missing or malformed.
        """
        found = self.stat(name)
        raw = bytearray(min(found.st_size if found else 0, 4096))
        if not raw:
            return {}
        fd = self._env.open(self.at(name), os.O_RDONLY)
        try:
            read_all(self._env, fd, [memoryview(raw)], 0)
            value = json.loads(raw.rstrip(b"\0"))
        except (ValueError, RecursionError):
            return {}
        finally:
            close_quietly(self._env, fd)
        return value if isinstance(value, dict) else {}

    def _write(self, name: str, value: dict[str, Any]) -> None:
        """Replace a small JSON file atomically: after a power cut it has the old or the new content."""
        fd = self._env.open(self.at(name + ".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._env, fd, [memoryview(json.dumps(value).encode())], 0)
            self._env.fsync(fd)
        finally:
            close_quietly(self._env, fd)
        self._env.rename(self.at(name + ".new"), self.at(name))
        sync_directory(self._env, self.path)
