"""Arrival times of requests: a Poisson process, or sessions with pauses between their turns."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tiercache.core import TokenArray
from tiercache_lab.replay.base import Request


class Turn(NamedTuple):
    """Request of a session, without its arrival time."""

    prompt: TokenArray
    output: TokenArray


def poisson(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield an endless sequence of arrival times in seconds, on average `rate` times per second."""
    now = 0.0
    while True:
        now += rng.exponential(1 / rate)
        yield now


def take_turns(
    sessions: Iterable[Iterator[Turn]], live: int, pause: float, rng: np.random.Generator
) -> Iterator[Request]:
    """Yield the requests of all sessions, with `live` sessions running at a time.

    Each session pauses before each of its turns. The pauses are exponentially distributed with a mean of
    `pause` seconds. So the first `live` sessions begin at different times. When the pause after the last turn
    of a session ends, the next session begins with its first turn. Every session must have at least one turn.
    """
    waiting = enumerate(sessions)
    # Entries are (time of the next turn, session, round, turns). No two entries have the same session, so the
    # heap never compares the iterators.
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
