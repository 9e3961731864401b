from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiercache_kernels.reference import copy_segments

from tests.examples import example_count
from tests.pools.tensors import ArrayTensor, Twin, random_tensor, slot_bytes
from tests.transfer.rigs import Passed
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import ClosedError, ConfigError, GeometryError, SlotError, TransferError
from tiercache.geometry import Geometry
from tiercache.pools import DevicePool, HostArena, HostPool, by_layer, page_geometry_of, state_geometry_of
from tiercache.transfer import CopyEngine

Tensors = dict[tuple[int, str], ArrayTensor]
SLOTS = 6


def in_order(tensors: Tensors) -> Tensors:
    return dict(sorted(tensors.items(), key=lambda item: item[0][0]))


def page_tensors(
    rng: np.random.Generator, form: str, layers: Sequence[int], page: int, width: int, gap: int
) -> tuple[Tensors, Geometry]:
    dtype = "bfloat16" if width % 2 else "float32"
    shapes = {
        "kv": {"k": (SLOTS * page, 2, width), "v": (SLOTS * page, 2, width + 1)},
        "packed": {"kv": (SLOTS * page, 2, 2, width)},
        "paged": {"k": (SLOTS, page, 2, width), "v": (SLOTS, page, 2, width)},
        "latent": {"latent": (SLOTS * page, width)},
    }[form]
    gap = gap if form == "paged" else 0  # only whole slots may lie apart
    tensors = {
        (layer, name): random_tensor(rng, shape, dtype, gap=gap)
        for layer in layers
        for name, shape in shapes.items()
    }
    return tensors, page_geometry_of(tensors, page, paged=form == "paged")


def state_tensors(
    rng: np.random.Generator, layers: Sequence[int], width: int, gap: int
) -> tuple[Tensors, Geometry]:
    ssm = [random_tensor(rng, (SLOTS, 3, width, 9), "float32", gap=gap) for _ in layers]
    conv = ArrayTensor(rng.integers(0, 1 << 16, (len(layers), SLOTS, width, 3), np.uint16), "bfloat16")
    side = {
        (layers[-1], "flags"): random_tensor(rng, (SLOTS, 3), "uint8", gap=gap),
        (layers[0], "one"): random_tensor(rng, (SLOTS,), "uint8"),
    }
    tensors = in_order(by_layer("conv", conv, layers) | by_layer("ssm", ssm, layers) | side)
    return tensors, state_geometry_of(tensors, 64)


def scattered_arena(rng: np.random.Generator, block_bytes: int, blocks: int) -> HostArena:
    """An arena that hands its blocks out in random order, full of somebody else's bytes."""
    arena = HostArena(blocks * block_bytes, block_bytes)
    everything = arena.alloc(blocks)
    np.frombuffer(arena.hold(), np.uint8)[:] = 0xAA
    arena.free(rng.permutation(everything))
    return arena


