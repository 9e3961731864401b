"""Reader of LMDB's file, page by page, with plain read calls: nothing is mapped, so damage cannot end the process, and nothing is written.

A record that LMDB cannot find any more, because a page above it in the tree is damaged, still lies in its own page. A page that is neither
free nor behind the end belongs to the newest transaction, so those pages together hold everything that is stored. Layout: LMDB 0.9, struct
MDB_page and MDB_meta.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.storage.env import Env, let_go
from tiercache.storage.vectors import read_all

Pages = npt.NDArray[np.uint8]
"""Whole LMDB pages, shape (n, page size)."""

_MAGIC: Final = 0xBEEFC0DE
_META: Final = struct.Struct("<16xIIQQI36xQ48xQQ")
"""Head page: page header; magic, version, address, map size, page size; the root of the free list; the last page, the transaction."""
_HEADER: Final = struct.Struct("<QHHHH")
"""Page header: page number, size of a key in a page of bare keys, flags, end of the offsets, start of the nodes."""
_NODE: Final = struct.Struct("<HHHH")
"""Node header: low and high half of the value's size, flags, size of the key."""
_NUMBER: Final = struct.Struct("<Q")
_BRANCH, _LEAF, _OVERFLOW, _BARE, _SUB = 1, 2, 4, 0x20, 0x40
_KINDS: Final = (_BRANCH, _LEAF, _OVERFLOW, _LEAF | _BARE)
_LATER: Final = 0x4000 | 0x8000 | 0x10
"""Page flags that have a meaning in memory only (P_LOOSE, P_KEEP, P_DIRTY) but may be left in the file."""
_BIG, _TREE, _SAME = 1, 2, 4
"""Node flags: the value lies in pages of its own; it is the root of a tree; several values have this key."""
_NO_PAGE: Final = 2**64 - 1
"""Page number of the root of an empty tree."""
_AT_ONCE: Final = 256
"""Pages that are read at a time."""
_SIZES: Final = tuple(1 << bits for bits in range(9, 17))
"""Possible page sizes: 512 bytes to 64 KiB."""
_DEEPEST: Final = 32
"""Depth down to which the free list's tree is followed; a deeper tree counts as damaged."""


class Head(NamedTuple):
    """Content of one of the two head pages. `last`: number of the last page."""

    page_bytes: int
    free_root: int
    last: int
    txn: int


class Node(NamedTuple):
    """A key with its value. `page`: number of the page that it lies in."""

    key: bytes
    value: bytes
    page: int


class Place(NamedTuple):
    """A key, and the offset `at` and size of its value in the file, in bytes."""

    key: bytes
    at: int
    size: int


class UnsoundError(ValueError):
    """The file does not have the structure that LMDB gives it."""


