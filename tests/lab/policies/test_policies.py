"""Rivals by name, and `seglen:additive` by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policy.rig import COSTS, units
from tiercache.errors import ConfigError
from tiercache.policy import policy_named
from tiercache_lab.policies import RIVALS, VARIANTS


def test_every_rival_has_a_name_by_which_it_is_made():
    for name in (*RIVALS, VARIANTS[0]):
        assert policy_named(name).name == name
        assert policy_named(name, COSTS) is not policy_named(name, COSTS)


@pytest.mark.parametrize("name", [*(f"{name}:1" for name in RIVALS), "seglen:additive:0.5"])
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
