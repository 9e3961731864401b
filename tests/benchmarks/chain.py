"""Cost of a chain of tiers beside its store alone, a JSON line a row: `python -m tests.benchmarks.chain DIR`.

Each row compares a get or a set through a chain with the same call of the plain `file` store, in turn, in the
same run and on the same file system. The page cache is warm. `attached`: the buffers lie in memory that the
store was told of, as a controller's host arena; other buffers are copied once more by a chain.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tiercache.core import Outcome
from tiercache.pools import HostArena
from tiercache.storage import open_backend
from tiercache.storage.base import GetItem, StorageBackend
from tiercache.testing.objects import key, payload, to_set

ROUNDS = 9
CAPACITY = 4 << 30
SIZES = ((16 << 10, 256), (256 << 10, 128), (1 << 20, 64), (16 << 20, 8))
"""Bytes of an object, and objects of a call."""


class Bench:
    """One store, the buffers of its calls, and the objects that it was given."""

    def __init__(self, store: StorageBackend, arena: HostArena | None, nbytes: int) -> None:
        self.store = store
        if arena is not None:
            store.attach(arena)
        self._memory = memoryview(np.zeros(nbytes, np.uint8).data) if arena is None else arena.hold()

    def buffers(self, size: int, count: int) -> list[memoryview]:
        """Return `count` buffers of `size` bytes."""
        return [self._memory[n * size : (n + 1) * size] for n in range(count)]

    def sets(self, size: int, count: int, turn: int) -> Callable[[], None]:
        """Return a call that stores new objects."""
        items = []
        for n, view in enumerate(self.buffers(size, count)):
            view[:] = payload((size, n), size)
            items.append(to_set(key((size, turn, n)), bytes(view))._replace(buffers=[view]))

        def call() -> None:
            assert set(self.store.set(items)) == {Outcome.STORED}

        return call

    def gets(self, size: int, count: int) -> Callable[[], None]:
        """Return a call that reads the objects of the first turn."""
        items = [GetItem(key((size, 0, n)), [view], size) for n, view in enumerate(self.buffers(size, count))]

        def call() -> None:
            assert set(self.store.get(items)) == {Outcome.HIT}

        return call


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(name: str, urls: Sequence[str], directory: Path, *, attached: bool) -> None:
    """Print the rows of one chain."""
    nbytes = max(size * count for size, count in SIZES)
    arenas = [HostArena(nbytes, 1 << 20) if attached else None for _ in range(2)]
    plain, chain = (
        Bench(open_backend(what), arena, nbytes)
        for what, arena in zip(
            (f"file://{directory}/plain?capacity={CAPACITY}", list(urls)), arenas, strict=True
        )
    )
    for size, count in SIZES:
        times: dict[str, tuple[list[float], list[float]]] = {"set": ([], []), "get": ([], [])}
        for turn in range(ROUNDS):
            for bench, into in zip((plain, chain), times["set"], strict=True):
                into.append(timed(bench.sets(size, count, turn)))
                bench.store.flush()  # the copies to lower tiers are not timed
        for bench in (plain, chain):
            bench.gets(size, count)()
        for _ in range(ROUNDS):
            for bench, into in zip((plain, chain), times["get"], strict=True):
                into.append(timed(bench.gets(size, count)))
        for operation, pair in times.items():
            alone, through = (statistics.median(one) for one in pair)
            row = {
                "benchmark": f"chain.{name}.{operation}", "attached": attached, "bytes": size,
                "objects": count,
                "store_gb_s": round(size * count / alone / 1e9, 2),
                "chain_gb_s": round(size * count / through / 1e9, 2), "ratio": round(alone / through, 2),
                "us_per_object_more": round((through - alone) / count * 1e6, 1),
            }  # fmt: skip
            print(json.dumps(row), flush=True)
    for bench, arena in zip((plain, chain), arenas, strict=True):
        bench.store.close()
        if arena is not None:
            arena.close()


def main(where: str) -> None:
    for attached in (True, False):
        for name, tiers in {
            "one": ["a"],
            "first of two": ["a", "b"],
            "first of three": ["a", "b", "c"],
        }.items():
            with tempfile.TemporaryDirectory(dir=where) as directory:
                path = Path(directory)
                urls = [f"file://{path}/{tier}?capacity={CAPACITY}&tier_name={tier}" for tier in tiers]
                compare(name, urls, path, attached=attached)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
