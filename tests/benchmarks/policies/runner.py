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
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, Final, TextIO

from tests.benchmarks.policies.matrix import BOUNDS, INFINITE, Block, Run
from tests.benchmarks.policies.rows import Rows

_GUESS: Final = 12.0
"""Seconds of a run before anything is known."""
_REPLAY: Final = (sys.executable, "-m", "tiercache.cli", "replay")


class Pace:
    """Estimate of the time that is left, from the seconds of the runs made so far.

    Thread safety: one thread at a time.
    """

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for row in rows:
            self.add(row["traffic"], row["policy"], row["seconds"])

    def add(self, traffic: str, policy: str, seconds: float) -> None:
        """Note the seconds of a run."""
        for key in ((traffic, policy), (traffic, ""), ("", "")):
            self._seconds[key].append(seconds)

    def of(self, run: Run) -> float:
        """Return the seconds that a run is likely to take."""
        for key in ((run.traffic.name, run.policy), (run.traffic.name, ""), ("", "")):
            if found := self._seconds.get(key):
                return median(found)
        return _GUESS


class Campaign:
    """Runs of all blocks that are not in the file yet.

    Thread safety: `go` belongs to one thread; `stop` may be called from any, and from a signal handler.
    """

    def __init__(self, blocks: Sequence[Block], rows: Rows, file: TextIO, code: str, processes: int) -> None:
        self._rows = rows
        self._file = file
        self._code = code
        self._processes = processes
        self._pace = Pace(rows)
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._running: set[subprocess.Popen[str]] = set()
        self._began = time.monotonic()
        # Sizes in bytes are known later, but the number of runs is known now.
        todo = [block for block in blocks if not self._is_made(block)]
        self._waiting = deque(todo)
        # Several blocks may begin with the same infinite cache.
        self._left = dict.fromkeys(run for block in todo for run in self._missing(block))
        self.made = 0
        self.failed: list[str] = []

    def seconds(self) -> float:
        """Return how long the rest is likely to take."""
        with self._lock:
            return sum(map(self._pace.of, self._left)) / self._processes

    @property
    def left(self) -> int:
        """Number of runs that are not made yet."""
        return len(self._left)

    def go(self) -> None:
        """Run all blocks, and return when the last has ended or `stop` was called."""
        threads = [threading.Thread(target=self._work) for _ in range(self._processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        """Begin no more blocks, and interrupt those that run; their finished runs are kept."""
        self._stopped.set()
        with self._lock:
            for process in self._running:
                process.send_signal(signal.SIGINT)

    def _work(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                if not self._waiting:
                    return
                block = self._waiting.popleft()
            self._run(block)

    def _is_made(self, block: Block) -> bool:
        footprint = self._rows.footprint(block)
        if footprint is None and block.needs_footprint:
            return False
        return not self._rows.missing(block, footprint or 0)

    def _missing(self, block: Block) -> list[Run]:
        return self._rows.missing(block, self._rows.footprint(block) or 0)

    def _run(self, block: Block) -> None:
        footprint = self._rows.footprint(block)
        if footprint is None and block.needs_footprint:
            self._fail(block, "the infinite cache of this source is not in the file; run the phase 5 % first")
            return
        footprint = footprint or 0
        with self._lock:
            missing = self._rows.missing(block, footprint)
        names = dict.fromkeys(run.policy for run in missing if run.policy not in (INFINITE, *BOUNDS))
        bounds = any(run.policy in BOUNDS for run in missing)
        # The bounds come with a policy. If only they are missing, this one is run again.
        arguments = block.arguments([*names] or ["lru"], footprint, bounds=bounds)
        with tempfile.TemporaryFile("w+") as errors:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [*_REPLAY, *arguments, "--output", "jsonl"],
                stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                start_new_session=True,  # Ctrl-C reaches the campaign alone, which interrupts its processes
            )  # fmt: skip
            with process:
                with self._lock:
                    self._running.add(process)
                if self._stopped.is_set():
                    process.send_signal(signal.SIGINT)
                assert process.stdout is not None
                for line in process.stdout:
                    self._take(block, missing, footprint, json.loads(line))
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
                    self._left.pop(run, None)
                    self._pace.add(run.traffic.name, run.policy, record["seconds"])
                    self.made += 1
                    self._say(run, record)

    def _say(self, run: Run, record: Any) -> None:
        of = " ".join(filter(None, (run.policy, str(run.size), run.checkpoints)))
        tell(
            f"{run.traffic.name} {run.seed}, {of}: {record['flops_saved']:.4f} in"
            f" {record['seconds']:.1f} s; {self.left:,} runs left, about {duration(self.seconds())}"
        )

    def _fail(self, block: Block, said: str) -> None:
        with self._lock:
            for run in self._missing(block):
                self._left.pop(run, None)
            self.failed.append(f"{block.phase}, {block.traffic.name}, seed {block.seed}")
            tell(f"FAILED: {self.failed[-1]}: {said}")


def tell(text: str) -> None:
    """Print a line to stderr, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Write a time to wait: 40 s, 12 min, 1 h 52 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
