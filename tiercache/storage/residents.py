"""In-memory table of the objects that a store holds, in columns of about 40 bytes per object beside those of its page.

An object is either a page (it names the page before it, where the caller gave one) or hangs on a page, as a recurrent state does (it names
its own page). In a namespace whose prefixes need states, KV is useful only with a state at or below it, and a state only with all KV up to
it:

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
"""State of a row; one of FREE, RESIDENT and LEAVING.

FREE: not in use. RESIDENT: found by its key. LEAVING: not found any more, while its record is being removed or its bytes are being read.
"""

_COLUMNS: Final[dict[str, npt.DTypeLike]] = {
    "page": np.int32, "next": np.int32, "layout": np.int32, "hangs": np.uint8, "number": np.uint64, "length": np.uint64, "state": np.uint8,
    "hits": np.uint32, "pins": np.uint32,
}  # fmt: skip


class Standing(enum.Enum):
    """Verdict on an object that is to be stored, as far as its place in its sequence decides."""

    FINE = "fine"
    ABSENT_PARENT = "absent_parent"
    """The page that it follows is neither stored nor being written in its namespace, so it could never be read."""
    IMPOSSIBLE = "impossible"
    """The object contradicts what is stored.

    Its depth is not the page's or not its parent's + 1, its page has another parent or namespace, or it would follow itself.
    """


class Worth(NamedTuple):
    """Content of a store by what it is good for: payload bytes, and for `orphans` the number of objects."""

    restorable_bytes: int
    dead_bytes: int
    orphans: int


class Loaded(NamedTuple):
    """Columns of n objects to take in at once, oldest first.

    `digests`: shape (n, 8) words; `parents`: shape (n, 4) words, valid in the rows whose indices are in `known`.
    """

    digests: Words
    parents: Words
    known: Ints
    numbers: npt.NDArray[Any]
    lengths: npt.NDArray[Any]
    depths: npt.NDArray[Any]
    spaces: npt.NDArray[Any]


def parents_first(batch: Sequence[tuple[bytes, bytes | None]]) -> Sequence[int]:
    """Return an order of a batch of (page, parent) in which no page comes before one of the batch that it follows.

    Objects that hang on a page name it as their parent. Where pages follow each other in a circle, any of them may come first.
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
    """Columns of the page of an object that left, kept because its node may be another page's by the time the object returns."""

    space: int
    depth: int
    tick: int
    number: int


