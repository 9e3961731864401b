"""Comparisons for the tests of sources and traces: requests, tokens, and the memory that reading takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tiercache.core import TokenArray
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources import WorkloadSource, open_source


def same(a: Request, b: Request) -> bool:
    plain = (a.arrival, a.session, a.round) == (b.arrival, b.session, b.round)
    return plain and np.array_equal(a.prompt, b.prompt) and np.array_equal(a.output, b.output)


def starts_with(whole: TokenArray, *parts: TokenArray) -> bool:
    start = np.concatenate(parts)
    return np.array_equal(whole[: len(start)], start)


def common(a: TokenArray, b: TokenArray) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Bytes at the highest, once the block has ended."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def opened(spec: str, **options: int) -> WorkloadSource:
    source = open_source(spec, **options)
    assert isinstance(source, WorkloadSource)
    return source
