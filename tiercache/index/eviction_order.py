"""Order in which units are evicted, over the columns that policies read.

`EvictionColumns` has one row per node. A row is written only when a policy is about to read it.
`EvictionQueue` yields dead weight first, then the units that the policy ranks lowest.

*Dead weight* is KV that no hit can use, because no state survives at its end or below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import le, mul
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tiercache.core import Tier
from tiercache.index.node import Node
from tiercache.policy import Policy, UnitKind
from tiercache.policy.base import Column
from tiercache.policy.order import Front

_FIRST_ROWS: Final = 64
"""Initial capacity of the columns, in rows. The capacity doubles when it is used up."""
_MAX_WAITING: Final = 1024
"""Constant in the maximum length of a queue's list of changed rows.

The maximum is this number + 2 x the rows of the table. A longer list is dropped, and the queue reads all rows
in its next pass instead.
"""
_SHARED: Final = (
    "last_access", "created", "hits", "depth", "children", "replay", "checkpoint", "lineage", "grown",
    "ending", "expected", "digest", "version",
)  # fmt: skip
"""Columns that are the same for all units of a node. `Units` explains them, except these:

- `version` is the number of the last write of the row.
- `alive` (see `_FLAGS`) says whether the node's units are living ones (1) or dead weight (0).
- `complete` says whether a hit could end at the node.
"""
_FLAGS: Final = ("alive", "complete")
_BY_KIND: Final = {"nbytes": np.int64, "kind": np.int8, "covered": np.int8}
"""Columns that depend on the `Kind` of the unit, and their dtypes."""
_MAX_SAMPLE: Final = 4096
"""Maximum number of units that a pass ranks under a policy that is not steady (see `Policy.steady`).

