"""The `mooncake` store beside a bare client of a pool: `python -m tests.benchmarks.mooncake [ROUNDS]`.

A master and two providers run in a network namespace of this process, which needs root. Three take turns to
move the same 32 MiB of objects; one JSON line a row.

    bare      `batch_put_from` and `batch_get_into` on registered memory of its own, which check nothing
    checked   the same of objects with a header; asks which are there before and after a put, and hashes what
              it gets: what any client does that keeps the store's promises
    store     the store, from and to attached memory

`cpu` is processor seconds a GB of this process, `cpu_all` with the master and the providers.
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
from typing import Any, NamedTuple

import numpy as np
from tiercache_backends.mooncake.header import HEADER_BYTES
from tiercache_backends.mooncake.library import library
from tiercache_backends.mooncake.settings import read_settings
from tiercache_backends.mooncake.store import MooncakeBackend
from xxhash import xxh3_128_digest

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
        room = TOTAL + TOTAL // min(SIZES) * HEADER_BYTES
        self._memory = mmap(-1, room)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        assert self._client.register_buffer(self.address, room) == 0
        self._memory[:] = bytes(room)

    def fill(self, data: bytes) -> None:
        self._memory[:TOTAL] = data

    def put(self, names: list[str], size: int) -> None:
        found = self._client.batch_put_from(names, self._places(names, size), [size] * len(names))
        assert set(found) == {0}, found

    def get(self, names: list[str], size: int) -> None:
        found = self._client.batch_get_into(names, self._places(names, size), [size] * len(names))
        assert set(found) == {size}, found

    def put_checked(self, names: list[str], size: int) -> None:
        assert set(self._client.batch_is_exist(names)) == {0}
        self.put(names, HEADER_BYTES + size)
        assert set(self._client.batch_is_exist(names)) == {1}

    def get_checked(self, names: list[str], size: int) -> None:
        self.get(names, HEADER_BYTES + size)
        with memoryview(self._memory) as view:
            for n in range(len(names)):
                at = n * (HEADER_BYTES + size)
                xxh3_128_digest(view[at : at + HEADER_BYTES])
                xxh3_128_digest(view[at + HEADER_BYTES : at + HEADER_BYTES + size])

    def _places(self, names: list[str], size: int) -> list[int]:
        return [self.address + n * size for n in range(len(names))]

    def remove_all(self) -> None:
        self._client.remove_by_regex("^bare/", True)

    def close(self) -> None:
        self._client.close()


def main(rounds: int) -> None:
    rows: dict[tuple[int, str, str], list[Measure]] = defaultdict(list)
    with own_network(), Pool(segments=(512 << 20, 512 << 20)) as pool:
        bare = Bare(pool)
        arena = HostArena(TOTAL, 4096)
        view = memoryview((ctypes.c_char * TOTAL).from_address(arena.address)).cast("B")
        with MooncakeBackend(read_settings(pool.section("bench", deadline="30s"))) as store:
            store.attach(arena)
            for turn in range(rounds + 1):
                data = np.random.default_rng(turn).bytes(TOTAL)
                for size in SIZES:
                    for (call, who), found in measure(pool, bare, store, view, data, turn, size).items():
                        if turn:  # the first turn opens connections
                            rows[size, call, who].append(found)
        bare.close()
    for (size, call, who), measures in rows.items():
        median = Measure(*map(statistics.median, zip(*measures, strict=True)))
        record: dict[str, object] = {"bytes": size, "call": call, "who": who}
        record |= {"GB_per_s": round(TOTAL / 1e9 / median.wall, 2)}
        record |= {
            "cpu": round(median.cpu * 1e9 / TOTAL, 2),
            "cpu_all": round(median.cpu_all * 1e9 / TOTAL, 2),
        }
        if who == "store":
            for other in ("bare", "checked"):
                pairs = list(zip(rows[size, call, other], measures, strict=True))
                record[f"of_{other}"] = [round(q, 2) for q in quartiles([a.wall / b.wall for a, b in pairs])]
                record[f"cpu_of_{other}"] = round(
                    statistics.median(a.cpu_all / b.cpu_all for a, b in pairs), 2
                )
        print(json.dumps(record))


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The median, and the quartiles on both sides of it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


class Measure(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float
    cpu_all: float


def measured(pool: Pool, work: Callable[[], object]) -> Measure:
    """Make a call and measure it."""
    assert pool.master is not None
    # The clocks of other processes, as clock_getcpuclockid(3) would name them.
    clocks = [~one.process.pid << 3 | 2 for one in (pool.master, *pool.providers)]
    others = sum(map(time.clock_gettime, clocks))
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Measure(wall, cpu, cpu + sum(map(time.clock_gettime, clocks)) - others)


def measure(
    pool: Pool, bare: Bare, store: MooncakeBackend, view: memoryview, data: bytes, turn: int, size: int
) -> dict[tuple[str, str], Measure]:
    """Put and get the same bytes in all ways, in another order each turn."""
    view[:] = data
    bare.fill(data)
    keys = [key((turn, size, n)) for n in range(TOTAL // size)]
    parts = [view[at : at + size] for at in range(0, TOTAL, size)]
    sets = [
        SetItem(k, [part], ObjectMeta(NAMESPACE, size, checksum(k, [part], size)))
        for k, part in zip(keys, parts, strict=True)
    ]
    gets = [GetItem(k, [part], size) for k, part in zip(keys, parts, strict=True)]
    names = {prefix: [f"bare/{prefix}/{n}" for n in range(TOTAL // size)] for prefix in "ab"}
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "bare": (lambda: bare.put(names["a"], size), lambda: bare.get(names["a"], size)),
        "checked": (lambda: bare.put_checked(names["b"], size), lambda: bare.get_checked(names["b"], size)),
        "store": (lambda: _all(store.set(sets), Outcome.STORED), lambda: _all(store.get(gets), Outcome.HIT)),
    }
    order = [list(ways)[(turn + n) % len(ways)] for n in range(len(ways))]
    found = {("put", who): measured(pool, ways[who][0]) for who in order}
    view[:] = bytes(TOTAL)
    found |= {("get", who): measured(pool, ways[who][1]) for who in order}
    assert bytes(view) == data, "what came back is what was stored"
    assert all(store.delete(keys))
    bare.remove_all()
    return found


def _all(outcomes: list[Outcome], expected: Outcome) -> None:
    assert set(outcomes) == {expected}


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
