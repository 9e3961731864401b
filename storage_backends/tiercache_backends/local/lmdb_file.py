"""Reader of LMDB's file, page by page, with plain read calls.

The file is not mapped, so damage cannot kill the process. Nothing is written.

LMDB finds a record by a path of pages from the tree's root. If a page of this path is damaged, LMDB cannot
find the record any more, but the record's own page may be intact. All pages that are neither free nor behind
the end belong to the newest transaction. So these pages together contain everything that is stored.

Layout of LMDB 0.9 (struct MDB_page and MDB_meta). A page begins with a header of 16 bytes, which contains
`lower` and `upper`. Pages 0 and 1 are the head pages. The others are:

    leaf, branch   | header | offsets of the nodes, u16 ... | unused | ... nodes |
                   0        16                            lower    upper         page size
    bare keys      | header | key | key | ...     a leaf of keys of equal size without values (DUPFIXED);
                                                  `lower` counts 2 bytes per key, as if there were offsets
    large value    | header | value ...           on adjacent pages, of which only the first has a header; the
                                                  bytes of `lower` and `upper` are the number of these pages
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.storage.env import Env, close_quietly, read_all

LmdbPages = npt.NDArray[np.uint8]
"""Whole LMDB pages, shape (n, page size)."""

_MAGIC: Final = 0xBEEFC0DE
_META: Final = struct.Struct("<16xIIQQI36xQ48xQQ")
"""Head page: magic, version, address, map size, page size, root of the free list, last page, transaction.

The page header and other fields are skipped.
"""
_HEADER: Final = struct.Struct("<QHHHH")
"""Page header: page number, key size (only with bare keys), flags, `lower`, `upper`."""
_NODE: Final = struct.Struct("<HHHH")
"""Header of a node: low and high half of the value's size, flags, size of the key."""
_NUMBER: Final = struct.Struct("<Q")
_BRANCH, _LEAF, _OVERFLOW, _BARE, _SUB = 1, 2, 4, 0x20, 0x40
"""Page flags: branch, leaf, first page of a large value, bare keys, sub-page inside a node."""
_KINDS: Final = (_BRANCH, _LEAF, _OVERFLOW, _LEAF | _BARE)
"""Flags that a page may have."""
_LATER: Final = 0x4000 | 0x8000 | 0x10
"""Page flags that LMDB uses in memory only (P_LOOSE, P_KEEP, P_DIRTY) but may leave in the file."""
_BIG, _TREE, _SAME = 1, 2, 4
"""Node flags: the value has its own pages, the value is the root of a tree, the key has several values."""
_NO_PAGE: Final = 2**64 - 1
"""Page number of the root of an empty tree."""
_PAGES_PER_READ: Final = 256
"""Maximum number of LMDB pages that one call reads."""
_SIZES: Final = tuple(1 << bits for bits in range(9, 17))
"""Possible page sizes: 512 bytes to 64 KiB."""
_MAX_DEPTH: Final = 32
"""Maximum depth of the free list's tree; a deeper tree counts as damaged."""


class Head(NamedTuple):
    """Content of one of the two head pages."""

    page_bytes: int
    free_root: int
    """Number of the root page of the free list."""
    last: int
    """Number of the last page."""
    txn: int
    """Number of the transaction that wrote the head page."""


class LmdbNode(NamedTuple):
    """A key with its value."""

    key: bytes
    value: bytes
    page: int
    """Number of the page in which the node lies."""


class UnsoundError(ValueError):
    """The file does not have the structure that LMDB gives it."""


