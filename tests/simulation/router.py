"""A router in virtual time: it reads the KV events of a publisher whose network loses messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from random import Random

from tests.simulation.world import World
from tiercache.errors import StorageError
from tiercache.events import EventBatch, EventLog, Place
from tiercache.events.base import EventSource, ResidencyMap, Resident

LOST = 0.2
"""Chance of a message to be lost."""


class Router:
    """Publisher of some sources, and a subscriber that asks for what it has missed.

    `step` is a turn of the publisher's thread: it publishes, and sends a part of an answer.

    Thread safety: one thread.
    """

    def __init__(self, world: World, draw: Random, sources: Sequence[EventSource]) -> None:
        self._draw, self._sources = draw, sources
        self._log = EventLog(draw.choice((1, 4, 1000)), world.clock)
        self._map = ResidencyMap()
        self._coming: deque[EventBatch] = deque()
        self._answer: Iterator[EventBatch] | None = None
        self._expected = 0
        self.counts = {"events": 0, "snapshots": 0, "replays": 0}
        for source in sources:
            source.follow(lambda: None)
        self._ask()

    def step(self, *, lost: float = LOST) -> None:
        """Publish what there is, and read what comes."""
        for source in self._sources:
            if events := source.collect():
                batch = self._log.publish(events)
                if self._draw.random() >= lost:
                    self._coming.append(batch)
        if self._answer is not None:
            self._read_answer(self._draw.randint(1, 4))
        while self._coming and self._answer is None:
            batch = self._coming.popleft()
            if batch.sequence > self._expected:
                self._coming.appendleft(batch)
                self._ask()
            elif batch.sequence == self._expected:
                self._apply(batch)

    def places(self) -> Mapping[Place, Set[Resident]]:
        """Return what the router knows once it has read all there is."""
        for _ in range(10_000):
            before = self._log.next
            self.step(lost=0.0)
            if self._answer is None and before == self._log.next == self._expected:
                return self._map.places()
            if self._answer is None and not self._coming and self._expected < self._log.next:
                self._ask()  # after a silence, as the last messages may be lost too
        raise AssertionError("the router never knows all")

    def _ask(self) -> None:
        self.counts["replays" if self._log.follows(self._expected) else "snapshots"] += 1
        self._answer = self._log.replay(self._sources, self._expected)

    def _read_answer(self, parts: int) -> None:
        assert self._answer is not None
        try:
            for _ in range(parts):
                batch = next(self._answer, None)
                if batch is None:
                    self._answer = None
                    return
                self._apply(batch)
        except StorageError:
            self._ask()

    def _apply(self, batch: EventBatch) -> None:
        self._map.apply(batch.events)
        self._expected = batch.sequence + 1
        self.counts["events"] += len(batch.events)
