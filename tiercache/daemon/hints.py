"""Values of callers that do not trust each other, on one scale."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log2
from threading import Lock
from typing import Final

from tiercache.core import ObjectKey, Outcome
from tiercache.storage.base import SetItem, StorageBackend
from tiercache.storage.values import is_value, usable_hints
from tiercache.storage.wrappers import Wrapper

_WINDOW: Final = 1024
"""Number of values over which the mean of a tenant is taken."""
_BOUND: Final = 8.0
"""Largest distance of a value from its tenant's mean, as a binary logarithm."""
_LEAST: Final = -1074.0
"""Logarithm of the smallest float above 0, which stands for the logarithm of 0 as well."""


class OneScale(Wrapper):
    """The store as the callers of one tenant may value its objects: their mean value is 1.

    A value is divided by the mean (of the logarithms) of the tenant's values so far, and kept between 2**-8
    and 2**8. So a tenant that gives high values to everything gains nothing, and tenants that measure
    differently compete on equal terms. Only the values of stored objects count in the mean; a tenant cannot
    lower it by values for objects that do not exist.

    Thread safety: as `Wrapper`.
    """

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._mutex = Lock()
        self._mean = 0.0
        self._count = 0
        """Number of values that count in the mean, at most `_WINDOW`."""

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        said = [item.meta.value for item in items]
        given = [None if value is None or not is_value(value) else value for value in said]
        logarithms = [_logarithm(value) for value in given if value is not None]
        scaled = iter(self._scaled(logarithms))
        outcomes = super().set(
            [
                item if value is None else item._replace(meta=replace(item.meta, value=next(scaled)))
                for item, value in zip(items, given, strict=True)
            ]
        )
        kept = zip(given, outcomes, strict=True)
        self._learn([v for v, outcome in kept if v and outcome in (Outcome.STORED, Outcome.HIT)])
        return outcomes

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        possible, which = usable_hints(values, worker, len(keys))
        asked = [keys[i] for i in which.tolist()]
        there = self._perform("exists", self.inner.exists, asked)
        known = [(k, v) for k, v, found in zip(asked, possible.tolist(), there, strict=True) if found]
        self._learn([value for _, value in known if value])
        scaled = self._scaled([_logarithm(value) for _, value in known])
        super().advise([key for key, _ in known], scaled, worker)

    def _scaled(self, logarithms: Sequence[float]) -> list[float]:
        with self._mutex:
            # The first values of a tenant are their own mean.
            mean = self._mean if self._count or not logarithms else sum(logarithms) / len(logarithms)
        return [2.0 ** min(_BOUND, max(-_BOUND, logarithm - mean)) for logarithm in logarithms]

    def _learn(self, values: Sequence[float]) -> None:
        with self._mutex:
            for value in values:
                self._count = min(self._count + 1, _WINDOW)
                self._mean += (_logarithm(value) - self._mean) / self._count


def _logarithm(value: float) -> float:
    return log2(value) if value else _LEAST
