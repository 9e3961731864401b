"""Tests that need a real device: large objects and pools, no memory left, and a lost context."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.transfer.machines import Real
from tests.transfer.rigs import SLOTS, Kind, Passed
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import TransferError
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.transfer import engine_for
from tiercache.transfer.cuda import CudaEngine, CupyDevice, Method
from tiercache.transfer.cuda.engine import self_test

pytestmark = pytest.mark.gpu


@pytest.fixture
def machine() -> Real:
    return Real()


def there_and_back(machine: Real, kind: Kind, name: PoolName, method: Method | None, count: int = 3) -> None:
    """Store some slots, load them into others, and compare everything."""
    block = min(1 << 21, -(-kind.geometry.nbytes // 4096) * 4096)
    arena = HostArena(count * -(-kind.geometry.nbytes // block) * block, block)
    device, host = DevicePool.from_tensors(kind.geometry, kind.tensors), HostPool(kind.geometry, arena)
    rng = np.random.default_rng(0)
    sources, targets, handles = (
        rng.permutation(SLOTS)[:count],
        rng.permutation(SLOTS)[:count],
        host.alloc(count),
    )
    with machine.engine({name: device}, {name: host}, method=method) as engine:
        stored = engine.store([CacheTransferUnits(name, sources, handles)])
        assert stored.wait(60)
        assert stored.error is None
        loaded = engine.load([CacheTransferUnits(name, handles, targets)])
        stream = machine.stream()
        assert all(loaded.wait_layer(layer, 60, stream=stream.handle) for layer in loaded.layers)
        stream.event().synchronize()
        kind.move(sources.tolist(), targets.tolist())
        assert kind.agrees()
        assert loaded.wait(60)
        assert loaded.error is None
    arena.close()


@pytest.mark.parametrize("method", [None, *Method])
@pytest.mark.parametrize("page", [16, 64, 256])
def test_pages_of_every_size(machine: Real, method: Method | None, page: int) -> None:
    shapes = {(layer, name): ((SLOTS * page, 2, 256), "bfloat16") for layer in range(12) for name in "kv"}
    there_and_back(
        machine, Kind.make(machine, np.random.default_rng(page), shapes, page), PoolName.KV, method
    )


@pytest.mark.parametrize("method", [None, *Method])
@pytest.mark.parametrize("nbytes", [1 << 10, 123_457, 16 << 20, 80 << 20])
def test_states_of_every_size(machine: Real, method: Method | None, nbytes: int) -> None:
    layers = 4
    shapes = {(layer, "ssm"): ((SLOTS, nbytes // layers - 8), "uint8") for layer in range(layers)}
    shapes |= {(layer, "conv"): ((SLOTS, 8), "uint8") for layer in range(layers)}
    there_and_back(machine, Kind.make(machine, np.random.default_rng(1), shapes, 64), PoolName.MAMBA, method)


@pytest.mark.parametrize("method", Method)
def test_slots_beyond_four_gib(machine: Real, method: Method) -> None:
    shapes = {(0, "ssm"): ((SLOTS, 1 << 30), "uint8")}
    there_and_back(
        machine, Kind.make(machine, np.random.default_rng(2), shapes, 64), PoolName.MAMBA, method, count=2
    )


def test_without_device_memory_the_engine_does_not_start_and_later_does(machine: Real) -> None:
    import cupy

    shapes = {(layer, "k"): ((SLOTS * 16, 1, 16), "bfloat16") for layer in range(2)}
    kind = Kind.make(machine, np.random.default_rng(3), shapes, 16)
    arena = HostArena(1 << 20, 4096)
    device, host = DevicePool.from_tensors(kind.geometry, kind.tensors), HostPool(kind.geometry, arena)
    taken, size = [], 1 << 34
    while size >= 1 << 20:  # all there is, in smaller and smaller pieces
        try:
            taken.append(cupy.cuda.runtime.malloc(size))
        except RuntimeError:
            size //= 2
    with pytest.raises(TransferError, match=r"could not start on .*MemoryAllocation"):
        machine.engine({PoolName.KV: device}, {PoolName.KV: host}, method=Method.KERNEL)
    for address in taken:
        cupy.cuda.runtime.free(address)
    with machine.engine({PoolName.KV: device}, {PoolName.KV: host}, method=Method.KERNEL) as engine:
        ticket = engine.store([CacheTransferUnits(PoolName.KV, np.array([0]), host.alloc(1))])
        assert ticket.wait(60)
        assert ticket.error is None
    arena.close()


def test_a_lost_context_fails_tickets_and_not_the_process() -> None:
    """In a process of its own, for its context is of no use afterwards."""
    Real()
    script = textwrap.dedent("""
        import numpy as np, torch
        import cupy
        from tiercache.core import CacheTransferUnits, PoolName
        from tiercache.pools import DevicePool, HostArena, HostPool, state_geometry_of
        from tiercache.transfer.cuda import CudaEngine, Method

        tensors = {(0, "ssm"): torch.ones(4, 1 << 20, device="cuda:0")}
        geometry = state_geometry_of(tensors, 64)
        arena = HostArena(16 << 20, 1 << 20)
        device, host = DevicePool.from_tensors(geometry, tensors), HostPool(geometry, arena)
        pools, hosts = {PoolName.MAMBA: device}, {PoolName.MAMBA: host}
        engine = CudaEngine(pools, hosts, choose=lambda copies: Method.BATCH)
        units = [CacheTransferUnits(PoolName.MAMBA, np.array([0]), host.alloc(1))]
        assert engine.store(units).wait(30)
        bad = cupy.RawKernel('extern "C" __global__ void bad(char* p) { *p = 1; }', "bad")
        bad((1,), (1,), (np.uint64(8),))
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print("lost:", str(error).splitlines()[0])
        back = CacheTransferUnits(PoolName.MAMBA, units[0].destinations, np.array([1]))
        tickets = [engine.store(units), engine.load([back])]
        assert all(t.wait(30) for t in tickets)
        assert all(t.error is not None for t in tickets), [t.error for t in tickets]
        engine.close(10)
        print("alive:", tickets[0].error)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False
    )
    assert "alive: a store failed" in done.stdout, done.stdout + done.stderr[-4000:]


