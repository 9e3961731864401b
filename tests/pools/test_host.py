from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tests.pools.integrity import check_arena, check_pool
from tiercache.core import PoolName
from tiercache.errors import PoolFullError, SlotError
from tiercache.geometry import kv_geometry, state_geometry
from tiercache.pools import HostArena, HostPool

PAGES = kv_geometry([0, 1], 2, 64, "bfloat16", 8)  # 8 KiB: two blocks
# 20,003 bytes: five blocks
STATES = state_geometry([(0, "ssm", (5, 1000), "float32"), (1, "flags", (3,), "uint8")], 8)
BLOCK = 4096


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(30 * BLOCK, BLOCK)
    yield arena
    arena.close()


def test_an_object_is_a_list_of_blocks(arena: HostArena) -> None:
    pool = HostPool(STATES, arena)
    assert (pool.name, pool.blocks_per_object, pool.available) == (PoolName.MAMBA, 5, 6)
    assert pool.blocks(pool.alloc(2)).shape == (2, 5)
    assert (pool.available, arena.available) == (4, 20)


def test_pools_free_only_their_own(arena: HostArena) -> None:
    pages, states, twins = HostPool(PAGES, arena), HostPool(STATES, arena), HostPool(PAGES, arena)
    mine, other = pages.alloc(3), states.alloc(1)
    for wrong in (other, [*mine.tolist(), int(other[0])], [int(pages.blocks(mine)[0, 1])], [-1], [99]):
        with pytest.raises(SlotError):
            pages.free(wrong)
    with pytest.raises(SlotError, match="not an object of pool kv"):
        twins.free(mine)
    with pytest.raises(SlotError, match="twice"):
        pages.free([mine[0], mine[0]])
    with pytest.raises(SlotError):
        pages.buffers_of(other)
    pages.free(mine)
    with pytest.raises(SlotError, match="it was freed"):
        pages.free(mine)


@settings(max_examples=example_count(60), deadline=None)
@given(data=st.data(), blocks=st.integers(1, 40))
def test_any_mix_fills_the_arena_to_the_last_block(data: st.DataObject, blocks: int) -> None:
    """Pages of two blocks, states of five, side objects of one: one budget, whatever the order."""
    arena = HostArena(blocks * BLOCK, BLOCK)
    small = state_geometry([(0, "side", (3,), "uint8")], 8, pool=PoolName.INDEXER)
    pools = [HostPool(g, arena) for g in (PAGES, STATES, small)]
    held: list[tuple[HostPool, np.ndarray]] = []
    for _ in range(data.draw(st.integers(0, 12))):
        if held and data.draw(st.booleans()):
            pool, handles = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.free(data.draw(st.permutations(handles.tolist())))
            continue
        pool = data.draw(st.sampled_from(pools))
        n = data.draw(st.integers(0, 5))
        if n * pool.blocks_per_object > arena.available:
            with pytest.raises(PoolFullError):
                pool.alloc(n)
        else:
            held.append((pool, pool.alloc(n)))
    for pool in data.draw(st.permutations(pools[:2])):
        held.append((pool, pool.alloc(pool.available)))
        assert arena.available < pool.blocks_per_object
    held.append((pools[2], pools[2].alloc(pools[2].available)))
    assert arena.available == 0
    taken = np.concatenate([pool.blocks(handles).reshape(-1) for pool, handles in held])
    assert sorted(taken.tolist()) == list(range(blocks))
    for block in range(blocks):
        arena.view(block)[0] = block
    for pool in pools:
        check_pool(pool)
    for pool, handles in held:
        for row, views in zip(pool.blocks(handles), pool.buffers_of(handles), strict=True):
            assert b"".join(views)[::BLOCK] == bytes(row.tolist())
            assert len(views) == 1 + np.count_nonzero(np.diff(row) != 1), "adjacent blocks share a view"
        pool.free(handles)
    check_arena(arena)
    assert arena.available == blocks
    arena.close()
