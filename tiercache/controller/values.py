"""Values of stored objects, by which every store below ranks what it keeps (see `ObjectMeta.value`)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final, TypeAlias

from tiercache.controller.context import ControllerContext
from tiercache.controller.store_calls import StoreCall
from tiercache.core import ABSENT, PoolName, Reason, Tier
from tiercache.index import Appraisal, Node
from tiercache.storage.hybrid import HybridStorage

_TICKS: Final = 16
"""Ticks of the index's clock from one report of changed values to the next; a request takes about four."""
_DECAY: Final = 0.9
"""Share of the earlier rate that each measurement of ticks per second keeps."""
_FIRST_RATE: Final = 1.0
"""Ticks per second before the first measurement."""
Advice: TypeAlias = dict[PoolName, dict[bytes, float]]
"""Values of objects, by pool and page key."""


class Values:
    """Values of the objects that the controller stores, in FLOPs per byte and second."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._rate = _FIRST_RATE
        self._last = (context.index.now, context.clock())
        self._telling = False

    def of(self, nodes: Iterable[Node]) -> Advice:
        """Return the present values of the pages and states of these nodes, for a write."""
        found: Advice = {}
        for one in self._context.index.appraiser.of(list(nodes), self._rate):
            keys = self._context.index.page_keys(one.node, one.node.end, one.node.start)
            for pool in self._context.index.page_pools:
                _add(found, pool, keys, one.page)
            for pool in self._context.index.state_pools:
                _add(found, pool, keys[-1:], one.state)
        return found

    def tell(self) -> None:
        """Tell the store in the background which values have changed, unless the last report was just now."""
        context = self._context
        ticks = context.index.now - self._last[0]
        if ticks < _TICKS or self._telling or context.storage is None or context.queries.is_suspended:
            return
        now = context.clock()
        if now > self._last[1]:
            self._rate = _DECAY * self._rate + (1 - _DECAY) * ticks / (now - self._last[1])
        self._last = (context.index.now, now)
        advice = self._changed(context.index.appraiser.changed(self._rate))
        if advice:
            self._telling = True
            call = StoreCall(partial(self._background_advise, advice), landed=self._land, lost=self._lose)
            context.queries.submit(call)

    def _changed(self, appraisals: Iterable[Appraisal]) -> Advice:
        """Return the values of the last stored page of each node, and of its stored states.

        If the last page of a node is evicted, the page before it takes over its value in the store.
        """
        found: Advice = {}
        index = self._context.index
        for one in appraisals:
            node, end = one.node, one.node.end
            [key] = index.page_keys(node, end, end - 1)
            for row, pool in enumerate(index.page_pools):
                if node.where[Tier.STORAGE, row, -1] >= 0:
                    _add(found, pool, [key], one.page)
            for number, pool in enumerate(index.state_pools):
                if node.state(Tier.STORAGE, number) != ABSENT:
                    _add(found, pool, [key], one.state)
        return found

    def _background_advise(self, advice: Advice) -> bool:
        def advise(storage: HybridStorage) -> bool:
            storage.advise(advice)
            return True

        return self._context.call_storage(advise, False, "telling storage the values of objects")

    def _land(self, well: bool) -> bool:
        self._telling = False
        return well

    def _lose(self, reason: Reason, begun: bool) -> None:
        self._telling = False


def _add(found: Advice, pool: PoolName, keys: list[bytes], value: float) -> None:
    found.setdefault(pool, {}).update(dict.fromkeys(keys, value))
