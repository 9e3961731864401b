"""Every policy's formula, by hand, and what `hvd` learns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.core import PoolName, Tier
from tiercache.errors import ConfigError
from tiercache.policy import (
    DEFAULT_PROFILE,
    POLICIES,
    CheckpointKind,
    Costs,
    Lru,
    ModelProfile,
    Policy,
    Reuse,
    Units,
    policy_named,
    profile_named,
)
from tiercache.policy.base import Ranks
from tiercache.policy.costs import LOAD_FLOPS_PER_BYTE
from tiercache.policy.gdsf import Gdsf
from tiercache.policy.hazard import _DECAY, Hazard
from tiercache.policy.hvd import HitValueDensity
from tiercache.policy.marconi import Marconi
from tiercache.policy.portfolio import Portfolio
from tiercache.policy.seglen import SegLen, normalised
from tiercache.testing.policy_rig import PlainUnits, Rig, reuse_of, units

COSTS = Costs(ModelProfile("m", kv_bytes_per_token=1, state_bytes=1, flops_per_token=10.0, flops_per_context_token=2.0))
"""Tokens [start, end) cost 10 (end - start) + end^2 - start^2."""
END, PROMPT, BRANCH = CheckpointKind.END, CheckpointKind.PROMPT, CheckpointKind.BRANCH
STATE = PoolName.MAMBA


def order(policy: Policy, asked: PlainUnits) -> list[int]:
    return [int(row) for row in np.argsort(policy.rank(asked), kind="stable")]


# -- by name -----------------------------------------------------------------------------------


def test_every_policy_has_a_name_by_which_it_is_made():
    for name in POLICIES:
        assert policy_named(name).name == name
        assert policy_named(name, COSTS).name == name
        assert policy_named(name) is not policy_named(name)


def test_a_parameter_follows_the_name():
    asked = units(replay=[1, 2, 9], last_access=[3, 9, 1], depth=[5, 7, 9], nbytes=[4, 5, 6], now=9)
    np.testing.assert_array_equal(policy_named("seglen:0.3").rank(asked), SegLen(0.3).rank(asked))
    np.testing.assert_array_equal(policy_named("seglen:additive").rank(asked), SegLen(additive=True).rank(asked))
    assert policy_named("seglen:additive").needs_states
    np.testing.assert_array_equal(policy_named("marconi:1.5", COSTS).rank(asked), Marconi(COSTS, 1.5).rank(asked))
    np.testing.assert_array_equal(policy_named("marconi").rank(asked), Marconi(Costs(profile_named(DEFAULT_PROFILE))).rank(asked))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mru",
        "LRU",
        ":1",
        "seglen:x",
        "seglen:2",
        "seglen:nan",
        "marconi:-1",
        "marconi:inf",
        "lru:1",
        "seglen:convex",
        "marconi:additive",
        "seglen:additive:0.5",
    ],
)
def test_what_there_is_not_is_refused(name: str):
    with pytest.raises(ConfigError):
        policy_named(name)


# -- lru ---------------------------------------------------------------------------------------


def test_lru_goes_by_the_last_access_alone():
    asked = units(last_access=[5, 2, 9, 7], hits=[9, 9, 0, 0], depth=[1, 2, 3, 4], children=[0, 3, 1, 2], nbytes=[8, 9, 1, 2], now=10)
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


# -- seglen ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(0.85, [0.0, 0.85 * 0.5 + 0.15, 0.85 + 0.15 * 0.5]), (0.0, [0.0, 1.0, 0.5]), (1.0, [0.0, 0.5, 1.0]), (0.5, [0.0, 0.75, 0.75])],
)
def test_seglen_weighs_replay_against_recency(weight: float, expected: list[float]):
    asked = units(replay=[1, 5, 9], last_access=[10, 30, 20], nbytes=[3, 1, 2], hits=[9, 0, 4], now=40)
    assert SegLen(weight).rank(asked).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weight", "expected"), [(0.85, [0.0, 0.85 * 0.5 + 1.0, 0.85 + 0.5]), (0.0, [0.0, 1.0, 0.5]), (1.0, [0.0, 1.5, 1.5])]
)
def test_in_its_additive_reading_seglen_adds_recency_in_full(weight: float, expected: list[float]):
    asked = units(replay=[1, 5, 9], last_access=[10, 30, 20], nbytes=[3, 1, 2], hits=[9, 0, 4], now=40)
    assert SegLen(weight, additive=True).rank(asked).tolist() == pytest.approx(expected)


def test_the_two_readings_of_seglen_disagree():
    """The middle one is the least recent by far and has the most to replay."""
    asked = units(replay=[1, 9, 5], last_access=[30, 10, 20])
    assert order(SegLen(), asked) == [0, 2, 1]
    assert order(SegLen(additive=True), asked) == [1, 2, 0]


def test_seglen_s_default_weight():
    asked = units(replay=[1, 5, 9], last_access=[10, 30, 20])
    np.testing.assert_array_equal(SegLen().rank(asked), SegLen(0.85).rank(asked))


@pytest.mark.parametrize("weight", [-0.01, 1.01, float("nan"), float("inf"), -float("inf")])
def test_seglen_has_a_weight_from_0_to_1(weight: float):
    with pytest.raises(ConfigError, match="weight"):
        SegLen(weight)


def test_what_is_equal_is_normalised_to_0():
    assert normalised(np.array([7, 7, 7])).tolist() == [0, 0, 0]
    assert normalised(np.array([2, 4, 3])).tolist() == [0, 1, 0.5]
    column = np.array([1.0, 2.0])
    normalised(column)
    assert column.tolist() == [1.0, 2.0]


# -- marconi -----------------------------------------------------------------------------------


def three(**columns) -> PlainUnits:
    """56, 56 and 200 FLOPs over 56, 28 and 50 bytes: 1, 2 and 4 FLOPs a byte; 1, 2 and 4 ticks old."""
    return units(
        **{"depth": [4, 10, 10], "replay": [4, 2, 10], "nbytes": [56, 28, 50], "last_access": [19, 18, 16]} | columns, now=20, page_tokens=1
    )


@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])
def test_marconi_adds_recency_and_flops_by_byte(alpha: float):
    recency, efficiency = [1.0, 1 / 3, 0.0], [0.0, 1 / 3, 1.0]
    expected = [r + alpha * e for r, e in zip(recency, efficiency, strict=True)]
    assert Marconi(COSTS, alpha).rank(three()).tolist() == pytest.approx(expected)


def test_marconi_s_default_alpha():
    np.testing.assert_array_equal(Marconi(COSTS).rank(three()), Marconi(COSTS, 0.5).rank(three()))
    assert Marconi(COSTS).alpha == 0.5


def test_for_marconi_branches_go_last():
    assert Marconi(COSTS).rank(three(children=[1, 2, 7])).tolist() == [pytest.approx(1.0), np.inf, np.inf]


def test_for_marconi_an_age_of_nothing_is_one_tick():
    assert Marconi(COSTS, 0).rank(units(last_access=[20, 19, 16], now=20)).tolist() == [1, 1, 0]


def test_marconi_counts_the_bytes_that_go_and_not_those_of_the_path():
    """Two units of the same path length and cost; one frees half as much."""
    asked = units(depth=10, replay=10, nbytes=[100, 50], now=5)
    assert Marconi(COSTS, 1.0).rank(asked).tolist() == [0, 1]
    assert Marconi(COSTS, 1.0).rank(units(depth=[10, 1000], replay=1, nbytes=1, page_tokens=1)).tolist() == [0, 1]


@pytest.mark.parametrize("alpha", [-0.01, float("nan"), float("inf")])
def test_marconi_has_an_alpha_from_0(alpha: float):
    with pytest.raises(ConfigError, match="alpha"):
        Marconi(COSTS, alpha)


# -- gdsf --------------------------------------------------------------------------------------


def test_gdsf_is_frequency_by_density():
    asked = units(depth=4, replay=4, nbytes=[7, 14, 7, 7], hits=[0, 0, 3, 0], children=[0, 0, 2, 1], page_tokens=1)
    assert Gdsf(COSTS).rank(asked).tolist() == pytest.approx([8, 4, 32, 0.08])


def test_for_gdsf_what_the_tier_below_holds_goes_first_and_by_frequency():
    asked = units(depth=4, replay=4, nbytes=[7, 7, 70, 7], hits=[1, 0, 2, 0], children=[0, 0, 0, 1], covered=1, page_tokens=1)
    ranks = Gdsf(COSTS).rank(asked)
    assert list(np.argsort(ranks)) == [3, 1, 0, 2]
    dear, lost = Gdsf(COSTS).rank(units(depth=900, replay=900, nbytes=1, hits=5, covered=[1, 0])), Gdsf(COSTS).rank(units(nbytes=2**40))
    assert dear[0] < lost[0] < dear[1]


def test_for_gdsf_demotions_age_what_is_demoted_and_not_what_would_be_lost():
    """A small upper tier changes all the time. What lies below it is as young as before."""
    policy = Gdsf(COSTS)

    def ranks(covered: int, now: int) -> list[float]:
        asked = units(depth=4, replay=4, nbytes=7, hits=[0, 7], last_access=[now, 0], covered=covered, page_tokens=1, now=now)
        return list(policy.rank(asked))

    assert ranks(0, 0) == [8, 64]
    for now in range(1, 101):
        policy.evicted(ranks(1, now)[0])
    assert ranks(0, 101) == [8, 64]
    fresh, popular_once = ranks(1, 101)
    assert fresh > popular_once
    for now in range(101, 201):
        policy.evicted(ranks(0, now)[0])
    fresh, popular_once = ranks(0, 201)
    assert fresh > popular_once
    assert Gdsf(COSTS).rank(units(covered=1, last_access=[0, 300], now=300))[0] < 0


def test_gdsf_s_base_is_that_of_the_last_access_and_only_rises():
    policy = Gdsf(COSTS)

    def ranks(now: int, *last_access: int) -> list[float]:
        return list(policy.rank(units(depth=1, replay=1, nbytes=11, last_access=list(last_access), page_tokens=1, now=now)))

    assert ranks(5, 0, 5) == [1, 1]
    policy.evicted(100.0)
    assert ranks(7, 0, 4, 5, 6, 7) == [1, 1, 101, 101, 101]
    policy.evicted(30.0)
    assert ranks(8, 0, 4, 5, 6, 7, 8) == [1, 1, 101, 101, 101, 101]
    policy.evicted(101.0)
    policy.evicted(102.0)
    assert ranks(9, 4, 5, 7, 8, 9) == [1, 101, 101, 103, 103]


def test_for_gdsf_a_dear_unit_that_is_not_used_is_overtaken():
    """It is worth a hundred times what the others are: it stays while a hundred generations of them go, and no longer."""
    policy = Gdsf(COSTS)
    cheap = 10
    alive = {"dear": 0} | {f"first {n}": 0 for n in range(cheap)}
    now = gone = 0
    while "dear" in alive:
        now, gone = now + 1, gone + 1
        alive[f"new {now}"] = now
        nbytes = [1 if name == "dear" else 100 for name in alive]
        ranks = policy.rank(units(depth=1, replay=1, nbytes=nbytes, last_access=list(alive.values()), now=now, page_tokens=1))
        least = int(np.argmin(ranks))
        policy.evicted(float(ranks[least]))
        del alive[list(alive)[least]]
        assert gone < 2000
    assert gone > 100


def test_for_gdsf_a_superseded_state_s_hits_count_for_nothing():
    """In a session each turn hits the state of the one before, once; what is left of the session has the hits of all of them."""
    asked = units(depth=4, replay=4, nbytes=7, hits=[1, 0, 50, 0, 0], lineage=[0, 0, 49, 0, 9], children=[1, 1, 1, 0, 2], page_tokens=1)
    ranks = Gdsf(COSTS).rank(asked)
    assert ranks.tolist() == pytest.approx([0.08, 0.08, 0.08, 8, 8])


@pytest.mark.parametrize("kind", [BRANCH, CheckpointKind.GHOST])
@pytest.mark.parametrize("hits", [0, 1, 5])
def test_for_gdsf_a_state_at_a_branch_is_not_superseded_by_the_one_continuation_that_is_left(kind: CheckpointKind, hits: int):
    asked = units(depth=4, replay=4, nbytes=7, hits=hits, children=[0, 1, 2], checkpoint=kind, page_tokens=1)
    assert Gdsf(COSTS).rank(asked).tolist() == [8 * (1 + hits)] * 3


@pytest.mark.parametrize("kind", [PROMPT, END, CheckpointKind.INTERVAL, CheckpointKind.NONE])
def test_for_gdsf_what_is_hit_more_often_than_its_session_goes_on_is_not_superseded(kind: CheckpointKind):
    """A prompt that is repeated hits the state at its end, time and again, with the same answer behind it."""
    asked = units(depth=4, replay=4, nbytes=7, hits=[1, 2, 4, 5], lineage=[0, 0, 3, 3], children=1, checkpoint=kind, page_tokens=1)
    assert Gdsf(COSTS).rank(asked).tolist() == pytest.approx([0.08, 24, 0.08, 48])


def test_for_gdsf_seven_hits_count():
    """What was popular once goes after so many generations, and not after as many as it has hits."""
    asked = units(depth=4, replay=4, nbytes=7, hits=[6, 7, 8, 10**6], checkpoint=BRANCH, children=[2, 1, 0, 1], page_tokens=1)
    assert Gdsf(COSTS).rank(asked).tolist() == [56, 64, 64, 64]


def test_gdsf_remembers_a_bounded_number_of_steps_and_the_latest_best():
    policy = Gdsf(COSTS)

    def rank(last_access: int, now: int) -> float:
        return float(policy.rank(units(depth=1, replay=1, nbytes=11, last_access=last_access, now=now, page_tokens=1))[0])

    for now in range(6000):
        rank(now, now)
        policy.evicted(float(now))
    assert len(policy._lost._ticks) == len(policy._lost._bases) <= 4097
    assert policy._lost._ticks == sorted(policy._lost._ticks)
    assert rank(6000, 6000) == 6000
    assert rank(5900, 6000) == 5901
    assert rank(0, 6000) == 1
    assert all(rank(at, 6000) <= at + 1 for at in range(0, 6000, 97)), "a base that is not remembered is taken from before"


# -- hvd ---------------------------------------------------------------------------------------


def session(count: int, **columns) -> PlainUnits:
    """Units of one class and cost."""
    return units(count, **{"depth": 100, "replay": 10, "nbytes": 1000, "grown": 10, "checkpoint": END} | columns)


def teach(policy: Policy, live: PlainUnits, hit: PlainUnits, *, evicted: bool = False) -> None:
    """An epoch in which each of `hit` was hit, and at the end of which there is `live`."""
    for row in range(len(hit)):
        policy.reused(reuse_of(hit, row, evicted=evicted))
    policy.learn(live, session(0, now=live.now))


def test_hvd_starts_as_lru_among_equals():
    ages = np.array([0, 1, 2, 4, 9, 20, 50, 100, 1000, 10**4, 10**6])
    ranks = HitValueDensity(COSTS).rank(session(len(ages), last_access=10**6 - ages, now=10**6))
    assert (np.diff(ranks) < 0).all()
    assert (ranks > 0).all()


def test_hvd_weighs_what_a_miss_costs_by_bytes():
    policy = HitValueDensity(COSTS)
    asked = session(4, depth=[100, 100, 200, 100], nbytes=[1000, 500, 1000, 1000], replay=[10, 10, 10, 20], now=50)
    ranks, density = policy.rank(asked), COSTS.density(asked)
    np.testing.assert_allclose(ranks / ranks[0], density / density[0])


def classes(now: int, *, cold: dict[str, int], warm: dict[str, int], period: int = 64) -> HitValueDensity:
    """Taught over 20 epochs: of two classes of 32 units each, one is hit once an epoch, the other never."""
    policy = HitValueDensity(COSTS)
    for epoch in range(1, 21):
        end = epoch * period
        never = session(32, now=end, last_access=np.zeros(32, int), **cold)
        always = session(32, now=end, last_access=end - np.arange(32), **warm)
        teach(policy, together(never, always), session(32, now=end, last_access=end - period, **warm))
    return policy


def together(*parts: PlainUnits) -> PlainUnits:
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    return units(sum(map(len, parts)), now=parts[0].now, page_tokens=parts[0].page_tokens, **columns)


@pytest.mark.parametrize(
    ("cold", "warm"),
    [
        ({"checkpoint": END}, {"checkpoint": BRANCH}),
        ({"checkpoint": PROMPT}, {"checkpoint": END}),
        ({"children": 1}, {"children": 0}),
        ({"children": 1}, {"children": 2}),
        ({"hits": 0}, {"hits": 1}),
        ({"lineage": 0}, {"lineage": 3}),
        ({"grown": 10}, {"grown": 1000}),
    ],
    ids=str,
)
def test_hvd_learns_which_class_is_hit(cold: dict[str, int], warm: dict[str, int]):
    policy = classes(64, cold=cold, warm=warm)
    now = 20 * 64
    for age in (1, 10, 60):
        never, always = (float(policy.rank(session(1, now=now, last_access=now - age, **of))[0]) for of in (cold, warm))
        assert always > 5 * never, f"at age {age}"


def test_hvd_forgets_what_has_changed():
    policy = classes(64, cold={"checkpoint": END}, warm={"checkpoint": BRANCH})
    now = 20 * 64
    for _ in range(40):
        now += 64
        turned = session(32, now=now, last_access=now - np.arange(32), checkpoint=END)
        idle = session(32, now=now, last_access=now - 8 * np.arange(32), checkpoint=BRANCH)
        teach(policy, together(turned, idle), session(32, now=now, last_access=now - 64, checkpoint=END))
    ends, branches = policy.rank(session(2, now=now, last_access=now - 10, checkpoint=[END, BRANCH]))
    assert ends > 5 * branches


def test_for_hvd_a_miss_of_what_was_lost_is_evidence_as_a_hit_is():
    taught = []
    for evicted in (False, True):
        policy = HitValueDensity(COSTS)
        hit = session(20, now=640, last_access=600, checkpoint=BRANCH)
        teach(policy, session(20, now=640, last_access=10), hit, evicted=evicted)
        taught.append(policy.rank(session(2, now=640, last_access=600, checkpoint=[END, BRANCH])))
    np.testing.assert_array_equal(taught[0], taught[1])
    assert taught[0][1] > 2 * taught[0][0]


def test_for_hvd_a_lost_unit_waits_as_a_live_one_does():
    taught = []
    for live in (True, False):
        policy = HitValueDensity(COSTS)
        policy.reused(reuse_of(session(1, now=640, last_access=600, checkpoint=BRANCH)))
        waiting, nothing = session(30, now=640, last_access=100), session(0, now=640)
        policy.learn(*((waiting, nothing) if live else (nothing, waiting)))
        taught.append(policy.rank(session(2, now=640, last_access=600, checkpoint=[END, BRANCH])))
    np.testing.assert_array_equal(taught[0], taught[1])
    policy = HitValueDensity(COSTS)
    policy.reused(reuse_of(session(1, now=640, last_access=600, checkpoint=BRANCH)))
    policy.learn(session(0, now=640), session(0, now=640))
    assert policy.rank(session(1, now=640, last_access=600))[0] > taught[0][0], "those who waited in vain are worth less"


def test_for_hvd_covered_units_go_by_hazard_alone():
    policy = classes(64, cold={"checkpoint": END}, warm={"checkpoint": BRANCH})
    same = session(3, covered=1, replay=[10, 50, 90], depth=[100, 10, 900], nbytes=[1, 1000, 2**40], now=2000, last_access=1990)
    assert len(set(policy.rank(same).tolist())) == 1
    cold, warm = policy.rank(session(2, covered=1, checkpoint=[END, BRANCH], now=2000, last_access=1990))
    assert cold < warm


def test_for_hvd_superseded_states_end_up_below_older_ends():
    """Sessions come back after long pauses, always at their last state: least recent is not least worth."""
    rig = Rig(HitValueDensity(COSTS))
    sessions = 12
    for turn in range(1, 13):
        for each in range(sessions):
            path = (each, *([each] * turn))
            rig.request(path)
    old = {int(rig.index.locations(rig.match((each,) * 13), 13).states[STATE].device) for each in range(sessions // 2)}
    assert min(old) >= 0
    for turn in range(13, 16):
        for each in range(sessions // 2, sessions):
            rig.request((each, *([each] * turn)))
    for each in range(sessions // 2):
        assert rig.match((each,) * 13).depth == 13
    gone = rig.evict_device(0, sessions).freed[STATE].tolist()
    assert not old & set(gone), "an idle session's last state is worth more than a superseded one of a busy session"


# -- portfolio ---------------------------------------------------------------------------------


class Told(Policy):
    """Says its number, and keeps what it was told."""

    name = "told"

    def __init__(self, number: int, *, needs_states: bool = False) -> None:
        self.number = number
        self.needs_states = needs_states  # type: ignore[misc]
        self.told: list[str] = []

    def rank(self, asked: Units) -> Ranks:
        return np.full(len(asked), float(self.number))

    def evicted(self, rank: float) -> None:
        self.told.append("evicted")

    def reused(self, reuse: Reuse) -> None:
        self.told.append("reused")

    def learn(self, live: Units, gone: Units) -> None:
        self.told.append("learn")


def test_of_a_portfolio_one_ranks_and_all_learn():
    members = {str(n): Told(n) for n in range(3)}
    policy = Portfolio(members)
    assert policy.rank(units(2)).tolist() == [0, 0]
    policy.reused(reuse_of(units(1)))
    policy.learn(units(1), units(0))
    policy.evicted(1.0)
    assert [member.told for member in members.values()] == [["reused", "learn", "evicted"], ["reused", "learn"], ["reused", "learn"]]


def test_of_a_portfolio_the_member_that_lately_saved_most_ranks():
    policy = Portfolio({str(n): Told(n) for n in range(3)})
    ranked = []
    for saved in ([0, 0, 0], [0, 5, 5], [0, 0, 1], [9, 0, 0], [0, 0, 0], [0, 0, 7]):
        policy.saved(saved)
        ranked.append(int(policy.rank(units(1))[0]))
    assert ranked == [0, 1, 2, 0, 0, 2]


def test_a_portfolio_needs_states_if_one_of_it_does():
    assert not Portfolio({"a": Told(1), "b": Told(2)}).needs_states
    assert Portfolio({"a": Told(1), "b": Told(2, needs_states=True)}).needs_states
    with pytest.raises(ConfigError):
        Portfolio({})
    whole, tuned = policy_named("portfolio"), policy_named("marconi:tuned")
    assert isinstance(whole, Portfolio)
    assert set(whole.members) == {"hvd", "gdsf", "lru"}
    assert isinstance(tuned, Portfolio)
    assert [member.alpha for member in tuned.members.values() if isinstance(member, Marconi)] == [0, 0.25, 0.5, 1, 2]


# -- hazard ------------------------------------------------------------------------------------


def simulated(histories: list[tuple[int, bool]], elapsed: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Tick by tick: units that are `age` ticks old when the epoch begins, or are made in it (below 0); some are hit in its middle."""
    hits, waited = np.zeros(buckets), np.zeros(buckets)
    for age, hit in histories:
        for tick in range(elapsed):
            bucket = min(max(age, 0).bit_length(), buckets - 1)
            if hit and tick == elapsed // 2:
                hits[bucket] += 1
                age = 0
                bucket = 0
            if age >= 0:
                waited[bucket] += 1
            age += 1
    return hits, waited


