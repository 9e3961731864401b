"""Ranks of units on which a hit is expected."""

import numpy as np
import pytest

from tests.policy.rig import COSTS, units
from tiercache.policy import policy_named
from tiercache_lab.policies import MAIN, RIVALS

RECENCY = ["lru", "seglen:additive", "marconi"]


def ranks(policy, **columns):
    given = {"depth": 4, "replay": 4, "nbytes": 100} | columns
    return policy_named(policy, COSTS).rank(units(**given))


@pytest.mark.parametrize("policy", sorted((*MAIN, *RIVALS)))
def test_an_expected_hit_never_lowers_a_rank_and_no_rank_is_nan(policy):
    expected = [0, 1, 900, 999, 1000, 1001, 1010, 5000, 1 << 40]
    plain = ranks(policy, now=1000, last_access=[900] * 9)
    hinted = ranks(policy, now=1000, last_access=[900] * 9, expected=expected)
    assert np.isfinite(hinted).all()
    assert (hinted - hinted[0] >= plain - plain[0] - 1e-12).all()


@pytest.mark.parametrize("policy", RECENCY)
def test_recency_counts_from_the_expected_hit(policy):
    """The unit with the older access and the later expectation ranks highest."""
    order = np.argsort(ranks(policy, now=100, last_access=[90, 10, 50], expected=[0, 99, 0]))
    assert order.tolist() == [2, 0, 1]


def test_hvd_values_a_unit_by_the_time_that_is_left():
    """Last access at tick 0, now 1,000; expected in 4 ticks, in 100, and long ago."""
    near, far, given_up, none = ranks("hvd", now=1000, last_access=0, expected=[1004, 1100, 400, 0])
    assert near > far > none
    assert given_up == none
    assert near / far == pytest.approx(25)


def test_hvd_gives_up_after_twice_the_announced_time():
    """Announced at tick 900 for tick 950: the value falls until tick 1,000, and then is the learned one."""
    at = [
        ranks("hvd", now=now, last_access=900, expected=[950, 0]) for now in (949, 951, 960, 990, 1000, 1001)
    ]
    values = [hinted / plain for hinted, plain in at]
    assert values[0] > 1
    assert [round(hinted, 6) for hinted, _ in at[1:4]] == sorted(
        (round(hinted, 6) for hinted, _ in at[1:4]), reverse=True
    )
    assert values[-1] == 1


def test_an_expected_hit_does_not_change_what_hvd_learns():
    learned = []
    for expected in (0, 1010):
        policy = policy_named("hvd", COSTS)
        policy.learn(units(now=1000, last_access=[900, 950], expected=expected), units(count=0, now=1000))
        learned.append(policy.rank(units(now=1000, last_access=[900, 950], nbytes=100)).tolist())
    assert learned[0] == learned[1]
