"""The plan of `bench disk`: its options, checked before anything is written, and its cases."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiercache.config import parse_size
from tiercache.config.urls import storage_url
from tiercache.core import BLOCK_ALIGN
from tiercache.errors import ConfigError
from tiercache_lab.bench.machine import free_bytes
from tiercache_lab.bench.rows import MIB

BACKENDS: Final = ("file", "lmdb")
BATCH: Final = 128
"""Number of objects of a batch. If these exceed `BATCH_BYTES`, the batch has fewer objects."""
BATCH_BYTES: Final = 256 * MIB
"""Maximum bytes of a batch, and also of an object."""
TINY: Final = BLOCK_ALIGN
"""Bytes of an object in cases where only the number of objects counts."""
STEADY_BATCHES: Final = 4
"""Number of batches that fit into the store in which sets overwrite old blocks."""
_SPARE: Final = 64 * MIB
"""Bytes that a store may need in addition to its objects; also the minimum size of a store."""
_LAYOUTS: Final = 4
"""Number of copies of the objects that are on disk at once. The store may need twice the bytes of the
objects, and each of two raw files needs a copy."""
_TINY_ROOM: Final = 4
"""Capacity of a store of tiny objects, as a multiple of the bytes of the objects. The catalog entry of a tiny
object is as large as the entry of any object, so entries take a large share."""


class Case(enum.StrEnum):
    """Cases of `bench disk`, in the order in which they run."""

    SET_CACHED = "set-cached"
    """Sets into blocks that were written before and are in the page cache, as in a full store."""
    SET_FRESH = "set-fresh"
    """Sets into blocks that were never written, as in a store that still grows."""
    GET_WARM = "get-warm"
    """Gets of objects whose files are in the page cache."""
    GET_COLD = "get-cold"
    """Gets after the page cache was dropped, of objects that the store has not read since it was opened."""
    EXISTS = "exists"
    OPEN = "open"
    """Opening a store, up to the first hit."""

    @property
    def words(self) -> str:
        """The case as it is named in rows."""
        return self.value.replace("-", " ")


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one run of `bench disk`."""

    backend: str
    sizes: tuple[int, ...]
    directory: Path
    repeats: int
    """Number of runs for each median. One more run comes first and is not counted."""
    total: int
    """Maximum bytes that all runs of one size store together."""
    cases: frozenset[Case]
    objects: int
    """Number of tiny objects in a separate store; 0 for no such store."""

    @property
    def batches(self) -> int:
        """Number of batches of one size: one for each repeat, and one for the run that is not counted."""
        return self.repeats + 1

    def count(self, size: int) -> int:
        """Return the number of objects in one batch, for objects of `size` bytes."""
        return min(BATCH, min(BATCH_BYTES, self.total // self.batches) // size)

    def capacity(self, size: int, batches: int) -> int:
        """Return the capacity in bytes of a store for a number of batches of a size."""
        return batches * self.count(size) * size + _SPARE

    @property
    def many_capacity(self) -> int:
        """Capacity in bytes of the store for the tiny objects."""
        return _TINY_ROOM * (self.objects * TINY + _SPARE)

    @property
    def needed(self) -> int:
        """Maximum bytes of disk space that the run uses at the same time."""
        largest = max(self.count(size) * size for size in self.sizes)
        steady = 2 * STEADY_BATCHES * largest
        return max(_LAYOUTS * self.batches * largest, steady, 2 * self.objects * TINY) + 2 * _SPARE

    def url(self, path: Path, capacity: int) -> str:
        """Return the URL of a store at `path` with a capacity in bytes."""
        return storage_url(self.backend, path, capacity=capacity)


def plan(*, backend: str, sizes: str, path: Path, repeats: int, total: str, cases: str, objects: int) -> Plan:
    """Return the plan that the options describe. Raises ConfigError if the plan cannot be carried out."""
    _one_of("--backend", backend, BACKENDS)
    named = [name.strip() for name in cases.split(",")] if cases else list(Case)
    for name in named:
        _one_of("--case", name, list(Case))
    made = Plan(
        backend, sizes_of(sizes), directory_of(path), repeats, _size("--bytes", total),
        frozenset(map(Case, named)), objects,
    )  # fmt: skip
    for size in made.sizes:
        if made.count(size) < 1:
            raise ConfigError(
                f"--bytes {made.total} is too small for {made.batches} batches (one for each --repeat and one"
                f" that is not counted) of one object of {size} bytes; give at least {made.batches * size},"
                " or smaller sizes"
            )
    require_free(made.directory, made.needed, "--bytes, --size, --repeat or --objects")
    return made


def sizes_of(text: str) -> tuple[int, ...]:
    """Return the object sizes in bytes that `--size` gives. Raises ConfigError for an impossible size."""
    sizes = tuple(_size("--size", part) for part in text.split(","))
    for size in sizes:
        if size < 1 or size % BLOCK_ALIGN or size > BATCH_BYTES:
            raise ConfigError(
                f"--size {size} is not possible; use multiples of 4KiB up to {BATCH_BYTES // MIB}MiB"
            )
    return sizes


def directory_of(path: Path) -> Path:
    """Return the absolute path of the directory for the measurement.

    Raises ConfigError if the directory does not exist or cannot be written to.
    """
    if not path.is_dir():
        raise ConfigError(
            f"--directory {path} is not a directory; name one on the disk that is to be measured"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--directory {path} cannot be written to; name a directory of your own")
    return path.resolve()


def require_free(directory: Path, needed: int, options: str) -> None:
    """Raise ConfigError if the disk has less than `needed` bytes free; `options` are those that need less."""
    if (free := free_bytes(directory)) < needed:
        raise ConfigError(
            f"{directory} has {free // MIB} MiB free and the run needs {-(-needed // MIB)} MiB;"
            f" name another directory with --directory, or measure less with {options}"
        )


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text.strip())
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _one_of(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ConfigError(f"{option} {value!r} is not known; use {', '.join(known)}")
