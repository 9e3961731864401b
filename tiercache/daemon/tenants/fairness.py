"""Bounds of what tenants cost each other: values on one scale, and few namespaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import log2
from threading import Lock
from typing import Final

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import RefusedError
from tiercache.storage.base import NamespaceRecord, SetItem, StorageBackend, storable
from tiercache.storage.values import is_value, usable_hints
from tiercache.text import readable_size

_WINDOW: Final = 1024
"""Number of values over which the mean of a tenant is taken."""
_BOUND: Final = 8.0
"""Largest distance of a value from its tenant's mean, as a binary logarithm."""
_LEAST: Final = -1074.0
"""Logarithm of the smallest float above 0, which stands for the logarithm of 0 as well."""
MAX_NAMESPACES: Final = 1024
"""Maximum number of a tenant's records, and of namespaces that it has begun since the daemon started."""
MAX_RECORD_BYTES: Final = 256 << 10
"""Maximum length of all records of a tenant together, as text."""


class ValueScale:
    """Scale of the values that the callers of one tenant give to objects: their mean is 1.

    A value is divided by the mean (of the logarithms) of the tenant's values so far, and kept between 2**-8
    and 2**8. So a tenant that gives high values to everything gains nothing, and tenants that measure
    differently compete on equal terms. Only the values of stored objects count in the mean; a tenant cannot
    lower it by values for objects that do not exist.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._mean = 0.0
        self._count = 0
        """Number of values that count in the mean, at most `_WINDOW`."""

    def set(
        self, items: Sequence[SetItem], store: Callable[[Sequence[SetItem]], list[Outcome]]
    ) -> list[Outcome]:
        """Let `store` store the items with their values on this scale."""
        said = [item.meta.value for item in items]
        given = [None if value is None or not is_value(value) else value for value in said]
        scaled = iter(self._scaled([_logarithm(value) for value in given if value is not None]))
        outcomes = store(
            [
                item if value is None else item._replace(meta=replace(item.meta, value=next(scaled)))
                for item, value in zip(items, given, strict=True)
            ]
        )
        kept = zip(given, outcomes, strict=True)
        self._learn([v for v, outcome in kept if v and outcome in (Outcome.STORED, Outcome.HIT)])
        return outcomes

    def advise(
        self, store: StorageBackend, keys: Sequence[ObjectKey], values: Sequence[float], worker: int
    ) -> None:
        """Advise the store of those objects that it has, with the values on this scale."""
        if not values:
            store.advise(keys, values, worker)
            return
        possible, which = usable_hints(values, worker, len(keys))
        asked = [keys[i] for i in which.tolist()]
        there = store.exists(asked)
        known = [(k, v) for k, v, found in zip(asked, possible.tolist(), there, strict=True) if found]
        self._learn([value for _, value in known if value])
        store.advise([key for key, _ in known], self._scaled([_logarithm(v) for _, v in known]), worker)

    def _scaled(self, logarithms: Sequence[float]) -> list[float]:
        with self._lock:
            # The first values of a tenant are their own mean.
            mean = self._mean if self._count or not logarithms else sum(logarithms) / len(logarithms)
        return [2.0 ** min(_BOUND, max(-_BOUND, logarithm - mean)) for logarithm in logarithms]

    def _learn(self, values: Sequence[float]) -> None:
        with self._lock:
            for value in values:
                self._count = min(self._count + 1, _WINDOW)
                self._mean += (_logarithm(value) - self._mean) / self._count


def _logarithm(value: float) -> float:
    return log2(value) if value else _LEAST


class NamespaceBounds:
    """Bound of `MAX_NAMESPACES` namespaces for each tenant, because stores keep tables of all namespaces.

    An object in a namespace beyond these is THROTTLED, and a record beyond them is refused. Both concern that
    tenant alone. All namespaces of no tenant have one bound.

    Thread safety: any thread.
    """

    def __init__(self, tenant_of: Callable[[bytes], str]) -> None:
        """`tenant_of` gives the tenant of a namespace, "" for none."""
        self._tenant_of: Final = tenant_of
        self._lock = Lock()
        self._used: set[bytes] = set()
        """Namespaces that were admitted since the daemon started."""
        self._counts: Counter[str] = Counter()
        """Number of these that are not reserved, by tenant."""

    def reserve(self, namespaces: Iterable[bytes]) -> None:
        """Admit these namespaces at any time, and do not count them."""
        with self._lock:
            self._used.update(namespaces)

    def judge(self, item: SetItem) -> Outcome | None:
        """Return THROTTLED for an item in one namespace too many, None for others."""
        admitted = not storable(item) or self._admits(item.meta.namespace)
        return None if admitted else Outcome.THROTTLED

    def check_record(self, record: NamespaceRecord, present: Iterable[NamespaceRecord]) -> None:
        """Raise RefusedError if a record, with those `present` in the store, is beyond the bounds."""
        tenant = self._tenant_of(record.namespace)
        records = {held.namespace: held for held in present}
        known = records.get(record.namespace)
        records[record.namespace] = record.over(known)
        mine = [held for name, held in records.items() if self._tenant_of(name) == tenant]
        nbytes = sum(_length(held) for held in mine)
        grows = known is None or _length(records[record.namespace]) > _length(known)
        if not self._admits(record.namespace) or (
            grows and (len(mine) > MAX_NAMESPACES or nbytes > MAX_RECORD_BYTES)
        ):
            raise RefusedError(
                f"a tenant may have {MAX_NAMESPACES} namespaces here, and records of"
                f" {readable_size(MAX_RECORD_BYTES)}, and this would be more; use fewer or shorter identities"
            )

    def _admits(self, namespace: bytes) -> bool:
        if namespace in self._used:
            return True
        tenant = self._tenant_of(namespace)
        with self._lock:
            if namespace not in self._used:
                if self._counts[tenant] >= MAX_NAMESPACES:
                    return False
                self._used.add(namespace)
                self._counts[tenant] += 1
            return True


def _length(record: NamespaceRecord) -> int:
    return len(str(dict(record.identity)).encode("utf-8", "replace"))
