"""Checkpoints at fixed rules: branches, ends, ghosts, and every so many tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from tiercache.core import full_pages, reusable_pages
from tiercache.errors import ConfigError
from tiercache.index.checkpoints.base import CheckpointPlan, Checkpoints, PromptView
from tiercache.policy import CheckpointKind


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """Rules for the depths at which states are taken.

    The defaults did best in measurements (docs/policies.md).
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
    per_path: int = 0
    """Number of states that one path may keep; 0 for any number.

    If a path has more, the shallowest ones are evicted first. States at which the tree branches do not count,
    and are not evicted for this reason.
    """

    def __post_init__(self) -> None:
        for name in ("every", "per_path"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not possible; use 0 to switch it off, or a positive"
                    " number"
                )


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


class FixedRules(Checkpoints):
    """Checkpoints by `CheckpointRules`, which learn nothing. Thread safety: as `Checkpoints`."""

    name: ClassVar[str] = "rules"

    def __init__(self, rules: CheckpointRules) -> None:
        self.rules = rules
        self.per_path, self.keeps_ends = rules.per_path, rules.request_end

    def plan(self, prefill: PromptView) -> CheckpointPlan:
        """Return the depths that the rules name."""
        depths = checkpoint_depths(
            prefill.depth,
            prefill.path_depth,
            prefill.prompt_tokens,
            prefill.page_size,
            ghost_depth=prefill.ghost_depth,
            rules=self.rules,
        )
        return CheckpointPlan(depths, self.rules.request_end)

    def most(self, tokens: int, page_size: int) -> int:
        """Return the number of intervals, and one state for each other rule; the prompt's end has two."""
        rules = self.rules
        others = rules.branch + rules.ghost + 2 * rules.prompt_end + rules.request_end
        step = max(1, rules.every // page_size) * page_size
        return others + (tokens // step if rules.every else 0)
