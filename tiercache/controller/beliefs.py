"""Background checks that storage still has the objects that the index notes as stored.

Such a note is only a *belief*, because a store evicts objects without telling the index.
"""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import Final, NamedTuple

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.ranks.landings import answer_codes
from tiercache.controller.store_calls import StoreCall
from tiercache.core import ABSENT, Mask, PoolName, Reason, Tier
from tiercache.index import Node, Pin, Span

_PAUSE: Final = 0.05
"""Seconds between two checks. One of 512 objects takes about 0.2 ms of the owner's thread, the engine's."""


class _Part(NamedTuple):
    """Objects of one pool on one edge that the index notes as stored."""

    span: Span
    """Extent of the edge when storage was asked, or its last page for a state.

    The edge may be split before the answer.
    """
    pool: PoolName
    mask: Mask
    """Mask of the span's objects that are noted as stored."""
    keys: list[bytes]
    """Page key of each object."""


def _noted_objects(context: ControllerContext, node: Node) -> list[_Part]:
    index, parts = context.index, list[_Part]()
    if not node.holds(Tier.STORAGE):
        return parts
    span, keys = Span(node, node.start, node.end), index.page_keys(node, node.end, node.start)
    for row, pool in enumerate(index.page_pools):
        mask = node.where[Tier.STORAGE, row] >= 0
        if noted := [*compress(keys, mask.tolist())]:
            parts.append(_Part(span, pool, mask, noted))
    for number, pool in enumerate(index.state_pools):
        if node.state(Tier.STORAGE, number) != ABSENT:
            last = Span(node, node.end - 1, node.end)
            parts.append(_Part(last, pool, np.ones(1, np.bool_), keys[-1:]))
    return parts


class Beliefs:
    """Checker that asks storage about objects that the index notes as stored, a few objects at a time.

    The checker walks the radix tree in rounds, and each round checks every note once. If storage no longer
    has an object, its note is dropped. Then the next commit writes the object again, no lookup waits for the
    object, and no eviction on host or device relies on a copy in storage.

    One query is under way at most. Until the answer comes, pins keep the edges of its objects in the tree.
    """

    kind = "check"

    def __init__(self, context: ControllerContext) -> None:
        self.done = True
        """Whether no query is under way."""
        self.pins: list[Pin] = []
        self._context = context
        self._parts: list[_Part] = []
        """Objects that storage is asked about."""
        self._next = 0.0
        """Clock time in seconds before which no check begins."""
        self._stack: list[Node] = []
        """Roots of the subtrees that this round has yet to visit."""

    def check(self) -> None:
        """Ask storage about the next few objects, unless the last check was a moment ago. Never waits."""
        context, most = self._context, self._context.options.belief_checks
        if not most or context.storage is None or not self.done or context.queries.is_suspended:
            return
        # A check that takes longer than the pause would be followed by the next one at once, for ever.
        if context.is_draining or context.clock() < self._next:
            return
        self._next = context.clock() + _PAUSE
        self._parts = self._choose(most)
        if not self._parts:
            return
        self.done = False
        self.pins = [context.index.pin(node) for node in dict.fromkeys(p.span.node for p in self._parts)]
        wanted: dict[PoolName, list[bytes]] = {}
        for part in self._parts:
            wanted.setdefault(part.pool, []).extend(part.keys)
        pool, keys = next(iter(wanted.items()))
        context.in_flight.begin(self)
        context.queries.submit(
            StoreCall(
                partial(self._background_check, wanted),
                landed=self._land,
                lost=lambda reason, begun: self._end(),
                probe=partial(context.storage.probe, pool, keys[0], read=False),
                codes=answer_codes({pool: len(keys) for pool, keys in wanted.items()}),
            )
        )

    def _choose(self, most: int) -> list[_Part]:
        """Return what is noted at up to `most` nodes; less, once `most` objects are found."""
        self._stack = self._stack or self._context.index.roots()
        parts: list[_Part] = []
        found = 0
        for _ in range(most):
            if not self._stack or found >= most:
                break
            node = self._stack.pop()
            if node.is_removed:  # its children have a new parent now, at which the next round finds them
                continue
            self._stack += node.children.values()
            parts += (here := _noted_objects(self._context, node))
            found += sum(len(part.keys) for part in here)
        return parts

    def _background_check(
        self, wanted: dict[PoolName, list[bytes]]
    ) -> tuple[dict[PoolName, list[bool]], Reason] | None:
        return self._context.call_storage(lambda storage: storage.holds(wanted), None, "asking storage")

    def _land(self, answer: tuple[dict[PoolName, list[bool]], Reason] | None) -> bool:
        if answer is not None and answer[1] is Reason.NONE:
            there = {pool: iter(found) for pool, found in answer[0].items()}
            for part in self._parts:
                self._forget_missing(part, [next(there[part.pool]) for _ in part.keys])
        self._end()
        return answer is not None

    def _forget_missing(self, part: _Part, there: list[bool]) -> None:
        if all(there):
            return
        gone = part.mask.copy()
        gone[part.mask] = ~np.array(there)
        # A lookup may have been told so meanwhile, and has counted them.
        lost = self._context.index.forget_stored(part.span, part.pool, gone)
        self._context.metrics.increment("forgotten_objects_total", part.pool, by=lost)

    def _end(self) -> None:
        self.done = True
        for pin in self.pins:
            pin.release()
        self.pins, self._parts = [], []
        self._context.in_flight.end(self)
