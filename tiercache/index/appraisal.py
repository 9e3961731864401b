"""Values of units for a store: which of them are worth most, by everything that the index knows.

A store ranks its objects by the values that its callers give (`ObjectMeta.value`). The index knows why a
state was taken, which session it belongs to and how often it was hit, so it computes the values. `Appraiser`
finds the units whose values have changed since they were last reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.index.eviction_order import EvictionColumns, UnitRows
from tiercache.index.node import IN_STORAGE, Node
from tiercache.policy import Policy
from tiercache.policy.base import Ranks

_SLICE: Final = 512
"""Number of rows that each `changed` looks at besides those that were written since the last call.

Values of units that nobody uses change too, because the units grow older and the policy learns.
"""
_TOLERANCE: Final = 0.5
"""Change of the binary logarithm of a value that is worth a report.

A store that puts two units in the wrong order then keeps one that is worth at least 0.7 of the other.
"""
_LEAST: Final = np.finfo(np.float64).tiny
"""Value below which values count as equal, so that 0 has a logarithm."""


class Appraisal(NamedTuple):
    """Values of the objects of one node, in FLOPs per byte and second (see `Policy.value`)."""

    node: Node
    page: float
    """Value of the node's pages, as a unit with the state at its end."""
    state: float
    """Value of the state alone."""


class Appraiser:
    """Values of the nodes of an index, computed by its policy from the columns of the nodes.

    The policy's values are per tick. `rate` is the number of ticks in a second: stores compare values of
    several workers, so they get values per second.
    """

    def __init__(self, columns: EvictionColumns, policy: Policy, page_bytes: int, state_bytes: int) -> None:
        """`page_bytes` and `state_bytes` are the bytes of all pools for one page and for one state."""
        self._columns = columns
        self._policy = policy
        self._page_bytes = page_bytes
        self._state_bytes = state_bytes
        self._next = self._version = 0
        # By row: what was last reported for which node. A row is used again for other nodes, which have
        # other digests.
        self._reported: npt.NDArray[np.float64] = np.zeros(0)
        self._digest: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def of(self, nodes: Sequence[Node], rate: float) -> list[Appraisal]:
        """Return the values of these nodes, and note them as reported."""
        return self._report(self._columns.rows_of(nodes), rate)

    def chance(self, nodes: Sequence[Node], ticks: float) -> Ranks:
        """Return the probability that a hit ends at each of these nodes within `ticks` ticks."""
        columns = self._columns
        return self._policy.chance(UnitRows(columns, columns.rows_of(nodes)), ticks)

    def changed(self, rate: float) -> list[Appraisal]:
        """Return the values that differ by more than `_TOLERANCE` from what was last reported.

        Looks at the nodes that changed since the last call, and at the next `_SLICE` of the others. Only
        nodes with objects in storage are in the answer.
        """
        columns = self._columns
        columns.sync()
        used = len(columns.nodes)
        if not used:
            return []
        version = columns.shared["version"][:used]
        rows = np.union1d(
            np.flatnonzero(version > self._version), np.arange(self._next, self._next + _SLICE) % used
        )
        self._version, self._next = int(version.max()), (self._next + _SLICE) % used
        return self._report(rows, rate, changed=True)

    def _report(self, rows: npt.NDArray[np.int64], rate: float, *, changed: bool = False) -> list[Appraisal]:
        columns = self._columns
        if not len(rows):
            return []
        if more := len(columns.shared["digest"]) - len(self._digest):
            self._reported = np.concatenate([self._reported, np.zeros(more)])
            self._digest = np.concatenate([self._digest, np.zeros(more, np.int64)])
        has_state = (columns.shared["complete"][rows] != 0) & bool(self._state_bytes)
        state_bytes = has_state * self._state_bytes
        # A leaf of a store ends where a restore can end, and has all pages since the restore point before it.
        # Without page pools, a node may have no bytes at all.
        nbytes = np.maximum(columns.shared["replay"][rows] * self._page_bytes + state_bytes, 1)
        pages = self._policy.value(UnitRows(columns, rows, 0, nbytes)) * rate
        states = pages * (nbytes / np.maximum(state_bytes, 1)) * has_state
        now, digest = np.log2(np.maximum(pages, _LEAST)), columns.shared["digest"][rows]
        chosen: Iterable[int] = range(len(rows))
        if changed:
            is_new = self._digest[rows] != digest
            chosen = (is_new | (np.abs(now - self._reported[rows]) > _TOLERANCE)).nonzero()[0].tolist()
        found = []
        for i in chosen:
            node = columns.nodes[rows[i]]
            if node is not None and (not changed or node.resident_mask & IN_STORAGE):
                found.append(Appraisal(node, float(pages[i]), float(states[i])))
                self._reported[rows[i]], self._digest[rows[i]] = now[i], digest[i]
        return found