@settings(max_examples=example_count(150), deadline=None)
@given(
    form=st.sampled_from(["kv", "packed", "paged", "latent"]),
    layers=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(sorted),
    state_layers=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(sorted),
    page=st.sampled_from([1, 4, 16]),
    width=st.integers(1, 130),
    gap=st.integers(0, 3),
    block_bytes=st.sampled_from([4096, 8192, 65536]),
    data=st.data(),
)
def test_what_is_stored_is_loaded_into_other_slots(
    form: str,
    layers: list[int],
    state_layers: list[int],
    page: int,
    width: int,
    gap: int,
    block_bytes: int,
    data: st.DataObject,
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    kinds = {
        PoolName.KV: page_tensors(rng, form, layers, page, width, gap),
        PoolName.MAMBA: state_tensors(rng, state_layers, width, gap),
    }
    need = sum(SLOTS * -(-geometry.nbytes // block_bytes) for _, geometry in kinds.values())
    arena = scattered_arena(rng, block_bytes, need)
    devices = {
        name: DevicePool.from_tensors(geometry, tensors) for name, (tensors, geometry) in kinds.items()
    }
    hosts = {name: HostPool(geometry, arena) for name, (_, geometry) in kinds.items()}
    sources = {
        name: np.array(data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True)), np.int64)
        for name in kinds
    }
    targets = {
        name: np.array(data.draw(st.permutations(range(SLOTS)))[: len(s)], np.int64)
        for name, s in sources.items()
    }
    handles = {name: hosts[name].alloc(len(s)) for name, s in sources.items()}
    before = {
        name: [slot_bytes(tensors, SLOTS, s) for s in range(SLOTS)] for name, (tensors, _) in kinds.items()
    }
    twins = {name: Twin.of(tensors) for name, (tensors, _) in kinds.items()}

    with CopyEngine(devices, hosts) as engine:
        stored = engine.store([CacheTransferUnits(name, sources[name], handles[name]) for name in kinds])
        assert stored.wait(30)
        assert stored.error is None
        for name, (_, geometry) in kinds.items():
            for slot, handle in zip(sources[name].tolist(), handles[name].tolist(), strict=True):
                held = b"".join(hosts[name].buffers(handle))
                assert held[: geometry.nbytes] == before[name][slot]
                assert set(held[geometry.nbytes :]) <= {0xAA}, "nothing behind the payload is touched"
        assert all(twin.agrees() for twin in twins.values())  # a store leaves the device as it was

        loaded = engine.load([CacheTransferUnits(name, handles[name], targets[name]) for name in kinds])
        assert all(loaded.wait_layer(layer, 10) for layer in range(10))
        assert loaded.wait(30)
        assert loaded.error is None

    for name, twin in twins.items():
        twin.move(SLOTS, sources[name], targets[name])
        assert twin.agrees()
    arena.close()


@dataclass
class Rig:
    tensors: Tensors
    device: DevicePool
    host: HostPool
    arena: HostArena

    @property
    def sides(self) -> tuple[dict[PoolName, DevicePool], dict[PoolName, HostPool]]:
        return {PoolName.KV: self.device}, {PoolName.KV: self.host}

    def units(self, sources: Sequence[int], destinations: Sequence[int]) -> list[CacheTransferUnits]:
        return [
            CacheTransferUnits(PoolName.KV, np.array(sources, np.int64), np.array(destinations, np.int64))
        ]

    def layer(self, layer: int, slot: int) -> bytes:
        return slot_bytes({k: t for k, t in self.tensors.items() if k[0] == layer}, SLOTS, slot)


@pytest.fixture
def rig() -> Iterator[Rig]:
    tensors, geometry = page_tensors(np.random.default_rng(1), "kv", [1, 2, 5], 4, 8, 0)
    arena = HostArena(16 * 4096, 4096)
    yield Rig(tensors, DevicePool.from_tensors(geometry, tensors), HostPool(geometry, arena), arena)
    arena.close()


class Gate:
    """A copier that waits before the n-th call, and may fail there."""

    def __init__(self, at: int, error: Exception | None = None) -> None:
        self.at, self.error, self.calls = at, error, 0
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, sources: Any, destinations: Any, lengths: Any) -> None:
        if self.calls == self.at:
            self.reached.set()
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
        self.calls += 1
        copy_segments(sources, destinations, lengths)


def stored(rig: Rig, slot: int) -> int:
    handle = int(rig.host.alloc(1)[0])
    with CopyEngine(*rig.sides) as engine:
        assert engine.store(rig.units([slot], [handle])).wait(30)
    return handle


def test_the_engine_s_own_tensors() -> None:
    shape, layers = (SLOTS * 16, 2, 64), [0, 3]
    k, v = ([torch.randn(shape).to(torch.bfloat16) for _ in layers] for _ in "kv")
    ssm = torch.randn(2, SLOTS, 4, 32, 32)
    pages, states = by_layer("k", k, layers) | by_layer("v", v, layers), by_layer("ssm", ssm, [1, 2])
    geometries = {PoolName.KV: page_geometry_of(pages, 16), PoolName.MAMBA: state_geometry_of(states, 16)}
    arena = HostArena(1 << 20, 4096)
    devices = {
        name: DevicePool.from_tensors(g, pages if name is PoolName.KV else states)
        for name, g in geometries.items()
    }
    hosts = {name: HostPool(g, arena) for name, g in geometries.items()}
    handles = {name: host.alloc(2) for name, host in hosts.items()}
    with CopyEngine(devices, hosts) as engine:
        assert engine.store(
            [CacheTransferUnits(name, np.array([0, 1]), h) for name, h in handles.items()]
        ).wait(30)
        ticket = engine.load([CacheTransferUnits(name, h, np.array([5, 2])) for name, h in handles.items()])
        assert ticket.wait_layer(3, 10)
        assert ticket.layers == (0, 1, 2, 3)
        assert ticket.wait(30)
    for tensor in (*k, *v):
        by_slot = tensor.view(SLOTS, 16, 2, 64)
        assert torch.equal(by_slot[[5, 2]], by_slot[[0, 1]])
    assert torch.equal(ssm[:, [5, 2]], ssm[:, [0, 1]])
    arena.close()


