"""Simulated power cuts at any call.

`CrashEnv` records the changes that are not synced yet. `clone` makes a copy of a directory with the contents
that a power cut could leave. This example cuts the power before the third commit:

    env = CrashEnv()
    store = open_backend(url, env=env)
    env.at_call("commit", 3, lambda: env.clone(directory, target, seed=7))
    store.set(...)
    open_backend(url of target)                         opens the data that is left

The model is a journalling file system on a disk with 512-byte sectors, and is stricter than most:

- A write to a file that was not followed by an fdatasync or fsync of the file may have reached the disk or
  not. It may also be torn between any two sectors.
- Size changes of one file (ftruncate, fallocate, a write past the end) happen in order; the cut may fall
  anywhere in that order.
- Name changes (a new file, unlink, rename, mkdir) happen in order over the whole tree. The fsync of a
  directory makes its name changes durable, and with them all earlier name changes in any directory. The fsync
  of a file makes no name durable.
- A change that was not made through the Env counts as synced. LMDB writes only inside `Env.commit`, and syncs
  before the commit returns, so the model is right for a cut between two calls. The model cannot show a cut
  inside a commit, nor an LMDB environment that does not sync every commit. Tests of these two cases need a
  real file system (`make campaign`, `power`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from threading import RLock
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.faults import Call, FaultEnv, Rule
from tiercache.storage.vectors import total

_BLOCK: Final = 4096
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
    resize: int | None
    """None for a write. For bytes that were cut off, the index of the size change in `Unsynced.sizes`."""


@dataclass(slots=True, eq=False)
class Unsynced:
    """Unsynced changes of a file, oldest first."""

    writes: list[Written] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Size of the file in bytes before each change of its size."""

    def after_cut(self, current: bytes, random: Random) -> bytes:
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


class Named(NamedTuple):
    """Change of a name in a directory."""

    kind: str
    """One of create, mkdir, unlink and rename."""
    path: str
    target: str = ""
    buried: TreeEntry | None = None
    """File that an unlink or a rename removed."""

    def touches(self, directory: str) -> bool:
        return directory in (os.path.dirname(self.path), os.path.dirname(self.target))


