"""Plan of a prefill: its chunks, and the state blocks of a request.

The functions follow vLLM's block-aligned rules. All depths are in tokens. A *chunk* is the part of a
prefill that one forward pass computes; the pass leaves only the state at the chunk's end. Other requests can
restore only states at multiples of the block, because only these depths have keys. Chunks therefore end at
multiples of the block.

In this module a *block* is vLLM's, not the host arena's. It is the number of tokens to which states are
aligned (a page or a multiple of it). In `StateBlocks`, a block is the memory of one state.

Sources are vLLM's pull requests 28176 (the rules, the layout of the state blocks) and 30877, the function
`_mamba_block_aligned_split` of its scheduler, and `MambaSpec.max_memory_usage_bytes`.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.errors import InputError


@dataclass(frozen=True, slots=True)
class PrefillRules:
    """Settings of an engine that decide where it cuts a prefill.

    A *boundary* is a multiple of the block. Raises InputError for a block below 1 or a negative lookahead.
    """

    block: int
    """Number of tokens to which states are aligned."""
    lookahead: int = 0
    """Number of tokens at the prompt's end that no hit covers. A lookahead of 0 counts as 1."""
    drops_block: bool = False
    """Whether the speculative head drops the last matched block, so that a hit ends one block earlier."""
    advance_inside: bool = True
    """Whether a step whose limit does not reach the next boundary computes a part of the block.

    Such a step leaves a private state, which no other request can restore. If False, the step computes
    nothing and waits for a larger limit. vLLM sets `advance_inside` if a block is larger than every chunk
    that its configuration allows.
    """
    cuts_tail: bool = True
    """Whether the prefill is also cut at the last boundary that a repeat of the prompt may restore.

    If False, only the limit and the checkpoints cut it. Models without states need no cut there.
    """

    def __post_init__(self) -> None:
        _at_least(1, "the block size", self.block)
        _at_least(0, "the lookahead", self.lookahead)

    def last_boundary(self, prompt_tokens: int) -> int:
        """Return the deepest boundary, in tokens, that a repeat of a prompt may restore; 0 if there is none.

        This boundary cuts the end of the prefill into an aligned part and a tail.
        """
        blocks = (prompt_tokens - max(1, self.lookahead)) // self.block - self.drops_block
        return max(0, blocks * self.block)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of one forward pass; empty if a step computes nothing."""

    start: int
    end: int
    private: bool = False
    """Whether the chunk stops inside a block, because the limit does not reach the next boundary.

    Only this request can use the state at the chunk's end.
    """
    checkpoint: bool = False
    """Whether the chunk ends at a checkpoint, where the engine hands over the state."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the chunk computes."""
        return self.end - self.start


def next_chunk(
    prompt_tokens: int, computed: int, limit: int, rules: PrefillRules, checkpoints: Sequence[int] = ()
) -> Chunk:
    """Return the chunk of a prefill that one step computes.

    `computed` tokens of the prompt are done, and the step has room for `limit` tokens.

    - A chunk that does not reach the prompt's end ends at the last boundary (multiple of the block) within
      the limit. `PrefillRules.advance_inside` says what happens if there is no such boundary.
    - If one of these depths lies strictly inside the chunk, the chunk ends at the first of them instead:
      - the next boundary, if the chunk starts inside a block (otherwise no state would exist there)
      - the last boundary that a repeat of the prompt may restore (with `PrefillRules.cuts_tail`)
      - each of `checkpoints`

    `checkpoints` are strictly ascending depths up to the prompt's end, in tokens. They need not be multiples
    of the block, and those that are already computed are ignored.

    The chunk is empty if the prefill is done, the limit is 0, or the rules make the request wait. Raises
    InputError for depths outside the prompt, a negative limit, or checkpoints out of order. The function is
    for prefill only; decode is not cut.
    """
    _check(prompt_tokens, computed, checkpoints)
    _at_least(0, "the chunk limit", limit)
    return _next(prompt_tokens, computed, limit, rules, checkpoints)


def plan_prefill(
    prompt_tokens: int, restored: int, limit: int, rules: PrefillRules, checkpoints: Sequence[int] = ()
) -> tuple[Chunk, ...]:
    """Return every chunk from the restored depth to the prompt's end, of at most `limit` tokens each.

    The rules are those of `next_chunk`. Raises InputError as `next_chunk` does, and also for a limit below 1
    or if the rules would make the request wait forever.
    """
    _check(prompt_tokens, restored, checkpoints)
    _at_least(1, "the chunk limit", limit)
    chunks: list[Chunk] = []
    at = restored
    while at < prompt_tokens:
        chunk = _next(prompt_tokens, at, limit, rules, checkpoints)
        if not chunk.tokens:
            raise InputError(
                f"no boundary of blocks of {rules.block} tokens is within {limit} of depth {at}; "
                "raise the chunk limit to the block size, or set advance_inside"
            )
        chunks.append(chunk)
        at = chunk.end
    return tuple(chunks)


