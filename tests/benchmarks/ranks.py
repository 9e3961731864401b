"""How long the ranks of a model take to agree on a depth, and what that costs the engine's thread.

    python -m tests.benchmarks.ranks

One JSON line for each number of ranks. The ranks are processes on this machine, connected by TCP on
loopback. A request is an 8k prompt that every rank has on its device: `lookup`, `admit`, `wait`, `release`.
Beside it, in the same process and interleaved, the same request through a controller of a single rank.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

from tiercache.controller import HybridCacheController
from tiercache.controller.ranks.sockets import KEY_BYTES, SocketRankGroup
from tiercache.core import PoolName
from tiercache.geometry import kv_geometry, state_geometry
from tiercache.keys import Identity, Shard
from tiercache.pools import DevicePool, HostArena

PAGE, TOKENS, REQUESTS = 64, 8192, 300
KV, MAMBA = PoolName.KV, PoolName.MAMBA
PROMPT = np.arange(TOKENS, dtype=np.uint64) % 1000


def controller(rank: int, size: int, group: SocketRankGroup | None) -> HybridCacheController:
    """A controller that has all whole pages of the prompt on its device."""
    geometries = {
        KV: kv_geometry([0], 1, 4, "float32", PAGE),
        MAMBA: state_geometry([(1, "ssm", (4, 4), "float32")], PAGE),
    }
    tensors = {
        KV: {(0, name): torch.zeros(300 * PAGE, 1, 4) for name in ("k", "v")},
        MAMBA: {(1, "ssm"): torch.zeros(16, 4, 4)},
    }
    made = HybridCacheController(
        Identity("ranks", "1", "float32", "float32", "float32", PAGE),
        {name: DevicePool.from_tensors(one, tensors[name]) for name, one in geometries.items()},
        HostArena(512 * 4096, 4096),
        shard=Shard(rank, size),
        ranks=group,
    )
    admission = made.admit(made.lookup(PROMPT), states=8)
    admission.wait()
    depth = (TOKENS - 1) // PAGE * PAGE
    made.commit(admission, PROMPT[:depth], {depth: admission.take_states()})
    made.release(admission)
    return made


def request(made: HybridCacheController) -> tuple[float, float]:
    """Seconds from `admit` to READY, and CPU seconds of this thread for the whole request."""
    begun = time.thread_time()
    lookup = made.lookup(PROMPT)
    start = time.perf_counter()
    admission = made.admit(lookup, states=1)
    poll = admission.wait()
    waited = time.perf_counter() - start
    made.release(admission)
    assert poll.depth == (TOKENS - 1) // PAGE * PAGE
    return waited, time.thread_time() - begun


def follow(rank: int, size: int, port: int, key: str) -> None:
    """Serve the requests as one of the other ranks."""
    group = SocketRankGroup(rank, size, ("127.0.0.1", port), bytes.fromhex(key))
    with controller(rank, size, group) as made:
        for _ in range(REQUESTS):
            request(made)
        time.sleep(0.5)


def measure(size: int) -> None:
    """Print the figures of rank 0."""
    key = bytes(range(KEY_BYTES))
    group = SocketRankGroup(0, size, ("127.0.0.1", 0), key)
    command = [sys.executable, "-m", "tests.benchmarks.ranks"]
    others = [
        subprocess.Popen([*command, str(rank), str(size), str(group.address[1]), key.hex()])
        for rank in range(1, size)
    ]
    together, alone = [], []
    with controller(0, 1, None) as single, controller(0, size, group) as made:
        for _ in range(REQUESTS):
            alone.append(request(single))
            together.append(request(made))
        for other in others:
            other.wait(60)
    names = ("ready_us", "thread_cpu_us")
    row: dict[str, object] = {"ranks": size}
    for name, one, all_ in zip(names, zip(*alone, strict=True), zip(*together, strict=True), strict=True):
        row |= {
            name: round(statistics.median(all_) * 1e6),
            f"{name}_p99": round(sorted(all_)[len(all_) * 99 // 100] * 1e6),
            f"{name}_single": round(statistics.median(one) * 1e6),
        }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        follow(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        for ranks in (2, 4):
            measure(ranks)
