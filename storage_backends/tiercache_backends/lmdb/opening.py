"""Opening of the directory of an `lmdb` store: lock it, examine its data, and agree on its size.

While one process opens the store for writing, no other process can open it: `StoreDirectory.claim` takes a
lock, which `admit_others` releases.

Nothing is repaired. Damage is noted in the file `state` when the store is closed, and the first process that
opens the store alone puts the environment aside and starts empty. If the last owner died, perhaps of damage,
a child process reads the environment first: so no process dies twice of the same damage.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Final, NamedTuple

import numpy as np

from tiercache.errors import ConfigError, StorageError, StoreDamagedError
from tiercache.storage.checksum import MacKey
from tiercache.storage.env import Env
from tiercache_backends.lmdb import check
from tiercache_backends.lmdb.environment import BATCH_BYTES, DamagedError, Environment
from tiercache_backends.lmdb.records import FACTS
from tiercache_backends.local.directory import StoreDirectory, tree_bytes
from tiercache_backends.local.ownership import CHECK_SECONDS
from tiercache_backends.local.settings import check_capacity

_log = logging.getLogger(__name__)

KIND: Final = "tiercache.lmdb"
VERSION: Final = 3
_DATABASE: Final = "database"
SMALLEST_CAPACITY: Final = 4 << 20
"""Bytes of the smallest capacity that a store may have."""
_FIXED_BYTES: Final = 256 << 10
"""Bytes of a capacity that are set aside for the lock file, the small files and the directories."""
_BOOKKEEPING: Final = 2048
"""Divisor of the capacity: one byte in 2048 is left for the file system's own records of LMDB's file."""
_CHECKED_PER_SECOND: Final = 64 << 20
"""Bytes of an environment for which the check in a child process gets one more second."""
_ASIDE_SHARE: Final = 16
"""Divisor of the capacity: damaged data that was put aside for inspection may take one byte in 16."""


class Opened(NamedTuple):
    """Parts of an open store."""

    directory: StoreDirectory
    environment: Environment
    capacity: int
    """Bytes that the directory may take."""


def open_environment(
    env: Env, path: str, capacity: int | None, mac_key: MacKey, *, last_sync: bool, read_only: bool
) -> Opened:
    """Open the store in `path`, or make it where there is none; `close_environment` ends that.

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
        mac_key.match(directory.settle_format({"mac": mac_key.fingerprint}).get("mac"), directory.path)
        try:
            _examine(env, directory, read_only=read_only)
            opened = _open(env, directory, capacity, last_sync=last_sync, read_only=read_only)
        except DamagedError as error:
            if read_only or not directory.sole:
                first = "" if read_only else "close it in all other processes, and "
                raise StoreDamagedError(
                    f"{directory.database} is damaged; {first}open the store for writing, which puts it"
                    " aside and starts empty"
                ) from error
            directory.set_aside()
            directory.remember(database=None, suspect=False)
            opened = _open(env, directory, capacity, last_sync=last_sync, read_only=False)
        directory.admit_others()
    except BaseException as error:
        directory.release()
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"the store in {directory.path} cannot be opened: {error}") from error
        raise
    return opened


def close_environment(opened: Opened) -> None:
    """Close the environment, note how it was left, and release the directory."""
    directory, environment, _ = opened
    environment.close()
    try:
        if environment.is_damaged and not environment.read_only:
            directory.remember(database=None, suspect=True)
        # Only the last owner records a clean shutdown, because other owners may still write.
        elif not (environment.read_only or environment.broken) and directory.is_last():
            directory.remember(database=_file_of(directory))
    except OSError as error:
        _log.warning("%s cannot be marked as it was left: %s", directory.path, error)
    finally:
        directory.release()


def _open(
    env: Env, directory: StoreDirectory, capacity: int | None, *, last_sync: bool, read_only: bool
) -> Opened:
    for name in ("data.mdb", "lock.mdb"):  # `stat` refuses symbolic links; LMDB would follow them
        directory.stat(os.path.join(_DATABASE, name))
    # A size of 0 makes LMDB use the map size that the last writer stored in the file.
    map_bytes = 0 if capacity is None else _map_for(env, directory, capacity)
    environment = Environment(
        env, directory.database, map_bytes, last_sync=last_sync, read_only=read_only, alone=directory.sole
    )
    try:
        if not read_only:
            environment.clear_readers()
            _keep_freed_memory()
        return Opened(directory, environment, _settle(env, directory, environment, capacity))
    except BaseException:
        environment.close()
        raise


