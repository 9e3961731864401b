"""Checkpoints that the index asks for, their reasons, the cuts of prefills, and the cap on a path."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.index.harness import KV, MAMBA, Harness
from tests.index.model import tokens_of
from tiercache.errors import ConfigError
from tiercache.index import CheckpointRules, Origin, checkpoint_depths, checkpoints_named, plan_prefill
from tiercache.policy import CheckpointKind

BRANCH, GHOST, PROMPT, INTERVAL, END = (
    CheckpointKind[name] for name in ("BRANCH", "GHOST", "PROMPT", "INTERVAL", "END")
)


def plan(harness: Harness, path: tuple[int, ...], tail: int = 1, depth: int = 0) -> dict[int, CheckpointKind]:
    match = harness.match(path, tail)
    return dict(harness.index.plan_checkpoints(match, tokens_of(path, tail), depth).depths)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (CheckpointRules(), {3: BRANCH, 5: GHOST, 8: PROMPT}),
        (CheckpointRules(branch=False), {5: GHOST, 8: PROMPT}),
        (CheckpointRules(ghost=False), {3: BRANCH, 8: PROMPT}),
        (CheckpointRules(prompt_end=False), {3: BRANCH, 5: GHOST}),
        (
            CheckpointRules(every=8, ghost=False),
            {2: INTERVAL, 3: BRANCH, 4: INTERVAL, 6: INTERVAL, 8: PROMPT},
        ),
        (
            CheckpointRules(every=1, branch=False, ghost=False, prompt_end=False),
            dict.fromkeys(range(1, 9), INTERVAL),
        ),
        (CheckpointRules(branch=False, ghost=False, prompt_end=False, request_end=False), {}),
    ],
)
def test_each_rule_can_be_switched(rules: CheckpointRules, expected: dict[int, CheckpointKind]):
    assert checkpoint_depths(0, 3, 33, page_size=4, ghost_depth=5, rules=rules) == expected


def test_depths_are_in_order_beyond_what_is_restored_and_a_hit_leaves_a_token():
    assert list(checkpoint_depths(4, 3, 33, page_size=4, ghost_depth=5)) == [5, 8]
    assert checkpoint_depths(0, 0, 32, page_size=4) == {7: PROMPT, 8: PROMPT}, "a repeat, and a continuation"
    assert checkpoint_depths(0, 0, 3, page_size=4) == {}


def test_rules_that_cannot_be():
    with pytest.raises(ConfigError, match="every"):
        CheckpointRules(every=-1)


def test_rules_have_names():
    assert checkpoints_named("rules") == CheckpointRules()
    every = checkpoints_named("every:8")
    assert checkpoint_depths(0, 3, 33, page_size=4, ghost_depth=5, rules=every) == dict.fromkeys(
        (2, 4, 6, 8), INTERVAL
    ), "every so many tokens, and nothing else"
    assert not every.request_end
    assert checkpoints_named(every) is every
    assert (every.most(33, 4), CheckpointRules().most(33, 4)) == (4, 5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("best", "no checkpoint policy 'best'; use rules, every"),
        ("every", "'every' needs a number of tokens from 1"),
        ("every:" + "9" * 5000, "needs a number of tokens from 1"),
        ("every:0", "'every:0' needs a number of tokens from 1"),
        ("rules:2", "'rules' has no parameter"),
    ],
)
def test_names_that_cannot_be(name: str, said: str):
    with pytest.raises(ConfigError, match=said):
        checkpoints_named(name)


def test_a_prompt_that_repeats_what_was_evicted_checkpoints_where_the_repeat_ends():
    h = Harness(MAMBA)
    h.insert((1, 2, 3, 4, 5), 5)
    h.evict(kv=5)
    assert not h.edges
    h.index.touch(h.match((9,)))
    assert plan(h, (1, 2, 3, 7, 8)) == {3: GHOST, 5: PROMPT}
    assert plan(h, (1, 2, 3, 4, 5)) == {5: PROMPT}, "the prompt's end is where the repeat ends"
    assert plan(h, (7, 2, 3)) == {3: PROMPT}


def test_a_repeat_goes_on_behind_what_is_still_there():
    h = Harness(MAMBA)
    h.insert((1, 2, 6), 3)
    h.insert((1, 2, 3, 4, 5), 5)
    h.index.touch(h.match((1, 2, 6)))
    h.evict(kv=1)  # the leaf (3, 4, 5), which was used longest ago
    assert h.edges == [(1, 2, 6)]
    assert plan(h, (1, 2, 3, 4, 8, 9)) == {2: BRANCH, 4: GHOST, 6: PROMPT}


def test_ghosts_are_forgotten_after_a_thousand_requests():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 3)
    h.evict(kv=3)
    for _ in range(999):
        h.index.touch(h.match((9,)))
    assert plan(h, (1, 2, 7)) == {2: GHOST, 3: PROMPT}
    h.index.touch(h.match((9,)))
    assert plan(h, (1, 2, 7)) == {3: PROMPT}


def test_other_adapters_have_other_ghosts():
    h = Harness(MAMBA)
    h.insert((1, 2, 3), 3, extra=b"a")
    h.evict(kv=3)
    tokens = tokens_of((1, 2, 7), 1)
    assert 2 in h.index.plan_checkpoints(h.index.match(tokens, b"a"), tokens, 0).depths
    assert 2 not in h.index.plan_checkpoints(h.index.match(tokens, b"b"), tokens, 0).depths


def test_without_state_pools_nothing_is_asked_for():
    h = Harness()
    h.insert((1, 2, 3))
    assert plan(h, (1, 2, 9)) == {}


def test_a_session_knows_its_length_even_when_its_states_were_lost():
    h = Harness(MAMBA)

    def turn(path: tuple[int, ...]) -> Origin:
        match = h.match(path)
        origin = h.index.touch(match, tokens_of(path, 1))
        h.inserts += 1
        slots = np.arange(len(path)) + 100 * h.inserts
        h.index.insert(
            tokens_of(path), {KV: slots}, {len(path): {MAMBA: 10_000 * h.inserts + len(path)}}, origin=origin
        )
        return origin

    assert turn((1, 2)) == Origin(0, 0)
    assert turn((1, 2, 3)) == Origin(1, 2)
    assert turn((1, 2, 3, 4)) == Origin(2, 3)
    h.index.evict_device(h.index.evictable(0))
    assert turn((1, 2, 3, 4, 5)) == Origin(3, 4), "found by what is remembered of it"
    assert turn((1, 2, 8)) == Origin(1, 2), "another branch, of the first turn"


@pytest.mark.parametrize(
    ("depth", "path_depth", "tokens", "expected"),
    [
        (0, 0, 25, (6,)), (0, 3, 25, (3, 6)), (3, 3, 25, (6,)), (0, 3, 24, (3, 5, 6)), (5, 6, 24, (6,)),
        (6, 6, 25, ()), (0, 6, 25, (6,)), (0, 6, 24, (5, 6)), (0, 0, 3, ()), (0, 0, 4, (1,)), (0, 0, 0, ()),
    ],
)  # fmt: skip
def test_checkpoints(depth: int, path_depth: int, tokens: int, expected: tuple[int, ...]):
    assert tuple(checkpoint_depths(depth, path_depth, tokens, page_size=4)) == expected


@pytest.mark.parametrize(
    ("prompt", "restored", "limit", "checkpoints", "ends"),
    [
        (1000, 944, 40, (), [976, 1000]),  # the pages have 16 tokens
        (15, 0, 100, (), [15]),
        (48, 0, 100, (), [48]),
        (50, 0, 40, (), [32, 50]),
        (50, 20, 100, (), [32, 50]),  # no state of the page would be left otherwise
        (30, 0, 10, (), [10, 16, 26, 30]),  # a page beyond the limit
        (100, 0, 100, (16, 48, 100), [16, 48, 100]),
        (100, 48, 100, (16, 48, 80), [80, 100]),
        (100, 0, 100, (20,), [20, 32, 100]),
        (16, 16, 100, (), []),
    ],
)
def test_a_prefill_is_cut_at_pages_at_checkpoints_and_at_the_limit(
    prompt, restored, limit, checkpoints, ends
):
    chunks = plan_prefill(prompt, restored, limit, 16, checkpoints)
    assert [chunk.end for chunk in chunks] == ends
    assert [chunk.end for chunk in chunks if chunk.checkpoint] == [at for at in checkpoints if at > restored]


@given(st.data(), st.integers(0, 200), st.integers(1, 60), st.integers(1, 40))
def test_each_chunk_is_as_long_as_its_cuts_allow(data, prompt, limit, page):
    restored = data.draw(st.integers(0, prompt))
    checkpoints = sorted(data.draw(st.sets(st.integers(1, prompt), max_size=5))) if prompt else []
    chunks = plan_prefill(prompt, restored, limit, page, checkpoints)
    assert [restored, *(chunk.end for chunk in chunks)] == [*(chunk.start for chunk in chunks), prompt]
    for chunk in chunks:
        inside = range(chunk.start + 1, chunk.end)
        assert chunk.start < chunk.end <= chunk.start + limit
        assert not {*inside} & {*checkpoints}
        assert not chunk.start % page or not any(at % page == 0 for at in inside)
        if not (chunk.end in checkpoints or chunk.end == prompt):  # why it ends here: the page, or the limit
            assert chunk.end % page == 0 or chunk.end == chunk.start + limit
        if chunk.end % page == 0 and chunk.start % page == 0 and chunk.end not in (*checkpoints, prompt):
            assert chunk.end + page > chunk.start + limit  # no further page fits
    assert all(first.end == second.start for first, second in pairwise(chunks))
