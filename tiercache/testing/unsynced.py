"""What a file system has not put on its medium yet, and what a power cut can make of that; `crash` collects it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

SECTOR: Final = 512
"""Bytes that a disk writes whole or not at all."""
_MOODS: Final = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.9, 0.1), (0.1, 0.9), (0.4, 0.3))
"""Chances that a write is kept whole and that it tears: from nothing arrived, over all arrived, to a mixture."""


class Written(NamedTuple):
    """A write, or with `resize` the tail that the size change of that number cut off: what was there before, in whole sectors."""

    start: int
    before: bytes
    resize: int | None


@dataclass(slots=True, eq=False)
class Unsynced:
    """What a file has not synced, oldest first: its writes, and the sizes that it had before each change of size.

    Thread safety: guarded by its CrashEnv.
    """

    writes: list[Written] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def left(self, current: bytes, random: Random) -> bytes:
        """The file's content as a power cut could leave it, given what it holds now."""
        kept_sizes = random.randint(0, len(self.sizes))
        size = self.sizes[kept_sizes] if kept_sizes < len(self.sizes) else len(current)
        sectors = max([-(-max(len(current), size) // SECTOR), *(w.start + len(w.before) // SECTOR for w in self.writes)])
        image = np.zeros((sectors, SECTOR), np.uint8)
        image.reshape(-1)[: len(current)] = np.frombuffer(current, np.uint8)
        settled = np.zeros(sectors, np.bool_)
        keep, tear = random.choice(_MOODS)
        # From the newest write back: a sector is as the newest write that reached it left it, which is what the next newer one found.
        for write in reversed(self.writes):
            before = np.frombuffer(write.before, np.uint8).reshape(-1, SECTOR)
            there = slice(write.start, write.start + len(before))
            kept = _kept(random, keep, tear, len(before)) if write.resize is None else np.full(len(before), write.resize < kept_sizes)
            undone = ~settled[there] & ~kept
            image[there][undone] = before[undone]
            settled[there] |= kept
        return image.reshape(-1)[:size].tobytes()


class Node(NamedTuple):
    """What a path stands for: a directory, or a file with its content now and what of it is not synced."""

    directory: bool
    unsynced: Unsynced | None = None
    read: Callable[[], bytes] = bytes


class Named(NamedTuple):
    """A change of names. `target`: of a rename. `buried`: what an unlink or a rename removed."""

    kind: str
    path: str
    target: str = ""
    buried: Node | None = None

    def touches(self, directory: str) -> bool:
        """Is it one of this directory's entries that changed?"""
        return directory in (os.path.dirname(self.path), os.path.dirname(self.target))


def undo(tree: dict[str, Node], change: Named) -> None:
    """Take a change of names back; everything newer was taken back before."""
    if change.kind == "rename":
        for path in [p for p in tree if p == change.target or p.startswith(change.target + os.sep)]:
            tree[change.path + path[len(change.target) :]] = tree.pop(path)
        if change.buried is not None:
            tree[change.target] = change.buried
    elif change.kind == "unlink":
        if change.buried is not None:
            tree[change.path] = change.buried
    else:
        for path in [p for p in tree if p == change.path or p.startswith(change.path + os.sep)]:
            del tree[path]


def _kept(random: Random, keep: float, tear: float, sectors: int) -> npt.NDArray[np.bool_]:
    """Which sectors of a write arrived."""
    luck = random.random()
    if luck < keep:
        return np.ones(sectors, np.bool_)
    if luck >= keep + tear:
        return np.zeros(sectors, np.bool_)
    share = random.choice((0.05, 0.5, 0.95))
    return np.random.default_rng(random.getrandbits(64)).random(sectors) < share
