"""KV events of a controller, about objects on device and host.

The engine's thread posts the nodes of the index that have changed, with all that they hold. The publisher's
thread compares that with what it has told, page by page. So a change costs the engine's thread a few
microseconds per node, and nothing that is posted twice is told twice.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tiercache.core import Mask, PoolName, Tier, TokenArray
from tiercache.events import EventKind, KVEvent, Medium, ObjectGroup, Place
from tiercache.events.base import MAX_KEYS, EventSource
from tiercache.index import HybridIndex
from tiercache.index.node import Node

_TIERS: Final = (Tier.DEVICE, Tier.HOST)
_PAUSE_S: Final = 0.005
"""Minimum seconds from one post to the next, in which several changes of a node become one."""
_PER_POST: Final = 64
"""Maximum number of nodes that one call of `post` posts; the others follow with the next calls."""
MAX_POSTED: Final = 1 << 16
"""Number of posted nodes that wait for the publisher. Behind it all is cleared, and told with the next
change of each node."""


class _Posted(NamedTuple):
    """A node, as the engine's thread saw it."""

    keys: Sequence[bytes]
    parent: bytes | None
    start: int
    """Depth before the first page."""
    pages: Mask
    """Whether device and host hold a page, shape [2, page pools, pages]."""
    states: Sequence[Sequence[int]] | None
    """Locations of the state at the end, by tier and state pool; None if there is none."""
    tokens: Sequence[TokenArray] | None
    """Tokens of each page; None if they are not told."""


class _Known(NamedTuple):
    """Facts that were told of an object."""

    parent: bytes | None
    depth: int
    tokens: TokenArray | None


class ResidencyEvents(EventSource):
    """Events of what `index` has on the device and on the host.

    `groups` has the pools of the index, page pools first. With `tokens`, pages are told with their tokens,
    unless their keys depend on more.

    Thread safety: `post` is for the engine's thread, the other methods are for the publisher's.
    """

    def __init__(
        self, index: HybridIndex, groups: Mapping[PoolName, ObjectGroup], *, tokens: bool = False
    ) -> None:
        self._index: Final = index
        self._tells_tokens: Final = tokens
        self._groups: Final = [groups[pool] for pool in (*index.page_pools, *index.state_pools)]
        self._page_pools: Final = len(index.page_pools)
        self._changed: Final = index.follow_changes()
        self._posted: deque[_Posted] = deque()
        self._lost = False
        self._next_post = float("-inf")
        self._wake: Callable[[], None] = lambda: None
        self._known: list[list[dict[bytes, _Known]]] = [[{} for _ in self._groups] for _ in _TIERS]
        """Objects that were told, by tier, pool and key."""

    def follow(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def post(self, now: float, *, everything: bool = False) -> None:
        """Hand the nodes that have changed to the publisher: some of them if the last post is long ago, or
        `everything` at once. `now` is a time in seconds.
        """
        if not self._changed or (now < self._next_post and not everything):
            return
        self._next_post = now + _PAUSE_S
        for _ in range(len(self._changed) if everything else min(_PER_POST, len(self._changed))):
            node = next(iter(self._changed))
            del self._changed[node]
            posted = self._look_at(node)
            if posted is not None and len(self._posted) < MAX_POSTED:
                self._posted.append(posted)
            elif posted is not None:
                self._lost = True
        self._wake()

    def _look_at(self, node: Node) -> _Posted | None:
        pages: Mask = node.where[:2] >= 0
        states = node.states
        keys = node.keys
        if keys is None:
            # Nothing was told of a node without keys.
            if node.is_removed or not (pages.any() or (states and max(map(max, states[:2])) >= 0)):
                return None
            keys = self._index.page_keys(node, node.end, node.start)
        above = node.parent
        parent = above.keys[-1] if above is not None and above.keys else None
        tokens = None
        if self._tells_tokens and not node.extra:
            tokens = list(np.frombuffer(node.edge, "<u8").reshape(node.pages, -1))
        copies = states and [list(tier) for tier in states[:2]]
        return _Posted(keys, parent, node.start, pages, copies, tokens)

    def collect(self) -> Sequence[KVEvent]:
        if self._lost:
            self._posted.clear()
            self._lost = False
            self._known = [[{} for _ in self._groups] for _ in _TIERS]
            return [KVEvent(EventKind.CLEARED, Place(Medium.of(tier))) for tier in _TIERS]
        events: list[KVEvent] = []
        count = 0
        while self._posted and count < MAX_KEYS:
            posted = self._posted.popleft()
            count += len(posted.keys)
            for tier in _TIERS:
                for pool, known in enumerate(self._known[tier]):
                    events += self._compare(posted, tier, pool, known)
        return events

    def _compare(self, posted: _Posted, tier: Tier, pool: int, known: dict[bytes, _Known]) -> list[KVEvent]:
        """Return what has changed in one tier and pool, and note it in `known`."""
        keys = posted.keys
        if pool < self._page_pools:
            held = posted.pages[tier, pool].tolist()
        else:
            # Only the last page of an edge can have a state. One that was told of a page before it has gone.
            state = posted.states is not None and posted.states[tier][pool - self._page_pools] >= 0
            held = [False] * (len(keys) - 1) + [state]
        place, group = Place(Medium.of(tier)), self._groups[pool]
        gone = [key for key, here in zip(keys, held, strict=True) if not here and key in known]
        for key in gone:
            del known[key]
        removed = [KVEvent(EventKind.REMOVED, place, group, gone)] if gone else []
        parents: list[bytes | None] = [posted.parent, *keys[:-1]]
        tokens: Sequence[TokenArray | None] = posted.tokens or [None] * len(keys)
        if pool >= self._page_pools:  # a state has no parent
            parents, tokens = [None] * len(keys), [None] * len(keys)
        came = [
            (key, _Known(parents[i], posted.start + i + 1, tokens[i]))
            for i, (key, here) in enumerate(zip(keys, held, strict=True))
            if here and key not in known
        ]
        known.update(came)
        return removed + _stored(place, group, came)

    def snapshot(self) -> Iterator[Sequence[KVEvent]]:
        for tier in _TIERS:
            for group, known in zip(self._groups, self._known[tier], strict=True):
                # A copy, because `collect` changes it while the snapshot is sent.
                held = list(known.items())
                for start in range(0, len(held), MAX_KEYS):
                    yield _stored(Place(Medium.of(tier)), group, held[start : start + MAX_KEYS])


def _stored(place: Place, group: ObjectGroup, objects: Sequence[tuple[bytes, _Known]]) -> list[KVEvent]:
    """Return one event for each run of objects, of which each is the parent of the next."""
    runs: list[tuple[_Known, list[bytes], list[int]]] = []
    for key, known in objects:
        if not (runs and known.parent == runs[-1][1][-1]):
            runs.append((known, [], []))
        runs[-1][1].append(key)
        runs[-1][2].extend(() if known.tokens is None else known.tokens.tolist())
    return [
        KVEvent(EventKind.STORED, place, group, keys, first.parent, first.depth, tokens)
        for first, keys, tokens in runs
    ]
