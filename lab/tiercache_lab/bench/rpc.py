"""The cases of `bench rpc`, which measures a daemon over TCP and through shared memory.

Data connections are compared with plain sockets (`raw`), shared memory with the same store in this process.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tiercache.config.urls import storage_url
from tiercache.core import ObjectKey
from tiercache.errors import StorageError
from tiercache_lab import children
from tiercache_lab.bench.disk import KEYS
from tiercache_lab.bench.machine import warm
from tiercache_lab.bench.plan import BATCH, require_free
from tiercache_lab.bench.raw import RawClient
from tiercache_lab.bench.rows import Row, speed
from tiercache_lab.bench.subject import Buffers, Subject, batch_keys
from tiercache_lab.bench.timing import Side, medians

_LAYOUTS: Final = 3
"""Number of copies of the objects on disk. One copy each is stored on data connections, through shared
memory, and in this process."""
_SPARE: Final = 128 << 20
"""Bytes that the stores may need in addition to their objects."""
FOOTER: Final = (
    "data: by data connections, compared with plain sockets that move the same bytes, and neither check nor"
    " store them. shared: the daemon fills a memfd; compared with the same file store in this process."
)
"""Comparisons behind the rows."""


def run(
    root: Path, sizes: Sequence[int], batch_bytes: int, repeats: int, say: Callable[[str], None]
) -> Generator[Row]:
    """Measure all sizes in the directory `root` and yield the rows.

    Raises ConfigError if the disk has too little space.
    """
    needed = max(_LAYOUTS * (repeats + 1) * _count(size, batch_bytes) * size for size in sizes) + _SPARE
    require_free(root.parent, needed, "--batch, --size or --repeat")
    for size in sizes:
        with ExitStack() as stack:
            yield from _SizeBench(root / str(size), size, batch_bytes, repeats, say, stack).rows()


class _SizeBench:
    """Measurement of all cases for one object size. Thread safety: one thread."""

    def __init__(
        self,
        root: Path,
        size: int,
        batch_bytes: int,
        repeats: int,
        say: Callable[[str], None],
        stack: ExitStack,
    ) -> None:
        root.mkdir()
        self._repeats = repeats
        self._say = say
        self._size = size
        count = _count(size, batch_bytes)
        self._buffers = Buffers(size, count)
        capacity = 4 * (repeats + 3) * count * (size + 4096) + _SPARE
        say("starting a daemon")
        # The path of a unix socket may have only about 100 bytes, and `root` may be a longer path.
        sockets = stack.enter_context(TemporaryDirectory(prefix="tiercache-bench-"))
        address = start_daemon(root / "daemon", sockets, capacity, stack)

        def subject(url: str, path: Path) -> Subject:
            return stack.enter_context(Subject(url, path, self._buffers))

        store = root / "daemon/store"
        self._data = subject(storage_url("grpc", address=address), store)
        self._shared = subject(storage_url("grpc", sockets), store)
        self._local = subject(storage_url("file", root / "local", capacity=capacity), root / "local")
        server = _process(children.command("tiercache_lab.bench.raw"), stack)
        assert server.stdout is not None
        self._sockets = stack.enter_context(RawClient(int(server.stdout.readline())))

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all cases. Sets run first, and gets read the objects of the sets."""
        count, rounds = self._buffers.count, self._repeats + 1
        new = [[batch_keys(count) for _ in range(rounds)] for _ in range(3)]
        whole = self._buffers.arena.hold()[: self._buffers.nbytes]
        self._say("set")
        found = medians(
            [
                Side("data", lambda n: self._data.put(new[0][n])),
                Side("sockets", lambda _: self._sockets.call(whole, memoryview(bytearray(1)))),
                Side("shared", lambda n: self._shared.put(new[1][n])),
                Side("local", lambda n: self._local.put(new[2][n])),
            ],
            self._repeats,
        )
        yield self._row("data set", found["data"], "plain sockets", found["sockets"])
        yield self._row("shared set", found["shared"], "in process", found["local"])
        # The daemon's store has the batches of data and shared, and the local store has a batch of its own.
        # Each store reads its batches once before any get is timed.
        for subject in (self._shared, self._local):
            warm(subject.path)
            for keys in (new[0][0], new[1][0], new[2][0]):
                if subject.store.exists(keys)[0]:
                    subject.get(keys)
        self._say("get")
        self._buffers.wipe()
        self._data.get(new[0][0])
        self._buffers.check()
        found = medians(
            [
                Side("data", lambda _: self._data.get(new[0][0])),
                Side("sockets", lambda _: self._sockets.call(whole[:0], whole)),
                Side("shared", lambda _: self._shared.get(new[1][0])),
                Side("local", lambda _: self._local.get(new[2][0])),
            ],
            self._repeats,
        )
        yield self._row("data get warm", found["data"], "plain sockets", found["sockets"])
        yield self._row("shared get warm", found["shared"], "in process", found["local"])
        yield from self._exists([key for batch in new[1] for key in batch])

    def _exists(self, known: list[ObjectKey]) -> Iterator[Row]:
        keys = (known * (KEYS // len(known) + 1))[:KEYS]
        ways = {"data": self._data, "shared": self._shared}
        sides = [Side(name, lambda _, way=way: way.store.exists(keys)) for name, way in ways.items()]  # type: ignore[misc]
        for name, seconds in medians(sides, self._repeats).items():
            yield speed(f"rpc {name} exists", self._size, len(keys), seconds)

    def _row(self, case: str, seconds: float, limit: str, limit_seconds: float) -> Row:
        buffers = self._buffers
        return speed(f"rpc {case}", self._size, buffers.count, seconds, buffers.nbytes, limit, limit_seconds)


def _count(size: int, batch_bytes: int) -> int:
    """Return the number of objects in one batch, for objects of `size` bytes."""
    return max(1, min(BATCH, batch_bytes // size))


def start_daemon(directory: Path, sockets: str, capacity: int, stack: ExitStack) -> str:
    """Start a daemon, which ends with `stack`, and return its TCP address.

    Raises StorageError if the daemon does not start.
    """
    file = Path(sockets) / "daemon.toml"
    file.write_text(
        f"directory = {json.dumps(str(directory))}\nsockets = {json.dumps(sockets)}\n"
        f'disk_bytes = {capacity}\nlisten = ["127.0.0.1:0"]\n'
    )
    command = children.command("tiercache.cli", "serve", "--config", str(file), "-o", "jsonl")
    process = _process(command, stack)
    assert process.stdout is not None
    assert process.stderr is not None
    for row in map(json.loads, process.stdout):
        if row.get("transport") == "tcp":
            return str(row["address"])
    raise StorageError(f"the daemon did not start: {' '.join(process.stderr.read().splitlines()[-1:])}")


def _process(command: Sequence[str], stack: ExitStack) -> subprocess.Popen[str]:
    """Start a process. The process is terminated when the stack is closed."""
    process = stack.enter_context(
        # The command is a module of this package, not text from outside.
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603
    )
    stack.callback(process.terminate)
    return process
