"""`hvd`: what it learns of classes and ages, and the rates that it learns them by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tests.policy.rig import COSTS, STATE, PlainUnits, Rig, reuse_of, units
from tiercache.policy import CheckpointKind, Ending, Policy
from tiercache.policy.hvd import DECAY, Hazard, HitValueDensity

END, PROMPT, BRANCH = CheckpointKind.END, CheckpointKind.PROMPT, CheckpointKind.BRANCH


def session(count: int, **columns) -> PlainUnits:
    """Units of one class and cost."""
    return units(
        count, **{"depth": 100, "replay": 10, "nbytes": 1000, "grown": 10, "checkpoint": END} | columns
    )


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
    asked = session(
        4, depth=[100, 100, 200, 100], nbytes=[1000, 500, 1000, 1000], replay=[10, 10, 10, 20], now=50
    )
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
        ({"checkpoint": END}, {"checkpoint": BRANCH}), ({"checkpoint": PROMPT}, {"checkpoint": END}),
        ({"children": 1}, {"children": 0}), ({"children": 1}, {"children": 2}), ({"hits": 0}, {"hits": 1}),
        ({"lineage": 0}, {"lineage": 3}), ({"grown": 10}, {"grown": 1000}),
        ({"ending": Ending.TURN}, {"ending": Ending.CALL}),
    ],
    ids=str,
)  # fmt: skip
def test_hvd_learns_which_class_is_hit(cold: dict[str, int], warm: dict[str, int]):
    policy = classes(64, cold=cold, warm=warm)
    now = 20 * 64
    for age in (1, 10, 60):
        never, always = (
            float(policy.rank(session(1, now=now, last_access=now - age, **of))[0]) for of in (cold, warm)
        )
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
    assert policy.rank(session(1, now=640, last_access=600))[0] > taught[0][0], "a wait in vain"


def test_for_hvd_covered_units_go_by_hazard_alone():
    policy = classes(64, cold={"checkpoint": END}, warm={"checkpoint": BRANCH})
    same = session(
        3, covered=1, replay=[10, 50, 90], depth=[100, 10, 900], nbytes=[1, 1000, 2**40], now=2000,
        last_access=1990,
    )  # fmt: skip
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
    old = {
        int(rig.index.locations(rig.match((each,) * 13), 13).states[STATE].device)
        for each in range(sessions // 2)
    }
    assert min(old) >= 0
    for turn in range(13, 16):
        for each in range(sessions // 2, sessions):
            rig.request((each, *([each] * turn)))
    for each in range(sessions // 2):
        assert rig.match((each,) * 13).depth == 13
    gone = rig.evict_device(0, sessions).freed[STATE].tolist()
    assert not old & set(gone), "an idle session's last state is worth more than a superseded one"


# -- hazard ------------------------------------------------------------------------------------


def simulated(histories: list[tuple[int, bool]], elapsed: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Tick by tick: units of an `age` when the epoch begins (below 0: made in it), some hit in its middle."""
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


@settings(max_examples=example_count(60), deadline=None)
@given(
    histories=st.lists(st.tuples(st.integers(-60, 5000), st.booleans()), max_size=15),
    half=st.integers(1, 40),
    begun=st.integers(0, 10_000),
)
def test_over_one_epoch_exposure_is_that_of_a_simulation(histories, half, begun):
    elapsed = 2 * half
    histories = [(max(age, 1 - elapsed), hit and age >= 0) for age, hit in histories]
    hazard = Hazard((1,))
    hazard.begin(begun)
    hazard.begin(begun + elapsed)
    hit = np.array([age + half for age, hit in histories if hit], np.int64)
    hazard.hit((np.zeros(len(hit), np.int64),), hit)
    wait = np.array([half if hit else age + elapsed for age, hit in histories], np.int64)
    hazard.wait((np.zeros(len(wait), np.int64),), wait)
    hits, waited = simulated(histories, elapsed, hazard.hits.shape[-1])
    np.testing.assert_array_equal(hazard.hits[0], hits)
    np.testing.assert_allclose(hazard.waited[0], waited)


def test_hits_anywhere_in_an_epoch_are_right_on_average():
    elapsed, age = 64, 1 << 10
    hazard = Hazard((1,))
    hazard.begin(elapsed)
    at = np.arange(elapsed)
    hazard.hit((np.zeros(elapsed, np.int64),), age + at)
    exact = (at + 0.5).sum()
    assert hazard.waited.sum() == pytest.approx(exact)
    assert hazard.hits.sum() == elapsed


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
    """Geometric waiting times have one hazard at every age; a neighbour without hits hardly counts."""
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
    for ticks in (1.0, 10.0, 30.0):
        chance = hazard.chance(column(3, [0, 1]), ages[:3], ticks)
        assert chance == pytest.approx([-np.expm1(-rate * ticks)] * 3, rel=0.25)
        assert (hazard.chance(column(1, [1, 0]), ages[3:], ticks) < chance[0] / 2).all()


def test_the_past_decays():
    hazard = Hazard((1, 1))
    hazard.begin(64)
    hazard.hit(column(10, [0, 0]), np.full(10, 30))
    hits, waited = hazard.hits.sum(), hazard.waited.sum()
    rates = []
    for epoch in range(2, 12):
        hazard.begin(64 * epoch)
        hazard.derive()
        rates.append(float(hazard.rate(column(1, [0, 0]), np.array([30]))[0]))
        assert (hazard.hits.sum(), hazard.waited.sum()) == pytest.approx(
            (hits * DECAY ** (epoch - 1), waited * DECAY ** (epoch - 1))
        )
    assert all(np.isfinite(rates))


def test_ages_are_told_apart_by_powers_of_two():
    hazard = Hazard((1,))
    seen = []
    for age in [0, *(2**n + by for n in range(45) for by in (-1, 0) if n or not by)]:
        one = Hazard((1,))
        one.begin(10)
        one.hit((np.zeros(1, np.int64),), np.array([age]))
        (bucket,) = np.flatnonzero(one.hits[0])
        assert one.edges[bucket] <= age < one.edges[bucket + 1]
        assert one.waited[0].sum() == min(age, 5), "no tick of waiting is lost, however old"
        seen.append(int(bucket))
    last = hazard.hits.shape[-1] - 1
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
