"""CPU time of a store for each object, a JSON line a row: `python -m tests.benchmarks.objects [URL...]`.

Batches of the pages of a sequence are read from the page cache, and written into blocks that are in it. The
limit beside a row moves as many bytes between the same buffers and a preallocated file with plain calls of at
most 1 MiB, one buffer an object, and takes turns with the store. Times are those of the whole process
(`time.process_time`), in us an object.

The URL is `file://{directory}?capacity=2GiB` if none is given, and several are a chain; `{directory}` is made
and removed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.storage import open_backend
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.registry import spec_of
from tiercache.testing.objects import NAMESPACE, chain
from tiercache_lab.bench.subject import Buffers
from tiercache_lab.bench.timing import Side, turns

SHAPES = ((16 << 10, 128, 48, 150), (256 << 10, 128, 6, 30), (1 << 20, 64, 4, 20), (16 << 20, 8, 3, 8))
"""Bytes of an object, objects of a batch, batches that are stored, and rounds."""
CALL_BYTES = 1 << 20


class Bench:
    """A store with batches of pages of one size, and a plain file of as many bytes."""

    def __init__(self, store: StorageBackend, path: Path, size: int, count: int, batches: int) -> None:
        self._store, self._buffers = store, Buffers(size, count)
        self._batches = [chain((size, batch), count) for batch in range(batches)]
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._random = Random(size)
        for self._batch in range(batches):
            self._set_items()
            self.set(0)
            self.raw_set(0)

    def begin_get(self, _: int) -> None:
        """Choose a batch, and prepare its get."""
        self._batch, size = self._random.randrange(len(self._batches)), self._buffers.size
        self._gets = [
            GetItem(k, [view], size) for k, view in zip(self._keys(), self._buffers.views, strict=True)
        ]

    def begin_set(self, _: int) -> None:
        """Choose a batch, delete it, and prepare its set."""
        self._batch = self._random.randrange(len(self._batches))
        assert all(self._store.delete(self._keys()))
        self._set_items()

    def get(self, _: int) -> None:
        """Get the batch."""
        assert set(self._store.get(self._gets)) == {Outcome.HIT}

    def set(self, _: int) -> None:
        """Set the batch."""
        assert set(self._store.set(self._sets)) == {Outcome.STORED}

    def raw_get(self, _: int) -> None:
        """Read the batch by plain calls."""
        self._raw(os.preadv)

    def raw_set(self, _: int) -> None:
        """Write the batch by plain calls."""
        self._raw(os.pwritev)

    def close(self) -> None:
        """Close the plain file."""
        os.close(self._file)

    def _raw(self, call: Callable[[int, Sequence[memoryview], int], int]) -> None:
        size, views = self._buffers.size, self._buffers.views
        offset, step = self._batch * self._buffers.nbytes, min(size, CALL_BYTES)
        for first in range(0, len(views), max(1, CALL_BYTES // size)):
            few = views[first : first + max(1, CALL_BYTES // size)]
            for at in range(0, size, step):
                offset += call(self._file, [view[at : at + step] for view in few], offset)

    def _keys(self) -> list[ObjectKey]:
        return [k for k, _ in self._batches[self._batch]]

    def _set_items(self) -> None:
        pages = zip(self._batches[self._batch], self._buffers.views, strict=True)
        self._sets = [
            SetItem(k, [view], ObjectMeta(NAMESPACE, self._buffers.size, b"", parent, depth))
            for depth, ((k, parent), view) in enumerate(pages, 1)
        ]


def clocks() -> np.ndarray:
    """Seconds of the process and of the wall clock."""
    return np.array([time.process_time(), time.perf_counter()])


def report(name: str, size: int, count: int, took: dict[str, list[np.ndarray]]) -> None:
    """Print one row."""
    (least, _), (middle, time_of_it) = (of(took["store"], axis=0) for of in (np.min, np.median))
    (limit, _), (limit_middle, time_of_limit) = (of(took["limit"], axis=0) for of in (np.min, np.median))
    us = {"us": least, "us_median": middle, "limit_us": limit, "limit_us_median": limit_middle}
    row = {"benchmark": f"objects.{name}", "bytes": size, "objects": count}
    row |= {what: round(seconds / count * 1e6, 2) for what, seconds in us.items()}
    row |= {"ratio": round(limit / least, 2), "ratio_of_time": round(time_of_limit / time_of_it, 2)}
    print(json.dumps(row), flush=True)


def main(urls: list[str], where: str | None) -> None:
    """Print the rows of each size."""
    for size, count, batches, rounds in SHAPES:
        with tempfile.TemporaryDirectory(dir=where) as directory:
            spec = spec_of([url.replace("{directory}", f"{directory}/store") for url in urls])
            with open_backend(spec) as store:
                bench = Bench(store, Path(directory) / "raw", size, count, batches)
                for name, begin, work, limit in (
                    ("get", bench.begin_get, bench.get, bench.raw_get),
                    ("set", bench.begin_set, bench.set, bench.raw_set),
                ):
                    sides = [Side("store", work, begin), Side("limit", limit)]
                    report(name, size, count, turns(sides, rounds, clocks))
                bench.close()


if __name__ == "__main__":
    main(sys.argv[1:] or ["file://{directory}?capacity=2GiB"], os.environ.get("TMPDIR"))
