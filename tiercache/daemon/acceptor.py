"""The accept loop of a port, each of whose connections is served by a task of an event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from asyncio import Task, get_running_loop
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Generic, TypeVar

from tiercache.daemon.admission import Admission, ConnectionState, OpeningCounter
from tiercache.daemon.sockets import EXHAUSTED, origin_of

_log = logging.getLogger(__name__)

_TICK_SECONDS: Final = 0.1
"""Seconds between two looks at connections that wait or are opening."""
_PAUSE_SECONDS: Final = 0.25
"""Seconds to wait after descriptors or memory ran out, before connections are accepted again."""


class AcceptedConnection(ConnectionState):
    """Connection of an `Acceptor`.

    Thread safety: the thread of the acceptor's event loop.
    """

    task: Task[None] | None = None
    """Task that serves the connection; None while it waits, and when it is over."""

    def close(self) -> None:
        """Close the connection; called once, when no task serves it."""
        raise NotImplementedError


C = TypeVar("C", bound=AcceptedConnection)


class Acceptor(Generic[C]):
    """Acceptor of connections, from `listen` until `close`.

    Thread safety: the thread of one event loop.
    """

    def __init__(
        self,
        admission: Admission[C],
        make: Callable[[int, bytes, socket.socket], C],
        serve: Callable[[C], Coroutine[Any, Any, None]],
        count_refusal: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Serve by `serve` what `make` makes of a number, an origin and a socket; it may raise OSError.

        `count_refusal` is called with "busy" or "idle" for each connection that is refused or cut.
        """
        self.admission: Final = admission
        self._make: Final = make
        self._serve: Final = serve
        self._count_refusal: Final = count_refusal
        self._listeners: list[socket.socket] = []
        self._numbers = 0
        self._tick: asyncio.TimerHandle | None = None
        self._closing = False

    def listen(self, listener: socket.socket) -> None:
        """Accept connections of a listening socket."""
        self._listeners.append(listener)
        get_running_loop().add_reader(listener, self._accept, listener)

    async def close(self, seconds: float = 0.0, busy: Callable[[C], bool] = lambda _: False) -> None:
        """Accept nothing more, and end every connection; those that are `busy` have `seconds` left."""
        self._closing = True
        while self._listeners:
            listener = self._listeners.pop()
            get_running_loop().remove_reader(listener)
            listener.close()
        if self._tick is not None:
            self._tick.cancel()
        everyone = list(self.admission.connections.values())
        tasks = [connection.task for connection in everyone if connection.task is not None]
        for connection in everyone:
            if not busy(connection):
                self.end(connection)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for connection in everyone:
                self.end(connection)
            await asyncio.gather(*late, return_exceptions=True)

    def end(self, connection: C) -> None:
        """End a connection; what serves it is cancelled first."""
        was_there = self.admission.remove(connection)
        if connection.task is not None:
            connection.task.cancel()
        elif was_there:
            connection.close()

    def open_next(self) -> None:
        """Serve connections whose turn it is, and cut those that take too long; goes on until none waits."""
        if self._closing:
            return
        for connection in self.admission.overdue(time.monotonic()).late:
            self._cut(connection, "idle")
        for connection in self.admission.to_open(time.monotonic):
            connection.since = time.monotonic()
            connection.opening = OpeningCounter(tls=True, max_streams=0)
            connection.task = get_running_loop().create_task(self._serve(connection))
            connection.task.add_done_callback(partial(self._over, connection))
        if self.admission.has_unsettled and self._tick is None:
            self._tick = get_running_loop().call_later(_TICK_SECONDS, self._look)

    def _look(self) -> None:
        self._tick = None
        self.open_next()

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, address = listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                # Pause: the event loop would try again and again until a descriptor is free.
                get_running_loop().remove_reader(listener)
                get_running_loop().call_later(_PAUSE_SECONDS, self._resume, listener)
            return
        self._numbers += 1
        try:
            connection = self._make(self._numbers, origin_of(client, address), client)
        except OSError:
            client.close()
            return
        if self.admission.is_full:
            displaced = self.admission.to_displace()
            if displaced is None:
                self._count_refusal("busy")
                connection.close()
                return
            self._cut(displaced, "busy")
        self.admission.add(connection)
        self.open_next()

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            get_running_loop().add_reader(listener, self._accept, listener)

    def _cut(self, connection: C, reason: str) -> None:
        self._count_refusal(reason)
        self.end(connection)

    def _over(self, connection: C, task: Task[None]) -> None:
        # Not in the task: one that is cancelled before its first step runs nothing.
        # The error of a cancelled task would keep 300 KB of a TLS handshake, until garbage is collected.
        connection.task = None
        self.admission.remove(connection)
        connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection ended with an error", exc_info=error)
        self.open_next()
