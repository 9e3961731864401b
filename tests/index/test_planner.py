"""The prefill planner: one test for each rule, vLLM's published cases, and properties against a walk that
goes token by token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tiercache.errors import InputError
from tiercache.index import checkpoint_depths
from tiercache.index.planner import (
    Chunk,
    PrefillRules,
    Speculated,
    StateBlocks,
    after_speculation,
    next_chunk,
    plan_prefill,
    state_blocks,
    state_memory,
)

RULES = PrefillRules(block=16)

Case: TypeAlias = tuple[int, int, int, PrefillRules, tuple[int, ...]]
"""The arguments of `next_chunk`."""


def ends(
    prompt: int, restored: int, limit: int, rules: PrefillRules = RULES, checkpoints: Sequence[int] = ()
) -> list[int]:
    chunks = plan_prefill(prompt, restored, limit, rules, checkpoints)
    assert [c.start for c in chunks] == [restored, *(c.end for c in chunks)][:-1]
    return [c.end for c in chunks]


# --- the rules, one by one
# ------------------------------------------------------------------------------------------------------------


def test_a_chunk_that_does_not_reach_the_end_ends_at_a_multiple_of_the_block():
    assert next_chunk(1000, 0, 100, RULES) == Chunk(0, 96)
    assert next_chunk(1000, 96, 16, RULES) == Chunk(96, 112)
    assert next_chunk(1000, 96, 31, RULES) == Chunk(96, 112)


def test_a_prompt_within_one_block_is_one_chunk_and_not_private():
    assert plan_prefill(15, 0, 100, RULES) == (Chunk(0, 15),)
    assert plan_prefill(16, 0, 100, RULES) == (Chunk(0, 16),)


def test_the_last_chunk_is_split_at_the_last_boundary_that_a_repeat_may_restore():
    assert ends(40, 0, 100) == [32, 40]
    assert ends(40, 32, 100) == [40]


def test_a_prompt_of_whole_blocks_is_split_one_block_before_its_end():
    """A hit leaves at least one token to compute, so that the state at the end would serve no repeat."""
    assert ends(48, 0, 100) == [32, 48]
    assert RULES.last_boundary(48) == 32
    assert RULES.last_boundary(49) == 48


def test_lookahead_moves_the_last_boundary_back():
    assert [PrefillRules(16, lookahead=n).last_boundary(50) for n in (0, 1, 2, 3, 18, 19)] == [
        48,
        48,
        48,
        32,
        32,
        16,
    ]
    assert ends(50, 0, 100, PrefillRules(16, lookahead=3)) == [32, 50]


def test_a_speculative_head_that_drops_a_block_moves_the_last_boundary_one_block_back():
    assert ends(50, 0, 100, PrefillRules(16, drops_block=True)) == [32, 50]
    assert ends(50, 0, 100, PrefillRules(16, lookahead=3, drops_block=True)) == [16, 50]


@pytest.mark.parametrize("prompt", [0, 1, 5, 16, 17])
def test_no_boundary_is_before_the_prompt(prompt: int):
    assert PrefillRules(16, lookahead=40, drops_block=True).last_boundary(prompt) == 0


def test_a_chunk_that_starts_inside_a_block_stops_at_the_next_boundary():
    assert ends(200, 20, 100) == [32, 128, 192, 200]
    # also behind the last boundary that a repeat may restore
    assert ends(40, 20, 100, PrefillRules(16, drops_block=True)) == [32, 40]


def test_a_chunk_that_starts_at_a_boundary_runs_past_the_next():
    assert ends(200, 32, 100) == [128, 192, 200]


def test_each_checkpoint_cuts():
    assert plan_prefill(200, 0, 100, RULES, (48, 64, 192)) == (
        Chunk(0, 48, checkpoint=True),
        Chunk(48, 64, checkpoint=True),
        Chunk(64, 160),
        Chunk(160, 192, checkpoint=True),
        Chunk(192, 200),
    )


def test_a_checkpoint_at_the_prompts_end_needs_no_cut_and_is_handed_over():
    assert plan_prefill(48, 0, 100, RULES, (32, 48)) == (
        Chunk(0, 32, checkpoint=True),
        Chunk(32, 48, checkpoint=True),
    )


def test_checkpoints_that_are_computed_already_are_ignored():
    assert plan_prefill(50, 32, 100, RULES, (16, 32)) == (Chunk(32, 48), Chunk(48, 50))


def test_a_checkpoint_inside_a_block_cuts_too_and_the_chunk_after_it_stops_at_the_next_boundary():
    assert plan_prefill(70, 0, 100, RULES, (40,)) == (
        Chunk(0, 40, checkpoint=True),
        Chunk(40, 48),
        Chunk(48, 64),
        Chunk(64, 70),
    )


def test_the_checkpoints_of_the_index_are_cuts_of_the_plan():
    """Three pages are restored, the prompt leaves the known path after five."""
    wanted = [depth * 16 for depth in checkpoint_depths(3, 5, 167, 16)]
    assert wanted == [80, 160]
    assert ends(167, 48, 1000, RULES, wanted) == [80, 160, 167]


def test_a_block_beyond_the_limit_is_crossed_on_private_state():
    rules = PrefillRules(64)
    assert plan_prefill(150, 0, 40, rules) == (
        Chunk(0, 40, private=True),
        Chunk(40, 64),
        Chunk(64, 104, private=True),
        Chunk(104, 128),
        Chunk(128, 150),
    )


def test_a_private_step_that_is_stopped_by_a_checkpoint_is_not_private():
    assert next_chunk(150, 0, 40, PrefillRules(64), (24,)) == Chunk(0, 24, checkpoint=True)
    assert next_chunk(150, 0, 24, PrefillRules(64), (24,)) == Chunk(0, 24, checkpoint=True)


def test_a_block_beyond_the_limit_is_not_begun_where_private_steps_are_off():
    rules = PrefillRules(64, advance_inside=False)
    assert next_chunk(150, 0, 63, rules) == Chunk(0, 0)
    assert next_chunk(150, 0, 64, rules) == Chunk(0, 64)
    assert next_chunk(150, 40, 23, rules) == Chunk(40, 40)
    assert next_chunk(150, 40, 24, rules) == Chunk(40, 64)
    assert next_chunk(150, 128, 21, rules) == Chunk(128, 128)
    assert next_chunk(150, 128, 22, rules) == Chunk(128, 150), "the prompt's end is in reach"


def test_nothing_is_scheduled_without_room_or_without_anything_to_do():
    assert next_chunk(150, 48, 0, RULES) == Chunk(48, 48)
    assert next_chunk(150, 150, 100, RULES, (150,)) == Chunk(150, 150)
    assert next_chunk(0, 0, 100, RULES) == Chunk(0, 0)
    assert plan_prefill(150, 150, 100, RULES) == plan_prefill(0, 0, 1, RULES) == ()


def test_a_model_without_states_needs_no_cut_before_its_tail():
    rules = PrefillRules(16, cuts_tail=False)
    assert ends(50, 0, 100, rules) == [50]
    assert ends(50, 0, 32, rules) == [32, 50]
    assert ends(50, 0, 100, rules, (16,)) == [16, 50]


def test_a_chunk_knows_how_many_tokens_it_computes():
    assert Chunk(32, 48).tokens == 16
    assert Chunk(32, 32).tokens == 0


@pytest.mark.parametrize(
    ("block", "limit", "drops_block", "prompt", "plan"),
    [
        # the steps that vLLM's end-to-end test of its align mode expects
        (560, 3072, True, 1130, [560, 1130]),
        (560, 3072, True, 1690, [1120, 1690]),
        (560, 3072, True, 5610, [2800, 5040, 5610]),
        # the first chunks that its unit test of the split expects
        (1600, 16384, True, 3602, [1600, 3602]),
        (1600, 16384, False, 3602, [3200, 3602]),
    ],
)
def test_published_plans(block: int, limit: int, drops_block: bool, prompt: int, plan: list[int]):
    assert ends(prompt, 0, limit, PrefillRules(block, drops_block=drops_block)) == plan


# --- state blocks and memory
# ----------------------------------------------------------------------------------------------------------


def test_the_state_blocks_of_a_request():
    assert state_blocks(0) == StateBlocks(hit=1, running=1, cached=0)
    assert state_blocks(3, 5) == StateBlocks(hit=1, running=4, cached=5)
    assert state_blocks(3, caching=False) == StateBlocks(hit=0, running=4, cached=0)


@given(page=st.integers(1, 2**40), speculative=st.integers(0, 9), cached=st.integers(0, 9))
def test_the_memory_estimate_counts_every_block(page: int, speculative: int, cached: int):
    """Against the blocks named one by one."""
    run = ["state", *(f"draft {n}" for n in range(speculative))]
    table = ["hit or null", *run, *(f"cached {n}" for n in range(cached))]
    assert state_blocks(speculative, cached).total == len(table) == 2 + speculative + cached
    assert state_memory(page, speculative, cached) == sum(page for _ in table)
    assert state_memory(page, speculative, caching=False) == sum(page for _ in run)


# --- after a speculative step
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "after"),
    [
        (0, Speculated(computed=29, source=0, running=1)),
        (1, Speculated(computed=30, source=1, running=1)),
        (2, Speculated(computed=31, source=2, running=1)),
        (3, Speculated(computed=32, source=3, running=2, cached=1, cached_source=3)),
    ],
)
def test_the_worked_table(accepted: int, after: Speculated):
    """Blocks of 16 tokens, 29 computed, 3 speculative blocks; the state was in block 1 before, for 28 tokens
    as for 29.
    """
    assert 28 // 16 == 1
    assert after_speculation(29, accepted, speculative=3, block=16) == after


def test_a_boundary_crossed_on_the_way_is_cached_from_the_state_that_stood_there():
    assert after_speculation(31, 3, 3, 16) == Speculated(
        computed=34, source=3, running=2, cached=1, cached_source=1
    )


def test_a_boundary_reached_without_a_draft_is_cached():
    assert after_speculation(32, 0, 3, 16) == Speculated(
        computed=32, source=0, running=2, cached=1, cached_source=0
    )
    assert after_speculation(33, 0, 3, 16) == Speculated(computed=33, source=0, running=2)


@pytest.mark.parametrize(
    ("before", "sampled", "copy"),
    [
        (557, 1, None),
        (557, 2, None),
        (557, 3, (3, 0)),
        (557, 4, (3, 0)),
        (558, 1, None),
        (558, 2, (2, 0)),
        (558, 3, (2, 0)),
        (558, 4, (2, 0)),
        (559, 1, (1, 0)),
        (559, 4, (1, 0)),
        (556, 4, (3, 0)),
        (560, 4, None),
    ],
)
def test_the_copies_that_vllms_test_expects(before: int, sampled: int, copy: tuple[int, int] | None):
    """Blocks of 560, 3 drafts a step, `before` tokens at its start; its count of accepted tokens has the one
    without a draft.

    vLLM keeps the running states in consecutive columns of its block table, from the one into which the
    step's last token falls.
    """
    after = after_speculation(before + 1, sampled - 1, speculative=3, block=560)
    first_column = (before + 3) // 560
    assert after.computed == before + sampled
    assert copy == (
        None
        if after.cached is None or after.cached_source is None
        else (first_column + after.cached_source, after.cached)
    )


@given(computed=st.integers(1, 300), speculative=st.integers(0, 8), block=st.integers(1, 40), data=st.data())
def test_states_after_speculation_stand_where_they_should(
    computed: int, speculative: int, block: int, data: st.DataObject
):
    accepted = data.draw(st.integers(0, speculative))
    standing = [computed + n for n in range(1 + speculative)]
    after = after_speculation(computed, accepted, speculative, block)
    assert standing[after.source] == after.computed == computed + accepted
    assert after.running * block <= after.computed < (after.running + 1) * block
    filled = [depth for depth in standing[: accepted + 1] if depth % block == 0]
    if filled:
        assert after.cached is not None
        assert after.cached_source is not None
        assert (after.cached + 1) * block == standing[after.cached_source] == filled[-1]
    else:
        assert after.cached is after.cached_source is None


# --- properties
# ------------------------------------------------------------------------------------------------------------


def walk(prompt: int, start: int, limit: int, rules: PrefillRules, checkpoints: Sequence[int]) -> int:
    """Find the end of one prefill step by trying one token at a time."""
    at, boundary = start, start
    while at < prompt and at - start < limit:
        at += 1
        if at % rules.block == 0:
            boundary = at
    if at < prompt:
        if boundary > start:
            at = boundary
        elif not rules.advance_inside:
            return start
    for stop in range(start + 1, at):
        # the deepest depth that a repeat may restore, before alignment
        hit = min(prompt - 1, prompt - rules.lookahead)
        usable = stop + (rules.block if rules.drops_block else 0)
        last = stop % rules.block == 0 and usable <= hit < usable + rules.block
        if (
            stop in checkpoints
            or (last and rules.cuts_tail)
            or (start % rules.block and stop % rules.block == 0)
        ):
            return stop
    return at


rules_of = st.builds(
    PrefillRules,
    block=st.integers(1, 24),
    lookahead=st.integers(0, 30),
    drops_block=st.booleans(),
    advance_inside=st.booleans(),
    cuts_tail=st.booleans(),
)


@st.composite
def prefills(draw: st.DrawFn, aligned: bool = False) -> Case:
    rules = draw(rules_of)
    step = rules.block if aligned else 1
    prompt = draw(st.integers(1, 150))
    start = draw(st.integers(0, prompt // step)) * step
    depths = draw(st.sets(st.integers(1, max(1, prompt // step)).map(lambda n: n * step), max_size=4))
    return prompt, start, draw(st.integers(0, 60)), rules, tuple(sorted(d for d in depths if d <= prompt))


@settings(max_examples=example_count(500))
@given(prefills())
def test_a_step_ends_where_a_walk_token_by_token_ends(case: Case):
    prompt, start, _, rules, checkpoints = case
    chunk = next_chunk(*case)
    assert chunk.start == start
    assert chunk.end == walk(*case)
    assert chunk.checkpoint == (chunk.end in checkpoints and chunk.tokens > 0)
    assert chunk.private == (
        chunk.tokens > 0 and chunk.end != prompt and chunk.end % rules.block != 0 and not chunk.checkpoint
    )


@settings(max_examples=example_count(300))
@given(prefills())
def test_a_step_is_empty_exactly_when_the_rules_say_so(case: Case):
    prompt, start, limit, rules, _ = case
    reach = range(start + 1, min(start + limit, prompt) + 1)
    waits = not rules.advance_inside and not any(at % rules.block == 0 or at == prompt for at in reach)
    assert (next_chunk(*case).tokens == 0) == (not reach or waits)


@settings(max_examples=example_count(500))
@given(prefills(aligned=True))
def test_a_plan_of_aligned_depths(case: Case):
    prompt, start, limit, rules, checkpoints = case
    limit = max(1, limit)
    try:
        plan = plan_prefill(prompt, start, limit, rules, checkpoints)
    except InputError:
        assert not rules.advance_inside
        assert limit < rules.block
        return
    assert [token for chunk in plan for token in range(chunk.start, chunk.end)] == list(range(start, prompt))
    assert all(0 < chunk.tokens <= limit for chunk in plan)
    cuts = {chunk.end for chunk in plan}
    assert (
        {depth for depth in checkpoints if depth > start}
        == {chunk.end for chunk in plan if chunk.checkpoint}
        <= cuts
    )
    last = rules.last_boundary(prompt)
    assert not rules.cuts_tail or last in cuts or last <= start
    for chunk in plan[:-1]:
        assert chunk.private == (chunk.end % rules.block != 0)
    if limit >= rules.block:
        assert not any(chunk.private for chunk in plan)
        for earlier, later in pairwise(plan):
            needed = earlier.checkpoint or (rules.cuts_tail and earlier.end == last)
            assert needed or earlier.tokens + min(rules.block, later.tokens) > limit, (
                "no cut without a reason"
            )


# --- bad input
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PrefillRules(0), "the block size is 0; pass at least 1"),
        (lambda: PrefillRules(16, lookahead=-1), "the lookahead is -1; pass at least 0"),
        (lambda: next_chunk(-1, 0, 8, RULES), "the prompt's length is -1; pass at least 0"),
        (
            lambda: next_chunk(10, 11, 8, RULES),
            "depth 11 is outside a prompt of 10 tokens; pass one from 0 to 10",
        ),
        (
            lambda: next_chunk(10, -1, 8, RULES),
            "depth -1 is outside a prompt of 10 tokens; pass one from 0 to 10",
        ),
        (
            lambda: plan_prefill(10, 11, 8, RULES),
            "depth 11 is outside a prompt of 10 tokens; pass one from 0 to 10",
        ),
        (lambda: next_chunk(10, 0, -1, RULES), "the chunk limit is -1; pass at least 0"),
        (lambda: plan_prefill(10, 0, 0, RULES), "the chunk limit is 0; pass at least 1"),
        (
            lambda: next_chunk(99, 0, 8, RULES, (32, 16)),
            "checkpoint 16 is not deeper than 32; pass depths above 0, strictly ascending",
        ),
        (
            lambda: plan_prefill(99, 0, 8, RULES, (16, 16)),
            "checkpoint 16 is not deeper than 16; pass depths above 0, strictly ascending",
        ),
        (
            lambda: next_chunk(99, 0, 8, RULES, (0, 16)),
            "checkpoint 0 is not deeper than 0; pass depths above 0, strictly ascending",
        ),
        (
            lambda: plan_prefill(99, 0, 8, RULES, (16, 112)),
            "checkpoint 112 is beyond a prompt of 99 tokens; leave out depths beyond its end",
        ),
        (
            lambda: plan_prefill(99, 0, 8, PrefillRules(16, advance_inside=False)),
            (
                "no boundary of blocks of 16 tokens is within 8 of depth 0; raise the chunk limit to the"
                " block size, or set advance_inside"
            ),
        ),
        (lambda: state_blocks(-1), "the count of speculative blocks is -1; pass at least 0"),
        (lambda: state_blocks(0, -1), "the count of cached states is -1; pass at least 0"),
        (
            lambda: state_memory(9, 0, 2, caching=False),
            "2 states cannot be cached without prefix caching; pass 0 of them, or caching=True",
        ),
        (lambda: state_memory(0, 0), "the size of a page in bytes is 0; pass at least 1"),
        (lambda: after_speculation(0, 0, 3, 16), "the count of computed tokens is 0; pass at least 1"),
        (lambda: after_speculation(29, 0, 3, 0), "the block size is 0; pass at least 1"),
        (lambda: after_speculation(29, 0, -1, 16), "the count of speculative blocks is -1; pass at least 0"),
        (
            lambda: after_speculation(29, 4, 3, 16),
            "4 accepted tokens do not fit 3 speculative ones; pass a count from 0 to 3",
        ),
        (
            lambda: after_speculation(29, -1, 3, 16),
            "-1 accepted tokens do not fit 3 speculative ones; pass a count from 0 to 3",
        ),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        call()