class CrashEnv(FaultEnv):
    """A FaultEnv that can also lose the power.

    The rules of FaultEnv act first, and CrashEnv records only what is really written: a clone never has bytes
    that a rule has dropped.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._world = RLock()
        self._files: dict[tuple[int, int], Unsynced] = {}
        """Unsynced changes of each file, by device and inode number."""
        self._open: dict[int, Unsynced | str] = {}
        """By open descriptor: the unsynced changes of a file, or the path of a directory."""
        self._names: list[Named] = []
        """Unsynced changes of names, oldest first."""
        self._watched: Final[dict[str, Callable[..., Any]]] = {
            "open": self._on_open, "close": self._on_close, "pwritev": self._on_write,
            "fallocate": self._on_fallocate,
            "ftruncate": self._on_truncate, "fdatasync": self._on_sync, "fsync": self._on_sync,
            "unlink": self._on_unlink,
            "rename": self._on_rename, "mkdir": self._on_mkdir, "commit": lambda call,
            transaction: call(transaction),
        }  # fmt: skip

    def at_call(self, name: str, n: int, action: Callable[[], object], *, after: bool = False) -> Rule:
        """Run `action` before the n-th call of `name` from now on; with `after`, right after that call."""

        def effect(real: Call, arguments: tuple[Any, ...]) -> Any:
            if after:
                done = real(*arguments)
                action()
                return done
            action()
            return real(*arguments)

        return self.add(name, effect, at=n)

    def clone(self, source: str | Path, target: str | Path, seed: int) -> None:
        """Make `target` a copy of `source` as a power cut now could leave it; the same seed, the same cut."""
        random = Random(seed)
        with self._world:
            tree = self._tree(os.path.realpath(source))
            # names   1  2  3 | 4  5     the cut falls at a random place; 5 is undone first, then 4
            for change in reversed(self._names[random.randint(0, len(self._names)) :]):
                undo(tree, change)
            root = os.path.realpath(source)
            Path(target).mkdir(mode=0o700)
            for path in sorted(p for p in tree if p.startswith(root + os.sep)):
                copy = os.path.join(target, os.path.relpath(path, root))
                node = tree[path]
                if node.directory:
                    os.mkdir(copy, 0o700)
                else:
                    _write_sparse(
                        copy, node.unsynced.after_cut(node.read(), random) if node.unsynced else node.read()
                    )

    def unsynced(self) -> int:
        """Return the number of changes (writes, sizes, names) that are not synced yet."""
        with self._world:
            return len(self._names) + sum(len(f.writes) + len(f.sizes) for f in self._files.values())

    def perform(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        return super().perform(name, partial(self._watch, name, call), arguments)

    def _watch(self, name: str, call: Call, *arguments: Any) -> Any:
        watcher = self._watched.get(name)
        if watcher is None:
            return call(*arguments)
        with self._world:
            return watcher(call, *arguments)

    def _on_open(self, call: Call, path: str, flags: int, *mode: int) -> int:
        known = os.path.lexists(path)
        cut = _read(path) if known and flags & os.O_TRUNC else b""  # the bytes that O_TRUNC removes
        fd: int = call(path, flags, *mode)
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            self._open[fd] = os.path.realpath(path)
            return fd
        if not known:
            self._files[_identity(found)] = Unsynced()
            self._names.append(Named("create", _entry(path)))
        file = self._open[fd] = self._files.setdefault(_identity(found), Unsynced())
        assert isinstance(file, Unsynced)
        if cut:
            file.writes.append(Written(0, _padded(cut), len(file.sizes)))
            file.sizes.append(len(cut))
        return fd

    def _on_close(self, call: Call, fd: int) -> None:
        self._open.pop(fd, None)
        call(fd)

    def _on_write(self, call: Call, fd: int, buffers: Sequence[memoryview], offset: int) -> Any:
        return self._change(fd, offset, total(buffers), lambda: call(fd, buffers, offset))

    def _on_fallocate(self, call: Call, fd: int, offset: int, length: int) -> None:
        self._change(fd, offset, 0, lambda: call(fd, offset, length))

    def _on_truncate(self, call: Call, fd: int, length: int) -> None:
        self._change(
            fd, length, max(0, os.fstat(fd).st_size - length), lambda: call(fd, length), truncates=True
        )

    def _change(
        self, fd: int, offset: int, length: int, act: Callable[[], Any], *, truncates: bool = False
    ) -> Any:
        """Change a file by `act`, and record the old size and the `length` bytes that were at `offset`.

        Both are recorded even if `act` fails half-way. A call that `truncates` also changes the size.
        """
        file = self._open.get(fd)
        if not isinstance(file, Unsynced):
            return act()
        size = os.fstat(fd).st_size
        before = _sectors(fd, offset, length)
        try:
            return act()
        finally:
            if before:
                file.writes.append(Written(offset // SECTOR, before, len(file.sizes) if truncates else None))
            if os.fstat(fd).st_size != size:
                file.sizes.append(size)

    def _on_sync(self, call: Call, fd: int) -> None:
        call(fd)
        what = self._open.get(fd)
        if isinstance(what, Unsynced):
            what.writes.clear()
            what.sizes.clear()
        elif what is not None:
            # The fsync makes durable the newest name change in this directory, and all earlier name changes.
            last = max((i for i, change in enumerate(self._names) if change.touches(what)), default=-1)
            del self._names[: last + 1]

    def _on_unlink(self, call: Call, path: str) -> None:
        buried = self._about_to_go(path)
        call(path)
        self._gone(Named("unlink", _entry(path), buried=buried))

    def _on_rename(self, call: Call, source: str, target: str) -> None:
        buried = self._about_to_go(target)
        call(source, target)
        self._gone(Named("rename", _entry(source), _entry(target), buried))

    def _on_mkdir(self, call: Call, path: str, *mode: int) -> None:
        call(path, *mode)
        self._names.append(Named("mkdir", _entry(path)))

    def _gone(self, change: Named) -> None:
        """Record a change of names; a removed file's record goes, as its inode number may be used again."""
        self._names.append(change)
        if change.buried is not None:
            self._files = {
                identity: file for identity, file in self._files.items() if file is not change.buried.unsynced
            }

    def _about_to_go(self, path: str) -> TreeEntry | None:
        """Return the regular file that is about to lose the name `path`; None if there is no such file."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        content = _read(path)
        return TreeEntry(False, self._files.get(_identity(found)), lambda: content)

    def _tree(self, root: str) -> dict[str, TreeEntry]:
        """Return the present entries of a directory tree by path, with the directory itself."""
        tree = {root: TreeEntry(True)}
        for where, directories, files in os.walk(root):
            tree |= {os.path.join(where, name): TreeEntry(True) for name in directories}
            for path in (os.path.join(where, name) for name in files):
                tree[path] = TreeEntry(
                    False, self._files.get(_identity(os.lstat(path))), partial(_read, path)
                )
        return tree


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _entry(path: str) -> str:
    """Return the absolute path; links in its directory are resolved, a link in its last part is not."""
    whole = os.path.abspath(path)
    return os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % SECTOR)


def _sectors(fd: int, offset: int, length: int) -> bytes:
    """Return the whole sectors around a range of bytes, padded with zeros, by a descriptor of their own."""
    if not length:
        return b""
    start, stop = offset // SECTOR * SECTOR, -(-(offset + length) // SECTOR) * SECTOR
    with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
        found = os.pread(file.fileno(), stop - start, start)
    return found + bytes(stop - start - len(found))


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _write_sparse(path: str, content: bytes) -> None:
    """Write a new file with holes where its blocks are all zeros."""
    blocks = np.frombuffer(content + bytes(-len(content) % _BLOCK), np.uint8).reshape(-1, _BLOCK)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        for block in np.flatnonzero(blocks.any(axis=1)).tolist():
            file.seek(block * _BLOCK)
            file.write(content[block * _BLOCK : (block + 1) * _BLOCK])
        file.truncate(len(content))


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
