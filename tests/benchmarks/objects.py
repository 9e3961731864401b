"""CPU time of a store for each object, a JSON line a row: `python -m tests.benchmarks.objects [URL...]`.

Batches of the pages of a sequence are read from the page cache, and written into blocks that are in it.
`get_apart` reads as many objects that lie apart from each other. `v2` goes through `HybridStorage`, the other
rows call the store. The limit beside a row moves as many bytes between the same buffers and a preallocated
file with plain calls of at most 1 MiB, one buffer an object, and takes turns with the store. Times are those
of the whole process (`time.process_time`), in us an object.

The URL is `file://{directory}?capacity=2GiB` if none is given, and several are a chain; `{directory}` is made
and removed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

from tiercache.core import ObjectMeta, Outcome, PoolName, PoolTransfer
from tiercache.geometry import Geometry, Segment
from tiercache.keys import Shard, layout_digest, object_keys
from tiercache.pools import HostArena, HostPool
from tiercache.storage import open_backend
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem, StorageBackend
from tiercache.storage.hybrid import HybridStorage
from tiercache.storage.registry import spec_of
from tiercache.testing.objects import NAMESPACE, page_key

SHAPES = ((16 << 10, 128, 48, 150), (256 << 10, 128, 6, 30), (1 << 20, 64, 4, 20), (16 << 20, 8, 3, 8))
"""Bytes of an object, objects of a batch, batches that are stored, and rounds."""
CALL_BYTES = 1 << 20


class Bench:
    """A store with batches of pages of one size, and a plain file of as many bytes."""

    def __init__(self, store: StorageBackend, directory: Path, size: int, count: int, batches: int) -> None:
        self.store, self.size, self.count, self.batches = store, size, count, batches
        self.nbytes = size * count
        self._arena = HostArena(self.nbytes, size)
        geometry = Geometry(PoolName.KV, 64, (Segment(0, "kv", (size,), "uint8"),))
        self._pool = HostPool(geometry, self._arena)
        self._handles = self._pool.alloc(count)
        self._views = [self._pool.buffers(handle)[0] for handle in self._handles.tolist()]
        self._layout = layout_digest(PoolName.KV, geometry.fingerprint, Shard())
        self._hybrid = HybridStorage(store, namespace=NamespaceRecord(NAMESPACE, {}))
        self._hybrid.register_pool(self._pool)
        self._file = os.open(directory / f"raw-{size}", os.O_RDWR | os.O_CREAT)
        random = np.random.default_rng(size)
        for view in self._views:
            view[:] = random.bytes(size)
        for batch in range(batches):
            self.raw_set(batch)

    def pages(self, batch: int) -> list[bytes]:
        return [page_key((self.size, batch, depth)) for depth in range(self.count)]

    def transfer(self, batch: int) -> PoolTransfer:
        pages = self.pages(batch)
        depths = range(1, self.count + 1)
        return PoolTransfer(
            PoolName.KV, pages, self._handles, depths=list(depths), parents=[b"", *pages[:-1]]
        )

    def get(self, batch: int) -> Callable[[], object]:
        keys = object_keys(PoolName.KV, self._layout, self.pages(batch))
        items = [GetItem(key, [view], self.size) for key, view in zip(keys, self._views, strict=True)]
        return lambda: self.store.get(items)

    def get_apart(self, batch: int) -> Callable[[], object]:
        random = Random(batch)
        pages = [
            page_key((self.size, random.randrange(self.batches), random.randrange(self.count)))
            for _ in range(self.count)
        ]
        keys = object_keys(PoolName.KV, self._layout, pages)
        items = [GetItem(key, [view], self.size) for key, view in zip(keys, self._views, strict=True)]
        return lambda: self.store.get(items)

    def set(self, batch: int) -> Callable[[], object]:
        pages = self.pages(batch)
        keys = object_keys(PoolName.KV, self._layout, pages)
        items = [
            SetItem(key, [view], ObjectMeta(NAMESPACE, self.size, b"", parent, depth))
            for key, view, parent, depth in zip(
                keys, self._views, [None, *pages[:-1]], range(1, self.count + 1), strict=True
            )
        ]
        return lambda: self.store.set(items)

    def get_v2(self, batch: int) -> Callable[[], object]:
        transfer = self.transfer(batch)
        return lambda: self._hybrid.batch_get_v2([transfer])[PoolName.KV]

    def set_v2(self, batch: int) -> Callable[[], object]:
        transfer = self.transfer(batch)
        return lambda: self._hybrid.batch_set_v2([transfer])[PoolName.KV]

    def exists(self, batch: int) -> Callable[[], object]:
        keys = object_keys(PoolName.KV, self._layout, self.pages(batch))
        return lambda: self.store.exists(keys)

    def delete(self, batch: int) -> None:
        self.store.delete(object_keys(PoolName.KV, self._layout, self.pages(batch)))

    def raw_get(self, batch: int) -> None:
        self._raw(os.preadv, batch * self.nbytes)

    def raw_set(self, batch: int) -> None:
        self._raw(os.pwritev, batch * self.nbytes)

    def close(self) -> None:
        os.close(self._file)

    def _raw(self, call: Callable[[int, list[memoryview], int], int], offset: int) -> None:
        step, per_call = min(self.size, CALL_BYTES), max(1, CALL_BYTES // self.size)
        for first in range(0, self.count, per_call):
            views = self._views[first : first + per_call]
            for at in range(0, self.size, step):
                offset += call(self._file, [view[at : at + step] for view in views], offset)


def timed(call: Callable[[], object], expected: object = None) -> tuple[float, float]:
    """Make a call; return the seconds of the process and of the clock."""
    clock, start = time.perf_counter(), time.process_time()
    answers = call()
    seconds = time.process_time() - start, time.perf_counter() - clock
    assert answers is None or set(answers) == {expected}, answers  # type: ignore[call-overload]
    return seconds


def measure(bench: Bench, batches: int, rounds: int) -> None:
    """Print the rows of one size."""
    for batch in range(batches):
        assert set(bench.set(batch)()) == {Outcome.STORED}  # type: ignore[call-overload]
    took: dict[str, list[tuple[float, float]]] = defaultdict(list)
    random = Random(bench.size)
    for turn in range(rounds + 1):
        batch = random.randrange(batches)
        for name, limit, make, expected in (
            ("get", bench.raw_get, bench.get, Outcome.HIT),
            ("get_apart", bench.raw_get, bench.get_apart, Outcome.HIT),
            ("get_v2", bench.raw_get, bench.get_v2, Outcome.HIT),
            ("set", bench.raw_set, bench.set, Outcome.STORED),
            ("set_v2", bench.raw_set, bench.set_v2, Outcome.STORED),
            ("exists", None, bench.exists, True),
        ):
            if expected is Outcome.STORED:
                bench.delete(batch)
            seconds = timed(make(batch), expected)
            if turn:  # the first round warms up
                took[name].append(seconds)
                if limit is not None:
                    took[f"{name} limit"].append(timed(partial(limit, batch)))
    for name in ("get", "get_apart", "get_v2", "set", "set_v2", "exists"):
        row: dict[str, object] = {"benchmark": f"objects.{name}", "bytes": bench.size, "objects": bench.count}
        cpu, clock = zip(*took[name], strict=True)
        row["us"] = round(min(cpu) / bench.count * 1e6, 2)
        row["us_median"] = round(statistics.median(cpu) / bench.count * 1e6, 2)
        if f"{name} limit" in took:
            limit_cpu, limit_clock = zip(*took[f"{name} limit"], strict=True)
            row["limit_us"] = round(min(limit_cpu) / bench.count * 1e6, 2)
            row["limit_us_median"] = round(statistics.median(limit_cpu) / bench.count * 1e6, 2)
            row["ratio"] = round(min(limit_cpu) / min(cpu), 2)
            row["ratio_of_time"] = round(statistics.median(limit_clock) / statistics.median(clock), 2)
        print(json.dumps(row), flush=True)


def main(urls: list[str], where: str | None) -> None:
    for size, count, batches, rounds in SHAPES:
        with (
            tempfile.TemporaryDirectory(dir=where) as directory,
            open_backend(
                spec_of([url.replace("{directory}", f"{directory}/store") for url in urls])
            ) as store,
        ):
            bench = Bench(store, Path(directory), size, count, batches)
            measure(bench, batches, rounds)
            bench.close()


if __name__ == "__main__":
    main(sys.argv[1:] or ["file://{directory}?capacity=2GiB"], os.environ.get("TMPDIR"))
