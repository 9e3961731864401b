"""Slab files, which hold the payloads. This module opens, grows, cuts, syncs and proves them; `movement.py` moves the bytes.

Overwriting a preallocated file runs at memory speed, unlike writing one new file per object, and cannot run out of disk space halfway.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC, ESTALE
from mmap import mmap
from typing import Final, Protocol

import numpy as np

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.env import Env, let_go
from tiercache.storage.vectors import read_all, write_all
from tiercache_backends.file.records import Records
from tiercache_backends.file.space import Extent
from tiercache_backends.local.directory import sync_directory

_SMALLEST_GROWTH: Final = (1 << 20) // BLOCK_ALIGN
"""Smallest growth of a slab, in blocks (1 MiB), that is tried on a disk that has no room for more."""
_MOST_MISSING: Final = 4096
"""Slabs beyond the last existing one in which records may name blocks; records that name blocks further on are not believed."""


def goes_direct(env: Env, directory: str) -> bool:
    """Return whether files in this directory work with O_DIRECT and the page cache can be asked what it holds.

    Tries both on a file of one block. Without the second, cached blocks could not be told from others and would always be moved past the
    cache. On a file system where any step fails the store uses plain calls.
    """
    path = os.path.join(directory, "probe")
    block = memoryview(mmap(-1, BLOCK_ALIGN))
    try:
        with _opened(env, path, os.O_RDWR | os.O_CREAT) as fd, _opened(env, path, os.O_RDWR | os.O_DIRECT) as straight:
            moved = env.pwritev(straight, [block], 0) == env.preadv(straight, [block], 0) == BLOCK_ALIGN
            env.cached(fd, 0, BLOCK_ALIGN)
            return moved
    except OSError:
        return False
    finally:
        with suppress(OSError):
            env.unlink(path)


def blocks_there(env: Env, directory: str, slab_blocks: int) -> int:
    """Return the number of blocks up to the end of the last slab in a directory."""
    count = _count(env, directory)
    return max(0, count - 1) * slab_blocks + (env.lstat(_path(directory, count - 1)).st_size // BLOCK_ALIGN if count else 0)


def blocks_named(records: Records, extents: Iterable[Extent], slab_blocks: int) -> dict[int, int]:
    """Return, by slab, how many blocks it must have for these records and further extents; impossible extents are left out."""
    more = list(extents)
    starts = np.concatenate([records["start"].astype(np.int64), np.array([extent.start for extent in more], np.int64)])
    counts = np.concatenate([records["blocks"].astype(np.int64), np.array([extent.blocks for extent in more], np.int64)])
    right = (starts >= 0) & (starts % slab_blocks + counts <= slab_blocks)
    slabs, owners = np.unique(starts[right] // slab_blocks, return_inverse=True)
    ends = np.zeros(len(slabs), np.int64)
    np.maximum.at(ends, owners, (starts % slab_blocks + counts)[right])
    return dict(zip(slabs.tolist(), ends.tolist(), strict=True))


def _path(directory: str, index: int) -> str:
    return os.path.join(directory, f"{index:06d}.slab")


def _count(env: Env, directory: str) -> int:
    """Return the number of slabs up to the highest that exists; a missing one before it counts, and is made anew."""
    try:
        names = env.listdir(directory)
    except FileNotFoundError:
        return 0
    there = [n for n in names if n.endswith(".slab") and n[:-5].isdigit()]
    return max((int(n[:-5]) + 1 for n in there), default=0)


@contextmanager
def _opened(env: Env, path: str, flags: int) -> Iterator[int]:
    fd = env.open(path, flags)
    try:
        yield fd
    finally:
        let_go(env, fd)


class Placed(Protocol):
    """Anything that begins at a block."""

    @property
    def start(self) -> int:
        """Number of its first block."""


@dataclass(slots=True)
class Slab:
    """Open slab file: `fd` goes through the page cache, `direct` past it (None where that is not possible).

    Thread safety: `blocks` belongs to the thread that grows or cuts slabs.
    """

    fd: int
    direct: int | None
    blocks: int = 0


class Slabs:
    """Files `000000.slab`, `000001.slab`, ... of one directory, each `slab_blocks` blocks long; the last one may be shorter.

    `looks`: they are opened for reading only, with `look`.

    Thread safety: `open`, `grow` and `close` need one caller at a time; the rest may run at once on different extents.
    """

    def __init__(self, env: Env, directory: str, slab_blocks: int, budget_blocks: int, *, direct: bool, looks: bool = False) -> None:
        self._env = env
        self._looks = looks
        self._nothing: int | None = None
        self._directory: Final = directory
        self._direct = direct
        self.slab_blocks: Final = slab_blocks
        self.budget_blocks: Final = budget_blocks
        self._slabs: list[Slab] = []

    def open(self) -> list[Extent]:
        """Open the existing slabs and return the blocks that each has, within the budget. Whatever lies beyond it stays until `trim`."""
        for index in range(_count(self._env, self._directory)):
            self._add(index)
            self._slabs[index].blocks = min(self._env.fstat(self._slabs[index].fd).st_size // BLOCK_ALIGN, self._target(index))
        return self._extents()

    def look(self, named: Mapping[int, int]) -> list[Extent]:
        """Open the existing slabs for reading, as if each had the blocks that the catalog names, and return the blocks of each.

        `named`: the number of blocks that the catalog needs, by slab. Missing blocks read like those of a file that was cut.
        """
        there = _count(self._env, self._directory)
        for index in range(max([there, *(index + 1 for index in named if index < there + _MOST_MISSING)])):
            self._add(index)
            self._slabs[index].blocks = max(self._env.fstat(self._slabs[index].fd).st_size // BLOCK_ALIGN, named.get(index, 0))
        return self._extents()

    def check_there(self) -> None:
        """Raise OSError unless every slab still lies where it was opened."""
        for index, slab in enumerate(self._slabs):
            named, held = self._env.lstat(self.path(index)), self._env.fstat(slab.fd)
            if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
                raise OSError(ESTALE, f"{self.path(index)} was replaced while it was open; close the store and open it again")

    def trim(self) -> None:
        """Cut off whatever lies beyond the budget or the last whole block. Call it once the catalog names none of it any more."""
        for slab in self._slabs:
            if self._env.fstat(slab.fd).st_size != slab.blocks * BLOCK_ALIGN:
                self._env.ftruncate(slab.fd, slab.blocks * BLOCK_ALIGN)
        while self._slabs and not self._target(len(self._slabs) - 1):
            self._release(self._slabs.pop())
            self._env.unlink(self.path(len(self._slabs)))

    def grow(self) -> Extent | None:
        """Preallocate the next slab, or the missing end of one, and return its new blocks; None when the budget is used up.

        The new blocks are fewer on a disk that has no room for all. Raises OSError.
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

    def slab(self, place: Placed) -> Slab:
        """Return the slab in which a place lies."""
        return self._slabs[place.start // self.slab_blocks]

    def offset(self, place: Placed) -> int:
        """Return the byte offset of a place in its slab's file."""
        return place.start % self.slab_blocks * BLOCK_ALIGN

    def proven(self, extent: Extent) -> bool:
        """Return whether these blocks keep what is written to them: overwrite them, read them back from the medium and compare."""
        fd, offset, size = self.slab(extent).fd, self.offset(extent), extent.blocks * BLOCK_ALIGN
        pattern = extent.start.to_bytes(8, "little") * (size // 8)
        found = bytearray(size)
        try:
            write_all(self._env, fd, [memoryview(pattern)], offset)
            self._env.fdatasync(fd)
            self._env.forget(fd, offset, size)
            return read_all(self._env, fd, [memoryview(found)], offset) == size and found == pattern
        except OSError:
            return False

    def forget(self, extent: Extent) -> None:
        """Drop these blocks from the page cache, so that the next read comes from the medium; raise OSError."""
        self._env.forget(self.slab(extent).fd, self.offset(extent), extent.blocks * BLOCK_ALIGN)

    @contextmanager
    def witnesses(self, extents: Iterable[Extent]) -> Iterator[list[int]]:
        """Open new descriptors of the files of these extents, for a `sync` by this caller alone; raise OSError.

        The kernel reports a failed write-back once to each open file. On a shared descriptor another thread's sync could receive the report
        of a failure of this caller's bytes, and this caller's sync would succeed.
        """
        fds: list[int] = []
        try:
            for index in sorted({extent.start // self.slab_blocks for extent in extents}):
                fds.append(self._env.open(self.path(index), os.O_RDWR))  # noqa: PERF401 (those opened before a failure must be closed)
            yield fds
        finally:
            for fd in fds:
                let_go(self._env, fd)

    def sync(self, fds: Iterable[int] | None = None) -> None:
        """Return once these files (None: all slabs) are on the medium; raise OSError if that fails."""
        for fd in [slab.fd for slab in self._slabs] if fds is None else fds:
            self._env.fdatasync(fd)

    def locate(self, extent: Extent) -> tuple[str, int]:
        """Return the file path and the byte offset of an extent."""
        return self.path(extent.start // self.slab_blocks), self.offset(extent)

    def path(self, index: int) -> str:
        """Return the file path of slab `index`."""
        return _path(self._directory, index)

    def close(self) -> None:
        """Close every file; harmless when repeated."""
        while self._slabs:
            self._release(self._slabs.pop())
        if self._nothing is not None:
            let_go(self._env, self._nothing)
            self._nothing = None

    def _extents(self) -> list[Extent]:
        return [Extent(i * self.slab_blocks, slab.blocks) for i, slab in enumerate(self._slabs) if slab.blocks]

    def _add(self, index: int) -> None:
        if self._looks:
            self._slabs.append(Slab(self._readable(index), None))
            return
        fd = self._env.open(self.path(index), os.O_RDWR | os.O_CREAT)
        try:
            direct = self._env.open(self.path(index), os.O_RDWR | os.O_DIRECT) if self._direct else None
        except OSError:
            let_go(self._env, fd)
            raise
        self._slabs.append(Slab(fd, direct))

    def _readable(self, index: int) -> int:
        try:
            return self._env.open(self.path(index), os.O_RDONLY)
        except FileNotFoundError:
            if self._nothing is None:
                self._nothing = self._env.open(os.devnull, os.O_RDONLY)
            return self._nothing

    def _release(self, slab: Slab) -> None:
        if slab.fd != self._nothing:
            let_go(self._env, slab.fd)
        if slab.direct is not None:
            let_go(self._env, slab.direct)

    def _extend(self, index: int) -> Extent:
        slab, want = self._slabs[index], self._target(index)
        have = slab.blocks
        while True:
            try:
                self._env.fallocate(slab.fd, have * BLOCK_ALIGN, (want - have) * BLOCK_ALIGN)
                break
            except OSError as error:
                # On a full disk a part stays allocated, which would count towards the cap without being used.
                self._env.ftruncate(slab.fd, have * BLOCK_ALIGN)
                if error.errno not in (ENOSPC, EDQUOT) or want - have < 2 * _SMALLEST_GROWTH:
                    raise
                want = have + (want - have) // 2
        slab.blocks = want
        return Extent(index * self.slab_blocks + have, want - have)

    def _target(self, index: int) -> int:
        """Return how many blocks slab `index` may have."""
        return max(0, min(self.slab_blocks, self.budget_blocks - index * self.slab_blocks))
