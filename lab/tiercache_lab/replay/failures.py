"""Failures of a replay's storage, after which a run must not report figures.

The null stores never fail by themselves, so a failure is a defect of tiercache. The controller takes it for
an outage and goes on without storage. The figures would be those of a smaller cache, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, ParamSpec, TypeVar

from tiercache.core import Outcome, Reason
from tiercache.metrics import Metrics
from tiercache.storage.base import StorageBackend
from tiercache.storage.wrappers import Wrapper

P = ParamSpec("P")
T = TypeVar("T")

_FAILURES: Final = frozenset(
    {Reason.CHECKSUM, Reason.TIMEOUT, Reason.IO_ERROR, Reason.UNAVAILABLE, Reason.REFUSED}
)
"""Reasons of misses that the null stores never give."""
_COUNTERS: Final = (
    "storage_sets_total",
    "storage_gets_total",
    "restore_failures_total",
    "lookups_total",
    "storage_hangs_total",
)
_DEFECT: Final = "this is a defect of tiercache, and the run has no figures; please report it"


class Witness(Wrapper):
    """Store that remembers the first exception of the store inside.

    Thread safety: one thread.
    """

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
