"""Samples of the daemon's counters over the last hour, and the differences between them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import Final, Literal, TypeVar

from tiercache.daemon.status.document import HistoryStatus, LookupStatus, MissStatus, PoolStatus
from tiercache.storage.hits import Hits

WINDOW_SECONDS: Final = 3600.0
SAMPLE_SECONDS: Final = 10.0
"""Seconds between two samples, so that the window has 360 of them."""
_MIN_SECONDS: Final = 1.0
"""Minimum age of a sample that is compared with the present, so that a rate is not that of a moment."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """Counters and gauges of the daemon at one moment."""

    time: float
    """Seconds since 1970."""
    at: float
    """Reading of the monotonic clock."""
    lookups: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    """Objects by operation, reason and pool; the reason of a hit is empty."""
    hits: Mapping[str, Hits] = field(default_factory=dict)
    """Prompt tokens by tenant."""
    tier_reads: Mapping[str, float] = field(default_factory=dict)
    """Objects that clients got, by tier."""
    read: float = 0.0
    written: float = 0.0
    """Payload bytes to and from clients."""
    calls: float = 0.0
    used_bytes: float = 0.0


class SampleRing:
    """The samples of one window, the oldest of which make room for new ones.

    Thread safety: any thread.
    """

    def __init__(self, window: float = WINDOW_SECONDS, every: float = SAMPLE_SECONDS) -> None:
        self._window: Final = window
        self._samples: Final[deque[CounterSample]] = deque(maxlen=round(window / every) + 1)
        self._lock: Final = Lock()

    def add(self, sample: CounterSample) -> None:
        """Add the newest sample."""
        with self._lock:
            self._samples.append(sample)

    def within(self, now: CounterSample) -> list[CounterSample]:
        """Return the samples that are at most one window older than `now`, and `now` as the last.

        If there is none, the difference is that to the first sample, however short ago that was.
        """
        oldest, newest = now.at - self._window, now.at - _MIN_SECONDS
        with self._lock:
            found = [sample for sample in self._samples if oldest <= sample.at <= newest]
            return [*(found or [s for s in self._samples if s.at < now.at][:1]), now]


def lookups_of(samples: Sequence[CounterSample]) -> LookupStatus:
    """Return what clients looked up between the first and the last of the samples."""
    first, last = samples[0], samples[-1]
    grown = {key: round(_grown(first.lookups, last.lookups, key)) for key in last.lookups}

    def count(wanted: str, pool: str = "", *, only_hits: bool = False) -> int:
        return sum(
            n
            for (operation, reason, of), n in grown.items()
            if operation == wanted and pool in ("", of) and not (only_hits and reason)
        )

    missed: Counter[tuple[Literal["exists", "get"], str]] = Counter()
    for (operation, reason, _), n in grown.items():
        if reason and n:
            missed["exists" if operation == "exists" else "get", reason] += n
    pools = [
        PoolStatus(
            pool, count("exists", pool), count("exists", pool, only_hits=True), count("get", pool),
            count("get", pool, only_hits=True),
        )
        for pool in dict.fromkeys(pool for (_, _, pool), n in grown.items() if n)
    ]  # fmt: skip
    return LookupStatus(
        last.at - first.at, count("exists"), count("exists", only_hits=True), count("get"),
        [MissStatus(*kind, n) for kind, n in missed.most_common()], pools,
    )  # fmt: skip


def hits_of(samples: Sequence[CounterSample]) -> dict[str, Hits]:
    """Return the prompt tokens of each tenant between the first and the last of the samples."""
    first, last = samples[0].hits, samples[-1].hits
    grown = {tenant: hits - first.get(tenant, Hits()) for tenant, hits in last.items()}
    return {tenant: hits for tenant, hits in sorted(grown.items()) if hits != Hits()}


def tier_hits(samples: Sequence[CounterSample], tier: str) -> int:
    """Return the number of objects that clients got from a tier between the first and the last sample."""
    return round(_grown(samples[0].tier_reads, samples[-1].tier_reads, tier))


def history_of(samples: Sequence[CounterSample], points: int) -> HistoryStatus:
    """Return rates between samples as at most `points` points, each at the end of its interval."""
    step = max(1, -(-(len(samples) - 1) // points))
    # Count from the newest sample, so that the last interval is as long as the others.
    chosen = samples[::-1][::step][::-1]
    history = HistoryStatus([], [], [], [], [], [])
    for before, after in pairwise(chosen):
        seconds = after.at - before.at
        history.times.append(after.time)
        history.token_hit_rate.append(Hits.rated(hits_of([before, after]).values()).token_hit_rate)
        history.read.append((after.read - before.read) / seconds)
        history.written.append((after.written - before.written) / seconds)
        history.calls.append((after.calls - before.calls) / seconds)
        history.used_bytes.append(after.used_bytes)
    return history


def share(part: float, whole: float) -> float | None:
    """Return a fraction; None of nothing."""
    return part / whole if whole else None


def _grown(before: Mapping[K, float], after: Mapping[K, float], key: K) -> float:
    """Return by how much a counter has grown; a counter that is smaller than before has begun anew."""
    was, now = before.get(key, 0.0), after.get(key, 0.0)
    return now - was if now >= was else now
