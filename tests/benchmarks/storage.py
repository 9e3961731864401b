"""The `file` store beside the raw calls that it is made of. One JSON line per row; every figure is a median of interleaved runs.

    python -m tests.benchmarks.storage

Files go into the working directory's file system, not into /tmp, which may be memory. The limit of a set is `pwritev` of the same buffers
over blocks that are in the page cache, that of a get `preadv` of them into the same buffers.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tiercache.core import ObjectMeta, Outcome, PoolName
from tiercache.keys import Shard, layout_digest, object_key
from tiercache.storage import GetItem, SetItem, open_backend
from tiercache.storage.checksum import checksum

REPEATS = 7
LAYOUT = layout_digest(PoolName.KV, bytes(32), Shard())


def seconds(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def batch(size: int, count: int, directory: Path) -> dict[str, float]:
    """Median seconds of set (checksums included), get, exists and the raw calls, for `count` objects of `size` bytes."""
    data = np.random.default_rng(size).integers(0, 256, size * count, np.uint8)
    view = memoryview(data)
    views = [view[i * size : (i + 1) * size] for i in range(count)]
    raw = os.open(directory / "raw", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwritev(raw, [view], 0)
    times: dict[str, list[float]] = {}
    with open_backend(f"file://{directory}/store?capacity={2 * size * count + (64 << 20)}") as store:
        for repeat in range(REPEATS + 1):
            keys = [object_key(PoolName.KV, LAYOUT, os.urandom(32)) for _ in range(count)]

            def put(keys: list = keys) -> None:
                items = [SetItem(k, [v], ObjectMeta(bytes(32), size, checksum(k, [v], size))) for k, v in zip(keys, views, strict=True)]
                assert set(store.set(items)) == {Outcome.STORED}

            def get(keys: list = keys) -> None:
                assert set(store.get([GetItem(k, [v], size) for k, v in zip(keys, views, strict=True)])) == {Outcome.HIT}

            row = {
                "set": seconds(put),
                "set_limit": seconds(lambda: [os.pwritev(raw, [v], i * size) for i, v in enumerate(views)]),
                "get": seconds(get),
                "get_limit": seconds(lambda: [os.preadv(raw, [v], i * size) for i, v in enumerate(views)]),
                "exists": seconds(lambda keys=keys: store.exists(keys)),
            }
            store.delete(keys)  # so that the next set, like the raw write, goes over blocks that were written before
            if repeat:
                for name, value in row.items():
                    times.setdefault(name, []).append(value)
    os.close(raw)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """All rows."""
    for size, count in ((1 << 20, 64), (256 << 10, 128), (16 << 10, 128)):
        with tempfile.TemporaryDirectory(dir=".", prefix=".benchmark-") as directory:
            median = batch(size, count, Path(directory).resolve())
        for name in ("set", "get"):
            gbps, limit = (size * count / median[key] / 1e9 for key in (name, f"{name}_limit"))
            row = {"name": f"file {name}", "size": size, "gbps": round(gbps, 2), "limit_gbps": round(limit, 2)}
            print(json.dumps(row | {"ratio": round(gbps / limit, 2), "us_per_object": round(median[name] / count * 1e6, 1)}), flush=True)
        print(json.dumps({"name": "file exists", "size": size, "us_per_object": round(median["exists"] / count * 1e6, 3)}), flush=True)


if __name__ == "__main__":
    main()
