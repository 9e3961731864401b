"""The plan of a run: its options, checked before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiercache.cli.bench.machine import free_bytes
from tiercache.cli.bench.rows import MIB, Case
from tiercache.config import parse_size
from tiercache.config.urls import storage_url
from tiercache.core import BLOCK_ALIGN
from tiercache.errors import ConfigError

BACKENDS: Final = ("file", "lmdb")
"""Values of --backend."""
DURABILITIES: Final = ("process", "power")
"""Values of --durability."""
BATCH: Final = 128
"""Objects of a batch; fewer if they would exceed `BATCH_BYTES`."""
BATCH_BYTES: Final = 256 * MIB
"""Bytes of a batch, and of an object, at most."""
TINY: Final = BLOCK_ALIGN
"""Bytes of an object in cases where only the number of objects counts."""
STEADY_BATCHES: Final = 4
"""Batches that fit into the store whose blocks are overwritten again and again."""
_SPARE: Final = 64 * MIB
"""Bytes that a store may need beside its objects; also the least size of a store."""
_LAYOUTS: Final = 5
"""Copies of the objects on disk at once: two for the store, which may need twice their bytes, two raw files, one file per page."""
_TINY_ROOM: Final = 4
"""Capacity per tiny object, as a multiple of its size: its catalog entry is as large as that of any other object."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of `bench disk`.

    `total`: bytes that one size may store, cut into `repeats` batches and one that is not counted. `objects`: number of tiny objects to
    fill a separate store with, or 0.
    """

    backend: str
    sizes: tuple[int, ...]
    directory: Path
    threads: int
    repeats: int
    total: int
    durable: bool
    cases: frozenset[Case]
    objects: int

    @property
    def batches(self) -> int:
        """Number of batches of one size: one for each repeat and one that is not counted."""
        return self.repeats + 1

    def count(self, size: int) -> int:
        """Return the number of objects in one batch, for objects of `size` bytes."""
        return min(BATCH, min(BATCH_BYTES, self.total // self.batches) // size)

    def growing_capacity(self, size: int) -> int:
        """Return the bytes of a store that keeps all batches of a size: twice their bytes, as a store rounds up and keeps a reserve."""
        return 2 * self.batches * self.count(size) * size + _SPARE

    def steady_capacity(self, size: int) -> int:
        """Return the bytes of a store that a few batches fill, so that every further batch overwrites blocks."""
        return STEADY_BATCHES * self.count(size) * size + _SPARE

    @property
    def many_capacity(self) -> int:
        """Capacity in bytes of the store for the tiny objects."""
        return _TINY_ROOM * (self.objects * TINY + _SPARE)

    @property
    def needed(self) -> int:
        """Bytes of disk space that the run needs at once at most."""
        largest = max(self.count(size) * size for size in self.sizes)
        steady = 2 * STEADY_BATCHES * largest
        return max(_LAYOUTS * self.batches * largest, steady, 2 * self.objects * TINY) + 2 * _SPARE

    def url(self, path: Path, capacity: int) -> str:
        """Return the URL of a store at `path`; `capacity` in bytes."""
        return storage_url(self.backend, path, capacity=capacity, durability="power" if self.durable else "process")


def plan(
    *, backend: str, sizes: str, path: Path, threads: int, repeats: int, total: str, durability: str, cases: str, objects: int
) -> Plan:  # fmt: skip
    """Return the plan that the options describe; raises ConfigError if it cannot be carried out."""
    _one_of("--backend", backend, BACKENDS)
    _one_of("--durability", durability, DURABILITIES)
    for name in cases.split(",") if cases else ():
        _one_of("--case", name.strip(), list(Case))
    made = Plan(
        backend, sizes_of(sizes), directory_of(path), threads, repeats, _size("--bytes", total),
        durability == "power", frozenset(Case(name.strip()) for name in cases.split(",")) if cases else frozenset(Case), objects,
    )  # fmt: skip
    for size in made.sizes:
        _check(made, size)
    if (free := free_bytes(made.directory)) < made.needed:
        raise ConfigError(
            f"{made.directory} has {free // MIB} MiB free and the run needs {-(-made.needed // MIB)} MiB; name another directory with"
            " --directory, or measure less with --bytes, --size, --repeat or --objects"
        )
    return made


def sizes_of(text: str) -> tuple[int, ...]:
    """Return the object sizes in bytes that `--size` gives; raises ConfigError for an impossible one."""
    sizes = tuple(_size("--size", part) for part in text.split(","))
    for size in sizes:
        if size < 1 or size % BLOCK_ALIGN or size > BATCH_BYTES:
            raise ConfigError(
                f"--size {size} is not possible; use multiples of 4KiB (as host blocks are) of at most {BATCH_BYTES // MIB}MiB"
            )
    return sizes


def _check(made: Plan, size: int) -> None:
    if made.count(size) < 1:
        raise ConfigError(
            f"--bytes {made.total} do not hold {made.batches} batches (one for each --repeat and one that is not counted) of one object"
            f" of {size} bytes; give at least {made.batches * size}, or smaller sizes"
        )


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text.strip())
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _one_of(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ConfigError(f"{option} {value!r} is not known; use {', '.join(known)}")


def directory_of(path: Path) -> Path:
    """Return the directory to measure in as an absolute path; raises ConfigError if it is missing or not writable."""
    if not path.is_dir():
        raise ConfigError(f"--directory {path} is not a directory; name one on the disk that is to be measured")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--directory {path} cannot be written to; name a directory of your own")
    return path.resolve()
