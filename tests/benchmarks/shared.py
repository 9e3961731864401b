"""Processor time of calls by shared memory: `python -m tests.benchmarks.shared [OBJECTS]`.

A daemon and a `file` store in this process take turns with the same batches of 16 KiB. One JSON line a row;
`us` is the processor time of this process and of the daemon together, in us an object (median of ROUNDS).
The directory is made in TMPDIR and removed at the end.
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
from collections import defaultdict
from pathlib import Path

from tests.benchmarks.objects import Bench
from tests.storage_backends.grpc.hooks import answers
from tiercache.core import Outcome
from tiercache.storage import open_backend
from tiercache.storage.base import StorageBackend

SIZE, BATCHES, ROUNDS = 16 << 10, 6, 60
EXPECTED = {"get": Outcome.HIT, "set": Outcome.STORED, "exists": True}


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads that a process has now."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(stores: dict[str, StorageBackend], daemon: int, objects: int, directory: Path) -> None:
    benches = {}
    for name, store in stores.items():
        (directory / name).mkdir()
        benches[name] = Bench(store, directory / name, SIZE, objects, BATCHES)
        # private: the memory of the benchmark's buffers is what a worker attaches
        store.attach(benches[name]._arena)
    until = time.monotonic() + 60
    while not answers(stores["shared"]) and time.monotonic() < until:
        time.sleep(0.05)
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    for bench in benches.values():
        for batch in range(BATCHES):
            bench.set(batch)()
    for turn in range(ROUNDS + 3):
        for call, expected in EXPECTED.items():
            for name, bench in benches.items():
                if call == "set":
                    bench.delete(turn % BATCHES)
                work = getattr(bench, call)(turn % BATCHES)
                theirs, ours = cpu_seconds(daemon), time.process_time()
                found = work()
                seconds = time.process_time() - ours
                seconds += cpu_seconds(daemon) - theirs
                assert set(found) == {expected}, found
                if turn >= 3:
                    took[call, name].append(seconds / objects * 1e6)
    for (call, name), values in took.items():
        row = {"benchmark": f"{name}.{call}", "bytes": SIZE, "objects": objects}
        print(json.dumps(row | {"us": round(statistics.median(values), 2)}), flush=True)
    for bench in benches.values():
        bench.close()


def main(objects: int) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as temporary:
        directory = Path(temporary)
        command = [sys.executable, "-m", "tiercache.cli", "serve", "--directory", f"{directory}/daemon"]
        with subprocess.Popen(
            [*command, "--disk-bytes", "1GiB"], stderr=subprocess.PIPE, text=True
        ) as daemon:
            assert daemon.stderr is not None
            try:
                next(line for line in daemon.stderr if line.startswith("on "))
                threading.Thread(target=daemon.stderr.read, daemon=True).start()
                with (
                    open_backend(f"grpc://{directory}/daemon/run") as shared,
                    open_backend(f"file://{directory}/store?capacity=1GiB") as local,
                ):
                    measure({"shared": shared, "in process": local}, daemon.pid, objects, directory)
            finally:
                daemon.terminate()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 128)
