"""Memory that the daemon may still touch after the client stopped waiting, until it is proven that it no longer does."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Final

from tiercache_backends.grpc.session import Session

_LOOK_MS: Final = 200
"""Most milliseconds until a session that was added is watched with the others."""


class Hazards:
    """Sessions that the client ended while a call was under way.

    The proof that the daemon does not touch the memory any more is that it closes its end of the connection, or dies. A thread waits for
    that, and lives as long as there is a session to wait for.

    Thread safety: any thread may call.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pending: list[tuple[Session, Sequence[Callable[[], None]]]] = []
        self._watching = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._pending)

    def begin(self, session: Session, lifts: Sequence[Callable[[], None]]) -> None:
        """End the session, and call each of `lifts` once the daemon does not touch memory for it any more."""
        with self._lock:
            session.watched = True
            session.end()
            self._pending.append((session, lifts))
            if not self._watching:
                self._watching = True
                try:
                    Thread(target=self._watch, name="tiercache-grpc-landing", daemon=True).start()
                except RuntimeError:  # no thread could be started; the next `begin` tries again
                    self._watching = False

    def _watch(self) -> None:
        while sessions := self._sessions():
            poll = select.poll()
            for session in sessions:
                if session.socket.fileno() >= 0:
                    poll.register(session.socket, select.POLLIN)
            poll.poll(_LOOK_MS)
            landed = {session for session in sessions if session.landed()}
            with self._lock:
                over = [lifts for session, lifts in self._pending if session in landed]
                self._pending = [entry for entry in self._pending if entry[0] not in landed]
            for lifts in over:
                for lift in lifts:
                    lift()

    def _sessions(self) -> set[Session]:
        with self._lock:
            found = {session for session, _ in self._pending}
            self._watching = bool(found)
        return found
