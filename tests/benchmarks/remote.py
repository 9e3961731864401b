"""Payload between two hosts, over loopback: `python -m tests.benchmarks.remote [ROUNDS] [CLIENTS]`.

A daemon with a `memory` store, and a client that stores and reads batches on data connections and by gRPC,
beside a raw TCP socket pair that moves the same bytes (sendmsg on one side, recv_into on the other). All in
turn; one JSON line for each batch: medians, GB/s, processor seconds of both ends for each GB, and ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tiercache.core import Outcome
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key, payload, to_set
from tiercache_lab.bench.raw import RawClient

MIB = 1 << 20
BATCHES = {"8 x 64 KiB": (8, 64 << 10), "1 MiB": (1, MIB), "32 MiB": (32, MIB)}
SECONDS = 0.3
"""Seconds of each side in each round."""


class Batch:
    """One client's batch, which it reads, and stores under names that are new each time."""

    def __init__(self, store: StorageBackend, name: str, count: int, size: int, ends: ExitStack) -> None:
        self._store, self._name, self._numbers = store, name, 0
        arena = HostArena(count * size, size, huge_pages=False)
        ends.callback(arena.close)
        self._views = [arena.view(n) for n in range(count)]
        self._bytes = [payload((name, n), size) for n in range(count)]
        for view, data in zip(self._views, self._bytes, strict=True):
            view[:] = data
        self._gets = [GetItem(key((name, n)), [view], size) for n, view in enumerate(self._views)]
        metas = [to_set(key((name, n)), data) for n, data in enumerate(self._bytes)]
        self._sets = [
            SetItem(item.key, [view], replace(item.meta, checksum=b""))
            for item, view in zip(metas, self._views, strict=True)
        ]

    def prepare(self) -> None:
        """Store what `get` reads, if sets have displaced it, and check what comes back."""
        self._store.set(self._sets)
        for view in self._views:
            view[:] = bytes(view.nbytes)
        self.get()
        assert [bytes(view) for view in self._views] == self._bytes

    def get(self) -> None:
        assert set(self._store.get(self._gets)) == {Outcome.HIT}

    def set(self) -> None:
        self._numbers += 1
        sets = [
            SetItem(key((self._name, self._numbers, n)), item.buffers, item.meta)
            for n, item in enumerate(self._sets)
        ]
        assert set(self._store.set(sets)) == {Outcome.STORED}


def seconds_of(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(works: list[Callable[[], None]], nbytes: int, pid: int) -> tuple[float, float]:
    """GB/s and processor seconds a GB when each of `works` goes on in a thread of its own."""
    done = [0] * len(works)
    end = time.perf_counter() + SECONDS

    def run(number: int) -> None:
        while time.perf_counter() < end:
            works[number]()
            done[number] += 1

    cpu, began = time.process_time() + seconds_of(pid), time.perf_counter()
    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moved = sum(done) * nbytes / 1e9
    used = time.process_time() + seconds_of(pid) - cpu
    return moved / (time.perf_counter() - began), used / moved


def raw_get(port: int, nbytes: int, ends: ExitStack) -> Callable[[], None]:
    """Receive so many bytes from plain sockets."""
    client, into = ends.enter_context(RawClient(port)), memoryview(bytearray(b"x" * nbytes))
    return lambda: client.call(into[:0], into)


def child(command: list[str], ends: ExitStack) -> subprocess.Popen[str]:
    made = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    ends.callback(made.terminate)
    return made


def main(rounds: int, clients: int) -> None:
    with tempfile.TemporaryDirectory(prefix="tc-") as temporary, ExitStack() as ends:
        raw = child([sys.executable, "-m", "tiercache_lab.bench.raw"], ends)
        assert raw.stdout is not None
        port = int(raw.stdout.readline())
        command = [sys.executable, "-m", "tiercache.cli", "serve", "--directory", temporary]
        daemon = child(
            [*command, "--storage", "memory://?capacity=1GiB", "--listen", "127.0.0.1:0", "-o", "jsonl"], ends
        )
        assert daemon.stdout is not None
        rows = map(json.loads, daemon.stdout)
        address = next(row["address"] for row in rows if row.get("transport") == "tcp")
        for label, (count, size) in BATCHES.items():
            sides: dict[str, tuple[list[Callable[[], None]], int]] = {
                "raw": ([raw_get(port, count * size, ends) for _ in range(clients)], raw.pid)
            }
            prepared: dict[str, list[Batch]] = {}
            with ExitStack() as stores:
                for plane in ("auto", "stream"):
                    batches = []
                    for n in range(clients):
                        store = stores.enter_context(open_backend(f"grpc://{address}?plane={plane}"))
                        batches.append(Batch(store, f"{plane}{n} {label}", count, size, stores))
                    name = "data" if plane == "auto" else "stream"
                    prepared[f"{name} get"] = batches
                    sides[f"{name} get"] = ([batch.get for batch in batches], daemon.pid)
                    sides[f"{name} set"] = ([batch.set for batch in batches], daemon.pid)
                found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
                for _ in range(rounds):
                    for name, (works, pid) in sides.items():
                        for batch in prepared.get(name, ()):
                            batch.prepare()
                        found[name].append(measure(works, count * size, pid))
            speed = {name: statistics.median(s for s, _ in each) for name, each in found.items()}
            cost = {name: statistics.median(c for _, c in each) for name, each in found.items()}
            print(
                json.dumps(
                    {
                        "name": "remote", "batch": label, "clients": clients,
                        "gb_per_second": {name: round(value, 2) for name, value in speed.items()},
                        "cpu_seconds_per_gb": {name: round(value, 2) for name, value in cost.items()},
                        "get_to_raw": round(speed["data get"] / speed["raw"], 2),
                        "get_to_stream": round(speed["data get"] / speed["stream get"], 2),
                        "set_to_stream": round(speed["data set"] / speed["stream set"], 2),
                    }
                ),
                flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, int(sys.argv[2]) if len(sys.argv) > 2 else 1)
