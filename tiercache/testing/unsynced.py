"""Unsynced changes of a file system, and the effect of a power cut on them; `crash` records the changes."""

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
_CHANCES: Final = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.9, 0.1), (0.1, 0.9), (0.4, 0.3))
"""Pairs of probabilities: that a write is kept whole, and that only a part of the write is kept.

(0, 0) keeps no write, and (1, 0) keeps all writes. A power cut draws one pair for each file.
"""


class Written(NamedTuple):
    """Earlier content of a range of a file that was written or cut off."""

    start: int
    """Number of the first sector of the range."""
    before: bytes
    """Earlier content: whole sectors."""
    resize: int | None
    """None for a write. For bytes that were cut off, the index of the size change in `Unsynced.sizes`."""


@dataclass(slots=True, eq=False)
class Unsynced:
    """Unsynced changes of a file, oldest first.

    Thread safety: guarded by its CrashEnv.
    """

    writes: list[Written] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Size of the file in bytes before each change of its size."""

    def left(self, current: bytes, random: Random) -> bytes:
        """Return the file's content as a power cut could leave it, given its current content."""
        # The first `kept_sizes` changes of the size arrived. `sizes` has the size before the next change.
        kept_sizes = random.randint(0, len(self.sizes))
        size = self.sizes[kept_sizes] if kept_sizes < len(self.sizes) else len(current)
        sectors = max(
            [-(-max(len(current), size) // SECTOR), *(w.start + len(w.before) // SECTOR for w in self.writes)]
        )
        image = np.zeros((sectors, SECTOR), np.uint8)
        image.reshape(-1)[: len(current)] = np.frombuffer(current, np.uint8)
        settled = np.zeros(sectors, np.bool_)
        keep, tear = random.choice(_CHANCES)
        # A sector gets the content of the newest write that arrived. So go from the newest write to the
        # oldest, and undo each write until one is kept. To undo a write is to restore its `before`:
        #   write     1 kept   2 kept   3 lost   4 lost
        #   sector                 ^--------<--------    `before` of 3 is what 2 wrote
        for write in reversed(self.writes):
            before = np.frombuffer(write.before, np.uint8).reshape(-1, SECTOR)
            there = slice(write.start, write.start + len(before))
            kept = (
                _kept(random, keep, tear, len(before))
                if write.resize is None
                else np.full(len(before), write.resize < kept_sizes)
            )
            undone = ~settled[there] & ~kept
            image[there][undone] = before[undone]
            settled[there] |= kept
        return image.reshape(-1)[:size].tobytes()


class TreeEntry(NamedTuple):
    """An entry of a tree: a directory, or a file with its current content and its unsynced changes."""

    directory: bool
    unsynced: Unsynced | None = None
    read: Callable[[], bytes] = bytes
    """Function that returns the current content of the file."""


class Named(NamedTuple):
    """Change of a name in a directory."""

    kind: str
    """Kind of the change: one of create, mkdir, unlink and rename."""
    path: str
    target: str = ""
    """New path, in a rename."""
    buried: TreeEntry | None = None
    """File that an unlink or a rename removed."""

    def touches(self, directory: str) -> bool:
        """Return whether an entry of this directory changed."""
        return directory in (os.path.dirname(self.path), os.path.dirname(self.target))


def undo(tree: dict[str, TreeEntry], change: Named) -> None:
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
    """Return which sectors of a write arrived: all, none, or a random share; shape (sectors,)."""
    luck = random.random()
    if luck < keep:
        return np.ones(sectors, np.bool_)
    if luck >= keep + tear:
        return np.zeros(sectors, np.bool_)
    share = random.choice((0.05, 0.5, 0.95))
    return np.random.default_rng(random.getrandbits(64)).random(sectors) < share
