"""The result of one request of the reference worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

from tiercache.controller import Sources
from tiercache.core import Reason, Tier
from tiercache.integrations.transformers.requests.sampling import GREEDY, Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one continuation of a request.

    Depths are in tokens. Times are in seconds from the start of the request.
    """

    prompt_tokens: int
    tokens: npt.NDArray[np.int64]
    """The prompt and the answer."""
    first_logits: torch.Tensor
    """Logits `[vocab]` after the prompt, from which the first new token was chosen."""
    restored: int
    """Depth up to which the prompt was restored."""
    sources: Sources
    reason: Reason
    bounds: tuple[int, ...]
    """Depth at the end of every forward pass."""
    states: tuple[int, ...]
    """Depths at which states were committed."""
    restore_seconds: float
    """Time until the cache is filled with the restored pages and state.

    It is computed backwards: `ttft_seconds` minus the time from the filled cache to the first logits. On CUDA
    the device's clock measures the time that is subtracted.
    """
    ttft_seconds: float
    """Time until the first logits are computed. On CUDA, this includes all work that was queued before."""
    cache: DynamicCache = field(repr=False)
    """The cache at the end of the request; empty for a request of `Worker.serve_all` without `audit`.

    If the sequence was recomputed (see `anew`), this is the new cache; with `audit` it is still the old
    cache, which holds the restored pages.
    """
    restored_state: Mapping[tuple[int, str], torch.Tensor] = field(repr=False, default_factory=dict)
    """Copy of the restored state by (layer, name), for `Audit`; empty without `audit`."""
    anew: int = 0
    """Number of tokens of the sequence when all of them were recomputed with an empty cache; 0 if never.

    A sequence is recomputed when the answer grows beyond the worker's limit.
    """

    sampling: Sampling = GREEDY
    """The rule by which the new tokens were chosen."""
    parks: int = 0
    """Number of times that the request was parked, because others needed its slots."""
    proposed: int = 0
    """Number of tokens that the draft proposed and the model verified."""
    accepted: int = 0
    """Number of proposed tokens with which the model agreed; they are part of the answer."""
    rejected: tuple[tuple[int, ...], ...] = ()
    """For each of `bounds`, the tokens that its forward pass was fed behind it and that were cut off again.

    Empty if no token was rejected.
    """

    @property
    def answer(self) -> npt.NDArray[np.int64]:
        """The generated tokens."""
        return self.tokens[self.prompt_tokens :]

    @property
    def tier(self) -> Tier | None:
        """The slowest tier that the restore needed; None for a miss."""
        return self.sources.slowest() if self.restored else None