def _next(
    prompt_tokens: int, start: int, limit: int, rules: PrefillRules, checkpoints: Sequence[int]
) -> Chunk:
    # Example: blocks of 16 tokens, start 20, limit 30, in a long prompt
    #   boundary    32, the next multiple of the block after `start`
    #   end         first 50 (start + limit), then 48, the last multiple of the block up to there
    #   stops       contains 32, because the chunk starts inside a block; the chunk is [20, 32)
    block = rules.block
    boundary = (start // block + 1) * block
    end = min(start + limit, prompt_tokens)
    if end < prompt_tokens:
        if end >= boundary:
            end -= end % block
        elif not rules.advance_inside:
            end = start
    stops = list(checkpoints)
    if rules.cuts_tail:
        stops.append(rules.last_boundary(prompt_tokens))
    if start % block:
        stops.append(boundary)
    end = min((stop for stop in stops if start < stop < end), default=end)
    checkpoint = start < end and end in checkpoints
    private = start < end < prompt_tokens and end % block != 0 and not checkpoint
    return Chunk(start, end, private, checkpoint)


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """Numbers of state blocks of one request, in the order of its block table: hit, running, cached."""

    hit: int
    """Number of blocks for the restored state: 1 with prefix caching, 0 without.

    On a miss, this is vLLM's null block, which has no contents.
    """
    running: int
    """Number of blocks for the running state: one for the state, and one for each speculative token.

    Each speculative token has a state of its own, because a rejected token cannot be taken out of a state.
    """
    cached: int
    """Number of blocks for the states that are kept."""

    @property
    def total(self) -> int:
        """Number of all blocks."""
        # With s speculative tokens and N cached states: 2 + s + N with prefix caching, 1 + s without.
        return self.hit + self.running + self.cached


def state_blocks(speculative: int, cached: int = 0, *, caching: bool = True) -> StateBlocks:
    """Return the state blocks of a request that keeps `cached` states.

    `speculative` is the number of draft tokens per step. Raises InputError for a negative count, and for
    cached states without prefix caching.
    """
    _at_least(0, "the count of speculative blocks", speculative)
    _at_least(0, "the count of cached states", cached)
    if cached and not caching:
        raise InputError(
            f"{cached} states cannot be cached without prefix caching; pass 0 of them, or caching=True"
        )
    return StateBlocks(hit=int(caching), running=1 + speculative, cached=cached)


def state_memory(page_bytes: int, speculative: int, cached: int = 0, *, caching: bool = True) -> int:
    """Return the bytes to plan for the states of one request, if one state takes `page_bytes` bytes.

    With prefix caching, the block of the restored state always counts, because it is not known in advance
    whether a lookup hits. Raises InputError as `state_blocks` does, and for a page of less than 1 byte.
    """
    _at_least(1, "the size of a page in bytes", page_bytes)
    return page_bytes * state_blocks(speculative, cached, caching=caching).total


@dataclass(frozen=True, slots=True)
class Speculated:
    """Position of a request's state after a speculative step.

    The running states have numbers: 0 is the state before any draft, and i the state after i drafts.
    """

    computed: int
    """Depth in tokens, accepted drafts included."""
    source: int
    """Number of the running state at that depth."""
    running: int
    """Index of the block in which the request continues."""
    cached: int | None = None
    """Index of the last block that the step filled; None if it filled none."""
    cached_source: int | None = None
    """Number of the running state to cache for that block."""


def after_speculation(computed: int, accepted: int, speculative: int, block: int) -> Speculated:
    """Return the position of a state after a step with speculation.

    Without its drafts, the step reached the depth `computed`; `accepted` of the drafts were accepted. The
    step leaves states at the depths `computed`, `computed + 1`, ..., `computed + speculative`, one in each
    running block. The request continues in the block into which the next token falls, at index
    (computed + accepted) // block. If the accepted tokens reach or cross the end of a block, the state at
    exactly that depth is cached for the block.

    Example with blocks of 16 tokens, 29 computed tokens and 3 speculative tokens:

        accepted  computed  source  running block  cached block
               0        29       0              1
               1        30       1              1
               2        31       2              1
               3        32       3              2             1  (of source 3)

    Raises InputError for `computed` or `block` below 1, or more accepted tokens than speculative ones.
    """
    _at_least(1, "the count of computed tokens", computed)
    _at_least(1, "the block size", block)
    _at_least(0, "the count of speculative blocks", speculative)
    if not 0 <= accepted <= speculative:
        raise InputError(
            f"{accepted} accepted tokens do not fit {speculative} speculative ones; pass a count from 0 to"
            f" {speculative}"
        )
    now = computed + accepted
    running = now // block
    boundary = running * block
    if boundary < computed:
        return Speculated(now, accepted, running)
    return Speculated(now, accepted, running, cached=running - 1, cached_source=boundary - computed)


def _check(prompt_tokens: int, computed: int, checkpoints: Sequence[int]) -> None:
    _at_least(0, "the prompt's length", prompt_tokens)
    if not 0 <= computed <= prompt_tokens:
        raise InputError(
            f"depth {computed} is outside a prompt of {prompt_tokens} tokens; pass one from 0 to"
            f" {prompt_tokens}"
        )
    before = 0
    for depth in checkpoints:
        if depth <= before:
            raise InputError(
                f"checkpoint {depth} is not deeper than {before}; pass depths above 0, strictly ascending"
            )
        before = depth
    if before > prompt_tokens:
        raise InputError(
            f"checkpoint {before} is beyond a prompt of {prompt_tokens} tokens; leave out depths beyond"
            " its end"
        )


def _at_least(least: int, what: str, value: int) -> None:
    if value < least:
        raise InputError(f"{what} is {value}; pass at least {least}")
