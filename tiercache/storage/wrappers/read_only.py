"""Wrapper for a store that is read and never changed: another job's cache, a golden copy, a tier that is about to be taken away."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Sequence

from tiercache.core import ObjectKey, Outcome
from tiercache.storage.base import NamespaceRecord, SetItem, storable
from tiercache.storage.wrappers.base import Wrapper


class ReadOnly(Wrapper):
    """Wrapper that passes on gets, scans, descriptions and figures of `inner`; sets, deletions and registrations change nothing.

    - A set of a key that the store holds is HIT: the object is there, and that is what a controller writes down.
    - Any other well-formed set is THROTTLED, the outcome that says "not taken, nothing lost, nothing broken". A controller does not write
      the object down as stored, holds back the states that hang on it, and counts no fault. It may ask again with the next commit, which
      costs one `exists` and no bytes. ERROR would count as a broken disk and raise an alarm; it is left for malformed items.
    - A deletion is False: nothing is gone.
    - Reading may change which objects of `inner` were used last. An object that turns out to be corrupt is dropped by the inner store, as
      without the wrapper.

    Thread safety: as `Wrapper`.
    """

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        return self._perform("set", self._refuse, items)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return self._perform("delete", lambda: [False] * len(keys))

    def register_namespace(self, record: NamespaceRecord) -> None:
        self._perform("register_namespace", lambda: None)

    def _refuse(self, items: Sequence[SetItem]) -> list[Outcome]:
        held = self.inner.exists([item.key for item in items])
        return [_verdict(item, there) for item, there in zip(items, held, strict=True)]


def _verdict(item: SetItem, held: bool) -> Outcome:
    if not storable(item):
        return Outcome.ERROR
    return Outcome.HIT if held else Outcome.THROTTLED
