"""Deletion of objects in batches, in an order that may be interrupted at any point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tiercache.cli.store.target import Target, check_allowed, check_reached
from tiercache.storage.base import ScanEntry, StorageBackend

_BATCH: Final = 256
"""Objects of one call to delete."""


def check_removable(target: Target, store: StorageBackend) -> None:
    """Raise RefusedError if a daemon would refuse any of the calls that `remove` makes; to be called before anything is changed."""
    check_allowed(target, store, "to delete", ("Exists", "Delete", "Flush"))


class Removed(NamedTuple):
    """A batch of objects that were to be deleted; `failed`: those of them that are still stored."""

    entries: Sequence[ScanEntry]
    failed: Sequence[ScanEntry]


def remove(target: Target, store: StorageBackend, ordered: Sequence[ScanEntry]) -> Iterator[Removed]:
    """Delete objects in the order given, yield each batch, and flush the store at the end so that the deletion lasts."""
    for start in range(0, len(ordered), _BATCH):
        batch = ordered[start : start + _BATCH]
        answers = store.delete([entry.key for entry in batch])
        doubtful = [entry for entry, gone in zip(batch, answers, strict=True) if not gone]
        there = store.exists([entry.key for entry in doubtful]) if doubtful else []
        check_reached(target, store)
        yield Removed(batch, [entry for entry, still in zip(doubtful, there, strict=True) if still])
    if ordered:
        store.flush()
