"""The CUDA engine where the driver refuses or the device is lost: nothing hangs, and nothing is left."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from tests.transfer.machines import Simulated
from tests.transfer.rigs import SLOTS, Kind, Rig, pages, rig_on
from tests.transfer.simulated_cuda import SimulatedDevice
from tests.transfer.simulated_memory import SimulatedError
from tiercache.core import PoolName
from tiercache.errors import ConfigError, TransferError
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.transfer import engine_for
from tiercache.transfer.cuda import CudaEngine, CupyDevice, Method


class TestFailure:
    """The ticket fails, when the device is past what was queued for it; nothing else does."""

    @pytest.mark.parametrize(
        ("call", "method"),
        [("copy_batch", Method.BATCH), ("copy_table", Method.KERNEL), ("copy", Method.MEMCPY)],
    )
    def test_in_the_middle_of_a_load(self, simulated, call, method):
        rig, device = simulated
        with rig.engine(method=method) as engine:
            handle, before = rig.stored(engine, 0), rig.machine.stream()
            before.sleep(0.2)
            device.fail(call, at=3 if method is Method.MEMCPY else 2)
            ticket = engine.load(rig.units([handle], [3]), after=[before.event()])
            assert not ticket.wait(0.05), "layer 1 is still under way"
            assert ticket.wait(30)
            assert str(ticket.error) == f"a load failed in layer 2: {call} was refused"
            assert isinstance(ticket.error.__cause__, SimulatedError)
            for stream in (None, rig.machine.stream().handle):
                with pytest.raises(TransferError, match="layer 5 was not loaded: a load failed in layer 2"):
                    ticket.wait_layer(5, stream=stream)
            again = engine.load(rig.units([handle], [3]))
            assert again.wait(30)
            assert again.error is None
            rig.kind.move([0], [3])
            assert rig.kind.agrees()

    def test_in_a_store(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        with rig.engine(method=Method.BATCH) as engine:
            device.fail("copy_batch")
            ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()))
            assert ticket.wait(30)
            assert str(ticket.error) == "a store failed on its way: copy_batch was refused"
            rig.stored(engine, 1)

    def test_without_device_memory_for_a_larger_table(self) -> None:
        """A copy a block, so that there are more than a table holds at first."""
        machine = Simulated()
        shapes = {(0, "k"): ((SLOTS * 256, 1800, 4), "bfloat16")}
        kind = Kind.make(machine, np.random.default_rng(3), shapes, 256)
        arena = HostArena(2 * SLOTS * 1024 * 4096, 4096)
        arena.free(arena.alloc(arena.blocks)[::2])  # no two of them are adjacent
        rig = Rig.make(machine, kind, arena)
        all_slots = list(range(SLOTS))
        handles = rig.host.alloc(SLOTS).tolist()
        with rig.engine(method=Method.KERNEL) as engine:
            machine.device.fail("allocate", error=MemoryError("out of memory"))
            ticket = engine.store(rig.units(all_slots, handles))
            assert ticket.wait(30)
            assert "out of memory" in str(ticket.error)
            for _ in range(4):
                again = engine.store(rig.units(all_slots, handles))
                assert again.wait(30)
                assert again.error is None
        assert [rig.held(h) for h in handles] == [kind.slot(s) for s in all_slots]
        assert machine.device.leftovers == {}
        arena.close()

    def test_when_the_device_is_lost(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        with rig.engine() as engine:
            handle, before = rig.stored(engine, 0), rig.machine.stream()
            before.sleep(0.1)
            tickets = [
                engine.load(rig.units([handle], [slot]), after=[before.event()] if slot == 1 else [])
                for slot in range(1, 6)
            ]
            tickets.append(engine.store(rig.units([0], rig.host.alloc(1).tolist())))
            device.lose()
            assert all(t.wait(30) for t in tickets)
            assert all("the device is lost: an illegal address" in str(t.error) for t in tickets[:5])
            late = engine.load(rig.units([handle], [1]))
            assert late.wait(30)
            assert late.error is not None
            with pytest.raises(TransferError, match="layer 1 was not loaded"):
                late.wait_layer(1)

    def test_when_a_thread_cannot_have_the_device(self) -> None:
        """Nothing else is asked of the driver on that thread: another device would hear it."""
        machine = Simulated(ordinal=1)
        rig, device = rig_on(machine), machine.device
        with rig.engine(method=Method.BATCH) as engine:
            rig.stored(engine, 0)
        for _ in range(20):
            device.fail("activate")
        with rig.engine(method=Method.BATCH) as engine:
            tickets = [
                engine.store(rig.units([0], rig.host.alloc(1).tolist())),
                engine.load(rig.units(rig.host.alloc(1).tolist(), [1])),
            ]
            assert all(t.wait(30) for t in tickets)
            assert all(
                str(t.error).endswith("failed before its first layer: activate was refused") for t in tickets
            )
            assert device.forgive() > 0
            rig.stored(engine, 0)
        assert device.driver.contexts == {1}
        assert device.leftovers == {}
        rig.arena.close()


class TestTheEnd:
    def test_everything_goes_back(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        before = set(threading.enumerate())
        engine = rig.engine(piece_bytes=8192)
        tickets = [engine.store(rig.units([slot], rig.host.alloc(1).tolist())) for slot in range(4)]
        assert device.leftovers["locked"] == 32
        engine.close()
        assert all(t.done() and t.error is None for t in tickets)
        assert device.leftovers == {}
        assert {t for t in set(threading.enumerate()) - before if t.name.startswith("tiercache")} == set()

    def test_a_failed_start_leaves_nothing(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        device.fail("lock", at=5)
        with pytest.raises(
            ConfigError,
            match=(
                r"could not be page-locked for the device \(lock was refused\); make the host arena smaller"
            ),
        ):
            rig.engine(piece_bytes=8192)
        assert device.leftovers == {}
        rig.engine().close()


class TestTheStart:
    @pytest.mark.parametrize("call", ["allocate", "create_event"])
    def test_any_refusal_of_the_driver_ends_it_in_order(self, call: str) -> None:
        refused = 0
        for at in count(1):
            machine = Simulated()
            rig, device = rig_on(machine), machine.device
            device.fail(call, at=at)
            try:
                engine = rig.engine(piece_bytes=8192)
            except TransferError as error:
                assert (  # noqa: PT017
                    str(error) == f"the transfer engine could not start on {device.card}: {call} was refused"
                )
                refused += 1
            else:
                engine.close()
            rig.arena.close()
            gc.collect()
            assert device.leftovers == {}, (call, at)
            if device.forgive():
                break  # there are no more such calls in a start and an end
        assert refused >= 1

    def test_each_method_is_tried_with_bytes_of_its_own(self) -> None:
        class Lazy(SimulatedDevice):
            """Its kernel writes nothing, where an earlier trial may have left the same bytes."""

            def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
                if not self.calls["lazy"]:
                    self.calls["lazy"] += 1
                else:
                    super().copy_table(table, rows, chunks, blocks, stream)

        machine = Simulated()
        machine.device = Lazy()
        with rig_on(machine).engine(method=Method.BATCH) as engine:
            assert "no kernel" in engine.report

    def test_a_method_that_copies_wrong_is_not_used(self, caplog: pytest.LogCaptureFixture) -> None:
        class Forgetful(SimulatedDevice):
            """Its batches lose what does not fill 16 bytes."""

            def copy_batch(self, copies: Any, stream: int) -> None:
                short = replace(copies, length=copies.length - copies.length % 16)
                super().copy_batch(short[short.length > 0], stream)

        machine = Simulated()
        machine.device = Forgetful()
        rig = rig_on(machine)
        with rig.engine(method=Method.MEMCPY) as engine:
            assert "bytes were wrong in a trial" in engine.report
            assert "copies by batch are not used" in caplog.text

    def test_without_any_method_there_is_no_engine(self) -> None:
        machine = Simulated(unavailable=dict.fromkeys(Method, "not today"))
        with pytest.raises(ConfigError, match=r"no way to copy between .* works: not today"):
            rig_on(machine).engine()
        assert machine.device.leftovers == {}

    def test_pools_that_it_cannot_serve(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        with pytest.raises(ConfigError, match="the pools are on no device"):
            CudaEngine({}, {}, device=device)
        kind = pages(Simulated(), np.random.default_rng(0), [1], 16, 8)
        for tensor in kind.tensors.values():
            tensor.device = "cpu"
        pool, other = (
            DevicePool.from_tensors(kind.geometry, kind.tensors),
            HostPool(kind.geometry, HostArena(1 << 20, 4096)),
        )
        with pytest.raises(
            ConfigError, match="the pools are on cpu, cuda:0 and this transfer engine serves one CUDA device"
        ):
            CudaEngine(
                {PoolName.KV: rig.device, PoolName.MAMBA: pool},
                {PoolName.KV: rig.host, PoolName.MAMBA: other},
                device=device,
            )
        for tensor in kind.tensors.values():
            tensor.device = "cuda:0"
        pool = DevicePool.from_tensors(kind.geometry, kind.tensors)
        with pytest.raises(ConfigError, match="the host pools draw on several arenas"):
            CudaEngine(
                {PoolName.KV: rig.device, PoolName.MAMBA: pool},
                {PoolName.KV: rig.host, PoolName.MAMBA: other},
                device=device,
            )

    def test_without_cupy_or_a_card_it_says_what_to_do(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, _ = simulated
        try:
            CupyDevice(0)
        except ConfigError as error:
            # one of two
            assert "pip install 'tiercache-hybrid[cuda]'" in str(error) or "nvidia-smi" in str(error)  # noqa: PT017
            with pytest.raises(ConfigError, match="device cuda:0"):
                engine_for({PoolName.KV: rig.device}, {PoolName.KV: rig.host})
        with pytest.raises(ConfigError, match=r"device cuda:99|no device cuda:99"):
            CupyDevice(99)
