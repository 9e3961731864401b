"""Slab files, which hold the payloads, and the split of a capacity into slabs and catalog.

This module opens, grows, cuts and syncs the files. `io_engine.py` moves the bytes.

    file          000000.slab            000001.slab            000002.slab (the last may be shorter)
    block         0 ... n-1              n ... 2n-1             2n ...            n = slab_blocks
    extent                 [start, start + blocks): adjacent blocks in one slab
    byte offset   (start % n) * 4096 in file start // n

A write into a preallocated file runs at memory speed, and the disk cannot become full in the middle of the
write. One new file per object would be slower, and each write could find the disk full.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from typing import Final

from tiercache.core import BLOCK_ALIGN
from tiercache.errors import ConfigError
from tiercache.storage.env import Env, close_quietly
from tiercache_backends.file.records import Extent
from tiercache_backends.local.directory import StoreDirectory, check_named, sync_directory

MIN_CAPACITY: Final = 4 << 20
"""Smallest capacity of a store, in bytes."""
_MIN_SLAB: Final = 1 << 20
"""Smallest size of a full slab, in bytes."""
_MIN_CATALOG: Final = 256 << 10
"""Smallest budget of the catalog, in bytes."""
_SLABS: Final = 64
"""Maximum number of slabs. A full slab therefore has at least one 64th of the capacity."""
CATALOG_SHARE: Final = 16
"""Divisor of the capacity: one byte in 16 is for the catalog.

A record has 192 bytes, and a log is written anew beside the old one, so that 45 % of the share may be live.
So a store has at most one object for each 6,827 bytes of its capacity. Only objects of a single block (4,096
bytes) are ever so many.
"""
_FIXED_BYTES: Final = 256 << 10
"""Bytes kept free for small files, directories, and the file system's own data about large files."""
_MIN_GROWTH: Final = (1 << 20) // BLOCK_ALIGN
"""Smallest growth of a slab, in blocks (1 MiB). On a nearly full disk, no smaller growth is tried."""


def blocks_there(env: Env, directory: str, slab_blocks: int) -> int:
    """Return the number of blocks up to the end of the last slab in a directory."""
    count = _count(env, directory)
    return max(0, count - 1) * slab_blocks + (
        env.lstat(_path(directory, count - 1)).st_size // BLOCK_ALIGN if count else 0
    )


def _path(directory: str, index: int) -> str:
    return os.path.join(directory, f"{index:06d}.slab")


def _count(env: Env, directory: str) -> int:
    """Return 1 + the highest slab number in a directory; missing slabs below it count."""
    try:
        names = env.listdir(directory)
    except FileNotFoundError:
        return 0
    there = [n for n in names if n.endswith(".slab") and n[:-5].isdigit()]
    return max((int(n[:-5]) + 1 for n in there), default=0)


@dataclass(frozen=True, slots=True)
class Sizing:
    """Division of a capacity between the slabs and the catalog.

    Even when the catalog uses its whole budget, both together do not exceed the capacity.
    """

    capacity: int
    """Capacity in bytes."""
    budget_blocks: int
    """Maximum number of blocks of all slabs."""
    catalog_bytes: int
    """Maximum bytes of the catalog."""


