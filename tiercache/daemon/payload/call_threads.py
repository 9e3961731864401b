"""Threads that serve the calls of data connections, from the first byte to the answer.

If the event loop serves a small call, it wakes a store thread, which wakes the loop again. These hand-overs,
with the interpreter's lock, took a third of the call's processor time. So a thread takes the steps of the
call's coroutine itself: it receives, admits, asks the store, and answers. A coroutine that waits for its
socket is parked, and the next free thread goes on with it. Before other waits, and if its client is slow, it
is handed to the event loop, where it may wait for anything (`steps`):

    idle ── bytes come ──▶ in a thread ── answered ──▶ idle
                                ├── socket not ready ──▶ parked ── ready ──▶ in a thread
                                └── must wait, or parked for long ──▶ in the event loop ── answered ──▶ idle
"""

from __future__ import annotations

import os
import time
from asyncio import CancelledError, Future, get_running_loop
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from enum import Enum
from select import EPOLLIN, EPOLLONESHOT, EPOLLRDHUP, epoll
from threading import Lock, Thread
from typing import Any, Final

from tiercache.daemon.budget import Budget
from tiercache.daemon.payload.channel import Channel
from tiercache.steps import DEADLINE

_CALL: Final = EPOLLIN | EPOLLRDHUP
"""Events of epoll at which a call begins: bytes, or the end of the connection."""
_FEW: Final = 2
"""Number of threads while calls are short; more would only wait for the interpreter's lock."""
_SHORT_SECONDS: Final = 0.02
"""Mean seconds of a call above which calls wait for the store, so that more threads serve more calls."""
LOOK_SECONDS: Final = 0.25
"""Seconds between two looks at what the threads do."""


class _Place(Enum):
    """Place of a connection; while it is idle, the threads wait for its next call."""

    IDLE = "idle"
    THREAD = "in a thread"
    LOOP = "in the event loop"
    OVER = "over"


class Unfinished:
    """Call that goes on in the event loop, or the error with which a thread's call ended; to be awaited."""

    def __init__(self, call: Coroutine[Any, Any, None] | None, error: BaseException | None = None) -> None:
        self.call: Final = call
        self._error: Final = error

    def __await__(self) -> Generator[Any, None, None]:
        if self._error is not None:
            raise self._error
        if self.call is not None:
            yield from self.call.__await__()  # `await` refuses a coroutine that has begun


