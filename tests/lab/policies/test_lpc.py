"""Learned prefix caching: what the regression learns, and from which answers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policy.rig import HUGE, PlainUnits, random_units, reuse_of, units
from tiercache.policy import CheckpointKind
from tiercache_lab.policies.lpc import Lpc

pytestmark = pytest.mark.slow

ENDS, PROMPTS = CheckpointKind.END, CheckpointKind.PROMPT
NONE = units(0)


def some(now: int, first: int, kind: CheckpointKind) -> PlainUnits:
    """Make 50 units of one kind, of ages from 1 on."""
    ages = np.arange(50) + 1
    return units(now=now, digest=first + ages, checkpoint=kind, last_access=now - ages, depth=4)


def lived(policy: Lpc, *, used: CheckpointKind, late: int = 0, lost: bool = False, rounds: int = 15) -> Lpc:
    """Let the policy see units of two kinds, of which one kind is used, `late` rounds after it was drawn."""
    asked: list[tuple[int, PlainUnits]] = []
    for turn in range(rounds):
        now = 100 * (turn + 1)
        both = [some(now, 1000 * turn + 200 * kind, kind) for kind in (ENDS, PROMPTS)]
        for due, one in asked:
            if due == turn:
                for row in range(len(one)):
                    policy.reused(reuse_of(one, row, evicted=lost))
        asked.append((turn + 1 + late, both[used is PROMPTS]))
        columns = {name: np.concatenate([one.columns[name] for one in both]) for name in both[0].columns}
        shown = PlainUnits(100, now, 64, **columns)
        fillers = units(now=now, last_access=now - 40)
        policy.learn(*((fillers, shown) if lost else (shown, NONE)))
    return policy


def prefers(policy: Lpc) -> CheckpointKind:
    """Return which kind ranks higher, although it is older."""
    ranks = policy.rank(units(now=500, last_access=[480, 490], checkpoint=[ENDS, PROMPTS]))
    older = policy.rank(units(now=500, last_access=[490, 480], checkpoint=[ENDS, PROMPTS]))
    assert np.argmax(ranks) == np.argmax(older), "age alone decides"
    return (ENDS, PROMPTS)[int(np.argmax(ranks))]


def test_before_it_has_learned_it_is_lru():
    asked = units(now=1000, last_access=[5, 900, 1], lineage=[0, 3, 0], checkpoint=[1, 2, 3])
    assert np.argsort(Lpc().rank(asked)).tolist() == [2, 0, 1]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("used", [ENDS, PROMPTS])
def test_it_learns_which_kind_is_used_from_hits_and_from_misses(used: CheckpointKind, lost: bool) -> None:
    assert prefers(lived(Lpc(), used=used, lost=lost)) is used


def test_a_use_that_comes_too_late_is_none():
    """Twice the mean age is 50 ticks, so at least 64; a round has 100. After one round all is over."""
    soon, late = (lived(Lpc(), used=ENDS, late=late) for late in (0, 3))
    asked = units(now=500, last_access=490, checkpoint=ENDS)
    assert soon.rank(asked) > 0 > late.rank(asked)


def test_the_same_calls_give_the_same_ranks_and_another_seed_draws_otherwise():
    asked = random_units(300)
    ranks = []
    for seed in (1, 1, 2):
        policy = Lpc(seed)
        for turn in range(8):
            for row in range(0, 300, 7):
                policy.reused(reuse_of(asked, row))
            policy.learn(asked.take(np.arange(300), 10_000 + 3000 * turn), asked.take(np.arange(9)))
        ranks.append(policy.rank(asked))
    np.testing.assert_array_equal(ranks[0], ranks[1])
    assert (ranks[0] != ranks[2]).any()


def test_an_expected_hit_raises_the_rank_above_all_others():
    asked = units(now=1000, last_access=[999, 1, 1], expected=[0, 0, 1005])
    assert np.argmax(Lpc().rank(asked)) == 2


def test_what_waits_for_an_answer_is_bounded_and_units_without_a_name_are_no_examples():
    policy = Lpc()
    old = units(300, now=HUGE, digest=np.arange(300) + 1)
    for _ in range(200):
        policy.learn(old, NONE)
    assert len(policy._digests) == 1 << 15  # private: nothing else tells what it keeps
    policy = Lpc()
    policy.learn(units(5, now=100), units(5, now=100))
    assert not len(policy._digests)  # private: as above
