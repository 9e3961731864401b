"""Speed of the CPU transfer engine and of the arena: `python -m tests.benchmarks.transfer`, one JSON line a
row.

The shapes are those of Qwen3-Next: a page of 64 tokens is 24 segments of 64 KiB (12 attention layers), a
state 36 layers of 2 MiB SSM and 48 KiB conv. Beside each row stands one contiguous memcpy of as many bytes,
measured in turn with it.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from tests.pools.tensors import ArrayTensor
from tiercache.core import CacheTransferUnits, Locations
from tiercache.pools import DevicePool, HostArena, HostPool, by_layer, page_geometry_of, state_geometry_of
from tiercache.pools.device import Tensors
from tiercache.transfer import CopyEngine
from tiercache.transfer.descriptors import build_descriptors
from tiercache_lab.bench.timing import Side, medians

PAGE_SIZE, PAGES, STATES, ROUNDS = 64, 128, 3, 5
BLOCK_BYTES = 24 * 64 << 10


def page_tensors() -> Tensors:
    """K and V of 12 layers, `[slots * 64, 2, 256]` of bfloat16."""
    shape, layers = (12, PAGES * PAGE_SIZE, 2, 256), range(3, 48, 4)
    k, v = (ArrayTensor(np.ones(shape, np.uint16), "bfloat16") for _ in "kv")
    return dict(sorted((by_layer("k", k, layers) | by_layer("v", v, layers)).items()))


def state_tensors() -> Tensors:
    """Conv `[36, slots, 8192, 3]` of bfloat16 and SSM `[36, slots, 32, 128, 128]` of float32."""
    layers = [n for n in range(48) if n % 4 != 3]
    conv = ArrayTensor(np.ones((36, STATES, 8192, 3), np.uint16), "bfloat16")
    ssm = ArrayTensor(np.ones((36, STATES, 32, 128, 128), np.uint32), "float32")
    return dict(sorted((by_layer("conv", conv, layers) | by_layer("ssm", ssm, layers)).items()))


def row(name: str, **values: object) -> None:
    print(json.dumps({"benchmark": f"transfer.{name}"} | values), flush=True)


def transfers(name: str, device: DevicePool, host: HostPool) -> None:
    """Store and load every slot, in random order, to blocks in random order."""
    rng = np.random.default_rng(0)
    slots: Locations = rng.permutation(device.capacity)
    handles = host.alloc(device.capacity)
    nbytes = device.capacity * device.geometry.nbytes
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    with CopyEngine({device.name: device}, {host.name: host}) as engine:
        store = [CacheTransferUnits(device.name, slots, handles)]
        load = [CacheTransferUnits(device.name, handles, slots)]
        describe = partial(
            build_descriptors,
            device.segments, slots, host.blocks(handles), host.arena.block_bytes, host.arena.address,
        )  # fmt: skip
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes),
            "store": lambda: engine.store(store).wait(),
            "load": lambda: engine.load(load).wait(),
            "build": describe,
        }
        seconds = medians([Side(name, lambda _, run=run: run()) for name, run in ways.items()], ROUNDS)
    rates = {f"{name}_gb_s": round(nbytes / seconds[name] / 1e9, 2) for name in ("store", "load", "memcpy")}
    row(
        name, objects=device.capacity, mib=nbytes >> 20, copies=len(describe()), **rates,
        build_ms=round(seconds["build"] * 1e3, 2),
    )  # fmt: skip
    host.free(handles)


def arena_ready() -> None:
    """How long 1 GiB takes from nothing to faulted in."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        arena = HostArena(1 << 30, BLOCK_BYTES)
        times.append(time.perf_counter() - start)
        report = arena.report
        arena.close()
    row("arena_ready", gib=1, seconds=round(statistics.median(times), 3), report=report)


def main() -> None:
    arena_ready()
    pages, states = page_tensors(), state_tensors()
    page_geometry, state_geometry = page_geometry_of(pages, PAGE_SIZE), state_geometry_of(states, PAGE_SIZE)
    per_state = -(-state_geometry.nbytes // BLOCK_BYTES)
    arena = HostArena((PAGES + STATES * per_state) * BLOCK_BYTES, BLOCK_BYTES)
    blocks = arena.alloc(arena.blocks)
    arena.free(np.random.default_rng(1).permutation(blocks))
    transfers(
        "qwen3_next_pages", DevicePool.from_tensors(page_geometry, pages), HostPool(page_geometry, arena)
    )
    transfers(
        "qwen3_next_states", DevicePool.from_tensors(state_geometry, states), HostPool(state_geometry, arena)
    )
    arena.close()


if __name__ == "__main__":
    main()
