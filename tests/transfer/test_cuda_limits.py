"""Limits of a driver: copies in a batch, calls in a stream, page-locked memory, adjacent allocations."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.pools.tensors import ArrayTensor
from tests.transfer.machines import Simulated
from tests.transfer.rigs import SLOTS, Kind, Passed, Rig, rig_on
from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import ConfigError
from tiercache.pools import DevicePool, HostArena, HostPool, state_geometry_of
from tiercache.transfer.cuda import Method
from tiercache.transfer.descriptors import Descriptors

ALL = list(range(SLOTS))
OURS = {"streams", "events"}
"""Kinds of leftovers that the tests themselves created and keep."""


@pytest.fixture(params=[1, 4])
def many(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A pool whose slots are 10,800 blocks apart from each other, a copy each, in one layer or in four."""
    machine = Simulated()
    shapes = {
        (layer, "k"): ((SLOTS * 256, 7200 // request.param, 2), "bfloat16") for layer in range(request.param)
    }
    kind = Kind.make(machine, np.random.default_rng(3), shapes, 256)
    arena = HostArena(2 * SLOTS * 1800 * 4096, 4096)
    arena.free(arena.alloc(arena.blocks)[::2])  # no two of them are adjacent
    yield Rig.make(machine, kind, arena)
    arena.close()


class TestManyCopies:
    """Counted by the simulated device, which refuses a batch that is too long for it or its stream."""

    @pytest.mark.parametrize("method", Method)
    def test_there_and_back_behind_a_fence(self, many: Rig, method: Method) -> None:
        with many.engine(method=method, group_bytes=1 << 30) as engine:
            handles, stream = many.host.alloc(SLOTS).tolist(), many.machine.stream()
            stream.sleep(0.2)
            stored = engine.store(many.units(ALL, handles), after=[stream.event()])
            loaded = engine.load(many.units(handles, ALL[::-1]), after=[Passed(lambda: stored.wait(30))])
            compute = many.machine.stream()
            assert all(loaded.wait_layer(layer, 30, stream=compute.handle) for layer in loaded.layers)
            compute.event().synchronize()
            many.kind.move(ALL, ALL[::-1])
            assert many.kind.agrees()
            assert all(t.wait(30) and t.error is None for t in (stored, loaded))

    @pytest.mark.parametrize("to_host", [True, False])
    def test_a_later_call_of_a_batch_fails_as_the_first_does(self, many: Rig, to_host: bool) -> None:
        device: SimulatedDevice = many.machine.device  # type: ignore[attr-defined]
        with many.engine(method=Method.BATCH, group_bytes=1 << 30) as engine:
            handles, before = many.host.alloc(SLOTS).tolist(), many.machine.stream()
            stored = engine.store(many.units(ALL, handles))
            assert stored.wait(30)
            before.sleep(0.2)
            device.fail("copy_batch", at=2)
            units = many.units(ALL, handles) if to_host else many.units(handles, ALL)
            failed = (engine.store if to_host else engine.load)(units, after=[before.event()])
            assert not failed.wait(0.05), "what the first call queued is still under way"
            assert failed.wait(30)
            assert "copy_batch was refused" in str(failed.error)
            again = engine.load(many.units(handles, ALL))
            assert again.wait(30)
            assert again.error is None
            assert many.kind.agrees()
        assert device.leftovers.keys() <= OURS

    @pytest.mark.parametrize("method", Method)
    def test_many_transfers_behind_one_fence(self, method: Method) -> None:
        machine = Simulated()
        rig, gate = rig_on(machine), threading.Event()
        with rig.engine(method=method) as engine:
            handle, stream = rig.stored(engine, 0), machine.stream()
            machine.device.run(stream.handle, lambda: gate.wait(30))
            fence = stream.event()
            tickets = [engine.load(rig.units([handle], [1 + n % 5]), after=[fence] * 40) for n in range(60)]
            assert not tickets[0].wait(0.1)
            gate.set()
            assert all(t.wait(30) and t.error is None for t in tickets)
        assert machine.device.leftovers.keys() <= OURS
        rig.arena.close()


class TestRegisteredMemory:
    @pytest.mark.parametrize("fault", ["registered", "boundary"])
    def test_a_batch_that_fails_only_there_is_not_used(self, fault: str) -> None:
        class Picky(SimulatedDevice):
            """Its batches are wrong on registered memory: all of it, or where a piece begins."""

            def copy_batch(self, copies: Descriptors, stream: int) -> None:
                pieces = self.memory.pieces("locked")
                for ends in (copies.source, copies.destination):
                    at = ends.astype(np.int64)
                    if fault == "registered":
                        wrong = np.any([(start <= at) & (at < end) for start, end in pieces], axis=0)
                    else:
                        wrong = np.isin(at, [start for start, _ in pieces])
                    copies = replace(
                        copies, length=np.where(wrong, np.maximum(1, copies.length // 2), copies.length)
                    )
                super().copy_batch(copies, stream)

        machine = Simulated()
        machine.device = Picky()
        rig = rig_on(machine)
        with rig.engine(piece_bytes=8192) as engine:
            assert "no batch" in engine.report
            assert "bytes were wrong in a trial" in engine.report
            rig.stored(engine, 0)
        rig.arena.close()

    def test_a_device_for_which_nothing_is_page_locked(self) -> None:
        machine = Simulated()
        machine.device.fail("lock")
        with pytest.raises(
            ConfigError, match=r"cannot be used: not even 4 MiB are page-locked for it \(lock was refused\)"
        ):
            rig_on(machine).engine()
        gc.collect()
        assert machine.device.leftovers == {}


class TestAllocationsSideBySide:
    """Memory of two allocations that begin where the other one ends: the driver copies within one."""

    @pytest.mark.parametrize("method", Method)
    @pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
    def test_no_copy_goes_from_one_to_the_next(self, method: Method, order: tuple[str, str]) -> None:
        machine, width = Simulated(), 2048
        whole = np.random.default_rng(0).integers(0, 256, (2 * SLOTS, width), np.uint8)
        memory = {name: whole[n * SLOTS : (n + 1) * SLOTS] for n, name in enumerate(order)}
        for half in memory.values():  # one array stands for two allocations
            machine.device.adopt_at(half.ctypes.data, half.nbytes)
        tensors = {(0, name): ArrayTensor(memory[name], "uint8", "cuda:0") for name in ("a", "b")}
        geometry = state_geometry_of(tensors, 64)
        arena = HostArena(SLOTS * geometry.nbytes, 4096)
        device, host = DevicePool.from_tensors(geometry, tensors), HostPool(geometry, arena)
        before, handles = whole.copy(), host.alloc(SLOTS)
        slots = np.array([SLOTS - 1, 0, *range(1, SLOTS - 1)])
        with machine.engine({PoolName.MAMBA: device}, {PoolName.MAMBA: host}, method=method) as engine:
            stored = engine.store([CacheTransferUnits(PoolName.MAMBA, slots, handles)])
            assert stored.wait(30)
            assert stored.error is None
            whole[:] = 0
            loaded = engine.load([CacheTransferUnits(PoolName.MAMBA, handles, slots)])
            assert loaded.wait(30)
            assert loaded.error is None
        assert (whole == before).all()
        arena.close()

    def test_within_one_they_are_still_one_copy(self) -> None:
        array = np.zeros((SLOTS, 4096), np.uint8)
        halves = {
            (0, "a"): ArrayTensor(array[:, :1024], "uint8"),
            (0, "b"): ArrayTensor(array[:, 1024:], "uint8"),
        }
        pool = DevicePool.from_tensors(state_geometry_of(halves, 64), halves)
        assert pool.segments.allocation.tolist() == [0, 0]
        apart = {(0, "a"): ArrayTensor(array[:3], "uint8"), (0, "b"): ArrayTensor(array[3:], "uint8")}
        assert (
            len(
                set(DevicePool.from_tensors(state_geometry_of(apart, 64), apart).segments.allocation.tolist())
            )
            == 2
        )
