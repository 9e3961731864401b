"""Choice of the next token from logits: greedy, or drawn with a seed."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

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

    def spread(self, count: int) -> tuple[Sampling, ...]:
        """Return the samplings of `count` continuations of one prompt; their seeds are consecutive.

        The first one has `seed`, and behind the last seed comes 0. vLLM numbers its continuations alike.
        """
        return tuple(Sampling(self.temperature, (self.seed + n) % SEEDS) for n in range(count))


GREEDY: Final = Sampling()


class Chooser:
    """Chooser of one answer's tokens, one call for each token in order.

    Thread safety: one owner thread.
    """

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
