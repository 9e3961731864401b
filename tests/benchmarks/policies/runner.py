"""Processes of a campaign: some at once, each with one command of `tiercache replay`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TextIO

from tests.benchmarks.policies.matrix import BOUNDS, INFINITE, Block, Run
from tests.benchmarks.policies.rows import Rows

_REPLAY: Final = (sys.executable, "-m", "tiercache.cli", "replay")


class Campaign:
    """Runs of all blocks that are not in the file yet.

    Thread safety: `go` belongs to one thread; `stop` may be called from any, and from a signal handler.
    """

    def __init__(self, blocks: Sequence[Block], rows: Rows, file: TextIO, code: str, processes: int) -> None:
        self._blocks, self._rows, self._file, self._code = blocks, rows, file, code
        self._processes = processes
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._running: set[subprocess.Popen[str]] = set()
        self.made = 0
        self.failed: list[str] = []

    def go(self) -> None:
        """Run all blocks, and return when the last has ended or `stop` was called."""
        with ThreadPoolExecutor(self._processes) as threads:
            list(threads.map(self._run, self._blocks))

    def stop(self) -> None:
        """Begin no more blocks, and interrupt those that run; their finished runs are kept."""
        self._stopped.set()
        with self._lock:
            for process in self._running:
                process.send_signal(signal.SIGINT)

    def _run(self, block: Block) -> None:
        with self._lock:
            footprint = self._rows.footprint(block)
            if footprint is None and block.needs_footprint:
                self._fail(block, "its infinite cache is not in the file; run the phase 5 % first")
                return
            missing = self._rows.missing(block, footprint or 0)
        if not missing or self._stopped.is_set():
            return
        names = dict.fromkeys(run.policy for run in missing if run.policy not in (INFINITE, *BOUNDS))
        bounds = any(run.policy in BOUNDS for run in missing)
        # The bounds come with a policy. If only they are missing, this one is run again.
        arguments = block.arguments([*names] or ["lru"], footprint or 0, bounds=bounds)
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*_REPLAY, *arguments, "--output", "jsonl"],
                stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches the campaign alone, which interrupts its processes
            )  # fmt: skip
            with process:
                with self._lock:
                    self._running.add(process)
                if self._stopped.is_set():
                    process.send_signal(signal.SIGINT)
                assert process.stdout is not None
                for line in process.stdout:
                    self._take(block, missing, footprint or 0, json.loads(line))
                code = process.wait()
            with self._lock:
                self._running.discard(process)
            if code and not self._stopped.is_set():
                errors.seek(0)
                self._fail(block, errors.read().strip()[-500:])

    def _take(self, block: Block, missing: Sequence[Run], footprint: int, record: Any) -> None:
        for run in missing:
            size = run.policy == INFINITE or record["capacity"] in (None, run.size.host)
            if run.policy == record["policy"] and size:
                with self._lock:
                    self._rows.add(self._file, block, run, footprint, self._code, record)
                    self.made += 1
                of = " ".join(filter(None, (run.policy, str(run.size), run.checkpoints)))
                saved = f"{record['flops_saved']:.4f} in {record['seconds']:.1f} s"
                tell(f"{run.traffic.name} {run.seed}, {of}: {saved}")

    def _fail(self, block: Block, reason: str) -> None:
        self.failed.append(f"{block.phase}, {block.traffic.name}, seed {block.seed}")
        tell(f"FAILED: {self.failed[-1]}: {reason}")


def tell(text: str) -> None:
    """Print a line to stderr, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
