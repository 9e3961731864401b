"""What a store knows in memory of the objects that it holds: in columns, 40 bytes an object beside those of its page.

An object is a page (it names the page before it, where the caller told one) or hangs on a page (it names its own: a recurrent state). The
worth of KV in a hybrid namespace is that of the states at or below it, and a state is worth nothing without all KV up to it:

    restorable   live and not broken
    dead         KV without a state at or below it, in a namespace whose prefixes need states
    orphan       a page in front of it, or its own, is not stored
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.storage.base import DIGEST_BYTES
from tiercache.storage.layouts import LAYOUT_BYTES, Layouts
from tiercache.storage.pages import (
    BROKEN,
    CUT,
    NONE,
    SERVED,
    Ints,
    Mask,
    Pages,
    Words,
    column_of,
    grown,
    link_groups,
)

_FIRST_ROWS: Final = 1024
_FEW: Final = 16
FREE: Final = 0
RESIDENT: Final = 1
LEAVING: Final = 2
"""States of a row: free; found by its key; not found any more, while its record is being removed or somebody reads its bytes."""

_COLUMNS: Final[dict[str, npt.DTypeLike]] = {
    "page": np.int32, "next": np.int32, "layout": np.int32, "hangs": np.uint8, "number": np.uint64, "length": np.uint64, "state": np.uint8,
    "hits": np.uint32, "pins": np.uint32,
}  # fmt: skip


class Standing(enum.Enum):
    """What a store should answer to a set, as far as the object's place in its sequence decides."""

    FINE = "fine"
    ABSENT_PARENT = "absent_parent"
    """The page that it follows is neither stored nor being written: it could never be read."""
    IMPOSSIBLE = "impossible"
    """It contradicts what is stored: its depth is not its parent's + 1, it has another parent or namespace, or would follow itself."""


class Worth(NamedTuple):
    """What a store holds, by what it is good for. `orphans` counts objects, the others bytes of payload."""

    restorable_bytes: int
    dead_bytes: int
    orphans: int


class Loaded(NamedTuple):
    """Columns of objects to take in at once, oldest first. `digests`: shape (n, 8) words; `parents`: (n, 4), of which `known` are known."""

    digests: Words
    parents: Words
    known: Ints
    numbers: npt.NDArray[Any]
    lengths: npt.NDArray[Any]
    depths: npt.NDArray[Any]
    spaces: npt.NDArray[Any]


def parents_first(batch: Sequence[tuple[bytes, bytes | None]]) -> Sequence[int]:
    """An order of a batch of (page, parent) in which no page comes before one of the batch that it follows.

    Objects that hang on a page name it as their parent. Of pages that follow each other in a circle any comes first.
    """
    seen, awaited = set[bytes](), set[bytes]()
    for page, parent in batch:
        if parent is not None and parent not in seen:
            awaited.add(parent)
        if parent != page:
            if page in awaited:
                break
            seen.add(page)
    else:
        return range(len(batch))
    position = {page: i for i, (page, parent) in reversed(list(enumerate(batch))) if parent != page}
    before = [position.get(parent, NONE) if parent is not None else NONE for _, parent in batch]
    order: list[int] = []
    reached = [False] * len(batch)
    for i in range(len(batch)):
        path = []
        while i >= 0 and not reached[i]:
            reached[i] = True
            path.append(i)
            i = before[i]
        order += reversed(path)
    return order


class _Left(NamedTuple):
    """What the page of an object that left said of it: its node may be another page's by now."""

    space: int
    depth: int
    tick: int
    number: int