@settings(max_examples=60, deadline=None)
@given(
    histories=st.lists(st.tuples(st.integers(-60, 5000), st.booleans()), max_size=15),
    half=st.integers(1, 40),
    begun=st.integers(0, 10_000),
)
def test_over_one_epoch_exposure_is_that_of_a_simulation(histories: list[tuple[int, bool]], half: int, begun: int):
    elapsed = 2 * half
    histories = [(max(age, 1 - elapsed), hit and age >= 0) for age, hit in histories]
    hazard = Hazard((1,))
    hazard.begin(begun)
    hazard.begin(begun + elapsed)
    hit = np.array([age + half for age, hit in histories if hit], np.int64)
    hazard.hit((np.zeros(len(hit), np.int64),), hit)
    wait = np.array([half if hit else age + elapsed for age, hit in histories], np.int64)
    hazard.wait((np.zeros(len(wait), np.int64),), wait)
    hits, waited = simulated(histories, elapsed, hazard._hits.shape[-1])
    np.testing.assert_array_equal(hazard._hits[0], hits)
    np.testing.assert_allclose(hazard._waited[0], waited)


def test_hits_anywhere_in_an_epoch_are_right_on_average():
    elapsed, age = 64, 1 << 10
    hazard = Hazard((1,))
    hazard.begin(elapsed)
    at = np.arange(elapsed)
    hazard.hit((np.zeros(elapsed, np.int64),), age + at)
    exact = (at + 0.5).sum()
    assert hazard._waited.sum() == pytest.approx(exact)
    assert hazard._hits.sum() == elapsed


