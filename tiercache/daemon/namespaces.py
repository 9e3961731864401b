"""Bound of the namespaces of each tenant, because stores keep tables of all namespaces."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Final

from tiercache.core import Outcome
from tiercache.errors import RefusedError
from tiercache.storage.base import NamespaceRecord, SetItem, StorageBackend, storable
from tiercache.storage.wrappers import Wrapper, decide
from tiercache.text import readable_size

MAX_NAMESPACES: Final = 1024
"""Maximum number of records of a tenant, and of its new namespaces since the daemon started."""
MAX_RECORD_BYTES: Final = 256 << 10
"""Maximum length of all records of a tenant together, as text."""
_KNOWN_OWNERS: Final = 1 << 14
"""Number of namespaces of which it is remembered whose they are."""


class FewNamespaces(Wrapper):
    """The store with at most `MAX_NAMESPACES` namespaces for each tenant.

    An object in a namespace beyond these is THROTTLED, and a record beyond them raises RefusedError. Both
    concern that tenant alone. All namespaces of no tenant have one bound.

    Thread safety: as `Wrapper`.
    """

    def __init__(self, inner: StorageBackend, tenant_of: Callable[[bytes], str]) -> None:
        """`tenant_of` gives the tenant of a namespace, "" for none."""
        super().__init__(inner)
        self._tenant_of = lru_cache(_KNOWN_OWNERS)(tenant_of)
        self._lock = Lock()
        self._used: set[bytes] = set()
        """Namespaces that were admitted since the daemon started."""
        self._counts: Counter[str] = Counter()
        """Number of these that are not reserved, by tenant."""

    def reserve(self, namespaces: Iterable[bytes]) -> None:
        """Admit these namespaces at any time, and do not count them."""
        with self._lock:
            self._used.update(namespaces)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            return decide(items, self._judge, self.inner.set)

    def register_namespace(self, record: NamespaceRecord) -> None:
        """Store a record; raises RefusedError for one beyond the bounds of its tenant."""
        tenant = self._tenant_of(record.namespace)
        records = {held.namespace: held for held in self.namespaces()}
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
        super().register_namespace(record)

    def _judge(self, item: SetItem) -> Outcome | None:
        admitted = not storable(item) or self._admits(item.meta.namespace)
        return None if admitted else Outcome.THROTTLED

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
