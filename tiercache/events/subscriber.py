"""`EventSubscriber`: reads KV events, notices what it has missed, and asks for it."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tiercache.errors import MissingExtraError, StorageError, WireError
from tiercache.events.base import KVEvent
from tiercache.events.encoding import MAX_PAYLOAD, decode_batch
from tiercache.events.publisher import END

_RECEIVE_MARK: Final = 10_000
"""Number of batches that wait for this subscriber."""
_ANSWER_S: Final = 5.0
"""Seconds to wait for the next message of a replay."""
SNAPSHOT: Final = 2**64 - 1
"""Number to ask for in a replay to get a snapshot; no log ever has it."""


class BatchOrigin(enum.StrEnum):
    """Way in which a batch came."""

    LIVE = "live"
    REPLAY = "replay"
    """After a gap, or on demand."""
    LOST = "lost"
    """No batch: those before the next one are lost, and no replay could be had."""


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """Batch of events as a subscriber got it."""

    origin: BatchOrigin
    sequence: int
    time: float
    events: tuple[KVEvent, ...]


class EventSubscriber:
    """Subscriber of the publisher at `endpoint`, which asks at `replay` for what it has missed.

    `start` is the number of the first batch to ask for; SNAPSHOT: begin with all that is there; None: begin
    with what is published from now on. Without `replay`, gaps are only reported (`BatchOrigin.LOST`).

    Raises MissingExtraError without pyzmq, StorageError for an address that is not possible.

    Thread safety: one thread.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str = "",
        topic: str = "kv-events",
        start: int | None = SNAPSHOT,
        idle: float = 2.0,
    ) -> None:
        try:
            import zmq
        except ImportError as error:
            raise MissingExtraError("a subscriber of KV events", "events", error) from error
        self._zmq: Final[Any] = zmq
        self._topic: Final = topic.encode()
        self._context: Any = zmq.Context(io_threads=1)
        self._replay: Final = replay
        self._idle: Final = idle
        self._expected: int | None = None
        self._covered = range(0)
        """Numbers that the last replay gave, and that may come again from the publisher."""
        self._asked = start
        self._router: Any = None
        self._heard = time.monotonic()
        self.gaps = 0
        """Number of gaps that were noticed."""
        self.malformed = 0
        """Number of messages that are no batches of events."""
        try:
            self._sub: Any = self._socket(zmq.SUB, endpoint)
            self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        except BaseException:  # whatever it is, no socket stays open, and it is raised again
            self._context.destroy(linger=0)
            raise

    def read(self, timeout: float) -> Iterator[ReceivedBatch]:
        """Yield the batches that come within `timeout` seconds, at least those that are there already.

        Read the iterator to its end.
        """
        until = time.monotonic() + timeout
        while True:
            if self._asked is not None:
                asked, self._asked = self._asked, None
                yield from self._heal(asked)
            wait = max(0.0, until - time.monotonic())
            if not self._sub.poll(int(1000 * min(wait, self._idle))):
                if self._replay and self._expected and time.monotonic() - self._heard > self._idle:
                    # The last batches before a pause may be lost, and no later number shows it.
                    yield from self._heal(self._expected)
                if time.monotonic() >= until:
                    return
                continue
            yield from self._live(self._sub.recv_multipart())

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def _live(self, frames: list[bytes]) -> Iterator[ReceivedBatch]:
        self._heard = time.monotonic()
        if len(frames) != 3 or frames[0] != self._topic or len(frames[1]) != 8:
            self.malformed += frames[0] == self._topic
            return
        number = int.from_bytes(frames[1], "big")
        expected = self._expected
        if expected is not None and number != expected:
            if number in self._covered:
                return
            self.gaps += 1
            if self._replay:
                yield from self._heal(expected)
                if self._expected is not None and number < self._expected:
                    return
            else:
                yield ReceivedBatch(BatchOrigin.LOST, number, time.time(), ())
        self._expected = number + 1
        yield from self._batch(BatchOrigin.LIVE, number, frames[2])

    def _heal(self, start: int) -> Iterator[ReceivedBatch]:
        """Yield the batches of a replay from `start` on; LOST if there is no complete answer."""
        zmq = self._zmq
        self._heard = time.monotonic()
        if not self._replay:
            return
        # A new socket for every replay: messages of an answer that was given up never come in.
        router = self._socket(zmq.DEALER, self._replay)
        last: int | None = None
        try:
            router.send_multipart((b"", start.to_bytes(8, "big")))
            while True:
                if not router.poll(int(1000 * _ANSWER_S)):
                    yield ReceivedBatch(BatchOrigin.LOST, start, time.time(), ())
                    return
                frames = router.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != 8:
                    self.malformed += 1
                    continue
                if frames[2] == END:
                    break
                number = int.from_bytes(frames[2], "big")
                last = number
                yield from self._batch(BatchOrigin.REPLAY, number, frames[3])
        finally:
            router.close(linger=0)
            self._heard = time.monotonic()
        if last is not None:
            # Live batches of these numbers may be waiting in the other socket.
            self._covered = range(max(0, last - _RECEIVE_MARK), last + 1)
            self._expected = last + 1
        elif start != SNAPSHOT:
            self._expected = start

    def _batch(self, origin: BatchOrigin, number: int, payload: bytes) -> Iterator[ReceivedBatch]:
        try:
            sent, events = decode_batch(payload)
        except WireError:
            self.malformed += 1
        else:
            yield ReceivedBatch(origin, number, sent, tuple(events))

    def _socket(self, kind: int, endpoint: str) -> Any:
        zmq = self._zmq
        made = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0), (zmq.RCVHWM, _RECEIVE_MARK), (zmq.MAXMSGSIZE, MAX_PAYLOAD),
            (zmq.IPV6, int("[" in endpoint)),
        ):  # fmt: skip
            made.setsockopt(option, value)
        try:
            made.connect(endpoint)
        except zmq.ZMQError as error:
            raise StorageError(f"{endpoint!r:.200} is no address of KV events: {error}") from error
        return made
