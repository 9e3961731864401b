"""Deletes objects in batches, in an order of which any part may be left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tiercache.cli.store.target import Target, check_allowed, check_reached
from tiercache.storage.base import ScanEntry, StorageBackend

_BATCH: Final = 256


def check_removable(target: Target, store: StorageBackend) -> None:
    """Raise RefusedError where a daemon would refuse any of the calls that `remove` makes, before anything is changed."""
    check_allowed(target, store, "to delete", ("Exists", "Delete", "Flush"))


class Removed(NamedTuple):
    """A batch that was deleted; `failed`: those of it that are still there."""

    entries: Sequence[ScanEntry]
    failed: Sequence[ScanEntry]


def remove(target: Target, store: StorageBackend, ordered: Sequence[ScanEntry]) -> Iterator[Removed]:
    """Delete these in this order, and see to it at the end that they stay away."""
    for start in range(0, len(ordered), _BATCH):
        batch = ordered[start : start + _BATCH]
        answers = store.delete([entry.key for entry in batch])
        doubtful = [entry for entry, gone in zip(batch, answers, strict=True) if not gone]
        there = store.exists([entry.key for entry in doubtful]) if doubtful else []
        check_reached(target, store)
        yield Removed(batch, [entry for entry, still in zip(doubtful, there, strict=True) if still])
    if ordered:
        store.flush()
