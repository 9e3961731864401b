"""SocketReadiness of all data connections, told to the event loop through one file descriptor."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable
from select import EPOLLET, EPOLLIN, EPOLLOUT, epoll
from typing import Final

READABLE: Final = EPOLLIN
WRITABLE: Final = EPOLLOUT
_BATCH: Final = 64
"""Maximum number of connections that are told at once; the rest follow when these have had their turn."""


class SocketReadiness:
    """Edge-triggered epoll of sockets, itself watched by the event loop.

    The event loop's own `add_reader` is level-triggered, and would have to be called, and undone, for every
    wait. Here a socket is registered once, and its owner is told of every change. So the owner must try
    first, and wait only after the socket has answered EAGAIN: nothing is told twice.

    Thread safety: the event loop's thread.
    """

    def __init__(self) -> None:
        self._epoll: Final = epoll()
        self._owners: Final[dict[int, Callable[[int], None]]] = {}
        get_running_loop().add_reader(self._epoll.fileno(), self._tell)

    def register(self, descriptor: int, changed: Callable[[int], None]) -> None:
        """Call `changed` with a mask of READABLE, WRITABLE and errors when something has changed."""
        self._epoll.register(descriptor, EPOLLIN | EPOLLOUT | EPOLLET)
        self._owners[descriptor] = changed

    def forget(self, descriptor: int) -> None:
        """Tell nothing more of a socket, which its owner is about to close."""
        if self._owners.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Tell nothing more of any socket; a second call does nothing."""
        if not self._epoll.closed:
            get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
        self._owners.clear()

    def _tell(self) -> None:
        for descriptor, events in self._epoll.poll(0, _BATCH):
            if (changed := self._owners.get(descriptor)) is not None:
                changed(events)
