"""The null data plane: real books, no bytes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pools.integrity import check_arena
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import PoolFullError, SlotError
from tiercache.policy import PROFILES, profile_named
from tiercache_lab.replay.plane import Inline, NullArena, NullEngine, block_bytes, geometries

HYBRID = profile_named("qwen3-next-80b-a3b")
ATTENTION = profile_named("llama-3.1-8b")


@pytest.mark.parametrize("name", PROFILES)
def test_objects_are_as_large_as_the_models(name: str) -> None:
    profile = profile_named(name)
    found = geometries(profile, 64)
    sizes = {PoolName.KV: 64 * profile.kv_bytes_per_token, PoolName.MAMBA: profile.state_bytes}
    assert {pool: one.nbytes for pool, one in found.items()} == {pool: n for pool, n in sizes.items() if n}
    first = next(iter(found.values()))
    assert block_bytes(found) % 4096 == 0
    assert block_bytes(found) - first.nbytes < 4096


def test_an_arena_keeps_books_and_one_block() -> None:
    arena = NullArena(10 * 8192 + 5000, 8192)
    assert (arena.blocks, arena.available, arena.nbytes, arena.peak) == (10, 10, 10 * 8192, 0)
    first = arena.alloc(6)
    assert sorted(first.tolist()) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(PoolFullError):
        arena.alloc(5)
    assert (arena.available, arena.peak) == (4, 6)
    arena.free(first[:4])
    arena.alloc(3)
    assert arena.peak == 6, "the peak is the most that was held at once"
    arena.alloc(2)
    assert (arena.available, arena.peak) == (3, 7)
    check_arena(arena)
    with pytest.raises(SlotError):
        arena.free([9, 9])
    # Every block is the same piece of memory: what goes in at one comes out at any.
    [first], [other, last] = arena.views([0, 8, 9], [1, 2])
    first[:4] = b"page"
    assert bytes(other[:4]) == bytes(last[:4]) == b"page"
    assert first.nbytes == last.nbytes == arena.hold().nbytes == 8192


def test_an_engine_counts_bytes_by_direction_and_is_done_at_once() -> None:
    sizes = {name: one.nbytes for name, one in geometries(HYBRID, 64).items()}
    engine = NullEngine(sizes)

    def units(pool: PoolName, count: int) -> CacheTransferUnits:
        return CacheTransferUnits(pool, np.arange(count), np.arange(count))

    stored = engine.store([units(PoolName.KV, 3), units(PoolName.MAMBA, 1)])
    loaded = engine.load([units(PoolName.KV, 5)])
    assert stored.done
    assert loaded.done
    assert engine.stored_bytes == 3 * sizes[PoolName.KV] + sizes[PoolName.MAMBA]
    assert engine.loaded_bytes == 5 * sizes[PoolName.KV]


def test_inline_jobs_run_in_the_order_of_the_calls() -> None:
    done: list[str] = []
    threads = Inline("name", 3)

    def outer() -> None:
        done.append("outer begins")
        threads.submit(lambda: done.append("inner"))
        done.append("outer ends")

    threads.submit(outer)
    threads.submit(lambda: done.append("next"))
    assert done == ["outer begins", "inner", "outer ends", "next"]
    assert threads.close(0.0)
