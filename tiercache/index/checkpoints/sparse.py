"""Checkpoints at the depths that serve the usual overlaps of prompts best, a fixed number of them."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from tiercache.index.checkpoints.base import CheckpointPlan, Checkpoints, PromptView
from tiercache.index.checkpoints.placement import Placement
from tiercache.policy import LEARN_EVERY, CheckpointKind
from tiercache.policy.costs import Costs

STATES: Final = 4
"""Default number of states of one path."""
_POINTS: Final = 256
"""Number of depths that are told apart, at most 512."""
_EXACT: Final = 128
"""Depths up to this one, in pages, are told apart by the page."""
_DEEPEST: Final = 1 << 16
"""Depth, in pages, from which all depths count as one."""
_DECAY: Final = 0.95
"""Factor by which each `LEARN_EVERY` requests multiply earlier observations."""


class Sparse(Checkpoints):
    """The dynamic program of *Sparse Prefix Caching for Hybrid and Recurrent LLM Serving* (arXiv 2605.05219).

    It places at most `states` states on a path so that the expected work behind them is least (see
    `Placement`), if the *overlap* is distributed as it was lately: the depth at which a prompt leaves what
    earlier prompts had. The distribution is learned online; before anything is learned, all depths are
    equally likely. A prompt of n pages uses the overlaps of at most n pages. The end of the request leaves a
    state too, which needs no cut.

    Overlaps are counted by the page up to 128 pages, and beyond that in steps that grow by a tenth of
    an octave; the program is exact for these steps.

    Thread safety: as `Checkpoints`.
    """

    name: ClassVar[str] = "sparse"

    def __init__(self, costs: Costs, states: int = STATES) -> None:
        self._costs = costs
        self._states = states
        steps = np.geomspace(_EXACT, _DEEPEST, _POINTS - _EXACT + 1)
        self._depths = np.unique(np.concatenate([np.arange(1, _EXACT + 1), np.floor(steps).astype(np.int64)]))
        self._weights = np.full(len(self._depths), 1.0 / len(self._depths))
        self._requests = 0
        self._placed: Placement | None = None

    def plan(self, prefill: PromptView) -> CheckpointPlan:
        """Return the depths that serve the overlaps best that prompts of this length can have."""
        if self._placed is None:
            flops = self._costs.profile.flops(0, self._depths * prefill.page_size)
            self._placed = Placement(self._weights.tolist(), flops.tolist(), self._states)
        points = int(np.searchsorted(self._depths, prefill.last, "right"))
        depths = self._depths[self._placed.best(points)].tolist()
        kept = {at: CheckpointKind.PREDICTED for at in depths if at > prefill.depth}
        return CheckpointPlan(kept, end=True)

    def most(self, tokens: int, page_size: int) -> int:
        """Return the number of states on a path, and one for the end."""
        return self._states + 1

    def began(self, prefill: PromptView, missed: int) -> None:
        """Count the overlap of a request."""
        overlap = min(prefill.ghost_depth, prefill.last)
        if overlap:
            self._weights[np.searchsorted(self._depths, overlap, "right") - 1] += 1.0
        self._requests += 1
        if self._requests % LEARN_EVERY == 0:
            self._weights *= _DECAY
            self._placed = None