def test_a_class_that_nobody_saw_has_the_rate_of_the_one_around_it():
    hazard = Hazard((3, 2))
    hazard.begin(1000)
    hazard.hit(column(50, [0, 0]), np.full(50, 100))
    hazard.wait(column(50, [1, 0]), np.full(50, 900))
    hazard.derive()
    ages = np.array([10, 100])
    rates = {(k, p): hazard.rate(column(2, [k, p]), ages) for k in range(3) for p in range(2)}
    assert (rates[0, 1] > rates[2, 1]).all(), "its part has none, its class has many hits"
    assert (rates[1, 1] < rates[2, 1]).all()
    np.testing.assert_array_equal(rates[2, 0], rates[2, 1])
    assert (rates[0, 0] > rates[0, 1]).all()


@pytest.mark.parametrize("rate", [0.05, 0.005])
def test_a_class_that_was_seen_much_has_its_own_rate(rate: float):
    """Geometric waiting times have the same hazard at every age; a neighbour that is never hit hardly counts."""
    random = np.random.default_rng(3)
    hazard = Hazard((2, 2))
    now = 0
    last = np.zeros(2000, np.int64)
    for _ in range(30):
        now += 64
        hazard.begin(now)
        for tick in range(now - 64, now):
            hit = random.random(len(last)) < rate
            hazard.hit(column(int(hit.sum()), [0, 1]), tick - last[hit])
            last[hit] = tick + 1
        hazard.wait(column(len(last), [0, 1]), now - last)
        hazard.wait(column(500, [1, 0]), 8 * np.arange(500))
    hazard.derive()
    ages = np.array([0, 3, 10, 40])
    assert hazard.rate(column(4, [0, 1]), ages) == pytest.approx([rate] * 4, rel=0.2)
    assert (hazard.rate(column(2, [1, 0]), ages[2:]) < rate / 2).all()