If there are more units, the pass ranks a random sample of this size.
"""
_AT_ONCE: Final = 1024
"""Maximum number of units whose rows are taken whole. Of more units, each column is taken when it is read."""
_MIN_STEADY_FRONT: Final = 512
"""Minimum number of units that a pass takes into the front under a steady policy (see `Policy.steady`)."""


class Kind(NamedTuple):
    """Kind of units that one queue holds: the units that the function `of` finds in one tier."""

    of: Callable[[Node], UnitKind]
    """Returns which unit a node has now for this queue: LEAF, STATE or NONE.

    It is NONE for a node without objects in `tier`.
    """
    tier: Tier
    """Tier from which an eviction takes the unit."""


class EvictionColumns:
    """Table with one row for every node: its units as a policy sees them.

    Code that changes a node marks the node. `sync` writes the rows of the marked nodes when an eviction is
    about to read them. Therefore a hit, an insert or the release of a pin costs only a mark.

    Each kind of `kinds` has a queue. The argument `number` of the methods is the number of a kind and of its
    queue. Thread safety: the index's thread only.
    """

    def __init__(
        self, kinds: Sequence[Kind], object_bytes: Sequence[int], page_pools: int, page_tokens: int
    ) -> None:
        self.kinds = kinds
        self.page_tokens = page_tokens
        self.now = 0
        """Current tick of the index's logical clock (see `Units`)."""
        self.nodes: list[Node | None] = []
        """Node of each row; None for a free row."""
        self._object_bytes = list(object_bytes)
        self._page_pools = page_pools
        self._leaf_pools, self._state_pools = slice(None), slice(page_pools, None)
        self._device_leaf_pools = slice(page_pools or None)
        self._lower_tiers = [sum(1 << other for other in Tier if other > tier) for tier in Tier]
        """For each tier, the bits of the tiers below."""
        self._free: list[int] = []
        """Free rows."""
        self._marked: dict[Node, None] = {}
        self._version = 0
        """Version of the row that was written last. Each write of a row has the next number."""
        self._listeners: list[list[int] | None] = [None] * len(kinds)
        """By kind: the rows written since the last call of `changed`; None if they are not recorded."""
        self.shared: dict[str, Column] = {}
        """Columns that are the same for all kinds, by name; one entry per row."""
        self.by_kind: dict[str, Column] = {}
        """Columns that differ between kinds, by name; shape (kinds, rows)."""
        many = (len(kinds),)
        fields: list[Any] = [(name, np.int64) for name in _SHARED]
        fields += [(name, dtype, many) for name, dtype in _BY_KIND.items()]
        fields += [(name, np.int8) for name in _FLAGS]
        self.table = np.zeros(0, np.dtype(fields, align=True))
        """The columns, row by row, so that a write touches little memory."""
        self._row = Struct(f"{len(_SHARED) + len(kinds)}q{2 * len(kinds) + len(_FLAGS)}b0q")
        self._grow(_FIRST_ROWS)

    def mark(self, node: Node) -> None:
        """Mark a node whose row may be out of date, so that the next `sync` writes the row."""
        self._marked[node] = None

    def drop(self, node: Node) -> None:
        """Free the row of a node that was removed."""
        self._marked.pop(node, None)
        if node.row >= 0:
            self.nodes[node.row] = None
            for kind in self._kind:
                kind[node.row] = UnitKind.NONE
            self._complete[node.row] = False
            self._free.append(node.row)
            node.row = -1

    def record_changes(self, number: int, *, on: bool) -> None:
        """Start or stop recording which rows are written; `changed` returns them."""
        self._listeners[number] = [] if on else None

    def changed(self, number: int) -> Sequence[int] | None:
        """Return the rows that were written since the last call and have a unit of this kind, in order.

        Returns None if changes were not recorded (see `record_changes`).
        """
        rows = self._listeners[number]
        if rows is None:
            return None
        if rows:
            self._listeners[number] = []
        kind = self._kind[number]
        return [row for row in dict.fromkeys(rows) if kind[row]]

    def take(self, node: Node, number: int) -> UnitKind:
        """Take the node's unit of this kind out of its row until the next write; return which it is.

        If the node has another unit than its row says, or none, the row is written again instead, and the
        answer is NONE. This happens after a pin, which changes units without a mark.
        """
        row, kind = node.row, self.kinds[number].of(node)
        if kind == self._kind[number][row]:
            self._kind[number][row] = UnitKind.NONE
            return kind
        self._update((node,))
        return UnitKind.NONE

    def rows_of(self, nodes: Iterable[Node]) -> npt.NDArray[np.int64]:
        """Return the rows of some nodes, which are written first if they may be out of date."""
        at = list(nodes)
        self._update([node for node in at if node.row < 0 or node in self._marked])
        for node in at:
            self._marked.pop(node, None)
        return np.array([node.row for node in at], np.int64)

    def sync(self) -> None:
        """Write the rows of all marked nodes."""
        if not self._marked:
            return
        self._update([node for node in self._marked if node.parent is not None])
        self._marked.clear()

    def rows(self, number: int) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Return the rows with living units of this kind, and those with dead weight."""
        rows = self.by_kind["kind"][number, : len(self.nodes)].nonzero()[0]
        alive = self.shared["alive"][rows]
        all_alive = np.count_nonzero(alive) == len(rows)
        return (rows, []) if all_alive else (rows[alive != 0], rows[alive == 0].tolist())

    def is_dead(self, row: int) -> bool:
        """Return whether the units of a row are dead weight."""
        return not self._alive[row]

    def entries(self, rows: Iterable[int], ranks: Iterable[float] | None = None) -> list[Entry]:
        """Return the entries of some rows; without ranks, of dead weight."""
        depth, version, used = self._depth, self._version_of, self._last_access
        if ranks is None:
            return [(used[row], depth[row], version[row], row) for row in rows]
        return [(rank, depth[row], version[row], row) for row, rank in zip(rows, ranks, strict=True)]

    def node(self, entry: Entry) -> Node | None:
        """Return the node of an entry; None if the entry is out of date."""
        _, _, version, row = entry
        return self.nodes[row] if self._version_of[row] == version else None

    def complete(self) -> npt.NDArray[np.int64]:
        """Return the rows of all nodes that could answer a hit."""
        return np.flatnonzero(self.shared["complete"][: len(self.nodes)])

    def _update(self, nodes: Sequence[Node]) -> None:
        """Write the rows of some nodes, and record them as changed."""
        for node in nodes:
            self._write(node)
        written = [node.row for node in nodes]
        most = 2 * len(self.nodes) + _MAX_WAITING
        for number, waiting in enumerate(self._listeners):
            if waiting is not None:
                waiting += written
                if len(waiting) > most:
                    # The queue has not asked for its changed rows for long. Its next pass reads all rows.
                    self._listeners[number] = None

    def _write(self, node: Node) -> None:
        row = node.row
        if row < 0:
            row = node.row = self._take(node)
        self._version += 1
        held, none = node.resident_mask, [0] * len(self.kinds)
        nbytes, units, covered = none.copy(), none.copy(), none.copy()
        for number, (kind_of, tier) in enumerate(self.kinds):
            if held >> tier & 1 and (kind := kind_of(node)):
                # A leaf has objects of all pools, a state only of the state pools.
                pools = self._leaf_pools if kind is UnitKind.LEAF else self._state_pools
                counts = node.resident[tier]
                # On the device, states have slots of their own; a leaf goes if those of pages are short.
                on_device = kind is UnitKind.LEAF and tier is Tier.DEVICE
                freed = self._device_leaf_pools if on_device else pools
                nbytes[number] = sum(map(mul, counts[freed], self._object_bytes[freed])) or 1
                units[number] = kind
                # Covered: a single lower tier has at least as many objects of each of these pools.
                covered[number] = bool(held & self._lower_tiers[tier]) and any(
                    all(map(le, counts[pools], lower[pools])) for lower in node.resident[tier + 1 :]
                )
        # Alive: a complete state is at the node's end or below it. Without state pools every unit is alive.
        # Without page pools, states below need nothing of the node.
        used = node.is_alive if self._page_pools else node.is_complete
        self._row.pack_into(
            self._bytes, row * self._row.size,
            node.last_access, node.created, node.hits, node.end, node.branches, node.replay,
            node.checkpoint, node.lineage, node.new_pages, node.ending, node.expected, node.signature,
            self._version, *nbytes, *units, *covered, not node.state_pools or used, node.can_answer,
        )  # fmt: skip

    def _take(self, node: Node) -> int:
        if self._free:
            row = self._free.pop()
            self.nodes[row] = node
            return row
        if len(self.nodes) == len(self.table):
            self._grow(2 * len(self.nodes))
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _grow(self, rows: int) -> None:
        table = np.zeros(rows, self.table.dtype)
        table[: len(self.nodes)] = self.table[: len(self.nodes)]
        self.table, self._bytes = table, table.view(np.uint8).data
        self.shared = {name: table[name] for name in (*_SHARED, *_FLAGS)}
        self.by_kind = {name: table[name].T for name in _BY_KIND}
        # Access to one element through a memoryview takes half the time that it takes through an array.
        self._last_access, self._depth, self._version_of, self._alive, self._complete = (
            self.shared[name].data for name in ("last_access", "depth", "version", *_FLAGS)
        )
        self._kind = [kind.data for kind in self.by_kind["kind"]]


def _column(name: str) -> Any:
    return property(lambda units: units.column(name))


class UnitRows:
    """Units of one kind in some rows, with the columns that `Units` describes.

    Thread safety: the index's thread, during one call of the policy.
    """

    def __init__(
        self,
        columns: EvictionColumns,
        rows: npt.NDArray[np.int64],
        number: int = 0,
        stored_bytes: Column | None = None,
    ) -> None:
        """`stored_bytes` are the bytes of each unit in storage, if these are the units of a store."""
        self.now = columns.now
        self.page_tokens = columns.page_tokens
        self._table, self._number = columns.table, number
        self._rows: Any = rows
        self._stored_bytes, self._count = stored_bytes, len(rows)
        if len(rows) <= _AT_ONCE:
            # NumPy takes rows of words many times faster than records.
            words = self._table.view(np.int64).reshape(len(self._table), -1).take(rows, axis=0)
            self._table, self._rows = words.view(self._table.dtype)[:, 0], slice(None)

    (
        last_access, created, hits, depth, children, replay, checkpoint, lineage, grown, ending, expected,
        digest, _,
    ) = map(_column, _SHARED)  # fmt: skip

    def column(self, name: str) -> Column:
        """Return the column of that name."""
        column: Column = self._table[name][self._rows]
        return column

    def __len__(self) -> int:
        return self._count

    @property
    def kind(self) -> Column:
        """`UnitKind` of each unit."""
        return self.column("kind")[:, self._number]

    @property
    def nbytes(self) -> Column:
        """Bytes that the unit's eviction frees."""
        return self.column("nbytes")[:, self._number] if self._stored_bytes is None else self._stored_bytes

    @property
    def covered(self) -> Column:
        """Whether a lower tier has a copy of the unit; there is no tier below storage."""
        of_index = self._stored_bytes is None
        return self.column("covered")[:, self._number] if of_index else np.zeros(len(self), np.int64)


