"""In-memory table of the objects of a store, in columns of about 40 bytes per object.

The pages have columns of their own in another table (`pages`). An object is either a page, or attached to a
page as a recurrent state is. The parent of a page is the page before it, if the caller named that page. The
parent of an attached object is its own page.

    digest of an object   layout (32 bytes) | page key (32 bytes)
    columns by row        page -> node of `RestorablePages`, layout -> number in `Layouts`
    chain of a page       first[node] -> row -> next[row] -> ... -> NONE
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.core import DIGEST_BYTES, ObjectMeta
from tiercache.events.base import ChangeNote
from tiercache.storage.env import Env
from tiercache.storage.layouts import LAYOUT_BYTES, Layouts
from tiercache.storage.pages import NONE, SERVED, Ints, Words, column_of, grown, link_groups
from tiercache.storage.restorable import RestorablePages
from tiercache.storage.shares import Footprint, Owners, Shares
from tiercache.storage.values import usable_hints

_FIRST_ROWS: Final = 1024
_FEW: Final = 16
"""If a batch has fewer digests than this, looking them up one by one is faster than using NumPy."""
FREE: Final = 0
"""State of a row that is not in use."""
RESIDENT: Final = 1
"""State of a row whose object is found by its key."""
LEAVING: Final = 2
"""State of a row whose object is not found any more.