class LmdbFile:
    """An LMDB file, open for reading. Every method raises OSError if the file cannot be read.

    The caller guarantees that nothing writes to the file while it is open.

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
        close_quietly(self._env, self._fd)

    def check(self) -> None:
        """Raise UnsoundError unless head pages, free list and every page in use are well formed."""
        if self._newest is None:
            raise UnsoundError("one of its two head pages is malformed")
        free = self._free()
        # LMDB never writes a page that one transaction allocates and frees again. So the file may end before
        # the last page, if all pages behind the end of the file are free.
        behind = np.unique(free[(free >= self.count) & (free <= self._newest.last)])
        if len(behind) < self._newest.last + 1 - self.count:
            raise UnsoundError(
                f"it has {self.size} bytes, but its head names {self._newest.last + 1} pages of"
                f" {self.page_bytes}"
            )
        inside = 0  # number of pages at the start of the next run that continue a large value
        for first, pages in self._read_runs(self._used(free)):
            inside = self._check_pages(pages, first, inside)

    def is_plausible(self) -> bool:
        """Return whether both head pages look right and the file is as long as the newer one says.

        A result of False is no proof of damage, because an intact file may be shorter if its last pages are
        free. It means that a closer check is needed.
        """
        return self._newest is not None and self.size >= (self._newest.last + 1) * self.page_bytes

    def pages(self) -> Iterator[tuple[int, LmdbPages]]:
        """Yield all pages in use, in runs of adjacent pages, each run with the number of its first page.

        If the free list is damaged, free pages are yielded too.
        """
        used = np.ones(self.count, np.bool_)
        with suppress(UnsoundError):
            used = self._used(self._free())
        yield from self._read_runs(used)

    def is_whole(self, page: LmdbPages, number: int) -> bool:
        """Return whether a page, of shape (page size,), is well formed as page `number`.

        The header of a page that is not well formed must not be trusted.
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

    def keys(self, page: LmdbPages, size: int) -> LmdbPages:
        """Return the keys of an undamaged page of bare keys of `size` bytes, as an array of shape (n, size).

        For any other page, n is 0.
        """
        _, key_bytes, flags, lower, _ = _HEADER.unpack_from(page.data)
        count = (lower - 16) // 2 if flags & ~_LATER == _LEAF | _BARE and key_bytes == size else 0
        return page[16 : 16 + count * size].reshape(count, size)

    def nodes(self, page: LmdbPages, number: int) -> Iterator[LmdbNode]:
        """Yield the keys and values of an undamaged leaf page.

        A key with several values yields one node per value.
        """
        raw = page.data
        _, _, flags, lower, _ = _HEADER.unpack_from(raw)
        if flags & ~_LATER != _LEAF:
            return
        for (at,) in struct.iter_unpack("<H", raw[16 : 16 + (lower - 16) // 2 * 2]):
            yield from self._values(raw, at, number)

    def _values(self, page: memoryview, at: int, number: int) -> Iterator[LmdbNode]:
        #   node    | low u16 | high u16 | flags u16 | key size u16 | key | value |
        # The size of the value is low + 65,536 * high. Several values of one key are bare keys in a sub-page,
        # which begins with a page header and lies in the place of the value.
        low, high, flags, key_bytes = _NODE.unpack_from(page, at)
        if flags == _SAME:
            start = at + _NODE.size + key_bytes
            key, inner = bytes(page[at + _NODE.size : start]), page[start : start + (low | high << 16)]
            _, size, kind, lower, _ = _HEADER.unpack_from(inner)
            if kind & _BARE:
                yield from (
                    LmdbNode(key, bytes(inner[i : i + size]), number)
                    for i in range(16, 16 + (lower - 16) // 2 * size, size)
                )
        elif (found := self._node(page, at, number)) is not None:
            yield found

    def _node(self, page: memoryview, at: int, number: int) -> LmdbNode | None:
        """Return the node at offset `at` of page `number`.

        Returns None if the node extends beyond the page, or has a flag other than `_BIG`.
        """
        if at < 16 or at + _NODE.size > len(page):
            return None
        low, high, flags, key_bytes = _NODE.unpack_from(page, at)
        start, size = at + _NODE.size + key_bytes, low | high << 16
        if flags & ~_BIG or start > len(page):
            return None
        key = bytes(page[at + _NODE.size : start])
        if not flags:
            return (
                LmdbNode(key, bytes(page[start : start + size]), number)
                if start + size <= len(page)
                else None
            )
        return self._large_value_node(key, bytes(page[start : start + _NUMBER.size]), size, number)

    def _large_value_node(self, key: bytes, where: bytes, size: int, number: int) -> LmdbNode | None:
        """Return a node whose value has its own pages; `where` has the number of the first of them.

        Returns None if no value of `size` bytes begins on that page.
        """
        if len(where) < _NUMBER.size:
            return None
        [first] = _NUMBER.unpack(where)
        if not self._is_run(first, size):
            return None
        value = bytearray(size)
        read_all(self._env, self._fd, [memoryview(value)], first * self.page_bytes + 16)
        return LmdbNode(key, bytes(value), number)

    def _is_run(self, first: int, size: int) -> bool:
        """Return whether a large value of `size` bytes begins on page `first` and ends within the file."""
        if first < 2 or first * self.page_bytes + 16 + size > self.size:
            return False
        found, _, flags, *_ = _HEADER.unpack(self._read(first, 16))
        return (found, flags & ~_LATER) == (first, _OVERFLOW)

    def _heads(self) -> list[Head]:
        """Return the contents of the well-formed head pages, of which there are at most two."""
        first = self._head(0)
        found = [first] if first else []
        # Page 0 tells the page size. If page 0 is damaged, look for page 1 at every possible page size.
        for at in [first.page_bytes] if first else _SIZES:
            second = self._head(at)
            if second and second.page_bytes == at:
                return [*found, second]
        return found

    def _head(self, at: int) -> Head | None:
        raw = bytearray(_META.size)
        read_all(self._env, self._fd, [memoryview(raw)], at)
        magic, _, _, _, page_bytes, root, last, txn = _META.unpack(raw)
        if magic != _MAGIC or _HEADER.unpack_from(raw)[2] & ~_LATER != 8 or page_bytes not in _SIZES:
            return None
        return Head(page_bytes, root, last, txn)

    def _free(self) -> npt.NDArray[np.uint64]:
        """Return the numbers of the pages that the newest transaction left free.

        Raises UnsoundError for a damaged file.
        """
        if self._newest is None:
            raise UnsoundError("which head page is the newer one cannot be told")
        found = [np.empty(0, np.uint64)]
        if self._newest.free_root != _NO_PAGE:
            # Key: the number of the transaction that freed the pages, 8 bytes. Value: the number n of the
            # pages, then n page numbers.
            for node in self._leaves(self._newest.free_root, 0):
                listed = (
                    np.frombuffer(node.value, np.uint64)
                    if len(node.value) % 8 == 0
                    else np.empty(0, np.uint64)
                )
                if len(node.key) != 8 or not len(listed) or listed[0] + 1 > len(listed):
                    raise UnsoundError(f"page {node.page} is not of a free list")
                found.append(listed[1 : int(listed[0]) + 1])
        return np.concatenate(found)

    def _leaves(self, page: int, depth: int) -> Iterator[LmdbNode]:
        """Yield all nodes of the free list's tree from `page` downwards.

        Raises UnsoundError for a damaged file.
        """
        if not 2 <= page < self.count or depth > _MAX_DEPTH:
            raise UnsoundError(f"page {page} is not there")
        raw = memoryview(self._read(page, self.page_bytes))
        number, _, flags, lower, upper = _HEADER.unpack_from(raw)
        if (
            number != page
            or flags & ~_LATER not in (_BRANCH, _LEAF)
            or not 16 < lower <= upper <= self.page_bytes
        ):
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
                # The number of a child page has 48 bits, in the fields low, high and flags of the node.
                low, high, top, _ = _NODE.unpack_from(raw, at)
                yield from self._leaves(low | high << 16 | top << 32, depth + 1)

    def _used(self, free: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return a mask of the pages of the file that are in use, shape (count,).

        Raises UnsoundError for a damaged file.
        """
        assert self._newest is not None, "the head page is read before the free pages"
        if len(free) and int(free.max()) > self._newest.last:
            raise UnsoundError("its free list names pages behind its end")
        used = np.ones(self.count, np.bool_)
        used[:2] = False
        used[self._newest.last + 1 :] = False
        used[free[free < self.count].astype(np.int64)] = False
        return used

    def _read_runs(self, wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[int, LmdbPages]]:
        """Yield the wanted pages in runs of adjacent pages, each run with the number of its first page."""
        numbers = np.flatnonzero(wanted)
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        for run in np.split(numbers, breaks):
            for start in range(0, len(run), _PAGES_PER_READ):
                part = run[start : start + _PAGES_PER_READ]
                first = int(part[0])
                raw = self._read(first, len(part) * self.page_bytes)
                yield first, np.frombuffer(raw, np.uint8).reshape(len(part), self.page_bytes)

    def _check_pages(self, pages: LmdbPages, first: int, inside: int) -> int:
        """Check a run of pages whose first `inside` pages continue a large value.

        Raises UnsoundError for a damaged page. Returns how many pages of the next run continue the last large
        value of this run.
        """
        #   header    | page number        | key size | flags | lower | upper |
        #   u16       0                    4          5       6       7         `words`
        #   u32                                               3                 `sizes`, for large values
        heads = np.ascontiguousarray(pages[:, :16])
        numbers, words, sizes = (
            heads.view(np.uint64)[:, 0],
            heads.view(np.uint16).astype(np.int64),
            heads.view(np.uint32)[:, 3],
        )
        key_bytes, kinds, lower, upper = words[:, 4], words[:, 5] & ~_LATER, words[:, 6], words[:, 7]
        right = numbers == np.arange(first, first + len(pages), dtype=np.uint64)
        # Nearly all pages of a `file` store's catalog have bare keys. Check their headers here, all at once.
        # Check each other page separately below.
        full = 16 + (lower - 16) // 2 * key_bytes
        plain = (
            right
            & (kinds == _LEAF | _BARE)
            & (lower >= 16)
            & (lower <= upper)
            & (upper <= self.page_bytes)
            & (full <= self.page_bytes)
        )
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
        """Raise UnsoundError unless all offsets and sizes in a branch or leaf page stay inside it."""
        if not 16 <= lower <= upper <= self.page_bytes:
            raise UnsoundError(f"page {number} is damaged")
        if kind & _BARE:
            if 16 + (lower - 16) // 2 * _HEADER.unpack_from(page)[1] > self.page_bytes:
                raise UnsoundError(f"page {number} is damaged")
            return
        for (at,) in struct.iter_unpack("<H", page[16 : 16 + (lower - 16) // 2 * 2]):
            low, high, flags, key_bytes = (
                _NODE.unpack_from(page, at) if 16 <= at <= len(page) - _NODE.size else (0, 0, 0, len(page))
            )
            start, size = at + _NODE.size + key_bytes, low | high << 16
            if kind == _BRANCH:
                # A branch node has a page number of 48 bits in its fields low, high and flags.
                right = start <= len(page) and 2 <= low | high << 16 | flags << 32 < self.count
            else:
                right = flags in (0, _BIG, _TREE, _SAME, _SAME | _TREE) and start + (
                    _NUMBER.size if flags & _BIG else size
                ) <= len(page)
            if not right or (
                flags == _SAME and kind == _LEAF and not _is_sub_page(page[start : start + size])
            ):
                raise UnsoundError(f"page {number} is damaged")

    def _read(self, page: int, size: int) -> bytearray:
        """Return `size` bytes from the start of a page; zeros behind the end of the file."""
        raw = bytearray(size)
        read_all(self._env, self._fd, [memoryview(raw)], page * self.page_bytes)
        return raw


def _is_sub_page(inner: memoryview) -> bool:
    """Return whether these bytes are an LMDB sub-page, which contains several values of one key."""
    if len(inner) < 16:
        return False
    _, size, flags, lower, _ = _HEADER.unpack_from(inner)
    return bool(flags & _SUB) and (
        not flags & _BARE or (size > 0 and lower >= 16 and 16 + (lower - 16) // 2 * size <= len(inner))
    )
