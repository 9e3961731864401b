"""A subscriber as routers write them: two sockets and vLLM's frames, nothing of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import zmq

END = (-1).to_bytes(8, "big", signed=True)


class Reader:
    """Reads events, and asks for replays."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.context: Any = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self.events.connect(endpoint)
        self.replays = self.context.socket(zmq.DEALER)
        self.replays.connect(replay)

    def connected(self, publish: Callable[[], None]) -> None:
        """Publish until the first message comes, and leave none unread."""
        for _ in range(200):
            publish()
            if self.events.poll(200):
                break
        while self.events.poll(300):
            self.events.recv_multipart()

    def read(self) -> tuple[int, bytes]:
        """The next batch: its number and its payload."""
        assert self.events.poll(30_000), "no batch came"
        topic, number, payload = self.events.recv_multipart()
        assert (topic, len(number)) == (b"kv-events", 8)
        return int.from_bytes(number, "big"), payload

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """All batches from a number on."""
        self.replays.send_multipart((b"", start.to_bytes(8, "big")))
        found = []
        while True:
            assert self.replays.poll(30_000), "the replay has no end"
            empty, topic, number, payload = self.replays.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == b"kv-events"
            found.append((int.from_bytes(number, "big"), payload))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)
