"""The index and SGLang's tree of prefixes (its default one, in Rust) under the same work, a JSON line a row.

    python -m tests.benchmarks.tree

Needs the files of SGLang 0.5.23 on the path (`make bench-engines` installs them), of which only the tree's
extension is loaded. It is called as SGLang's adapter calls it, but without the adapter's own Python, and with
keys that are ready. Ours takes numpy arrays and is called as the controller calls it.

Both trees have pages of 64 tokens, a state at the end of every node, LRU, and 10,000 nodes besides those of
the row. Calls alternate. A figure is the thread's CPU time: the least and the median; a ratio is that of the
medians.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.benchmarks.index import KV, MAMBA, PAGE, PROMPT, TURNS, Bench
from tiercache.core import Tier, TokenArray

REPEATS = 21
UNITS = 500
FULL, STATE = 0, 2
"""SGLang's numbers of the two kinds of objects."""


def extension() -> ModuleType:
    """The tree's extension module alone; nothing else of SGLang is imported."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("SGLang is not on the path; run this in the environment of `make bench-engines`")
    [path] = (Path(spec.submodule_search_locations[0]) / "srt/mem_cache/rust_tree_core").glob("mem_cache*.so")
    found = importlib.util.spec_from_file_location("mem_cache", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Peer:
    """SGLang's tree, and fresh slots for it."""

    def __init__(self) -> None:
        self._made = made = extension()
        settings = made.TreeCoreInitParamsBinding(
            eviction_policy="lru", page_size=PAGE, device="cpu", mamba_cache_chunk_size=PAGE
        )
        self._tree = made.RustUnifiedTreeCoreBinding(settings, [FULL, STATE])
        self._slots = 0

    def key(self, tokens: TokenArray) -> array[int]:
        return array("q", tokens.astype(np.int64).tobytes())

    def slots(self, count: int) -> torch.Tensor:
        self._slots += count
        return torch.arange(self._slots - count, self._slots)

    def insert(self, key: array[int], slots: torch.Tensor) -> None:
        step = self._tree.begin_insert(
            self._made.InsertParamsBinding(key=key, value=slots, mamba_value=slots[-1:])
        )
        while step.result is None:
            step = self._tree.resume_insert()
        self._tree.end_insert()

    def match(self, key: array[int]) -> Any:
        return self._tree.match_prefix(self._made.MatchParamsBinding(key=key))

    def lock_and_unlock(self, node: int) -> None:
        held = self._tree.inc_lock_ref(node, [])
        receipt = self._made.DecLockRefParamsBinding(
            node_id=held.node_id,
            skipped_lock_components=held.skipped_lock_components,
            component_lock_uuids=held.component_lock_uuids,
            component_host_lock_uuids=held.component_host_lock_uuids,
        )
        self._tree.dec_lock_ref(held.node_id, receipt, False)

    def evict(self, kind: int, count: int) -> None:
        freed = {FULL: 0, STATE: 0}
        self._tree.evict_device_start(kind, count)
        while freed[kind] < count:
            step = self._tree.evict_device_next_node(kind, freed)
            leaf = [] if step.node_id is None else [self._tree.evict_device_leaf(step.node_id)]
            for part in (step, *leaf):
                for number, objects in part.tracker.items():
                    freed[int(number)] += objects
        self._tree.evict_device_end(kind)


def report(name: str, ours: Callable[[], object], theirs: Callable[[], object], *, units: int = 1) -> None:
    """One row."""
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS if units == 1 else 5):
        for side, run in zip(took, (ours, theirs), strict=True):
            start = time.thread_time()
            run()
            side.append((time.thread_time() - start) * 1e6 / units)
    middle = [statistics.median(side) for side in took]
    row = {"name": name, "us": [round(min(took[0]), 1), round(middle[0], 1)]}
    row |= {
        "peer_us": [round(min(took[1]), 1), round(middle[1], 1)],
        "ratio": round(middle[0] / middle[1], 2),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    """All rows."""
    torch.set_num_threads(1)
    bench, peer = Bench(MAMBA), Peer()
    index = bench.index

    def insert(tokens: TokenArray) -> None:
        bench.insert(tokens)
        peer.insert(peer.key(tokens), peer.slots(len(tokens)))

    def converse(tokens: int) -> TokenArray:
        history = bench.tokens(tokens)
        for turn in range(1, TURNS + 1):
            insert(history[: tokens * turn // TURNS // PAGE * PAGE])
        return history

    for _ in range(100):
        shared = bench.tokens(10 * PAGE)
        for _ in range(100):
            insert(np.concatenate([shared, bench.tokens(10 * PAGE)]))
    short, deep = converse(8192), converse(PROMPT)
    for name, prompt in (("8k", short), ("32k", deep)):
        key = peer.key(prompt)
        report(
            f"match {name} tokens, {TURNS} nodes",
            lambda p=prompt: index.match(p),
            lambda k=key: peer.match(k),
        )

    def inserts(name: str, prompts: list[TokenArray]) -> None:
        depth = PROMPT // PAGE
        mine = iter(
            [(p, {KV: bench.slots(depth)}, {depth: {MAMBA: int(bench.slots(1)[0])}}) for p in prompts]
        )
        other = iter([(peer.key(p), peer.slots(PROMPT)) for p in prompts])
        report(
            f"insert 32k tokens, {name}", lambda: index.insert(*next(mine)), lambda: peer.insert(*next(other))
        )

    inserts("all new", [bench.tokens(PROMPT) for _ in range(REPEATS)])
    inserts(f"all held by {TURNS} nodes", [deep] * REPEATS)
    kept = deep[: PROMPT - 10 * PAGE]
    tails = [np.concatenate([kept, bench.tokens(10 * PAGE)]) for _ in range(REPEATS)]
    inserts(f"10 pages new after {TURNS} nodes", tails)
    match, node = index.match(deep), peer.match(peer.key(deep)).last_device_node_id
    report(
        f"pin and release {TURNS} nodes",
        lambda: index.pin(match, Tier.DEVICE).release(),
        lambda: peer.lock_and_unlock(node),
    )
    report(
        "evict a state",
        lambda: index.evict_device({MAMBA: UNITS}),
        lambda: peer.evict(STATE, UNITS),
        units=UNITS,
    )
    report(
        "evict a leaf of 10 pages",
        lambda: index.evict_device({KV: 10 * UNITS}),
        lambda: peer.evict(FULL, 10 * UNITS * PAGE),
        units=UNITS,
    )


if __name__ == "__main__":
    main()
