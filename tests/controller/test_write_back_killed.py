"""Write-back in a process that is killed: what storage acknowledged is there, and nothing wrong is served.

The process says on its standard output what storage has acknowledged, and when it flushes and closes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.controller.harness import KV, Engine, P, prompt
from tests.examples import slow_after
from tiercache.controller import WRITE_BACK, ControllerOptions
from tiercache.core import Tier
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.storage.wrappers import Wrapper, unwrap

BLOCKS = 120
PAGES = 4
STEPS = [
    ("flushing", 7),
    ("closing", 5),
    ("stored", 1),
    ("stored", 40),
    ("flushing", 1),
    ("flushed", 1),
    ("closing", 1),
    ("closed", 1),
]


class Telling(Wrapper):
    """A store that says which objects it has acknowledged."""

    def set(self, items):
        outcomes = super().set(items)
        for item, outcome in zip(items, outcomes, strict=True):
            say(f"{outcome} {item.key.pool} {item.key.digest.hex()}")
        return outcomes


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def opened(path: str | Path) -> StorageBackend:
    return open_backend(f"file://{path}/store?capacity=32MiB")


def session(n: int) -> list[int]:
    return [*prompt(1, *range(n, n + PAGES - 1)), 5]


def engine_on(store: StorageBackend) -> Engine:
    options = ControllerOptions(restore_deadline=10.0, write=WRITE_BACK, write_chance=0.0)
    return Engine(store, blocks=BLOCKS, options=options)


def live(path: str, seed: str) -> None:
    """Serve, flush and close with write-back until the process is killed."""
    drawn = random.Random(seed)
    while True:
        engine = engine_on(Telling(opened(path)))
        for _ in range(drawn.randrange(1, 4)):
            for _ in range(drawn.randrange(1, 30)):
                engine.serve(session(10 * drawn.randrange(1, 200)))
            say("flushing")
            engine.controller.flush()  # it may be short of what was evicted before it could be copied
            say("flushed")
        for _ in range(drawn.randrange(10)):
            engine.serve(session(10 * drawn.randrange(1, 200)))
        say("closing")
        assert engine.controller.close()
        say("closed")


@contextmanager
def living(path: Path, seed: int) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process that lives, and what it says."""
    code = "import sys; from tests.controller.test_write_back_killed import live; live(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(path), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            process.kill()


def kill_one(path: Path, seed: int, step: str, lines: int) -> set[str]:
    """Kill the process so many lines after it has said `step`; return the objects that were acknowledged."""
    stored: set[str] = set()
    left = None
    with living(path, seed) as (process, said):
        for line in said:
            if line.startswith("stored "):
                stored.add(line.split()[2])
            if left is None and (step == "stored" or line.strip() == step):
                left = lines
            elif left is not None:
                left -= 1
                if left == 0:
                    process.kill()  # what it has said until then is still read
    assert process.returncode == -9, "it was killed, and did not end by itself"
    return stored


@pytest.mark.parametrize(("step", "lines"), slow_after(1, STEPS))
def test_what_was_acknowledged_is_there_and_nothing_else_is_wrong(
    tmp_path: Path, step: str, lines: int
) -> None:
    stored: set[str] = set()
    for seed in range(2):  # the second begins with what the first has left
        stored |= kill_one(tmp_path, seed, step, lines)
        with opened(tmp_path) as store:
            unwrap(store).check_integrity()  # type: ignore[attr-defined]  # of a file store
            there = {entry.key.digest.hex(): entry for entry in store.scan_all()}
            assert stored <= there.keys()
            pages = {entry.key.page_key for entry in there.values() if entry.key.pool is KV}
            parents = {entry.meta.parent for entry in there.values()}
            assert parents <= pages | {None, b""}, "each object is behind its page"
    engine = engine_on(opened(tmp_path))
    # The harness compares every byte that is restored.
    depths = [engine.serve([*session(10 * n), 6]) for n in range(1, 200)]
    assert set(depths) <= {0, P, PAGES * P}
    ends = [e for e in there.values() if e.key.pool is not KV and e.meta.depth == PAGES]
    assert depths.count(PAGES * P) == len(ends)
    engine.controller.evict(Tier.DEVICE)
    engine.check()
