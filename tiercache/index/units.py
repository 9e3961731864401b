"""Columns in which policies see the tree: one row per node, brought up to date only when a policy is about to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import le, mul
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.core import Tier
from tiercache.index.node import Node
from tiercache.policy import UnitKind
from tiercache.policy.base import Column

_FIRST_ROWS: Final = 64
_MOST_WAITING: Final = 1024
_SHARED: Final = (
    "last_access",
    "hits",
    "depth",
    "children",
    "replay",
    "checkpoint",
    "lineage",
    "grown",
    "alive",
    "complete",
    "digest",
    "version",
)
_OWN: Final = ("kind", "nbytes", "covered")
_DTYPES: Final = {"kind": np.int8, "alive": np.int8, "complete": np.int8}
"""Dtypes other than int64: columns that every pass reads from end to end are narrow."""


class Kind(NamedTuple):
    """Kind of unit: `of` tells which unit of this kind a node has now, and `tier` is the tier in which it lies."""

    of: Callable[[Node], UnitKind]
    tier: Tier


class UnitTable:
    """Table with one row for every node: its units as a policy sees them.

    Code that changes a node marks it; `sync` writes the rows of the marked nodes. A hit, an insert or a pin therefore costs a mark and
    nothing else, as long as nothing is evicted.
    Thread safety: the index's thread only.
    """

    def __init__(self, kinds: Sequence[Kind], object_bytes: Sequence[int], page_pools: int, page_tokens: int) -> None:
        self.kinds = kinds
        self.page_tokens = page_tokens
        self.now = 0
        self.nodes: list[Node | None] = []
        self._object_bytes = list(object_bytes)
        self._page_pools = page_pools
        self._below = [sum(1 << other for other in Tier if other > tier) for tier in Tier]  # by tier: the bits of those below
        self._free: list[int] = []
        self._marked: dict[Node, None] = {}
        self._version = 0
        self._listeners: list[list[int] | None] = [None] * len(kinds)
        self.shared: dict[str, Column] = {}
        """Columns by name, one entry a row: what is the same for all kinds."""
        self.own: dict[str, Column] = {}
        """Columns by name, of shape (kinds, rows): what differs between kinds."""
        self._grow(_FIRST_ROWS)

    def mark(self, node: Node) -> None:
        """Note that the node's row may be out of date."""
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

    def listen(self, number: int, *, on: bool) -> None:
        """Start or stop noting, for `changed`, which rows `sync` writes."""
        self._listeners[number] = [] if on else None

    def changed(self, number: int) -> Sequence[int] | None:
        """Return the rows with a unit of this kind that were written since the last call, in order; None if they were not noted."""
        rows = self._listeners[number]
        if rows is None:
            return None
        if rows:
            self._listeners[number] = []
        kind = self._kind[number]
        return [row for row in dict.fromkeys(rows) if kind[row]]

    def has_unit(self, node: Node, number: int) -> bool:
        """Return whether the node still has the unit of this kind that its row describes; if it does not, write the row anew.

        A pin changes a unit without a mark.
        """
        row, kind = node.row, self.kinds[number].of(node)
        if kind == self._kind[number][row]:
            return kind is not UnitKind.NONE
        self._write(node)
        for rows in self._listeners:
            if rows is not None:
                rows.append(row)
        return False

    def take(self, node: Node, number: int) -> UnitKind:
        """Remove the unit from its row until the row is written again, and return its kind."""
        kind = UnitKind(self._kind[number][node.row])
        self._kind[number][node.row] = UnitKind.NONE
        return kind

    def sync(self) -> None:
        """Write the rows of all marked nodes."""
        if not self._marked:
            return
        listeners = [rows for rows in self._listeners if rows is not None]
        for node in self._marked:
            if node.parent is not None:
                self._write(node)
                for rows in listeners:
                    rows.append(node.row)
        self._marked.clear()
        for number, waiting in enumerate(self._listeners):
            if waiting is not None and len(waiting) > 2 * len(self.nodes) + _MOST_WAITING:
                self._listeners[number] = None  # its queue has not asked for a long time, and starts anew when it does

    def rows(self, number: int, *, alive: bool) -> npt.NDArray[np.int64]:
        """Return the rows that have a unit of this kind and lead to a state that survives (`alive`), or do not."""
        used = len(self.nodes)
        return np.flatnonzero((self.own["kind"][number, :used] != 0) & (self.shared["alive"][:used] == alive))

    def complete(self) -> npt.NDArray[np.int64]:
        """Return the rows of all nodes that could answer a hit."""
        return np.flatnonzero(self.shared["complete"][: len(self.nodes)])

    def view(self, rows: npt.NDArray[np.int64], number: int = 0) -> UnitRows:
        """Return some rows as a policy sees them, with the units of this kind."""
        return UnitRows(self, rows, number)

    def stale(self, node: Node) -> bool:
        """Return whether the node is unmarked although its row would make a unit be missed or taken for another. For integrity checks."""
        if node in self._marked or node.parent is None:
            return False
        row, now = node.row, [kind.of(node) for kind in self.kinds]
        if row < 0:
            return node.can_answer or any(now)
        shared, own = self.shared_of(row), [self._own_of(row, number) for number in range(len(now))]
        version = self._version_of[row]
        self._write(node)
        self._version_of[row] = version
        fresh = [self._own_of(row, number) for number in range(len(now))]
        # A pin removes or reduces units without a mark; `has_unit` notices that.
        missed = any(f[0] and (not o[0] or (f[0] == o[0] and f != o)) for f, o in zip(fresh, own, strict=True))
        return missed or shared != self.shared_of(row)

    def shared_of(self, row: int) -> dict[str, int]:
        """Return what a row says of all kinds, by column, without its version."""
        return {name: int(column[row]) for name, column in self.shared.items() if name != "version"}

    def _own_of(self, row: int, number: int) -> tuple[int, ...]:
        return tuple(int(column[number, row]) for column in self.own.values())

    def _write(self, node: Node) -> None:
        row = node.row
        if row < 0:
            row = node.row = self._take(node)
        self._version += 1
        self._last_access[row] = node.last_access
        self._hits[row] = node.hits
        self._depth[row] = node.end
        self._children[row] = node.branches
        self._replay[row] = node.replay
        self._checkpoint[row] = node.checkpoint
        self._lineage[row] = node.lineage
        self._grown[row] = node.grown
        self._alive[row] = not node.state_pools or (node.is_alive and not (node.surplus and node.branches < 2))
        self._complete[row] = node.can_answer
        self._digest[row] = node.signature
        self._version_of[row] = self._version
        for number, (kind_of, tier) in enumerate(self.kinds):
            self._kind[number][row] = kind = kind_of(node)
            if kind:
                goes = slice(0 if kind is UnitKind.LEAF else self._page_pools, None)
                held = node.resident[tier][goes]
                self._nbytes[number][row] = sum(map(mul, held, self._object_bytes[goes])) or 1
                self._covered[number][row] = bool(node.own & self._below[tier]) and any(
                    all(map(le, held, counts[goes])) for counts in node.resident[tier + 1 :]
                )

    def _take(self, node: Node) -> int:
        if self._free:
            row = self._free.pop()
            self.nodes[row] = node
            return row
        if len(self.nodes) == len(self.shared["depth"]):
            self._grow(2 * len(self.nodes))
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _grow(self, rows: int) -> None:
        used = len(self.nodes)
        shared, own = self.shared, self.own
        self.shared = {name: np.zeros(rows, _DTYPES.get(name, np.int64)) for name in _SHARED}
        self.own = {name: np.zeros((len(self.kinds), rows), _DTYPES.get(name, np.int64)) for name in _OWN}
        for name, column in shared.items():
            self.shared[name][:used] = column[:used]
        for name, columns in own.items():
            self.own[name][:, :used] = columns[:, :used]
        # Writing one element through a memoryview takes half the time that it takes through an array.
        views = [self.shared[name].data for name in _SHARED]
        self._last_access, self._hits, self._depth, self._children, self._replay = views[:5]
        self._checkpoint, self._lineage, self._grown, self._alive, self._complete, self._digest, self._version_of = views[5:]
        self._kind, self._nbytes, self._covered = ([row.data for row in self.own[name]] for name in _OWN)


