"""Shadow cache: an index without bytes, which shows what another policy would have saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np

from tiercache.core import Locations, PoolName, TokenArray, full_pages
from tiercache.index.checkpoints import CheckpointRules, Checkpoints
from tiercache.index.hybrid_index import HybridIndex
from tiercache.keys import KEY_BYTES
from tiercache.policy import Ending, Policy


class Shadow:
    """Instance of the real index with one budget of `capacity` bytes, under `policy`.

    One object of a pool takes `cost[pool]` bytes. Requests are simulated one after another. Each request
    inserts every page and state that the real cache would keep. Thread safety: one thread at a time.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        page_size: int,
        page_pools: Sequence[PoolName],
        state_pools: Sequence[PoolName],
        cost: Mapping[PoolName, int],
        capacity: int,
        checkpoints: Checkpoints | CheckpointRules,
        seed: int = 0,
    ) -> None:
        self._index = HybridIndex(
            page_size=page_size, namespace=bytes(KEY_BYTES), page_pools=page_pools, state_pools=state_pools,
            policy=policy,
            checkpoints=checkpoints, object_bytes=cost, seed=seed, one_budget=True,
        )  # fmt: skip
        self._cost = cost
        self._capacity = capacity
        self._used = 0
        self._slots = count()

    @property
    def used(self) -> int:
        """Bytes that the objects in the shadow take now."""
        return self._used

    def request(
        self, prompt: TokenArray, sequence: TokenArray, extra: bytes = b"", ending: Ending = Ending.UNKNOWN
    ) -> int:
        """Serve a request; return how many tokens of its prompt were restored.

        `sequence` has the tokens of the prompt and of the answer.
        """
        index, size = self._index, self._index.page_size
        match = index.match(prompt, extra)
        plan, keeps_end = index.plan_checkpoints(match, prompt, match.depth)
        origin = index.touch(match, prompt)
        depth = full_pages(len(sequence), size)
        keeps_end &= depth * size >= len(prompt) and depth > max((match.depth, *plan))
        depths = [*plan, depth] if keeps_end else [*plan]
        pages: dict[PoolName, Locations] = {pool: self._fresh(depth) for pool in index.page_pools}
        states = (
            {at: {pool: next(self._slots) for pool in index.state_pools} for at in depths}
            if index.state_pools
            else {}
        )
        inserted = index.insert(
            sequence[: depth * size], pages, states, extra, checkpoints=plan, origin=origin
        )
        self._used += sum(
            int(np.count_nonzero(one.adopted)) * self._cost[pool] for pool, one in inserted.pages.items()
        )
        self._used += sum(self._cost[pool] for _, pool, _ in inserted.adopted_states)
        if ending:
            index.ended(inserted.node, ending)
        index.prune(inserted.node)
        if self._used > self._capacity:
            self._shrink()
        return match.depth * size

    def _shrink(self) -> None:
        freed = self._index.evict_device_bytes(
            self._used - self._capacity, self._cost
        ).freed  # nothing is pinned, so enough objects can be evicted
        self._used -= sum(len(locations) * self._cost[pool] for pool, locations in freed.items())

    def _fresh(self, n: int) -> Locations:
        first = next(self._slots)
        self._slots = count(first + n)
        return np.arange(first, first + n, dtype=np.int64)
