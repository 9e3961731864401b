"""The CUDA engine, on a simulated device and, with `-m gpu`, on a real one: the same bytes as the twin, and no race."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transfer.machines import Bytes, Machine, Real, Simulated, random_bytes
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import ClosedError, ConfigError, SlotError, TransferError
from tiercache.geometry import Geometry
from tiercache.pools import DevicePool, HostArena, HostPool, page_geometry_of, state_geometry_of
from tiercache.testing.cuda import SimulatedDevice, SimulatedError
from tiercache.transfer import engine_for
from tiercache.transfer.cuda import CudaEngine, CupyDevice, Method

SLOTS = 6
MACHINES = ["simulated", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return Simulated(jitter=0.0005) if request.param == "simulated" else Real()


@dataclass
class Kind:
    """The tensors of one pool, with a plain copy of their bytes."""

    machine: Machine
    tensors: dict[tuple[int, str], Any]
    geometry: Geometry
    twin: dict[tuple[int, str], Bytes]

    @classmethod
    def make(
        cls, machine: Machine, rng: np.random.Generator, shapes: dict[tuple[int, str], tuple[tuple[int, ...], str]], page: int
    ) -> Kind:
        twin = {at: random_bytes(rng, shape, dtype) for at, (shape, dtype) in shapes.items()}
        tensors = {at: machine.tensor(twin[at], shape, dtype) for at, (shape, dtype) in shapes.items()}
        is_page = all(shape[0] == SLOTS * page for shape, _ in shapes.values())
        geometry = page_geometry_of(tensors, page) if is_page else state_geometry_of(tensors, page)
        return cls(machine, tensors, geometry, twin)

    def slot(self, slot: int, layers: Sequence[int] | None = None) -> bytes:
        """The bytes of an object, by the plain copy."""
        parts = [twin.reshape(SLOTS, -1)[slot] for (layer, _), twin in self.twin.items() if layers is None or layer in layers]
        return b"".join(part.tobytes() for part in parts)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for twin in self.twin.values():
            rows = twin.reshape(SLOTS, -1)
            rows[list(targets)] = rows[list(sources)]

    def agrees(self) -> bool:
        return all(np.array_equal(self.machine.content(t), self.twin[at]) for at, t in self.tensors.items())


def pages(machine: Machine, rng: np.random.Generator, layers: Sequence[int], page: int, width: int, form: str = "kv") -> Kind:
    """As engines keep them: keys and values apart, packed, or one latent; by token. `fp8` has scales beside them."""
    dtype = "bfloat16" if width % 2 else "float32"
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "kv": {"k": ((2, width), dtype), "v": ((2, width + 1), dtype)},
        "packed": {"kv": ((2, 2, width), dtype)},
        "latent": {"latent": ((width,), dtype)},
        "fp8": {"k": ((2, width), "float8_e4m3fn"), "scale": ((2,), "float32"), "v": ((2, width), "float8_e4m3fn")},
    }[form]
    shapes = {(layer, name): ((SLOTS * page, *inner), kind) for layer in layers for name, (inner, kind) in tensors.items()}
    return Kind.make(machine, rng, shapes, page)


def states(machine: Machine, rng: np.random.Generator, layers: Sequence[int], width: int) -> Kind:
    shapes: dict[tuple[int, str], tuple[tuple[int, ...], str]] = {}
    for layer in layers:
        shapes |= {(layer, "conv"): ((SLOTS, width, 3), "bfloat16"), (layer, "ssm"): ((SLOTS, 3, width, 9), "float32")}
    shapes[layers[-1], "flags"] = ((SLOTS, 3), "uint8")
    return Kind.make(machine, rng, shapes, 64)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from([None, *Method]),
    form=st.sampled_from(["kv", "packed", "latent", "fp8"]),
    layers=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(sorted),
    state_layers=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(sorted),
    page=st.sampled_from([16, 64, 256]),
    width=st.integers(1, 130),
    block_bytes=st.sampled_from([4096, 8192, 65536]),
    blocks_a_piece=st.integers(1, 4),
    group_bytes=st.sampled_from([1, 10_000, 1 << 20]),
    data=st.data(),
)
def test_what_is_stored_is_loaded_into_other_slots(
    machine: Machine,
    method: Method | None,
    form: str,
    layers: list[int],
    state_layers: list[int],
    page: int,
    width: int,
    block_bytes: int,
    blocks_a_piece: int,
    group_bytes: int,
    data: st.DataObject,
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    kinds = {PoolName.KV: pages(machine, rng, layers, page, width, form), PoolName.MAMBA: states(machine, rng, state_layers, width)}
    arena = HostArena(sum(SLOTS * -(-kind.geometry.nbytes // block_bytes) for kind in kinds.values()) * block_bytes, block_bytes)
    everything = arena.alloc(arena.blocks)
    np.frombuffer(arena.hold(), np.uint8)[:] = 0xAA
    # Half in order, so that objects meet across the ends of page-locked pieces; half not.
    arena.free(everything if data.draw(st.booleans()) else rng.permutation(everything))
    devices = {name: DevicePool.from_tensors(kind.geometry, kind.tensors) for name, kind in kinds.items()}
    hosts = {name: HostPool(kind.geometry, arena) for name, kind in kinds.items()}
    sources = {name: data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True)) for name in kinds}
    targets = {name: data.draw(st.permutations(range(SLOTS)))[: len(s)] for name, s in sources.items()}
    handles = {name: hosts[name].alloc(len(s)) for name, s in sources.items()}
    with machine.engine(devices, hosts, method=method, piece_bytes=blocks_a_piece * block_bytes, group_bytes=group_bytes) as engine:
        stored = engine.store([CacheTransferUnits(name, np.array(sources[name], np.int64), handles[name]) for name in kinds])
        assert stored.wait(machine.patience)
        assert stored.error is None
        for name, kind in kinds.items():
            for slot, handle in zip(sources[name], handles[name].tolist(), strict=True):
                held = b"".join(hosts[name].buffers(handle))
                assert held[: kind.geometry.nbytes] == kind.slot(slot)
                assert set(held[kind.geometry.nbytes :]) <= {0xAA}, "nothing behind the payload is touched"
        assert all(kind.agrees() for kind in kinds.values())
        loaded = engine.load([CacheTransferUnits(name, handles[name], np.array(targets[name], np.int64)) for name in kinds])
        assert all(loaded.wait_layer(layer, machine.patience) for layer in range(10))
        assert loaded.wait(machine.patience)
        assert loaded.error is None
        for name, kind in kinds.items():
            kind.move(sources[name], targets[name])
            assert kind.agrees()
        left, right = rng.permutation(SLOTS)[:4].reshape(2, 2)
        engine.fork([CacheTransferUnits(PoolName.MAMBA, left, right)], stream=data.draw(st.sampled_from([0, machine.stream().handle])))
        kinds[PoolName.MAMBA].move(left.tolist(), right.tolist())
    assert kinds[PoolName.MAMBA].agrees()
    arena.close()


@dataclass
class Rig:
    machine: Machine
    kind: Kind
    device: DevicePool
    host: HostPool
    arena: HostArena

    def engine(self, **settings: Any) -> CudaEngine:
        return self.machine.engine({PoolName.KV: self.device}, {PoolName.KV: self.host}, **settings)

    def units(self, sources: Sequence[int], destinations: Sequence[int]) -> list[CacheTransferUnits]:
        return [CacheTransferUnits(PoolName.KV, np.array(sources, np.int64), np.array(destinations, np.int64))]

    def held(self, handle: int) -> bytes:
        return b"".join(self.host.buffers(handle))[: self.host.geometry.nbytes]

    def stored(self, engine: CudaEngine, slot: int) -> int:
        handle = int(self.host.alloc(1)[0])
        ticket = engine.store(self.units([slot], [handle]))
        assert ticket.wait(self.machine.patience)
        assert ticket.error is None
        return handle

    def rows(self, content: Bytes, slot: int) -> bytes:
        return content.reshape(SLOTS, -1)[slot].tobytes()


def rig_on(machine: Machine) -> Rig:
    kind = pages(machine, np.random.default_rng(1), [1, 2, 5], 16, 8)
    arena = HostArena(64 * 4096, 4096)
    return Rig(machine, kind, DevicePool.from_tensors(kind.geometry, kind.tensors), HostPool(kind.geometry, arena), arena)


@pytest.fixture
def rig(machine: Machine) -> Iterator[Rig]:
    rig = rig_on(machine)
    yield rig
    rig.arena.close()


@pytest.fixture
def simulated() -> Iterator[tuple[Rig, SimulatedDevice]]:
    machine = Simulated(jitter=0.0005)
    rig = rig_on(machine)
    yield rig, machine.device
    rig.arena.close()


class TestRaces:
    """Each with a control: without the fence the old bytes are seen, so that the slow kernel is slow enough to tell."""

    @pytest.mark.parametrize("method", Method)
    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_store_waits_for_the_writer(self, rig: Rig, method: Method, fenced: bool) -> None:
        with rig.engine(method=method) as engine:
            old, writer, key = rig.kind.slot(2), rig.machine.stream(), (1, "k")
            handle = rig.stored(engine, 2)
            new = np.full(rig.kind.twin[key].nbytes // SLOTS, 7, np.uint8)
            writer.sleep(rig.machine.late)
            writer.write(rig.kind.tensors[key], 2 * 16, new)
            ticket = engine.store(rig.units([2], [handle]), after=[writer.event()] if fenced else [])
            assert ticket.wait(rig.machine.patience)
            assert rig.held(handle) == (new.tobytes() + old[len(new) :] if fenced else old)
            writer.event().synchronize()

    @pytest.mark.parametrize("method", Method)
    @pytest.mark.parametrize("fenced", [True, False])
    def test_a_load_waits_for_the_reader_before_it(self, rig: Rig, method: Method, fenced: bool) -> None:
        with rig.engine(method=method) as engine:
            reader, key = rig.machine.stream(), (5, "v")
            handle = rig.stored(engine, 0)
            reader.sleep(rig.machine.late)
            seen = reader.read(rig.kind.tensors[key])
            ticket = engine.load(rig.units([handle], [3]), after=[reader.event()] if fenced else [])
            assert ticket.wait(rig.machine.patience)
            assert rig.rows(seen(), 3) == rig.rows(rig.kind.twin[key], 3 if fenced else 0)

    @pytest.mark.parametrize("method", Method)
    @pytest.mark.parametrize("waits", [True, False])
    def test_a_stream_waits_for_its_layer_and_the_thread_does_not(self, rig: Rig, method: Method, waits: bool) -> None:
        with rig.engine(method=method) as engine:
            compute, before, key = rig.machine.stream(), rig.machine.stream(), (2, "k")
            handle = rig.stored(engine, 0)
            before.sleep(rig.machine.late)
            ticket = engine.load(rig.units([handle], [3]), after=[before.event()])
            if waits:
                for layer in (0, 1, 2):
                    assert ticket.wait_layer(layer, rig.machine.patience, stream=compute.handle)
                assert not ticket.done()
            seen = compute.read(rig.kind.tensors[key])
            assert rig.rows(seen(), 3) == rig.rows(rig.kind.twin[key], 0 if waits else 3)
            assert ticket.wait(rig.machine.patience)

    @pytest.mark.parametrize("method", Method)
    def test_a_layer_is_computed_while_the_next_is_on_its_way(self, method: Method) -> None:
        """A model of six layers: each finds its own bytes, and those of the last layer not yet."""
        machine = Simulated(seconds=lambda method, nbytes, count: 0.01)
        kind = pages(machine, np.random.default_rng(2), range(6), 16, 8)
        arena = HostArena(64 * 4096, 4096)
        device, host = DevicePool.from_tensors(kind.geometry, kind.tensors), HostPool(kind.geometry, arena)
        rig = Rig(machine, kind, device, host, arena)
        with rig.engine(method=method) as engine:
            handle, compute = rig.stored(engine, 0), machine.stream()
            ticket = engine.load(rig.units([handle], [3]))
            own, last = [], []
            for layer in range(6):
                assert ticket.wait_layer(layer, 10, stream=compute.handle)
                own.append(compute.read(kind.tensors[layer, "k"]))
                last.append(compute.read(kind.tensors[5, "v"]))
            assert [rig.rows(seen(), 3) == rig.rows(kind.twin[layer, "k"], 0) for layer, seen in enumerate(own)] == [True] * 6
            assert [rig.rows(seen(), 3) == rig.rows(kind.twin[5, "v"], 0) for seen in last] == [False] * 5 + [True]
        arena.close()

    def test_a_fork_keeps_its_place_in_the_stream(self, rig: Rig) -> None:
        with rig.engine() as engine:
            stream, key = rig.machine.stream(), (1, "k")
            new = np.full(rig.kind.twin[key].nbytes // SLOTS, 7, np.uint8)
            stream.sleep(0.1)
            for turn in range(20):  # more than may be under way at once
                stream.write(rig.kind.tensors[key], 2 * 16, new + turn)
                engine.fork(rig.units([2], [4]), stream=stream.handle)
                seen = stream.read(rig.kind.tensors[key])
                stream.write(rig.kind.tensors[key], 2 * 16, new)
            assert rig.rows(seen(), 4) == (new + 19).tobytes()

    def test_a_fence_of_the_host_comes_first_too(self, rig: Rig) -> None:
        fence = threading.Event()
        with rig.engine() as engine:
            handle = rig.stored(engine, 0)
            ticket = engine.load(rig.units([handle], [1]), after=[fence.wait])
            assert not ticket.wait_layer(1, 0.02)
            assert not ticket.wait_layer(1, 0.02, stream=rig.machine.stream().handle)
            assert not ticket.done()
            fence.set()
            assert ticket.wait_layer(1, rig.machine.patience)
            failed = engine.load(rig.units([handle], [1]), after=[lambda: 1 / 0])
            assert failed.wait(rig.machine.patience)
            assert str(failed.error) == "a load failed before its first layer: division by zero"


def test_stores_and_loads_from_two_threads(rig: Rig) -> None:
    """Each thread moves its own slots around, many at once; every byte is where the plain copy says."""
    with rig.engine(piece_bytes=4096) as engine:
        errors: list[object] = []

        def move(mine: Sequence[int], seed: int) -> None:
            rng = np.random.default_rng(seed)
            handles = rig.host.alloc(3) if seed == 0 else other
            for _ in range(30):
                sources, targets = rng.permutation(mine), rng.permutation(mine)
                stored = engine.store(rig.units(sources.tolist(), handles.tolist()))
                stored.wait(rig.machine.patience)
                loaded = engine.load(rig.units(handles.tolist(), targets.tolist()))
                for layer in (5, 1, 2):
                    loaded.wait_layer(layer, rig.machine.patience)
                loaded.wait(rig.machine.patience)
                errors.extend(t.error for t in (stored, loaded) if t.error or not t.done())
                with lock:
                    rig.kind.move(sources.tolist(), targets.tolist())

        other, lock = rig.host.alloc(3), threading.Lock()
        threads = [threading.Thread(target=move, args=(mine, seed)) for seed, mine in enumerate(([0, 2, 4], [1, 3, 5]))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
    assert rig.kind.agrees()


def test_many_loads_share_three_sets_of_events(rig: Rig) -> None:
    with rig.engine() as engine:
        handle, compute = rig.stored(engine, 0), rig.machine.stream()
        first = rig.machine.stream()
        first.sleep(0.2)
        tickets = [engine.load(rig.units([handle], [1 + n % 5]), after=[first.event()] if n == 0 else []) for n in range(12)]
        for ticket in tickets:
            assert ticket.wait_layer(5, rig.machine.patience, stream=compute.handle)
        seen = compute.read(rig.kind.tensors[5, "v"])()
        assert all(rig.rows(seen, slot) == rig.rows(rig.kind.twin[5, "v"], 0) for slot in range(SLOTS))
        assert all(t.wait(rig.machine.patience) and t.error is None for t in tickets)
        assert all(t.wait_layer(5, 0) and t.wait_layer(1, 0, stream=compute.handle) for t in tickets)


class TestFailure:
    """The ticket fails, when the device is past what was queued for it; the process, the arena and the next transfer do not."""

    @pytest.mark.parametrize(("call", "method"), [("copy_batch", Method.BATCH), ("copy_table", Method.KERNEL), ("copy", Method.MEMCPY)])
    def test_in_the_middle_of_a_load(self, simulated: tuple[Rig, SimulatedDevice], call: str, method: Method) -> None:
        rig, device = simulated
        with rig.engine(method=method) as engine:
            handle, before = rig.stored(engine, 0), rig.machine.stream()
            before.sleep(0.2)
            device.fail(call, at=3 if method is Method.MEMCPY else 2)
            ticket = engine.load(rig.units([handle], [3]), after=[before.event()])
            assert not ticket.wait(0.05), "layer 1 is still under way"
            assert ticket.wait(5)
            assert str(ticket.error) == f"a load failed in layer 2: {call} was refused"
            assert isinstance(ticket.error.__cause__, SimulatedError)
            for stream in (None, rig.machine.stream().handle):
                with pytest.raises(TransferError, match="layer 5 was not loaded: a load failed in layer 2"):
                    ticket.wait_layer(5, stream=stream)
            again = engine.load(rig.units([handle], [3]))
            assert again.wait(5)
            assert again.error is None
            rig.kind.move([0], [3])
            assert rig.kind.agrees()

    def test_in_a_store_and_a_fork(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        with rig.engine(method=Method.BATCH) as engine:
            device.fail("copy_batch")
            ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()))
            assert ticket.wait(5)
            assert str(ticket.error) == "a store failed on its way: copy_batch was refused"
            device.fail("copy_table")
            with pytest.raises(TransferError, match="a fork failed: copy_table was refused"):
                engine.fork(rig.units([0], [1]))
            engine.fork(rig.units([0], [1]))
            rig.stored(engine, 1)

    def test_without_device_memory_for_a_larger_table(self) -> None:
        """A copy a block, so that there are more than a table holds at first."""
        machine = Simulated()
        shapes = {(0, "k"): ((SLOTS * 256, 1800, 4), "bfloat16")}
        kind = Kind.make(machine, np.random.default_rng(3), shapes, 256)
        arena = HostArena(SLOTS * 1024 * 4096, 4096)
        arena.free(np.random.default_rng(0).permutation(arena.alloc(arena.blocks)))
        rig = Rig(machine, kind, DevicePool.from_tensors(kind.geometry, kind.tensors), HostPool(kind.geometry, arena), arena)
        all_slots = list(range(SLOTS))
        handles = rig.host.alloc(SLOTS).tolist()
        with rig.engine(method=Method.KERNEL) as engine:
            machine.device.fail("allocate", error=MemoryError("out of memory"))
            ticket = engine.store(rig.units(all_slots, handles))
            assert ticket.wait(5)
            assert "out of memory" in str(ticket.error)
            for _ in range(4):
                again = engine.store(rig.units(all_slots, handles))
                assert again.wait(5)
                assert again.error is None
        assert [rig.held(h) for h in handles] == [kind.slot(s) for s in all_slots]
        assert machine.device.leftovers == {}
        arena.close()

    def test_when_the_device_is_lost(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        with rig.engine() as engine:
            handle, before = rig.stored(engine, 0), rig.machine.stream()
            before.sleep(0.1)
            tickets = [engine.load(rig.units([handle], [slot]), after=[before.event()] if slot == 1 else []) for slot in range(1, 6)]
            tickets.append(engine.store(rig.units([0], rig.host.alloc(1).tolist())))
            device.lose()
            assert all(t.wait(5) for t in tickets)
            assert all("the device is lost: an illegal address" in str(t.error) for t in tickets[:5])
            with pytest.raises(TransferError, match="is lost"):
                engine.fork(rig.units([0], [1]))
            late = engine.load(rig.units([handle], [1]))
            assert late.wait(5)
            assert late.error is not None
            with pytest.raises(TransferError, match="layer 1 was not loaded"):
                late.wait_layer(1)

    def test_when_a_thread_cannot_have_the_device(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        device.fail("activate")
        device.fail("activate")
        with rig.engine(method=Method.BATCH) as engine:
            tickets = [engine.store(rig.units([0], rig.host.alloc(1).tolist())), engine.load(rig.units(rig.host.alloc(1).tolist(), [1]))]
            assert all(t.wait(5) for t in tickets)
            assert any("without a current device" in str(t.error) for t in tickets)

    def test_wrong_numbers_are_refused_at_the_call(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, _ = simulated
        with rig.engine() as engine:
            (handle,) = rig.host.alloc(1).tolist()
            for slots, handles in [([SLOTS], [handle]), ([-1], [handle]), ([0], [handle + 1])]:
                with pytest.raises(SlotError):
                    engine.store(rig.units(slots, handles))
                with pytest.raises(SlotError):
                    engine.load(rig.units(handles, slots))
            with pytest.raises(SlotError):
                engine.fork(rig.units([0], [SLOTS]))

            class Unrecorded:
                cuda_event = 0

                def synchronize(self) -> None: ...

            with pytest.raises(ConfigError, match="never recorded; record it"):
                engine.store(rig.units([0], [handle]), after=[Unrecorded()])
            for nothing in ([], rig.units([], [])):
                ticket = engine.load(nothing)
                assert ticket.wait(5)
                assert (ticket.layers, ticket.error) == ((), None)
                engine.fork(nothing)


class TestTheEnd:
    def test_everything_goes_back(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        before = set(threading.enumerate())
        engine = rig.engine(piece_bytes=8192)
        tickets = [engine.store(rig.units([slot], rig.host.alloc(1).tolist())) for slot in range(4)]
        engine.fork(rig.units([0], [1]))
        assert device.leftovers["locked"] == 32
        engine.close()
        engine.close()
        assert all(t.done() and t.error is None for t in tickets)
        assert device.leftovers == {}
        assert {t for t in set(threading.enumerate()) - before if t.name.startswith("tiercache")} == set()
        for call in (engine.store, engine.load, engine.fork):
            with pytest.raises(ClosedError):
                call(rig.units([0], [0]) if call == engine.fork else rig.units([], []))

    def test_a_failed_start_leaves_nothing(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        device.fail("lock", at=5)
        with pytest.raises(ConfigError, match=r"could not be page-locked for the device \(lock was refused\); make the host arena smaller"):
            rig.engine(piece_bytes=8192)
        assert device.leftovers == {}
        rig.engine().close()

    def test_at_the_deadline_what_waits_is_failed(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        engine, fence = rig.engine(), threading.Event()
        handle = rig.stored(engine, 0)
        running = engine.load(rig.units([handle], [1]), after=[fence.wait])
        waiting = engine.load(rig.units([handle], [2]))
        engine.close(timeout=0.05)
        assert waiting.wait(0)
        assert "closed before this transfer began" in str(waiting.error)
        assert not running.done()
        fence.set()
        engine.close(timeout=5)
        assert running.wait(5)
        assert "the transfer engine was closed" in str(running.error)
        assert device.leftovers == {}

    def test_from_a_callback(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, device = simulated
        engine, closed = rig.engine(), threading.Event()
        ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()))
        ticket.add_done_callback(lambda t: (engine.close(), closed.set()))
        assert closed.wait(5)
        engine.close()
        assert device.leftovers == {}

    def test_memory_stays_mapped_and_locked_while_a_copy_runs(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, _ = simulated
        with rig.engine() as engine:
            handle, before = rig.stored(engine, 0), rig.machine.stream()
            before.sleep(0.1)
            ticket = engine.load(rig.units([handle], [3]), after=[before.event()])
            rig.arena.close()
            assert ticket.wait(5)
            assert ticket.error is None
        rig.kind.move([0], [3])
        assert rig.kind.agrees()


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
                assert str(error) == f"the transfer engine could not start on {device.card}: {call} was refused"  # noqa: PT017
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
            """Its kernel writes nothing to the device, where an earlier trial has left the same bytes, if they were the same."""

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
                short = copies.length - copies.length % 16
                kept = short > 0
                super().copy_batch(type(copies)(copies.source[kept], copies.destination[kept], short[kept]), stream)

        machine = Simulated()
        machine.device = Forgetful()
        rig = rig_on(machine)
        with rig.engine(method=Method.MEMCPY) as engine:
            assert "bytes were wrong in a trial" in engine.report
            assert "copies by batch are not used" in caplog.text
        with pytest.raises(ConfigError, match=r"copies by batch are not possible here: .* bytes were wrong"):
            rig.engine(method=Method.BATCH)

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
        pool, other = DevicePool.from_tensors(kind.geometry, kind.tensors), HostPool(kind.geometry, HostArena(1 << 20, 4096))
        with pytest.raises(ConfigError, match="the pools are on cpu, cuda:0 and this transfer engine serves one CUDA device"):
            CudaEngine({PoolName.KV: rig.device, PoolName.MAMBA: pool}, {PoolName.KV: rig.host, PoolName.MAMBA: other}, device=device)
        for tensor in kind.tensors.values():
            tensor.device = "cuda:0"
        pool = DevicePool.from_tensors(kind.geometry, kind.tensors)
        with pytest.raises(ConfigError, match="the host pools draw on several arenas"):
            CudaEngine({PoolName.KV: rig.device, PoolName.MAMBA: pool}, {PoolName.KV: rig.host, PoolName.MAMBA: other}, device=device)

    def test_without_cupy_or_a_card_it_says_what_to_do(self, simulated: tuple[Rig, SimulatedDevice]) -> None:
        rig, _ = simulated
        try:
            CupyDevice(0)
        except ConfigError as error:
            assert "pip install 'tiercache[cuda]'" in str(error) or "nvidia-smi" in str(error)  # noqa: PT017  one of two
            with pytest.raises(ConfigError, match="device cuda:0"):
                engine_for({PoolName.KV: rig.device}, {PoolName.KV: rig.host})
        with pytest.raises(ConfigError, match=r"device cuda:99|no device cuda:99"):
            CupyDevice(99)
