"""The index's tree as policies see it, and the hits and misses that policies are told of."""

from __future__ import annotations

import numpy as np

from tests.index.seen import Seen, copied, digest_of
from tests.index.states import drop_state
from tests.integrity import check_index
from tests.policy.rig import BYTES, KV, STATE, PlainUnits, Rig, random_units, tokens_of, units
from tiercache.core import Tier
from tiercache.policy import CheckpointKind, Lru, UnitKind


def at_depth(asked: PlainUnits, depth: int) -> dict[str, int]:
    (row,) = np.flatnonzero(asked.depth == depth)
    return {name: int(column[row]) for name, column in asked.columns.items()}


def test_a_policy_sees_what_the_tree_is():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2, 3, 4, 5), (2, 5))
    rig.request((1, 2, 8), (3,))
    rig.touch((1, 2, 8))
    rig.touch((1, 2, 8))
    rig.copy((1, 2, 8))
    rig.evict_device(1)
    leaves = policy.seen[-1]
    assert (len(leaves), leaves.now, leaves.page_tokens) == (2, 5, 2)
    long, short = at_depth(leaves, 5), at_depth(leaves, 3)
    node = rig.match((1, 2, 8)).node
    expected = {
        "kind": UnitKind.LEAF, "last_access": 5, "created": 3, "hits": 2, "children": 0, "replay": 1,
        "nbytes": BYTES[KV], "covered": 1,
        "depth": 3, "digest": int(node.digests[-1].view(np.int64)),
        "checkpoint": CheckpointKind(1 + (1 + 3) % 5),
    }  # fmt: skip
    assert {name: short[name] for name in expected} == expected
    assert [long[name] for name in ("hits", "replay", "nbytes", "covered")] == [
        0, 3, 3 * BYTES[KV], 0,
    ]  # fmt: skip
    rig.evict_device(0, 1)
    states = policy.seen[-1]
    inner = at_depth(states, 2)
    expected = {
        "kind": UnitKind.STATE, "children": 1, "replay": 2, "nbytes": BYTES[STATE], "covered": 0, "hits": 1,
        "created": 1,
    }  # fmt: skip
    assert {name: inner[name] for name in expected} == expected
    assert at_depth(states, 3)["covered"] == 1
    rig.evict_host(1)
    assert at_depth(policy.seen[-1], 3)["nbytes"] == 3 * BYTES[KV] + BYTES[STATE], "one budget for both"


def test_a_state_that_is_taken_again_is_a_new_unit_and_its_pages_are_not():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2, 3), (2, 3))  # tick 1
    rig.request((1, 9), (2,))  # tick 2, and cuts the edge of the first request at depth 1
    rig.evict_device(0, 2)
    rig.request((1, 2, 3), (3,))  # tick 3 takes the state anew
    rig.evict_device(1)
    assert sorted(policy.seen[-1].created.tolist()) == [2, 3]


def test_a_policy_that_is_not_steady_ranks_a_sample():
    policy = Seen()
    rig = Rig(policy)
    for turn in range(900):
        rig.request((turn, 1, 2, 3, 4), (1, 2, 3, 4, 5))
    rig.evict_device(0, 1)
    assert len(policy.seen[-1]) == 4096


def test_a_unit_is_covered_when_a_lower_tier_holds_all_that_goes():
    policy = Seen()
    rig = Rig(policy)
    for path in ((1, 1), (2, 2), (3, 3), (4, 4)):
        rig.request(path, (2,))
    rig.copy((1, 1))
    rig.store((2, 2))
    rig.copy((3, 3))
    span = rig.match((3, 3)).node
    assert drop_state(rig.index, span, STATE, Tier.HOST) >= 0
    rig.evict_device(1)
    covered = dict(zip(policy.seen[-1].digest, policy.seen[-1].covered, strict=True))
    assert [covered[digest_of(rig, (n, n))] for n in (2, 3, 4)] == [1, 0, 0]
    rig.evict_host(1)
    assert policy.seen[-1].covered.tolist() == [0, 0], "of the host's two, the store has none"


def test_without_states_replay_is_the_edge():
    policy = Seen()
    rig = Rig(policy, states=False)
    rig.request((1, 2, 3))
    rig.request((1, 2, 4, 5))
    rig.evict_device(1)
    assert sorted(zip(policy.seen[-1].depth, policy.seen[-1].replay, strict=True)) == [(3, 1), (4, 2)]


def test_rows_are_used_again():
    rig = Rig(Lru())
    for n in range(1000):
        rig.request((n, 1, 2), (1, 3))
        if n >= 20:
            there = rig.index.evictable(Tier.DEVICE)
            rig.index.evict_device({KV: max(0, there[KV] - 60), STATE: max(0, there[STATE] - 40)})
    # private: a row that is never used again costs memory and shows nowhere else
    assert len(rig.index._columns.nodes) < 200
    check_index(rig.index)


def test_a_policy_is_told_of_hits_before_they_count():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2, 3), (2, 3))
    rig.touch((1, 2, 3))
    rig.touch((9,))
    rig.touch((1, 2, 3))
    first, second = policy.told
    assert (first.depth, first.replay, first.hits, first.age, first.evicted) == (3, 1, 0, 0, False)
    assert (second.hits, second.age) == (1, 0)
    assert first.digest == digest_of(rig, (1, 2, 3))


def test_a_policy_is_told_of_the_deepest_miss_of_what_was_lost():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2, 3, 4), (2, 4))
    digest = digest_of(rig, (1, 2, 3, 4))
    rig.evict_device(4, 2)
    assert not any(rig.index.evictable(Tier.DEVICE).values())
    rig.touch((1, 2, 3))
    (missed,) = policy.told
    assert (missed.depth, missed.evicted) == (2, True)
    rig.touch((1, 2, 3, 4, 5))
    assert policy.told[1].digest == digest
    rig.touch((1, 2, 3, 4, 5))
    assert len(policy.told) == 2, "once"


def test_what_came_back_is_lost_no_more():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2), (2,))
    rig.evict_device(2)
    # private: a policy is not told of what it has no hit of
    assert rig.index._ghosts.has_units
    rig.index.insert(tokens_of((1, 2)), {KV: rig.fresh(2)}, {2: {STATE: 77}})
    assert not rig.index._ghosts.has_units  # private: as above
    rig.evict_device(2)
    rig.request((1, 2), (2,))
    assert [reuse.evicted for reuse in policy.told] == [True]
    rig.touch((1, 2))
    assert [reuse.evicted for reuse in policy.told] == [True, False]


def test_a_policy_learns_of_all_that_could_answer_and_of_what_was_lost():
    policy = Seen()
    rig = Rig(policy)
    rig.request((1, 2, 3), (2, 3))
    rig.request((4, 5), (2,))
    rig.request((6,), ())
    rig.evict_device(2)
    assert sorted(policy.seen[-1].depth.tolist()) == [2, 3], "dead weight is not ranked"
    while not policy.learned:
        rig.touch((7,))
    live, gone = policy.learned[-1]
    pinned = {
        (int(depth), int(checkpoint)) for depth, checkpoint in zip(live.depth, live.checkpoint, strict=True)
    }
    lost = [int(depth) for depth in gone.depth]
    assert len(live) + len(gone) == 3
    assert all(checkpoint for _, checkpoint in pinned)
    assert len(lost) == 1


def test_ranked_units_are_those_that_policies_are_tested_with():
    """`units` and `random_units` have every column of `Units`."""
    for asked in (units(3), random_units(3)):
        assert copied(asked).columns.keys() == asked.columns.keys()
