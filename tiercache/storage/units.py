"""Units of a store as a policy sees them, and their ranks, computed from the tables of objects and pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiercache.policy import Policy, UnitKind
from tiercache.policy.base import Column, Ranks
from tiercache.storage.pages import Ints, Mask
from tiercache.storage.residents import Residents


class StoredUnits:
    """Units of a store as a policy sees them (`Units`), by the node of their page.

    Columns that a store does not know are 0: why a state was taken, and which requests led to it. There is no
    tier below a store, and hints of expected hits do not reach it.

    Thread safety: only within one call of the policy.
    """

    queue = 0

    def __init__(
        self, residents: Residents, nodes: Ints, page_tokens: int, kind: Column | None = None
    ) -> None:
        """Describe the pages `nodes`; `kind` is their kind, if it is not that of this moment."""
        self.page_tokens = page_tokens
        self._residents = residents
        self._nodes = nodes
        self._kind = kind

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def population(self) -> int:
        """Number of units."""
        return len(self)

    @property
    def created(self) -> Column:
        """Zeros, as in all columns that a store does not know."""
        return np.zeros(len(self), np.int64)

    checkpoint = lineage = grown = ending = expected = digest = covered = created

    @property
    def now(self) -> int:
        """The store's clock, in ticks: each use of an object is one tick."""
        return self._residents.clock

    @property
    def kind(self) -> Column:
        """`UnitKind` of each unit: LEAF for a page that no page follows and no call holds, otherwise STATE.

        A leaf is evicted with all objects on its page.
        """
        if self._kind is not None:
            return self._kind
        return np.where(
            (self._column("children") > 0) | (self._column("holds") > 0), UnitKind.STATE, UnitKind.LEAF
        )

    @property
    def last_access(self) -> Column:
        """Tick of the last use of the page, or of a later page that was evicted."""
        return self._column("tick")

    @property
    def hits(self) -> Column:
        """Number of reads of the page's most-read object since the store was opened."""
        rows = self._residents.residents()
        hits = np.zeros(self._residents.pages.used, np.uint32)
        np.maximum.at(hits, self._residents.columns["page"][rows], self._residents.columns["hits"][rows])
        return hits[self._nodes]

    @property
    def depth(self) -> Column:
        """Pages from the start of the sequence to the unit's end; 0 where the caller gave none."""
        return self._column("depth")

    @property
    def children(self) -> Column:
        """Number of stored pages directly after the page."""
        return self._column("children")

    @property
    def replay(self) -> Column:
        """Number of pages to compute again if the unit is evicted.

        These are the pages after the nearest earlier page at which a restore can end.
        """
        return self._upwards(self._restore_points())

    @property
    def nbytes(self) -> Column:
        """Payload bytes that are evicted with the unit, at least 1."""
        residents = self._residents
        rows = residents.residents()
        rows = rows[residents.columns["attached"][rows] != 0]
        used = residents.pages.used
        own = np.bincount(residents.columns["page"][rows], residents.columns["length"][rows], used)[
            self._nodes
        ]
        # Together with a leaf, pages before it are evicted if they are useless without the leaf. The nearest
        # page that stays is one at which a restore can end, or one that another page follows. A page that is
        # no leaf loses only its states.
        whole = residents.pages.columns["nbytes"][:used].astype(np.int64)
        shared = self._restore_points() | (residents.pages.columns["children"][:used] > 1)
        return np.maximum(
            np.where(self.kind == UnitKind.LEAF, self._upwards(shared, whole), own).astype(np.int64), 1
        )

    def _restore_points(self) -> npt.NDArray[np.bool_]:
        """Return a mask by node: True where a restore can end."""
        residents = self._residents
        used = residents.pages.used
        return (residents.pages.columns["states"][:used] > 0) | residents.pages.stateless()[:used]

    def _upwards(self, until: npt.NDArray[np.bool_], step: Column | None = None) -> Column:
        """Return for each unit the sum of `step` (None: 1 each) over its page and the pages before it.

        The sum ends before the first page that `until` marks.
        """
        pages = self._residents.pages
        up = pages.columns["parent_node"][: pages.used]
        found = np.ones(len(self), np.int64) if step is None else step[self._nodes]
        left, at = np.arange(len(self)), up[self._nodes]
        # In each round, every unit that is not finished adds one page, and moves on to the page before it:
        #   page    1 <- 2 [state] <- 3 <- 4      `until` marks page 2: the sum is over 4 and 3
        for _ in range(pages.used):
            on = at >= 0
            on[on] = ~until[at[on]]
            left, at = left[on], at[on]
            if not len(left):
                break
            found[left] += 1 if step is None else step[at]
            at = up[at]
        return found

    def _column(self, name: str) -> Column:
        found: Column = self._residents.pages.columns[name][self._nodes]
        return found


class Ranking:
    """Ranks of the units of a store, by the node of their page; the lowest is evicted first.

    Before the first hint the policy ranks. From then on `values` ranks, and the policy is not asked any more.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self, residents: Residents, policy: Policy, page_tokens: int) -> None:
        self._residents = residents
        self._policy = policy
        self._page_tokens = page_tokens

    @property
    def by_value(self) -> bool:
        """Whether a hint was given, so that values rank."""
        return self._residents.pages.hinted

    @property
    def steady(self) -> bool:
        """Whether the rank of a unit changes with that unit only (see `Policy.steady`)."""
        return self.by_value or self._policy.steady

    def stand_alone(self, nodes: Ints) -> Mask:
        """Return where the states of a page that others follow are a unit of their own.

        Under values these are the states with a hint.
        """
        columns = self._residents.pages.columns
        alone: Mask = columns["states"][nodes] > 0
        if self.by_value:
            return alone & (columns["state_rank"][nodes] > 0)
        return np.zeros(len(nodes), np.bool_) if self._policy.steady else alone

    def stands_alone(self, node: int) -> bool:
        """Return whether the states of this page are a unit of their own if others follow the page."""
        pages = self._residents.pages
        if self.by_value:
            return pages.states[node] > 0 and pages.state_rank[node] > 0
        return not self._policy.steady and pages.states[node] > 0

    def rank(self, nodes: Ints, kind: Column | None = None) -> Ranks:
        """Return the rank of each unit; `kind` is their kind (`UnitKind`), if not that of this moment."""
        units = StoredUnits(self._residents, nodes, self._page_tokens, kind)
        if self.by_value:
            return self._residents.pages.values.ranks(nodes, units.kind == UnitKind.STATE)
        return self._policy.rank(units)

    def rank_of(self, node: int) -> float:
        """Return the rank of one unit."""
        if self.by_value:
            pages = self._residents.pages
            return pages.values.rank_of(node, alone=pages.children[node] > 0 or pages.holds[node] > 0)
        return float(self.rank(np.array([node]))[0])

    def evicted(self, rank: float) -> None:
        """Record that a unit of this rank was evicted."""
        if not self.by_value:
            self._policy.evicted(rank)
