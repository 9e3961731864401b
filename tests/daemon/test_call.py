"""What a thread uses is given back once, whenever the call that wanted it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from threading import Event

import pytest

from tiercache.daemon.budget import Budget
from tiercache.daemon.call import Threads


def run(scenario: Callable[[Threads, Budget, list[str]], Awaitable[None]]) -> list[str]:
    said: list[str] = []

    async def main() -> None:
        threads, workers = Threads(1), Budget(1)
        await scenario(threads, workers, said)
        assert await threads.close(10)
        await asyncio.sleep(0)
        assert workers.held == 0

    asyncio.run(main())
    return said


def test_work_that_is_done_lands_once() -> None:
    async def scenario(threads: Threads, workers: Budget, said: list[str]) -> None:
        landed, undo = (lambda: said.append("landed")), (lambda: said.append("undone"))
        assert await threads.start(workers, lambda a, b: a + b, 2, 3, landed=landed, undo=undo) == 5

    assert run(scenario) == ["landed"]


def test_work_that_was_cancelled_before_its_first_step_lands_once_and_is_undone() -> None:
    async def scenario(threads: Threads, workers: Budget, said: list[str]) -> None:
        task = threads.start(
            workers, lambda: said.append("worked"), landed=lambda: said.append("landed"), undo=lambda: said.append("undone")
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert run(scenario) == ["landed", "undone"]


def test_work_that_was_cancelled_as_it_waited_for_a_thread() -> None:
    async def scenario(threads: Threads, workers: Budget, said: list[str]) -> None:
        await workers.take(1)
        task = threads.start(
            workers, lambda: said.append("worked"), landed=lambda: said.append("landed"), undo=lambda: said.append("undone")
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        workers.give(1)

    assert run(scenario) == ["landed", "undone"]


def test_work_that_is_under_way_lands_when_it_has_ended() -> None:
    async def scenario(threads: Threads, workers: Budget, said: list[str]) -> None:
        began, end = Event(), Event()

        def work() -> None:
            began.set()
            end.wait(10)
            said.append("worked")

        task = threads.start(workers, work, landed=lambda: said.append("landed"), undo=lambda: said.append("undone"))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert said == []
        assert workers.held == 1, "its thread is busy"
        end.set()

    assert run(scenario) == ["worked", "landed", "undone"]


def test_a_failure_that_nobody_fetches_is_not_complained_about() -> None:
    async def scenario(threads: Threads, workers: Budget, said: list[str]) -> None:
        task = threads.start(workers, lambda: 1 // 0, landed=lambda: said.append("landed"), undo=lambda: said.append("undone"))
        await asyncio.wait([task])

    assert run(scenario) == ["landed", "undone"]
