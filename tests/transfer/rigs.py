"""Pools on a machine, with a plain copy of their bytes to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tiercache_kernels.reference import copy_segments

from tests.transfer.machines import Bytes, Machine, random_bytes
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.geometry import Geometry
from tiercache.pools import DevicePool, HostArena, HostPool, page_geometry_of, state_geometry_of
from tiercache.transfer import Copier, CopyEngine, TransferEngine
from tiercache.transfer.cuda import CudaEngine

SLOTS = 6


@dataclass
class Kind:
    """The tensors of one pool, with a plain copy of their bytes."""

    machine: Machine
    tensors: dict[tuple[int, str], Any]
    geometry: Geometry
    twin: dict[tuple[int, str], Bytes]

    @classmethod
    def make(
        cls,
        machine: Machine,
        rng: np.random.Generator,
        shapes: dict[tuple[int, str], tuple[tuple[int, ...], str]],
        page: int,
    ) -> Kind:
        twin = {at: random_bytes(rng, shape, dtype) for at, (shape, dtype) in shapes.items()}
        tensors = {at: machine.tensor(twin[at], shape, dtype) for at, (shape, dtype) in shapes.items()}
        is_page = all(shape[0] == SLOTS * page for shape, _ in shapes.values())
        geometry = page_geometry_of(tensors, page) if is_page else state_geometry_of(tensors, page)
        return cls(machine, tensors, geometry, twin)

    def slot(self, slot: int, layers: Sequence[int] | None = None) -> bytes:
        """The bytes of an object, by the plain copy."""
        parts = [
            twin.reshape(SLOTS, -1)[slot]
            for (layer, _), twin in self.twin.items()
            if layers is None or layer in layers
        ]
        return b"".join(part.tobytes() for part in parts)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for twin in self.twin.values():
            rows = twin.reshape(SLOTS, -1)
            rows[list(targets)] = rows[list(sources)]

    def agrees(self) -> bool:
        return all(np.array_equal(self.machine.content(t), self.twin[at]) for at, t in self.tensors.items())


def pages(
    machine: Machine, rng: np.random.Generator, layers: Sequence[int], page: int, width: int, form: str = "kv"
) -> Kind:
    """Make KV pages as engines lay them out, with a row for each token.

    `form` is "kv" for keys and values in two tensors, "packed" for both in one tensor, "latent" for one
    latent tensor, and "fp8" for keys and values of fp8 in two tensors, with scales in a third.
    """
    dtype = "bfloat16" if width % 2 else "float32"
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "kv": {"k": ((2, width), dtype), "v": ((2, width + 1), dtype)},
        "packed": {"kv": ((2, 2, width), dtype)},
        "latent": {"latent": ((width,), dtype)},
        "fp8": {
            "k": ((2, width), "float8_e4m3fn"),
            "scale": ((2,), "float32"),
            "v": ((2, width), "float8_e4m3fn"),
        },
    }[form]
    shapes = {
        (layer, name): ((SLOTS * page, *inner), kind)
        for layer in layers
        for name, (inner, kind) in tensors.items()
    }
    return Kind.make(machine, rng, shapes, page)


def states(machine: Machine, rng: np.random.Generator, layers: Sequence[int], width: int) -> Kind:
    shapes: dict[tuple[int, str], tuple[tuple[int, ...], str]] = {}
    for layer in layers:
        shapes |= {
            (layer, "conv"): ((SLOTS, width, 3), "bfloat16"),
            (layer, "ssm"): ((SLOTS, 3, width, 9), "float32"),
        }
    shapes[layers[-1], "flags"] = ((SLOTS, 3), "uint8")
    return Kind.make(machine, rng, shapes, 64)


@dataclass
class Rig:
    machine: Machine
    kind: Kind
    device: DevicePool
    host: HostPool
    arena: HostArena

    @classmethod
    def make(cls, machine: Machine, kind: Kind, arena: HostArena) -> Rig:
        device = DevicePool.from_tensors(kind.geometry, kind.tensors)
        return cls(machine, kind, device, HostPool(kind.geometry, arena), arena)

    def engine(self, **settings: Any) -> CudaEngine:
        return self.machine.engine({PoolName.KV: self.device}, {PoolName.KV: self.host}, **settings)

    def units(self, sources: Sequence[int], destinations: Sequence[int]) -> list[CacheTransferUnits]:
        return [
            CacheTransferUnits(PoolName.KV, np.array(sources, np.int64), np.array(destinations, np.int64))
        ]

    def held(self, handle: int) -> bytes:
        return b"".join(self.host.buffers_of([handle])[0])[: self.host.geometry.nbytes]

    def stored(self, engine: TransferEngine, slot: int) -> int:
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
    return Rig.make(machine, kind, arena)


def on_cpu(rig: Rig) -> Rig:
    """Let the tensors of a rig count as memory of the CPU, which they are on a simulated device."""
    for tensor in rig.kind.tensors.values():
        tensor.device = "cpu"
    rig.device = DevicePool.from_tensors(rig.kind.geometry, rig.kind.tensors)
    return rig


def cpu_engine(rig: Rig, copier: Copier = copy_segments) -> CopyEngine:
    """An engine that copies with the CPU, for a rig `on_cpu`."""
    return CopyEngine({PoolName.KV: rig.device}, {PoolName.KV: rig.host}, copier=copier)


class Passed:
    """Fence that is passed when `wait` returns."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.synchronize = wait

    def query(self) -> bool:
        """Return False: only the thread that waits knows."""
        return False
