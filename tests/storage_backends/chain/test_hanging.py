"""Calls of a tier that hang: what becomes of their buffers and objects, and of the tier."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.storage_backends.chain.stores import Hanging, health, held
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import ClosedError
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem
from tiercache.testing.objects import content, fetch, key, payload, put, to_get, to_set

HIT, MISS, STORED, UNAVAILABLE = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.UNAVAILABLE
SIZE = 5000
BLOCK = 4096


def test_a_get_that_hangs_withholds_the_blocks_until_it_returns(chain_over):
    slow, below = Hanging(MemoryBackend(), "get"), MemoryBackend()
    chain = chain_over(slow, below, settings={0: {"deadline": 0.2}})
    arena = HostArena(8 * BLOCK, BLOCK, huge_pages=False)
    chain.attach(arena)
    put(chain, key("a"), payload("a", SIZE))
    chain.flush()
    blocks = arena.alloc(2)
    views = [arena.view(int(block)) for block in blocks]
    slow.hang()
    assert chain.get([GetItem(key("a"), views, SIZE)]) == [UNAVAILABLE], "another tier must not write there"
    for view in views:
        view.release()
    arena.free(blocks)
    assert arena.available == 6
    assert health(chain) == ["out", "serving"]
    assert fetch(chain, key("a"), SIZE) == payload("a", SIZE), "the tier below answers from now on"
    slow.release()
    until(lambda: arena.available == 8)
    until(lambda: health(chain) == ["serving", "serving"])
    chain.close()
    arena.close()


def test_a_get_that_hangs_does_not_touch_other_memory_later(chain_over):
    slow, below = Hanging(MemoryBackend(), "get"), MemoryBackend()
    chain = chain_over(slow, below, settings={0: {"deadline": 0.2}})
    put(chain, key("a"), payload("a", SIZE))
    chain.flush()
    slow.hang()
    item = to_get(key("a"), SIZE)
    assert chain.get([item]) == [HIT]
    assert content(item) == payload("a", SIZE)
    for view in item.buffers:
        view[:] = b"\x11" * view.nbytes
    slow.release()
    until(lambda: health(chain) == ["serving", "serving"])
    assert content(item) == b"\x11" * SIZE


def test_a_set_that_hangs_stores_what_it_was_given(chain_over):
    first, below = MemoryBackend(), MemoryBackend()
    slow = Hanging(first, "set")
    chain = chain_over(slow, below, settings={0: {"deadline": 0.2}})
    data = bytearray(payload("a", SIZE))
    slow.hang()
    item = SetItem(key("a"), [memoryview(data)], to_set(key("a"), bytes(data)).meta)
    assert chain.set([item]) == [STORED]
    data[:] = bytes(SIZE)
    slow.release()
    until(lambda: held(first, "a") == [True])
    assert fetch(first, key("a"), SIZE) == payload("a", SIZE)


def test_a_set_that_hangs_stores_nothing_else_from_attached_memory(chain_over):
    """The store reads the blocks when their owner has written something else there."""
    first, below = MemoryBackend(), MemoryBackend()
    slow = Hanging(first, "set")
    chain = chain_over(slow, below, settings={0: {"deadline": 0.2}})
    with closing(HostArena(2 * BLOCK, BLOCK, huge_pages=False)) as arena:
        chain.attach(arena)
        views = [arena.view(int(block)) for block in arena.alloc(2)]
        item = SetItem(key("a"), views, replace(to_set(key("a"), bytes(SIZE)).meta, checksum=b""))
        slow.hang()
        assert chain.set([item]) == [STORED]
        for view in views:
            view[:] = b"\x11" * BLOCK
        slow.release()
        until(lambda: held(first, "a") == [True])
        until(lambda: health(chain) == ["serving", "serving"])
        assert fetch(chain, key("a"), SIZE) == bytes(SIZE), "the tier below has what was meant"
        assert held(first, "a") == [False], "what is corrupt is dropped"
        chain.close()
        views.clear()


def test_a_deleted_object_does_not_come_back_with_a_set_that_hung(chain_over):
    first, below = MemoryBackend(), MemoryBackend()
    slow = Hanging(first, "set")
    chain = chain_over(slow, below, settings={0: {"deadline": 0.2}})
    slow.hang()
    assert put(chain, key("a"), payload("a", SIZE)) is STORED
    assert chain.delete([key("a")]) == [True]
    assert not any(tier.tick() for tier in chain.tiers for _ in range(100))
    assert health(chain) == ["out", "serving"], "until the set has returned"
    slow.release()
    until(lambda: health(chain) == ["serving", "serving"])
    until(lambda: held(first, "a") == [False])
    assert fetch(chain, key("a"), SIZE) is MISS


def test_a_copy_that_hangs_does_not_bring_a_deleted_object_back(chain_over):
    below = MemoryBackend()
    slow = Hanging(below, "set")
    chain = chain_over(MemoryBackend(), slow, settings={1: {"deadline": 0.3}})
    slow.hang()
    assert put(chain, key("a"), payload("a", SIZE)) is STORED
    until(lambda: chain.usage().tiers[1].waiting)
    assert chain.delete([key("a")]) == [True]
    slow.release()
    until(lambda: health(chain) == ["serving", "serving"])
    until(lambda: held(below, "a") == [False])


def test_closing_does_not_wait_for_what_hangs(chain_over):
    slow = Hanging(MemoryBackend(), "get")
    chain = chain_over(MemoryBackend(), slow, settings={1: {"deadline": 0.2}})
    slow.hang()
    assert fetch(chain, key("a"), SIZE) is UNAVAILABLE
    chain.close()
    with pytest.raises(ClosedError):
        chain.usage()
    slow.release()


def test_a_late_set_costs_no_object_that_it_does_not_have(chain_over):
    first = MemoryBackend()
    slow = Hanging(first, "set")
    chain = chain_over(slow, MemoryBackend(), settings={0: {"deadline": 0.2}})
    put(chain, key("b"), payload("b", SIZE))
    slow.hang()
    put(chain, key("a"), payload("a", SIZE))
    assert chain.delete([key("b")]) == [True]
    assert put(chain, key("b"), payload("b", SIZE)) is STORED
    slow.release()
    until(lambda: health(chain) == ["serving", "serving"])
    assert fetch(chain, key("b"), SIZE) == payload("b", SIZE)
    assert put(chain, key("c"), payload("c", SIZE)) is STORED
    assert fetch(chain, key("c"), SIZE) == payload("c", SIZE)