@pytest.fixture
def device() -> Iterator[CupyDevice]:
    Real()
    device = CupyDevice(0)
    with device.current():
        yield device


def test_every_method_is_there(device: CupyDevice) -> None:
    self_test(device)
    assert device.unavailable == {}, "this machine's driver and CuPy should offer all methods"


def test_pools_on_a_device_get_the_cuda_engine(machine: Real) -> None:
    shapes = {(0, "k"): ((SLOTS * 16, 1, 16), "bfloat16")}
    kind = Kind.make(machine, np.random.default_rng(4), shapes, 16)
    arena = HostArena(1 << 20, 4096)
    with engine_for(
        {PoolName.KV: DevicePool.from_tensors(kind.geometry, kind.tensors)},
        {PoolName.KV: HostPool(kind.geometry, arena)},
    ) as engine:
        assert isinstance(engine, CudaEngine)
        assert "page-locked" in engine.report
    arena.close()


def test_a_graph_can_be_captured_while_copies_run(machine: Real) -> None:
    """In torch's own mode, in which a careless call on any thread spoils the capture."""
    import torch

    shapes = {(0, "ssm"): ((SLOTS, 32 << 20), "uint8")}
    kind = Kind.make(machine, np.random.default_rng(5), shapes, 64)
    arena = HostArena(256 << 20, 1 << 21)
    device, host = DevicePool.from_tensors(kind.geometry, kind.tensors), HostPool(kind.geometry, arena)
    x = torch.randn(512, 512, device="cuda:0")
    (x @ x).sum().item()
    with machine.engine({PoolName.MAMBA: device}, {PoolName.MAMBA: host}) as engine:
        handles = host.alloc(SLOTS)
        tickets = [engine.store([CacheTransferUnits(PoolName.MAMBA, np.arange(SLOTS), handles)])]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for _ in range(200):
                y = y @ x
            tickets.append(engine.load([CacheTransferUnits(PoolName.MAMBA, handles, np.arange(SLOTS))]))
            tickets[0].wait(30)
        graph.replay()
        assert all(t.wait(30) and t.error is None for t in tickets)
    assert kind.agrees()
    arena.close()


