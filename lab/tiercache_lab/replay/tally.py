"""Counters of one run of a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from tiercache.policy import ModelProfile
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.results import Sample

_SAMPLES: Final = 100
"""Approximate number of samples of a run."""


class Tally:
    """Sums over the requests of one run.

    `requests` is the number of requests that will be counted. `held` returns the bytes in use on the host.

    Thread safety: one thread.
    """

    def __init__(self, profile: ModelProfile, requests: int, held: Callable[[], int]) -> None:
        self._profile = profile
        self._held = held
        self._every = max(1, requests // _SAMPLES)
        self._rows: list[tuple[float, int]] = []  # seconds and cuts of each request
        # sums of prompt tokens, restored tokens, FLOPs of prompts and FLOPs of restored prefixes
        self._window: list[float] = [0.0] * 4
        self._total: list[float] = [0.0] * 4
        self.over_time: list[Sample] = []

    def add(self, request: Request, depth: int, seconds: float, cuts: int = 0) -> None:
        """Count a request that restored `depth` tokens and had its first token after `seconds`.

        `cuts` is the number of checkpoints at which its prefill was cut.
        """
        prompt = len(request.prompt)
        self._rows.append((seconds, cuts))
        for i, value in enumerate(
            (prompt, depth, self._profile.flops(0, prompt), self._profile.flops(0, depth))
        ):
            self._window[i] += value
            self._total[i] += value
        if len(self._rows) % self._every == 0:
            tokens, hits, flops, saved = self._window
            self.over_time.append(Sample(len(self._rows), hits / tokens, saved / flops, self._held(), flops))
            self._window = [0.0] * 4

    @property
    def requests(self) -> int:
        """Number of counted requests."""
        return len(self._rows)

    @property
    def token_hit_rate(self) -> float:
        """Restored prompt tokens divided by prompt tokens."""
        return self._total[1] / self._total[0] if self._total[0] else 0.0

    @property
    def flops_saved(self) -> float:
        """FLOPs of the restored prefixes divided by FLOPs of the prompts."""
        return self._total[3] / self._total[2] if self._total[2] else 0.0

    @property
    def cuts(self) -> float:
        """Cuts of the prefill per request."""
        return sum(row[1] for row in self._rows) / len(self._rows) if self._rows else 0.0

    def ttft_ms(self) -> tuple[float, float]:
        """Return mean and 95th percentile of the modelled time to the first token, in milliseconds."""
        seconds = np.array([row[0] for row in self._rows]) * 1e3
        return (float(seconds.mean()), float(np.percentile(seconds, 95))) if len(seconds) else (0.0, 0.0)

    @property
    def ttft_ms_p50(self) -> float:
        """Median of the modelled time to the first token, in milliseconds."""
        return float(np.median([row[0] for row in self._rows])) * 1e3 if self._rows else 0.0
