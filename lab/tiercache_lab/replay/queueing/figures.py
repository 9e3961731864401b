"""Figures of a run with a queue: waits, times per token, goodput, and the use of engine and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tiercache.errors import ConfigError
from tiercache_lab.replay.queueing.server import Job


@dataclass(frozen=True, slots=True)
class Objective:
    """Service level objective of a request. Raises ConfigError for a time that is not positive."""

    ttft: float | None = None
    """Most seconds from a request's arrival to its first token; None for any number."""
    tpot: float | None = None
    """Most seconds per token after the first; None for any number."""

    def __post_init__(self) -> None:
        for name, value in (("time to the first token", self.ttft), ("time per token", self.tpot)):
            if value is not None and not value > 0:
                raise ConfigError(f"a {name} of {value:g} s is no objective; use a positive time, such as 2s")

    @property
    def is_given(self) -> bool:
        """Whether there is an objective at all."""
        return self.ttft is not None or self.tpot is not None

    def met(self, job: Job) -> bool:
        """Return whether a request that was served met the objective; a time just at the limit does."""
        tpot = job.tpot
        return (self.ttft is None or job.ttft <= self.ttft) and (
            self.tpot is None or tpot is None or tpot <= self.tpot
        )


@dataclass(frozen=True, slots=True)
class Serving:
    """Times of the requests of one run. Rates are per second from the first arrival to the last token."""

    objective: Objective
    wait_ms_mean: float
    """Mean time that a request waited for a place, in milliseconds."""
    wait_ms_p95: float
    """95th percentile of the same."""
    load_ms_mean: float
    """Mean time of a request's loads, in milliseconds."""
    prefill_ms_mean: float
    """Mean time from the end of the loads to the first token, in milliseconds; waits for the engine count."""
    tpot_ms_mean: float
    """Mean time per token after the first, in milliseconds, over the requests with more than one token."""
    tpot_ms_p95: float
    """95th percentile of the same."""
    arrived_per_second: float
    """Requests that arrived per second from the first arrival to the last."""
    served_per_second: float
    """Requests that ended per second."""
    within: float | None
    """Fraction of the requests that met the objective; None without an objective."""
    goodput: float | None
    """Requests per second that met the objective; None without an objective."""
    running: float
    """Mean number of requests that had a place."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Fraction of the time in which the engine computed, and in which each tier was read, by name."""


def serving(jobs: Sequence[Job], objective: Objective, busy: Mapping[str, float]) -> Serving:
    """Return the figures of requests that have all ended; `busy` has seconds by name."""
    times = np.array([(job.arrival, job.begun, job.loaded, job.first, job.ended) for job in jobs])
    arrival, begun, loaded, first, ended = times.reshape(-1, 5).T
    per_token = np.array([tpot for job in jobs if (tpot := job.tpot) is not None])
    span = float(ended.max() - arrival.min()) if len(jobs) else 0.0
    arriving = float(arrival.max() - arrival.min()) if len(jobs) else 0.0
    met = sum(objective.met(job) for job in jobs)
    return Serving(
        objective=objective,
        wait_ms_mean=_mean(begun - arrival),
        wait_ms_p95=_p95(begun - arrival),
        load_ms_mean=_mean(loaded - begun),
        prefill_ms_mean=_mean(first - loaded),
        tpot_ms_mean=_mean(per_token),
        tpot_ms_p95=_p95(per_token),
        arrived_per_second=_per(len(jobs) - 1, arriving),
        served_per_second=_per(len(jobs), span),
        within=met / len(jobs) if objective.is_given and len(jobs) else None,
        goodput=_per(met, span) if objective.is_given else None,
        running=_per(float((ended - begun).sum()), span),
        busy={name: _per(seconds, span) for name, seconds in busy.items()},
    )


def _mean(seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(seconds.mean()) * 1e3 if len(seconds) else 0.0


def _p95(seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(np.percentile(seconds, 95)) * 1e3 if len(seconds) else 0.0


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0
