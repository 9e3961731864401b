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
from tiercache.policy.base import LOAD_FLOPS_PER_BYTE
from tiercache.policy.hvd import HitValueDensity
from tiercache_lab.policies import MAIN, RIVALS


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
        last_access=[5, 2, 9, 7], hits=[9, 9, 0, 0], depth=[1, 2, 3, 4], children=[0, 3, 1, 2],
        nbytes=[8, 9, 1, 2], now=10,
    )  # fmt: skip
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
    rig = Rig(HitValueDensity(costs))
    for each in range(8):
        rig.request((each, 1), (2,))
    for each in (6, 7):
        rig.copy((each, 1))
    covered = {int(rig.index.locations(rig.match((each, 1)), 2).states[STATE].device) for each in (6, 7)}
    assert set(rig.evict_device(0, 2).freed[STATE].tolist()) == covered
    assert rig.index.evictable(Tier.HOST)[STATE] == 2


# -- units on which a hit is expected


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
