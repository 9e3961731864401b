"""Bringing up from storage, round by round, what a prompt could still restore beyond what is near."""

from __future__ import annotations

from typing import Final

import numpy as np

from tiercache.controller.lookup import Lookup
from tiercache.controller.operations import Fetch, Piece, gather_pieces
from tiercache.controller.state import ControllerState, InFlight
from tiercache.core import ABSENT, Mask, PoolName, Reason, Tier, pending
from tiercache.errors import PoolFullError
from tiercache.index import Match, Node
from tiercache.storage.hybrid import is_outage

_MAX_ROUNDS: Final = 8
"""Each further round follows an object that turned out missing or corrupt, or a depth that the host has no room for."""


class Prefetch:
    """The storage side of one admission: what is wanted, what is on its way, what turned out not to be there.

    `fetched` marks, per pool, the pages that were brought up for this prompt (a state is on the page on which it ends); `rounds` counts the
    attempts. Thread rule: the owner's thread.
    """

    def __init__(self, state: ControllerState, lookup: Lookup, limit: int) -> None:
        self.fetched: dict[PoolName, Mask] = {p: np.zeros(limit, np.bool_) for p in state.pools}
        self.rounds = 0
        self._state = state
        self._lookup = lookup
        self._limit = limit
        self._keys: list[bytes] = []
        self._missing: set[tuple[PoolName, int]] = set()
        self._unfit: set[int] = set()
        self._fetching: set[Fetch] = set()
        self._cut_off = False

    @property
    def waiting(self) -> bool:
        """Is an answer or an object still on its way?"""
        query = self._lookup.query
        return (query is not None and not query.done) or not all(fetch.done for fetch in self._fetching)

    def harvest(self) -> set[Reason]:
        """Learn what could not be fetched of this prompt's path, and why. A shared fetch may have failed for pages of another path."""
        failed: dict[tuple[PoolName, bytes], Reason] = {}
        for fetch in self._fetching:
            failed |= fetch.failed
        self._fetching = set()
        mine = {(p, d): failed[p, k] for d, k in enumerate(self._keys, 1) for p in self._state.pools if (p, k) in failed} if failed else {}
        self._missing.update(mine)
        reasons = set(mine.values())
        self._cut_off |= any(map(is_outage, reasons))
        return reasons

    def begin(self, target: int) -> bool:
        """Begin to fetch what depth `target` lacks on the host; False if the host has no room for it."""
        state, lookup = self._state, self._lookup
        self.rounds += 1
        node = state.index.extend_path(lookup.tokens, target, lookup.extra)
        with state.index.pinned(node, Tier.DEVICE, Tier.HOST):  # what was made for a fetch that does not come to pass goes with the pin
            self._keys = state.index.page_keys(node, target)
            try:
                self._fetching = self._begin_fetch(node, target)
            except PoolFullError:
                self._unfit.add(target)
                return False
        return True

    def target(self, match: Match) -> int:
        """The deepest depth, in pages, that storage could still give beyond what is near; 0 if there is none.

        There is none during an outage: a fetch would evict others from the host for nothing.
        """
        query = self._lookup.query
        cut_off = self._cut_off or (query is not None and is_outage(query.reason))
        if self._state.storage is None or cut_off or self.rounds == _MAX_ROUNDS:
            return 0
        known = {*match.restorable, match.depth}
        if query is not None and query.result is not None:
            known.update(query.result.restorable_prefix_pages)
        known -= self._unfit
        return max((d for d in known if match.near_depth < d <= self._limit and self._possible(d)), default=0)

    def _possible(self, depth: int) -> bool:
        """Was everything that `depth` needs there when we last tried to fetch it?"""
        pages = self._state.index.page_pools
        return not any(d <= depth if pool in pages else d == depth for pool, d in self._missing)

    def _begin_fetch(self, node: Node, depth: int) -> set[Fetch]:
        state = self._state
        located, states = state.index.locations(node, depth)
        absent = {p: (at.device < 0) & (at.host == ABSENT) for p, at in located.items()}
        waiting: set[InFlight] = set()
        for pool, at in located.items():
            coming = (at.device < 0) & (at.host < ABSENT)
            waiting |= state.claimants(Tier.HOST, pool, pending(at.host[coming]))
            self.fetched[pool][:depth] |= absent[pool] | coming
        for pool, one in states.items():
            if one.device < 0 and one.host < ABSENT:
                waiting |= state.claimants(Tier.HOST, pool, pending(np.array([one.host])))
            absent[pool] = np.array([one.device < 0 and one.host == ABSENT])
            self.fetched[pool][depth - 1] |= one.device < 0 and one.host < 0
        handles = state.take_host({p: int(mask.sum()) for p, mask in absent.items()})
        pieces: list[Piece] = []
        for pool, mask in absent.items():
            start = depth - 1 if pool in states else 0
            pieces += gather_pieces(pool, node, start, np.zeros(len(mask), np.int64), mask, handles[pool])
        if pieces:
            waiting.add(Fetch(state, pieces, self._keys, [state.index.pin(node, Tier.DEVICE, Tier.HOST)]))
        return {o for o in waiting if isinstance(o, Fetch)}
