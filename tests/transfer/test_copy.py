"""The engine that copies with the CPU: what it does beyond what all engines do (`test_engines`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiercache_kernels.reference import copy_segments

from tests.transfer.machines import Simulated
from tests.transfer.rigs import SLOTS, Rig, cpu_engine, on_cpu, pages, rig_on
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import ConfigError, GeometryError, TransferError
from tiercache.pools import DevicePool, HostArena, HostPool, by_layer, page_geometry_of, state_geometry_of
from tiercache.transfer import CopyEngine

LAYERS = (1, 2, 5)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = on_cpu(rig_on(Simulated()))
    yield rig
    rig.arena.close()


def layer(rig: Rig, number: int, slot: int) -> bytes:
    """Return the contents of a slot in the tensors of a layer."""
    tensors = [tensor for (n, _), tensor in rig.kind.tensors.items() if n == number]
    return b"".join(rig.rows(rig.machine.content(tensor), slot) for tensor in tensors)


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
    with cpu_engine(rig) as engine:
        return rig.stored(engine, slot)


def test_the_engine_s_own_tensors() -> None:
    shape, layers = (SLOTS * 16, 2, 64), [0, 3]
    k, v = ([torch.randn(shape).to(torch.bfloat16) for _ in layers] for _ in "kv")
    ssm = torch.randn(2, SLOTS, 4, 32, 32)
    tensors = {
        PoolName.KV: by_layer("k", k, layers) | by_layer("v", v, layers),
        PoolName.MAMBA: by_layer("ssm", ssm, [1, 2]),
    }
    geometries = {
        PoolName.KV: page_geometry_of(tensors[PoolName.KV], 16),
        PoolName.MAMBA: state_geometry_of(tensors[PoolName.MAMBA], 16),
    }
    arena = HostArena(1 << 20, 4096)
    devices = {name: DevicePool.from_tensors(g, tensors[name]) for name, g in geometries.items()}
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
    expected = {n: layer(rig, n, 0) for n in LAYERS}
    with cpu_engine(rig, gate) as engine:
        ticket = engine.load(rig.units([handle], [3]))
        assert ticket.layers == LAYERS
        assert ticket.wait_layer(1, 10)
        assert layer(rig, 1, 3) == expected[1]
        assert gate.reached.wait(30)
        assert ticket.wait_layer(0)
        assert not ticket.wait_layer(2, 0.01)
        assert not ticket.done()
        gate.go.set()
        assert ticket.wait_layer(5, 10)
        assert {n: layer(rig, n, 3) for n in LAYERS} == expected


def test_a_failure_in_the_middle_fails_the_ticket_only(rig: Rig) -> None:
    handle, gate = stored(rig, 0), Gate(at=1, error=OSError("bad memory"))
    gate.go.set()
    with cpu_engine(rig, gate) as engine:
        ticket = engine.load(rig.units([handle], [3]))
        assert ticket.wait(30)
        assert str(ticket.error) == "a load failed in layer 2: bad memory"
        assert isinstance(ticket.error.__cause__, OSError)
        assert ticket.wait_layer(1)
        for n in (2, 5):
            with pytest.raises(TransferError, match=f"layer {n} was not loaded: a load failed in layer 2"):
                ticket.wait_layer(n)
        gate.at = -1
        again = engine.load(rig.units([handle], [3]))
        assert again.wait(30)
        assert again.error is None
        assert layer(rig, 5, 3) == layer(rig, 5, 0)
        gate.calls, gate.at = 0, 0
        failed = engine.store(rig.units([0], rig.host.alloc(1).tolist()))
        assert failed.wait(30)
        assert "a store failed in layer 1: bad memory" in str(failed.error)


def test_pools_that_do_not_fit(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="pool kv is on one side only"):
        CopyEngine({PoolName.KV: rig.device}, {})
    other = pages(rig.machine, np.random.default_rng(1), [1], 16, 8, "latent")
    with pytest.raises(GeometryError, match="pool kv has different geometries"):
        CopyEngine({PoolName.KV: rig.device}, {PoolName.KV: HostPool(other.geometry, rig.arena)})
    with pytest.raises(
        ConfigError, match="pool kv is on cuda:0 and this transfer engine copies CPU memory only"
    ):
        CopyEngine(
            {PoolName.KV: DevicePool.from_tensors(other.geometry, other.tensors)},
            {PoolName.KV: HostPool(other.geometry, rig.arena)},
        )
