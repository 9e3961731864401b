"""Checkpoint policies that learn: what they take, what they stop taking, and what they come back to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tiercache.core import PoolName, TokenArray
from tiercache.errors import ConfigError
from tiercache.index import (
    CHECKPOINTS,
    CheckpointPlan,
    CheckpointRules,
    Checkpoints,
    PromptView,
    checkpoints_named,
)
from tiercache.index.checkpoints.departures import Departures, Mark, Past
from tiercache.index.checkpoints.memory import PageMemory
from tiercache.lab.replay.alone import IndexCache
from tiercache.policy import CheckpointKind, Lru, ModelProfile
from tiercache.policy.costs import Costs

PAGE = 64
PROFILE = ModelProfile(
    "tiny", kv_bytes_per_token=64, state_bytes=20_000, flops_per_token=1e9, flops_per_context_token=1e4
)
COST = {PoolName.KV: 64 * PAGE, PoolName.MAMBA: 20_000}
AMPLE = 1 << 40
BRANCH, GHOST, PROMPT, INTERVAL, PREDICTED = (
    CheckpointKind[name] for name in ("BRANCH", "GHOST", "PROMPT", "INTERVAL", "PREDICTED")
)


def text(topic: int, pages: int) -> TokenArray:
    return np.random.default_rng(topic).integers(0, 1 << 17, pages * PAGE, dtype=np.uint64)


class Traffic:
    """Requests through a cache of the index alone, and what the policy planned for each."""

    def __init__(self, name: str, capacity: int = AMPLE) -> None:
        self.checkpoints = checkpoints_named(name, Costs(PROFILE))
        self.cache = IndexCache(
            Lru(), page_size=PAGE, page_pools=[PoolName.KV], state_pools=[PoolName.MAMBA], cost=COST,
            capacity=capacity, checkpoints=self.checkpoints,
        )  # fmt: skip
        self.plans: list[tuple[dict[int, CheckpointKind], bool]] = []
        self.restored: list[int] = []
        plan = self.checkpoints.plan

        def noted(prefill):  # type: ignore[no-untyped-def]
            self.plans.append((dict((found := plan(prefill)).depths), found.end))
            return found

        self.checkpoints.plan = noted  # type: ignore[method-assign]
        self._topic = 0

    def ask(self, *parts: TokenArray, answer: TokenArray | None = None) -> None:
        prompt = np.concatenate([*parts, text(10**6 + len(self.plans), 1)[:1]])
        sequence = prompt if answer is None else np.concatenate([prompt[:-1], answer])
        self.restored.append(self.cache.request(prompt, sequence) // PAGE)

    def topic(self) -> int:
        self._topic += 1
        return self._topic

    def chat(self, rounds: int = 4) -> None:
        """A conversation: each prompt goes on from the last answer."""
        said: Sequence[TokenArray] = []
        for _ in range(rounds):
            question, answer = text(self.topic(), 6), text(self.topic(), 3)
            self.ask(*said, question, answer=answer)
            said = [*said, question, answer]

    def stripped(self, rounds: int = 4) -> None:
        """A conversation whose answers lose their reasoning: each prompt goes on from the last prompt."""
        said: Sequence[TokenArray] = []
        for _ in range(rounds):
            question = text(self.topic(), 6)
            self.ask(*said, question, answer=text(self.topic(), 3))
            said = [*said, question, text(self.topic(), 2)]

    def document(self, questions: int = 3) -> None:
        """Questions of two pages about a document of 20 to 50 pages."""
        document = text(self.topic(), 20 + self.topic() * 7 % 31)
        for _ in range(questions):
            self.ask(document, text(self.topic(), 2), answer=text(self.topic(), 1))


def times(count: int, act: Callable[[], None]) -> None:
    for _ in range(count):
        act()


def test_at_first_the_learned_checkpoints_are_those_of_the_rules():
    fixed, learned = Traffic("rules"), Traffic("learned")
    for one in (fixed, learned):
        one.chat(3)
        one.document(1)
        one.stripped(2)
    assert learned.plans == fixed.plans
    assert learned.restored == fixed.restored


def test_a_kind_of_checkpoint_that_nobody_uses_is_given_up_and_comes_back_when_it_is_missed():
    traffic = Traffic("learned")

    def takes_prompt_ends() -> bool:
        return any(PROMPT in depths.values() for depths, _ in traffic.plans[-4:])

    times(30, traffic.chat)
    assert not takes_prompt_ends()
    assert traffic.restored[-4:] == [0, 9, 18, 27]
    times(25, traffic.stripped)
    assert takes_prompt_ends()
    assert traffic.restored[-4:] == [0, 6, 14, 22]
    times(150, traffic.chat)
    assert not takes_prompt_ends()
    assert traffic.restored[-4:] == [0, 9, 18, 27]


def test_the_first_request_of_a_group_leaves_a_state_before_the_question():
    fixed, learned = Traffic("rules"), Traffic("learned")
    for one in (fixed, learned):
        times(40, one.document)
    depths, _ = learned.plans[-3]
    (at,) = (depth for depth, kind in depths.items() if kind is PREDICTED)
    length = learned.restored[-1]
    assert at == length, "the second question restores the whole document"
    assert learned.restored[-3:] == [0, length, length]
    assert fixed.restored[-3:] == [0, 0, length], "under the rules only the third one does"
    assert sum(len(depths) for depths, _ in learned.plans[-60:]) < sum(
        len(depths) for depths, _ in fixed.plans[-60:]
    )


def test_a_prompt_that_leaves_the_last_one_a_little_deeper_each_time_finds_a_state_there():
    """An agent whose old observations are replaced leaves its last turn two pages deeper each time."""
    fixed, learned = Traffic("rules"), Traffic("learned")

    def session(traffic: Traffic) -> None:
        kept = text(traffic.topic(), 30)
        for turn in range(8):
            shared = kept[: (10 + 2 * turn) * PAGE]
            coming = kept[len(shared) : len(shared) + 2 * PAGE]
            traffic.ask(shared, coming, text(traffic.topic(), 12), answer=text(traffic.topic(), 1))

    for one in (fixed, learned):
        times(20, lambda one=one: session(one))
    assert learned.restored[-6:] == [14, 16, 18, 20, 22, 24], "all that they share"
    assert fixed.restored[-6:] == [12, 14, 16, 18, 20, 22], "under the rules, what the last but one shared"


def test_what_evictions_cost_is_the_price_of_a_state():
    policy = checkpoints_named("learned", Costs(PROFILE))
    digests = np.arange(1, 7, dtype=np.uint64) << np.uint64(40)
    prefill = PromptView(0, 0, 0, 6 * PAGE + 1, PAGE, lambda: digests)
    both = CheckpointPlan({6: PROMPT}, end=True)
    assert policy.plan(prefill) == both, "nothing was evicted, so states cost nothing"
    policy.began(prefill, missed=6)
    policy.lost(COST[PoolName.MAMBA] / 100)
    other = replace(prefill, digests=lambda: digests + np.uint64(1 << 50))
    assert policy.plan(other) == CheckpointPlan({}, end=False), "so many bytes cost a hundred times as much"
    policy.lost(COST[PoolName.MAMBA] * 100)
    assert policy.plan(other) == both, "and now a hundredth"


def test_pages_are_forgotten_when_others_take_their_places():
    memory, rng = PageMemory(), np.random.default_rng(0)
    old, new = (rng.integers(1, 1 << 64, count, dtype=np.uint64) for count in (1000, 1 << 20))
    memory.computed(old, 1)
    assert (memory.known(old), memory.known(new), memory.owner(old[999])) == (1000, 0, 1)
    memory.computed(old[500:], 2)
    assert [memory.owner(digest) for digest in old[[498, 999]]] == [1, 2], "who computed it last"
    memory.computed(new, 3)
    assert sum(memory.owner(digest) is not None for digest in old) < 50
    assert sum(memory.owner(digest) is not None for digest in new[::256]) < 1200, "a quarter of them, at most"
    assert memory.known(new) == len(new)


def test_every_so_many_tokens_and_nothing_else():
    traffic = Traffic("every:256")
    traffic.ask(text(1, 13), answer=text(2, 9))
    assert traffic.plans == [({4: INTERVAL, 8: INTERVAL, 12: INTERVAL}, False)]


@pytest.mark.parametrize("name", ["rules", "every:64", "learned"])
def test_equal_requests_in_an_equal_order_give_equal_plans(name: str):
    one, other = Traffic(name, 2_000_000), Traffic(name, 2_000_000)
    for traffic in (one, other):
        for _ in range(12):
            traffic.chat()
            traffic.document()
    assert one.plans == other.plans
    assert one.restored == other.restored
    for depths, _ in one.plans:
        assert list(depths) == sorted(depths)
        assert len(depths) < one.checkpoints.most(60 * PAGE, PAGE) + 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("best", "no checkpoint policy 'best'; use rules, every, learned"),
        ("every", "'every' needs a number of tokens from 1"),
        ("every:0", "'every:0' needs a number of tokens from 1"),
        ("sparse", "no checkpoint policy 'sparse'"),
        ("learned:2", "'learned' has no parameter"),
    ],
)
def test_names_that_cannot_be(name: str, said: str):
    with pytest.raises(ConfigError, match=said):
        checkpoints_named(name)


def test_every_name_makes_a_policy_of_its_own():
    for name in CHECKPOINTS:
        spec = f"{name}:64" if name == "every" else name
        one, other = checkpoints_named(spec), checkpoints_named(spec)
        assert isinstance(one, Checkpoints)
        assert one is not other
    assert checkpoints_named(CheckpointRules(per_path=3)).per_path == 3


def test_the_rates_of_a_class_are_its_own_once_it_has_been_seen_often_enough():
    """Answers reach the next page boundary only if their prompts end late in a page."""
    departures = Departures()
    early, late, rare = (
        Past(0, 8, 8, Mark.FRESH, size, quarter) for size, quarter in ((2, 0), (2, 3), (5, 1))
    )
    assert departures.rates(early)[:3] == [1.0, 1.0, 1.0], "as the rules"
    for _ in range(100):
        for past, depth in ((early, 8), (late, 9)):
            departures.began(past)
            departures.left(past, depth)
    departures.refresh()
    rates = {past: departures.rates(past) for past in (early, late, rare)}
    assert rates[early][Mark.PROMPT] > 0.9 > 0.1 > rates[early][Mark.END]
    assert rates[late][Mark.END] > 0.9 > 0.1 > rates[late][Mark.PROMPT]
    assert rates[rare][Mark.END] == pytest.approx(0.5, abs=0.05), "as the requests of its kind"
    assert rates[late][Mark.BRANCH] < 0.1
