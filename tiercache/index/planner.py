"""Rules for cutting a prefill so that its states can be cached, and the states a request needs: vLLM's block-aligned rules.

All are pure functions. A recurrent state stands for all tokens up to one depth, so a state that other requests may restore exists only
where a forward pass ends, and blocks are keyed only at multiples of their size. Hence the chunks end there. Sources: vLLM pull requests
28176 (the rules, the layout of the state blocks) and 30877, `_mamba_block_aligned_split` of its scheduler,
`MambaSpec.max_memory_usage_bytes`.

Depths are in tokens. A *block* here is vLLM's: the alignment of the states in tokens, a page or a multiple of it, and with `state_blocks`
the memory of one state. It is not the host arena's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.errors import InputError


@dataclass(frozen=True, slots=True)
class PrefillRules:
    """Settings of an engine on which its cuts depend, beside the prompt. Raises InputError for a block below 1 or a negative lookahead.

    `block`: the alignment, in tokens. `lookahead`: no hit covers the prompt's last `lookahead` tokens; at least one token is always left to
    compute. `drops_block`: the speculative head drops the last matched block, so that a hit ends one block earlier. `advance_inside`: a
    step whose limit does not reach the next boundary advances inside the block, on private state; without it, nothing is scheduled in that
    step. vLLM sets it where a block exceeds every chunk that its configuration allows; elsewhere a step that got a small share of the
    budget waits for a larger one.
    """

    block: int
    lookahead: int = 0
    drops_block: bool = False
    advance_inside: bool = True

    def __post_init__(self) -> None:
        _at_least(1, "the block size", self.block)
        _at_least(0, "the lookahead", self.lookahead)

    def last_boundary(self, prompt_tokens: int) -> int:
        """Return the deepest boundary of a prompt that a repeat of it may restore, or 0.

        It splits the last chunk into aligned part and tail.
        """
        blocks = (prompt_tokens - max(1, self.lookahead)) // self.block - self.drops_block
        return max(0, blocks * self.block)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of one forward pass; empty where nothing is scheduled in a step.

    `private`: the chunk stops inside a block because the limit does not reach the next boundary, so that its last state is of use to this
    request alone. `checkpoint`: the chunk ends at a checkpoint, and its last state is to be handed over.
    """

    start: int
    end: int
    private: bool = False
    checkpoint: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens that the chunk computes."""
        return self.end - self.start


def next_chunk(prompt_tokens: int, computed: int, limit: int, rules: PrefillRules, checkpoints: Sequence[int] = ()) -> Chunk:
    """Return what one step computes of a prompt's prefill: `computed` tokens are done, and the step has room for `limit` tokens.

    - A chunk that does not reach the prompt's end ends at the last multiple of the block within the limit. Where there is none, see
      `PrefillRules.advance_inside`.
    - It stops earlier, at the first of these that lies strictly inside it: the next boundary, when it starts inside a block (the boundary's
      state would otherwise never exist); the last boundary that a repeat may restore; each of `checkpoints` (strictly ascending depths up
      to the prompt's end; those already computed are ignored, and one that is no multiple of the block is cut at just the same).

    The chunk is empty when the prefill is done, the limit is 0, or the rules make the request wait. Decode is not cut: the caller does not
    ask for it. Raises InputError for depths outside the prompt, a negative limit, or checkpoints out of order.
    """
    _check(prompt_tokens, computed, checkpoints)
    _at_least(0, "the chunk limit", limit)
    return _next(prompt_tokens, computed, limit, rules, checkpoints)


def plan_prefill(prompt_tokens: int, restored: int, limit: int, rules: PrefillRules, checkpoints: Sequence[int] = ()) -> tuple[Chunk, ...]:
    """Return every chunk from the restored depth to the prompt's end, when each step has room for `limit` tokens.

    The rules are those of `next_chunk`. Raises InputError as `next_chunk` does, for a limit below 1, and where the rules would make the
    request wait forever.
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
                f"raise the chunk limit to the block size, or set advance_inside"
            )
        chunks.append(chunk)
        at = chunk.end
    return tuple(chunks)