The record of the object is still being removed, or its bytes are still being read.
"""

_COLUMNS: Final[dict[str, npt.DTypeLike]] = {
    "page": np.int32, "next": np.int32, "layout": np.int32, "attached": np.uint8, "number": np.uint64,
    "length": np.uint64, "state": np.uint8, "namespace": np.uint32,
    "hits": np.uint32, "pins": np.uint32,
}  # fmt: skip


class ObjectColumns(NamedTuple):
    """Columns of n objects to take in at once, oldest first."""

    digests: Words
    """Digests of the objects, shape (n, 8)."""
    parents: Words
    """Page keys of the parents, shape (n, 4), valid only in the rows `known`."""
    known: Ints
    """Indices of the objects whose parent is known, ascending."""
    numbers: npt.NDArray[Any]
    lengths: npt.NDArray[Any]
    depths: npt.NDArray[Any]
    namespace_ids: npt.NDArray[Any]


def parents_first(batch: Sequence[tuple[bytes, bytes | None]]) -> Sequence[int]:
    """Return an order of a batch of (page, parent) in which no object comes before its parent.

    The parent of an object that is attached to a page is that page. If pages follow each other in a circle,
    any of them may come first.
    """
    if _is_in_order(batch):
        return range(len(batch))
    position: dict[bytes, int] = {}
    for i, (page, parent) in enumerate(batch):
        if parent != page:
            position.setdefault(page, i)
    before = [NONE if parent is None else position.get(parent, NONE) for _, parent in batch]
    order: list[int] = []
    reached = [False] * len(batch)
    for i in range(len(batch)):
        # Follow the parents of object i up to one that is in the order already. Then add this path in
        # reverse:   batch  4 3 1 2   ->   order  1 2 3 4   (the path of the first object is 4 3 2 1)
        path = []
        while i >= 0 and not reached[i]:
            reached[i] = True
            path.append(i)
            i = before[i]
        order += reversed(path)
    return order


def _is_in_order(batch: Sequence[tuple[bytes, bytes | None]]) -> bool:
    """Return whether no page of the batch comes after an object that depends on the page."""
    seen, awaited = set[bytes](), set[bytes]()
    for page, parent in batch:
        if parent is not None and parent not in seen:
            awaited.add(parent)
        if parent != page:
            if page in awaited:
                return False
            seen.add(page)
    return True


class _Left(NamedTuple):
    """Columns of a page, as they were when an object of the page left (`Residents.leave`).

    Before the object comes back, the node of the page may be freed and used for another page.
    """

    namespace_id: int
    depth: int
    tick: int
    number: int
    rank: float
    worker: int


class Residents:
    """Table from digest to row, with all that eviction must know of each object.

    The columns have one value per row:

        page       node (a row in `pages`) of the object's page
        next       row of the next object of the same page, or NONE
        layout     number of the layout, the first half of the digest (the second half is the page key)
        attached   1 if the object is attached to its page, 0 if it is the page
        number     number that the store gave to the object; larger numbers are newer
        length     payload bytes
        state      FREE, RESIDENT or LEAVING
        namespace  number of the object's namespace
        hits       number of reads
        pins       number of calls that use the object's bytes

    Rows are reused; `number` tells apart the objects that had the same row. The store also chooses a number
    for each namespace, `namespace_id`. Subclasses add columns with `extra`. `clock` gives the seconds by
    which hints age (`values`). `footprint` says what an object takes of its owner's share.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    page: memoryview
    next: memoryview
    layout: memoryview
    attached: memoryview
    number: memoryview
    length: memoryview
    state: memoryview
    namespace: memoryview
    hits: memoryview
    pins: memoryview

    def __init__(
        self,
        extra: dict[str, npt.DTypeLike] | None = None,
        clock: Callable[[], float] | None = None,
        footprint: Footprint = Footprint(),  # noqa: B008
    ) -> None:
        self.footprint: Final = footprint
        self.pages = RestorablePages(clock or Env().monotonic)
        self.columns: dict[str, npt.NDArray[Any]] = {
            n: np.zeros(_FIRST_ROWS, d) for n, d in {**_COLUMNS, **(extra or {})}.items()
        }
        self.used = 0
        """Number of rows that are in use or were in use: the rows from 0 to `used` - 1."""
        self.count = 0
        """Number of objects that can be found."""
        self.payload = 0
        """Payload bytes of these objects."""
        self.owners = Owners()
        """Bytes of each owner; kept from the first `share` on."""
        self.clock = 0
        """Time in ticks: the number of uses and new objects so far."""
        self.newest = 0
        """Largest `number` that any object has had."""
        self.note: ChangeNote | None = None
        """Function that is told of objects that can be found from now on, or no longer."""
        self._free = NONE
        self._left: dict[int, _Left] = {}
        self._layouts = Layouts()
        self._bind()

    def __len__(self) -> int:
        return self.count

    def load(self, loaded: ObjectColumns) -> None:
        """Fill an empty table with many objects at once; no digest may occur twice."""
        n = self.used = self.count = len(loaded.digests)
        size = max(_FIRST_ROWS, n + n // 8)
        self.columns = {name: np.zeros(size, column.dtype) for name, column in self.columns.items()}
        columns, pages = self.columns, self.pages
        # A digest is 8 words: the layout in words 0 to 3, the page key in words 4 to 7.
        nodes = pages.load(loaded.digests[:, 4:])
        above = self._parents(loaded, nodes)
        columns["page"][:n] = nodes
        # An object whose parent is its own page is attached to that page; any other is the page.
        columns["attached"][:n][loaded.known] = above == nodes[loaded.known]
        columns["number"][:n], columns["length"][:n] = loaded.numbers, loaded.lengths
        columns["layout"][:n] = self._layouts.load(loaded.digests[:, :4])
        columns["state"][:n] = RESIDENT
        columns["namespace"][:n] = loaded.namespace_ids
        link_groups(nodes, pages.columns["first"], columns["next"])
        attached = columns["attached"][:n] != 0
        width = len(pages.columns["kv"])
        pages.columns["kv"][:] = np.bincount(nodes[~attached], minlength=width)
        pages.columns["states"][:] = np.bincount(nodes[attached], minlength=width)
        pages.columns["nbytes"][:] = np.bincount(nodes, loaded.lengths, width)
        # A node with several objects keeps the tick and the number of its last object.
        pages.columns["tick"][nodes] = np.arange(1, n + 1)
        pages.columns["number"][nodes] = loaded.numbers
        pages.columns["namespace_id"][nodes] = loaded.namespace_ids
        given = np.flatnonzero(loaded.depths)
        pages.columns["depth"][nodes[given]] = loaded.depths[given]
        follows = ~attached[loaded.known]
        pages.link_all(nodes[loaded.known][follows], above[follows])
        self.clock, self.payload = n, int(loaded.lengths.sum())
        self.newest = int(loaded.numbers.max(initial=0))
        self._bind()
        pages.recount_all(np.unique(loaded.namespace_ids[attached]).tolist())

    def share(self, shares: Shares, name_of: Callable[[int], bytes]) -> None:
        """Count the bytes of each owner from now on; `name_of` gives the namespace with a number.

        Objects that are leaving count as `extra`, what is being written does not count yet.
        """
        owners = self.owners
        owners.replace(shares, name_of)
        state, namespaces, lengths = (
            self.columns[name][: self.used] for name in ("state", "namespace", "length")
        )
        for kind, sums in ((RESIDENT, owners.used), (LEAVING, owners.extra)):
            rows = np.flatnonzero(state == kind)
            np.add.at(counted := np.zeros(len(sums), np.int64), owners.of_all(namespaces[rows]),
                      self.footprint.of(lengths[rows].astype(np.int64)))  # fmt: skip
            sums[:] = counted.tolist()

    def find(self, digest: bytes) -> int:
        """Return the row of a resident object, or NONE."""
        layout = self._layouts.find(digest[:LAYOUT_BYTES])
        node = self.pages.find(digest[LAYOUT_BYTES:]) if layout >= 0 else NONE
        row = self.pages.first[node] if node >= 0 else NONE
        while row >= 0 and self.layout[row] != layout:
            row = self.next[row]
        return int(row)

    def find_many(self, digests: Sequence[bytes]) -> list[int]:
        """Return the row of each digest, or NONE; much faster than `find` for many digests."""
        found: list[int] = self.rows_of_all(digests).tolist()
        return found

    def rows_of_all(self, digests: Sequence[bytes]) -> Ints:
        """Return the row of each digest, or NONE, as an array."""
        if len(digests) < _FEW or set(map(len, digests)) != {DIGEST_BYTES}:
            return np.array([self.find(digest) for digest in digests], np.int64)
        words = column_of(digests, DIGEST_BYTES)
        layouts = self._layouts.find_many(words[:, :4], digests)
        nodes = self.pages.find_many(words[:, 4:])
        # In each round, rows with a wrong layout move one step along the chain of their page.
        rows = np.where(nodes >= 0, self.pages.columns["first"][nodes], NONE).astype(np.int64)
        while len(wrong := np.flatnonzero((rows >= 0) & (self.columns["layout"][rows] != layouts))):
            rows[wrong] = self.columns["next"][rows[wrong]]
        return rows

    def add(
        self,
        digest: bytes,
        node: int,
        parent: int | None,
        number: int,
        length: int,
        namespace_id: int,
        depth: int = 0,
    ) -> int:
        """Add a new object on the page of `node`, and return its row.

        `parent` is the node of the page before, `node` itself for an object that is attached to its page, or
        None if it is not known. The caller holds both nodes.
        """
        row = self._take()
        self.number[row], self.length[row] = number, length
        self.hits[row] = self.pins[row] = 0
        self._add(row, digest, node, parent, number, namespace_id, depth)
        return row

    def _add(
        self,
        row: int,
        digest: bytes,
        node: int,
        parent: int | None,
        number: int,
        namespace_id: int,
        depth: int,
    ) -> None:
        """Let a new object be found; see `add`."""
        self.attached[row] = parent == node
        self.namespace[row] = namespace_id
        pages = self.pages
        if not pages.kv[node]:
            pages.namespace_id[node] = namespace_id
        if depth:
            pages.depth[node] = depth
        if number > self.newest:
            self.newest = number
        pages.number[node] = self.newest
        self._use(node)
        self._enter(row, digest, node, parent)

    def leave(self, row: int) -> tuple[bytes, bytes | None]:
        """Make an object impossible to find; return its digest, and its parent's page key if that is known.

        With these two values, `enter` brings the object back. `drop` frees the row for good.
        """
        pages, node = self.pages, self.page[row]
        up = node if self.attached[row] else pages.parent_node[node]
        key = self.digest(row), None if up < 0 else pages.key(up)
        self._left[row] = _Left(
            pages.namespace_id[node],
            pages.depth[node],
            pages.tick[node],
            pages.number[node],
            *self._hint_of(row),
        )
        # Unlink the row from the chain of its page: first -> ... -> row -> next -> ...
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
        self.payload -= self.length[row]
        if self.owners.active:
            owner = self.owners.of(self.namespace[row])
            taken = self.footprint.of(self.length[row])
            self.owners.used[owner] -= taken
            self.owners.extra[owner] += taken
        pages.weigh(node, -self.length[row])
        if self.attached[row]:
            pages.state_removed(node)
        else:
            pages.page_removed(node)
        if pages.first[node] >= 0:
            pages.note_evictable(node)
        else:
            pages.tidy(node)
        if self.note is not None:
            self.note((key[0],), False)
        return key

    def enter(self, row: int, digest: bytes, parent: bytes | None) -> None:
        """Let an object that left be found again, with the page `parent` as its parent."""
        pages, left = self.pages, self._left.pop(row)
        # The columns of the page may be newer than `left`:
        #   1. `leave` takes the last object of the page, and the node is freed
        #   2. another object of the page is stored, on a new node
        #   3. `enter` brings the first object back
        node = pages.hold(digest[LAYOUT_BYTES:])
        above = None if parent is None else pages.hold(parent)
        if self.owners.active:  # `_enter` counts it again
            self.owners.extra[self.owners.of(self.namespace[row])] -= self.footprint.of(self.length[row])
        if not pages.kv[node]:
            pages.namespace_id[node] = left.namespace_id
        pages.depth[node] = pages.depth[node] or left.depth
        pages.tick[node] = max(pages.tick[node], left.tick)
        pages.number[node] = max(pages.number[node] if pages.first[node] >= 0 else 0, left.number)
        self._enter(row, digest, node, above)
        if left.rank and not self._hint_of(row)[0]:
            if self.attached[row]:
                pages.state_rank[node], pages.state_worker[node] = left.rank, left.worker
            else:
                pages.rank[node], pages.worker[node] = left.rank, left.worker
        pages.release(node)
        if above is not None:
            pages.release(above)

    def drop(self, row: int) -> None:
        """Free the row of an object that left, for use by another object."""
        del self._left[row]
        if self.owners.active:
            self.owners.extra[self.owners.of(self.namespace[row])] -= self.footprint.of(self.length[row])
        self.state[row] = FREE
        self.next[row] = self._free
        self._free = row

    def touch(self, row: int) -> None:
        """Record that the object was used just now."""
        self._use(self.page[row])

    def read(self, rows: Ints) -> None:
        """Record that these objects were read just now, in this order."""
        hits, ticks = self.hits, self.pages.columns["tick"]
        for row in rows.tolist():
            hits[row] = min(hits[row] + 1, 2**32 - 1)
        # NumPy keeps the last of several values for one index.
        ticks[self.columns["page"][rows]] = np.arange(self.clock + 1, self.clock + len(rows) + 1)
        if self.pages.hinted and len(rows):
            self.pages.values.used(self.clock + 1)
        self.clock += len(rows)

    def renew(self, row: int) -> None:
        """Record that a writer brought an object that is stored already, which counts as a use.

        A useless page then waits like a new page for the object that would make it useful, because the
        writer may bring that object next.
        """
        node = self.page[row]
        self.touch(row)
        if self.pages.is_useless(node) and not self.pages.has_refused(self.pages.key(node)):
            self.pages.restart_wait(node, self.newest)

    def rank(self, value: float) -> float:
        """Return the rank of an object that is given this value now; from then on values rank."""
        self.pages.values.begin(self.clock)
        return self.pages.values.rank(value)

    def hint(self, row: int, value: float | None, worker: int) -> None:
        """Take the value of an object from `worker`; None: no value."""
        if value is not None:
            node, values = self.page[row], self.pages.values
            values.begin(self.clock)
            values.give_one(node, value, worker, attached=self.attached[row] != 0)
            self.pages.note_evictable(node)

    def hint_all(self, rows: Sequence[int], values: Sequence[float | None], workers: Sequence[int]) -> None:
        """Do the same as `hint` for each of these rows."""
        if len(rows) < _FEW or None in values or min(workers) < max(workers):
            for row, value, worker in zip(rows, values, workers, strict=True):
                self.hint(row, value, worker)
            return
        self._give(np.array(rows, np.int64), np.array(values, np.float64), workers[0])

    def advise(self, digests: Sequence[bytes], values: Sequence[float], worker: int) -> None:
        """Take values for these objects from `worker`; without any, each counts as used now.

        Unknown objects and impossible values are ignored.
        """
        if not len(values):
            rows = self.rows_of_all(digests)
            self.read(rows[rows >= 0])
            return
        possible, which = usable_hints(values, worker, len(digests))
        asked = digests if len(which) == len(digests) else [digests[i] for i in which.tolist()]
        rows = self.rows_of_all(asked)
        there = rows >= 0
        if there.any():
            self._give(rows[there], possible[there], worker)

    def _give(self, rows: Ints, values: npt.NDArray[np.float64], worker: int) -> None:
        nodes = self.columns["page"][rows]
        self.pages.values.begin(self.clock)
        self.pages.values.give(nodes, self.columns["attached"][rows] != 0, values, worker)
        self.pages.note_evictable(*nodes.tolist())

    def valued(self, row: int, meta: ObjectMeta) -> ObjectMeta:
        """Return an object's metadata with the present value of its latest hint, if it has one."""
        rank, worker = self._hint_of(row)
        if rank == 0 and meta.value is None:
            return meta
        return replace(meta, value=self.pages.values.value(rank) if rank else None, worker=worker)

    def rows_of(self, node: int) -> list[int]:
        """Return the rows of the resident objects of a page."""
        rows = []
        row = self.pages.first[node]
        while row >= 0:
            rows.append(row)
            row = self.next[row]
        return rows

    def is_dead(self, node: int) -> bool:
        """Return whether the page is useless and does not wait for an object that would make it useful.

        A page that could be restored in the past does not wait; any other page waits while it is young.
        """
        pages = self.pages
        return pages.is_useless(node) and (
            bool(pages.flags[node] & SERVED) or self.is_overdue(pages.number[node], kv=pages.kv[node] > 0)
        )

    def is_overdue(self, number: int, *, kv: bool) -> bool:
        """Return whether an object with this number has waited too long for the object that makes it useful.

        The wait is the number of objects that were stored since then. The limit for KV that waits for a state
        is a sixteenth of the number of objects in the store. The limit for a state that waits for KV is the
        number of objects in the store.
        """
        return self.newest - number >= self.count >> (4 if kv else 0)  # 2**4 is 16

    @property
    def is_mostly_unproven(self) -> bool:
        """Whether more than three quarters of all payload bytes are unproven.

        Unproven bytes are bytes that no restore has been able to use so far
        (`RestorablePages.unproven_bytes`). Beyond this share, new unproven bytes must not evict bytes that
        can be restored.
        """
        return 4 * self.pages.unproven_bytes > 3 * self.payload

    def is_pinned(self, node: int) -> bool:
        """Return whether an object of this page is being read."""
        return any(self.pins[row] for row in self.rows_of(node))

    def residents(self) -> Ints:
        """Return the rows of all objects that can be found."""
        return np.flatnonzero(self.columns["state"][: self.used] == RESIDENT)

    def still_there(self, rows: Ints, numbers: Ints) -> Ints:
        """Return those of the rows that still have the object with this number."""
        columns = self.columns
        found: Ints = rows[(columns["state"][rows] == RESIDENT) & (columns["number"][rows] == numbers)]
        return found

    def digest(self, row: int) -> bytes:
        """Return the digest of a resident object."""
        return self._layouts.name(self.layout[row]) + self.pages.key(self.page[row])

    def memory_bytes(self) -> int:
        """Return the bytes of memory of all columns."""
        return self.pages.memory_bytes() + sum(column.nbytes for column in self.columns.values())

    def _hint_of(self, row: int) -> tuple[float, int]:
        """Return the rank that an object got by a hint (0: none), and the worker."""
        pages, node = self.pages, self.page[row]
        if not pages.hinted:
            return 0.0, 0
        if self.attached[row]:
            return pages.state_rank[node], pages.state_worker[node]
        return pages.rank[node], pages.worker[node]

    def _use(self, node: int) -> None:
        self.clock += 1
        self.pages.tick[node] = self.clock
        if self.pages.hinted:
            self.pages.values.used(self.clock)

    def _enter(self, row: int, digest: bytes, node: int, parent: int | None) -> None:
        pages, first = self.pages, self.pages.first
        self.page[row], self.next[row], first[node] = node, first[node], row
        self.layout[row] = self._layouts.obtain(digest[:LAYOUT_BYTES])
        self.state[row] = RESIDENT
        self.count += 1
        self.payload += self.length[row]
        if self.owners.active:
            self.owners.used[self.owners.of(self.namespace[row])] += self.footprint.of(self.length[row])
        pages.weigh(node, self.length[row])
        if self.attached[row]:
            pages.state_added(node)
        else:
            pages.page_added(node, parent)
        if not pages.holds[node] and not pages.children[node]:
            pages.note_evictable(node)
        if self.note is not None:
            self.note((digest,), True)

    def _parents(self, loaded: ObjectColumns, nodes: Ints) -> Ints:
        """Return the node of each known parent.

        Most objects are stored just after their parent, or are attached to their own page. Only the parents
        of the other objects are looked up.
        """
        known, keys, parents = loaded.known, loaded.digests[:, 4:], loaded.parents[loaded.known]
        above = np.full(len(known), NONE, np.int64)
        # Two guesses at the parent: the page of the row before, and the object's own page. At first `right`
        # marks the rows for which no parent was found yet. Then it keeps only the rows whose guess is right.
        for guess in (known - 1, known):
            right = (guess >= 0) & (above < 0)
            right[right] = (keys[guess[right]] == parents[right]).all(1)
            above[right] = nodes[guess[right]]
        left = np.flatnonzero(above < 0)
        above[left] = self.pages.find_many(parents[left])
        for i in np.flatnonzero(above < 0).tolist():
            above[i] = self.pages.obtain(parents[i].tobytes())
        return above

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


def add_all(
    table: Residents,
    digests: Sequence[bytes],
    nodes: Sequence[int],
    parents: Sequence[int | None],
    numbers: npt.NDArray[Any],
    lengths: npt.NDArray[Any],
    namespace_ids: npt.NDArray[Any],
    depths: npt.NDArray[Any],
) -> list[int]:
    """Do `Residents.add` for each of these objects, in order, and return their rows.

    Most writes bring the pages of one sequence, none of them known, which are taken in by column; see
    `RestorablePages.are_plain`.
    """
    rows = [table._take() for _ in digests]
    at = np.array(rows, np.int64)
    columns = table.columns
    columns["number"][at], columns["length"][at] = numbers, lengths
    columns["hits"][at] = columns["pins"][at] = 0
    layout = digests[0][:LAYOUT_BYTES] if digests else b""
    pages, above = table.pages, np.array([NONE if up is None else up for up in parents], np.int64)
    on = np.array(nodes, np.int64)
    if (
        len(rows) < _FEW // 2
        or not all(digest.startswith(layout) for digest in digests)
        or (namespace_ids != namespace_ids[0]).any()
        or not pages.are_plain(on, above, int(namespace_ids[0]))
    ):
        known = zip(numbers.tolist(), namespace_ids.tolist(), depths.tolist(), strict=True)
        for row, digest, node, parent, facts in zip(rows, digests, nodes, parents, known, strict=True):
            table._add(row, digest, node, parent, *facts)
        return rows
    n, namespace_id = len(rows), int(namespace_ids[0])
    numbers = np.maximum(numbers, np.uint64(table.newest))
    columns["page"][at], columns["next"][at] = on, NONE
    columns["attached"][at], columns["state"][at], columns["namespace"][at] = 0, RESIDENT, namespace_id
    columns["layout"][at] = table._layouts.obtain(layout, n)
    columns = pages.columns
    columns["first"][on], columns["number"][on] = at, numbers
    columns["namespace_id"][on] = namespace_id
    columns["depth"][on[depths > 0]] = depths[depths > 0]
    columns["tick"][on] = np.arange(table.clock + 1, table.clock + n + 1)
    if pages.hinted:
        pages.values.used(table.clock + 1)
    table.clock += n
    table.newest = int(numbers[-1])
    table.count += n
    table.payload += int(lengths.sum())
    if table.owners.active:
        table.owners.used[table.owners.of(namespace_id)] += int(table.footprint.of(lengths).sum())
    pages.pages_added(on, above, lengths, namespace_id)
    if table.note is not None:
        table.note(digests, True)
    return rows