class Residents:
    """Table from digest to row, with what eviction must know of each object. Rows are reused; `number` tells the objects of one row apart.

    Columns by row: `page` (its node), `next` (row of the next object of the same page, or NONE), `layout` (number of its interned layout,
    the first half of the digest; the second half is the page key), `hangs` (1 if it hangs on its page, 0 if it is the page), `number`
    (given by the owner), `length` (payload bytes), `state`, `hits` (reads), `pins` (calls that use its bytes). A namespace is identified by
    a number that the owner chooses, its space. Subclasses add columns of their own with `extra`.

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
        """Function called with the node of a page that may have become evictable: nothing follows it, or nothing can use it."""
        self.columns: dict[str, npt.NDArray[Any]] = {n: np.zeros(_FIRST_ROWS, d) for n, d in {**_COLUMNS, **(extra or {})}.items()}
        self.used = 0
        """Number of rows that were in use at some time: all lie below it."""
        self.count = 0
        self.payload = 0
        self.clock = 0
        self.newest = 0
        """Largest number of any object so far."""
        self.unproven = 0
        """Payload bytes on pages without the flag SERVED: KV without a state, states without KV.

        No restore could use them so far, and perhaps none ever will.
        """
        self.frayed = False
        """Whether a page that others follow went or came back, so that orphans must be counted anew when they are next asked for."""
        self._free = NONE
        self._left: dict[int, _Left] = {}
        self._layouts = Layouts()
        self._hybrid: set[int] = set()
        self._kv_of: Counter[int] = Counter()
        self._bind()

    def __len__(self) -> int:
        return self.count

    def load(self, loaded: Loaded) -> None:
        """Take in many objects at once, into an empty table; no digest may occur twice."""
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
            pages.tidy(node)  # a parent named only by an object whose page was given another parent

    def require_states(self, space: int) -> None:
        """Note that prefixes of this namespace need states from now on: its KV without a state at or below it is dead."""
        if space in self._hybrid:
            return
        self._hybrid.add(space)
        if self._kv_of[space]:
            pages = self.pages
            for node in np.flatnonzero((pages.columns["space"][: pages.used] == space) & (pages.columns["kv"][: pages.used] > 0)).tolist():
                self._unsupport(node)

    def sustains(self) -> Mask:
        """Return a mask by node: True where the page's KV may be restored without a state."""
        return ~np.isin(self.pages.columns["space"], np.fromiter(self._hybrid, np.uint32, len(self._hybrid)))

    def find(self, digest: bytes) -> int:
        """Return the row of a resident object, or NONE."""
        layout = self._layouts.find(digest[:LAYOUT_BYTES])
        node = self.pages.find(digest[LAYOUT_BYTES:]) if layout >= 0 else NONE
        row = self.pages.first[node] if node >= 0 else NONE
        while row >= 0 and self.layout[row] != layout:
            row = self.next[row]
        return int(row)

    def find_many(self, digests: Sequence[bytes]) -> Sequence[int]:
        """Return the row of each digest, or NONE."""
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
        """Return whether an object may be stored on `node` behind the page of node `parent`, and if not, why.

        `parent`: None if it is not known; `node` itself if the object hangs on that page. `depth`: 0 if it is not known. `refused`: the
        object's page was part of the same call and was not stored. Without that, an object that hangs on a page may be stored before the
        page.
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
        """Note that a page object is being written on this node, so that others may follow it already. The caller holds the node."""
        pages = self.pages
        pages.coming[node] += 1
        if not pages.kv[node]:
            pages.space[node] = space
        if depth:
            pages.depth[node] = depth

    def expected(self, node: int) -> None:
        """Undo one `expect`, whatever came of the write. If nothing is stored or being written on the node, its depth is unknown again."""
        pages = self.pages
        pages.coming[node] -= 1
        if not pages.coming[node] and pages.first[node] < 0:
            pages.depth[node] = 0

    def add(self, digest: bytes, node: int, parent: int | None, number: int, length: int, space: int, depth: int = 0) -> int:
        """Take in a new object on `node`, behind the page of node `parent`, and return its row. The caller holds both nodes."""
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
        """Make a resident row unfindable; return the digest and the parent's page key (None: not known) with which it can `enter` again."""
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
        """Make a row that left findable again, behind the page `parent`."""
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
        """Free a row that left, for use by another object."""
        del self._left[row]
        self.state[row] = FREE
        self.next[row] = self._free
        self._free = row

    def hold(self, page: bytes) -> int:
        """Keep a page, stored or not, from being evicted, and with a stored page all those before it; return its node, for `release`."""
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
        """Record that the object was used, or made, just now."""
        self.clock += 1
        self.pages.tick[self.page[row]] = self.clock

    def renew(self, row: int) -> None:
        """Record that a writer brought an object that is stored already: it was used.

        If its page is useless, what makes it useful may be on its way, so the page is given the time of a new one to wait for it.
        """
        node = self.page[row]
        self.touch(row)
        if self.is_useless(node):
            self.pages.number[node] = self.newest
            if self.pages.flags[node] & SERVED:
                self.pages.flags[node] &= 0xFF ^ SERVED
                self.unproven += self.pages.nbytes[node]

    def rows_of(self, node: int) -> list[int]:
        """Return the rows of the resident objects of a page."""
        rows = []
        row = self.pages.first[node]
        while row >= 0:
            rows.append(row)
            row = self.next[row]
        return rows

    def is_leaf(self, node: int) -> bool:
        """Return whether the page has an object and nothing follows it, stored or being written."""
        pages = self.pages
        return pages.first[node] >= 0 and not pages.children[node] and not pages.holds[node]

    def is_useless(self, node: int) -> bool:
        """Return whether nothing can be restored with what lies on this page."""
        return not self.pages.live[node] or bool(self.pages.flags[node] & BROKEN)

    def is_due(self, node: int) -> bool:
        """Return whether the page is useless and there is nothing to wait for."""
        return self.is_useless(node) and (bool(self.pages.flags[node] & SERVED) or not self.is_young(node))

    def is_young(self, node: int) -> bool:
        """Return whether what makes this page useful may still be on its way."""
        return not self.is_overdue(self.pages.number[node], kv=self.pages.kv[node] > 0)

    def is_overdue(self, number: int, *, kv: bool) -> bool:
        """Return whether what makes an object with this number useful should have come by now.

        KV waits for its state until a sixteenth as many objects as the store holds have come after it; a state that came before its KV
        waits until as many have come as the store holds.
        """
        return self.newest - number >= self.count >> (4 if kv else 0)

    def is_promising(self, node: int, space: int, *, hangs: bool) -> bool:
        """Return whether an object of this namespace, a page or a state that hangs on `node`, would be useful as soon as it is stored."""
        return bool(self.pages.kv[node] or self.pages.coming[node]) if hangs else space not in self._hybrid

    @property
    def is_strewn(self) -> bool:
        """Whether more than three quarters of all bytes are unproven. More such bytes must not push out what can be restored."""
        return 4 * self.unproven > 3 * self.payload

    def is_pinned(self, node: int) -> bool:
        """Return whether an object of this page is being read."""
        return any(self.pins[row] for row in self.rows_of(node))

    def residents(self) -> Ints:
        """Return the rows of all objects that can be found."""
        return np.flatnonzero(self.columns["state"][: self.used] == RESIDENT)

    def digest(self, row: int) -> bytes:
        """Return the digest of a resident object."""
        return self._layouts.name(self.layout[row]) + self.pages.key(self.page[row])

    def mend(self) -> bool:
        """Compute anew which objects are orphans, if that may have changed since the last call; return whether it may have changed."""
        frayed, self.frayed = self.frayed, False
        if frayed:
            self._recount()
        return frayed

    def worth(self) -> Worth:
        """Return what is held, by what it is good for.

        This takes some 4 ms for a million objects, and 0.2 s more where `mend` has to count anew.
        """
        self.mend()
        columns, used = self.pages.columns, self.pages.used
        live, flags, nbytes, kv, states = (columns[name][:used] for name in ("live", "flags", "nbytes", "kv", "states"))
        orphan, live = flags & BROKEN != 0, live > 0
        return Worth(int(nbytes[live & ~orphan].sum()), int(nbytes[~live & ~orphan].sum()), int((kv + states)[orphan].sum()))

    def memory_bytes(self) -> int:
        """Return the bytes of memory of all columns."""
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
        """Make a page that has just come follow another; where that would close a circle, flag it CUT instead."""
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
        """Account for the first page object of a node."""
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
        """Account for the loss of a node's last page object: the page follows nothing now, and its use counts for the page before it."""
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
        """Count one more thing that makes this page live, and with it the pages before it."""
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
        """Flag a live page that turned out to be whole as SERVED, and so the pages before it up to one that is flagged already."""
        flags, up = self.pages.flags, self.pages.up
        while node >= 0 and not flags[node] & (SERVED | BROKEN):
            flags[node] |= SERVED
            self.unproven -= self.pages.nbytes[node]
            node = up[node]

    def _weigh(self, node: int, nbytes: int) -> None:
        """Add the payload bytes of an object that came to this page (positive) or left it (negative)."""
        pages = self.pages
        self.payload += nbytes
        pages.nbytes[node] += nbytes
        if not pages.flags[node] & SERVED:
            self.unproven += nbytes

    def _parents(self, loaded: Loaded, nodes: Ints) -> Ints:
        """Return the node of each known parent.

        Most objects were stored right behind their parent or hang on their own page; only the parents of the others are looked up.
        """
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