def test_a_layer_is_there_before_the_next_one(rig: Rig) -> None:
    handle, gate = stored(rig, 0), Gate(at=1)
    expected = {layer: rig.layer(layer, 0) for layer in (1, 2, 5)}
    with CopyEngine(*rig.sides, copier=gate) as engine:
        ticket = engine.load(rig.units([handle], [3]))
        assert ticket.layers == (1, 2, 5)
        assert ticket.wait_layer(1, 10)
        assert rig.layer(1, 3) == expected[1]
        assert gate.reached.wait(30)
        assert ticket.wait_layer(0)
        assert not ticket.wait_layer(2, 0.01)
        assert not ticket.done()
        gate.go.set()
        assert ticket.wait_layer(5, 10)
        assert {layer: rig.layer(layer, 3) for layer in (1, 2, 5)} == expected


def test_a_failure_in_the_middle_fails_the_ticket_only(rig: Rig) -> None:
    handle, gate = stored(rig, 0), Gate(at=1, error=OSError("bad memory"))
    gate.go.set()
    with CopyEngine(*rig.sides, copier=gate) as engine:
        ticket = engine.load(rig.units([handle], [3]))
        assert ticket.wait(30)
        assert str(ticket.error) == "a load failed in layer 2: bad memory"
        assert isinstance(ticket.error.__cause__, OSError)
        assert ticket.wait_layer(1)
        for layer in (2, 5):
            with pytest.raises(
                TransferError, match=f"layer {layer} was not loaded: a load failed in layer 2"
            ):
                ticket.wait_layer(layer)
        gate.at = -1
        again = engine.load(rig.units([handle], [3]))
        assert again.wait(30)
        assert again.error is None
    assert rig.layer(5, 3) == rig.layer(5, 0)


def test_a_store_fails_as_well(rig: Rig) -> None:
    gate = Gate(at=0, error=OSError("bad memory"))
    gate.go.set()
    with CopyEngine(*rig.sides, copier=gate) as engine:
        ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()))
        assert ticket.wait(30)
        assert "a store failed in layer 1: bad memory" in str(ticket.error)


def test_a_fence_comes_first(rig: Rig) -> None:
    fence, calls = threading.Event(), []
    handle = int(rig.host.alloc(1)[0])
    with CopyEngine(*rig.sides) as engine:
        ticket = engine.store(rig.units([0], [handle]), after=[Passed(fence.wait)])
        ticket.add_done_callback(lambda t: calls.append(threading.current_thread().name))
        assert not ticket.wait(0.02)
        for layer in (1, 2, 5):
            for tensor in (rig.tensors[layer, "k"], rig.tensors[layer, "v"]):
                tensor.array[:4] = layer  # the forward pass that the fence stands for
        fence.set()
        assert ticket.wait(30)
        assert b"".join(rig.host.buffers(handle))[: rig.host.geometry.nbytes] == slot_bytes(
            rig.tensors, SLOTS, 0
        )
        failed = engine.load(rig.units([handle], [1]), after=[Passed(lambda: 1 / 0)])
        assert failed.wait(30)
        assert "a load failed before its first layer: division by zero" in str(failed.error)
    assert calls == ["tiercache-store"]


def test_stores_and_loads_do_not_wait_for_each_other(rig: Rig) -> None:
    handle, fence = stored(rig, 0), threading.Event()
    with CopyEngine(*rig.sides) as engine:
        store = engine.store(rig.units([1], rig.host.alloc(1).tolist()), after=[Passed(fence.wait)])
        assert engine.load(rig.units([handle], [2])).wait(30)
        assert not store.done()
        fence.set()


