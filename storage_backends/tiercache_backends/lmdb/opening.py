"""Opening of the directory of an `lmdb` store: lock it, check or repair its data, and agree on its size.

While one process opens the store for writing, no other process can open it: `StoreDirectory.claim` takes a
lock, which `admit_others` releases.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from tiercache.errors import ConfigError, StorageError, StoreDamagedError
from tiercache.storage.checksum import MacKey
from tiercache.storage.env import Env
from tiercache_backends.lmdb.budget import (
    SMALLEST_CAPACITY,
    PageBudget,
    capacity_for,
    keep_freed_memory,
    map_bytes,
)
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import SIZE, Size
from tiercache_backends.lmdb.salvage import data_file, salvage
from tiercache_backends.local.directory import StoreDirectory, tree_bytes
from tiercache_backends.local.failures import DamagedError
from tiercache_backends.local.settings import check_capacity

_log = logging.getLogger(__name__)

KIND: Final = "tiercache.lmdb"
VERSION: Final = 1
_DATABASE: Final = "database"
_REPAIR: Final = "database.new"
"""Name of the directory in which a repair writes the new environment."""
_ASIDE_SHARE: Final = 16
"""Divisor of the capacity: damaged data that was put aside for inspection may take one byte in 16."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Parts of an open store.

    Thread safety: immutable; one thread calls `close`, once.
    """

    env: Env
    directory: StoreDirectory
    environment: Environment
    budget: PageBudget
    capacity: int
    """Bytes that the directory may take."""

    @property
    def path(self) -> str:
        """Path of the store's directory."""
        return self.directory.path

    def disk_bytes(self) -> int:
        """Return the bytes that the directory and everything in it take on the disk now. Raises OSError."""
        return tree_bytes(self.env, self.path)

    def data_bytes(self) -> int:
        """Return the bytes that LMDB's file takes on the disk. Raises OSError.

        The file grows up to the map's size and never shrinks.
        """
        return tree_bytes(self.env, os.path.join(self.directory.database, "data.mdb"))

    def mend(self, mac_key: MacKey) -> None:
        """Open LMDB again after damage, and rewrite the environment first if no other process has it open.

        The caller guarantees that no transaction is under way. Raises OSError; the environment is damaged
        then.
        """

        def rewrite() -> bool:
            self.directory.rejoin()
            if self.directory.sole:
                _repair(self.env, self.directory, self.capacity, mac_key)
            return self.directory.sole

        try:
            self.environment.reopen(rewrite)
        finally:
            self.directory.admit_others()

    def close(self) -> None:
        """Close the environment and release the directory; do nothing in a forked child."""
        if self.environment.is_ours():
            sound = self.environment.close()
            self.directory.release(clean=sound, suspect=not sound)


def open_environment(
    env: Env, path: str, capacity: int | None, mac_key: MacKey, *, last_sync: bool, read_only: bool
) -> Opened:
    """Open the store in `path`, or make it where there is none.

    `capacity` None: open an existing store, with the capacity that it has. `last_sync`: see `Environment`.

    Raises ConfigError, StorageError and the errors of StoreDirectory. After an error nothing stays open.
    """
    directory = StoreDirectory(
        env,
        path,
        kind=KIND,
        version=VERSION,
        database=_DATABASE,
        must_exist=capacity is None,
        read_only=read_only,
    )
    check_capacity(capacity, capacity or 0)
    directory.claim(shared=True)
    try:
        try:
            opened = _open(env, directory, capacity, mac_key, last_sync, read_only)
        except DamagedError:
            if read_only or not directory.sole:
                raise
            directory.suspect = True
            opened = _open(env, directory, capacity, mac_key, last_sync, read_only)
        directory.admit_others()
    except BaseException as error:
        directory.release(clean=False)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"the store in {directory.path} cannot be opened: {error}") from error
        raise
    return opened


