"""Hits of SGLang's own tree and of ours under the same requests, in real servers, and what is predicted.

    python -m tests.servers.sglang.drive ENVIRONMENT MODEL REQUESTS SOURCE [NAME ...]

ENVIRONMENT is that of SGLang, or `-` for predictions alone, which need none. SOURCE is one of `tiercache
replay`; of a file or directory, every 16th token counts. Names: `sglang` (its own tree under LRU), and
policies of tiercache. One JSON line each: the share of prompt tokens that was not computed, its 95 % interval
over parts of 50 requests, the share that the replay predicts, the number of answers that differ from those of
the first server, and for each hook of the tree the number of calls and the CPU microseconds of one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tests.processes import free_port
from tests.servers.models import make_model
from tests.servers.sglang.server import SglangServer
from tiercache.controller.lent_slots import branch_of
from tiercache.core import PoolName
from tiercache.integrations.settings import profile_for
from tiercache_lab.replay.base import Request, Tiers
from tiercache_lab.replay.cache import Running, Setup
from tiercache_lab.replay.drive import Run
from tiercache_lab.replay.needs import measure
from tiercache_lab.replay.plane import geometries
from tiercache_lab.replay.sources.base import Workload, WorkloadSource
from tiercache_lab.replay.sources.catalogue import open_source

PAGE, PAGES, STATES, NEW = 64, 128, 24, 8
PART, STRIDE, LONGEST = 50, 16, 3500


def prompts(name: str, count: int) -> Iterator[list[int]]:
    """Yield the prompts of a source that a small model can be asked."""
    stride, page = (STRIDE, None) if Path(name.split("?")[0]).exists() else (1, PAGE)
    for request in islice(open_source(name, seed=1, page=page), count):
        tokens = request.prompt[::stride][:LONGEST]
        mixed = (tokens * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)) % np.uint64(240) + np.uint64(3)
        yield mixed.tolist()


@dataclass(frozen=True)
class Asked(Workload):
    """Prompts, each with an answer with which no later prompt goes on."""

    prompts: Sequence[list[int]] = ()

    def count(self, seed: int) -> int:
        return len(self.prompts)

    def generate(self, seed: int) -> Iterator[Request]:
        for n, prompt in enumerate(self.prompts):
            answer = np.arange(NEW, dtype=np.uint64) + np.uint64(1000 + n * NEW)
            yield Request(np.array(prompt, np.uint64), answer, float(n), n)


class OneState(Run):
    """Replay in which a prefill leaves one state, as in SGLang."""

    def _depths(self, running: Running) -> list[int]:  # private: no engine of the replay takes fewer states
        made, planned = running.admission, super()._depths(running)  # private: the states to choose from
        first = branch_of(made.plan.depths, made.origin, made.depth, PAGE, PAGE)
        return [first or planned[-1]] if planned else []


def predicted(asked: Sequence[list[int]], model: Path, policy: str) -> float:
    """Return the share of the prompts' tokens that the replay does not compute, on a device as large."""
    profile = profile_for("", str(model))
    assert profile is not None, "the model has a config.json"
    source = WorkloadSource("asked", Asked(asked), 0, len(asked), PAGE)
    states = STATES if profile.state_bytes else 0
    room = PAGES * geometries(profile, PAGE)[PoolName.KV].nbytes + states * profile.state_bytes
    run = OneState(source, measure(source), Setup(policy, profile, Tiers(0, room, device_states=states)))
    run.go()
    return run.tally.token_hit_rate


def row_of(name: str, asked: list[list[int]], ask: Callable[[list[int]], int]) -> dict[str, Any]:
    """Ask all prompts, and return the share of their tokens that was cached, with its interval."""
    began, cached = time.monotonic(), [ask(prompt) for prompt in asked]
    sizes = [len(prompt) for prompt in asked]
    parts = range(0, len(asked) - PART + 1, PART)
    shares = [sum(cached[n : n + PART]) / sum(sizes[n : n + PART]) for n in parts]
    apart = 1.96 * statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
    row = {"tree": name, "requests": len(asked), "tokens": sum(sizes), "share": sum(cached) / sum(sizes)}
    return row | {"within": apart, "seconds": time.monotonic() - began}


def main(environment: str, model: str, count: str, source: str, *names: str) -> None:
    """Ask each server in turn, and print its row."""
    asked = list(prompts(source, int(count)))
    expected: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(model, Path(folder))
        for name in names or ("sglang", "lru", "hvd"):
            row: dict[str, Any] = {"model": model, "source": source}
            if name != "sglang":
                row |= {"tree": name, "predicted": predicted(asked, path, name)}
            if environment != "-":
                row |= _served(Path(environment), path, name, asked, expected)
            rounded = {
                key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()
            }
            print(json.dumps(rounded), flush=True)


def _served(
    environment: Path, path: Path, name: str, asked: list[list[int]], expected: list[list[int]]
) -> dict[str, Any]:
    arguments = ["--radix-eviction-policy", "lru"]
    if name != "sglang":
        policy = json.dumps({"policy": name})
        arguments = ["--radix-cache-backend", "tiercache", "--hicache-storage-backend-extra-config", policy]
    answers: list[list[int]] = []
    times = path / f"{name}.json"
    os.environ["TIERCACHE_HOOK_TIMES"] = str(times)
    with SglangServer(environment, path, free_port(), path / f"{name}.log", None, *arguments) as server:

        def ask(prompt: list[int]) -> int:
            answer = server.ask(prompt, NEW)
            answers.append(answer.tokens)
            return answer.cached

        row = row_of(name, asked, ask)
    is_first = not expected
    expected.extend(answers[len(expected) :])
    spent = {hook: [n, round(us / n, 1)] for hook, (n, us) in json.loads(times.read_text()).items()}
    different = None if is_first else sum(a != b for a, b in zip(answers, expected, strict=True))
    return row | {
        "other_answers": different,
        "hooks": spent,
        "hook_ms": sum(n * us for n, us in spent.values()) / 1e3,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
