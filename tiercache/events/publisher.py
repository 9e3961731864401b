"""`EventPublisher`: KV events over ZeroMQ, with vLLM's messages and vLLM's replay.

    PUB       topic | number of the batch, 8 bytes, big-endian | payload (see `encoding`)
    ROUTER    asked: empty | first number wanted
              answer: empty | topic | number | payload, for each batch;  empty | empty | -1 | empty at the end

`EventLog.replay` says what an answer has.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Final

from tiercache.errors import ClosedError, MissingExtraError, StorageError
from tiercache.events.base import MAX_KEYS, EventSource, KVEvent
from tiercache.events.encoding import encode_batch
from tiercache.events.log import EventLog
from tiercache.events.settings import EventSettings

_log = logging.getLogger(__name__)

END: Final = (-1).to_bytes(8, "big", signed=True)
"""Number that ends the answer to a replay."""
SEND_MARK: Final = 1_000
"""Number of batches that wait for one slow subscriber; those after it are lost for that subscriber."""
_IDLE_MS: Final = 250
"""Milliseconds after which the sources are asked without having said anything, as for tiers that changed."""
_MAX_REPLAYS: Final = 64
"""Number of replays that are answered at a time, in turns. The others wait."""
_REPLAY_MARK: Final = 8
"""Number of messages of a replay that wait for its client, each of them some 100 KB."""
_REPLAY_BUFFER: Final = 256 << 10
"""Bytes that the kernel may hold for the client of a replay.

Left alone, it holds megabytes for one that takes nothing, who so seems to take them."""
_PACE_S: Final = 0.004
"""Seconds from the first change to its publication, in which more changes come into the same batch."""
_COLLECTS: Final = 32
"""Number of times that a source is asked before others are."""
_REQUESTS: Final = 16
"""Number of requests that are read before events are published again."""
_SLICE_S: Final = 0.02
"""Seconds in which messages of replays are made and sent before events are published again."""
PATIENCE_S: Final = 10.0
"""Seconds after which a replay is given up whose client takes nothing."""
_PATIENCE_WITH_OTHERS_S: Final = 0.5
"""Seconds after which a replay may be given up in favour of another client's."""
_CLOSE_S: Final = 5.0
_LAST_S: Final = 1.0
"""Seconds in which the last events are published at the end, while stores may still change."""


