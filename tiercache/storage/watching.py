"""Several watchers of one store, which itself tells only one function of its changes."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Final
from weakref import WeakKeyDictionary

from tiercache.events.source import ChangeNote
from tiercache.storage.base import StorageBackend


class _Fan:
    """Function that passes changes on to all watchers of a store.

    Thread safety: the store calls it; `notes` is only ever replaced as a whole.
    """

    def __init__(self) -> None:
        self.notes: tuple[ChangeNote, ...] = ()

    def __call__(self, digests: Sequence[bytes], stored: bool) -> None:
        for note in self.notes:
            note(digests, stored)


_fans: Final[WeakKeyDictionary[StorageBackend, _Fan]] = WeakKeyDictionary()
_lock: Final = Lock()


def begin_watch(store: StorageBackend, note: ChangeNote) -> bool:
    """Let `note` be called for changes of `store`, beside other watchers; see `StorageBackend.watch`.

    Returns False if the store cannot tell of changes. Raises StorageError if it cannot be asked.
    """
    with _lock:
        fan = _fans.get(store)
        if fan is None:
            fan = _Fan()
            fan.notes = (note,)
            if not store.watch(fan):
                return False
            _fans[store] = fan
        elif note not in fan.notes:
            fan.notes = (*fan.notes, note)
        return True


def end_watch(store: StorageBackend, note: ChangeNote) -> None:
    """Call `note` no more; raises StorageError or ClosedError if the store cannot be told."""
    with _lock:
        fan = _fans.get(store)
        if fan is None:
            return
        fan.notes = tuple(other for other in fan.notes if other != note)
        if not fan.notes:
            del _fans[store]
            store.watch(None)
