"""Marconi as its artifact does it: the score, and the one search for alpha."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.policy.rig import BYTES, COSTS, KV, PAGE, STATE, tokens_of, units
from tiercache.errors import ConfigError
from tiercache.index import CheckpointRules
from tiercache.policy import Policy, policy_named
from tiercache_lab.policies.marconi_artifact import ArtifactScore, MarconiArtifact
from tiercache_lab.replay.alone import IndexCache


def artifact() -> MarconiArtifact:
    return MarconiArtifact(COSTS)


def test_the_score_is_the_artifacts():
    asked = units(
        now=10,
        page_tokens=1,
        last_access=[9, 8, 5, 10],
        depth=[4, 8, 8, 2],
        replay=[4, 2, 8, 2],
        children=[0, 1, 0, 2],
        nbytes=[1, 7, 3, 2],
    )
    recency = np.array([1.0, (1 / 2 - 1 / 5) / (1 - 1 / 5), 0.0])
    # FLOPs since the restorable depth above, over the bytes of the whole path: 1 a token and 1 for the state.
    density = np.array([(40 + 16) / 5, (20 + 64 - 36) / 9, (80 + 64) / 9])
    efficiency = (density - density.min()) / (density.max() - density.min())
    expected = [*(recency + 0.7 * efficiency), np.inf]
    np.testing.assert_allclose(ArtifactScore(COSTS, 0.7).rank(asked), expected)
    covered = units(**{**asked.columns, "covered": 1}, now=10, page_tokens=1)
    np.testing.assert_allclose(ArtifactScore(COSTS, 0.7).rank(covered), [*(np.array(expected[:3]) - 10), -1])


def test_the_window_is_five_times_the_requests_before_the_first_loss_and_is_searched_once():
    policy = artifact()
    gain = np.linspace(0, 1, 21)
    for _ in range(3):
        policy.evicted(-5.0)  # a lower tier has it: no loss
        policy.served(gain)
    policy.evicted(0.5)  # during the fourth request
    for served in range(4, 20):
        policy.served(gain)
        policy.evicted(0.1)
        assert (policy.alpha, policy.settled) == (0, False), served
    policy.served(gain)
    assert (policy.alpha, policy.settled) == (2, True)


def test_the_alpha_is_the_lowest_of_those_that_saved_most():
    policy = artifact()
    policy.evicted(0.5)
    for turn in range(5):
        policy.served([9.0 * (turn == 0), 0, 0, *[2.0] * 3, *[1.0] * 15])
    assert policy.alpha == pytest.approx(0.3)
    asked = units(now=9, depth=[2, 4], replay=[2, 4], last_access=[8, 1])
    np.testing.assert_array_equal(policy.rank(asked), ArtifactScore(COSTS, 0.3).rank(asked))


def test_caches_beside_the_traffic_find_what_a_replay_of_the_window_finds():
    """The artifact serves the window again from an empty cache; here a fresh cache of each alpha does."""
    random = Random(3)
    paths = [
        (random.randrange(6), *[random.randrange(3) for _ in range(random.randrange(1, 9))]) for _ in range(5)
    ]
    policy = artifact()
    beside = [cache(member) for member in policy.members]
    policy.evicted(0.5)
    totals = []
    for path in paths:
        policy.served([COSTS.profile.flops(0, serve(one, path)) for one in beside])
    for member in policy.members:
        again = cache(member)
        totals.append(sum(COSTS.profile.flops(0, serve(again, path)) for path in paths))
    assert policy.settled
    assert policy.saved == totals
    assert policy.alpha == pytest.approx(int(np.argmax(totals)) / 10)


def cache(policy: Policy) -> IndexCache:
    return IndexCache(
        policy,
        page_size=PAGE,
        page_pools=[KV],
        state_pools=[STATE],
        cost=BYTES,
        capacity=60_000,
        checkpoints=CheckpointRules(),
    )


def serve(one: IndexCache, path: tuple[int, ...]) -> int:
    return one.request(tokens_of(path), tokens_of((*path, 9)))


@pytest.mark.parametrize("name", ["marconi:artifact:2.1", "marconi:artifact:x", "marconi:artifact:"])
def test_an_alpha_that_the_artifact_does_not_try_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        policy_named(name)


@pytest.mark.parametrize("name", ["marconi:artifact", "marconi:artifact:"])
def test_a_search_for_alpha_is_refused_outside_a_replay(name: str) -> None:
    with pytest.raises(ConfigError, match=r"marconi:artifact searches .* only tiercache replay can use it"):
        policy_named(name)


@pytest.mark.parametrize("name", ["marconi.artifact", "marconi.artifact:0.5", "seglen.additive"])
def test_the_name_of_an_entry_point_is_no_name_of_a_policy(name: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no eviction policy '{name}'; use .*marconi:artifact"):
        policy_named(name)
