"""The null store: the `memory` store without payloads, whose clock is that of the replay.

A null store never fails by itself, so a failure is a defect of tiercache, after which a run must not report
figures: the controller takes it for an outage and goes on without storage, and the figures would be those of
a smaller cache. `Witness` and `check_counters` find it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, ParamSpec, TypeVar

from tiercache_backends.memory import MemoryBackend, StoredObject

from tiercache.core import Outcome, Reason
from tiercache.metrics import Metrics
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.env import Env
from tiercache.storage.shares import Footprint
from tiercache.storage.wrappers import Wrapper

P = ParamSpec("P")
T = TypeVar("T")

_FAILURES: Final = frozenset(
    {Reason.CHECKSUM, Reason.TIMEOUT, Reason.IO_ERROR, Reason.UNAVAILABLE, Reason.REFUSED}
)
"""Reasons of misses that the null stores never give."""
_COUNTERS: Final = (
    "storage_sets_total", "storage_gets_total", "restore_failures_total", "lookups_total",
    "storage_hangs_total",
)  # fmt: skip
_DEFECT: Final = "this is a defect of tiercache, and the run has no figures; please report it"


class ReplayClock(Env):
    """Environment whose time is that of the replay, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        """Return the seconds of the replay."""
        return self._clock()

    def time_ns(self) -> int:
        """Return the same in nanoseconds."""
        return int(self._clock() * 1e9)


class NullStore(MemoryBackend):
    """Store that counts up to `capacity` payload bytes and keeps none of them.

    Values age by the seconds of `clock` (default: they do not age). A get of a stored key is always a hit,
    because there are no bytes to verify.

    Thread safety: one thread, unlike other stores.
    """

    footprint = Footprint()
    is_sound = staticmethod(lambda item: True)  # copies between tiers come without payload

    def __init__(self, capacity: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(capacity, ReplayClock(clock))
        self.peak = self.read_bytes = self.written_bytes = 0

    @property
    def evicted(self) -> int:
        """Number of evicted objects."""
        return self._evicted

    def _get(self, item: GetItem, *, is_use: bool = True) -> Outcome:
        found = self._objects.get(item.key.digest)
        if found is None:
            return Outcome.MISS
        if is_use:
            self._residents.touch(found.row)
            self._residents.hits[found.row] += 1
            self.read_bytes += found.meta.length
        return Outcome.HIT

    def _set(self, item: SetItem, *, refused: bool) -> Outcome:
        outcome = self._refuse(item, refused=refused)
        if outcome is None:
            outcome = self._add(StoredObject(item.key, item.meta, b"", self._env.time_ns() / 1e9))
        if outcome is Outcome.STORED:
            self.written_bytes += item.meta.length
            self.peak = max(self.peak, self._used)
        return outcome


class Witness(Wrapper):
    """Store that remembers the first exception of the store inside. Thread safety: one thread."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._first: tuple[str, Exception] | None = None

    def check(self) -> None:
        """Raise RuntimeError from the first exception of the store, if there was one."""
        if self._first is not None:
            operation, error = self._first
            raise RuntimeError(f"the replay's storage raised in {operation}: {_DEFECT}") from error

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return super()._perform(operation, call, *arguments, **named)
        except Exception as error:
            self._first = self._first or (operation, error)
            raise


def check_counters(metrics: Metrics) -> None:
    """Raise RuntimeError if a controller has counted a failure of its storage."""
    wrong = [
        f"{sample.name} {' '.join(sample.labels.values())}: {sample.value:g}"
        for name in _COUNTERS
        for sample in metrics.samples(metrics.rows[name])
        if sample.value and _is_failure(sample.labels)
    ]
    if wrong:
        raise RuntimeError(f"the replay's storage failed ({'; '.join(wrong)}): {_DEFECT}")


def _is_failure(labels: Mapping[str, str]) -> bool:
    """Return whether a counter of `_COUNTERS` counts failures in the label set `labels`."""
    if "outcome" in labels:
        return Outcome(labels["outcome"]).reason in _FAILURES
    return "reason" not in labels or labels["reason"] in _FAILURES  # a hang has no reason
