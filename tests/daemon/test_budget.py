"""Budgets beside a plain model: never too much held, nobody waits in vain, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tiercache.daemon.budget import Budget

STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "try", "give", "cancel"]), st.integers(0, 2), st.integers(0, 12)),
    min_size=1,
    max_size=40,
)


def in_a_loop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(scenario)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(scenario(*arguments, **named))

    return run


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@settings(max_examples=example_count(150), deadline=None)
@given(STEPS)
@in_a_loop
async def test_random_takers(steps: list[tuple[str, int, int]]) -> None:
    total = Budget(20)
    principals = [Budget(15, total), Budget(20, total)]
    clients = [Budget(8, principals[0]), Budget(12, principals[0]), Budget(12, principals[1])]
    held: list[tuple[Budget, int]] = []
    waiting: list[tuple[Budget, int, asyncio.Task[None]]] = []
    for what, who, units in steps:
        client = clients[who]
        if what == "take" and units <= client.largest:
            waiting.append((client, units, asyncio.create_task(client.take(units))))
        elif what == "try" and client.try_take(units):
            held.append((client, units))
        elif what == "give" and held:
            budget, many = held.pop(units % len(held))
            budget.give(many)
        elif what == "cancel" and waiting:
            waiting.pop(units % len(waiting))[2].cancel()
        await settle()
        held += [(budget, many) for budget, many, task in waiting if task.done()]
        waiting = [entry for entry in waiting if not entry[2].done()]
        for budget in clients:
            assert budget.held == sum(many for b, many in held if b is budget) <= budget.limit
        assert principals[0].held == clients[0].held + clients[1].held <= 15
        assert total.held == sum(c.held for c in clients) <= 20
        if waiting:  # the first in line is served as soon as it can be
            budget, many, _ = waiting[0]
            its = principals[1] if budget is clients[2] else principals[0]
            assert any(each.held + many > each.limit for each in (budget, its, total))
    for _, _, task in waiting:
        task.cancel()
    await settle()
    for budget, many in held:
        budget.give(many)
    assert total.held == 0
    assert total.try_take(total.limit), "nobody waits any more"


@in_a_loop
async def test_who_waits_for_a_client_does_not_hold_up_another() -> None:
    total = Budget(10)
    one, other = Budget(4, total), Budget(4, total)
    await one.take(4)
    late = asyncio.create_task(one.take(1))
    await settle()
    await asyncio.wait_for(other.take(3), 30)
    assert not late.done()
    one.give(4)
    await asyncio.wait_for(late, 30)


@in_a_loop
async def test_a_large_wish_is_not_starved_by_small_ones() -> None:
    total = Budget(10)
    one, other = Budget(10, total), Budget(10, total)
    await one.take(5)
    large = asyncio.create_task(other.take(8))
    await settle()
    assert not one.try_take(1), "somebody waits for the total"
    one.give(5)
    await asyncio.wait_for(large, 30)


@in_a_loop
async def test_what_can_never_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 3 can be taken"):
        await Budget(5, Budget(3)).take(4)


@in_a_loop
async def test_a_waiter_that_gives_up_as_it_is_served_gives_back() -> None:
    total = Budget(1)
    await total.take(1)
    waiter = asyncio.create_task(total.take(1))
    await settle()
    total.give(1)
    waiter.cancel()
    await settle()
    assert total.held == (0 if waiter.cancelled() else 1)
    assert waiter.cancelled()


@in_a_loop
async def test_what_a_thread_gives_back_goes_to_those_who_wait() -> None:
    """A waiter that was cancelled as a thread gave it units gives them back."""
    total = Budget(2)
    part = Budget(2, total)
    assert part.try_take(2)
    waiting = [asyncio.create_task(part.take(1)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.to_thread(part.give, 1)
    assert total.held == 2, "the first waiter has it, before anybody else"
    waiting[1].cancel()
    giving = Thread(target=part.give, args=(1,))
    giving.start()
    giving.join()
    for task in (waiting[0], waiting[2]):
        await asyncio.wait_for(task, 30)
    assert total.held == 2
    part.give(2)
    assert total.held == 0
