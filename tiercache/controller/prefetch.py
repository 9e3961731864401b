"""Prefetch: bringing up from storage, round by round, the objects that a prompt could restore beyond those on device and host."""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from tiercache.controller.lookup import Lookup
from tiercache.controller.operations import Fetch, Piece, gather_pieces
from tiercache.controller.state import ControllerState, InFlight
from tiercache.core import ABSENT, Mask, PoolName, Reason, Tier, pending
from tiercache.errors import PoolFullError
from tiercache.index import Match, Node, Pin
from tiercache.storage.hybrid import is_outage

_MAX_ROUNDS: Final = 8
"""Most rounds per admission. A further round follows when objects turned out missing or corrupt, or the host has no room for a depth."""


class Step(enum.Enum):
    """Result of an attempt to begin a fetch."""

    BEGUN = "begun"
    LATER = "later"
    """Other fetches hold all the blocks that fetches may hold; some will land."""
    NO_ROOM = "no_room"
    """The host cannot hold the objects that the depth needs."""


class Prefetch:
    """Storage side of one admission: the objects that it wants, those on their way, and those that turned out to be missing.

    The objects that a depth lacks come in waves, each of at most the blocks that fetches may hold. A pin holds what has landed until the
    next wave. `fetched` marks, per pool, the pages that were brought up for this prompt (a state counts as the page on which it ends).
    `rounds` counts the depths that were tried.

    Thread safety: the owner's thread.
    """

    def __init__(self, state: ControllerState, lookup: Lookup, limit: int) -> None:
        self.fetched: dict[PoolName, Mask] = {p: np.zeros(limit, np.bool_) for p in state.pools}
        self.rounds = 0
        self.pin: Pin | None = None
        """Pin of the path that is being fetched; None while there is none."""
        self._state = state
        self._lookup = lookup
        self._limit = limit
        self._keys: list[bytes] = []
        self._missing: set[tuple[PoolName, int]] = set()
        self._unfit: set[int] = set()
        self._fetching: set[Fetch] = set()
        self._cut_off = False
        self._depth = 0

    @property
    def waiting(self) -> bool:
        """Whether an answer or an object is still on its way."""
        query = self._lookup.query
        return (query is not None and not query.done) or not all(fetch.done for fetch in self._fetching)

    def harvest(self) -> set[Reason]:
        """Note which objects of this prompt's path could not be fetched; return the reasons.

        Failures of a shared fetch that concern pages of another path are left out.
        """
        failed: dict[tuple[PoolName, bytes], Reason] = {}
        for fetch in self._fetching:
            failed |= fetch.failed
        self._fetching = set()
        mine = {(p, d): failed[p, k] for d, k in enumerate(self._keys, 1) for p in self._state.pools if (p, k) in failed} if failed else {}
        self._missing.update(mine)
        reasons = set(mine.values())
        self._cut_off |= any(map(is_outage, reasons))
        return reasons

    def begin(self, target: int) -> Step:
        """Begin to fetch the objects that depth `target` (in pages) lacks on device and host, or the next wave of them."""
        state, lookup = self._state, self._lookup
        if target != self._depth:
            self.rounds += 1
        node = state.index.extend_path(lookup.tokens, target, lookup.extra)
        held, self.pin = self.pin, state.index.pin(node, Tier.DEVICE, Tier.HOST)
        if held is not None:
            held.release()
        self._keys = state.index.page_keys(node, target)
        self._depth = target
        try:
            return self._begin_wave(node, target)
        except PoolFullError:
            self._unfit.add(target)
            self._depth = 0
            self._let_go()  # nodes that were made for this fetch are removed with the pin
            return Step.NO_ROOM

    def close(self) -> None:
        """Stop waiting: leave the fetches, which cancel what has not begun if no other admission waits, and release the path."""
        for fetch in self._fetching:
            fetch.leave(self)
        self._let_go()

    def target(self, match: Match) -> int:
        """Return the deepest depth, in pages, that storage could still restore beyond what is near; 0 if there is none.

        During an outage the answer is 0: a fetch would evict other objects from the host for nothing.
        """
        return 0 if self._cut_off or self._state.reads.is_away else self.hoped(match)

    def hoped(self, match: Match) -> int:
        """Return the deepest depth, in pages, that readable storage could still restore and that is worth a fetch; 0 if there is none."""
        depth = self._deepest(match)
        # Measured from the depth at lookup: what the first waves brought up must not make the rest too small to be worth a fetch.
        near = min(match.near_depth, self._lookup.match.near_depth)
        return depth if (depth - near) * self._state.page_size >= self._state.options.min_fetch_tokens else 0

    def is_too_little(self, match: Match) -> bool:
        """Whether storage could restore more than what is near, but too little to be worth a fetch."""
        return self._deepest(match) > 0 and not self.hoped(match)

    def _deepest(self, match: Match) -> int:
        query = self._lookup.query
        if self._state.storage is None or self.rounds == _MAX_ROUNDS or (query is not None and is_outage(query.reason)):
            return 0
        known = {*match.restorable, match.depth}
        if query is not None and query.result is not None:
            known.update(query.result.restorable_prefix_pages)
        known -= self._unfit
        return max((d for d in known if match.near_depth < d <= self._limit and self._possible(d)), default=0)

    def was_promised(self, depth: int) -> bool:
        """Whether more than `depth` pages were believed to be restorable, and storage answered that they are not."""
        query, believed = self._lookup.query, min(self._lookup.match.depth, self._limit)
        if query is None or query.result is None or is_outage(query.reason):
            return False
        return believed > depth and believed not in query.result.restorable_prefix_pages

    def _possible(self, depth: int) -> bool:
        """Whether no object that `depth` needs has turned out to be missing so far."""
        pages = self._state.index.page_pools
        return not any(d <= depth if pool in pages else d == depth for pool, d in self._missing)

    def _let_go(self) -> None:
        if self.pin is not None:
            self.pin.release()
            self.pin = None

    def _begin_wave(self, node: Node, depth: int) -> Step:
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
            absent[pool] = np.zeros(depth, np.bool_)
            absent[pool][-1] = one.device < 0 and one.host == ABSENT
            self.fetched[pool][depth - 1] |= one.device < 0 and one.host < 0
        fetch = self._fetch(node, absent)
        self._fetching = {o for o in waiting if isinstance(o, Fetch)} | ({fetch} if fetch else set())
        for each in self._fetching:
            each.join(self)
        if not self._fetching and any(mask.any() for mask in absent.values()) and not state.in_flight("fetch"):
            raise PoolFullError("reads that hang hold every block that fetches may have")
        return Step.BEGUN if self._fetching else Step.LATER

    def _fetch(self, node: Node, absent: dict[PoolName, Mask]) -> Fetch | None:
        """Fetch as many of the first absent objects as fetches may hold, the state last; return None if there is nothing to fetch now.

        Raises PoolFullError if the host could not hold all that is absent.
        """
        state = self._state
        cost = {pool: state.blocks_of(pool, 1) for pool in absent}
        state.require_host(sum(int(mask.sum()) * cost[pool] for pool, mask in absent.items()))
        blocks = sum(mask * cost[pool] for pool, mask in absent.items())
        pages = int(np.searchsorted(np.cumsum(blocks), state.fetching.left, "right"))
        wave = {pool: mask[:pages] for pool, mask in absent.items()}
        if not any(mask.any() for mask in wave.values()):
            return None
        handles = state.take_host({p: int(mask.sum()) for p, mask in wave.items()})
        pieces: list[Piece] = []
        for pool, mask in wave.items():
            pieces += gather_pieces(pool, node, 0, np.zeros(len(mask), np.int64), mask, handles[pool])
        return Fetch(state, pieces, self._keys, [state.index.pin(node, Tier.DEVICE, Tier.HOST)])
