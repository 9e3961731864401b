"""Timing of several sides (ways to do the same work) in turns, and threads that share a list of jobs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")
Clock = Callable[[], Any]


def _nothing(_: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Side:
    """One of several ways to do the same work.

    All functions receive the number of the round. Only `run` is timed.
    """

    name: str
    run: Callable[[int], object]
    before: Callable[[int], object] = _nothing
    after: Callable[[int], object] = _nothing


def turns(sides: Sequence[Side], repeats: int, clock: Clock = time.perf_counter) -> dict[str, list[Any]]:
    """Return what each side took by a clock in each of the rounds 1 to `repeats`. Round 0 is not counted.

    Every round runs all sides and starts with a different side. A slow phase of the machine then does not
    always affect the same side:

        round 0: A B C    round 1: B C A    round 2: C A B

    All functions of the sides are called in the calling thread.
    """
    took: dict[str, list[Any]] = {side.name: [] for side in sides}
    for n in range(repeats + 1):
        first = n % len(sides)
        for side in (*sides[first:], *sides[:first]):
            side.before(n)
            started = clock()
            side.run(n)
            spent = clock() - started
            side.after(n)
            if n:
                took[side.name].append(spent)
    return took


def medians(sides: Sequence[Side], repeats: int) -> dict[str, float]:
    """Return the median seconds of each side; see `turns`."""
    return {name: statistics.median(spent) for name, spent in turns(sides, repeats).items()}


class Crew:
    """Group of `threads` threads that take jobs from a shared list.

    A group of one thread uses the calling thread.

    Thread safety: one thread at a time may call `each`.
    """

    def __init__(self, threads: int) -> None:
        self.threads: Final = threads
        self._pool = ThreadPoolExecutor(threads, "bench") if threads > 1 else None

    def each(self, call: Callable[[T], object], jobs: Iterable[T]) -> None:
        """Call `call` with every job.

        If calls raise exceptions, one of these exceptions is raised after all threads have stopped.
        """
        # All threads share one iterator. A job then costs one call of `next` instead of a future, and a slow
        # thread takes fewer jobs.
        shared = iter(list(jobs))

        def drain() -> None:
            for job in shared:
                call(job)

        if self._pool is None:
            drain()
            return
        futures = [self._pool.submit(drain) for _ in range(self.threads)]
        wait(futures)
        for future in futures:
            future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