class Residents:
    """Digest -> row, with what eviction must know of an object. Rows are reused; `number` tells their tenants apart.

    `layout` is the first half of a digest, interned; the second half is the page key, and the objects of a page are chained from its node.
    A namespace is known by a number of the owner's, its space. Subclasses add columns of their own by `extra`.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    page: memoryview
    next: memoryview
    layout: memoryview
    hangs: memoryview
    number: memoryview
    length: memoryview
    state: memoryview
    hits: memoryview
    pins: memoryview

    def __init__(self, extra: dict[str, npt.DTypeLike] | None = None) -> None:
        self.pages = Pages()
        self.exposed: Callable[[int], None] = lambda node: None
        """Called with the node of a page that may have become one to give up: nothing follows it, or nothing can use it."""
        self.columns: dict[str, npt.NDArray[Any]] = {n: np.zeros(_FIRST_ROWS, d) for n, d in {**_COLUMNS, **(extra or {})}.items()}
        self.used = 0
        """Rows below this were in use at some time."""
        self.count = 0
        self.payload = 0
        self.clock = 0
        self.newest = 0
        """The largest number of an object so far."""
        self.unproven = 0
        """Bytes of what never helped a restore so far: KV without a state, states without KV. It may never do."""
        self.frayed = False
        """Did a page go that others follow, or come back? Which objects are orphans is found out when it is asked for."""
        self._free = NONE
        self._left: dict[int, _Left] = {}
        self._layouts = Layouts()
        self._hybrid: set[int] = set()
        self._kv_of: Counter[int] = Counter()
        self._bind()

    def __len__(self) -> int:
        return self.count

    def load(self, loaded: Loaded) -> None:
        """Take in many objects at once, into an empty table; no digest may be there twice."""
        n = self.used = self.count = len(loaded.digests)
        size = max(_FIRST_ROWS, n + n // 8)
        self.columns = {name: np.zeros(size, column.dtype) for name, column in self.columns.items()}
        columns, pages = self.columns, self.pages
        nodes = pages.load(loaded.digests[:, 4:])
        above = self._parents(loaded, nodes)
        columns["page"][:n] = nodes
        columns["hangs"][:n][loaded.known] = above == nodes[loaded.known]
        columns["number"][:n], columns["length"][:n] = loaded.numbers, loaded.lengths
        columns["layout"][:n] = self._layouts.load(loaded.digests[:, :4])
        columns["state"][:n] = RESIDENT
        link_groups(nodes, pages.columns["first"], columns["next"])
        hangs = columns["hangs"][:n] != 0
        width = len(pages.columns["kv"])
        pages.columns["kv"][:] = np.bincount(nodes[~hangs], minlength=width)
        pages.columns["states"][:] = np.bincount(nodes[hangs], minlength=width)
        pages.columns["nbytes"][:] = np.bincount(nodes, loaded.lengths, width)
        pages.columns["tick"][nodes] = np.arange(1, n + 1)
        pages.columns["number"][nodes] = loaded.numbers
        pages.columns["space"][nodes] = loaded.spaces
        told = np.flatnonzero(loaded.depths)
        pages.columns["depth"][nodes[told]] = loaded.depths[told]
        follows = ~hangs[loaded.known]
        pages.link_all(nodes[loaded.known][follows], above[follows])
        self.clock, self.payload = n, int(loaded.lengths.sum())
        self.newest = int(loaded.numbers.max(initial=0))
        self._bind()
        spaces, counts = np.unique(pages.columns["space"][np.flatnonzero(pages.columns["kv"])], return_counts=True)
        self._kv_of = Counter(dict(zip(spaces.tolist(), counts.tolist(), strict=True)))
        self._hybrid.update(np.unique(loaded.spaces[hangs]).tolist())
        self._recount()
        for node in np.flatnonzero((pages.columns["first"][: pages.used] < 0) & (pages.columns["children"][: pages.used] == 0)).tolist():
            pages.tidy(node)  # a parent that only another one's contradiction named

    def require_states(self, space: int) -> None:
        """From now on prefixes of this namespace need states: its KV without one at or below is dead."""
        if space in self._hybrid:
            return
        self._hybrid.add(space)
        if self._kv_of[space]:
            pages = self.pages
            for node in np.flatnonzero((pages.columns["space"][: pages.used] == space) & (pages.columns["kv"][: pages.used] > 0)).tolist():
                self._unsupport(node)

    def sustains(self) -> Mask:
        """By node: may its KV be restored without a state?"""
        return ~np.isin(self.pages.columns["space"], np.fromiter(self._hybrid, np.uint32, len(self._hybrid)))

    def find(self, digest: bytes) -> int:
        """The row of a resident object, or NONE."""
        layout = self._layouts.find(digest[:LAYOUT_BYTES])
        node = self.pages.find(digest[LAYOUT_BYTES:]) if layout >= 0 else NONE
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
        rows = np.where(nodes >= 0, self.pages.columns["first"][nodes], NONE)
        while len(wrong := np.flatnonzero((rows >= 0) & (self.columns["layout"][rows] != layouts))):
            rows[wrong] = self.columns["next"][rows[wrong]]
        found: list[int] = rows.tolist()
        return found

    def standing(self, node: int, parent: int | None, depth: int, space: int, *, refused: bool = False) -> Standing:
        """May an object be stored on this page, behind the page `parent` (None: not told; `node` itself: it hangs there)?

        `refused`: its page came along, and was not stored. What hangs on it comes before its page otherwise, and may.
        """
        pages = self.pages
        if pages.first[node] >= 0 and pages.space[node] != space:
            return Standing.IMPOSSIBLE
        if depth and pages.depth[node] and pages.depth[node] != depth:
            return Standing.IMPOSSIBLE
        if parent == node and refused and not (pages.kv[node] or pages.coming[node]):
            return Standing.ABSENT_PARENT
        if parent is None or parent == node:
            return Standing.FINE
        if not (pages.kv[parent] or pages.coming[parent]) or pages.space[parent] != space:
            return Standing.ABSENT_PARENT
        if depth and pages.depth[parent] and depth != pages.depth[parent] + 1:
            return Standing.IMPOSSIBLE
        if pages.up[node] >= 0 and pages.up[node] != parent:
            return Standing.IMPOSSIBLE
        if pages.children[node] and pages.is_below(parent, node):
            return Standing.IMPOSSIBLE
        return Standing.FINE

    def expect(self, node: int, depth: int, space: int) -> None:
        """A page object is being written on this node, which the caller holds: others may follow it already."""
        pages = self.pages
        pages.coming[node] += 1
        if not pages.kv[node]:
            pages.space[node] = space
        if depth:
            pages.depth[node] = depth

    def expected(self, node: int) -> None:
        """Undo one `expect`, whatever came of it: a page that was not stored has told no depth."""
        pages = self.pages
        pages.coming[node] -= 1
        if not pages.coming[node] and pages.first[node] < 0:
            pages.depth[node] = 0

    def add(self, digest: bytes, node: int, parent: int | None, number: int, length: int, space: int, depth: int = 0) -> int:
        """Take in a new object on `node`, behind the page of node `parent`: its row. The caller holds both nodes."""
        row = self._take()
        self.number[row], self.length[row] = number, length
        self.hangs[row] = parent == node
        self.hits[row] = self.pins[row] = 0
        pages = self.pages
        if not pages.kv[node]:
            pages.space[node] = space
        if depth:
            pages.depth[node] = depth
        if number > self.newest:
            self.newest = number
        pages.number[node] = self.newest
        self.clock += 1
        pages.tick[node] = self.clock
        self._enter(row, digest, node, parent)
        return row

    def leave(self, row: int) -> tuple[bytes, bytes | None]:
        """Let a resident row be found no more: the digest and the parent with which it could `enter` again."""
        pages, node = self.pages, self.page[row]
        up = node if self.hangs[row] else pages.up[node]
        key = self.digest(row), None if up < 0 else pages.key(up)
        self._left[row] = _Left(pages.space[node], pages.depth[node], pages.tick[node], pages.number[node])
        at = pages.first[node]
        if at == row:
            pages.first[node] = self.next[row]
        else:
            while self.next[at] != row:
                at = self.next[at]
            self.next[at] = self.next[row]
        self._layouts.release(self.layout[row])
        self.state[row] = LEAVING
        self.count -= 1
        self._weigh(node, -self.length[row])
        if self.hangs[row]:
            pages.states[node] -= 1
            self._unsupport(node)
        else:
            pages.kv[node] -= 1
            if not pages.kv[node]:
                self._lose(node)
        if pages.first[node] >= 0:
            self.exposed(node)
        else:
            pages.tidy(node)
        return key

    def enter(self, row: int, digest: bytes, parent: bytes | None) -> None:
        """Let a row that left be found again, behind the page `parent`."""
        node = self.hold(digest[LAYOUT_BYTES:])
        above = None if parent is None else self.hold(parent)
        pages, left = self.pages, self._left.pop(row)
        if not pages.kv[node]:
            pages.space[node] = left.space
        pages.depth[node] = pages.depth[node] or left.depth
        pages.tick[node] = max(pages.tick[node], left.tick)
        pages.number[node] = max(pages.number[node] if pages.first[node] >= 0 else 0, left.number)
        self._enter(row, digest, node, above)
        self.release(node)
        if above is not None:
            self.release(above)

    def drop(self, row: int) -> None:
        """Give up a row that left: it may have another tenant now."""
        del self._left[row]
        self.state[row] = FREE
        self.next[row] = self._free
        self._free = row

    def hold(self, page: bytes) -> int:
        """Keep a page, there or not, and all before it from being given up: its node, for `release`."""
        node = self.pages.obtain(page)
        self.pages.holds[node] += 1
        return node

    def release(self, node: int) -> None:
        """Undo one `hold`."""
        pages = self.pages
        pages.holds[node] -= 1
        if not pages.holds[node]:
            if pages.first[node] >= 0:
                self.exposed(node)
            else:
                pages.tidy(node)

    def touch(self, row: int) -> None:
        """The object was used, or made, just now."""
        self.clock += 1
        self.pages.tick[self.page[row]] = self.clock

    def renew(self, row: int) -> None:
        """A writer brought an object that is here: it was used, and what makes it worth something again may be on its way."""
        node = self.page[row]
        self.touch(row)
        if self.is_useless(node):
            self.pages.number[node] = self.newest
            if self.pages.flags[node] & SERVED:
                self.pages.flags[node] &= 0xFF ^ SERVED
                self.unproven += self.pages.nbytes[node]

    def rows_of(self, node: int) -> list[int]:
        """The resident objects of a page."""
        rows = []
        row = self.pages.first[node]
        while row >= 0:
            rows.append(row)
            row = self.next[row]
        return rows

    def is_leaf(self, node: int) -> bool:
        """Does nothing follow this page, stored or being written?"""
        pages = self.pages
        return pages.first[node] >= 0 and not pages.children[node] and not pages.holds[node]

    def is_useless(self, node: int) -> bool:
        """Can nothing be restored with what lies on this page?"""
        return not self.pages.live[node] or bool(self.pages.flags[node] & BROKEN)

    def is_due(self, node: int) -> bool:
        """Is it useless, and nothing to wait for?"""
        return self.is_useless(node) and (bool(self.pages.flags[node] & SERVED) or not self.is_young(node))

    def is_young(self, node: int) -> bool:
        """May what makes this page worth something be on its way?"""
        return not self.is_overdue(self.pages.number[node], kv=self.pages.kv[node] > 0)

    def is_overdue(self, number: int, *, kv: bool) -> bool:
        """Would what makes this object worth something be here by now? KV waits for its state while a sixteenth of all objects comes, a
        state that came first for its KV while as many come as there are.
        """
        return self.newest - number >= self.count >> (4 if kv else 0)

    def is_promising(self, node: int, space: int, *, hangs: bool) -> bool:
        """Would an object of this namespace, a page or a state that hangs on `node`, be of use as soon as it is stored?"""
        return bool(self.pages.kv[node] or self.pages.coming[node]) if hangs else space not in self._hybrid

    @property
    def is_strewn(self) -> bool:
        """Are more than three quarters of all bytes unproven? More of that must not push out what can be restored."""
        return 4 * self.unproven > 3 * self.payload

    def is_pinned(self, node: int) -> bool:
        """Is an object of this page being read?"""
        return any(self.pins[row] for row in self.rows_of(node))

    def residents(self) -> Ints:
        """The rows of all objects that can be found."""
        return np.flatnonzero(self.columns["state"][: self.used] == RESIDENT)

    def digest(self, row: int) -> bytes:
        """The digest of a resident object."""
        return self._layouts.name(self.layout[row]) + self.pages.key(self.page[row])

    def mend(self) -> bool:
        """Find out which objects are orphans, if that may have changed since it was last asked; returns whether it may."""
        frayed, self.frayed = self.frayed, False
        if frayed:
            self._recount()
        return frayed

    def worth(self) -> Worth:
        """What is held, by what it is good for. For a million objects some 4 ms, and 0.2 s more where `mend` has to count anew."""
        self.mend()
        columns, used = self.pages.columns, self.pages.used
        live, flags, nbytes, kv, states = (columns[name][:used] for name in ("live", "flags", "nbytes", "kv", "states"))
        orphan, live = flags & BROKEN != 0, live > 0
        return Worth(int(nbytes[live & ~orphan].sum()), int(nbytes[~live & ~orphan].sum()), int((kv + states)[orphan].sum()))

    def memory_bytes(self) -> int:
        """Memory of all columns."""
        return self.pages.memory_bytes() + sum(column.nbytes for column in self.columns.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless keys, links and sums agree, and everything incremental equals a fresh count."""
        pages = self.pages
        pages.check_integrity()
        rows = self.residents().tolist()
        assert len(rows) == self.count, "objects are counted right"
        assert sum(self.length[row] for row in rows) == self.payload, "payload bytes are counted right"
        assert all(self.find(self.digest(row)) == row for row in rows), "an object is found by its key"
        kv, states = Counter[int](), Counter[int]()
        for row in rows:
            (states if self.hangs[row] else kv)[self.page[row]] += 1
        assert all(pages.kv[node] == kv[node] and pages.states[node] == states[node] for node in pages.nodes()), "objects by kind"
        self.mend()
        nodes = [node for node in pages.nodes() if pages.first[node] >= 0]
        assert all(pages.nbytes[node] == sum(self.length[row] for row in self.rows_of(node)) for node in nodes), "bytes of a page"
        before = [(pages.live[node], pages.flags[node] & BROKEN) for node in nodes]
        unproven = self.unproven
        self._recount()
        assert unproven == self.unproven, "bytes that never helped are counted right"
        assert before == [(pages.live[node], pages.flags[node] & BROKEN) for node in nodes], "what is live and what is broken"

    def _enter(self, row: int, digest: bytes, node: int, parent: int | None) -> None:
        pages, first = self.pages, self.pages.first
        self.page[row], self.next[row], first[node] = node, first[node], row
        self.layout[row] = self._layouts.obtain(digest[:LAYOUT_BYTES])
        self.state[row] = RESIDENT
        self.count += 1
        self._weigh(node, self.length[row])
        if self.hangs[row]:
            pages.states[node] += 1
            if not pages.kv[node]:
                pages.flags[node] |= BROKEN
            self.require_states(pages.space[node])
            self._support(node)
        else:
            pages.kv[node] = kv = pages.kv[node] + 1
            if parent is not None and pages.up[node] < 0:
                self._follow(node, parent)
            if kv == 1:
                self._gain(node)
        if not pages.holds[node] and not pages.children[node]:
            self.exposed(node)

    def _follow(self, node: int, parent: int) -> None:
        """Let a page that has just come follow another; where that would close a circle it is cut off instead."""
        pages = self.pages
        if pages.children[node] and pages.is_below(parent, node):
            pages.flags[node] |= CUT
            self.frayed = True
            return
        pages.up[node] = parent
        pages.children[parent] += 1
        if pages.kv[node] > 1:
            self.frayed = True
        if pages.live[node]:
            self._support(parent)

    def _gain(self, node: int) -> None:
        """The first page object has come."""
        pages, flags = self.pages, self.pages.flags
        space, up = pages.space[node], pages.up[node]
        self._kv_of[space] += 1
        if flags[node] & CUT or (up >= 0 and (not pages.kv[up] or flags[up] & BROKEN)):
            flags[node] |= BROKEN
        else:
            flags[node] &= 0xFF ^ BROKEN
            if pages.live[node]:
                self._serve(node)
        if pages.children[node]:
            self.frayed = True
        if space not in self._hybrid:
            self._support(node)

    def _lose(self, node: int) -> None:
        """The last page object has gone: the page follows nothing now, and what it was used for counts for the page before it."""
        pages, up = self.pages, self.pages.up[node]
        space = pages.space[node]
        self._kv_of[space] -= 1
        pages.flags[node] = (pages.flags[node] | BROKEN) & (0xFF ^ CUT)
        self.frayed |= pages.children[node] > 0
        if space not in self._hybrid:
            self._unsupport(node)
        if up >= 0:
            pages.up[node] = NONE
            pages.children[up] -= 1
            pages.tick[up] = max(pages.tick[up], pages.tick[node])
            if pages.live[node]:
                self._unsupport(up)
            if pages.first[up] >= 0:
                self.exposed(up)
            else:
                pages.tidy(up)

    def _support(self, node: int) -> None:
        """One thing more makes this page worth something, and so the pages before it."""
        live, up, flags = self.pages.live, self.pages.up, self.pages.flags
        while node >= 0:
            live[node] += 1
            if live[node] > 1:
                return
            if not flags[node] & (BROKEN | SERVED):
                flags[node] |= SERVED
                self.unproven -= self.pages.nbytes[node]
            node = up[node]

    def _unsupport(self, node: int) -> None:
        live, up = self.pages.live, self.pages.up
        while node >= 0:
            live[node] -= 1
            if live[node]:
                return
            if self.is_leaf(node):
                self.exposed(node)
            node = up[node]

    def _serve(self, node: int) -> None:
        """A page that is live turned out to be whole: note that for the live pages before it."""
        flags, up = self.pages.flags, self.pages.up
        while node >= 0 and not flags[node] & (SERVED | BROKEN):
            flags[node] |= SERVED
            self.unproven -= self.pages.nbytes[node]
            node = up[node]

    def _weigh(self, node: int, nbytes: int) -> None:
        """Add the bytes of an object that came to this page, or went (negative)."""
        pages = self.pages
        self.payload += nbytes
        pages.nbytes[node] += nbytes
        if not pages.flags[node] & SERVED:
            self.unproven += nbytes

    def _parents(self, loaded: Loaded, nodes: Ints) -> Ints:
        """The node of each known parent. Mostly an object was stored right behind it or hangs on its own page; others are looked up."""
        known, keys, parents = loaded.known, loaded.digests[:, 4:], loaded.parents[loaded.known]
        above = np.full(len(known), NONE, np.int64)
        for guess in (known - 1, known):
            right = (guess >= 0) & (above < 0)
            right[right] = (keys[guess[right]] == parents[right]).all(1)
            above[right] = nodes[guess[right]]
        left = np.flatnonzero(above < 0)
        above[left] = self.pages.find_many(parents[left])
        for i in np.flatnonzero(above < 0).tolist():
            above[i] = self.pages.obtain(parents[i].tobytes())
        return above

    def _recount(self) -> None:
        self.pages.recount(self.sustains())
        self.unproven = int(self.pages.columns["nbytes"][self.pages.columns["flags"] & SERVED == 0].sum())

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
        for name in _COLUMNS:
            setattr(self, name, self.columns[name].data)