class Victim(NamedTuple):
    """Node with a unit that is to be evicted."""

    node: Node
    kind: UnitKind
    """Unit of the node."""


Entry: TypeAlias = tuple[float, int, int, int]
"""Tuple (rank, depth, version, row), valid while the row has this version.

The rank of dead weight is its last access.
"""


class EvictionQueue:
    """Queue of the units of one kind: first dead weight by last access, then the other units by rank.

    Among units of equal rank, the shallowest comes first. The queue keeps only its *front*, the units that
    come next. A pass over all units, which takes O(units), fills the front with the dead weight and the
    lowest 64th of the other units (see `Front`). A unit that changes may return to the front. Under a steady
    policy (see `Policy.steady`), it returns at once. Under any other policy, it returns with the next pass.
    Thread safety: the index's thread only.
    """

    def __init__(
        self, columns: EvictionColumns, number: int, policy: Policy, rng: np.random.Generator
    ) -> None:
        self._columns = columns
        self._number = number
        self._policy = policy
        self._rng = rng
        self._front: Front[Entry] = Front(
            steady=policy.steady, fewest=_MIN_STEADY_FRONT if policy.steady else 1
        )

    def pop(self) -> Victim | None:
        """Remove and return the unit that is worth least, or None if no unit can be evicted.

        The unit returns to the queue when its node is marked.
        """
        columns = self._columns
        columns.sync()
        self._add_changed()
        # An entry is valid while its row has the version that the entry names:
        #   1. a pass puts (rank 0.2, version 12, row 5) into the front
        #   2. a hit marks the node of row 5, and `sync` writes the row with version 13
        #   3. `_add_changed` pushes an entry with version 13, if it belongs to the front
        #   4. the entry with version 12 is popped: it is out of date and dropped
        while self._front.dead or self._front.live or self._fetch():
            entry, _ = self._front.pop()
            if (node := columns.node(entry)) is None:
                continue
            if kind := columns.take(node, self._number):
                return Victim(node, kind)
            self._add_changed()  # `take` has written the row again
        return None

    def coldest(self) -> Iterator[tuple[Node, UnitKind]]:
        """Yield the living units, the one that is worth least first; this takes none of them."""
        columns = self._columns
        columns.sync()
        rows, _ = columns.rows(self._number)
        if not len(rows):
            return
        ranks = self._policy.rank(UnitRows(columns, rows, self._number))
        for row in rows[np.lexsort((columns.shared["depth"][rows], ranks))].tolist():
            node = columns.nodes[row]
            if node is not None and (kind := columns.kinds[self._number].of(node)):
                yield node, kind

    def _add_changed(self) -> None:
        """Add units that changed since the last call to the front, if they belong there.

        Drops a front that is out of date or too long.
        """
        columns = self._columns
        rows = columns.changed(self._number)
        crowded = self._front.is_crowded(len(columns.nodes))
        if rows is None or crowded or self._front.is_outdated(columns.now):
            self._front.clear()
            columns.record_changes(self._number, on=False)
            return
        if not rows:
            return
        # Dead weight always joins the front. Its rank is its last access, not the policy's rank.
        dead = [row for row in rows if columns.is_dead(row)]
        for entry in columns.entries(dead):
            self._front.push(entry, dead=True)
        living = [row for row in rows if not columns.is_dead(row)] if dead else rows
        if self._policy.steady and living:
            ranks = self._policy.rank(UnitRows(columns, np.array(living), self._number))
            for entry in columns.entries(living, ranks.tolist()):
                if self._front.admits(entry[0]):
                    self._front.push(entry)

    def _fetch(self) -> bool:
        """Fill the front by a pass over all units; return False if there are none."""
        columns, steady = self._columns, self._policy.steady
        rows, dead = columns.rows(self._number)
        if not len(rows) and not dead:
            return False
        columns.record_changes(self._number, on=True)  # `_add_changed` keeps the new front up to date
        if not steady and len(rows) > _MAX_SAMPLE:
            rows = np.sort(self._rng.choice(rows, _MAX_SAMPLE, replace=False))
        ranks = self._policy.rank(UnitRows(columns, rows, self._number)) if len(rows) else np.empty(0)
        chosen = self._front.choose(ranks)
        live = columns.entries(rows[chosen].tolist(), ranks[chosen].tolist())
        self._front.fill(live, columns.now + len(dead), columns.entries(dead))
        return True
