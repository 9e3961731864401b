"""Hits of SGLang's own tree and of ours under the same requests, in real servers, and what is predicted.

    python -m tests.servers.sglang.drive ENVIRONMENT MODEL REQUESTS SOURCE [NAME ...]

ENVIRONMENT is that of SGLang, or `-` for predictions alone, which need none. SOURCE is one of `tiercache
replay`; of a file or directory, every 16th token counts. Names: `sglang` (its own tree under LRU), and
policies of tiercache. One JSON line each: the share of prompt tokens that was not computed, its 95 % interval
over parts of 50 requests, the share that is predicted, the number of answers that differ from the first
server's, and for each hook of the tree the number of calls and the CPU microseconds of one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.processes import free_port
from tests.servers.models import make_model
from tests.servers.sglang.server import SglangServer
from tiercache.controller import ControllerOptions, HybridCacheController
from tiercache.controller.lent_slots import Taken, branch_of
from tiercache.core import PoolName, Tier
from tiercache.integrations.settings import profile_for
from tiercache.keys import Identity
from tiercache.pools import DevicePool, HostArena, page_geometry_of, state_geometry_of
from tiercache_lab.replay.sources.catalogue import open_source

KV, MAMBA = PoolName.KV, PoolName.MAMBA
PAGE, PAGES, STATES, NEW = 64, 128, 24, 8
PART, STRIDE, LONGEST = 50, 16, 3500


def prompts(name: str, count: int) -> Iterator[list[int]]:
    """Yield the prompts of a source that a small model can be asked."""
    stride, page = (STRIDE, None) if Path(name.split("?")[0]).exists() else (1, PAGE)
    for request in islice(open_source(name, seed=1, page=page), count):
        tokens = request.prompt[::stride][:LONGEST]
        mixed = (tokens * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)) % np.uint64(240) + np.uint64(3)
        yield mixed.tolist()


class Stand:
    """The cache over slots without an engine: what SGLang's scheduler does, one request at a time."""

    def __init__(self, model: Path, policy: str) -> None:
        config = json.loads((model / "config.json").read_text())
        self.hybrid = "full_attention_interval" in config
        heads, size = config["num_key_value_heads"], config["head_dim"]
        layers = [3] if self.hybrid else [0, 1, 2, 3]
        kv: Any = {(n, part): torch.zeros(PAGES * PAGE, heads, size) for n in layers for part in "kv"}
        pools = {KV: DevicePool.from_tensors(page_geometry_of(kv, PAGE), kv)}
        if self.hybrid:
            mamba: Any = {(n, "ssm"): torch.zeros(STATES, 4, 64, 64) for n in range(3)}
            mamba |= {(n, "conv"): torch.zeros(STATES, 512, 3) for n in range(3)}
            pools[MAMBA] = DevicePool.from_tensors(state_geometry_of(mamba, PAGE), mamba)
        self.pools = pools
        self.controller = HybridCacheController(
            Identity("m", "", "", "float32", "", PAGE),
            pools,
            HostArena(4096, 4096),
            options=ControllerOptions(policy=policy),
            profile=profile_for("", str(model)),
        )
        self.lent = self.controller.lent

    def take(self, pool: PoolName, count: int, spare: int = 0) -> np.ndarray[Any, Any]:
        source = self.pools[pool].source
        if (short := count + spare - source.available) > 0:
            self.lent.make_room({pool: short})
        return source.alloc(count)

    def ask(self, tokens: list[int]) -> int:
        """Return how many tokens of a prompt need not be computed; then the cache has the prompt."""
        prompt = np.array(tokens, np.uint64)
        index, lent = self.lent.index, self.lent
        match = index.match(prompt[:-1], limit=(len(prompt) - 1) // PAGE)
        origin, depth = index.touch(match, prompt[:-1]), lent.device_depth(match)
        plan = index.plan_checkpoints(match, prompt[:-1], match.depth).depths
        node = index.extend_path(prompt, depth) if depth else None
        pin = None if node is None else index.pin(node, Tier.DEVICE)
        held = np.empty(0, np.int64) if node is None else index.locations(node, depth).pages[KV].device
        states = self.take(MAMBA, 2) if self.hybrid else np.empty(0, np.int64)
        fresh = self.take(KV, -(-len(prompt) // PAGE) - depth, spare=1)
        row, end, handed = np.concatenate([held, fresh]), len(prompt) // PAGE, {}
        if self.hybrid:
            end = (branch_of(plan, origin, depth * PAGE, PAGE, PAGE) or end * PAGE) // PAGE
            handed = {end * PAGE: {MAMBA: int(states[1])}} if end > depth else {}
        made = None
        if end > depth:
            kinds = {d: k for d, k in plan.items() if d == end}
            made = lent.adopt(prompt[: end * PAGE], {KV: row[:end]}, handed, taken=Taken(kinds, origin))
        kept = [] if made is None else row[made.start : end][made.pages[KV].adopted].tolist()
        self.pools[KV].free(np.setdiff1d(fresh, kept))
        self.pools[MAMBA].free(
            states[:1] if made and made.adopted_states else states
        ) if self.hybrid else None
        if pin is not None:
            pin.release()
        self.controller.tick()
        return depth * PAGE


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
                told = row_of(name, asked, Stand(path, name).ask)
                row |= {"tree": name, "predicted": told["share"]}
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
