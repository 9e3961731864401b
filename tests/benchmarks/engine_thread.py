"""Cost of a request on the engine's thread when the cache has all of it.

One JSON line per row; a figure is the thread's CPU time, the least and the median. "floor" is what any cache
must do: compare the prompt with what it has, and read a location of every page; "yardstick" is a bare loop.

    python -m tests.benchmarks.engine_thread

Pages have 64 tokens. The prompt continues a conversation of twelve turns, each of which left a state, among a
hundred others of the same length. "hit": the prompt was served before, so that all of it is held when it is
committed. "hit, one page new": its last page and its state are new, and go on to the host and the store. A
row is the time for which a call uses the engine's thread, not the time until its background work is over: a
host hit's load continues after the admit.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tiercache.controller import Admission, ControllerOptions, HybridCacheController, Status
from tiercache.core import PoolName, Tier, TokenArray
from tiercache.events.settings import EventSettings
from tiercache.geometry import Geometry, kv_geometry, state_geometry
from tiercache.keys import Identity
from tiercache.pools import DevicePool, HostArena
from tiercache.storage.registry import open_backend

PAGE = 64
TURNS = 12
OTHERS = 100
REPEATS = 60
KV, MAMBA = PoolName.KV, PoolName.MAMBA
HELD_US, NEW_US = 300, 500
"""Targets of lookup, admit and commit together, all held, and with a page and a state new; yardstick 38."""


class Bench:
    """A controller with conversations of `tokens` tokens in its store; tiny objects: no copying counts."""

    def __init__(self, tokens: int, events: EventSettings | None = None) -> None:
        self._random = np.random.default_rng(7)
        pages, states = (OTHERS + 4) * (tokens // PAGE), (OTHERS + 4) * (TURNS + 1)
        kv = kv_geometry([0], kv_heads=1, head_dim=1, dtype="uint8", page_size=PAGE)
        state = state_geometry([(1, "ssm", (64,), "uint8")], PAGE)
        pools = {KV: pool_of(kv, pages), MAMBA: pool_of(state, states)}
        self._tokens = tokens
        self.controller = HybridCacheController(
            Identity("bench", "1", "uint8", "uint8", "uint8", PAGE),
            pools,
            HostArena((pages + states) * 4096, 4096, huge_pages=False),
            open_backend("memory://"),
            options=ControllerOptions(restore_deadline=10.0, events=events),
        )
        shared = self._fresh(tokens // TURNS // PAGE * PAGE)
        for _ in range(OTHERS):
            self.converse(shared)
        self.history = self.converse(shared)
        assert self.controller.flush()

    def _fresh(self, count: int) -> TokenArray:
        return self._random.integers(0, 150_000, count, dtype=np.uint64)

    def converse(self, shared: TokenArray) -> TokenArray:
        """A conversation whose turns begin with `shared`; every turn leaves a state."""
        history = np.concatenate([shared, self._fresh(self._tokens - len(shared))])
        for turn in range(1, TURNS + 1):
            end = self._tokens * turn // TURNS // PAGE * PAGE
            admission = self.ready(history[:end])
            self.controller.commit(admission, history[:end], {end: admission.take_states()})
            self.controller.release(admission)
        return history

    def ready(self, prompt: TokenArray) -> Admission:
        """An admission that has all it can get."""
        admission = self.controller.admit(self.controller.lookup(prompt), states=1)
        assert admission.wait().status is not Status.PENDING
        return admission

    def measure(
        self, name: str, before: Callable[[], None], target: float | None = None, *, new: bool = True
    ) -> None:
        """Serve the conversation's next prompt again and again, each time after `before`, with a last page
        that is `new` each time or not.

        `target` is for the three calls together.
        """
        controller, times = self.controller, defaultdict[str, list[float]](list)
        prompt = np.concatenate([self.history, self._fresh(PAGE)])
        for repeat in range(REPEATS + 1):
            if new:
                prompt = np.concatenate([self.history, self._fresh(PAGE)])
            before()
            with timed(times["lookup"]):
                lookup = controller.lookup(prompt)
            with timed(times["admit"]):
                admission = controller.admit(lookup, states=1)
            assert admission.wait().depth == len(self.history)
            admission.wait_layer(0)
            admission.wait_layer(1)
            states = {len(prompt): admission.take_states()}
            with timed(times["commit"]):
                controller.commit(admission, prompt, states)
            with timed(times["release"]):
                controller.release(admission)
            assert controller.flush()
            if not repeat:  # the first time it is not held yet
                times.clear()
        for call, seconds in times.items():
            report(f"{name}: {call}", seconds, None)
        three = zip(times["lookup"], times["admit"], times["commit"], strict=True)
        report(f"{name}: lookup + admit + commit", [sum(each) for each in three], target)
        report(f"{name}: all four", [sum(each) for each in zip(*times.values(), strict=True)], None)


def pool_of(geometry: Geometry, slots: int) -> DevicePool:
    """A pool in slot form."""
    return DevicePool.from_tensors(
        geometry,
        {(s.layer, s.name): torch.zeros(slots, *s.shape, dtype=torch.uint8) for s in geometry.segments},
    )


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Append the seconds that the block took."""
    start = time.thread_time()
    yield
    times.append(time.thread_time() - start)


def report(name: str, seconds: list[float], target: float | None) -> None:
    """One row; the target is None where only the sum has one."""
    figures = [round(min(seconds) * 1e6, 1), round(statistics.median(seconds) * 1e6, 1)]
    print(json.dumps({"name": name, "us": figures, "target_us": target}), flush=True)


def limits(bench: Bench, label: str) -> None:
    """Rows of the least that any cache must do, and of a bare loop."""
    had, prompt = bench.history.copy(), bench.history
    nodes = [np.zeros((2, len(prompt) // PAGE // TURNS), np.int64)] * TURNS
    floor, loop = list[float](), list[float]()
    for _ in range(REPEATS):
        with timed(floor):
            np.array_equal(had, prompt)
            np.concatenate(nodes, axis=1)
        with timed(loop):
            total = 0
            for number in range(1000):
                total += number
    report(f"{label}: floor", floor, None)
    report("yardstick: 1,000 additions", loop, None)


def main() -> None:
    """All rows."""
    for tokens, label in ((8192, "8k tokens"), (32768, "32k tokens")):
        bench = Bench(tokens)
        limits(bench, label)
        held, new = (HELD_US, NEW_US) if tokens == 8192 else (None, None)
        bench.measure(f"{label}, device hit", lambda: None, held, new=False)
        bench.measure(f"{label}, device hit, one page new", lambda: None, new)
        bench.measure(f"{label}, host hit, one page new", lambda b=bench: b.controller.evict(Tier.DEVICE))
        bench.controller.close()
    told = Bench(8192, EventSettings(endpoint="tcp://127.0.0.1:0"))
    told.measure("8k tokens with KV events, device hit, one page new", lambda: None)
    told.controller.close()


if __name__ == "__main__":
    main()
