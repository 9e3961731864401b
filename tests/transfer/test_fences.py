"""Fences from callers: waited for in the right way, or refused with one sentence and nothing held."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.transfer.machines import Simulated
from tests.transfer.rigs import Rig, rig_on
from tests.transfer.simulated_cuda import SimulatedEvent
from tiercache.errors import ConfigError
from tiercache.transfer import TransferEngine


class Code:
    """An integer of another library."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __index__(self) -> int:
        return self.handle


class Event:
    """An event that another library has recorded; `over`: when that says so."""

    def __init__(self, over: threading.Event, **more: Any) -> None:
        self.query, self.synchronize = over.is_set, over.wait
        vars(self).update(more)


@pytest.mark.parametrize("more", [{}, {"cuda_event": None}, {"cuda_event": object()}, {"event_id": 7}])
def test_it_is_waited_for(served: tuple[Rig, TransferEngine], more: dict[str, Any]) -> None:
    rig, engine = served
    over, (handle,) = threading.Event(), rig.host.alloc(1).tolist()
    old = rig.held(handle)
    ticket = engine.store(rig.units([0], [handle]), after=[Event(over, **more)])
    assert not ticket.wait(0.05)
    assert rig.held(handle) == old
    over.set()
    assert ticket.wait(30)
    assert ticket.error is None
    assert rig.held(handle) == rig.kind.slot(0)
    engine.order([Event(over, **more)])


def test_handles_of_other_libraries_are_the_devices() -> None:
    machine = Simulated()
    rig = rig_on(machine)
    with rig.engine() as engine:
        for wrapped in (int, np.uint64, Code):
            stream = machine.stream()
            stream.sleep(0.1)
            event: SimulatedEvent = stream.event()

            known = Event(threading.Event(), cuda_event=wrapped(event.cuda_event))
            ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()), after=[known])
            assert not ticket.wait(0.02)
            assert ticket.wait(30)
            assert ticket.error is None
            assert event.query()
    rig.arena.close()


OVER = threading.Event()
OVER.set()
REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (
        [None],
        "a given fence is of type NoneType, which cannot be waited for; pass a recorded event",
    ),
    "a number": ([7], "a given fence is of type int"),
    "an event of threads": ([OVER], "a given fence is of type Event"),
    "an event that was never recorded": (
        [Event(OVER, cuda_event=0)],
        "never recorded; record it in the stream",
    ),
    "torch.Event, never recorded": ([Event(OVER, event_id=0)], "never recorded"),
    "no handle": ([Event(OVER, cuda_event=-1)], "has -1 as its cuda_event, which is not the handle"),
    "a fence by itself": (Event(OVER), "`after` is a Event; give a sequence of fences"),
    "one among others": ([Event(OVER), None], "a given fence is of type NoneType"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_at_the_call_and_nothing_is_held(served: tuple[Rig, TransferEngine], name: str) -> None:
    rig, engine = served
    after, message = REFUSED[name]
    (handle,) = rig.host.alloc(1).tolist()
    for call, units in ((engine.store, rig.units([0], [handle])), (engine.load, rig.units([handle], [0]))):
        with pytest.raises(ConfigError, match=message) as caught:
            call(units, after=after)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=message):
        engine.check_fences(after)
    ticket = engine.store(rig.units([0], [handle]))  # nothing is in its way
    assert ticket.wait(30)
    assert ticket.error is None


def test_fences_that_can_be_asked_for_once_are_not_lost(served: tuple[Rig, TransferEngine]) -> None:
    rig, engine = served
    over = threading.Event()
    ticket = engine.store(
        rig.units([0], rig.host.alloc(1).tolist()), after=(fence for fence in [Event(over)])
    )
    assert not ticket.wait(0.05)
    over.set()
    assert ticket.wait(30)
