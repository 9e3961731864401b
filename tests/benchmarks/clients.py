"""Many clients of one daemon at once: `python -m tests.benchmarks.clients [CLIENTS] [SECONDS] [WAY]`.

WAY is `mixed` (half of them share memory with it, half talk TCP) or `data` (all over TCP). Each stores and
reads batches of its own and of the others, and checks every byte that it reads. One JSON line: how many
calls, what went wrong (nothing may), the latencies, and what the daemon's memory did.
"""

from __future__ import annotations

import json
import os
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
    began: list[float] = []
    started = threading.Barrier(len(urls), lambda: began.append(time.process_time()))

    def run(url: str, who: int) -> None:
        results.append(client(url, who, seconds, started))

    threads = [threading.Thread(target=run, args=(url, first + n)) for n, url in enumerate(urls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sum((r[0] for r in results), Counter())
    times = {kind: [t for r in results for t in r[1][kind]] for kind in ("exists", "get", "set")}
    used = time.process_time() - began[0]
    print(json.dumps({"seen": seen, "times": times, "ended": len(results), "cpu": used}))


def main(clients: int, seconds: float, way: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=".") as temporary, ExitStack() as stack:
        directory = Path(temporary).absolute() / "d"
        command = [
            sys.executable,
            "-m",
            "tiercache.cli",
            "serve",
            "--directory",
            str(directory),
            "--disk-bytes",
            "512MiB",
            "--listen",
            "127.0.0.1:0",
        ]
        daemon = stack.enter_context(
            subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(daemon.terminate)
        assert daemon.stderr is not None
        address = next(line.split()[1] for line in daemon.stderr if line.startswith("on 127.0.0.1:"))
        urls = [f"grpc://{address}"] * clients
        if way == "mixed":
            urls[1::2] = [f"grpc://{directory}/run"] * (clients // 2)
        threading.Thread(target=daemon.stderr.read, daemon=True).start()
        shares = [urls[n::PROCESSES] for n in range(min(PROCESSES, clients))]
        before, used = memory_of(daemon.pid), seconds_of(daemon.pid)
        # a pipe that nobody reads would fill up
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in shares]
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.clients", json.dumps([share, n * 1000, seconds])],
                stdout=output,
            )
            for n, (share, output) in enumerate(zip(shares, outputs, strict=True))
        ]
        samples = []
        while any(w.poll() is None for w in workers):
            time.sleep(1)
            samples.append(memory_of(daemon.pid))
            if len(samples) > 3 * seconds + 60:
                break
        seen: Counter[str] = Counter()
        times: dict[str, list[float]] = {"exists": [], "get": [], "set": []}
        ended, spent = 0, 0.0
        for worker_process, output in zip(workers, outputs, strict=True):
            worker_process.wait(60)
            output.seek(0)
            report = json.load(output)
            seen.update(report["seen"])
            ended += report["ended"]
            spent += report["cpu"]
            for kind, values in report["times"].items():
                times[kind] += values
        calls = sum(map(len, times.values()))
        daemon_seconds = seconds_of(daemon.pid) - used
        half = samples[len(samples) // 4 : -5] or samples
        print(
            json.dumps(
                {
                    "name": "clients", "way": way, "clients": clients, "ended": ended, "seconds": seconds,
                    "seen": dict(sorted(seen.items())),
                    "calls_per_second": round(calls / seconds),
                    "cpu_ms_per_call": {
                        "daemon": round(daemon_seconds / calls * 1e3, 3),
                        "clients": round(spent / calls * 1e3, 3),
                    },
                    "ms": {kind: quantiles(values) for kind, values in times.items() if len(values) > 100},
                    "daemon_private_mb": {"before": before, "a quarter in": half[0], "at the end": half[-1],
                     "most": max(samples)},
                }
            )
        )  # fmt: skip


def quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=1000, method="inclusive")
    return {
        "p50": round(cuts[499] * 1e3, 2),
        "p99": round(cuts[989] * 1e3, 2),
        "p99.9": round(cuts[998] * 1e3, 2),
        "max": round(max(values) * 1e3, 2),
    }


def seconds_of(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> float:
    """Private anonymous megabytes of a process."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    return int(fields["Anonymous"].split()[0]) / 1000


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        worker(*json.loads(sys.argv[1]))
    else:
        given = [*sys.argv[1:], *("64", "60", "mixed")[len(sys.argv) - 1 :]]
        main(int(given[0]), float(given[1]), given[2])
