"""Checkpoint policies: where the prefill of a prompt leaves states. `base` is the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tiercache.errors import ConfigError
from tiercache.index.checkpoints.base import CheckpointPlan, Checkpoints, PromptView
from tiercache.index.checkpoints.learned import Learned
from tiercache.index.checkpoints.rules import CheckpointRules, FixedRules, checkpoint_depths
from tiercache.policy import DEFAULT_PROFILE, profile_named
from tiercache.policy.costs import Costs

__all__ = [
    "CHECKPOINTS",
    "CheckpointPlan",
    "CheckpointRules",
    "Checkpoints",
    "FixedRules",
    "Learned",
    "PromptView",
    "checkpoint_depths",
    "checkpoints_named",
]

CHECKPOINTS: Final = ("rules", "every", "learned")
"""Names of all checkpoint policies, without parameters."""
_MOST_TOKENS: Final = 1 << 30
"""Highest parameter of `every`."""
_ALONE: Final = CheckpointRules(branch=False, prompt_end=False, request_end=False, ghost=False)


def checkpoints_named(name: str | CheckpointRules, costs: Costs | None = None) -> Checkpoints:
    """Return a new checkpoint policy, which weighs by `costs` (default: those of `DEFAULT_PROFILE`).

    `name` is one of these, or the `CheckpointRules` themselves:

    - `rules`: `CheckpointRules` with their defaults.
    - `every:2048`: a state every so many tokens, and nothing else.
    - `learned`: as many states as are worth their cost (see `Learned`).

    Raises ConfigError for an unknown name or parameter.
    """
    if isinstance(name, CheckpointRules):
        return FixedRules(name)
    base, colon, parameter = name.partition(":")
    costs = costs or Costs(profile_named(DEFAULT_PROFILE))
    if base not in CHECKPOINTS:
        raise ConfigError(f"there is no checkpoint policy {name!r}; use {', '.join(CHECKPOINTS)}")
    if base == "every":
        if not parameter.isdecimal() or not 0 < int(parameter) <= _MOST_TOKENS:
            raise ConfigError(
                f"checkpoint policy {name!r} needs a number of tokens from 1 to {_MOST_TOKENS}, such as"
                " every:2048"
            )
        return FixedRules(replace(_ALONE, every=int(parameter)))
    if colon:
        raise ConfigError(f"checkpoint policy {base!r} has no parameter; only every has one")
    return FixedRules(CheckpointRules()) if base == "rules" else Learned(costs)
