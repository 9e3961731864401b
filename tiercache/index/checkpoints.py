"""Checkpoints: the depths at which the prefill of a prompt leaves states, and the cuts of the prefill.

A checkpoint costs the bytes of the state, and a cut of the prefill: one more forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tiercache.core import full_pages, reusable_pages
from tiercache.errors import ConfigError
from tiercache.policy import CheckpointKind

CHECKPOINTS: Final = ("rules", "every")
"""Names by which rules can be chosen, without parameters."""
_MOST_TOKENS: Final = 1 << 30
"""Highest parameter of `every`."""


class CheckpointPlan(NamedTuple):
    """Depths at which a request should leave states."""

    depths: Mapping[int, CheckpointKind]
    """Depths of the prompt, in pages and ascending, beyond the restored depth, and why each was chosen."""
    end: bool
    """Whether the request should also leave a state at the last whole page of its answer.

    The engine takes it while it decodes, without a cut.
    """


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """Rules for the depths at which states are taken.

    The defaults did best in measurements (docs/policies.md).

    A prompt of 1,000 tokens leaves the known paths after ten pages of 16 tokens; then it is asked again:

        >>> {16 * page: kind.name for page, kind in checkpoint_depths(0, 10, 1000, page_size=16).items()}
        {160: 'BRANCH', 992: 'PROMPT'}
        >>> checkpoint_depths(62, 62, 1000, page_size=16)
        {}
        >>> checkpoints_named("every:512").every
        512
    """

    branch: bool = True
    """Take a state at the depth at which a prompt leaves the paths that the index knows.

    Two prompts share the pages up to this depth, so a third one probably will, too. Without a state there, no
    prompt could restore these pages.
    """
    prompt_end: bool = True
    """Take a state at the deepest depth that a repeat of the prompt may restore, and at the prompt's end.

    A repeat leaves at least one token of the prompt to compute, so the two depths differ if a page ends
    exactly at the prompt's end. The next turn continues from the prompt's end if a chat template drops the
    answer's reasoning. The state there costs no extra cut, because the prefill ends there anyway.
    """
    request_end: bool = True
    """Take a state at the last full page of the answer, which the engine commits when the request ends."""
    ghost: bool = True
    """Take a state at the depth up to which a prompt repeats evicted pages that the index remembers."""
    every: int = 0
    """Tokens between further states; 0 for none."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(
                f"every={self.every} is not possible; use 0 to switch it off, or a positive number"
            )

    def most(self, tokens: int, page_size: int) -> int:
        """Return the maximum number of states that a plan may have for a prompt of `tokens` tokens."""
        others = self.branch + self.ghost + 2 * self.prompt_end + self.request_end
        step = max(1, self.every // page_size) * page_size
        return others + (tokens // step if self.every else 0)


def checkpoint_depths(
    depth: int,
    path_depth: int,
    prompt_tokens: int,
    page_size: int,
    *,
    ghost_depth: int = 0,
    rules: CheckpointRules | None = None,
) -> Mapping[int, CheckpointKind]:
    """Return where a prompt of `prompt_tokens` tokens should leave states, and why.

    The depths are in pages and ascending, and all of them are beyond the restored `depth`. `path_depth` is
    the number of the prompt's leading pages that the index knows. `ghost_depth` also counts the evicted pages
    after them that the index remembers.
    """
    rules = rules or CheckpointRules()
    last = reusable_pages(prompt_tokens, page_size)
    wanted: dict[int, CheckpointKind] = {}
    if rules.every:
        step = max(1, rules.every // page_size)
        wanted |= dict.fromkeys(range(step, last + 1, step), CheckpointKind.INTERVAL)
    if rules.ghost and ghost_depth > path_depth:
        wanted[min(ghost_depth, last)] = CheckpointKind.GHOST
    if rules.branch and path_depth:
        wanted[min(path_depth, last)] = CheckpointKind.BRANCH
    if rules.prompt_end:
        wanted |= {last: CheckpointKind.PROMPT, full_pages(prompt_tokens, page_size): CheckpointKind.PROMPT}
    return {at: wanted[at] for at in sorted(wanted) if at > depth}


def checkpoints_named(name: str | CheckpointRules) -> CheckpointRules:
    """Return the rules of a name, or the rules themselves.

    - `rules`: `CheckpointRules` with their defaults.
    - `every:2048`: a state every so many tokens, and nothing else.

    Raises ConfigError for an unknown name or parameter.
    """
    if isinstance(name, CheckpointRules):
        return name
    base, colon, parameter = name.partition(":")
    if base not in CHECKPOINTS:
        raise ConfigError(f"there is no checkpoint policy {name!r}; use {', '.join(CHECKPOINTS)}")
    if base == "rules":
        if colon:
            raise ConfigError("checkpoint policy 'rules' has no parameter; only every has one")
        return CheckpointRules()
    few = parameter.isdecimal() and len(parameter) <= len(str(_MOST_TOKENS))  # Python reads 4,300 digits
    if not few or not 0 < int(parameter) <= _MOST_TOKENS:
        raise ConfigError(
            f"checkpoint policy {name[:40]!r} needs a number of tokens from 1 to {_MOST_TOKENS}, such as"
            " every:2048"
        )
    return CheckpointRules(
        branch=False, prompt_end=False, request_end=False, ghost=False, every=int(parameter)
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of one forward pass of a prefill."""

    start: int
    end: int
    checkpoint: bool = False
    """Whether the chunk ends at a checkpoint, where the engine hands over the state."""


def plan_prefill(
    prompt_tokens: int, restored: int, limit: int, page_size: int, checkpoints: Sequence[int] = ()
) -> tuple[Chunk, ...]:
    """Return the chunks of a prefill, of at most `limit` tokens each, from the restored depth to its end.

    A forward pass leaves only the state at the end of its chunk, and other requests can restore only states
    at the ends of pages. So a chunk ends with a page if it can. It also ends at each of `checkpoints`, which
    are strictly ascending depths in tokens; those that are restored already do not count.
    """
    assert 0 <= restored <= prompt_tokens, "no more than the prompt is restored"
    assert limit > 0, "each pass computes something"
    chunks: list[Chunk] = []
    start = restored
    while start < prompt_tokens:
        # Example: pages of 16 tokens, start 20, limit 30, in a long prompt
        #   page_end    32, the next multiple of the page size
        #   end         first 50 (start + limit), then 48, the last multiple of the page size up to there
        #   stops       32, because the chunk starts inside a page: the chunk is [20, 32)
        page_end = (start // page_size + 1) * page_size
        end = min(start + limit, prompt_tokens)
        if page_end <= end < prompt_tokens:
            end -= end % page_size
        stops = [*checkpoints, page_end] if start % page_size else checkpoints
        end = min((stop for stop in stops if start < stop < end), default=end)
        chunks.append(Chunk(start, end, end in checkpoints))
        start = end
    return tuple(chunks)