def test_the_past_decays():
    hazard = Hazard((1, 1))
    hazard.begin(64)
    hazard.hit(column(10, [0, 0]), np.full(10, 30))
    hits, waited = hazard._hits.sum(), hazard._waited.sum()
    rates = []
    for epoch in range(2, 12):
        hazard.begin(64 * epoch)
        hazard.derive()
        rates.append(float(hazard.rate(column(1, [0, 0]), np.array([30]))[0]))
        assert (hazard._hits.sum(), hazard._waited.sum()) == pytest.approx((hits * _DECAY ** (epoch - 1), waited * _DECAY ** (epoch - 1)))
    assert all(np.isfinite(rates))


def test_ages_are_told_apart_by_powers_of_two():
    hazard = Hazard((1,))
    seen = []
    for age in [0, *(2**n + by for n in range(45) for by in (-1, 0) if n or not by)]:
        one = Hazard((1,))
        one.begin(10)
        one.hit((np.zeros(1, np.int64),), np.array([age]))
        (bucket,) = np.flatnonzero(one._hits[0])
        assert one._edges[bucket] <= age < one._edges[bucket + 1]
        assert one._waited[0].sum() == min(age, 5), "no tick of waiting is lost, however old"
        seen.append(int(bucket))
    last = hazard._hits.shape[-1] - 1
    assert seen == sorted(seen)
    assert set(seen) == set(range(last + 1))
    assert seen[-1] == last


