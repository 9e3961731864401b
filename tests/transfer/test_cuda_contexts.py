"""Calls reach the device that was meant, though contexts on others cost memory and end in errors."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.toolkit import build, needs_nvcc, on_a_thread
from tests.transfer.cupy_stand_in import stand_in
from tests.transfer.machines import Simulated, SimulatedStream, always
from tests.transfer.rigs import Rig, rig_on
from tests.transfer.simulated_cuda import SimulatedDevice, SimulatedDriver
from tests.transfer.simulated_memory import SimulatedError
from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.pools import DevicePool, HostPool
from tiercache.transfer.cuda import CudaEngine, CupyDevice, Method


def live(rig: Rig, make: Callable[[], CudaEngine], compute: SimulatedStream) -> None:
    """All that an engine is asked for, each on a thread of its own."""
    engine = on_a_thread(make)
    handle = int(rig.host.alloc(1)[0])

    def load() -> Any:
        ticket = engine.load(rig.units([handle], [3]), after=[compute.event()])
        assert ticket.wait_layer(1, 10)
        assert ticket.wait_layer(2, 10, stream=compute.handle)
        assert not ticket.wait_layer(5, 0.0) or ticket.wait_layer(5, 10)
        return ticket

    stored = on_a_thread(lambda: engine.store(rig.units([0], [handle])))
    on_a_thread(lambda: stored.wait(30))
    compute.sleep(0.02)
    loaded = on_a_thread(load)
    on_a_thread(lambda: engine.order([compute.event()], stream=compute.handle))
    on_a_thread(lambda: engine.order([compute.event()]))
    on_a_thread(engine.close)
    assert all(t.wait(30) and t.error is None for t in (stored, loaded))


class TestSimulated:
    @pytest.mark.parametrize("method", Method)
    def test_an_engine_for_one_device_touches_no_other(self, method: Method) -> None:
        driver = SimulatedDriver()
        SimulatedDevice(0, driver=driver)
        machine = Simulated(ordinal=1, driver=driver)
        rig = rig_on(machine)
        stream = machine.stream()
        assert isinstance(stream, SimulatedStream)
        live(rig, lambda: rig.engine(method=method), stream)
        assert driver.contexts == {1}
        rig.arena.close()

    def test_two_devices_side_by_side(self) -> None:
        driver = SimulatedDriver()
        machines = [Simulated(ordinal=n, driver=driver, jitter=0.0005) for n in range(2)]
        rigs = [rig_on(machine) for machine in machines]
        with rigs[0].engine() as first, rigs[1].engine() as second:
            handles = [rigs[0].stored(first, 2), rigs[1].stored(second, 2)]
            tickets = [
                e.load(r.units([h], [4])) for e, r, h in zip((first, second), rigs, handles, strict=True)
            ]
            assert all(t.wait_layer(layer, 10) for t in tickets for layer in (5, 1))
            assert all(t.wait(30) and t.error is None for t in tickets)
        for rig in rigs:
            rig.kind.move([2], [4])
            assert rig.kind.agrees()
            rig.arena.close()

    def test_the_simulation_counts_as_a_driver_would(self) -> None:
        driver = SimulatedDriver()
        devices = [SimulatedDevice(n, driver=driver) for n in range(2)]
        with devices[1].current():
            stream = devices[1].create_stream(urgent=False)
            event = devices[1].event(stream)
            with pytest.raises(SimulatedError, match="on a thread whose device is not cuda:0"):
                devices[0].create_event()
        assert driver.contexts == {1}
        with pytest.raises(SimulatedError, match="on a thread whose device is not cuda:1"):
            devices[1].has_passed(event.cuda_event)
        assert driver.contexts == {0, 1}

    def test_pools_of_another_device_are_refused(self) -> None:
        rig = rig_on(Simulated(ordinal=1))
        with pytest.raises(ConfigError, match="the pools are on cuda:1 and `device` is cuda:0"):
            CudaEngine({PoolName.KV: rig.device}, {PoolName.KV: rig.host}, device=SimulatedDevice(0))
        rig.arena.close()


class Cupy(Simulated):
    """`CupyDevice` for device 1 of two, over the stand-ins for CuPy and the driver."""

    def __init__(self, folder: Path) -> None:
        shared = SimulatedDriver()
        self.devices = [SimulatedDevice(n, driver=shared) for n in range(2)]
        super().__init__()
        self.device = self.devices[1]
        # Without batches: those of the stand-in wait for no stream.
        self.library = build(folder, "VERSION=12060")
        self.driver = ctypes.CDLL(str(self.library))
        self.cupy = stand_in(self.driver, self.devices)

    def engine(
        self, devices: Mapping[PoolName, DevicePool], hosts: Mapping[PoolName, HostPool], **settings: Any
    ) -> CudaEngine:
        device = CupyDevice(1, cupy=self.cupy, library=str(self.library))
        return CudaEngine(devices, hosts, device=device, choose=always(Method.MEMCPY), **settings)


@needs_nvcc
class TestCupyDevice:
    def test_the_whole_engine(self, tmp_path: Path) -> None:
        machine = Cupy(tmp_path)
        rig = rig_on(machine)
        stream = machine.stream()
        assert isinstance(stream, SimulatedStream)
        live(rig, lambda: rig.engine(piece_bytes=8192), stream)
        rig.kind.move([0], [3])
        assert rig.kind.agrees()
        gc.collect()
        on_a_thread(gc.collect)
        assert machine.driver.stand_in_contexts(1) > 0
        assert machine.driver.stand_in_contexts(0) == 0, "hundreds of MiB on a device that nobody asked for"
        assert machine.driver.stand_in_strict_calls() == 0, "each would spoil another thread's capture"
        assert machine.driver.stand_in_depth() == 0, "this thread has what it had before"
        rig.arena.close()

    def test_a_thread_that_uses_another_device_keeps_it(self, tmp_path: Path) -> None:
        machine = Cupy(tmp_path)
        rig = rig_on(machine)

        def work() -> None:
            machine.driver.stand_in_set_device(0)
            with rig.engine() as engine:
                handle = rig.stored(engine, 0)
                assert engine.load(rig.units([handle], [1])).wait_layer(5, 10)
                assert machine.driver.stand_in_get_device() == 0
            assert not machine.driver.stand_in_relaxed()

        on_a_thread(work)
        rig.arena.close()

    def test_memory_is_freed_on_whichever_thread(self, tmp_path: Path) -> None:
        machine = Cupy(tmp_path)
        device = CupyDevice(1, cupy=machine.cupy, library=str(machine.library))
        held = []
        with device.current():
            held.append(device.allocate_host(4096)[100:200])
        gc.collect()
        assert len(machine.cupy.cuda.runtime.host_memory) == 1
        on_a_thread(held.clear)
        gc.collect()
        assert machine.cupy.cuda.runtime.host_memory == {}
        assert machine.driver.stand_in_contexts(0) == 0

    def test_a_call_before_entering_is_refused(self, tmp_path: Path) -> None:
        machine = Cupy(tmp_path)
        device = CupyDevice(1, cupy=machine.cupy, library=str(machine.library))
        with pytest.raises(RuntimeError, match="cuda:1 is used on a thread that has not entered it"):
            device.create_event()
        assert machine.driver.stand_in_contexts(0) == 0

    def test_a_missing_card_is_named(self, tmp_path: Path) -> None:
        machine = Cupy(tmp_path)
        with pytest.raises(ConfigError, match="there is no device cuda:2, this process sees 2"):
            CupyDevice(2, cupy=machine.cupy, library=str(machine.library))
        with pytest.raises(
            ConfigError, match=r"device cuda:1 cannot be used: the CUDA driver cannot be loaded.*nvidia-smi"
        ):
            CupyDevice(1, cupy=machine.cupy, library="libno-such-driver.so.1")

    def test_a_device_that_has_page_locked_memory_at_other_addresses_is_refused(self, tmp_path: Path) -> None:
        machine = Cupy(tmp_path)
        library = build(tmp_path, "SAME_ADDRESS=0")
        with pytest.raises(ConfigError, match="cuda:1 has page-locked memory at addresses of its own"):
            CupyDevice(1, cupy=machine.cupy, library=str(library))
