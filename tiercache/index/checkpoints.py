"""Depths at which the engine should take states during a prefill.

Which states exist matters more to the hit rate than which are evicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiercache.core import full_pages, reusable_pages
from tiercache.errors import ConfigError
from tiercache.policy import CheckpointKind


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """Rules for the states that are worth taking. The defaults are what measured best (docs/policies.md).

    - `branch`: where a prompt leaves what is known. Another prompt shares the pages up to there, so that a third one probably will; without
      a state there, none of them could restore it.
    - `prompt_end`: as deep as a repeat of the prompt may restore, for a hit is strictly shorter than the prompt; and the page that ends
      exactly with the prompt, if there is one, for which no cut is needed: conversations continue from there when a chat template drops the
      answer's reasoning.
    - `request_end`: the last full page of the answer, which the engine commits when the request ends.
    - `ghost`: where a prompt ends to repeat what was known and has been evicted since.
    - `every`: tokens between further states; 0 for none.
    - `per_path`: states that one path may keep: the deepest ones. Those above them at which the tree does not branch are evicted first.
      With 0 a path may keep any number.
    """

    branch: bool = True
    prompt_end: bool = True
    request_end: bool = True
    ghost: bool = True
    every: int = 0
    per_path: int = 0

    def __post_init__(self) -> None:
        for name in ("every", "per_path"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is not possible; use 0 to switch it off, or a positive number")


def checkpoint_depths(
    depth: int, path_depth: int, prompt_tokens: int, page_size: int, *, ghost_depth: int = 0, rules: CheckpointRules | None = None
) -> Mapping[int, CheckpointKind]:
    """Return the depths at which a prompt of `prompt_tokens` tokens should leave states, each with its reason.

    Depths are in pages, ascending, all beyond the restored `depth`. `path_depth`: pages of the prompt that the index knows; `ghost_depth`:
    those that it knew once.
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