def test_a_fork_is_done_when_it_returns(rig: Rig) -> None:
    gate = Gate(at=1, error=OSError("bad memory"))
    gate.go.set()
    expected = [rig.layer(layer, slot) for layer in (1, 2, 5) for slot in (0, 3)]
    with CopyEngine(*rig.sides, copier=gate) as engine:
        engine.fork(rig.units([0, 3], [4, 1]))
        assert [rig.layer(layer, slot) for layer in (1, 2, 5) for slot in (4, 1)] == expected
        with pytest.raises(TransferError, match="a fork failed: bad memory"):
            engine.fork(rig.units([0], [2]))
        with pytest.raises(SlotError):
            engine.fork(rig.units([0], [SLOTS]))


def test_wrong_numbers_are_refused_at_the_call(rig: Rig) -> None:
    (handle,) = rig.host.alloc(1).tolist()
    with CopyEngine(*rig.sides) as engine:
        for slots, handles in [
            ([SLOTS], [handle]),
            ([-1], [handle]),
            ([0], [handle + 1]),
            ([0], [-2 - handle]),
        ]:
            with pytest.raises(SlotError):
                engine.store(rig.units(slots, handles))
            with pytest.raises(SlotError):
                engine.load(rig.units(handles, slots))
        with pytest.raises(ConfigError, match="pool mamba is not registered"):
            engine.store([CacheTransferUnits(PoolName.MAMBA, np.array([0]), np.array([0]))])
        for nothing in ([], rig.units([], [])):
            ticket = engine.load(nothing)
            assert ticket.wait(30)
            assert (ticket.layers, ticket.error) == ((), None)


def test_pools_that_do_not_fit(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="pool kv is on one side only"):
        CopyEngine({PoolName.KV: rig.device}, {})
    _, other = page_tensors(np.random.default_rng(1), "latent", [1], 4, 8, 0)
    with pytest.raises(GeometryError, match="pool kv has different geometries"):
        CopyEngine({PoolName.KV: rig.device}, {PoolName.KV: HostPool(other, rig.arena)})
    on_card = {key: ArrayTensor(t.array, t.dtype, "cuda:0") for key, t in rig.tensors.items()}
    with pytest.raises(
        ConfigError, match="pool kv is on cuda:0 and this transfer engine copies CPU memory only"
    ):
        CopyEngine(
            {PoolName.KV: DevicePool.from_tensors(rig.device.geometry, on_card)}, {PoolName.KV: rig.host}
        )


def test_closing_finishes_what_was_asked_for(rig: Rig) -> None:
    before = set(threading.enumerate())
    engine = CopyEngine(*rig.sides)
    tickets = [engine.store(rig.units([slot], rig.host.alloc(1).tolist())) for slot in range(4)]
    engine.close()
    engine.close()
    assert all(t.done() and t.error is None for t in tickets)
    with pytest.raises(ClosedError):
        engine.store(rig.units([0], rig.host.alloc(1).tolist()))
    assert set(threading.enumerate()) <= before


def test_closing_gives_up_at_its_deadline(rig: Rig) -> None:
    gate = Gate(at=0)
    engine = CopyEngine(*rig.sides, copier=gate)
    running = engine.load(rig.units([stored(rig, 0)], [1]))
    assert gate.reached.wait(30)
    waiting = engine.load(rig.units([stored(rig, 0)], [2]))
    engine.close(timeout=0.02)
    assert waiting.wait(0)
    assert "closed before this transfer began" in str(waiting.error)
    assert not running.done()
    gate.go.set()
    engine.close(timeout=30)
    assert running.wait(30)
    assert "a load failed in layer 2: the transfer engine was closed" in str(running.error)


def test_closing_from_a_callback(rig: Rig) -> None:
    engine, closed = CopyEngine(*rig.sides), threading.Event()
    ticket = engine.store(rig.units([0], rig.host.alloc(1).tolist()))
    ticket.add_done_callback(lambda t: (engine.close(), closed.set()))
    assert closed.wait(30)


def test_memory_stays_mapped_while_a_copy_runs(rig: Rig) -> None:
    handle, gate = stored(rig, 0), Gate(at=1)
    with CopyEngine(*rig.sides, copier=gate) as engine:
        ticket = engine.load(rig.units([handle], [3]))
        assert gate.reached.wait(30)
        rig.arena.close()
        gate.go.set()
        assert ticket.wait(30)
    assert rig.layer(5, 3) == rig.layer(5, 0)
