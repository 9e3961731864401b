"""CPU cost of the CUDA engine: `python -m tests.benchmarks.queueing`.

Prints one JSON line a row; needs no GPU. A device that does nothing takes the place of the card, so that only
Python is measured: the engine thread's call, and the time until the last copy is queued and the ticket is
done. Each row also gives the time that the same bytes take on a bus of 50 GB/s.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from tests.benchmarks.transfer import BLOCK_BYTES, PAGE_SIZE, page_tensors, state_tensors
from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.pools import DevicePool, HostArena, HostPool, page_geometry_of, state_geometry_of
from tiercache.transfer import Ticket
from tiercache.transfer.cuda import CudaEngine, Method
from tiercache.transfer.descriptors import Copies

ROUNDS = 200
BUS = 50e9


class Idle(SimulatedDevice):
    """Copies nothing once `idle` is set, and never waits; before that, the engine's self-test has to
    succeed.
    """

    idle = False

    def copy(self, source: int, destination: int, nbytes: int, stream: int) -> None:
        if not self.idle:
            super().copy(source, destination, nbytes, stream)

    def copy_batch(self, copies: Copies, stream: int) -> None:
        if not self.idle:
            super().copy_batch(copies, stream)

    def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        if not self.idle:
            super().copy_table(table, rows, chunks, blocks, stream)

    def record(self, event: int, stream: int) -> None:
        if not self.idle:
            super().record(event, stream)

    def synchronize_event(self, event: int) -> None:
        if not self.idle:
            super().synchronize_event(event)


def measure(
    name: str, method: Method, pages: int, states: int, nbytes: int, submit: Callable[[], Ticket]
) -> None:
    calls, ends = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        ticket = submit()
        calls.append(time.perf_counter() - started)
        ticket.wait()
        ends.append(time.perf_counter() - started)
    row = {
        "benchmark": f"queueing.{name}", "method": method, "pages": pages, "states": states,
        "mib": nbytes >> 20,
        "call_us": round(statistics.median(calls) * 1e6, 1),
        "done_us": round(statistics.median(ends) * 1e6, 1),
        "bus_us": round(nbytes / BUS * 1e6, 1),
    }  # fmt: skip
    print(json.dumps(row), flush=True)


def main() -> None:
    tensors = {PoolName.KV: page_tensors(), PoolName.MAMBA: state_tensors()}
    for kind in tensors.values():
        for tensor in kind.values():
            tensor.device = "cuda:0"  # type: ignore[attr-defined]
    geometries = {
        PoolName.KV: page_geometry_of(tensors[PoolName.KV], PAGE_SIZE),
        PoolName.MAMBA: state_geometry_of(tensors[PoolName.MAMBA], PAGE_SIZE),
    }
    devices = {name: DevicePool.from_tensors(g, tensors[name]) for name, g in geometries.items()}
    most = devices[PoolName.KV].capacity
    arena = HostArena(
        (most + -(-geometries[PoolName.MAMBA].nbytes // BLOCK_BYTES)) * BLOCK_BYTES, BLOCK_BYTES
    )
    arena.free(np.random.default_rng(1).permutation(arena.alloc(arena.blocks)))
    hosts = {name: HostPool(g, arena) for name, g in geometries.items()}
    handles = {PoolName.KV: hosts[PoolName.KV].alloc(most), PoolName.MAMBA: hosts[PoolName.MAMBA].alloc(1)}
    slots = np.random.default_rng(0).permutation(most)
    for method in (Method.BATCH, Method.KERNEL):
        device = Idle()
        with CudaEngine(devices, hosts, device=device, method=method) as engine:
            device.idle = True
            for pages, states in ((10, 0), (128, 0), (10, 1), (128, 1)):
                ends = {PoolName.KV: (handles[PoolName.KV][:pages], slots[:pages])}
                if states:
                    ends[PoolName.MAMBA] = (handles[PoolName.MAMBA], np.array([0]))
                up = [CacheTransferUnits(name, host, slot) for name, (host, slot) in ends.items()]
                down = [CacheTransferUnits(name, slot, host) for name, (host, slot) in ends.items()]
                nbytes = pages * geometries[PoolName.KV].nbytes + states * geometries[PoolName.MAMBA].nbytes
                measure("load", method, pages, states, nbytes, lambda units=up: engine.load(units))
                measure("store", method, pages, states, nbytes, lambda units=down: engine.store(units))
            device.idle = False
    arena.close()


if __name__ == "__main__":
    main()