def slab_blocks_for(capacity: int) -> int:
    """Return the blocks per slab of a store that is made with this capacity in bytes."""
    return max(_MIN_SLAB, 1 << (capacity // _SLABS).bit_length()) // BLOCK_ALIGN


def divide(capacity: int, directory: StoreDirectory, log_bytes: int) -> Sizing:
    """Divide a capacity between slabs and catalog, less the bytes of other files in the directory.

    Raises ConfigError if too little is left.
    """
    #   |-- catalog --|-- _FIXED_BYTES --|-- other files --|-- blocks of slabs --|   = capacity
    catalog_bytes = _catalog_bytes(capacity, log_bytes)
    budget = (capacity - catalog_bytes - _FIXED_BYTES - directory.foreign_bytes(["slabs"])) // BLOCK_ALIGN
    if capacity < MIN_CAPACITY or budget < _MIN_SLAB // BLOCK_ALIGN:
        raise ConfigError(
            f"the store in {directory.path} cannot work in {capacity} bytes:"
            f" {capacity - budget * BLOCK_ALIGN} of them go to its catalog and to other files there; set"
            f" capacity to {max(MIN_CAPACITY, capacity + _MIN_SLAB - budget * BLOCK_ALIGN)} or more"
        )
    return Sizing(capacity, budget, catalog_bytes)


def existing_sizes(there: int, directory: StoreDirectory, log_bytes: int) -> Sizing:
    """Return the sizes that leave an existing store unchanged.

    `there`: number of blocks in its slabs. All of these blocks stay, even if they exceed the capacity.
    """
    besides = _FIXED_BYTES + directory.foreign_bytes(["slabs"])
    capacity = directory.capacity or log_bytes + besides + there * BLOCK_ALIGN
    catalog_bytes = _catalog_bytes(capacity, log_bytes)
    return Sizing(capacity, max(there, (capacity - catalog_bytes - besides) // BLOCK_ALIGN), catalog_bytes)


def _catalog_bytes(capacity: int, log_bytes: int) -> int:
    return max(
        _MIN_CATALOG, *(some // BLOCK_ALIGN * BLOCK_ALIGN for some in (capacity // CATALOG_SHARE, log_bytes))
    )


@dataclass(slots=True)
class Slab:
    """Open slab file.

    Thread safety: only the thread that grows or cuts slabs changes `blocks`.
    """

    fd: int
    """Descriptor for I/O through the page cache; -1 if the store is read-only and the slab is missing."""
    direct: int | None
    """Descriptor for I/O past the page cache; None if the store does not use O_DIRECT."""
    blocks: int = 0
    """Number of blocks that belong to the store; the file may be longer until `Slabs.trim` cuts it."""


class Slabs:
    """Slab files of one directory, each `slab_blocks` blocks long; the last one may be shorter.

    `budget_blocks`: maximum number of blocks of all slabs. `read_only`: nothing is written, so `open` makes
    no missing slab.

    Thread safety: one thread at a time may call `open`, `grow` or `close`. The other methods may run at the
    same time on different extents.
    """

    def __init__(
        self,
        env: Env,
        directory: str,
        slab_blocks: int,
        budget_blocks: int,
        *,
        direct: bool,
        read_only: bool = False,
    ) -> None:
        self._env = env
        self._read_only = read_only
        self._directory: Final = directory
        self._direct = direct
        self.slab_blocks: Final = slab_blocks
        self.budget_blocks: Final = budget_blocks
        self._slabs: list[Slab] = []

    def open(self) -> list[Extent]:
        """Open the existing slabs, and return the part of each slab within the budget as an extent.

        Blocks beyond the budget stay in the files until `trim`.
        """
        for index in range(_count(self._env, self._directory)):
            self._add(index)
            fd = self._slabs[index].fd
            there = self._env.fstat(fd).st_size // BLOCK_ALIGN if fd >= 0 else 0
            self._slabs[index].blocks = min(there, self._target(index))
        return [
            Extent(i * self.slab_blocks, slab.blocks) for i, slab in enumerate(self._slabs) if slab.blocks
        ]

    def check_there(self) -> None:
        """Raise OSError unless the path of every slab still names the open file."""
        for index, slab in enumerate(self._slabs):
            check_named(self._env, self.path(index), slab.fd)

    def trim(self) -> None:
        """Cut off the parts of slabs beyond the budget and after the last whole block.

        Call this when no record of the catalog names these parts any more.
        """
        for slab in self._slabs:
            if self._env.fstat(slab.fd).st_size != slab.blocks * BLOCK_ALIGN:
                self._env.ftruncate(slab.fd, slab.blocks * BLOCK_ALIGN)
        while self._slabs and not self._target(len(self._slabs) - 1):
            self._release(self._slabs.pop())
            self._env.unlink(self.path(len(self._slabs)))

    def grow(self) -> Extent | None:
        """Preallocate the next slab, or the missing end of one; return the new extent.

        Returns None if the budget is used up. If the disk has no room for all new blocks, the extent is
        shorter. Raises OSError if the disk has no room for the smallest growth, and for other failures.
        """
        for index, slab in enumerate(self._slabs):
            if slab.blocks < self._target(index):
                return self._extend(index)
        if not self._target(len(self._slabs)):
            return None
        self._add(len(self._slabs))
        try:
            sync_directory(self._env, self._directory)
        except OSError:
            self._release(self._slabs.pop())
            raise
        return self._extend(len(self._slabs) - 1)

    def at(self, block: int) -> tuple[Slab, int]:
        """Return the slab in which a block lies, and the byte offset of the block in the slab's file."""
        index, before = divmod(block, self.slab_blocks)
        return self._slabs[index], before * BLOCK_ALIGN

    @contextmanager
    def open_for_sync(self, extents: Iterable[Extent]) -> Iterator[list[int]]:
        """Open new descriptors of the files of these extents, for one call of `sync`. Raises OSError.

        The kernel reports a failed write-back only once to each open descriptor. Suppose that threads A and B
        share a descriptor. (1) The write-back of A's bytes fails. (2) B syncs and gets the error. (3) A
        syncs, and this call succeeds although A's bytes are lost.
        """
        fds: list[int] = []
        try:
            for index in sorted({extent.start // self.slab_blocks for extent in extents}):
                # Append one by one, so that `finally` closes those that were opened before a failure.
                fds.append(self._env.open(self.path(index), os.O_RDWR))  # noqa: PERF401
            yield fds
        finally:
            for fd in fds:
                close_quietly(self._env, fd)

    def sync(self, fds: Iterable[int] | None = None) -> None:
        """Write the data of these files to the medium; None means all slabs.

        Raises OSError if that fails.
        """
        for fd in [slab.fd for slab in self._slabs] if fds is None else fds:
            self._env.fdatasync(fd)

    def path(self, index: int) -> str:
        """Return the file path of slab `index`."""
        return _path(self._directory, index)

    def close(self) -> None:
        """Close every file. A second call does nothing."""
        while self._slabs:
            self._release(self._slabs.pop())

    def _add(self, index: int) -> None:
        if self._read_only:
            fd = -1  # a missing slab
            with suppress(FileNotFoundError):
                fd = self._env.open(self.path(index), os.O_RDONLY)
            self._slabs.append(Slab(fd, None))
            return
        fd = self._env.open(self.path(index), os.O_RDWR | os.O_CREAT)
        try:
            direct = self._env.open(self.path(index), os.O_RDWR | os.O_DIRECT) if self._direct else None
        except OSError:
            close_quietly(self._env, fd)
            raise
        self._slabs.append(Slab(fd, direct))

    def _release(self, slab: Slab) -> None:
        if slab.fd >= 0:
            close_quietly(self._env, slab.fd)
        if slab.direct is not None:
            close_quietly(self._env, slab.direct)

    def _extend(self, index: int) -> Extent:
        """Preallocate the missing end of a slab, or as much as the disk has room for."""
        slab, want = self._slabs[index], self._target(index)
        have = slab.blocks
        while True:
            try:
                self._env.fallocate(slab.fd, have * BLOCK_ALIGN, (want - have) * BLOCK_ALIGN)
                break
            except OSError as error:
                # On a full disk, `fallocate` leaves a part of the new blocks allocated. Cut this part off,
                # because it would take disk space unused.
                self._env.ftruncate(slab.fd, have * BLOCK_ALIGN)
                if error.errno not in (ENOSPC, EDQUOT) or want - have < 2 * _MIN_GROWTH:
                    raise
                # Half as many new blocks may still fit.
                want = have + (want - have) // 2
        slab.blocks = want
        return Extent(index * self.slab_blocks + have, want - have)

    def _target(self, index: int) -> int:
        """Return how many blocks the budget allows slab `index`."""
        return max(0, min(self.slab_blocks, self.budget_blocks - index * self.slab_blocks))
