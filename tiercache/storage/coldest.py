"""The objects that a store would evict next, computed from copies of its columns."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.storage.pages import CUT, Ints, Links, Mask
from tiercache.storage.residents import Residents

_MAX_OBJECTS: Final = 1 << 14
"""Maximum number of objects in an answer, without the pages that are there because others depend on them."""


class Found(NamedTuple):
    """Objects in the order in which they should be copied: rows, and the numbers of the objects in them."""

    rows: Ints
    numbers: Ints


class Survey:
    """Copies of the columns of a store, which tell what the store would evict next.

    Making a survey takes the mutex of the store. The rest takes longer, and needs no mutex.

    A page is evicted after all pages that follow it, and then counts as used when the last of them was used.
    So its rank is the highest among its own rank, as a leaf, and those of all pages after it. A page at which
    no restore can end is evicted together with the last page after it, whatever its own rank is:

        page        1 <- 2 <- 3 <- 4 <- 5     a restore can end at all pages but 4
        own rank    2    7    3    4    1
        rank        7    7    4    1    1     evicted: 5 and 4, then 3, then 2 and 1
    """

    def __init__(self, residents: Residents) -> None:
        """Copy the columns of `residents`, and rank all pages that a restore may use."""
        pages, values = residents.pages, residents.pages.values
        up, kv, states, live, children, flags = (
            pages.columns[name][: pages.used]
            for name in ("parent_node", "kv", "states", "live", "children", "flags")
        )
        self._live = (kv > 0) & (live > 0)
        self._restore_points = (states > 0) | pages.stateless()[: pages.used]
        nodes = np.flatnonzero(self._live)
        alone = nodes[values.stand_alone(nodes) & (children[nodes] > 0)]
        self._nodes, self._ranks = nodes, values.ranks(nodes, np.zeros(len(nodes), np.bool_))
        self._alone, self._ranks_alone = alone, values.ranks(alone, np.ones(len(alone), np.bool_))
        self._up = up.copy()
        self._sound = (kv > 0) & (flags & CUT == 0)
        self._rows = residents.residents()
        owners = residents.owners
        self._owner = owners.of_all(residents.columns["namespace"][self._rows]) if owners.active else None
        self._protected, self._near_quota = owners.protected(), owners.near_quota()
        self._page, self._attached, self._number = (
            residents.columns[name][self._rows] for name in ("page", "attached", "number")
        )
        self._taken = residents.footprint.of(residents.columns["length"][self._rows])

    def coldest(self, nbytes: int) -> Found:
        """Return about `nbytes` bytes of the objects that are evicted next, and the pages that they need.

        See `StorageBackend.coldest` for the order. Owners that others do not evict are left out. To this is
        added what those lose next who are near their quotas.
        """
        level, whole = _paths(self._up, self._sound)
        rank = np.full(len(self._up), -np.inf)
        rank[self._nodes] = self._ranks
        _climb(np.maximum, rank, self._up)
        rank[~self._restore_points] = -np.inf
        _climb(np.maximum, rank, self._up)
        # An object is of use if its page is live and all pages before it are stored.
        useful = self._live & whole
        rank_of_states = rank.copy()
        rank_of_states[self._alone] = np.minimum(rank[self._alone], self._ranks_alone)
        of_use = np.flatnonzero(useful[self._page])
        page, attached, taken = (column[of_use] for column in (self._page, self._attached != 0, self._taken))
        ranks = np.where(attached, rank_of_states[page], rank[page])
        chosen = self._chosen(of_use, ranks, level[page], taken, nbytes)
        # `place` is the place of each chosen object in the order of eviction. A page must be copied before
        # the first object that depends on it, so the page gets the lowest place among these.
        place = np.full(len(of_use), len(of_use))
        place[chosen] = np.arange(len(chosen))
        needed = np.full(len(self._up), len(of_use))
        np.minimum.at(needed, page[chosen], place[chosen])
        _climb(np.minimum, needed, self._up)
        place = np.where(attached, place, needed[page])
        listed = np.flatnonzero(place < len(of_use))
        order = np.lexsort((attached[listed], level[page[listed]], place[listed]))
        found = of_use[listed[order]]
        return Found(self._rows[found], self._number[found])

    def _chosen(
        self, of_use: Ints, ranks: npt.NDArray[Any], level: Ints, taken: npt.NDArray[Any], nbytes: int
    ) -> Ints:
        """Return the objects to list, in their order; all arguments are of the objects that are of use."""
        if self._owner is None:
            return _lowest(ranks, level, taken, nbytes)
        owner = self._owner[of_use]
        parts = [(np.flatnonzero(~np.isin(owner, self._protected)), nbytes)]
        parts += [(np.flatnonzero(owner == one), lost) for one, lost in self._near_quota.items()]
        found = [some[_lowest(ranks[some], level[some], taken[some], wanted)] for some, wanted in parts]
        together, first = np.unique(np.concatenate(found), return_index=True)
        return together[np.argsort(first)]


def _lowest(ranks: npt.NDArray[Any], level: Ints, taken: npt.NDArray[Any], nbytes: int) -> Ints:
    """Return the objects of the lowest ranks, the lowest first, until they take `nbytes` bytes.

    Objects of equal rank are all returned, so that no unit is cut. The deepest in its sequence is first.
    """
    if not len(ranks) or nbytes <= 0:
        return np.zeros(0, np.int64)
    lowest = np.arange(len(ranks))
    if len(ranks) > _MAX_OBJECTS:
        lowest = np.argpartition(ranks, _MAX_OBJECTS)[:_MAX_OBJECTS]
    lowest = lowest[np.lexsort((-level[lowest], ranks[lowest]))]
    last = min(int(np.searchsorted(np.cumsum(taken[lowest]), nbytes)), len(lowest) - 1)
    end = int(np.searchsorted(ranks[lowest], ranks[lowest[last]], "right"))
    return lowest[:end]


def _paths(up: Links, sound: Mask) -> tuple[Ints, Mask]:
    """Return for each page the number of pages before it, and whether it and all of these are `sound`."""
    level, whole, at = (up >= 0).astype(np.int64), sound.copy(), up.copy()
    # In round k, `at` has the ancestor at distance 2**k, and everything up to that distance is counted.
    while len(on := np.flatnonzero(at >= 0)):
        far = at[on]
        level[on] += level[far]
        whole[on] &= whole[far]
        at[on] = at[far]
    return level, whole


def _climb(extreme: np.ufunc, values: npt.NDArray[Any], up: Links) -> None:
    """Set the value of each page to the `extreme` of its own and those of all pages after it."""
    at = up.copy()
    # In round k, `at` has the ancestor at distance 2**k, which gets all values from below up to there.
    while len(on := np.flatnonzero(at >= 0)):
        far = at[on]
        extreme.at(values, far, values[on])
        at[on] = at[far]
