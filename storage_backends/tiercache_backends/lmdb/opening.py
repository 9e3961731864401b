"""Opens the directory of an `lmdb` store: who else is there, whether the data can be trusted, and how large the store may be."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from tiercache.errors import ConfigError, StorageError
from tiercache.storage.checksum import Seal
from tiercache.storage.env import Env
from tiercache_backends.lmdb.budget import Budget, capacity_for, map_bytes
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import SIZE, Size
from tiercache_backends.local.directory import StoreDirectory, tree_bytes

_log = logging.getLogger(__name__)

KIND: Final = "tiercache.lmdb"
VERSION: Final = 1
_DATABASE: Final = "database"
_ASIDE_SHARE: Final = 16
"""Damaged data are kept for a look at them if they take no more than this part of the capacity: the rest is for what is stored anew."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open store's parts.

    Thread rule: `close` once; the rest is immutable.
    """

    env: Env
    directory: StoreDirectory
    environment: Environment
    budget: Budget
    capacity: int

    @property
    def path(self) -> str:
        """The store's directory."""
        return self.directory.path

    def disk_bytes(self) -> int:
        """Bytes that the directory and everything in it take on the disk now; raises OSError."""
        return tree_bytes(self.env, self.path)

    def data_bytes(self) -> int:
        """Bytes on the disk of LMDB's file, which grows up to the map and never shrinks; raises OSError."""
        return tree_bytes(self.env, os.path.join(self.directory.database, "data.mdb"))

    def close(self) -> None:
        """Close the environment and give up the directory. In a forked child both are the parent's and stay as they are."""
        if self.environment.is_ours():
            sound = self.environment.close()
            self.directory.release(clean=sound, suspect=not sound)


def open_environment(env: Env, path: str, capacity: int | None, seal: Seal, *, last_sync: bool) -> Opened:
    """Open or make the store in `path`; with a capacity of None open the one that is there, as it is.

    Raises ConfigError, StorageError or what StoreDirectory raises, and leaves nothing open then.
    """
    directory = StoreDirectory(env, path, kind=KIND, version=VERSION, database=_DATABASE, as_found=capacity is None)
    directory.claim(shared=True)
    try:
        opened = _open(env, directory, capacity, seal, last_sync)
        directory.opened()
    except BaseException as error:
        directory.release(clean=False)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"the store in {directory.path} cannot be opened: {error}") from error
        raise
    return opened


def _open(env: Env, directory: StoreDirectory, capacity: int | None, seal: Seal, last_sync: bool) -> Opened:
    seal.match(directory.settle({"mac": seal.fingerprint}).get("mac"), directory.path)
    directory.prove()
    for name in ("data.mdb", "lock.mdb"):  # LMDB itself would follow a link
        directory.stat(os.path.join(_DATABASE, name))
    wanted = None if capacity is None else _wanted(env, directory, capacity)
    # Without a size LMDB maps what the last writer had mapped.
    environment = Environment(env, directory.database, wanted.map_bytes if wanted else 0, last_sync=last_sync)
    try:
        environment.clear_readers()
        size = _agree(directory, environment, wanted) if wanted else _found(directory, environment)
        budget = Budget(size.map_bytes // environment.page_bytes, environment.page_bytes)
        return Opened(env, directory, environment, budget, size.capacity)
    except BaseException:
        environment.close()
        raise


def _wanted(env: Env, directory: StoreDirectory, capacity: int) -> Size:
    """The size that a capacity stands for."""
    if directory.sole:
        _trim_aside(env, directory, capacity)
    foreign = directory.foreign_bytes()
    wanted = Size(capacity, map_bytes(capacity, foreign, directory.path))
    if directory.sole and directory.database_bytes() > wanted.map_bytes:
        raise ConfigError(
            f"the store in {directory.path} has grown to {directory.database_bytes()} bytes, which a capacity of {capacity} does not hold;"
            f" set capacity to {capacity_for(directory.database_bytes(), foreign)} or more, or remove the directory to start empty"
        )
    return wanted


def _found(directory: StoreDirectory, environment: Environment) -> Size:
    """The size that the store has."""
    found = environment.read(lambda txn: Size.unpack(txn.get(SIZE, db=environment.facts)))
    if found is None:
        raise StorageError(f"{directory.database} does not say how large it may be, and so holds nothing; open it with a capacity first")
    if environment.map_bytes() != found.map_bytes:
        environment.resize(found.map_bytes)
    return found


def _agree(directory: StoreDirectory, environment: Environment, wanted: Size) -> Size:
    """The size that all who share the store use. Alone we decide it; otherwise it is theirs."""
    found = environment.read(lambda txn: Size.unpack(txn.get(SIZE, db=environment.facts)))
    if directory.sole or found is None:
        if found != wanted:
            environment.write(lambda txn: txn.put(SIZE, wanted.pack(), db=environment.facts))
        return wanted
    if found.capacity != wanted.capacity:
        raise ConfigError(
            f"the store in {directory.path} is in use with a capacity of {found.capacity} bytes and cannot be opened with"
            f" {wanted.capacity}; give the same capacity, or close it in all other processes first"
        )
    if found.map_bytes != wanted.map_bytes:
        environment.resize(found.map_bytes)
    return found


def _trim_aside(env: Env, directory: StoreDirectory, capacity: int) -> None:
    """Remove data that were put aside as damaged where they would leave too little room."""
    aside = directory.database + ".damaged"
    name = os.path.basename(aside)
    if directory.stat(name) is None or tree_bytes(env, aside) <= capacity // _ASIDE_SHARE:
        return
    _log.warning("%s takes too much of the store's capacity and is removed", aside)
    for inner in env.listdir(aside):
        env.unlink(os.path.join(aside, inner))
