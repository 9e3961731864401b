"""Admissions that tasks wait for, under asyncio and uvloop: nothing blocks, nothing is left behind."""

import asyncio
import threading

import pytest
import uvloop
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import Engine, P, all_is_free, prompt
from tests.storage.late import Late
from tiercache.core import Tier
from tiercache.errors import AdmissionError, PoolFullError

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
PROMPTS = [prompt(n, n + 1, 9) for n in (1, 3, 5)]


def kept(operations=(), wait=lambda: None):
    """An engine whose storage alone has the prompts, and waits in these operations."""
    engine = Engine(Late(MemoryBackend(), operations, wait), pages=32, states=16)
    for one in PROMPTS:
        engine.keep(one, Tier.DEVICE, Tier.HOST)
    return engine


async def restored(admission):
    return (await admission).depth


def admit(engine, tokens):
    return engine.controller.admit(engine.controller.lookup(tokens), states=2)


@LOOPS
def test_tasks_wait_for_their_restores_while_others_run(run):
    gate = threading.Event()
    engine = kept()
    engine.controller.lookup(PROMPTS[0])  # the threads are there
    storage, before = engine.context.storage.backend, threading.active_count()
    storage.operations, storage.wait = ("get",), gate.wait

    async def serve(tokens):
        async with admit(engine, tokens) as admission:
            return engine.restore(admission, tokens)

    async def main():
        async with engine.controller as controller:
            assert controller is engine.controller
            tasks = [asyncio.create_task(serve(tokens)) for tokens in PROMPTS]
            for _ in range(50):  # other tasks have their turns while the store hangs
                await asyncio.sleep(0.002)
            assert not any(task.done() for task in tasks)
            assert threading.active_count() <= before + 3
            gate.set()
            assert await asyncio.gather(*tasks) == [2 * P] * 3
            # What ends in the background is applied without a call.
            while engine.context.under_way:
                await asyncio.sleep(0.01)
            all_is_free(engine)

    run(main())
    assert engine.controller.close()


@LOOPS
@pytest.mark.parametrize("operation", ["exists", "get"])
def test_a_task_that_is_cancelled_leaves_nothing_behind(run, operation):
    gate = threading.Event()
    engine = kept()
    storage = engine.context.storage.backend

    async def serve(tokens, at):
        async with admit(engine, tokens) as admission:
            engine.restore(admission, tokens)
            at.set()
            await asyncio.sleep(60)

    async def main():
        computing = asyncio.Event()
        tasks = [asyncio.create_task(serve(PROMPTS[0], computing))]
        await computing.wait()
        storage.operations, storage.wait = (operation,), gate.wait
        tasks += [
            asyncio.create_task(serve(PROMPTS[1], computing)),
            asyncio.create_task(restored(admit(engine, PROMPTS[2]))),
        ]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(found, asyncio.CancelledError)
            for found in await asyncio.gather(*tasks, return_exceptions=True)
        )
        gate.set()
        all_is_free(engine)

    run(main())


def test_a_wait_that_raises_releases_and_the_end_of_the_controller_ends_waits():
    engine = kept()

    async def main():
        async with admit(engine, PROMPTS[0]) as admission:
            with pytest.raises(PoolFullError):
                admit(engine, prompt(*range(40)))
            engine.controller.release(admission)  # an end of its own is no second one
        gate = threading.Event()
        storage = engine.context.storage.backend
        storage.operations, storage.wait = ("get",), gate.wait
        async with engine.controller:
            task = asyncio.create_task(restored(admit(engine, PROMPTS[1])))
            await asyncio.sleep(0.01)
            gate.set()
        with pytest.raises(AdmissionError, match="released already"):
            await task

    asyncio.run(main())
