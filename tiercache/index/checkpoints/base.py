"""Contract of a checkpoint policy, which chooses the depths at which a prompt's prefill leaves states.

A *checkpoint* is such a depth. It costs the bytes of the state, and a cut of the prefill: one more forward
pass. What it brings depends on where later prompts leave this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from tiercache.core import full_pages, reusable_pages
from tiercache.index.node import Digests
from tiercache.policy import CheckpointKind


def _no_digests() -> Digests:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class PromptView:
    """Knowledge of the index about a prompt whose prefill begins. All depths are in pages."""

    depth: int
    """Restored depth, from which the prefill goes on."""
    path_depth: int
    """Number of leading pages that the index knows, with or without a state at their end."""
    ghost_depth: int
    """Number of leading pages that the index knows or remembers, evicted pages included."""
    prompt_tokens: int
    page_size: int
    digests: Callable[[], Digests] = field(default=_no_digests, compare=False)
    """Digests of the whole pages of the prompt, in order; computed when they are asked for."""

    @property
    def last(self) -> int:
        """Deepest depth that a repeat of the prompt may restore: it leaves one token to compute."""
        return reusable_pages(self.prompt_tokens, self.page_size)

    @property
    def full(self) -> int:
        """Number of whole pages of the prompt: `last`, or `last + 1` if a page ends with the prompt."""
        return full_pages(self.prompt_tokens, self.page_size)


class CheckpointPlan(NamedTuple):
    """Depths at which a request should leave states."""

    depths: Mapping[int, CheckpointKind]
    """Depths of the prompt, in pages and ascending, beyond the restored depth, and why each was chosen."""
    end: bool
    """Whether the request should also leave a state at the last whole page of its answer.

    The engine takes it while it decodes, without a cut.
    """


class Checkpoints(ABC):
    """Policy that chooses where states are taken, from what it has seen of earlier requests.

    An index has a policy object of its own. Equal requests in an equal order give equal plans: a policy has
    neither a clock nor chance. What it remembers has a fixed bound.

    Thread safety: only the thread of the index calls it.
    """

    name: ClassVar[str]
    """Name in configuration and reports."""
    keeps_ends: bool = True
    """Whether a request without a plan of its own, such as a continuation, leaves a state at its end."""
    per_path: int = 0
    """Number of states that one path may keep (see `CheckpointRules.per_path`); 0 for any number."""

    @abstractmethod
    def plan(self, prefill: PromptView) -> CheckpointPlan:
        """Return where this prompt should leave states.

        The caller may ask several times for one request, and for requests that never come. The implementation
        changes nothing, and returns only depths above `prefill.depth` and up to `prefill.full`.
        """

    @abstractmethod
    def most(self, tokens: int, page_size: int) -> int:
        """Return the maximum number of states that a plan may have for a prompt of `tokens` tokens."""

    def began(self, prefill: PromptView, missed: int) -> None:  # noqa: B027  a policy need not learn
        """Learn from a request that begins; called once for each request, after its plan.

        `missed` is the deepest depth, in pages, that an evicted unit would have restored; 0 if none would
        have restored more than `prefill.depth`.
        """

    def lost(self, nbytes: float) -> None:  # noqa: B027
        """Record that objects of `nbytes` bytes were evicted of which no tier has a copy."""