@dataclass(frozen=True, slots=True)
class UnitRows:
    """Rows of a table, as described at `Units`. Thread safety: the index's thread, during one call of the policy."""

    table: UnitTable
    rows: npt.NDArray[np.int64]
    number: int

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def now(self) -> int:
        """Current tick; see `Units`, as for all properties that follow."""
        return self.table.now

    @property
    def page_tokens(self) -> int:  # noqa: D102
        return self.table.page_tokens

    @property
    def kind(self) -> Column:  # noqa: D102
        return self._own("kind")

    @property
    def last_access(self) -> Column:  # noqa: D102
        return self._shared("last_access")

    @property
    def hits(self) -> Column:  # noqa: D102
        return self._shared("hits")

    @property
    def depth(self) -> Column:  # noqa: D102
        return self._shared("depth")

    @property
    def children(self) -> Column:  # noqa: D102
        return self._shared("children")

    @property
    def replay(self) -> Column:  # noqa: D102
        return self._shared("replay")

    @property
    def nbytes(self) -> Column:  # noqa: D102
        return self._own("nbytes")

    @property
    def checkpoint(self) -> Column:  # noqa: D102
        return self._shared("checkpoint")

    @property
    def lineage(self) -> Column:  # noqa: D102
        return self._shared("lineage")

    @property
    def covered(self) -> Column:  # noqa: D102
        return self._own("covered")

    @property
    def grown(self) -> Column:  # noqa: D102
        return self._shared("grown")

    @property
    def digest(self) -> Column:  # noqa: D102
        return self._shared("digest")

    def _shared(self, name: str) -> Column:
        taken: Column = self.table.shared[name].take(self.rows)
        return taken

    def _own(self, name: str) -> Column:
        taken: Column = self.table.own[name][self.number].take(self.rows)
        return taken
