"""The slab files: where the bytes lie. Vectored, buffered, straight from and into the caller's buffers.

Overwriting a preallocated file runs at memory speed where one new file per object does not, and cannot run out of disk in the middle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.env import Env
from tiercache.storage.vectors import read_all, take, total, write_all
from tiercache_backends.file.space import Extent

_READ_BYTES: Final = 256 << 10


def sync_directory(env: Env, path: str) -> None:
    """Return once the names in a directory would survive a power cut; raises OSError."""
    fd = env.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        env.fsync(fd)
    finally:
        env.close(fd)


class Slabs:
    """The files `000000.slab`, `000001.slab`, ... of one directory, each `slab_blocks` blocks long and the last one perhaps shorter.

    Thread rule: `open`, `grow` and `close` need one caller at a time; reads and writes of different extents may run at once.
    """

    def __init__(self, env: Env, directory: str, slab_blocks: int, budget_blocks: int) -> None:
        self._env = env
        self._directory: Final = directory
        self.slab_blocks: Final = slab_blocks
        self.budget_blocks: Final = budget_blocks
        self._fds: list[int] = []
        self._blocks: list[int] = []

    def open(self) -> list[Extent]:
        """Open what is there, within the budget: the blocks that each slab has. Slabs and ends beyond the budget stay until `trim`."""
        self._fds = []
        for index in range(len(self._names())):
            fd = self._env.open(self.path(index), os.O_RDWR | os.O_CREAT)
            self._fds.append(fd)
            self._blocks.append(min(self._env.fstat(fd).st_size // BLOCK_ALIGN, self._target(index)))
        return [Extent(i * self.slab_blocks, count) for i, count in enumerate(self._blocks) if count]

    def trim(self) -> None:
        """Give back to the disk what lies beyond the budget or the whole blocks. Call it when the catalog names none of it any more."""
        for index, fd in enumerate(self._fds):
            if self._env.fstat(fd).st_size != self._blocks[index] * BLOCK_ALIGN:
                self._env.ftruncate(fd, self._blocks[index] * BLOCK_ALIGN)
        while self._fds and not self._target(len(self._fds) - 1):
            self._env.close(self._fds.pop())
            self._blocks.pop()
            self._env.unlink(self.path(len(self._fds)))

    def grow(self) -> Extent | None:
        """Preallocate the next slab, or the missing end of one: its new blocks. None when the budget is used up; raises OSError."""
        for index, (fd, have) in enumerate(zip(self._fds, self._blocks, strict=True)):
            if have < self._target(index):
                return self._extend(index, fd)
        if not self._target(len(self._fds)):
            return None
        fd = self._env.open(self.path(len(self._fds)), os.O_RDWR | os.O_CREAT)
        try:
            sync_directory(self._env, self._directory)
        except OSError:
            self._env.close(fd)
            raise
        self._fds.append(fd)
        self._blocks.append(0)
        return self._extend(len(self._fds) - 1, fd)

    def write(self, extents: Sequence[Extent], buffers: Sequence[memoryview], length: int) -> None:
        """Write `length` bytes, or whole blocks where the buffers reach that far; raises OSError."""
        whole = -(-length // BLOCK_ALIGN) * BLOCK_ALIGN
        size = whole if total(buffers) >= whole else length
        done = 0
        for start, count in extents:
            views = take(buffers, done, min(done + count * BLOCK_ALIGN, size))
            write_all(self._env, self._fds[start // self.slab_blocks], views, self._offset(start))
            done += count * BLOCK_ALIGN

    def read(self, extents: Sequence[Extent], buffers: Sequence[memoryview], length: int, seen: Callable[[list[memoryview]], None]) -> bool:
        """Fill the first `length` bytes of `buffers`, showing each part to `seen` as it comes; False where the file ended first.

        In parts, because a checksum over bytes that are still in the processor's cache costs less. Raises OSError.
        """
        done = 0
        for start, count in extents:
            fd, offset = self._fds[start // self.slab_blocks], self._offset(start)
            end = min(done + count * BLOCK_ALIGN, length)
            while done < end:
                step = min(_READ_BYTES, end - done)
                views = take(buffers, done, done + step)
                if read_all(self._env, fd, views, offset) < step:
                    return False
                seen(views)
                done += step
                offset += step
        return True

    def proven(self, extent: Extent) -> bool:
        """Do these blocks keep what is written to them? Overwrites them, reads them back from the medium and compares."""
        fd = self._fds[extent.start // self.slab_blocks]
        offset, size = self._offset(extent.start), extent.blocks * BLOCK_ALIGN
        pattern = extent.start.to_bytes(8, "little") * (size // 8)
        found = bytearray(size)
        try:
            write_all(self._env, fd, [memoryview(pattern)], offset)
            self._env.fdatasync(fd)
            self._env.forget(fd, offset, size)
            return read_all(self._env, fd, [memoryview(found)], offset) == size and found == pattern
        except OSError:
            return False

    def sync(self, extents: Iterable[Extent] | None = None) -> None:
        """Return once these blocks, or all slabs, are on the medium; raises OSError."""
        for index in range(len(self._fds)) if extents is None else sorted({e.start // self.slab_blocks for e in extents}):
            self._env.fdatasync(self._fds[index])

    def locate(self, extent: Extent) -> tuple[str, int]:
        """The file and the offset of an extent."""
        return self.path(extent.start // self.slab_blocks), self._offset(extent.start)

    def path(self, index: int) -> str:
        """The file of slab `index`."""
        return os.path.join(self._directory, f"{index:06d}.slab")

    def close(self) -> None:
        """Close every file. Twice is harmless."""
        fds, self._fds = self._fds, []
        for fd in fds:
            self._env.close(fd)

    def _extend(self, index: int, fd: int) -> Extent:
        have, want = self._blocks[index], self._target(index)
        try:
            self._env.fallocate(fd, have * BLOCK_ALIGN, (want - have) * BLOCK_ALIGN)
        except OSError:
            # A full disk leaves a part behind, which would count towards the cap and serve nobody.
            self._env.ftruncate(fd, have * BLOCK_ALIGN)
            raise
        self._blocks[index] = want
        return Extent(index * self.slab_blocks + have, want - have)

    def _target(self, index: int) -> int:
        """How many blocks slab `index` may have."""
        return max(0, min(self.slab_blocks, self.budget_blocks - index * self.slab_blocks))

    def _offset(self, block: int) -> int:
        return block % self.slab_blocks * BLOCK_ALIGN

    def _names(self) -> list[str]:
        """One name for each slab up to the highest that is there; a missing one counts, and is made anew."""
        there = [n for n in self._env.listdir(self._directory) if n.endswith(".slab") and n[:-5].isdigit()]
        return [f"{i:06d}" for i in range(max((int(n[:-5]) + 1 for n in there), default=0))]