def _open(
    env: Env,
    directory: StoreDirectory,
    capacity: int | None,
    mac_key: MacKey,
    last_sync: bool,
    read_only: bool,
) -> Opened:
    mac_key.match(directory.settle_format({"mac": mac_key.fingerprint}).get("mac"), directory.path)
    sound = directory.check_environment(closely=False)
    if read_only and not sound:
        raise StoreDamagedError(
            f"{directory.database} is damaged; open the store for writing, which rewrites it from what can be"
            " read"
        )
    if directory.sole and not read_only:
        _clear(env, directory)
        if not sound or directory.suspect:
            _repair(env, directory, capacity, mac_key)
    for name in ("data.mdb", "lock.mdb"):  # `stat` refuses symbolic links; LMDB would follow them
        directory.stat(os.path.join(_DATABASE, name))
    wanted = None if capacity is None else _size_for(env, directory, capacity)
    # A size of 0 makes LMDB use the map size that the last writer stored in the file.
    environment = Environment(
        env,
        directory.database,
        wanted.map_bytes if wanted else 0,
        last_sync=last_sync,
        read_only=read_only,
        alone=directory.sole,
    )
    try:
        if not read_only:
            environment.clear_readers()
            keep_freed_memory()
        size = (
            _agreed_size(directory, environment, wanted) if wanted else _existing_size(directory, environment)
        )
        budget = PageBudget(size.map_bytes // environment.page_bytes, environment.page_bytes)
        return Opened(env, directory, environment, budget, size.capacity)
    except BaseException:
        environment.close()
        raise


def _repair(env: Env, directory: StoreDirectory, capacity: int | None, mac_key: MacKey) -> None:
    """Copy the readable objects of a damaged environment into a new one, which replaces the old file."""
    _clear(env, directory)  # what is left there would count twice
    beside = directory.at(_REPAIR)
    directory.make_part(beside, make=True)
    # The new LMDB pages may be less full than the old ones, so the new map is twice as large as the old file.
    map_size = 2 * max(directory.database_bytes(), capacity or 0, SMALLEST_CAPACITY)
    try:
        environment = Environment(env, beside, map_size, last_sync=True)
        try:
            copied = salvage(env, data_file(directory.database), environment, mac_key)
            environment.sync()
        finally:
            environment.close()
        _log.error("%s is damaged; it was written anew from %d objects", directory.database, copied)
        directory.replace(data_file(beside))  # atomic
        directory.mark_repaired()
    finally:
        _clear(env, directory)


def _clear(env: Env, directory: StoreDirectory) -> None:
    """Remove the files that a finished or an interrupted repair left behind."""
    beside = directory.at(_REPAIR)
    if directory.stat(_REPAIR) is not None:
        for name in env.listdir(beside):
            env.unlink(os.path.join(beside, name))


def _size_for(env: Env, directory: StoreDirectory, capacity: int) -> Size:
    """Return the sizes for a capacity; raise ConfigError if the store is larger already.

    If no other process has the store open, this function first removes damaged data that was put aside and
    that exceeds its share of the capacity.
    """
    if directory.sole:
        _trim_aside(env, directory, capacity)
    foreign = directory.foreign_bytes()
    wanted = Size(capacity, map_bytes(capacity, foreign, directory.path))
    if directory.sole and directory.database_bytes() > wanted.map_bytes:
        raise ConfigError(
            f"the store in {directory.path} has grown to {directory.database_bytes()} bytes, which a capacity"
            f" of {capacity} does not hold; set capacity to"
            f" {capacity_for(directory.database_bytes(), foreign)} or more, or remove the directory to start"
            " empty"
        )
    return wanted


def _existing_size(directory: StoreDirectory, environment: Environment) -> Size:
    """Return the stored sizes and resize the map to them; raise StorageError if none are stored yet."""
    found = environment.read(lambda txn: Size.unpack(txn.get(SIZE, db=environment.facts)))
    if found is None:
        raise StorageError(
            f"{directory.database} has no stored size, and so no objects; open it with a capacity first"
        )
    if environment.map_bytes() != found.map_bytes:
        environment.resize(found.map_bytes)
    return found


def _agreed_size(directory: StoreDirectory, environment: Environment, wanted: Size) -> Size:
    """Return the sizes that all processes that have the store open use.

    If no other process has the store open, these are the `wanted` sizes. Otherwise they are the stored sizes,
    and ConfigError is raised if the stored capacity differs from `wanted.capacity`.
    """
    found = environment.read(lambda txn: Size.unpack(txn.get(SIZE, db=environment.facts)))
    if directory.sole or found is None:
        if found != wanted:
            environment.write(lambda txn: txn.put(SIZE, wanted.pack(), db=environment.facts))
        return wanted
    if found.capacity != wanted.capacity:
        raise ConfigError(
            f"the store in {directory.path} is in use with a capacity of {found.capacity} bytes and cannot be"
            f" opened with {wanted.capacity}; give the same capacity, or close it in all other processes"
            " first"
        )
    if found.map_bytes != wanted.map_bytes:
        environment.resize(found.map_bytes)
    return found


def _trim_aside(env: Env, directory: StoreDirectory, capacity: int) -> None:
    """Remove damaged data that was put aside, the oldest first, until the rest is within its share."""
    asides = directory.asides()
    left = sum(tree_bytes(env, aside) for aside in asides)
    for aside in asides:
        if left <= capacity // _ASIDE_SHARE:
            return
        left -= tree_bytes(env, aside)
        _log.warning("%s takes too much of the store's capacity and is removed", aside)
        for inner in env.listdir(aside):
            env.unlink(os.path.join(aside, inner))
