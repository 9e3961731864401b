"""Background checks, in turn, of whether storage still has the objects that the index believes to be stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from tiercache.controller.state import ControllerState
from tiercache.controller.store_calls import StoreCall
from tiercache.core import ABSENT, Mask, PoolName, PoolTransferResult, Reason, Tier, TokenArray
from tiercache.index import Node, Pin, Span

_log = logging.getLogger(__name__)

_PAUSE: Final = 0.05
"""Seconds between two checks. A check of 512 objects takes the owner's thread some 0.2 ms, less than half a percent of its time."""


class Beliefs:
    """Checker of beliefs: walks the radix tree for objects that storage was seen to have, and asks storage about a few at a time.

    No belief gets older than one round through the tree. The check is needed because a store evicts without notice. Objects that it no
    longer has are forgotten, so that the next commit writes them again, and nothing is fetched or evicted from the device because they are
    believed to be stored.

    Thread safety: the owner's thread.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._next = 0.0
        self._asking = False
        self._stack: list[Node] = []
        self._stored = 0
        self._is_small = True
        """Whether the last check covered all objects that are believed to be stored."""

    def check(self) -> None:
        """Ask storage about the next few objects, unless that was done a moment ago. Never waits.

        Where one check covers everything, there is no pause once more objects were stored: they may have pushed others out of the store.
        """
        state, most = self._state, self._state.options.belief_checks
        if not most or state.storage is None or self._asking or state.queries.is_away:
            return
        now, stored = state.clock(), state.stored
        if now < self._next and not (self._is_small and stored > self._stored):
            return
        self._next, self._stored, self._is_small = now + _PAUSE, stored, not self._stack
        parts: list[_Part] = []
        found = 0
        if not self._stack:
            self._stack = state.index.roots()
        for _ in range(most):
            if not self._stack or found >= most:
                break
            node = self._stack.pop()
            if node.is_removed:  # its children belong to another node now; the next round finds them
                continue
            self._stack += node.children.values()
            for part in _believed(state, node):
                parts.append(part)
                found += len(part.keys)
        self._is_small &= not self._stack
        if parts:
            self._asking = True
            _Check(state, parts, self._answered)

    def _answered(self) -> None:
        self._asking = False


class _Part(NamedTuple):
    """Objects of one pool on one edge that are believed to be stored: the pages under `mask`, or (None) the state at the edge's end."""

    span: Span
    """Extent of the edge when the question was put; the edge may be cut before the answer."""
    pool: PoolName
    mask: Mask | None
    keys: list[bytes]


def _believed(state: ControllerState, node: Node) -> list[_Part]:
    index = state.index
    span = Span(node, node.end - node.pages, node.end)
    parts: list[_Part] = []
    keys: list[bytes] = []
    for row, pool in enumerate(index.page_pools):
        mask = node.where[Tier.STORAGE, row] >= 0
        if mask.any():
            keys = keys or index.page_keys(node, span.end, span.start)
            parts.append(_Part(span, pool, mask, [keys[i] for i in np.flatnonzero(mask)]))
    for number, pool in enumerate(index.state_pools):
        if node.state(Tier.STORAGE, number) != ABSENT:
            keys = keys or index.page_keys(node, span.end, span.start)
            parts.append(_Part(span, pool, None, keys[-1:]))
    return parts


class _Check:
    """One question to storage, on a background thread. It pins its edges, so that they stay in the tree until it is answered."""

    kind = "check"

    def __init__(self, state: ControllerState, parts: Sequence[_Part], answered: Callable[[], None]) -> None:
        self.done = False
        self.pins: list[Pin] = [state.index.pin(node) for node in dict.fromkeys(part.span.node for part in parts)]
        self._state = state
        self._parts = parts
        self._answered = answered
        wanted: dict[PoolName, list[bytes]] = {}
        for part in parts:
            wanted.setdefault(part.pool, []).extend(part.keys)
        assert state.storage is not None
        pool, keys = next(iter(wanted.items()))
        probe = partial(state.storage.probe, pool, keys[0], read=False)
        state.begin(self)
        state.queries.submit(StoreCall(partial(self._run, wanted), landed=self._land, lost=self._lose, late=lambda _: None, probe=probe))

    def _run(self, wanted: dict[PoolName, list[bytes]]) -> tuple[dict[PoolName, list[bool]], Reason] | None:
        assert self._state.storage is not None
        try:
            return self._state.storage.holds(wanted)
        except Exception:  # noqa: BLE001  a store that breaks its contract costs this question, never the thread; counted by its breaker
            _log.exception("asking storage failed")
            return None

    def _land(self, answer: tuple[dict[PoolName, list[bool]], Reason] | None) -> bool:
        if answer is not None and answer[1] is Reason.NONE:
            there = {pool: iter(found) for pool, found in answer[0].items()}
            for part in self._parts:
                self._heal(part, [next(there[part.pool]) for _ in part.keys])
        self._end()
        return answer is not None

    def _heal(self, part: _Part, there: list[bool]) -> None:
        if all(there):
            return
        index = self._state.index
        self._state.metrics.increment("forgotten_objects_total", part.pool, by=there.count(False))
        if part.mask is None:
            index.forget_state_stored(part.span.node, part.pool)
        else:
            gone = part.mask.copy()
            gone[part.mask] = ~np.array(there)
            index.forget_stored(part.span, part.pool, gone)

    def _lose(self, reason: Reason, begun: bool) -> None:
        self._end()

    def _end(self) -> None:
        self.done = True
        for pin in self.pins:
            pin.release()
        self.pins.clear()
        self._state.end(self)
        self._answered()


def heal(state: ControllerState, tokens: TokenArray, extra: bytes, result: PoolTransferResult) -> None:
    """Forget the stored objects on this prompt's path that storage has just reported missing.

    An object that a write stored after the question was put is forgotten as well. The next commit then offers it again, at the cost of a
    lookup.
    """
    index = state.index
    match = index.match(tokens, extra)
    path = list(index.node_at(match, match.path_depth).path())
    with ExitStack() as pins:
        for node in path:  # a node that holds nothing any more would be removed, and others with it
            pins.enter_context(index.pinned(node))
        for node in path:
            _forget(state, node, match.path_depth, result)


def _forget(state: ControllerState, node: Node, depth: int, result: PoolTransferResult) -> None:
    """Forget the pages of one edge, within the first `depth` pages of the path, and the state at its end that storage does not have."""
    index, start = state.index, node.end - node.pages
    for pool, present in result.present.items():
        here = present[start : min(node.end, depth)]
        if pool in index.state_pools:
            believed = node.state(Tier.STORAGE, index.state_pools.index(pool)) != ABSENT
            lost = int(believed and node.pages > 0 and len(here) == node.pages and not here[-1])
            if lost:
                index.forget_state_stored(node, pool)
        else:
            gone = node.where[Tier.STORAGE, index.page_pools.index(pool)] >= 0
            gone[: len(here)] &= ~here
            gone[len(here) :] = False
            lost = int(np.count_nonzero(gone))
            if lost:
                index.forget_stored(Span(node, start, node.end), pool, gone)
        if lost:
            state.metrics.increment("forgotten_objects_total", pool, by=lost)
