"""`gdsf`: its formula by hand, its two bases, superseded states, and what the tier below holds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policy.rig import COSTS, units
from tiercache.policy import CheckpointKind
from tiercache_lab.policies.gdsf import Gdsf

END, PROMPT, BRANCH = CheckpointKind.END, CheckpointKind.PROMPT, CheckpointKind.BRANCH


def test_gdsf_is_frequency_by_density():
    asked = units(
        depth=4, replay=4, nbytes=[7, 14, 7, 7], hits=[0, 0, 3, 0], children=[0, 0, 2, 1], page_tokens=1
    )
    assert Gdsf(COSTS).rank(asked).tolist() == pytest.approx([8, 4, 32, 0.08])


def test_for_gdsf_what_the_tier_below_holds_goes_first_and_by_frequency():
    asked = units(
        depth=4,
        replay=4,
        nbytes=[7, 7, 70, 7],
        hits=[1, 0, 2, 0],
        children=[0, 0, 0, 1],
        covered=1,
        page_tokens=1,
    )
    ranks = Gdsf(COSTS).rank(asked)
    assert list(np.argsort(ranks)) == [3, 1, 0, 2]
    dear, lost = (
        Gdsf(COSTS).rank(units(depth=900, replay=900, nbytes=1, hits=5, covered=[1, 0])),
        Gdsf(COSTS).rank(units(nbytes=2**40)),
    )
    assert dear[0] < lost[0] < dear[1]


def test_gdsf_s_base_is_that_of_the_last_access_and_only_rises():
    policy = Gdsf(COSTS)

    def ranks(now: int, *last_access: int) -> list[float]:
        return list(
            policy.rank(
                units(depth=1, replay=1, nbytes=11, last_access=list(last_access), page_tokens=1, now=now)
            )
        )

    assert ranks(5, 0, 5) == [1, 1]
    policy.evicted(100.0)
    assert ranks(7, 0, 4, 5, 6, 7) == [1, 1, 101, 101, 101]
    policy.evicted(30.0)
    assert ranks(8, 0, 4, 5, 6, 7, 8) == [1, 1, 101, 101, 101, 101]
    policy.evicted(101.0)
    policy.evicted(102.0)
    assert ranks(9, 4, 5, 7, 8, 9) == [1, 101, 101, 103, 103]


def test_for_gdsf_a_dear_unit_that_is_not_used_is_overtaken():
    """A unit that is never used is evicted in the end, even if it is worth 100 times the others.

    More than 100 and fewer than 2000 units are evicted until it goes.
    """
    policy = Gdsf(COSTS)
    cheap = 10
    alive = {"dear": 0} | {f"first {n}": 0 for n in range(cheap)}
    now = gone = 0
    while "dear" in alive:
        now, gone = now + 1, gone + 1
        alive[f"new {now}"] = now
        nbytes = [1 if name == "dear" else 100 for name in alive]
        ranks = policy.rank(
            units(depth=1, replay=1, nbytes=nbytes, last_access=list(alive.values()), now=now, page_tokens=1)
        )
        least = int(np.argmin(ranks))
        policy.evicted(float(ranks[least]))
        del alive[list(alive)[least]]
        assert gone < 2000
    assert gone > 100


@pytest.mark.parametrize("kind", [BRANCH, CheckpointKind.GHOST])
@pytest.mark.parametrize("hits", [0, 1, 5])
def test_for_gdsf_a_state_at_a_branch_is_not_superseded_by_the_one_continuation_that_is_left(
    kind: CheckpointKind, hits: int
):
    asked = units(depth=4, replay=4, nbytes=7, hits=hits, children=[0, 1, 2], checkpoint=kind, page_tokens=1)
    assert Gdsf(COSTS).rank(asked).tolist() == [8 * (1 + hits)] * 3


@pytest.mark.parametrize("kind", [PROMPT, END, CheckpointKind.INTERVAL, CheckpointKind.NONE])
def test_for_gdsf_what_is_hit_more_often_than_its_session_goes_on_is_not_superseded(kind: CheckpointKind):
    """A prompt that is repeated hits the state at its end, time and again, with the same answer behind it."""
    asked = units(
        depth=4,
        replay=4,
        nbytes=7,
        hits=[1, 2, 4, 5],
        lineage=[0, 0, 3, 3],
        children=1,
        checkpoint=kind,
        page_tokens=1,
    )
    assert Gdsf(COSTS).rank(asked).tolist() == pytest.approx([0.08, 24, 0.08, 48])


def test_for_gdsf_seven_hits_count():
    """At most seven hits of a unit count, so that a unit that was once popular does not stay for ever."""
    asked = units(
        depth=4,
        replay=4,
        nbytes=7,
        hits=[6, 7, 8, 10**6],
        checkpoint=BRANCH,
        children=[2, 1, 0, 1],
        page_tokens=1,
    )
    assert Gdsf(COSTS).rank(asked).tolist() == [56, 64, 64, 64]
