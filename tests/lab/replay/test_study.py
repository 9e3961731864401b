"""Studies: published benchmarks to the last digit, bounds that bound, the same again from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tiercache.errors import ConfigError
from tiercache.index import CheckpointRules
from tiercache.policy import DEFAULT_PROFILE, ModelProfile, profile_named
from tiercache_lab.policies import MAIN
from tiercache_lab.replay.base import StorageTier, Tiers
from tiercache_lab.replay.results import Result
from tiercache_lab.replay.sources import open_source
from tiercache_lab.replay.study import Question, Stage, Study

pytestmark = pytest.mark.slow

MODEL = profile_named(DEFAULT_PROFILE)
TINY = ModelProfile(
    "tiny", kv_bytes_per_token=64, state_bytes=40_000, flops_per_token=1e9, flops_per_context_token=1e4
)
ATTENTION = replace(TINY, name="attention", state_bytes=0)
DISK = StorageTier("disk", 2_000_000)
CHATS = "multi-turn?conversations=10&rounds=5&live=5&user=64-400&answer=64-200"


def asked(
    source: str,
    policies: str,
    *,
    seed: int = 0,
    limit: int | None = None,
    profile: ModelProfile = TINY,
    **more: Any,
) -> Question:
    """A question; without bounds, unless they are asked for."""
    return Question(
        open_source(source, seed=seed, limit=limit),
        policies.split(","),
        profile,
        seed=seed,
        **{"bounds": False, **more},
    )


def found(question: Question) -> list[Result]:
    results = list(Study(question).results())
    for one in results:
        assert 0 <= one.flops_saved <= 1
        assert 0 <= one.token_hit_rate <= 1
        assert 0 <= one.peak_bytes <= one.capacity_bytes, one.policy
        for name, use in one.tiers.items():
            assert 0 <= use.peak <= use.capacity, (one.policy, name)
        assert sum(use.peak for use in one.tiers.values()) == one.peak_bytes
        assert one.requests == len(question.source)
        assert (one.source, one.seed, one.profile) == (
            question.source.name,
            question.seed,
            question.profile.name,
        )
    return results


def test_fractions_are_of_the_same_bytes_whatever_the_checkpoints_are() -> None:
    rules, every, ends = (
        list(Study(asked(CHATS, "hvd", capacities=(0.2,), checkpoints=checkpoints)).results())
        for checkpoints in ("rules", "every:64", CheckpointRules(branch=False, prompt_end=False))
    )
    assert every[0].peak_bytes > rules[0].peak_bytes > ends[0].peak_bytes, "those of the infinite caches"
    assert every[1].capacity_bytes == rules[1].capacity_bytes == ends[1].capacity_bytes
    assert every[1].cuts > rules[1].cuts > ends[1].cuts


def named(results: list[Result], policy: str) -> Result:
    [one] = [one for one in results if one.policy == policy]
    return one


def test_seed_20457_with_its_own_tiers_hits_what_an_infinite_cache_hits() -> None:
    results = found(asked("seed-20457", ",".join(MAIN), profile=MODEL))
    assert [one.policy for one in results] == ["infinite", *MAIN, "lru without offload"]
    infinite = results[0]
    assert infinite.is_bound
    for one in results[: len(MAIN) + 1]:
        assert one.token_hit_rate == 517 / 576, one.policy
        assert one.token_hit_rate - one.published["token_hit_rate_without_state_offload"] >= 0.30
        assert one.token_hit_rate == pytest.approx(one.published["token_hit_rate_infinite"], abs=5e-7)
    hvd = named(results, "hvd")
    assert hvd.tiers.keys() == {"device", "host", "disk"}
    assert hvd.tiers["host"].capacity == 2 * hvd.tiers["device"].capacity
    without = results[-1]
    assert without.capacity_bytes == without.tiers["device"].capacity == hvd.tiers["device"].capacity
    assert without.tiers["host"].written_bytes == without.peak_bytes - without.tiers["device"].peak == 0


def test_seed_11214_comes_close_to_an_infinite_cache() -> None:
    infinite, hvd = found(asked("seed-11214", "hvd", profile=MODEL, capacities=(0.2,)))
    assert hvd.token_hit_rate >= 0.99 * infinite.token_hit_rate
    assert hvd.flops_saved >= 0.99 * infinite.flops_saved
    assert hvd.ttft_ms_mean < hvd.ttft_ms_p95
    # Two requests of a group must have been there before a third finds a state where they part; five run at
    # once.
    assert 0.75 < infinite.token_hit_rate < 400 * 160 / (500 * 164)
    assert hvd.published["ttft_ms_mean"] == 507.0


def test_rows_come_in_order_and_capacities_are_fractions_of_the_infinite_cache() -> None:
    results = found(asked(CHATS, "lru,lpc", capacities=(0.5, 0.1, 1.0)))
    assert [(one.policy, one.capacity) for one in results] == [
        ("infinite", 1.0), ("lru", 0.5), ("lru", 0.1), ("lru", 1.0), ("lpc", 0.5), ("lpc", 0.1),
        ("lpc", 1.0),
    ]  # fmt: skip
    infinite = results[0]
    assert infinite.capacity_bytes == infinite.peak_bytes
    for one in results[1:]:
        assert one.capacity is not None
        assert one.capacity_bytes == int(infinite.peak_bytes * one.capacity)
        assert not one.is_bound
        assert one.peak_bytes > 0.9 * one.capacity_bytes
    for policy in ("lru", "lpc"):
        less, more, all_of_it = sorted(
            (one for one in results if one.policy == policy), key=lambda one: one.capacity_bytes
        )
        assert (
            less.token_hit_rate < more.token_hit_rate <= all_of_it.token_hit_rate == infinite.token_hit_rate
        )
        assert less.ttft_ms_mean > more.ttft_ms_mean >= all_of_it.ttft_ms_mean
    assert [one.capacity for one in found(asked(CHATS, "lru"))] == [1.0, 0.05, 0.1, 0.2]


def test_bounds_bound() -> None:
    question = asked(
        "shared-prefix?groups=8&prompts=8&system=500-2000", "lru,hvd", capacities=(0.1, 0.3), bounds=True
    )
    results = found(question)
    bounds = {(one.policy, one.capacity): one for one in results if one.is_bound}
    assert bounds.keys() == {("infinite", 1.0), ("clairvoyant", 0.1), ("clairvoyant", 0.3)}
    for one in results:
        if one.is_bound:
            continue
        assert one.capacity is not None
        for measure in ("token_hit_rate", "flops_saved"):
            value = getattr(one, measure)
            assert value <= getattr(bounds["infinite", 1.0], measure) + 1e-9
    assert (
        bounds["clairvoyant", 0.1].flops_saved
        > named([one for one in results if one.capacity == 0.1], "lru").flops_saved
    )


@pytest.mark.parametrize("policy", ["marconi", "hvd"])
def test_prompts_that_many_share_stay_where_there_is_room_for_little_else(policy: str) -> None:
    """A shared prompt has one continuation at most times, and the device keeps nothing."""
    infinite, shared, lru = found(
        asked(
            "shared-prefix?groups=8&prompts=16&system=2000-6000",
            f"{policy},lru",
            profile=MODEL,
            capacities=(0.1,),
        )
    )
    assert shared.flops_saved >= 0.95 * infinite.flops_saved
    assert lru.flops_saved < 0.7 * infinite.flops_saved


@pytest.mark.parametrize(
    "question",
    [
        lambda: asked(CHATS, "lru,hvd", capacities=(0.1,)),
        lambda: asked(CHATS, "lru", limit=7, bounds=True),
        lambda: asked(CHATS, "lru", limit=7, checkpoints="every:256"),
        lambda: asked(CHATS, "lru", tiers=Tiers(500_000), bounds=True),
        lambda: asked("seed-20457", "lru,hvd", limit=20),
        lambda: asked(CHATS, "lru,hvd", tiers=Tiers(500_000, storage=(DISK,)), bounds=True),
        lambda: asked(CHATS, "hvd", tiers=Tiers(500_000, storage=(DISK,)), bounds=True),
    ],
)
def test_stages_are_told_and_counted(question: Callable[[], Question]) -> None:
    asking = question()
    stages: list[Stage] = []
    steps: list[int] = []

    def begin(stage: Stage) -> Callable[[], object]:
        stages.append(stage)
        steps.append(0)

        def step() -> None:
            steps[-1] += 1

        return step

    results = list(Study(asking, begin).results())
    assert len(stages) == asking.stages
    assert {stage.requests for stage in stages} == {len(asking.source)}
    assert [stage.label for stage in stages][:2] == ["reading", "infinite"]
    assert steps == [len(asking.source)] * len(stages)
    assert results[0].policy == "infinite"


def test_a_label_says_the_capacity_as_it_was_given() -> None:
    labels: list[str] = []

    def begin(stage: Stage) -> Callable[[], object]:
        labels.append(stage.label)
        return lambda: None

    list(Study(asked(CHATS, "lru", limit=2, capacities=(0.025, 1.0)), begin).results())
    assert labels == ["reading", "infinite", "lru at 2.5 %", "lru at 100 %"]


def test_a_device_that_is_too_small_is_refused_before_anything_has_run() -> None:
    stages: list[Stage] = []

    def begin(stage: Stage) -> Callable[[], object]:
        stages.append(stage)
        return lambda: None

    with pytest.raises(ConfigError, match="does not hold the requests that run at once"):
        list(Study(asked(CHATS, "lru", tiers=Tiers(500_000, 100_000)), begin).results())
    assert [stage.label for stage in stages] == ["reading"]