def _next(prompt_tokens: int, start: int, limit: int, rules: PrefillRules, checkpoints: Sequence[int]) -> Chunk:
    block = rules.block
    boundary = (start // block + 1) * block
    end = min(start + limit, prompt_tokens)
    if end < prompt_tokens:
        if end >= boundary:
            end -= end % block
        elif not rules.advance_inside:
            end = start
    stops = [rules.last_boundary(prompt_tokens), *checkpoints]
    if start % block:
        stops.append(boundary)
    end = min((stop for stop in stops if start < stop < end), default=end)
    checkpoint = start < end and end in checkpoints
    private = start < end < prompt_tokens and end % block != 0 and not checkpoint
    return Chunk(start, end, private, checkpoint)


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """Counts of the state blocks of one request, in the order of its block table: `hit`, then `running`, then `cached`.

    `hit`: one block that holds the restored state, or the null block on a miss; none without prefix caching. `running`: one block for the
    state itself and one for each speculative token, since a rejected token cannot be taken out of a state. `cached`: the blocks of the
    states that are kept.
    """

    hit: int
    running: int
    cached: int

    @property
    def total(self) -> int:
        """Total of all three: 2 + s + N with prefix caching, 1 + s without, for s speculative blocks and N cached states."""
        return self.hit + self.running + self.cached


def state_blocks(speculative: int, cached: int = 0, *, caching: bool = True) -> StateBlocks:
    """Return the state blocks of a request with `speculative` draft tokens a step that keeps `cached` states.

    Raises InputError for a negative count, and for cached states without prefix caching.
    """
    _at_least(0, "the count of speculative blocks", speculative)
    _at_least(0, "the count of cached states", cached)
    if cached and not caching:
        raise InputError(f"{cached} states cannot be cached without prefix caching; pass 0 of them, or caching=True")
    return StateBlocks(hit=int(caching), running=1 + speculative, cached=cached)


def state_memory(page_bytes: int, speculative: int, cached: int = 0, *, caching: bool = True) -> int:
    """Return the bytes to plan for the states of one request, when one state takes `page_bytes`.

    The null block of a miss is counted, because a hit needs it. Raises InputError as `state_blocks` does, and for a page of no bytes.
    """
    _at_least(1, "the size of a page in bytes", page_bytes)
    return page_bytes * state_blocks(speculative, cached, caching=caching).total


@dataclass(frozen=True, slots=True)
class Speculated:
    """Place of a request's state after a speculative step.

    `computed`: tokens, the accepted ones included. `source`: the number, from 0, of the running state (of 1 + s) that stands at `computed`;
    state 0 is the one before any draft. `running`: the index of the block in which the request goes on. `cached`: the index of the last
    block that the step filled, or None; its state is the running state `cached_source`.
    """

    computed: int
    source: int
    running: int
    cached: int | None = None
    cached_source: int | None = None


def after_speculation(computed: int, accepted: int, speculative: int, block: int) -> Speculated:
    """Return the state's place after a step that reached depth `computed` without its drafts, of which `accepted` stand.

    The drafts leave the states at `computed`, `computed + 1`, ..., `computed + speculative` behind, one in each running block. The request
    goes on in the block at index (computed / block), accepted tokens counted: the one into which the next token falls. Where the accepted
    tokens reach or cross the end of a block, the state that stood exactly there is the block's to cache. With a block of 16 tokens, 29
    computed and 3 speculative blocks:

        accepted  computed  source  running block  cached block
               0        29       0              1
               1        30       1              1
               2        31       2              1
               3        32       3              2             1  (of source 3)

    Raises InputError for nothing computed, a block below 1, or more accepted tokens than speculative ones.
    """
    _at_least(1, "the count of computed tokens", computed)
    _at_least(1, "the block size", block)
    _at_least(0, "the count of speculative blocks", speculative)
    if not 0 <= accepted <= speculative:
        raise InputError(f"{accepted} accepted tokens do not fit {speculative} speculative ones; pass a count from 0 to {speculative}")
    now = computed + accepted
    running = now // block
    boundary = running * block
    if boundary < computed:
        return Speculated(now, accepted, running)
    return Speculated(now, accepted, running, cached=running - 1, cached_source=boundary - computed)


def _check(prompt_tokens: int, computed: int, checkpoints: Sequence[int]) -> None:
    _at_least(0, "the prompt's length", prompt_tokens)
    if not 0 <= computed <= prompt_tokens:
        raise InputError(f"depth {computed} is outside a prompt of {prompt_tokens} tokens; pass one from 0 to {prompt_tokens}")
    before = 0
    for depth in checkpoints:
        if depth <= before:
            raise InputError(f"checkpoint {depth} is not deeper than {before}; pass depths above 0, strictly ascending")
        before = depth
    if before > prompt_tokens:
        raise InputError(f"checkpoint {before} is beyond a prompt of {prompt_tokens} tokens; leave out depths beyond its end")


def _at_least(least: int, what: str, value: int) -> None:
    if value < least:
        raise InputError(f"{what} is {value}; pass at least {least}")
