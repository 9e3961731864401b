"""Many clients of one daemon at once: `python -m tests.benchmarks.clients [CLIENTS] [SECONDS] [WAY]`.

WAY is `mixed` (half of them share memory with it, half talk TCP) or `data` (all over TCP). Each stores and
reads batches of its own and of the others, and checks every byte that it reads. One JSON line: how many
calls, what went wrong (nothing may), the latencies.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.storage_backends.grpc.hooks import answers
from tiercache.core import Outcome
from tiercache.errors import StorageError
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key, payload, to_set
from tiercache_lab.bench.rpc import start_daemon

PROCESSES = 8
OBJECTS = 8
SIZE = 64 << 10
SHARED_BATCHES = 200


def client(
    url: str, who: int, seconds: float, started: threading.Barrier
) -> tuple[Counter[str], dict[str, list[float]]]:
    """One client's calls: outcomes, and seconds by kind of call."""
    rng = random.Random(who)
    seen: Counter[str] = Counter()
    times: dict[str, list[float]] = {"exists": [], "get": [], "set": []}
    arena = HostArena(OBJECTS * SIZE, SIZE, huge_pages=False)
    with open_backend(url) as store:
        store.attach(arena)
        ready = time.monotonic() + 60
        while not answers(store) and time.monotonic() < ready:
            time.sleep(0.1)
        started.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name = rng.randrange(SHARED_BATCHES) if rng.random() < 0.7 else (who, rng.randrange(10**9))
            batch(store, arena, name, seen, times)
    arena.close()
    return seen, times


def batch(
    store: StorageBackend, arena: HostArena, name: object, seen: Counter[str], times: dict[str, list[float]]
) -> None:
    keys = [key((name, i)) for i in range(OBJECTS)]
    views = [arena.view(i) for i in range(OBJECTS)]
    started = time.perf_counter()
    try:
        there = store.exists(keys)
    except StorageError:
        seen["outage"] += 1
        time.sleep(0.1)
        return
    times["exists"].append(time.perf_counter() - started)
    seen["exists"] += 1
    if all(there):
        items = [GetItem(k, [v], SIZE) for k, v in zip(keys, views, strict=True)]
        started = time.perf_counter()
        outcomes = store.get(items)
        times["get"].append(time.perf_counter() - started)
        for i, outcome in enumerate(outcomes):
            seen[f"get {outcome}"] += 1
            seen["wrong"] += outcome is Outcome.HIT and bytes(views[i]) != payload((name, i), SIZE)
    else:
        for i, view in enumerate(views):
            view[:] = payload((name, i), SIZE)
        sets = [to_set(k, bytes(v), depth=i + 1) for i, (k, v) in enumerate(zip(keys, views, strict=True))]
        sets = [SetItem(item.key, [view], item.meta) for item, view in zip(sets, views, strict=True)]
        started = time.perf_counter()
        outcomes = store.set(sets)
        times["set"].append(time.perf_counter() - started)
        seen.update(f"set {outcome}" for outcome in outcomes)


def worker(urls: list[str], first: int, seconds: float) -> None:
    """A process with several clients: prints what they saw."""
    results: list[tuple[Counter[str], dict[str, list[float]]]] = []
    started = threading.Barrier(len(urls))

    def run(url: str, who: int) -> None:
        results.append(client(url, who, seconds, started))

    threads = [threading.Thread(target=run, args=(url, first + n)) for n, url in enumerate(urls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sum((r[0] for r in results), Counter())
    times = {kind: [t for r in results for t in r[1][kind]] for kind in ("exists", "get", "set")}
    print(json.dumps({"seen": seen, "times": times, "ended": len(results)}))


def main(clients: int, seconds: float, way: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tiercache-") as sockets, ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".benchmark-", dir=".")))
        address = start_daemon(directory.absolute() / "d", sockets, 512 << 20, stack)
        urls = [f"grpc://{address}"] * clients
        if way == "mixed":
            urls[1::2] = [f"grpc://{sockets}"] * (clients // 2)
        shares = [urls[n::PROCESSES] for n in range(min(PROCESSES, clients))]
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.clients", json.dumps([share, n * 1000, seconds])],
                stdout=subprocess.PIPE,
            )
            for n, share in enumerate(shares)
        ]
        seen: Counter[str] = Counter()
        times: dict[str, list[float]] = {"exists": [], "get": [], "set": []}
        ended = 0
        for process in workers:
            report = json.loads(process.communicate(timeout=3 * seconds + 120)[0])
            seen.update(report["seen"])
            ended += report["ended"]
            for kind, values in report["times"].items():
                times[kind] += values
        row = {
            "name": "clients", "way": way, "clients": clients, "ended": ended, "seconds": seconds,
            "seen": dict(sorted(seen.items())),
            "calls_per_second": round(sum(map(len, times.values())) / seconds),
            "ms": {kind: quantiles(values) for kind, values in times.items() if len(values) > 100},
        }  # fmt: skip
        print(json.dumps(row))


def quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=1000, method="inclusive")
    return {
        "p50": round(cuts[499] * 1e3, 2),
        "p99": round(cuts[989] * 1e3, 2),
        "p99.9": round(cuts[998] * 1e3, 2),
        "max": round(max(values) * 1e3, 2),
    }


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        worker(*json.loads(sys.argv[1]))
    else:
        given = [*sys.argv[1:], *("64", "60", "mixed")[len(sys.argv) - 1 :]]
        main(int(given[0]), float(given[1]), given[2])