def test_rates_are_positive_and_finite_whatever_was_seen():
    hazard = Hazard((2, 2))
    for now in (0, 0, 1, 2**40, 2**40):
        hazard.begin(now)
        hazard.hit(column(3, [0, 1]), np.array([0, 2**40, 5]))
        hazard.wait(column(2, [1, 1]), np.array([2**40, 0]))
        hazard.derive()
        rates = hazard.rate(column(50, [0, 1]), 2 ** np.arange(50))
        assert ((rates > 0) & np.isfinite(rates)).all()


def column(count: int, classes: list[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.full(count, each, np.int64) for each in classes)


def test_the_device_evicts_what_the_host_has_before_what_costs_a_computation():
    """Among states of one class: a load of 7,000 bytes is cheaper than two pages of this model."""
    costs = Costs(ModelProfile("m", 1, 1, flops_per_token=1e9, flops_per_context_token=0.0))
    for policy in (Gdsf(costs), HitValueDensity(costs)):
        rig = Rig(policy)
        for each in range(8):
            rig.request((each, 1), (2,))
        for each in (6, 7):
            rig.copy((each, 1))
        covered = {int(rig.index.locations(rig.match((each, 1)), 2).states[STATE].device) for each in (6, 7)}
        assert set(rig.evict_device(0, 2).freed[STATE].tolist()) == covered
        assert rig.index.evictable(Tier.HOST)[STATE] == 2
