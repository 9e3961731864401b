"""One run of a replay through the index alone: one pool of bytes, without a controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Final

import numpy as np

from tiercache.core import Locations, PoolName, TokenArray, full_pages
from tiercache.errors import ConfigError
from tiercache.index import CheckpointRules, HybridIndex, checkpoints_named
from tiercache.keys import KEY_BYTES
from tiercache.policy import Costs, Ending, Policy, policy_named
from tiercache_lab.replay.base import Source
from tiercache_lab.replay.cache import Setup, tokens_of
from tiercache_lab.replay.clairvoyant import Clairvoyant, Recorder
from tiercache_lab.replay.drive import Tally
from tiercache_lab.replay.needs import Need
from tiercache_lab.replay.plane import geometries
from tiercache_lab.replay.results import TierUse

_UNKNOWN: Final = float("nan")


class IndexCache:
    """The real index as a cache without bytes, with one budget of `capacity` bytes, under `policy`.

    One object of a pool takes `cost[pool]` bytes. Requests are served one after another. Each request
    inserts every page and state that a real cache would keep.

    Thread safety: one thread at a time.
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
        checkpoints: CheckpointRules,
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
        """Bytes that the objects in the cache take now."""
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


class IndexRun:
    """A replay of one source through the real index and policy, with one budget of bytes.

    It takes a third to a fifth of the time of `Run`. Requests are served one after the other; copies, tiers,
    times and cuts are not simulated, and evictions come after the insert for which they make room. Raises
    ConfigError for tiers other than one host, and for a source whose requests run at once.

    Thread safety: one thread.
    """

    def __init__(self, source: Source, need: Need, setup: Setup) -> None:
        if setup.tiers.storage or setup.tiers.device_bytes is not None:
            raise ConfigError("--index-only replays one pool of bytes; leave out the other tiers")
        if source.concurrency > 1:
            raise ConfigError(
                f"{source.name} runs {source.concurrency} requests at once, and --index-only one after the"
                " other; leave it out"
            )
        self._source = source
        self._setup = setup
        self._page_size = source.page_size
        policy = setup.policy
        self._policy = policy if isinstance(policy, Policy) else policy_named(policy, Costs(setup.profile))
        self._cache = self._empty(self._policy)
        self.peak_bytes = 0
        """Highest number of bytes in use, after evictions."""
        self.working_bytes = 0
        """0: requests that run hold nothing outside of the cache here."""
        self.tally = Tally(setup.profile, need.requests, lambda: self._cache.used)

    def go(self, step: Callable[[], object] = lambda: None) -> None:
        """Serve all requests; `step` is called after each."""
        for request in self._source:
            if isinstance(self._policy, Recorder | Clairvoyant):
                self._policy.requested()
            depth = self._cache.request(request.prompt, tokens_of(request), ending=request.ending)
            self.peak_bytes = max(self.peak_bytes, self._cache.used)
            self.tally.add(request, depth, _UNKNOWN)
            step()

    def uses(self) -> Mapping[str, TierUse]:
        """Return nothing: reads and writes are not counted."""
        return {}

    def _empty(self, policy: Policy) -> IndexCache:
        setup, geometry = self._setup, geometries(self._setup.profile, self._page_size)
        return IndexCache(
            policy, page_size=self._page_size,
            page_pools=[name for name in geometry if name == PoolName.KV],
            state_pools=[name for name in geometry if name != PoolName.KV],
            cost={name: one.nbytes for name, one in geometry.items()},
            capacity=setup.tiers.host_bytes,
            checkpoints=checkpoints_named(setup.checkpoints),
            seed=setup.seed,
        )  # fmt: skip
