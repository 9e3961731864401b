"""Changes of a store: several watchers of one store, and a thread that learns what other processes change.

A store itself tells only one function of its changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread, current_thread
from typing import Final
from weakref import WeakKeyDictionary

from tiercache.errors import StorageError
from tiercache.events.base import ChangeNote
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


_log = logging.getLogger(__name__)

_CLOSE_S: Final = 10.0


class Following:
    """Thread that calls `learn` every `pause` seconds, from `start` on until `close`.

    An error of the store is logged, and `learn` is called again.

    Thread safety: any thread may call; the caller makes sure that `start` and `close` do not overlap.
    """

    def __init__(self, name: str, pause: float, learn: Callable[[], object]) -> None:
        self._name: Final = name
        self._pause: Final = pause
        self._learn: Final = learn
        self._closing = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin, unless the thread runs already or this is closed."""
        if self._thread is None and not self._closing.is_set():
            self._thread = Thread(target=self._run, name=f"tiercache-{self._name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; `learn` is not called any more, unless it hangs."""
        self._closing.set()
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(self._pause):
            try:
                self._learn()
            except (OSError, StorageError) as error:
                _log.debug("%s: what others have changed is not known: %s", self._name, error)
