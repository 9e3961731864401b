"""Policies by name, the cost of a miss, and `lru` by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.policy.rig import COSTS, STATE, PlainUnits, Rig, units
from tiercache.core import Tier
from tiercache.errors import ConfigError
from tiercache.policy import POLICIES, Costs, Lru, ModelProfile, Policy, policy_named
from tiercache.policy.costs import LOAD_FLOPS_PER_BYTE
from tiercache.policy.hvd import HitValueDensity


def order(policy: Policy, asked: PlainUnits) -> list[int]:
    return [int(row) for row in np.argsort(policy.rank(asked), kind="stable")]


# -- by name -----------------------------------------------------------------------------------


def test_every_policy_has_a_name_by_which_it_is_made():
    for name in POLICIES:
        assert policy_named(name).name == name
        assert policy_named(name, COSTS).name == name
        assert policy_named(name) is not policy_named(name)


@pytest.mark.parametrize("name", ["", "mru", "LRU", ":1", "lru:1", "hvd:0.5"])
def test_what_there_is_not_is_refused(name: str):
    with pytest.raises(ConfigError):
        policy_named(name)


POLICIES_OF_OTHERS = """\
from tiercache.policy import Lru


class Oldest(Lru):
    def __init__(self, costs, parameter):
        self.costs, self.parameter = costs, parameter


def nothing(costs, parameter):
    return None
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with policies, installed as pip would."""
    (tmp_path / "others_policies.py").write_text(POLICIES_OF_OTHERS)
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tiercache.policies]\noldest = others_policies:Oldest\nlru.oldest = others_policies:Oldest\n"
        "lru = others_policies:nothing\nnothing = others_policies:nothing\ngone = others_policies:gone\n"
        "lacking = a_package_that_nobody_has:make\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("others")
def test_another_package_adds_policies():
    for name, parameter in (("oldest", ""), ("oldest:", ""), ("oldest:1:2", "1:2"), ("lru:oldest:3", "3")):
        made: Any = policy_named(name, COSTS)
        assert (type(made).__name__, made.costs, made.parameter) == ("Oldest", COSTS, parameter)
    assert type(policy_named("lru")) is Lru


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", "is others_policies:nothing, which makes no Policy; fix its entry point"),
        ("gone", "cannot be imported: module 'others_policies' has no attribute 'gone'; install that"),
        ("lacking", "needs a package that is not installed (No module named 'a_package_that_nobody_has'); "),
        ("mru", "use lru, hvd, .*lacking, lpc, lru, lru:oldest, .*, or install the package that has it"),
    ],
)  # fmt: skip
def test_a_policy_of_another_package_that_cannot_be_had_gets_one_sentence(name: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence if ".*" in sentence else re.escape(sentence)):
        policy_named(name)


# -- lru ---------------------------------------------------------------------------------------


def test_lru_goes_by_the_last_access_alone():
    asked = units(
        last_access=[5, 2, 9, 7],
        hits=[9, 9, 0, 0],
        depth=[1, 2, 3, 4],
        children=[0, 3, 1, 2],
        nbytes=[8, 9, 1, 2],
        now=10,
    )
    assert order(Lru(), asked) == [1, 0, 3, 2]
    assert Lru().steady


# -- costs -------------------------------------------------------------------------------------


def test_what_a_hit_saves_is_relative_to_the_restorable_depth_above():
    """Attention is quadratic: the same replay is dearer further down."""
    asked = units(depth=[4, 10, 10, 0], replay=[4, 2, 10, 1], page_tokens=1)
    assert COSTS.saved(asked).tolist() == [40 + 16, 20 + 100 - 64, 100 + 100, 0]
    asked = units(depth=[4, 10], replay=[4, 2], page_tokens=64)
    assert COSTS.saved(asked).tolist() == [2560 + 256**2, 1280 + 640**2 - 512**2]


def test_a_unit_is_never_replayed_from_before_the_start():
    assert COSTS.saved(units(depth=[1, 2], replay=[5, 5], page_tokens=2)).tolist() == [20 + 4, 40 + 16]


def test_density_is_by_bytes_freed_and_a_load_where_the_tier_below_has_it():
    asked = units(depth=[4, 4, 4], replay=4, nbytes=[7, 14, 7], covered=[0, 0, 1], page_tokens=1)
    assert COSTS.density(asked).tolist() == [8, 4, LOAD_FLOPS_PER_BYTE]


def test_the_device_evicts_what_the_host_has_before_what_costs_a_computation():
    """Among states of one class: a load of 7,000 bytes is cheaper than two pages of this model."""
    costs = Costs(ModelProfile("m", 1, 1, flops_per_token=1e9, flops_per_context_token=0.0))
    for policy in (policy_named("gdsf", costs), HitValueDensity(costs)):
        rig = Rig(policy)
        for each in range(8):
            rig.request((each, 1), (2,))
        for each in (6, 7):
            rig.copy((each, 1))
        covered = {int(rig.index.locations(rig.match((each, 1)), 2).states[STATE].device) for each in (6, 7)}
        assert set(rig.evict_device(0, 2).freed[STATE].tolist()) == covered
        assert rig.index.evictable(Tier.HOST)[STATE] == 2


# -- seglen ------------------------------------------------------------------------------------


# -- marconi -----------------------------------------------------------------------------------
