"""How long the index takes on the engine's thread.

One JSON line per row; a figure is the thread's CPU time in several runs, the least and the median.

    python -m tests.benchmarks.index

Pages have 64 tokens. "deep" is a conversation of 60 turns, a node each; the tree around it has 100,000 pages.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from tiercache.core import Locations, PoolName, Tier, TokenArray
from tiercache.index import HybridIndex

PAGE = 64
PROMPT = 32_768
TURNS = 60
KV, MAMBA = PoolName.KV, PoolName.MAMBA


class Bench:
    """An index, and fresh slots and tokens for it."""

    def __init__(self, *states: PoolName) -> None:
        self.index = HybridIndex(page_size=PAGE, namespace=bytes(32), page_pools=[KV], state_pools=states)
        self._random = np.random.default_rng(11)
        self._slots = 0

    def tokens(self, count: int) -> TokenArray:
        return self._random.integers(0, 150_000, count, dtype=np.uint64)

    def slots(self, count: int) -> Locations:
        self._slots += count
        return np.arange(self._slots - count, self._slots)

    def insert(self, tokens: TokenArray) -> None:
        depth = len(tokens) // PAGE
        states = {depth: {pool: int(self.slots(1)[0]) for pool in self.index.state_pools}}
        self.index.insert(tokens, {KV: self.slots(depth)}, states)

    def fill(self, groups: int, branches: int, pages: int) -> None:
        """`groups` shared prefixes of `pages` pages, each with as many `branches` of the same length."""
        for _ in range(groups):
            shared = self.tokens(pages * PAGE)
            for _ in range(branches):
                self.insert(np.concatenate([shared, self.tokens(pages * PAGE)]))

    def converse(self) -> TokenArray:
        """A conversation of TURNS turns that fills a prompt."""
        history = self.tokens(PROMPT)
        for turn in range(1, TURNS + 1):
            self.insert(history[: PROMPT * turn // TURNS // PAGE * PAGE])
        return history


def report(name: str, target: float, run: Callable[[], int], repeats: int = 9) -> None:
    """`run` returns how many units it did; its own preparation is not timed when it is done before."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        units = run()
        times.append((time.thread_time() - start) * 1e6 / units)
    figures = [round(min(times), 2), round(statistics.median(times), 2)]
    print(json.dumps({"name": name, "us": figures, "target_us": target}), flush=True)


def prompts() -> None:
    for kind, states in (("kv", ()), ("hybrid", (MAMBA,))):
        bench = Bench(*states)
        bench.fill(groups=100, branches=100, pages=10)
        flat, deep = bench.tokens(PROMPT), bench.converse()
        bench.insert(flat)
        report(f"{kind}: match 32k tokens, one node", 100, lambda i=bench.index, t=flat: bool(i.match(t)))
        report(f"{kind}: match 32k tokens, 60 nodes", 100, lambda i=bench.index, t=deep: bool(i.match(t)))
        fresh = iter([(bench.tokens(PROMPT), bench.slots(PROMPT // PAGE)) for _ in range(9)])

        def insert(tokens: TokenArray, slots: Locations, index: HybridIndex = bench.index) -> int:
            states = (
                {len(slots): dict.fromkeys(index.state_pools, int(slots[0]))} if index.state_pools else {}
            )
            index.insert(tokens, {KV: slots}, states)
            return 1

        report(f"{kind}: insert 32k tokens, fresh", 300, lambda f=fresh, run=insert: run(*next(f)))
        match = bench.index.match(deep)
        report(
            f"{kind}: pin and release 60 nodes",
            300,
            lambda i=bench.index, m=match: i.pin(m, Tier.DEVICE).release() or 1,
        )


def eviction() -> None:
    unit = 1000
    for kind, states in (("kv", ()), ("hybrid", (MAMBA,))):
        bench = Bench(*states)
        bench.fill(groups=1000, branches=100, pages=2)
        index = bench.index

        def pages(index: HybridIndex = index) -> int:
            index.evict_device({KV: 2 * unit})
            return unit

        report(f"{kind}: evict leaves, a unit, of 100k nodes", 20, pages)
        if states:

            def state(index: HybridIndex = index) -> int:
                index.evict_device({MAMBA: unit})
                return unit

            report(f"{kind}: evict states, a unit, of 100k nodes", 20, state)


def main() -> None:
    prompts()
    eviction()


if __name__ == "__main__":
    main()
