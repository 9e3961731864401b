"""Targets of fuzzing, and the trial of one input."""

from __future__ import annotations

import itertools
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MIB = 1 << 20


class BrokenPromiseError(Exception):
    """A decoder returned, took or held something else than it promises."""


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder of bytes from outside."""

    name: str
    run: Callable[[bytes], None]
    """Decode the bytes, and use all of what they gave."""
    seeds: Callable[[], Sequence[bytes]]
    """Make inputs that are sound, by the code that writes them."""
    errors: tuple[type[Exception], ...] = ()
    """Errors that the decoder documents for bytes that are none of its own."""
    max_bytes: int = 4096
    """Length of the longest input that is tried."""
    max_memory: int = 16 * MIB
    """Bytes of memory that one input may take, at most."""
    seconds: float = 10.0
    """Duration of one input, at most."""
    costs: int = 1
    """Duration of one input, in hundreds of microseconds, about."""

    def attempt(self, data: bytes) -> bool:
        """Try one input; return whether it was accepted. Any error but a documented one is raised."""
        try:
            self.run(data)
        except self.errors:
            return False
        return True

    def measured(self, data: bytes) -> bool:
        """Try one input within the bounds of memory and time; `tracemalloc` must be on."""
        tracemalloc.reset_peak()
        before, began = tracemalloc.get_traced_memory()[0], time.thread_time()
        found = self.attempt(data)
        took, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1] - before
        if peak > self.max_memory:
            raise BrokenPromiseError(f"{self.name}: {len(data)} bytes took {peak / MIB:.1f} MiB of memory")
        if took > self.seconds:
            raise BrokenPromiseError(f"{self.name}: {len(data)} bytes took {took:.1f} s")
        return found


def promised(condition: object, what: str) -> None:
    """Raise BrokenPromiseError unless the condition holds; an assert may be a documented error."""
    if not condition:
        raise BrokenPromiseError(what)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="tiercache-fuzz-", dir=memory if memory.is_dir() else None)


_numbers = itertools.count()


def folder() -> Path:
    """Return a new directory in memory, which is removed when the process ends."""
    path = Path(_folder().name) / str(next(_numbers))
    path.mkdir()
    return path


@cache
def _file(suffix: str) -> Path:
    return folder() / f"input{suffix}"


def file_of(data: bytes, suffix: str = "") -> Path:
    """Return a file with these bytes; the next call with this suffix replaces it."""
    path = _file(suffix)
    path.write_bytes(data)
    return path