def _settle(env: Env, directory: StoreDirectory, environment: Environment, wanted: int | None) -> int:
    """Agree with all processes that have the store open on its sizes; return the capacity.

    If no other process has the store open, these are the sizes for `wanted`, if that is given. Raises
    ConfigError or StorageError.
    """
    facts = environment.read(environment.facts_in)
    # An environment that was made in the place of a damaged one gets the last capacity.
    capacity = wanted or directory.capacity
    if capacity and not environment.read_only and (not facts.capacity or (wanted and directory.sole)):
        facts = facts._replace(capacity=capacity, map_bytes=_map_for(env, directory, capacity))
        environment.write(lambda txn: txn.put(FACTS, facts.pack(), db=environment.facts))
    if not facts.capacity:
        raise StorageError(
            f"{directory.database} has no stored size, and so no objects; open it with a capacity first"
        )
    if wanted not in (None, facts.capacity):
        raise ConfigError(
            f"the store in {directory.path} is in use with a capacity of {facts.capacity} bytes and cannot be"
            f" opened with {wanted}; give the same capacity, or close it in all other processes first"
        )
    environment.resize(facts.map_bytes)
    if directory.sole and not environment.read_only:
        directory.record_capacity(facts.capacity)
    return facts.capacity


def _examine(env: Env, directory: StoreDirectory, *, read_only: bool) -> None:
    """Raise DamagedError if the environment is damaged; make its directory, and note that it is in use.

    LMDB maps its file, so a damaged file may end the process. While another process has the store open,
    nothing is examined.
    """
    directory.make_part(directory.database)
    if not directory.sole:
        return
    state, found = directory.state(), _file_of(directory)
    # If this process dies, the next owner sees that the environment was not closed in order.
    if not read_only:
        directory.remember(database=None)
    if state.get("suspect"):
        raise DamagedError("an earlier owner met damage")
    if found is not None and state.get("database") != found:
        seconds = CHECK_SECONDS + found[0] / _CHECKED_PER_SECOND
        status = env.run([sys.executable, "-P", check.__file__, directory.database], seconds)
        if status:
            _log.error("%s is damaged: its check ended with status %d", directory.database, status)
            raise DamagedError("its examination failed")


def _file_of(directory: StoreDirectory) -> list[int] | None:
    """Return size and time of change (ns) of LMDB's file; None if there is none."""
    found = directory.stat(os.path.join(_DATABASE, "data.mdb"))
    return None if found is None else [found.st_size, found.st_mtime_ns]


def _map_for(env: Env, directory: StoreDirectory, capacity: int) -> int:
    """Return the size in bytes of LMDB's map in a store of this capacity.

    Raises ConfigError if the capacity is too small, for the store as it is.
    """
    _trim_aside(env, directory, capacity)
    foreign = directory.foreign_bytes()  # bytes of the capacity that other files in the directory take
    # Round down to a multiple of 64 KiB, which every page size divides.
    room = (capacity - _FIXED_BYTES - foreign) * (_BOOKKEEPING - 1) // _BOOKKEEPING >> 16 << 16
    if capacity < SMALLEST_CAPACITY or room < SMALLEST_CAPACITY // 2:
        raise ConfigError(
            f"the store in {directory.path} cannot work in {capacity} bytes, of which other files there take"
            f" {foreign}; set capacity to {SMALLEST_CAPACITY + foreign} or more"
        )
    there = (_file_of(directory) or [0])[0]
    if directory.sole and there > room:
        # The inverse of the division above: 64 KiB and a byte more make up for its rounding down.
        needed = (there + (1 << 16)) * _BOOKKEEPING // (_BOOKKEEPING - 1) + 1
        raise ConfigError(
            f"the store in {directory.path} has grown to {there} bytes, which a capacity"
            f" of {capacity} does not hold; set capacity to {needed + _FIXED_BYTES + foreign} or more, or"
            " remove the directory to start empty"
        )
    return room


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


def _keep_freed_memory() -> None:
    """Let glibc keep up to 16 MiB of this process's freed memory, instead of giving it back to the system.

    LMDB allocates the pages that a transaction changes, and frees them at its end. Whether glibc then returns
    them depends on the heap. If it does, the next transaction meets a page fault for each 4 KiB, and a set of
    objects of 64 KiB and more takes 1.6 times the processor time.
    """
    # When glibc frees a block that it got by `mmap`, it raises its limits to the block's size for `mmap`, and
    # to twice that size for memory that is kept (mallopt(3)). Nothing touches the block, so it costs nothing.
    np.empty(BATCH_BYTES, np.uint8)
