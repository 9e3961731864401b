"""Opening of an `lmdb` store's directory: its other owners, whether its data can be trusted, and how large the store may be."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from tiercache.errors import ConfigError, StorageError, StoreDamagedError
from tiercache.storage.checksum import Seal
from tiercache.storage.env import Env
from tiercache_backends.lmdb.budget import SMALLEST_CAPACITY, Budget, capacity_for, map_bytes
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import SIZE, Size
from tiercache_backends.lmdb.salvage import data_file, salvage
from tiercache_backends.local.directory import StoreDirectory, tree_bytes
from tiercache_backends.local.settings import check_capacity

_log = logging.getLogger(__name__)

KIND: Final = "tiercache.lmdb"
VERSION: Final = 1
_DATABASE: Final = "database"
_REPAIR: Final = "database.new"
"""Name of the environment that a repair writes."""
_ASIDE_SHARE: Final = 16
"""Damaged data are kept for inspection while they take at most one in so many bytes of the capacity: the rest is for new objects."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an open store. `capacity`: bytes that its directory may take.

    Thread safety: immutable; one thread calls `close`, once.
    """

    env: Env
    directory: StoreDirectory
    environment: Environment
    budget: Budget
    capacity: int

    @property
    def path(self) -> str:
        """Path of the store's directory."""
        return self.directory.path

    def disk_bytes(self) -> int:
        """Return the bytes that the directory and everything in it take on the disk now; raises OSError."""
        return tree_bytes(self.env, self.path)

    def data_bytes(self) -> int:
        """Return the bytes that LMDB's file takes on the disk; it grows up to the map's size and never shrinks. Raises OSError."""
        return tree_bytes(self.env, os.path.join(self.directory.database, "data.mdb"))

    def close(self) -> None:
        """Close the environment and release the directory; do nothing in a forked child, where both are the parent's."""
        if self.environment.is_ours():
            sound = self.environment.close()
            self.directory.release(clean=sound, suspect=not sound)


def open_environment(env: Env, path: str, capacity: int | None, seal: Seal, *, last_sync: bool, looks: bool) -> Opened:
    """Open the store in `path`, or make it where there is none.

    `capacity` None: open the store that is there, as it is. `looks`: open it for reading only. `last_sync`: see `Environment`.

    Raises ConfigError, StorageError or what StoreDirectory raises, and then leaves nothing open.
    """
    directory = StoreDirectory(env, path, kind=KIND, version=VERSION, database=_DATABASE, as_found=capacity is None, looks=looks)
    check_capacity(capacity, capacity or 0)
    directory.claim(shared=True)
    try:
        opened = _open(env, directory, capacity, seal, last_sync, looks)
        directory.opened()
    except BaseException as error:
        directory.release(clean=False)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"the store in {directory.path} cannot be opened: {error}") from error
        raise
    return opened


def _open(env: Env, directory: StoreDirectory, capacity: int | None, seal: Seal, last_sync: bool, looks: bool) -> Opened:
    seal.match(directory.settle({"mac": seal.fingerprint}).get("mac"), directory.path)
    sound = directory.prove(closely=False)
    if looks and not sound:
        raise StoreDamagedError(
            f"{directory.database} is damaged; whoever opens the store to change it writes it anew from what can be read"
        )
    if directory.sole and not looks:
        _clear(env, directory)
        if not sound:
            _repair(env, directory, capacity, seal)
        elif directory.suspect:
            directory.healed()  # `prove` has looked at every page
    for name in ("data.mdb", "lock.mdb"):  # LMDB itself would follow a link
        directory.stat(os.path.join(_DATABASE, name))
    wanted = None if capacity is None else _wanted(env, directory, capacity)
    # Without a size LMDB maps what the last writer had mapped.
    environment = Environment(
        env, directory.database, wanted.map_bytes if wanted else 0, last_sync=last_sync, looks=looks, alone=directory.sole
    )
    try:
        if not looks:
            environment.clear_readers()
        size = _agree(directory, environment, wanted) if wanted else _found(directory, environment)
        budget = Budget(size.map_bytes // environment.page_bytes, environment.page_bytes)
        return Opened(env, directory, environment, budget, size.capacity)
    except BaseException:
        environment.close()
        raise


def _repair(env: Env, directory: StoreDirectory, capacity: int | None, seal: Seal) -> None:
    """Write what can be read of a damaged environment into a new one beside it, which then replaces it atomically."""
    beside = directory.at(_REPAIR)
    directory.part(beside, make=True)
    # Twice the size of all that there may be, because the new pages may be less full.
    environment = Environment(env, beside, 2 * max(directory.database_bytes(), capacity or 0, SMALLEST_CAPACITY), last_sync=True)
    try:
        copied = salvage(env, data_file(directory.database), environment, seal)
        environment.sync()
    finally:
        environment.close()
    _log.error("%s is damaged; it was written anew from %d objects", directory.database, copied)
    directory.replace(data_file(beside))
    directory.healed()
    _clear(env, directory)


def _clear(env: Env, directory: StoreDirectory) -> None:
    """Remove what a finished or unfinished repair left behind."""
    beside = directory.at(_REPAIR)
    if directory.stat(_REPAIR) is not None:
        for name in env.listdir(beside):
            env.unlink(os.path.join(beside, name))


def _wanted(env: Env, directory: StoreDirectory, capacity: int) -> Size:
    """Return the size that a capacity stands for; raises ConfigError where the store has outgrown it.

    A sole owner first removes what it must of data put aside as damaged.
    """
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
    """Return the size that the store has, and map that much; raises StorageError where it has none yet."""
    found = environment.read(lambda txn: Size.unpack(txn.get(SIZE, db=environment.facts)))
    if found is None:
        raise StorageError(f"{directory.database} does not say how large it may be, and so holds nothing; open it with a capacity first")
    if environment.map_bytes() != found.map_bytes:
        environment.resize(found.map_bytes)
    return found


def _agree(directory: StoreDirectory, environment: Environment, wanted: Size) -> Size:
    """Return the size that all owners of the store use.

    A sole owner decides it; with others it is the one that they use, and another capacity raises ConfigError.
    """
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
    """Remove data that were put aside as damaged, the oldest first, while they take too large a part of the capacity."""
    asides = directory.asides()
    left = sum(tree_bytes(env, aside) for aside in asides)
    for aside in asides:
        if left <= capacity // _ASIDE_SHARE:
            return
        left -= tree_bytes(env, aside)
        _log.warning("%s takes too much of the store's capacity and is removed", aside)
        for inner in env.listdir(aside):
            env.unlink(os.path.join(aside, inner))
