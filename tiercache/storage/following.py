"""`Following`: a thread that learns, again and again, what other processes have changed in a shared store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread, current_thread
from typing import Final

from tiercache.errors import StorageError

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
