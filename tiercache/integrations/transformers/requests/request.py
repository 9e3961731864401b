"""Requests of the reference worker: the prompt, how its answer is chosen, and the result."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

from tiercache.controller import Sources
from tiercache.core import Reason, Tier, TokenArray
from tiercache.errors import InputError

SEEDS: Final = 1 << 63
"""Number of seeds; a seed is at least 0 and less than this."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rule by which the tokens of one answer are chosen.

    Raises InputError for a temperature that is negative or not finite, and for a seed outside [0, 2**63).
    """

    temperature: float = 0.0
    """Divisor of the logits before the softmax; at 0, the token with the largest logit is chosen (greedy)."""
    seed: int = 0
    """Seed of the random numbers. With the same logits, one seed always gives the same tokens."""

    def __post_init__(self) -> None:
        try:
            temperature = -1.0 if isinstance(self.temperature, bool | str) else float(self.temperature)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            temperature = -1.0
        if not 0.0 <= temperature < math.inf:
            raise InputError(f"temperature is {self.temperature!r}; give a finite number, 0 (greedy) or more")
        try:
            seed = -1 if isinstance(self.seed, bool) else operator.index(self.seed)
        except TypeError:
            seed = -1
        if not 0 <= seed < SEEDS:
            raise InputError(f"seed is {self.seed!r}; give an integer of at least 0 and less than 2**63")
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "seed", seed)


GREEDY: Final = Sampling()


class Chooser:
    """Chooser of one answer's tokens, one call for each token in order."""

    def __init__(self, sampling: Sampling) -> None:
        self._temperature = sampling.temperature
        # torch's generator for CPUs reads 32 bits of a seed; this one reads all of them.
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def __call__(self, logits: torch.Tensor) -> int:
        """Return the token chosen by `logits` `[vocab]`.

        A drawn token is computed in float64 on the CPU, wherever the logits are: one random number, and the
        first token at which the sum of the probabilities exceeds it.
        """
        if not self._temperature:
            return int(logits.argmax())
        scores = logits.double().cpu()
        # The largest logit is subtracted first, so that no temperature makes a quotient overflow.
        sums = ((scores - scores.max()) / self._temperature).exp().cumsum(0)
        drawn = self._random.random() * sums[-1]
        return min(int(torch.searchsorted(sums, drawn, right=True)), len(sums) - 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of `Worker.serve_all`; the fields are those arguments of `Worker.serve`."""

    tokens: Any
    """The prompt: an array, a tensor or a list of token ids."""
    new_tokens: int
    """Maximum number of tokens of the answer."""
    stop: int | Iterable[int] = ()
    """Tokens behind which the answer ends early."""
    extra: bytes = b""
    """Bytes that stand for what else the cache of this request depends on; see `keys.sequence_extra`."""
    sampling: Sampling = GREEDY


@dataclass(frozen=True, slots=True)
class Checked:
    """A request whose values are checked and in the worker's form."""

    prompt: TokenArray
    new_tokens: int
    stop: frozenset[int]
    extra: bytes
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of a request.

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
    """Copy of the restored state by (layer, name), for an audit; empty without `audit`."""
    anew: int = 0
    """Number of tokens of the sequence when all of them were recomputed with an empty cache; 0 if never.

    A sequence is recomputed when the answer grows beyond the worker's limit.
    """

    sampling: Sampling = GREEDY
    """The rule by which the new tokens were chosen."""
    parks: int = 0
    """Number of times that the request was parked, because others needed its slots."""

    @property
    def answer(self) -> npt.NDArray[np.int64]:
        """The generated tokens."""
        return self.tokens[self.prompt_tokens :]

    @property
    def tier(self) -> Tier | None:
        """The slowest tier that the restore needed; None for a miss."""
        return self.sources.slowest() if self.restored else None
