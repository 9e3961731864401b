"""Arrival times of requests: a Poisson process, or sessions that take turns with pauses."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tiercache.core import TokenArray
from tiercache.replay.base import Request


class Turn(NamedTuple):
    """One request of a session, without its arrival time."""

    prompt: TokenArray
    output: TokenArray


def poisson(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield endless arrival times in seconds, `rate` per second on average."""
    now = 0.0
    while True:
        now += rng.exponential(1 / rate)
        yield now


def take_turns(sessions: Iterable[Iterator[Turn]], live: int, pause: float, rng: np.random.Generator) -> Iterator[Request]:
    """Yield the requests of `live` sessions at once; each pauses `pause` seconds on average, exponentially, before each of its turns.

    When a session has ended, the next one takes its place. The first pauses stagger the sessions. A session has at least one turn.
    """
    waiting = enumerate(sessions)
    # (time, session) is unique, so that the heap never compares iterators.
    heap: list[tuple[float, int, int, Iterator[Turn]]] = []
    for number, turns in waiting:
        heap.append((rng.exponential(pause), number, 0, turns))
        if len(heap) == live:
            break
    heapq.heapify(heap)
    while heap:
        now, number, round_, turns = heap[0]
        turn = next(turns, None)
        if turn is not None:
            heapq.heapreplace(heap, (now + rng.exponential(pause), number, round_ + 1, turns))
            yield Request(turn.prompt, turn.output, now, number, round_)
        elif (following := next(waiting, None)) is not None:
            heapq.heapreplace(heap, (now, following[0], 0, following[1]))
        else:
            heapq.heappop(heap)
