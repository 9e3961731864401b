"""Promises of every transfer engine: the CUDA one on a simulated device, and the one of the CPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.transfer.rigs import SLOTS, Passed, Rig
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import ClosedError, ConfigError, SlotError
from tiercache.transfer import TransferEngine

Served = tuple[Rig, TransferEngine]


def test_wrong_numbers_are_refused_at_the_call(served: Served) -> None:
    rig, engine = served
    (handle,) = rig.host.alloc(1).tolist()
    for slots, handles in [([SLOTS], [handle]), ([-1], [handle]), ([0], [handle + 1]), ([0], [-2 - handle])]:
        with pytest.raises(SlotError):
            engine.store(rig.units(slots, handles))
        with pytest.raises(SlotError):
            engine.load(rig.units(handles, slots))
    with pytest.raises(ConfigError, match="pool mamba is not registered"):
        engine.store([CacheTransferUnits(PoolName.MAMBA, np.array([0]), np.array([0]))])
    for nothing in ([], rig.units([], [])):
        ticket = engine.load(nothing)
        assert ticket.wait(30)
        assert (ticket.layers, ticket.error) == ((), None)


def test_stores_and_loads_do_not_wait_for_each_other(served: Served) -> None:
    rig, engine = served
    handle, fence = rig.stored(engine, 0), threading.Event()
    store = engine.store(rig.units([1], rig.host.alloc(1).tolist()), after=[Passed(fence.wait)])
    assert engine.load(rig.units([handle], [2])).wait(30)
    assert not store.done()
    fence.set()


def test_a_fence_that_fails_fails_the_ticket(served: Served) -> None:
    rig, engine = served
    handle = rig.stored(engine, 0)
    failed = engine.load(rig.units([handle], [1]), after=[Passed(lambda: 1 / 0)])
    assert failed.wait(30)
    assert str(failed.error) == "a load failed before its first layer: division by zero"
    names: list[str] = []
    ticket = engine.store(rig.units([0], [handle]), after=[Passed(lambda: None)])
    ticket.add_done_callback(lambda t: names.append(threading.current_thread().name))
    assert ticket.wait(30)
    engine.close()
    assert names in (["tiercache-store"], [threading.current_thread().name])


def test_closing_finishes_what_was_asked_for(served: Served) -> None:
    rig, engine = served
    tickets = [engine.store(rig.units([slot], rig.host.alloc(1).tolist())) for slot in range(4)]
    engine.close()
    engine.close()
    assert all(t.done() and t.error is None for t in tickets)
    for call in (engine.store, engine.load):
        with pytest.raises(ClosedError):
            call(rig.units([], []))


def test_closing_gives_up_at_its_deadline(served: Served) -> None:
    rig, engine = served
    handle, fence = rig.stored(engine, 0), threading.Event()
    running = engine.load(rig.units([handle], [1]), after=[Passed(fence.wait)])
    waiting = engine.load(rig.units([handle], [2]))
    engine.close(timeout=0.05)
    assert waiting.wait(0)
    assert "closed before this transfer began" in str(waiting.error)
    assert not running.done()
    fence.set()
    engine.close(timeout=30)
    assert running.wait(30)
    assert "the transfer engine was closed" in str(running.error)


def test_closing_from_a_callback(served: Served) -> None:
    rig, engine = served
    closed = threading.Event()
    ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()))
    ticket.add_done_callback(lambda t: (engine.close(), closed.set()))
    assert closed.wait(30)


def test_memory_stays_mapped_while_a_copy_runs(served: Served) -> None:
    rig, engine = served
    handle, fence = rig.stored(engine, 0), threading.Event()
    ticket = engine.load(rig.units([handle], [3]), after=[Passed(fence.wait)])
    rig.arena.close()
    fence.set()
    assert ticket.wait(30)
    assert ticket.error is None
    rig.kind.move([0], [3])
    assert rig.kind.agrees()
