"""Unsynced changes of a file system, and what a power cut can leave of them; `crash` collects them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

SECTOR: Final = 512
"""Bytes of a sector, which a disk writes as a whole or not at all."""
_MOODS: Final = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.9, 0.1), (0.1, 0.9), (0.4, 0.3))
"""Chances that a write is kept whole and that it tears: none arrived, all arrived, and mixtures."""


class Written(NamedTuple):
    """Earlier content of a range that was written or, with `resize`, cut off by the size change of that number.

    `start` is the number of the first sector; `before` has whole sectors. `resize` counts from 0 among the file's unsynced size changes.
    """

    start: int
    before: bytes
    resize: int | None


@dataclass(slots=True, eq=False)
class Unsynced:
    """Unsynced changes of a file, oldest first: its writes, and its size in bytes before each change of size.

    Thread safety: guarded by its CrashEnv.
    """

    writes: list[Written] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def left(self, current: bytes, random: Random) -> bytes:
        """Return the file's content as a power cut could leave it, given its current content."""
        kept_sizes = random.randint(0, len(self.sizes))
        size = self.sizes[kept_sizes] if kept_sizes < len(self.sizes) else len(current)
        sectors = max([-(-max(len(current), size) // SECTOR), *(w.start + len(w.before) // SECTOR for w in self.writes)])
        image = np.zeros((sectors, SECTOR), np.uint8)
        image.reshape(-1)[: len(current)] = np.frombuffer(current, np.uint8)
        settled = np.zeros(sectors, np.bool_)
        keep, tear = random.choice(_MOODS)
        # From the newest write to the oldest: a sector is as the newest write that arrived left it, which is its content before the
        # next newer write.
        for write in reversed(self.writes):
            before = np.frombuffer(write.before, np.uint8).reshape(-1, SECTOR)
            there = slice(write.start, write.start + len(before))
            kept = _kept(random, keep, tear, len(before)) if write.resize is None else np.full(len(before), write.resize < kept_sizes)
            undone = ~settled[there] & ~kept
            image[there][undone] = before[undone]
            settled[there] |= kept
        return image.reshape(-1)[:size].tobytes()


class Node(NamedTuple):
    """An entry of a tree: a directory, or a file with its current content and its unsynced changes."""

    directory: bool
    unsynced: Unsynced | None = None
    read: Callable[[], bytes] = bytes


class Named(NamedTuple):
    """A change of names. `target` is the new name in a rename; `buried` is the file that an unlink or a rename removed."""

    kind: str
    path: str
    target: str = ""
    buried: Node | None = None

    def touches(self, directory: str) -> bool:
        """Return whether an entry of this directory changed."""
        return directory in (os.path.dirname(self.path), os.path.dirname(self.target))


def undo(tree: dict[str, Node], change: Named) -> None:
    """Undo a change of names in `tree`; the caller has undone all newer changes."""
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
    """Choose the sectors of a write that arrived: all, none, or a random share of them; shape (sectors,)."""
    luck = random.random()
    if luck < keep:
        return np.ones(sectors, np.bool_)
    if luck >= keep + tear:
        return np.zeros(sectors, np.bool_)
    share = random.choice((0.05, 0.5, 0.95))
    return np.random.default_rng(random.getrandbits(64)).random(sectors) < share
