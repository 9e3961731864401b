"""Fences from callers: waited for in the right way, or refused with one sentence and nothing held."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.transfer.machines import Simulated
from tests.transfer.rigs import Rig, rig_on
from tests.transfer.simulated_cuda import SimulatedEvent
from tiercache.core import PoolName
from tiercache.errors import ConfigError, TransferError
from tiercache.pools import DevicePool
from tiercache.transfer import CopyEngine, TransferEngine


@pytest.fixture(params=["cuda", "copy"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Rig, TransferEngine]]:
    """A rig and an engine for it: the CUDA one on a simulated device, and the one of the CPU."""
    machine = Simulated()
    rig = rig_on(machine)
    if request.param == "copy":
        for tensor in rig.kind.tensors.values():
            tensor.device = "cpu"
        rig.device = DevicePool.from_tensors(rig.kind.geometry, rig.kind.tensors)
        engine: TransferEngine = CopyEngine({PoolName.KV: rig.device}, {PoolName.KV: rig.host})
    else:
        engine = rig.engine()
    with engine:
        yield rig, engine
    rig.arena.close()


class Only:
    """An object with one way to wait for it. `over`: when that says so."""

    def __init__(self, way: str, over: threading.Event, **more: Any) -> None:
        ways: dict[str, Callable[..., object]] = {
            "synchronize": over.wait,
            "query": over.is_set,
            "wait": over.wait,
        }
        vars(self).update({way: ways[way]} | more)


def also(way: str, *others: str) -> Callable[[threading.Event], Only]:
    """With others beside the right one, that say at once that it is over."""
    return lambda over: Only(way, over, **dict.fromkeys(others, lambda *a: True))


class Code:
    """An integer of another library."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __index__(self) -> int:
        return self.handle


FENCES: dict[str, Callable[[threading.Event], Any]] = {
    "a function": lambda over: over.wait,
    "threading.Event": lambda over: over,
    "synchronize": also("synchronize"),
    "query": also("query"),
    "wait": also("wait"),
    "synchronize, and a wait that is for streams": also("synchronize", "query", "wait"),
    "query, and a wait that is for streams": also("query", "wait"),
    "no handle of CUDA's": lambda over: Only("synchronize", over, cuda_event=None),
    "a handle that is none": lambda over: Only("query", over, cuda_event=object()),
    "another library's event": lambda over: Only("synchronize", over, event_id=7),
}


@pytest.mark.parametrize("name", FENCES)
def test_it_is_waited_for(served: tuple[Rig, TransferEngine], name: str) -> None:
    rig, engine = served
    over, (handle,) = threading.Event(), rig.host.alloc(1).tolist()
    old = rig.held(handle)
    ticket = engine.store(rig.units([0], [handle]), after=[FENCES[name](over)])
    assert not ticket.wait(0.05)
    assert rig.held(handle) == old
    over.set()
    assert ticket.wait(30)
    assert ticket.error is None
    assert rig.held(handle) == rig.kind.slot(0)
    engine.order([FENCES[name](over)])


def test_handles_of_other_libraries_are_the_devices() -> None:
    machine = Simulated()
    rig = rig_on(machine)
    with rig.engine() as engine:
        for wrapped in (int, np.uint64, Code):
            stream = machine.stream()
            stream.sleep(0.1)
            event: SimulatedEvent = stream.event()

            class Event:
                cuda_event = wrapped(event.cuda_event)

            ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()), after=[Event()])
            assert not ticket.wait(0.02)
            assert ticket.wait(30)
            assert ticket.error is None
            assert event.query()
    rig.arena.close()


class Asynchronous:
    async def wait(self) -> None: ...


class Unrecorded:
    cuda_event = 0

    def synchronize(self) -> None: ...


class UnrecordedOfTorch:
    event_id = 0

    def synchronize(self) -> None: ...


class Negative:
    cuda_event = -1


async def coroutine() -> None: ...


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (
        [None],
        "a given fence is of type NoneType, which a thread cannot wait for; pass a recorded event",
    ),
    "a number": ([7], "a given fence is of type int"),
    "an object": ([object()], "a given fence is of type object"),
    "a class": ([threading.Event], "a given fence is the class Event"),
    "asyncio's event": ([asyncio.Event()], "a given fence is of type Event"),
    "a wait that must be awaited": ([Asynchronous()], "a given fence is of type Asynchronous"),
    "a function that must be awaited": ([coroutine], "a given fence is of type function"),
    "an event that was never recorded": ([Unrecorded()], "never recorded; record it in the stream"),
    "torch.Event, never recorded": ([UnrecordedOfTorch()], "never recorded"),
    "no handle": ([Negative()], "has -1 as its cuda_event, which is not the handle"),
    "a fence by itself": (threading.Event(), "`after` is a Event; give a sequence of fences"),
    "one among others": ([threading.Event(), None], "a given fence is of type NoneType"),
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
    ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()), after=(fence for fence in [over]))
    assert not ticket.wait(0.05)
    over.set()
    assert ticket.wait(30)


@pytest.mark.parametrize("answer", [0, None, 600, "yes"])
def test_an_answer_that_is_neither_yes_nor_no_fails_the_ticket(
    served: tuple[Rig, TransferEngine], answer: object
) -> None:
    rig, engine = served
    fence = Only("query", threading.Event())
    fence.query = lambda: answer  # type: ignore[attr-defined]
    ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()), after=[fence])
    assert ticket.wait(30)
    assert isinstance(ticket.error, TransferError)
    assert "must say True or False" in str(ticket.error)


def test_a_fence_that_is_asked_does_not_outlive_the_engine(served: tuple[Rig, TransferEngine]) -> None:
    rig, engine = served
    ticket = engine.store(
        rig.units([0], rig.host.alloc(1).tolist()), after=[Only("query", threading.Event())]
    )  # type: ignore[list-item]
    time.sleep(0.02)
    engine.close(timeout=0.05)
    assert ticket.wait(30)
    assert "closed" in str(ticket.error)