class EventPublisher:
    """Publisher of what `sources` tell, on a thread of its own; it owns and closes the sources.

    A subscriber that is slow, absent or gone never makes the publisher wait: its messages are dropped behind
    a bound, and it sees that by their numbers. `encode` makes the payload of a batch.

    Raises MissingExtraError without pyzmq, StorageError if an address cannot be bound.

    Thread safety: any thread may read the attributes; `close` may be called by any thread.
    """

    def __init__(
        self,
        settings: EventSettings,
        sources: Sequence[EventSource],
        log: EventLog | None = None,
        encode: Callable[[float, Iterable[KVEvent]], bytes] = encode_batch,
    ) -> None:
        try:
            import zmq
        except ImportError as error:
            raise MissingExtraError("a publisher of KV events", "events", error) from error
        self._zmq: Final[Any] = zmq
        self.log: Final = log or EventLog(settings.buffer)
        self._sources: Final = tuple(sources)
        self._topic: Final = settings.topic.encode()
        self._encode: Final = encode
        self._replays: dict[bytes, _Replay] = {}
        """Replays by client, in the order of their turns."""
        self._closing = Event()
        self._pid = os.getpid()
        self.published = 0
        """Number of batches that were published."""
        self.replays = 0
        """Number of replays that were asked for."""
        self.snapshots = 0
        """Number of replays that began with a snapshot."""
        self.malformed = 0
        """Number of requests that were not understood."""
        self._context: Any = zmq.Context(io_threads=1)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_waiting = False
        self._router: Any = None
        try:
            self._pub: Any = self._socket(zmq.PUB)
            self.endpoint: Final = self._bind(self._pub, settings.endpoint)
            """Address of the events, with its port."""
            self.replay_endpoint = ""
            """Address of the replays, with its port; empty if there are none."""
            if settings.replay:
                self._router = self._socket(zmq.ROUTER)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._router.setsockopt(zmq.RCVHWM, _REQUESTS)
                self.replay_endpoint = self._bind(self._router, settings.replay)
        except BaseException:  # whatever it is, no socket stays open, and it is raised again
            self._context.destroy(linger=0)
            os.close(self._wake_fd)
            raise
        for source in self._sources:
            source.follow(self.wake)
        self._thread = Thread(target=self._run, name="tiercache-events", daemon=True)
        self._thread.start()

    def figures(self) -> dict[str, int]:
        """Return the counters, by the names of the metrics (`metrics.table`) without their prefix."""
        return {
            "events_batches_total": self.published,
            "events_total": self.log.events,
            "events_replays_total": self.replays,
            "events_snapshots_total": self.snapshots,
            "events_malformed_total": self.malformed,
        }

    def figure(self, name: str) -> dict[tuple[str, ...], float | None]:
        """Return one of the `figures`, as `Families.tell` takes it."""
        return {(): self.figures()[name]}

    def wake(self) -> None:
        """Let the publisher ask its sources soon. This takes less than a microsecond while it is busy."""
        if self._is_waiting:
            self._is_waiting = False
            with suppress(OSError):  # closed meanwhile
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> bool:
        """Publish what the sources still have, and end; return False if the thread does not end in time."""
        if os.getpid() != self._pid:
            return True
        if not self._closing.is_set():  # or the descriptor may be another's already
            self._closing.set()
            with suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _socket(self, kind: int) -> Any:
        zmq = self._zmq
        made = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, SEND_MARK if kind == zmq.PUB else _REPLAY_MARK),
            (zmq.MAXMSGSIZE, 512), (zmq.TCP_KEEPALIVE, 1), (zmq.HANDSHAKE_IVL, 5_000),
        ):  # fmt: skip
            made.setsockopt(option, value)
        if kind == zmq.ROUTER:
            made.setsockopt(zmq.SNDBUF, _REPLAY_BUFFER)
        return made

    def _bind(self, made: Any, endpoint: str) -> str:
        made.setsockopt(self._zmq.IPV6, int("[" in endpoint))
        try:
            made.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise StorageError(
                f"{endpoint} cannot be bound for KV events ({error}); is it in use, or no address of this"
                " machine?"
            ) from error
        return str(made.getsockopt_string(self._zmq.LAST_ENDPOINT))

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                try:
                    busy = self._publish() | self._answer()
                    self._is_waiting = not busy
                    # A source may have called `wake` before `_is_waiting` was set, so ask once more.
                    if busy or self._publish():
                        continue
                    poller.poll(5 if self._replays else _IDLE_MS)
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                    if not self._replays:
                        time.sleep(_PACE_S)
                except Exception:  # noqa: BLE001  logged, and tried again
                    _log.exception("KV events could not be published; trying again")
                    self._closing.wait(1.0)
            until = time.monotonic() + _LAST_S
            while self._publish() and time.monotonic() < until:
                pass
        except (zmq.ZMQError, StorageError, ClosedError) as error:
            _log.warning("the last KV events were not published: %s", error)
        finally:
            for source in self._sources:
                source.close()
            self._context.destroy(linger=100)
            self._is_waiting = False  # or a late `wake` would write to whatever gets this descriptor next
            os.close(self._wake_fd)

    def _publish(self) -> bool:
        """Publish what the sources have now; return whether there was anything."""
        before = self.published
        for source in self._sources:
            events: list[KVEvent] = []
            try:
                for _ in range(_COLLECTS):
                    more = source.collect()
                    if not more:
                        break
                    events += more
                    if sum(len(event.keys) for event in events) >= MAX_KEYS:
                        self._send_batch(events)
                        events = []
            finally:
                self._send_batch(events)
        return self.published > before

    def _send_batch(self, events: Sequence[KVEvent]) -> None:
        if events:
            batch = self.log.publish(events)
            payload = self._encode(batch.time, batch.events)
            # A PUB socket drops what a slow subscriber does not take, and never waits.
            self._pub.send_multipart((self._topic, batch.sequence.to_bytes(8, "big"), payload))
            self.published += 1

    def _answer(self) -> bool:
        """Read some requests, and send parts of the answers; return whether anything was read or sent."""
        if self._router is None:
            return False
        busy = False
        for _ in range(_REQUESTS):
            if len(self._replays) >= _MAX_REPLAYS and not self._make_room():
                break
            try:
                client, *frames = self._router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            busy = True
            if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
                self.malformed += 1
                continue
            self.replays += 1
            replay = self._replays.setdefault(client, _Replay())
            # A client that asks again while it is answered is answered anew, and has as much patience left.
            replay.messages, replay.waiting = self._messages(int.from_bytes(frames[1], "big")), None
        return self._take_turns() or busy

    def _make_room(self) -> bool:
        """Give up the slowest replay that had time enough; return whether there was one.

        A client that takes nothing has less time than one that takes what it is sent: who asks for a replay
        and does not read it takes the place of no reader.
        """
        now = time.monotonic()
        paces: dict[bytes, float] = {}
        for client, replay in self._replays.items():
            is_stuck = now - replay.moved > _PATIENCE_WITH_OTHERS_S
            if now - replay.begun > (_PATIENCE_WITH_OTHERS_S if is_stuck else PATIENCE_S):
                paces[client] = replay.sent / (now - replay.begun)
        if paces:
            del self._replays[min(paces, key=paces.__getitem__)]
        return bool(paces)

    def _take_turns(self) -> bool:
        """Send messages of replays for a moment, one to each client in turn; return whether any was sent.

        Whoever had a turn, and whoever comes anew under another name, is the last in line.
        """
        until = time.monotonic() + _SLICE_S
        ready = deque(self._replays)
        sent = False
        while ready and time.monotonic() < until:
            client = ready.popleft()
            replay = self._replays.pop(client)
            if (goes_on := self._send(client, replay)) is not None:
                self._replays[client] = replay
            if goes_on:
                ready.append(client)
                sent = True
        return sent

    def _send(self, client: bytes, replay: _Replay) -> bool | None:
        """Send the next message of a replay; return whether the client took it, None if it was the last."""
        try:
            message = replay.waiting or next(replay.messages)
            replay.waiting = message
            self._router.send_multipart((client, b"", *message), self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None if time.monotonic() - replay.moved > PATIENCE_S else False
        except (self._zmq.ZMQError, StorageError) as error:
            # The client is gone, or the snapshot cannot be made now: it gets no end, and asks again.
            _log.debug("a replay of KV events was given up: %s", error)
            return None
        replay.waiting, replay.moved = None, time.monotonic()
        replay.sent += 1
        return None if message[1] == END else True

    def _messages(self, start: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yield the messages of a replay from `start` on."""
        self.snapshots += not self.log.follows(start)
        for batch in self.log.replay(self._sources, start):
            payload = self._encode(batch.time, batch.events)
            yield self._topic, batch.sequence.to_bytes(8, "big"), payload
        yield b"", END, b""


class _Replay:
    """Answer to one client that is under way."""

    def __init__(self) -> None:
        self.messages: Iterator[tuple[bytes, bytes, bytes]] = iter(())
        self.waiting: tuple[bytes, bytes, bytes] | None = None
        """Message that the client has not taken yet."""
        self.sent = 0
        """Number of messages that the client has taken."""
        self.begun = self.moved = time.monotonic()
        """Times of its first request and of the last message that it took."""
