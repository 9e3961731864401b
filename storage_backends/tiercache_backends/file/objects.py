"""The objects of a `file` store in memory, in columns: some 100 bytes an object beside 60 for its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.storage.base import DIGEST_BYTES
from tiercache.storage.checksum import CHECKSUM_BYTES, MAC_BYTES, NO_MAC, Sealed
from tiercache_backends.file.catalog import Loaded
from tiercache_backends.file.pages import NONE, PAGE_KEY_BYTES, Ints, Links, Pages, Words, column_of, grown, link_groups
from tiercache_backends.file.records import DEPTH_KNOWN, PARENT_KNOWN, words_of
from tiercache_backends.file.space import Extent

_FIRST_ROWS: Final = 1024
_LAYOUT_BYTES: Final = DIGEST_BYTES - PAGE_KEY_BYTES
_FEW: Final = 16
FREE: Final = 0
RESIDENT: Final = 1
LEAVING: Final = 2
"""States of a row: free; found by its key; not found any more, while its record is being removed or somebody reads its blocks."""

_DTYPES: Final[dict[str, npt.DTypeLike]] = {
    "page": np.int32, "parent": np.int32, "next": np.int32, "layout": np.int32, "number": np.uint64, "length": np.uint64, "start": np.int64,
    "blocks": np.uint32, "more": np.uint16, "state": np.uint8, "queued": np.uint8, "depth": np.uint32, "hits": np.uint32,
    "pins": np.uint32, "tick": np.uint64, "checksum": np.dtype(f"V{CHECKSUM_BYTES}"),
}  # fmt: skip


class Placement(NamedTuple):
    """What reading an object takes."""

    length: int
    sealed: Sealed
    extents: tuple[Extent, ...]


class Facts(NamedTuple):
    """What a catalog record says of an object, beside its keys and its place."""

    number: int
    length: int
    depth: int
    sealed: Sealed


class Objects:
    """Digest -> row, with what a store must know of an object. Rows are reused; `number` tells their tenants apart.

    `layout` is the first half of a digest, interned; the second half is the page key, and the objects of a page are chained. `parent` is
    the node of the page that the object depends on, or NONE.

    Thread rule: none of its own; the store calls it under its mutex.
    """

    def __init__(self, *, with_macs: bool) -> None:
        self.pages = Pages()
        self.exposed: Callable[[int], None] = lambda row: None
        """Called with the rows of a page on which nothing depends any more."""
        self.columns: dict[str, npt.NDArray[Any]] = {name: np.zeros(_FIRST_ROWS, dtype) for name, dtype in _DTYPES.items()}
        if with_macs:
            self.columns["mac"] = np.zeros(_FIRST_ROWS, f"V{MAC_BYTES}")
        self.used = 0
        """Rows below this were in use at some time."""
        self.count = 0
        self.payload = 0
        self.clock = 0
        self._free = NONE
        self._further: dict[int, tuple[Extent, ...]] = {}
        self._layouts = _Interned()
        self._bind()

    def __len__(self) -> int:
        return self.count

    def load(self, loaded: Loaded) -> None:
        """Take in all records of a catalog at once, oldest first, into an empty table; no digest may be there twice."""
        records = loaded.records
        n = self.used = self.count = len(records)
        size = max(_FIRST_ROWS, n + n // 8)
        self.columns = {name: np.zeros(size, column.dtype) for name, column in self.columns.items()}
        for name in self.columns.keys() & {"number", "length", "start", "blocks", "more", "depth", "checksum", "mac"}:
            self.columns[name][:n] = records[name]
        digests = words_of(records, "digest")
        known = np.flatnonzero(records["flags"] & PARENT_KNOWN)
        pages, parents = self.pages.load(digests[:, 4:], words_of(records, "parent"), known)
        self.columns["page"][:n] = pages
        self.columns["parent"][:n] = NONE
        self.columns["parent"][known] = parents
        link_groups(pages, self.pages.first_column, self.columns["next"])
        self.columns["layout"][:n] = self._layouts.load(digests[:, :4])
        self.columns["depth"][:n][(records["flags"] & DEPTH_KNOWN) == 0] = 0
        self.columns["state"][:n] = RESIDENT
        self.columns["tick"][:n] = np.arange(1, n + 1)
        self.clock = n
        self.payload = int(records["length"].sum())
        rows = np.flatnonzero(records["more"]).tolist()
        self._further = {row: loaded.extents[int(records["number"][row])] for row in rows}
        self._bind()

    def find(self, digest: bytes) -> int:
        """The row of a resident object, or NONE."""
        layout = self._layouts.find(digest[:_LAYOUT_BYTES])
        node = self.pages.find(digest[_LAYOUT_BYTES:]) if layout >= 0 else NONE
        row = self.pages.first[node] if node >= 0 else NONE
        while row >= 0 and self.layout[row] != layout:
            row = self.next[row]
        return int(row)

    def find_many(self, digests: Sequence[bytes]) -> Sequence[int]:
        """The row of each, or NONE."""
        if len(digests) < _FEW or set(map(len, digests)) != {DIGEST_BYTES}:
            return [self.find(digest) for digest in digests]
        words = column_of(digests, DIGEST_BYTES)
        layouts = self._layouts.find_many(words[:, :4], digests)
        nodes = self.pages.find_many(words[:, 4:])
        rows = np.where(nodes >= 0, self.pages.first_column[nodes], NONE)
        while len(wrong := np.flatnonzero((rows >= 0) & (self.columns["layout"][rows] != layouts))):
            rows[wrong] = self.columns["next"][rows[wrong]]
        found: list[int] = rows.tolist()
        return found

    def add(self, facts: Facts, digest: bytes, parent: int | None, extents: tuple[Extent, ...]) -> int:
        """Take in a new object: its row. `parent` is the node that `hold` gave for the page it depends on; the hold is the object's now."""
        row = self._take()
        self.number[row], self.length[row], self.depth[row], (checksum, mac) = facts
        self._checksum[row * CHECKSUM_BYTES : (row + 1) * CHECKSUM_BYTES] = checksum
        if self._mac is not None:
            self._mac[row * MAC_BYTES : (row + 1) * MAC_BYTES] = mac
        self._start[row], self._blocks[row], self._more[row] = extents[0].start, extents[0].blocks, len(extents) - 1
        if len(extents) > 1:
            self._further[row] = extents[1:]
        self.hits[row] = self.pins[row] = 0
        self.touch(row)
        self._enter(row, digest, NONE if parent is None else parent)
        return row

    def enter(self, row: int, digest: bytes, parent: bytes | None) -> None:
        """Let a row that left be found again, and let it depend on the page `parent`."""
        self._enter(row, digest, NONE if parent is None else self.hold(parent))

    def leave(self, row: int) -> tuple[bytes, bytes | None]:
        """Let a resident row be found no more and depend on nothing: the digest and the parent with which it could enter again."""
        page, parent = self.page[row], self.parent[row]
        key = self.digest(row), None if parent < 0 else self.pages.key(parent)
        at = self.pages.first[page]
        if at == row:
            self.pages.first[page] = self.next[row]
        else:
            while self.next[at] != row:
                at = self.next[at]
            self.next[at] = self.next[row]
        self._layouts.release(self.layout[row])
        self.state[row] = LEAVING
        self.count -= 1
        self.payload -= self.length[row]
        if parent >= 0:
            self.release(parent)
        if parent != page:
            self.pages.tidy(page)
        return key

    def drop(self, row: int) -> None:
        """Give up a row that left: it may have another tenant now."""
        self._further.pop(row, None)
        self.state[row] = FREE
        self.next[row] = self._free
        self._free = row

    def hold(self, page: bytes) -> int:
        """Something depends on this page: an object that is here, or one that is being written. Returns the node for `release`."""
        node = self.pages.obtain(page)
        self.pages.dependents[node] += 1
        return node

    def release(self, node: int) -> None:
        """Undo one `hold`; tells `exposed` when nothing depends on the page any more."""
        self.pages.dependents[node] -= 1
        if not self.pages.dependents[node]:
            row = self.pages.first[node]
            while row >= 0:
                self.exposed(row)
                row = self.next[row]
            self.pages.tidy(node)

    def touch(self, row: int) -> None:
        """The object was used, or made, just now."""
        self.clock += 1
        self.tick[row] = self.clock

    def hangs(self, row: int) -> bool:
        """Does the object lie on the page that it depends on, as a state does?"""
        return bool(self.page[row] == self.parent[row])

    def is_leaf(self, row: int) -> bool:
        """Does nothing that is here depend on the object?"""
        return not self.pages.dependents[self.page[row]] or self.hangs(row)

    def leaves(self) -> Ints:
        """The rows of all resident objects on which nothing depends."""
        page, parent = self.columns["page"][: self.used], self.columns["parent"][: self.used]
        found = self.columns["state"][: self.used] == RESIDENT
        found &= (self.pages.dependents_column[page] == 0) | (page == parent)
        return np.flatnonzero(found)

    def replay(self, rows: Ints) -> Ints:
        """For each row the pages back to the nearest page above that has a state on it, or to the start of what is known."""
        page, parent = self.columns["page"][: self.used], self.columns["parent"][: self.used]
        resident = self.columns["state"][: self.used] == RESIDENT
        hangs = resident & (page == parent)
        states = np.zeros(len(self.pages.dependents_column), np.bool_)
        states[page[hangs]] = True
        above = np.full(len(states), NONE, np.int64)
        inner = resident & ~hangs
        above[page[inner]] = parent[inner]
        found = np.zeros(len(rows), np.int64)
        left, at = np.arange(len(rows)), page[rows].astype(np.int64)
        for distance in range(1, self.used + 1):  # bounded, for a store that was tampered with may hold a circle
            found[left] = distance
            at = above[at]
            on = (at >= 0) & ~states[at]
            left, at = left[on], at[on]
            if not len(left):
                break
        return found

    def residents(self) -> Ints:
        """The rows of all objects that can be found."""
        return np.flatnonzero(self.columns["state"][: self.used] == RESIDENT)

    def digest(self, row: int) -> bytes:
        """The digest of a resident object."""
        return self._layouts.name(self.layout[row]) + self.pages.key(self.page[row])

    def placement(self, row: int) -> Placement:
        """Where an object lies and how it is verified."""
        at = row * CHECKSUM_BYTES
        mac = NO_MAC if self._mac is None else bytes(self._mac[at : at + MAC_BYTES])
        return Placement(self.length[row], Sealed(bytes(self._checksum[at : at + CHECKSUM_BYTES]), mac), self.extents(row))

    def extents(self, row: int) -> tuple[Extent, ...]:
        """The blocks of an object, in payload order."""
        first = (Extent(self._start[row], self._blocks[row]),)
        return first + self._further[row] if self._more[row] else first

    def blocks(self, row: int) -> int:
        """How many blocks an object takes."""
        return sum(extent.blocks for extent in self.extents(row)) if self._more[row] else self._blocks[row]

    def orphans(self) -> int:
        """Resident objects that depend on a page of which nothing is here but what depends on it."""
        rows = self.residents()
        page, parent = self.columns["page"][rows], self.columns["parent"][rows]
        is_page = np.zeros(len(self.pages.dependents_column), np.bool_)
        is_page[page[page != parent]] = True
        return int(((parent >= 0) & ~is_page[parent]).sum())

    def nbytes(self) -> int:
        """Memory of all columns."""
        return self.pages.nbytes() + sum(column.nbytes for column in self.columns.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless keys, links and sums agree."""
        self.pages.check_integrity()
        rows = self.residents().tolist()
        assert len(rows) == self.count, "objects are counted right"
        assert sum(self.length[row] for row in rows) == self.payload, "payload bytes are counted right"
        assert all(self.find(self.digest(row)) == row for row in rows), "an object is found by its key"

    def _enter(self, row: int, digest: bytes, parent: int) -> None:
        page = self.pages.obtain(digest[_LAYOUT_BYTES:])
        self.page[row], self.next[row] = page, self.pages.first[page]
        self.pages.first[page] = row
        self.parent[row] = parent
        self.layout[row] = self._layouts.obtain(digest[:_LAYOUT_BYTES])
        self.state[row], self.queued[row] = RESIDENT, 0
        self.count += 1
        self.payload += self.length[row]

    def _take(self) -> int:
        row = self._free
        if row >= 0:
            self._free = self.next[row]
            return row
        if self.used == len(self.columns["state"]):
            self.columns = {name: grown(column, self.used * 3 // 2) for name, column in self.columns.items()}
            self._bind()
        self.used += 1
        return self.used - 1

    def _bind(self) -> None:
        views = {name: (c.view(np.uint8) if c.dtype.kind == "V" else c).data for name, c in self.columns.items()}
        self.page, self.parent, self.next, self.layout = (views[name] for name in ("page", "parent", "next", "layout"))
        self.number, self.length, self.depth, self.tick = (views[name] for name in ("number", "length", "depth", "tick"))
        self.hits, self.pins, self.state, self.queued = (views[name] for name in ("hits", "pins", "state", "queued"))
        self._start, self._blocks, self._more = (views[name] for name in ("start", "blocks", "more"))
        self._checksum, self._mac = views["checksum"], views.get("mac")


class _Interned:
    """Layouts by a small number, counted, so that one that no object has any more costs nothing.

    Thread rule: that of its owner.
    """

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._counts: list[int] = []
        self._free: list[int] = []

    def load(self, layouts: Words) -> Links:
        """Intern all at once, shape (n, 4): the number of each."""
        distinct, inverse = (
            np.unique(layouts, axis=0, return_inverse=True) if _mixed(layouts) else (layouts[:1], np.zeros(len(layouts), int))
        )
        self._names = [row.tobytes() for row in distinct]
        self._ids = {name: i for i, name in enumerate(self._names)}
        self._counts = np.bincount(inverse.ravel(), minlength=len(self._names)).tolist()
        return inverse.ravel().astype(np.int32)

    def find(self, layout: bytes) -> int:
        """The number of a layout, or NONE."""
        return self._ids.get(layout, NONE)

    def find_many(self, layouts: Words, digests: Sequence[bytes]) -> Links:
        """The number of each, or NONE; `layouts` are the first halves of `digests`, shape (n, 4)."""
        # A batch comes pool by pool, so its layouts come in runs.
        starts = np.concatenate([[0], np.flatnonzero((layouts[1:] != layouts[:-1]).any(1)) + 1])
        numbers = np.fromiter((self.find(digests[start][:_LAYOUT_BYTES]) for start in starts.tolist()), np.int32, len(starts))
        return np.repeat(numbers, np.diff(starts, append=len(digests)))

    def name(self, number: int) -> bytes:
        """The layout with this number."""
        return self._names[number]

    def obtain(self, layout: bytes) -> int:
        """The number of a layout, which one more object has now."""
        number = self._ids.get(layout)
        if number is None:
            number = self._free.pop() if self._free else len(self._names)
            if number == len(self._names):
                self._names.append(layout)
                self._counts.append(0)
            self._names[number] = layout
            self._ids[layout] = number
        self._counts[number] += 1
        return number

    def release(self, number: int) -> None:
        """One object less has this layout."""
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._ids[self._names[number]]
            self._free.append(number)


def _mixed(layouts: Words) -> bool:
    return bool((layouts != layouts[:1]).any())
