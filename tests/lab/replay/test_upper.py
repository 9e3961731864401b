"""The upper bound: no cache of the size does better, found by trying all of them and by real runs; and it is
not far above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tiercache.index import CheckpointRules
from tiercache.policy import Costs, ModelProfile, Policy, profile_named
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.cache import Setup
from tiercache_lab.replay.clairvoyant import Clairvoyant, Recorder
from tiercache_lab.replay.drive import Run
from tiercache_lab.replay.needs import Need, infinite, measure
from tiercache_lab.replay.sources import WorkloadSource, open_source
from tiercache_lab.replay.tiers import Tiers
from tiercache_lab.replay.upper import Upper, upper_bound

pytestmark = pytest.mark.slow

HYBRID = profile_named("qwen3-next-80b-a3b")
SMALL = ModelProfile(
    "small", kv_bytes_per_token=1, state_bytes=2, flops_per_token=3.0, flops_per_context_token=2.0
)
"""Pages of one byte where a page is a token."""

SLACK = 1e-9
"""Tolerance for rounding in comparisons with the bound."""


@dataclass(frozen=True)
class Listed:
    """A source of listed prompts and outputs, tokens as characters."""

    requests: Sequence[tuple[str, str]]
    page_size: int = 1
    concurrency: int = 1
    name: str = "listed"
    read: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        for i, (prompt, output) in enumerate(self.requests):
            self.read.append(i)
            yield Request(as_tokens(prompt), as_tokens(output), float(i), session=i)


def as_tokens(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.uint64)


def prompts(*texts: str) -> Listed:
    return Listed([(text, "") for text in texts])


def bound(source: Listed, capacity: int, profile: ModelProfile = SMALL) -> Upper:
    return upper_bound(source, profile, [capacity])[0]


def tokens_of_bound(source: Listed, capacity: int, profile: ModelProfile = SMALL) -> float:
    return bound(source, capacity, profile).token_hit_rate * sum(len(prompt) for prompt, _ in source.requests)


# --- against every cache that there is


class Item(NamedTuple):
    """A page, or a state, by all the text up to its end."""

    text: str
    is_state: bool


class Everything:
    """The best of all caches: after each request, every set of items that fits is tried. A page is a token.

    A set that is contained in another one that fits is no better, and neither is an item that no later prompt
    begins with.
    """

    def __init__(self, source: Listed, profile: ModelProfile, capacity: int) -> None:
        self.requests = source.requests
        self.profile = profile
        self.capacity = capacity

    def best(self) -> Upper:
        tokens = sum(len(prompt) for prompt, _ in self.requests)
        flops = sum(self.profile.flops(0, len(prompt)) for prompt, _ in self.requests)
        return Upper(
            self._most(lambda depth: float(depth)) / tokens,
            self._most(lambda depth: self.profile.flops(0, depth)) / flops,
        )

    def _most(self, gain) -> float:
        gains: dict[frozenset[Item], float] = {frozenset(): 0.0}
        for i, (prompt, output) in enumerate(self.requests):
            after: dict[frozenset[Item], float] = {}
            for held, total in gains.items():
                reached = total + gain(self._hit(prompt, held))
                for kept in self._maximal(self._useful(held | self._made(prompt + output[:-1]), i + 1)):
                    after[kept] = max(after.get(kept, 0.0), reached)
            gains = after
        return max(gains.values())

    def _hit(self, prompt: str, held: frozenset[Item]) -> int:
        whole = [
            d
            for d in range(1, len(prompt))
            if all(Item(prompt[:page], False) in held for page in range(1, d + 1))
        ]
        return max(
            (d for d in whole if not self.profile.state_bytes or Item(prompt[:d], True) in held), default=0
        )

    def _made(self, text: str) -> frozenset[Item]:
        """More than a cache can have made: a request that hits does not compute states above."""
        depths = range(1, len(text) + 1)
        return frozenset(
            [Item(text[:d], False) for d in depths]
            + [Item(text[:d], True) for d in depths if self.profile.state_bytes]
        )

    def _useful(self, items: frozenset[Item], request: int) -> frozenset[Item]:
        return frozenset(
            one
            for one in items
            if any(prompt[:-1].startswith(one.text) for prompt, _ in self.requests[request:])
        )

    def _maximal(self, items: frozenset[Item]) -> Iterator[frozenset[Item]]:
        pages = sorted(one for one in items if not one.is_state)
        states = sorted(items.difference(pages))
        page, state = self.profile.kv_bytes_per_token, self.profile.state_bytes
        for count in range(len(states) + 1):
            room = self.capacity - count * state
            if room >= 0:
                for chosen in combinations(states, count):
                    for others in combinations(pages, min(room // page, len(pages))):
                        yield frozenset(chosen + others)


def test_the_search_through_everything_finds_the_best():
    source = prompts("aab", "ccd", "aab", "ccd")
    pure = replace(SMALL, state_bytes=0)
    assert Everything(source, pure, 0).best() == Upper(0.0, 0.0)
    assert [
        round(12 * Everything(source, pure, capacity).best().token_hit_rate) for capacity in range(5)
    ] == [0, 1, 2, 3, 4]
    assert [
        round(12 * Everything(source, SMALL, capacity).best().token_hit_rate)
        for capacity in (2, 3, 4, 6, 7, 8)
    ] == [0, 1, 2, 2, 3, 4]


texts = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=example_count(150), deadline=None)
@given(
    requests=st.lists(st.tuples(texts, st.text("ab", max_size=2)), min_size=1, max_size=5),
    state_bytes=st.integers(0, 3),
    page_bytes=st.integers(1, 2),
    curve=st.sampled_from([0.0, 2.0]),
    capacity=st.integers(0, 12),
)
@example(
    requests=[("aaa", ""), ("bbb", ""), ("aaa", ""), ("bbb", "")],
    state_bytes=1,
    page_bytes=1,
    curve=2.0,
    capacity=5,
)
@example(
    requests=[("aaaa", ""), ("ab", ""), ("aaaa", ""), ("ab", "aa"), ("abaa", "")],
    state_bytes=2,
    page_bytes=1,
    curve=2.0,
    capacity=4,
)
def test_no_cache_is_above_the_bound(requests, state_bytes, page_bytes, curve, capacity):
    profile = ModelProfile("drawn", page_bytes, state_bytes, 1.0, curve)
    source = Listed(requests)
    best, found = Everything(source, profile, capacity).best(), bound(source, capacity, profile)
    assert best.token_hit_rate <= found.token_hit_rate + SLACK
    assert best.flops_saved <= found.flops_saved + SLACK


# --- what it is where that is known


@given(
    requests=st.lists(st.tuples(texts, st.text("ab", max_size=3)), min_size=1, max_size=12),
    state_bytes=st.integers(0, 3),
)
def test_without_a_limit_it_is_the_infinite_cache_with_a_state_at_every_page_and_without_bytes_nothing(
    requests, state_bytes
):
    profile = replace(SMALL, state_bytes=state_bytes)
    known: set[str] = set()
    hits = []
    for prompt, output in requests:
        hits.append(max((d for d in range(1, len(prompt)) if prompt[:d] in known), default=0))
        computed = prompt + output[:-1]
        known |= {computed[:d] for d in range(1, len(computed) + 1)}
    nothing, everything = upper_bound(Listed(requests), profile, [0, 10**6])
    assert nothing == Upper(0.0, 0.0)
    assert everything.token_hit_rate == sum(hits) / sum(len(prompt) for prompt, _ in requests)
    flops = sum(profile.flops(0, hit) for hit in hits) / sum(
        profile.flops(0, len(prompt)) for prompt, _ in requests
    )
    assert everything.flops_saved == pytest.approx(flops, rel=1e-12)


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(texts, texts), min_size=1, max_size=12),
    capacities=st.lists(st.integers(0, 60), min_size=2, max_size=5),
)
def test_it_never_falls_with_the_capacity_and_answers_in_the_order_of_the_question(requests, capacities):
    found = dict(zip(capacities, upper_bound(Listed(requests), SMALL, capacities), strict=True))
    for one, other in combinations(sorted(found), 2):
        assert found[one].token_hit_rate <= found[other].token_hit_rate
        assert found[one].flops_saved <= found[other].flops_saved


def test_what_fits_between_two_requests_is_bounded_there_and_not_over_the_whole_run():
    # One of the two prompts can be kept: nothing that the cache could hold before or afterwards makes up for
    # that.
    others = [f"{letter}__" for letter in "cdefghijklmnopqrstuvwxyz"]
    source = prompts(*others[:12], "aab", "bba", "aab", "bba", *others[12:])
    assert tokens_of_bound(source, 4) == pytest.approx(2.0, abs=0.05)
    assert tokens_of_bound(source, 8) == pytest.approx(4.0, abs=1e-6)


def test_what_is_needed_twice_pays_for_both_gaps():
    twice = prompts("aab", "c", "aab", "c", "aab")
    assert tokens_of_bound(twice, 4) == pytest.approx(4.0, abs=0.01)
    assert tokens_of_bound(twice, 2) == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("state_bytes", [0, 2, 6])
def test_a_hit_pays_for_one_state_beside_its_pages(state_bytes):
    profile = replace(SMALL, state_bytes=state_bytes)
    whole = 2 + state_bytes
    source = prompts("aab", "c", "aab", "c", "aab")
    assert tokens_of_bound(source, whole, profile) == pytest.approx(4.0)
    # Half the bytes, at most half the gain: a fraction of a hit is what the bound allows beyond a real cache.
    assert tokens_of_bound(source, whole // 2, profile) == pytest.approx(2.0, abs=0.05)


def test_a_prefix_that_many_share_pays_once_for_each_of_its_gaps_and_not_for_each_ending():
    source = prompts("aaab", "aaac", "aaad", "aaae")
    assert tokens_of_bound(source, 5) == pytest.approx(9.0)
    assert tokens_of_bound(source, 4) < 8.9


def test_pages_that_different_requests_had_last_are_all_paid_for():
    # Each request finds what the one before had of its prompt, and before each there is room for three pages.
    source = prompts("abcdef", "abcde1", "abcd2", "abc3", "ab4", "a5", "abcdef6")
    pure = replace(SMALL, state_bytes=0)
    assert tokens_of_bound(source, 100, pure) == 5 + 4 + 3 + 2 + 1 + 6
    assert tokens_of_bound(source, 3, pure) == pytest.approx(3 + 3 + 3 + 2 + 1 + 3, abs=0.05)


def test_who_only_has_a_prefix_in_its_answer_computes_it_again():
    # The second request cannot hit more than its prompt, but what comes after finds all that it had.
    source = Listed([("aaaa", ""), ("b", ""), ("c", ""), ("a", "aaaa"), ("aaaa", "")])
    assert tokens_of_bound(source, 5) == pytest.approx(3.0)
    last_two = Listed([("bcde", ""), ("b", ""), ("c", ""), ("a", "aaaa"), ("aaaa", "")])
    assert tokens_of_bound(source, 3) == pytest.approx(tokens_of_bound(last_two, 3), abs=0.05)


def test_the_last_token_of_an_answer_was_never_computed():
    assert tokens_of_bound(Listed([("a", "bc"), ("abcd", "")]), 100) == 2.0


def test_only_whole_pages_hit_and_never_a_whole_prompt():
    source = Listed([("aabbc", ""), ("aabb", ""), ("aabbcd", "")], page_size=2)
    assert tokens_of_bound(source, 100) == 2.0 + 4.0


def test_pages_that_cost_more_than_they_gain_are_left_out_from_the_end():
    # Tokens: each page gains the same, and the capacity takes one of the two. FLOPs: the second gains more,
    # but not without the first.
    pure = replace(SMALL, state_bytes=0, flops_per_token=0.0)
    source = prompts("aab", "c", "aab")
    found = bound(source, 1, pure)
    assert found.token_hit_rate * 7 == pytest.approx(1.0, abs=0.05)
    assert found.flops_saved * (pure.flops(0, 3) * 2 + pure.flops(0, 1)) == pytest.approx(
        pure.flops(0, 2) / 2, rel=0.05
    )


def test_requests_that_overlap_hold_what_they_work_on_beside_the_capacity():
    source = prompts("aab", "aab", "aab", "c", "d", "aab")
    assert tokens_of_bound(source, 0) == 0.0
    assert tokens_of_bound(replace(source, concurrency=2), 0) == 4.0
    # The last but one that had it may be under way until two more have begun.
    assert tokens_of_bound(replace(source, concurrency=3), 0) == 4.0
    assert tokens_of_bound(replace(source, concurrency=4), 0) == 6.0


@pytest.mark.parametrize("requests", [[], [("a", "")], [("a", ""), ("b", "")], [("a", ""), ("a", "")]])
def test_a_source_that_cannot_hit_has_the_bound_0(requests):
    assert upper_bound(Listed(requests), SMALL, [0, 10, 10**9]) == [Upper(0.0, 0.0)] * 3
    assert upper_bound(Listed(requests), SMALL, []) == []


def test_a_model_without_bytes_or_without_flops_is_no_error():
    source = prompts("aab", "aab")
    assert bound(source, 1, ModelProfile("free", 0, 0, 1.0, 0.0)).token_hit_rate == 2 / 6
    assert bound(source, 10, ModelProfile("idle", 1, 1, 0.0, 0.0)) == Upper(2 / 6, 0.0)


def test_the_source_is_read_once_and_each_request_is_told():
    source = prompts("aab", "c", "aab")
    told: list[int] = []
    upper_bound(source, SMALL, [1, 2, 3], lambda: told.append(len(source.read)))
    assert source.read == [0, 1, 2]
    assert told == [1, 2, 3]


# --- against real runs


SPECS = [
    "shared-prefix?groups=4&prompts=6",
    "shared-prefix-zipf?groups=10&prompts=4",
    "multi-turn?conversations=8&rounds=5",
    "multi-turn-stripped?conversations=8&rounds=5",
    "agent?sessions=4&turns=4-12",
    "agent-collapse?sessions=4&turns=4-12",
    "sharegpt?chats=100&continued=0.2",
    "mooncake-synthetic?chats=8&singles=20",
    "seed-20457",
]
ATTENTION = replace(HYBRID, name="attention", state_bytes=0)


def a_run(
    source: WorkloadSource,
    need: Need,
    profile: ModelProfile,
    tiers: Tiers,
    policy: str | Policy,
    rules: CheckpointRules,
) -> Run:
    run = Run(source, need, Setup(policy, profile, tiers, rules))
    run.go()
    return run


def check_runs(
    spec: str, profile: ModelProfile, concurrency: int, rules: CheckpointRules, limit: int
) -> None:
    source = open_source(spec, seed=3, limit=limit)
    assert isinstance(source, WorkloadSource)
    source = replace(source, concurrency=concurrency)
    need = measure(source)
    recorder = Recorder()
    free = a_run(source, need, profile, infinite(source, need, profile, rules), recorder, rules)
    sizes = [int(free.peak_bytes * share) for share in (0.05, 0.1, 0.2, 0.5, 1.0)]
    bounds = upper_bound(source, profile, sizes)
    assert 0.0 < free.tally.token_hit_rate <= bounds[-1].token_hit_rate + SLACK
    assert free.tally.flops_saved <= bounds[-1].flops_saved + SLACK
    for size, bound in zip(sizes[:-1], bounds, strict=False):
        for policy in ("lru", "hvd", Clairvoyant(Costs(profile), recorder.uses)):
            tally = a_run(source, need, profile, Tiers(size), policy, rules).tally
            assert tally.token_hit_rate <= bound.token_hit_rate + SLACK
            assert tally.flops_saved <= bound.flops_saved + SLACK


@pytest.mark.parametrize("spec", SPECS[:2])
def test_no_run_is_above_the_bound(spec):
    check_runs(spec, HYBRID, 1, CheckpointRules(), limit=30)


def test_no_run_of_pages_alone_or_of_requests_that_overlap_is_above_the_bound():
    check_runs(SPECS[2], ATTENTION, 3, CheckpointRules(), limit=30)


RUNS = ((1, 0, HYBRID), (1, 512, HYBRID), (4, 0, HYBRID), (1, 0, ATTENTION))


@pytest.mark.parametrize(("number", "spec"), list(enumerate(SPECS)))
def test_no_longer_run_is_above_the_bound(number, spec):
    """Each workload with one of the runs, each run with a quarter of the workloads."""
    concurrency, every, profile = RUNS[(number + number // 4) % 4]
    check_runs(spec, profile, concurrency, CheckpointRules(every=every), limit=120)
