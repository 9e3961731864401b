"""The CUDA engine, simulated and, with `-m gpu`, real: the same bytes as the twin, and no race."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import example_count
from tests.transfer.machines import Machine, Simulated
from tests.transfer.rigs import SLOTS, Passed, Rig, pages, states
from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.transfer import CopyEngine
from tiercache.transfer.cuda import Method
from tiercache.transfer.cuda.copying import SMALL_COPY, best_method
from tiercache.transfer.descriptors import Descriptors


@settings(
    max_examples=example_count(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    method=st.sampled_from([None, *Method, "cpu"]),
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
    method: Method | str | None,
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
    machine = Simulated() if method == "cpu" else machine
    kinds = {
        PoolName.KV: pages(machine, rng, layers, page, width, form),
        PoolName.MAMBA: states(machine, rng, state_layers, width),
    }
    arena = HostArena(
        sum(SLOTS * -(-kind.geometry.nbytes // block_bytes) for kind in kinds.values()) * block_bytes,
        block_bytes,
    )
    everything = arena.alloc(arena.blocks)
    np.frombuffer(arena.hold(), np.uint8)[:] = 0xAA
    # Half in order, so that objects meet across the ends of page-locked pieces; half not.
    arena.free(everything if data.draw(st.booleans()) else rng.permutation(everything))
    for tensor in [tensor for kind in kinds.values() for tensor in kind.tensors.values()]:
        if method == "cpu":
            tensor.device = "cpu"
    devices = {name: DevicePool.from_tensors(kind.geometry, kind.tensors) for name, kind in kinds.items()}
    hosts = {name: HostPool(kind.geometry, arena) for name, kind in kinds.items()}
    sources = {name: data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True)) for name in kinds}
    targets = {name: data.draw(st.permutations(range(SLOTS)))[: len(s)] for name, s in sources.items()}
    handles = {name: hosts[name].alloc(len(s)) for name, s in sources.items()}
    pieces = {"piece_bytes": blocks_a_piece * block_bytes, "group_bytes": group_bytes}
    with (
        CopyEngine(devices, hosts)
        if method == "cpu"
        else machine.engine(devices, hosts, method=method, **pieces)
    ) as engine:
        stored = engine.store(
            [CacheTransferUnits(name, np.array(sources[name], np.int64), handles[name]) for name in kinds]
        )
        assert stored.wait(machine.patience)
        assert stored.error is None
        for name, kind in kinds.items():
            for slot, handle in zip(sources[name], handles[name].tolist(), strict=True):
                held = b"".join(hosts[name].buffers_of([handle])[0])
                assert held[: kind.geometry.nbytes] == kind.slot(slot)
                assert set(held[kind.geometry.nbytes :]) <= {0xAA}, "nothing behind the payload is touched"
        assert all(kind.agrees() for kind in kinds.values())
        loaded = engine.load(
            [CacheTransferUnits(name, handles[name], np.array(targets[name], np.int64)) for name in kinds]
        )
        assert all(loaded.wait_layer(layer, machine.patience) for layer in range(10))
        assert loaded.wait(machine.patience)
        assert loaded.error is None
        for name, kind in kinds.items():
            kind.move(sources[name], targets[name])
            assert kind.agrees()
    arena.close()


class TestRaces:
    """Each with a control: without the fence old bytes are seen, so the slow kernel is slow enough."""

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
    def test_a_stream_waits_for_its_layer_and_the_thread_does_not(self, rig, method, waits):
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
        rig = Rig.make(machine, kind, arena)
        with rig.engine(method=method) as engine:
            handle, compute = rig.stored(engine, 0), machine.stream()
            ticket = engine.load(rig.units([handle], [3]))
            own, last = [], []
            for layer in range(6):
                assert ticket.wait_layer(layer, 10, stream=compute.handle)
                own.append(compute.read(kind.tensors[layer, "k"]))
                last.append(compute.read(kind.tensors[5, "v"]))
            assert [
                rig.rows(seen(), 3) == rig.rows(kind.twin[layer, "k"], 0) for layer, seen in enumerate(own)
            ] == [True] * 6
            assert [rig.rows(seen(), 3) == rig.rows(kind.twin[5, "v"], 0) for seen in last] == [False] * 5 + [
                True
            ]
        arena.close()

    def test_a_fence_of_the_host_comes_first_too(self, rig: Rig) -> None:
        fence = threading.Event()
        with rig.engine() as engine:
            handle = rig.stored(engine, 0)
            ticket = engine.load(rig.units([handle], [1]), after=[Passed(fence.wait)])
            assert not ticket.wait_layer(1, 0.02)
            assert not ticket.wait_layer(1, 0.02, stream=rig.machine.stream().handle)
            assert not ticket.done()
            fence.set()
            assert ticket.wait_layer(1, rig.machine.patience)


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
        threads = [
            threading.Thread(target=move, args=(mine, seed))
            for seed, mine in enumerate(([0, 2, 4], [1, 3, 5]))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
    assert rig.kind.agrees()


def test_many_loads_share_the_sets_of_events(rig: Rig) -> None:
    with rig.engine() as engine:
        handle, compute = rig.stored(engine, 0), rig.machine.stream()
        first = rig.machine.stream()
        first.sleep(0.2)
        tickets = [
            engine.load(rig.units([handle], [1 + n % 5]), after=[first.event()] if n == 0 else [])
            for n in range(12)
        ]
        for ticket in tickets:
            assert ticket.wait_layer(5, rig.machine.patience, stream=compute.handle)
        seen = compute.read(rig.kind.tensors[5, "v"])()
        assert all(rig.rows(seen, slot) == rig.rows(rig.kind.twin[5, "v"], 0) for slot in range(SLOTS))
        assert all(t.wait(rig.machine.patience) and t.error is None for t in tickets)
        assert all(t.wait_layer(5, 0) and t.wait_layer(1, 0, stream=compute.handle) for t in tickets)


@pytest.mark.parametrize(
    ("length", "missing", "chosen"),
    [
        (SMALL_COPY - 1, (), Method.KERNEL),
        (SMALL_COPY, (), Method.BATCH),
        (4096, (Method.KERNEL,), Method.BATCH),
        (1 << 20, (Method.BATCH,), Method.KERNEL),
        (4096, (Method.BATCH, Method.KERNEL), Method.MEMCPY),
    ],
)
def test_the_kernel_makes_small_copies_and_batches_the_others(length, missing, chosen):
    device = SimulatedDevice(unavailable=dict.fromkeys(missing, "not here"))
    copies = Descriptors(*np.zeros((2, 3), np.uint64), np.full(3, length, np.int64), np.zeros(3, np.int64))
    assert best_method(device, copies) is chosen
