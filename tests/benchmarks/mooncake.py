"""The `mooncake` store beside a bare client of a pool: `python -m tests.benchmarks.mooncake [ROUNDS]`.

A master and two providers run in a network namespace of this process, which needs root. The store moves
32 MiB of objects from and to attached memory, writes headers, and verifies what it gets. The bare client
calls `batch_put_from` and `batch_get_into` on registered memory of its own, and checks nothing. They take
turns. One JSON line a row; `cpu` is processor seconds of this process a GB.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from mmap import mmap
from typing import Any

import numpy as np
from tiercache_backends.mooncake.library import library
from tiercache_backends.mooncake.settings import read_settings
from tiercache_backends.mooncake.store import MooncakeBackend

from tests.storage_backends.mooncake.rig import Pool, own_network
from tiercache.core import ObjectMeta, Outcome
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.checksum import checksum
from tiercache.testing.objects import NAMESPACE, key

TOTAL = 32 << 20
SIZES = (16 << 10, 256 << 10, 1 << 20, 4 << 20)


class Bare:
    """A client of the library, with registered memory."""

    def __init__(self, pool: Pool) -> None:
        self._client: Any = library().MooncakeDistributedStore()
        code = self._client.setup(pool.host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", pool.address)
        assert code == 0, code
        self._memory = mmap(-1, TOTAL)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        assert self._client.register_buffer(self.address, TOTAL) == 0

    def fill(self, data: bytes) -> None:
        self._memory[:] = data

    def names(self, turn: int, size: int) -> list[str]:
        return [f"bare/{turn}/{size}/{n}" for n in range(TOTAL // size)]

    def places(self, size: int) -> list[int]:
        return [self.address + at for at in range(0, TOTAL, size)]

    def put(self, turn: int, size: int) -> None:
        found = self._client.batch_put_from(
            self.names(turn, size), self.places(size), [size] * (TOTAL // size)
        )
        assert set(found) == {0}, found

    def get(self, turn: int, size: int) -> None:
        found = self._client.batch_get_into(
            self.names(turn, size), self.places(size), [size] * (TOTAL // size)
        )
        assert set(found) == {size}, found

    def remove(self, turn: int, size: int) -> None:
        for name in self.names(turn, size):
            self._client.remove(name, True)

    def close(self) -> None:
        self._client.close()


def main(rounds: int) -> None:
    rows: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    with own_network(), Pool(segments=(512 << 20, 512 << 20)) as pool:
        bare = Bare(pool)
        arena = HostArena(TOTAL, 4096)
        view = memoryview((ctypes.c_char * TOTAL).from_address(arena.address)).cast("B")
        with MooncakeBackend(read_settings(pool.section("bench", deadline="30s"))) as store:
            store.attach(arena)
            for turn in range(rounds + 1):
                data = np.random.default_rng(turn).bytes(TOTAL)
                for size in SIZES:
                    measure(bare, store, view, data, turn, size, rows)
        bare.close()
    for (size, call, who), found in rows.items():
        rate, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        record = {"bytes": size, "call": call, "who": who, "GB_per_s": round(rate, 2), "cpu": round(cpu, 2)}
        if who == "store":
            ratios = [a[0] / b[0] for a, b in zip(found, rows[size, call, "bare"], strict=True)]
            record |= {
                "of_bare": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2),
                "most": round(max(ratios), 2),
            }
        print(json.dumps(record))


def measure(
    bare: Bare,
    store: MooncakeBackend,
    view: memoryview,
    data: bytes,
    turn: int,
    size: int,
    rows: dict[tuple[int, str, str], list[tuple[float, float]]],
) -> None:
    """Put and get the same bytes in both ways; the first turn opens connections, and does not count."""
    view[:] = data
    bare.fill(data)
    keys = [key((turn, size, n)) for n in range(TOTAL // size)]
    parts = [view[at : at + size] for at in range(0, TOTAL, size)]
    sets = [
        SetItem(k, [part], ObjectMeta(NAMESPACE, size, checksum(k, [part], size)))
        for k, part in zip(keys, parts, strict=True)
    ]
    gets = [GetItem(k, [part], size) for k, part in zip(keys, parts, strict=True)]
    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("put", "bare", lambda: bare.put(turn, size)),
        ("put", "store", lambda: _all(store.set(sets), Outcome.STORED)),
        ("get", "bare", lambda: bare.get(turn, size)),
        ("get", "store", lambda: _all(store.get(gets), Outcome.HIT)),
    ]
    for pair in (calls[:2], calls[2:]):
        for call, who, work in pair if turn % 2 else reversed(pair):
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn:
                rows[size, call, who].append((TOTAL / 1e9 / wall, cpu / (TOTAL / 1e9)))
        if pair[0][0] == "put":
            view[:] = bytes(TOTAL)
    assert bytes(view) == data, "what came back is what was stored"
    assert all(store.delete(keys))
    bare.remove(turn, size)


def _all(outcomes: list[Outcome], expected: Outcome) -> None:
    assert set(outcomes) == {expected}


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
