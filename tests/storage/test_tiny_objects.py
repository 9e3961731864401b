"""Objects of one byte: a tenant that stores nothing else takes no more than it has, also in memory.

`python -m tests.storage.test_tiny_objects KIND COUNT` prints the figures of one store.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.examples import slow_after
from tiercache.core import ObjectKey, Outcome
from tiercache.storage import open_backend
from tiercache.storage.base import SetItem, StorageBackend
from tiercache.storage.shares import Share, Shares
from tiercache.testing.objects import key, payload, to_set

MIB = 1 << 20
SIZE = 20_000
QUOTA = 4 * MIB
ALLOWANCE = 8 * MIB
"""Memory beside the limit and a tenth: buffers, queues and allocators of a store, whatever it holds."""
BATCH = 512
STORES: dict[str, tuple[str, ...]] = {
    "memory": ("memory://?capacity=16MiB",),
    "file": ("file://{}/a?capacity=32MiB",),
    "chain": ("memory://?capacity=16MiB", "file://{}/a?capacity=32MiB"),
}


def tiny(number: int) -> SetItem:
    """An object of one byte, with all that can be known of one, on a layout of its own now and then."""
    digest = key(("tiny", number)).digest
    layout = number.to_bytes(32) if number % 8 == 0 else digest[:32]
    name = ObjectKey(key(0).pool, layout + digest[32:])
    return to_set(name, b"x", namespace=b"ash", depth=1 + number % 9, value=number + 0.5, worker=7)


def flood(store: StorageBackend, count: int) -> int:
    """Store `count` objects of one byte; return how many were stored."""
    batches = ([tiny(first + n) for n in range(BATCH)] for first in range(0, count, BATCH))
    return sum(store.set(batch).count(Outcome.STORED) for batch in batches)


def resident() -> int:
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10


def figures(kind: str, count: int) -> dict[str, Any]:
    """Flood a store in which the neighbour has objects, and in which it stores more after the flood."""
    with tempfile.TemporaryDirectory() as folder:
        urls = [url.format(folder) for url in STORES[kind]]
        with open_backend(urls if len(urls) > 1 else urls[0]) as store:
            limits = {"ash": Share(QUOTA, QUOTA // 4), "birch": Share(None, 8 * MIB)}
            store.share(Shares(bytes.decode, limits))
            rows = [to_set(key(n), payload(n, SIZE), namespace=b"birch") for n in range(100)]
            assert store.set(rows[:50]) == [Outcome.STORED] * 50
            store.usage()
            before = resident()
            stored = flood(store, count)
            store.flush()
            grown = resident() - before
            late = store.set(rows[50:])
            return {
                "store": kind, "offered": count, "stored": stored,
                "kept": sum(store.exists([row.key for row in rows[:50]])), "late": late.count(Outcome.STORED),
                "grown_mib": round(grown / MIB, 1), "objects": store.usage().objects,
                "used": store.usage().owners["ash"].used_bytes,
            }  # fmt: skip


@pytest.mark.parametrize(
    "count", [16_384, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
@pytest.mark.parametrize("kind", slow_after(2, STORES))
def test_a_flood_of_one_byte_objects_takes_what_its_tenant_has(kind: str, count: int) -> None:
    command = [sys.executable, "-m", "tests.storage.test_tiny_objects", kind, str(count)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )  # fmt: skip
    print(done.stdout)
    found = json.loads(done.stdout)
    assert (found["kept"], found["late"]) == (50, 50), "the neighbour is within its guarantee"
    # Each tier of a chain keeps the quota by itself.
    assert found["grown_mib"] <= (1.1 * QUOTA * len(STORES[kind]) + ALLOWANCE) / MIB
    assert 0 < found["used"] <= QUOTA
    assert found["objects"] <= 100 * len(STORES[kind]) + QUOTA // 1024, "their number follows from the limit"


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1], int(sys.argv[2]))))