class LmdbFile:
    """An LMDB file, open for reading. Raises OSError where it cannot be read.

    The caller guarantees that nothing writes to the file meanwhile.

    Thread safety: one thread.
    """

    def __init__(self, env: Env, path: str) -> None:
        self._env = env
        self._fd = env.open(path, os.O_RDONLY)
        try:
            self.size: Final = env.fstat(self._fd).st_size
            heads = self._heads()
            self.page_bytes: Final = max((head.page_bytes for head in heads), default=4096)
            self.count = self.size // self.page_bytes
            self._newest = max(heads, key=lambda head: head.txn) if len(heads) == 2 else None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        let_go(self._env, self._fd)

    def check(self) -> None:
        """Raise UnsoundError unless the head pages, the free list and every page in use have the form that LMDB gives them."""
        if self._newest is None:
            raise UnsoundError("one of its two head pages is no head page")
        free = self._free()
        # A page allocated and freed within one transaction is never written: such pages, all free, may lie behind the end of the file.
        if len(np.unique(free[(free >= self.count) & (free <= self._newest.last)])) < self._newest.last + 1 - self.count:
            raise UnsoundError(f"it has {self.size} bytes, and its head speaks of {self._newest.last + 1} pages of {self.page_bytes}")
        inside = 0
        for first, pages in self._stretches(self._used(free)):
            inside = self._check_pages(pages, first, inside)

    def pages(self) -> Iterator[tuple[int, Pages]]:
        """Yield all pages in use, in runs of neighbours, each run with the number of its first page.

        Where the free list is damaged, free pages are among them.
        """
        used = np.ones(self.count, np.bool_)
        with suppress(UnsoundError):
            used = self._used(self._free())
        yield from self._stretches(used)

    def is_whole(self, page: Pages, number: int) -> bool:
        """Return whether a page, of shape (page size,), has the form that LMDB gives to page `number`.

        The header of a page that has not must not be believed.
        """
        found, _, flags, lower, upper = _HEADER.unpack_from(page.data)
        kind = flags & ~_LATER
        if found != number or kind not in _KINDS:
            return False
        if kind == _OVERFLOW:
            return True
        try:
            self._check_page(page.data, kind, number, lower, upper)
        except UnsoundError:
            return False
        return True

    def keys(self, page: Pages, size: int) -> Pages:
        """Return the keys of an undamaged page of bare keys of `size` bytes, shape (n, size); n is 0 for any other kind of page."""
        _, key_bytes, flags, lower, _ = _HEADER.unpack_from(page.data)
        count = (lower - 16) // 2 if flags & ~_LATER == _LEAF | _BARE and key_bytes == size else 0
        return page[16 : 16 + count * size].reshape(count, size)

    def nodes(self, page: Pages, number: int) -> Iterator[Node]:
        """Yield the keys and values of an undamaged leaf page; a key with several values there yields one node for each of them."""
        raw = page.data
        _, _, flags, lower, _ = _HEADER.unpack_from(raw)
        if flags & ~_LATER != _LEAF:
            return
        for (at,) in struct.iter_unpack("<H", raw[16 : 16 + (lower - 16) // 2 * 2]):
            yield from self._values(raw, at, number)

    def places(self, page: Pages, number: int) -> Iterator[Place]:
        """Yield the places of the values of an undamaged leaf page, for keys that have one value each. Reads no value."""
        raw = page.data
        _, _, flags, lower, _ = _HEADER.unpack_from(raw)
        if flags & ~_LATER != _LEAF:
            return
        for (at,) in struct.iter_unpack("<H", raw[16 : 16 + (lower - 16) // 2 * 2]):
            low, high, kind, key_bytes = _NODE.unpack_from(raw, at)
            start, size = at + _NODE.size + key_bytes, low | high << 16
            key = bytes(raw[at + _NODE.size : start])
            if not kind:
                yield Place(key, number * self.page_bytes + start, size)
            elif kind == _BIG and self._is_run(first := _NUMBER.unpack_from(raw, start)[0], size):
                yield Place(key, first * self.page_bytes + 16, size)

    def run_of(self, page: Pages) -> int:
        """Return the number of pages that belong together from this undamaged page on: more than 1 where a large value begins."""
        _, _, flags, lower, upper = _HEADER.unpack_from(page.data)
        return max(1, lower | upper << 16) if flags & ~_LATER == _OVERFLOW else 1

    def read(self, place: Place) -> bytearray:
        """Return a value; zeros stand for bytes behind the end of the file."""
        value = bytearray(place.size)
        read_all(self._env, self._fd, [memoryview(value)], place.at)
        return value

    def _values(self, page: memoryview, at: int, number: int) -> Iterator[Node]:
        low, high, flags, key_bytes = _NODE.unpack_from(page, at)
        if flags == _SAME:
            start = at + _NODE.size + key_bytes
            key, inner = bytes(page[at + _NODE.size : start]), page[start : start + (low | high << 16)]
            _, size, kind, lower, _ = _HEADER.unpack_from(inner)
            if kind & _BARE:
                yield from (Node(key, bytes(inner[i : i + size]), number) for i in range(16, 16 + (lower - 16) // 2 * size, size))
        elif (found := self._node(page, at, number)) is not None:
            yield found

    def _node(self, page: memoryview, at: int, number: int) -> Node | None:
        if at < 16 or at + _NODE.size > len(page):
            return None
        low, high, flags, key_bytes = _NODE.unpack_from(page, at)
        start, size = at + _NODE.size + key_bytes, low | high << 16
        if flags & ~_BIG or start > len(page):
            return None
        key = bytes(page[at + _NODE.size : start])
        if not flags:
            return Node(key, bytes(page[start : start + size]), number) if start + size <= len(page) else None
        return self._far(key, bytes(page[start : start + _NUMBER.size]), size, number)

    def _far(self, key: bytes, where: bytes, size: int, number: int) -> Node | None:
        """Return a node whose value lies in pages of its own; None if it does not begin at the page that `where` names."""
        if len(where) < _NUMBER.size:
            return None
        [first] = _NUMBER.unpack(where)
        if not self._is_run(first, size):
            return None
        return Node(key, bytes(self.read(Place(key, first * self.page_bytes + 16, size))), number)

    def _is_run(self, first: int, size: int) -> bool:
        """Return whether a large value of `size` bytes begins on page `first` and ends within the file."""
        if first < 2 or first * self.page_bytes + 16 + size > self.size:
            return False
        found, _, flags, *_ = _HEADER.unpack(self._read(first, 16))
        return (found, flags & ~_LATER) == (first, _OVERFLOW)

    def _heads(self) -> list[Head]:
        """Return the contents of those of the two head pages that are head pages."""
        first = self._head(0)
        places = [first.page_bytes] if first else _SIZES
        second = next((head for at in places if (head := self._head(at)) and head.page_bytes == at), None)
        return [head for head in (first, second) if head]

    def _head(self, at: int) -> Head | None:
        raw = bytearray(_META.size)
        read_all(self._env, self._fd, [memoryview(raw)], at)
        magic, _, _, _, page_bytes, root, last, txn = _META.unpack(raw)
        if magic != _MAGIC or _HEADER.unpack_from(raw)[2] & ~_LATER != 8 or page_bytes not in _SIZES:
            return None
        return Head(page_bytes, root, last, txn)

    def _free(self) -> npt.NDArray[np.uint64]:
        """Return the numbers of the pages that the newest transaction left free; raises UnsoundError."""
        if self._newest is None:
            raise UnsoundError("which head page is the newer one cannot be told")
        found = [np.empty(0, np.uint64)]
        if self._newest.free_root != _NO_PAGE:
            for node in self._leaves(self._newest.free_root, 0):
                listed = np.frombuffer(node.value, np.uint64) if len(node.value) % 8 == 0 else np.empty(0, np.uint64)
                if len(node.key) != 8 or not len(listed) or listed[0] + 1 > len(listed):
                    raise UnsoundError(f"page {node.page} is not of a free list")
                found.append(listed[1 : int(listed[0]) + 1])
        return np.concatenate(found)

    def _leaves(self, page: int, depth: int) -> Iterator[Node]:
        """Yield all nodes of the free list's tree from `page` downwards; raises UnsoundError."""
        if not 2 <= page < self.count or depth > _DEEPEST:
            raise UnsoundError(f"page {page} is not there")
        raw = memoryview(self._read(page, self.page_bytes))
        number, _, flags, lower, upper = _HEADER.unpack_from(raw)
        if number != page or flags & ~_LATER not in (_BRANCH, _LEAF) or not 16 < lower <= upper <= self.page_bytes:
            raise UnsoundError(f"page {page} is damaged")
        for (at,) in struct.iter_unpack("<H", raw[16 : 16 + (lower - 16) // 2 * 2]):
            if flags & _LEAF:
                found = self._node(raw, at, page)
                if found is None:
                    raise UnsoundError(f"page {page} is damaged")
                yield found
            else:
                if at + _NODE.size > len(raw):
                    raise UnsoundError(f"page {page} is damaged")
                low, high, top, _ = _NODE.unpack_from(raw, at)
                yield from self._leaves(low | high << 16 | top << 32, depth + 1)

    def _used(self, free: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return a mask of the pages of the file that are in use, shape (count,); raises UnsoundError."""
        assert self._newest is not None, "who knows the free pages knows the head"
        if len(free) and int(free.max()) > self._newest.last:
            raise UnsoundError("its free list names pages behind its end")
        used = np.ones(self.count, np.bool_)
        used[:2] = False
        used[self._newest.last + 1 :] = False
        used[free[free < self.count].astype(np.int64)] = False
        return used

    def _stretches(self, wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[int, Pages]]:
        numbers = np.flatnonzero(wanted)
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        for run in np.split(numbers, breaks):
            for start in range(0, len(run), _AT_ONCE):
                part = run[start : start + _AT_ONCE]
                first = int(part[0])
                raw = self._read(first, len(part) * self.page_bytes)
                yield first, np.frombuffer(raw, np.uint8).reshape(len(part), self.page_bytes)

    def _check_pages(self, pages: Pages, first: int, inside: int) -> int:
        """Check a run of pages, of which the first `inside` continue a large value; raises UnsoundError.

        Returns how many pages of the next run continue the last large value of this one.
        """
        heads = np.ascontiguousarray(pages[:, :16])
        numbers, words, sizes = heads.view(np.uint64)[:, 0], heads.view(np.uint16).astype(np.int64), heads.view(np.uint32)[:, 3]
        key_bytes, kinds, lower, upper = words[:, 4], words[:, 5] & ~_LATER, words[:, 6], words[:, 7]
        right = numbers == np.arange(first, first + len(pages), dtype=np.uint64)
        # Leaf pages of bare keys are checked by their headers alone, all at once: a catalog has few pages of other kinds.
        full = 16 + (lower - 16) // 2 * key_bytes
        plain = right & (kinds == _LEAF | _BARE) & (lower >= 16) & (lower <= upper) & (upper <= self.page_bytes) & (full <= self.page_bytes)
        others = np.flatnonzero(~plain)
        at = inside
        while (nth := int(np.searchsorted(others, at))) < len(others):
            at = int(others[nth])
            kind = int(kinds[at])
            if not right[at] or kind not in _KINDS:
                raise UnsoundError(f"page {first + at} is damaged")
            if kind == _OVERFLOW:
                at += max(1, int(sizes[at]))
                continue
            self._check_page(pages[at].data, kind, first + at, int(lower[at]), int(upper[at]))
            at += 1
        return max(0, at - len(pages))

    def _check_page(self, page: memoryview, kind: int, number: int, lower: int, upper: int) -> None:
        """Raise UnsoundError unless everything in a branch or leaf page lies inside it."""
        if not 16 <= lower <= upper <= self.page_bytes:
            raise UnsoundError(f"page {number} is damaged")
        if kind & _BARE:
            if 16 + (lower - 16) // 2 * _HEADER.unpack_from(page)[1] > self.page_bytes:
                raise UnsoundError(f"page {number} is damaged")
            return
        for (at,) in struct.iter_unpack("<H", page[16 : 16 + (lower - 16) // 2 * 2]):
            low, high, flags, key_bytes = _NODE.unpack_from(page, at) if 16 <= at <= len(page) - _NODE.size else (0, 0, 0, len(page))
            start, size = at + _NODE.size + key_bytes, low | high << 16
            if kind == _BRANCH:
                right = start <= len(page) and 2 <= low | high << 16 | flags << 32 < self.count
            else:
                right = flags in (0, _BIG, _TREE, _SAME, _SAME | _TREE) and start + (_NUMBER.size if flags & _BIG else size) <= len(page)
            if not right or (flags == _SAME and kind == _LEAF and not _is_sub_page(page[start : start + size])):
                raise UnsoundError(f"page {number} is damaged")

    def _read(self, page: int, size: int) -> bytearray:
        """Return `size` bytes from the start of a page; zeros behind the end of the file."""
        raw = bytearray(size)
        read_all(self._env, self._fd, [memoryview(raw)], page * self.page_bytes)
        return raw


def _is_sub_page(inner: memoryview) -> bool:
    """Return whether these bytes are several values of one key, in the form of an LMDB sub-page."""
    if len(inner) < 16:
        return False
    _, size, flags, lower, _ = _HEADER.unpack_from(inner)
    return bool(flags & _SUB) and (not flags & _BARE or (size > 0 and lower >= 16 and 16 + (lower - 16) // 2 * size <= len(inner)))
