"""Code that all calls share: messages, and checks of keys and lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode
from grpc.aio import EOF, AbortError

from tiercache.core import ObjectKey
from tiercache.daemon.access import Caller, LimitError, Refusal
from tiercache.errors import WireError
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

M = TypeVar("M", bound=Message)


_SMALL_BYTES: Final = 16 << 10
"""Maximum size in bytes of a first message with which the initial metadata is sent.

If the first message is larger, `Call.begin` sends the metadata before the message, which costs 0.1 ms. A
smaller message, and the metadata with it, is sent without delay, unless the client leaves other calls of the
same connection unread.
"""
PARSED: Final = 5
"""Estimated memory of the Python objects made from a message with keys, as a multiple of its size."""


def request_bytes(max_keys: int) -> int:
    """Return the size in bytes of the largest request with `max_keys` keys.

    A key with its description takes about 300 of the 512 bytes allowed per key. The rest, and 64 KiB per
    request, leave room for the object's location in attached memory.
    """
    return (64 << 10) + 512 * max_keys


@dataclass(slots=True)
class Call:
    """Call that was admitted. Code that creates a Call must `end` it.

    Thread safety: the event loop's thread.
    """

    caller: Caller
    context: Any
    """gRPC's context of the call; it reads and writes bytes."""
    idle: float
    """Seconds that reading or writing one message may take."""
    message_bytes: int
    """Size in bytes of the largest message that gRPC receives."""
    request_bytes: int
    """Size in bytes of the largest request that this call may have."""
    _begun: bool = False
    """Whether the initial metadata is sent, or is on its way."""
    _beginning: asyncio.Future[Any] | None = None
    """Future that is done when `begin` has sent the initial metadata; None if `begin` was not called."""
    _held: int = 0
    """Bytes that this call has taken from the client's budget for requests."""

    async def end(self) -> None:
        """Give back the bytes that were taken for the request.

        If the initial metadata is still on its way, wait for it, up to `idle` seconds.
        """
        self.caller.budgets.requests.give(self._held)
        self._held = 0
        if self._beginning is not None:
            await asyncio.wait([self._beginning], timeout=self.idle)

    async def read(self) -> bytes | None:
        """Return the next message, or None at the end of the stream; raises Refusal after `idle` seconds."""
        message = await self._in_time(self.context.read())
        return None if message is EOF else message

    async def request(self, kind: type[M], weigh: Callable[[M], int] = lambda _: 0) -> M:
        """Read the request of a call whose request is a single message.

        `weigh` returns the estimated bytes of the Python objects that are made from the message. The objects
        made from its keys are not included. The size of a message is not known before it is read. Therefore
        this method first waits for room for the largest message, and later gives back the room that the
        message does not need.

        Raises WireError for a message that is missing, malformed or too large, and Refusal for a message that
        does not come in time.
        """
        await self.caller.budgets.requests.take(self.message_bytes)
        self._held = self.message_bytes
        data = await self.read()
        if data is None:
            raise WireError("the call ended before its request came")
        message = messages.read_message(data, kind, self.request_bytes)
        weight = check_weight(len(data), weigh(message), self.message_bytes)
        self.caller.budgets.requests.give(self._held - weight)
        self._held = weight
        return message

    async def begin(self) -> None:
        """Send the initial metadata, which gRPC otherwise sends with the first message.

        A first message that waits until its client reads would hold the metadata back. As long as the
        metadata is not sent, gRPC cannot end the call with a status: it would send the metadata a second
        time. Therefore the sending goes on even if this coroutine is cancelled, and `end` waits for it.
        """
        self._begun = True
        self._beginning = asyncio.ensure_future(self.context.send_initial_metadata(()))
        # Nobody need read its exception, which asyncio would log.
        self._beginning.add_done_callback(lambda done: done.cancelled() or done.exception())
        await self._in_time(asyncio.shield(self._beginning))

    async def send(self, data: bytes) -> None:
        """Send one message, and return when the transport has accepted it.

        Raises Refusal if the client does not read within `idle` seconds.
        """
        if not self._begun and len(data) > _SMALL_BYTES:
            await self.begin()
        self._begun = True
        await self._in_time(self.context.write(data))

    async def _in_time(self, step: Any) -> Any:
        try:
            async with asyncio.timeout(self.idle):
                return await step
        except TimeoutError:
            raise Refusal(
                StatusCode.DEADLINE_EXCEEDED, f"the call made no progress for {self.idle:g} s (limits.idle)"
            ) from None


@contextmanager
def without_abort_traceback() -> Iterator[None]:
    """Swallow the AbortError of a handler and drop its traceback; gRPC keeps the error and raises it itself.

    The traceback would make a reference cycle (error, frames, call, error). Then any refused caller could
    make the daemon hold memory until the next garbage collection.
    """
    try:
        yield
    except AbortError as abort:
        abort.__traceback__ = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Consecutive objects of one request, which are to be read."""

    first: int
    """Position of the first object in the request."""
    keys: Sequence[ObjectKey]
    lengths: Sequence[int]
    """Bytes of each object."""


def check_weight(nbytes: int, extra: int, most: int) -> int:
    """Return the memory in bytes for a request of `nbytes` with `extra`; raises WireError above `most`."""
    weight = PARSED * nbytes + extra
    if weight > most:
        raise WireError(
            f"a request of {nbytes} bytes needs {weight} bytes of memory, and at most {most} are allowed;"
            " send it in parts"
        )
    return weight


def read_keys(message: pb.Keys, max_keys: int) -> list[ObjectKey]:
    """Return the object keys of a message; raises LimitError for more than `max_keys`."""
    if len(message.pool_of) > max_keys:
        raise LimitError(
            f"a batch of {len(message.pool_of)} keys is beyond the limit of {max_keys}; send it in parts"
        )
    return messages.read_keys(message, max_keys)


def check_length(length: int, max_bytes: int) -> None:
    """Raise LimitError unless an object may have this length in bytes."""
    if not 0 < length <= max_bytes:
        raise LimitError(f"an object of {length} bytes is not allowed; limits.object_bytes is {max_bytes}")


def read_wanted(keys: pb.Keys, lengths: Sequence[int], limits: pb.Limits) -> Wanted:
    """Return the objects that a Get or GetInto asks for; raises WireError, or LimitError beyond a limit."""
    found = read_keys(keys, limits.keys)
    if len(lengths) != len(found):
        raise WireError(f"{len(found)} keys came with {len(lengths)} lengths")
    for length in lengths:
        check_length(length, limits.object_bytes)
    return Wanted(0, found, list(lengths))
