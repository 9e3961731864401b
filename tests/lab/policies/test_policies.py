"""Rivals by name, and `seglen` and `marconi` by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policy.rig import COSTS, units
from tiercache.errors import ConfigError
from tiercache.policy import policy_named
from tiercache_lab.policies import MAIN, RIVALS, VARIANTS


def test_every_rival_has_a_name_by_which_it_is_made():
    for name in (*MAIN, *RIVALS, *VARIANTS):
        assert policy_named(name).name == name
        assert policy_named(name, COSTS) is not policy_named(name, COSTS)


@pytest.mark.parametrize("name", [*(f"{name}:1" for name in (*MAIN, *RIVALS)), "seglen:additive:0.5"])
def test_what_there_is_not_is_refused(name: str):
    with pytest.raises(ConfigError, match=r"has no parameter|is not a number"):
        policy_named(name)


def test_in_its_additive_reading_seglen_adds_recency_in_full():
    asked = units(replay=[1, 5, 9], last_access=[10, 30, 20], nbytes=[3, 1, 2], hits=[9, 0, 4], now=40)
    additive = policy_named("seglen:additive")
    assert additive.rank(asked).tolist() == pytest.approx([0.0, 0.85 * 0.5 + 1.0, 0.85 + 0.5])
    assert additive.needs_states


def test_the_two_readings_of_seglen_disagree():
    """The middle one is the least recent by far and has the most to replay."""
    asked = units(replay=[1, 9, 5], last_access=[30, 10, 20])
    assert np.argsort(policy_named("seglen").rank(asked)).tolist() == [0, 2, 1]
    assert np.argsort(policy_named("seglen:additive").rank(asked)).tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, [1.0, 0.5, 0.5]),
        ({"children": [1, 2, 7]}, [1.0, np.inf, np.inf]),
        ({"last_access": [20, 18, 16]}, [1.0, 1 / 3 + 1 / 6, 0.5]),
    ],
)
def test_marconi_adds_recency_and_flops_by_byte_and_lets_branches_go_last(columns, expected):
    """56, 56 and 200 FLOPs over 56, 28 and 50 bytes: 1, 2 and 4 FLOPs a byte; 1, 2 and 4 ticks old."""
    three = {"depth": [4, 10, 10], "replay": [4, 2, 10], "nbytes": [56, 28, 50], "last_access": [19, 18, 16]}
    asked = units(**three | columns, now=20, page_tokens=1)
    assert policy_named("marconi", COSTS).rank(asked).tolist() == pytest.approx(expected)
