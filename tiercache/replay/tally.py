"""Counters of one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from tiercache.policy import ModelProfile
from tiercache.replay.base import Request
from tiercache.replay.results import Sample

_SAMPLES: Final = 100
"""Approximate number of samples over a run."""


class Tally:
    """Sums over the requests of one run. Thread safety: one thread."""

    def __init__(self, profile: ModelProfile, requests: int, held: Callable[[], int]) -> None:
        self._profile = profile
        self._held = held
        self._every = max(1, requests // _SAMPLES)
        self._rows: list[tuple[int, int, int, float]] = []
        self._window: list[float] = [0.0] * 4
        self._total: list[float] = [0.0] * 4
        self.over_time: list[Sample] = []

    def add(self, request: Request, depth: int, seconds: float) -> None:
        """Count a request that restored `depth` tokens of its prompt and had its first token after `seconds`."""
        prompt = len(request.prompt)
        self._rows.append((request.round, prompt, depth, seconds))
        for i, value in enumerate((prompt, depth, self._profile.flops(0, prompt), self._profile.flops(0, depth))):
            self._window[i] += value
            self._total[i] += value
        if len(self._rows) % self._every == 0:
            tokens, hits, flops, saved = self._window
            self.over_time.append(Sample(len(self._rows), hits / tokens, saved / flops, self._held()))
            self._window = [0.0] * 4

    @property
    def requests(self) -> int:
        """Number of requests so far."""
        return len(self._rows)

    @property
    def token_hit_rate(self) -> float:
        """Restored prompt tokens divided by prompt tokens."""
        return self._total[1] / self._total[0] if self._total[0] else 0.0

    @property
    def flops_saved(self) -> float:
        """FLOPs of the restored prefixes divided by FLOPs of the prompts."""
        return self._total[3] / self._total[2] if self._total[2] else 0.0

    def ttft_ms(self) -> tuple[float, float]:
        """Return the mean and the 95th percentile of the modelled time to the first token, in milliseconds."""
        seconds = np.array([row[3] for row in self._rows]) * 1e3
        return (float(seconds.mean()), float(np.percentile(seconds, 95))) if len(seconds) else (0.0, 0.0)

    def by_round(self) -> tuple[float, ...]:
        """Return the token hit rate of the n-th requests of all sessions; empty if no session has two."""
        rounds = np.array([row[:3] for row in self._rows], np.int64).reshape(-1, 3)
        if not len(rounds) or not rounds[:, 0].max():
            return ()
        tokens = np.bincount(rounds[:, 0], rounds[:, 1])
        return tuple((np.bincount(rounds[:, 0], rounds[:, 2]) / np.maximum(tokens, 1)).tolist())