def test_the_drivers_current_context_is_the_runtimes_device(device: CupyDevice) -> None:
    """The engine's context is the runtime's device too, on this thread and on one new to a device."""
    runtime, found = pytest.importorskip("cupy").cuda.runtime, []

    def work() -> None:
        with device.current():
            found.append(runtime.getDevice())
            device.destroy_event(device.create_event())
        device.activate()
        found.append(runtime.getDevice())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == [device.ordinal] * 2
    assert runtime.getDevice() == device.ordinal


def test_an_engine_for_the_second_device_leaves_the_first_alone() -> None:
    """In a process of its own, in which nothing has used the first one."""
    Real()
    script = textwrap.dedent("""
        import threading
        import numpy as np, torch
        from tiercache.core import CacheTransferUnits, PoolName
        from tiercache.pools import DevicePool, HostArena, HostPool, state_geometry_of
        from tiercache.transfer.cuda import CudaEngine

        if torch.cuda.device_count() < 2:
            raise SystemExit("there is one device")
        tensors = {(0, "ssm"): torch.ones(4, 1 << 20, device="cuda:1")}
        geometry = state_geometry_of(tensors, 64)
        arena = HostArena(16 << 20, 1 << 20)
        device, host = DevicePool.from_tensors(geometry, tensors), HostPool(geometry, arena)

        def work():
            with CudaEngine({PoolName.MAMBA: device}, {PoolName.MAMBA: host}) as engine:
                handles = host.alloc(1)
                assert engine.store([CacheTransferUnits(PoolName.MAMBA, np.array([0]), handles)]).wait(30)
                units = CacheTransferUnits(PoolName.MAMBA, handles, np.array([1]))
                assert engine.load([units]).wait_layer(0, 30)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print("contexts:", [torch._C._cuda_hasPrimaryContext(n) for n in range(2)])
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False
    )
    if "there is one device" in done.stderr:
        pytest.skip("there is one device")
    assert "contexts: [False, True]" in done.stdout, done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("method", Method)
def test_thousands_of_copies_behind_a_fence(machine: Real, method: Method) -> None:
    shapes = {(0, "k"): ((SLOTS * 256, 7200, 2), "bfloat16")}
    kind = Kind.make(machine, np.random.default_rng(6), shapes, 256)
    arena = HostArena(2 * SLOTS * 1800 * 4096, 4096)
    arena.free(arena.alloc(arena.blocks)[::2])  # no two of them are adjacent
    device, host = DevicePool.from_tensors(kind.geometry, kind.tensors), HostPool(kind.geometry, arena)
    slots, handles, stream = np.arange(SLOTS), host.alloc(SLOTS), machine.stream()
    with machine.engine({PoolName.KV: device}, {PoolName.KV: host}, method=method) as engine:
        stream.sleep(0.3)
        stored = engine.store([CacheTransferUnits(PoolName.KV, slots, handles)], after=[stream.event()])
        loaded = engine.load(
            [CacheTransferUnits(PoolName.KV, handles, slots[::-1].copy())],
            after=[Passed(lambda: stored.wait(60))],
        )
        assert all(t.wait(60) and t.error is None for t in (stored, loaded))
    kind.move(slots.tolist(), slots[::-1].tolist())
    assert kind.agrees()
    arena.close()
