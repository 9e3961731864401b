"""The token bucket of connections without a known caller: its rate, its most, its debt, and the usage of each origin."""

from __future__ import annotations

import pytest

from tiercache.daemon.allowance import Allowance

HERE, THERE = b"here", b"there"


@pytest.fixture
def allowance() -> Allowance:
    return Allowance(most=1000, per_second=100, now=0.0)


def test_it_grows_with_time_up_to_its_most(allowance: Allowance) -> None:
    allowance.take(HERE, 1000)
    assert [allowance.left(now) for now in (0.0, 1.0, 2.5, 100.0, 1000.0)] == [0, 100, 250, 1000, 1000]


def test_no_more_than_a_second_is_owed(allowance: Allowance) -> None:
    allowance.take(HERE, 1 << 30)
    assert [allowance.left(now) for now in (0.5, 1.0, 1.5)] == [0, 0, 50]


def test_what_was_taken_is_remembered_until_nothing_lacks(allowance: Allowance) -> None:
    allowance.take(HERE, 300)
    allowance.take(HERE, 100)
    assert allowance.left(1.0) == 700
    assert (allowance.had(HERE), allowance.had(THERE)) == (400, 0)
    assert allowance.left(10.0) == 1000
    assert allowance.had(HERE) == 0


def test_over_any_time_no_more_than_the_rate_is_taken_by_who_asks_before(allowance: Allowance) -> None:
    taken = 0
    for step in range(10_000):
        piece = min(allowance.left(step / 100), 7)
        allowance.take(HERE, piece)
        taken += piece
    assert taken <= 1000 + 100 * 100