class Conversation:
    """The calls of one data connection.

    Thread safety: `CallThreads` decides who may use it.
    """

    def __init__(
        self, channel: Channel, workers: Budget, serve: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """`serve` makes the coroutine of one call, which holds a unit of `workers` in a thread."""
        self.channel: Final = channel
        self.descriptor: Final = channel.descriptor
        self.workers: Final = workers
        self.serve: Final = serve
        self.context: Final[Context] = copy_context()
        """Context in which all steps of the calls run."""
        self.place = _Place.LOOP
        self.returned: Future[Unfinished] | None = None
        """Future of the call that a thread does not finish."""
        self.parked: Coroutine[Any, Any, None] | None = None
        """Call that waits for its socket, and since when."""
        self.parked_at = 0.0
        self.awaited = _CALL
        """Events of epoll that end the present wait."""

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return self.place is _Place.IDLE and self.parked is None

    @property
    def in_thread(self) -> bool:
        """Whether a thread serves a call."""
        return self.place is _Place.THREAD

    @property
    def is_parked(self) -> bool:
        """Whether a call waits for its socket."""
        return self.parked is not None

    @property
    def has_more(self) -> bool:
        """Whether another call has come behind the one that has ended."""
        return not self.is_parked and self.channel.pending

    def give_up(self, unfinished: Unfinished) -> None:
        """Close the coroutine of a call, if it has not ended."""
        if unfinished.call is not None:
            self.context.run(unfinished.call.close)


class CallThreads:
    """Threads that wait together for calls on idle connections.

    There may be one more than units of work, so that one is always free to hand calls to the event loop. A
    call that hangs in the store keeps its thread and its unit; at its deadline the client is told.

    Thread safety: the event loop's thread.
    """

    def __init__(self, workers: int) -> None:
        self._loop: Final = get_running_loop()
        self._most: Final = workers + 1
        self._count = 0
        """Number of threads."""
        self._wanted = 0
        """Number of threads above which one ends after its call."""
        self._busy = 0
        """Number of threads that serve a call."""
        self._ended = 0
        """Number of calls that have ended since the last look."""
        self._lock: Final = Lock()
        """Guards the places of all connections, and these numbers."""
        self._epoll: Final = epoll()
        self._over: Final = os.eventfd(0)
        self._epoll.register(self._over, EPOLLIN)
        self._conversations: Final[dict[int, Conversation]] = {}
        self.draining = False
        """Whether connections come back as soon as their call has ended."""

    async def lend(self, conversation: Conversation) -> Unfinished:
        """Let threads serve the calls of a connection until one of them cannot, and return that call."""
        if not self._count:
            self._grow(_FEW)
        if conversation.channel.pending:  # a call is there already, of which no socket would tell
            return Unfinished(conversation.serve())
        returned: Future[Unfinished] = self._loop.create_future()
        conversation.returned = returned
        known = conversation.descriptor in self._conversations
        self._conversations[conversation.descriptor] = conversation
        conversation.place = _Place.IDLE
        conversation.awaited = _CALL
        arm = self._epoll.modify if known else self._epoll.register
        arm(conversation.descriptor, _CALL | EPOLLONESHOT)
        try:
            return await returned
        except CancelledError:
            if returned.done() and not returned.cancelled():
                conversation.give_up(returned.result())
            raise

    def end(self, conversation: Conversation) -> None:
        """Close a connection that is not lent any more; if a thread has it, when its call has ended."""
        with self._lock:
            in_thread, conversation.place = conversation.in_thread, _Place.OVER
        if in_thread:
            conversation.channel.cut()
        else:
            self._close(conversation)

    def look(self, late: bytes) -> None:
        """Answer calls that hang in a thread after their deadline with `late`, and end their connections.

        Start more threads if all of them wait for the store.
        """
        now = time.monotonic()
        for conversation in self._conversations.values():
            deadline = conversation.context.get(DEADLINE)
            overdue = deadline is not None and deadline.until < now
            if overdue and conversation.in_thread:
                conversation.channel.tell_late(late)
            elif conversation.parked is not None and (overdue or now - conversation.parked_at > LOOK_SECONDS):
                self._return_parked(conversation)
        with self._lock:
            ended, self._ended = self._ended, 0
            short = ended * _SHORT_SECONDS > self._count * LOOK_SECONDS
            if short:
                self._wanted = _FEW
            all_wait = not short and self._busy == self._count
        if all_wait:
            self._grow(self._count)

    def close(self) -> None:
        """Let the threads end, each after the call that it serves."""
        os.eventfd_write(self._over, 1)

    def _grow(self, more: int) -> None:
        with self._lock:
            more = min(more, self._most - self._count)
            self._count = self._wanted = self._count + more
        for _ in range(more):
            Thread(target=self._work, name="tiercache-calls", daemon=True).start()

    def _work(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll(maxevents=1):
                if descriptor == self._over:
                    return
                # A connection that was closed meanwhile is not there, or a new one, which has no bytes yet.
                conversation = self._conversations.get(descriptor)
                if conversation is not None:
                    self._serve(conversation)
                del conversation
            if self._count > self._wanted and self._retires():
                return

    def _retires(self) -> bool:
        """Return whether the thread that asks ends, because fewer are wanted."""
        with self._lock:
            retires = self._count > self._wanted
            self._count -= retires
            return retires

    def _serve(self, conversation: Conversation) -> None:
        """Serve the call that comes or goes on, and those that have come with it."""
        with self._lock:
            if conversation.place is not _Place.IDLE:
                return
            conversation.place = _Place.THREAD
            self._busy += 1
            call = conversation.serve() if conversation.parked is None else conversation.parked
            conversation.parked = None
        unfinished: Unfinished | None = None
        if conversation.workers.try_take(1):
            try:
                unfinished = self._step(conversation, call)
                while unfinished is None and conversation.has_more and not self.draining:
                    unfinished = self._step(conversation, conversation.serve())
            finally:
                conversation.workers.give(1)
        else:
            unfinished = Unfinished(call)
        with self._lock:
            self._busy -= 1
            self._ended += 1
            going_on = conversation.is_parked or not self.draining
            if unfinished is None and conversation.in_thread and going_on:
                conversation.place = _Place.IDLE
                self._epoll.modify(conversation.descriptor, conversation.awaited | EPOLLONESHOT)
                return
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._take_back, conversation, unfinished or Unfinished(None))

    def _step(self, conversation: Conversation, call: Coroutine[Any, Any, None]) -> Unfinished | None:
        """Serve a call as far as it comes; None if it has ended, or is parked until its socket changes."""
        try:
            awaited: int = conversation.context.run(call.send, None)
        except StopIteration:
            conversation.awaited = _CALL
            return None
        except BaseException as error:  # noqa: BLE001  the task of the connection gets it
            return Unfinished(None, error)
        if not awaited:
            return Unfinished(call)
        conversation.parked, conversation.parked_at = call, time.monotonic()
        conversation.awaited = awaited
        return None

    def _return_parked(self, conversation: Conversation) -> None:
        """Let the event loop wait for a client that is slow."""
        with self._lock:
            if conversation.place is not _Place.IDLE:  # it goes on just now
                return
            call, conversation.parked = conversation.parked, None
            conversation.place = _Place.LOOP
        self._take_back(conversation, Unfinished(call))

    def _take_back(self, conversation: Conversation, unfinished: Unfinished) -> None:
        """Let the task of a connection go on with its call."""
        with self._lock:
            over = conversation.place is _Place.OVER
            if not over:
                conversation.place = _Place.LOOP
        if conversation.returned is not None and not conversation.returned.done():
            conversation.returned.set_result(unfinished)
        else:  # the task was cancelled
            conversation.give_up(unfinished)
        if over:
            self._close(conversation)

    def _close(self, conversation: Conversation) -> None:
        if self._conversations.get(conversation.descriptor) is conversation:
            del self._conversations[conversation.descriptor]
            self._epoll.unregister(conversation.descriptor)
        if conversation.parked is not None:
            conversation.give_up(Unfinished(conversation.parked))
        conversation.channel.close()
