"""Preparation of transfers, the same for every engine.

It checks the pools, resolves slots and handles, and keeps the memory mapped until a transfer is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiercache.core import CacheTransferUnits, Locations, PoolName
from tiercache.errors import ConfigError, GeometryError, TransferError
from tiercache.pools.device import DevicePool
from tiercache.pools.host import HostPool
from tiercache.transfer.base import Ticket
from tiercache.transfer.descriptors import Copies, Descriptors, build_descriptors, join_copies, join_descriptors, slot_copies
from tiercache.transfer.fences import Fence, pass_fence


@dataclass(frozen=True, slots=True)
class Part:
    """The units of a job in one pool. `blocks` has shape [n, blocks per object]; `region` keeps the arena mapped until the job is over."""

    device: DevicePool
    host: HostPool
    slots: Locations
    blocks: npt.NDArray[np.int64]
    region: memoryview

    def descriptors(self, period: int = 0) -> Descriptors:
        """Return the copies, sorted by layer; with `period`, they are split at every multiple of `period` bytes in the arena."""
        arena = self.host.arena
        built = build_descriptors(self.device.segments, self.slots, self.blocks, arena.block_bytes, arena.address)
        return built.cut(arena.address, period) if period else built


@dataclass(frozen=True, slots=True)
class Job:
    """One call of `store` or `load` that is under way. Thread safety: one thread at a time."""

    to_host: bool
    parts: tuple[Part, ...]
    ticket: Ticket
    after: tuple[Fence, ...]

    def pass_fences(self, go_on: Callable[[], object]) -> None:
        """Block until all fences of the job are over. `go_on` may raise to end the wait; see `pass_fence`."""
        for fence in self.after:
            pass_fence(fence, go_on)

    def descriptors(self, period: int = 0) -> Descriptors:
        """Return the copies of all parts, sorted by layer; with `period`, they are split as in `Part.descriptors`."""
        return join_descriptors([part.descriptors(period) for part in self.parts])

    def finish(self, error: TransferError | None) -> None:
        """Release the memory and finish the ticket. Nothing may touch the job's bytes any more."""
        for part in self.parts:
            part.region.release()
        self.ticket.finish(error)

    def failure(self, step: str, error: Exception) -> TransferError:
        """Return the ticket's error for a job that `error` ended. `step`: where that was, in words."""
        failure = TransferError(f"a {'store' if self.to_host else 'load'} failed {step}: {str(error) or type(error).__name__}")
        failure.__cause__ = error.with_traceback(None)  # the frames would keep the job's memory alive as long as the ticket
        return failure


class Sides:
    """The pools of one engine, by name, on the device and on the host.

    Raises ConfigError for a pool that is on one side only, GeometryError where the two sides differ.

    Thread safety: any thread.
    """

    def __init__(self, device_pools: Mapping[PoolName, DevicePool], host_pools: Mapping[PoolName, HostPool]) -> None:
        for name in sorted(device_pools.keys() ^ host_pools.keys()):
            raise ConfigError(f"pool {name} is on one side only; give the transfer engine a device pool and a host pool for each kind")
        for name, pool in device_pools.items():
            if pool.geometry.fingerprint != host_pools[name].geometry.fingerprint:
                raise GeometryError(f"pool {name} has different geometries on device and host; make both from one geometry")
        self.device = dict(device_pools)
        self.host = dict(host_pools)

    def parts(self, units: Sequence[CacheTransferUnits], *, to_host: bool) -> tuple[Part, ...]:
        """Return the parts of a job, with slots and handles resolved. Raises SlotError or ConfigError where that is not possible."""
        return tuple(self._part(u.pool, *((u.sources, u.destinations) if to_host else (u.destinations, u.sources))) for u in units)

    def forks(self, units: Sequence[CacheTransferUnits]) -> Copies:
        """Return the copies from device slots to other device slots of the same pools."""
        pools = [(self.device_pool(u.pool), u) for u in units]
        return join_copies([slot_copies(pool.segments, pool.checked(u.sources), pool.checked(u.destinations)) for pool, u in pools])

    def device_pool(self, name: PoolName) -> DevicePool:
        """Return the device pool of this name; raises ConfigError for one that is not registered."""
        if name not in self.device:
            raise ConfigError(f"pool {name} is not registered with this transfer engine; pass it to the constructor")
        return self.device[name]

    def _part(self, name: PoolName, slots: Locations, handles: Locations) -> Part:
        device = self.device_pool(name)
        host = self.host[name]
        # Checked and resolved now, so that a wrong number raises in the caller; copied, so that the caller may reuse its arrays.
        return Part(device, host, device.checked(slots).copy(), host.blocks(handles), host.arena.hold())


def layers_of(parts: Sequence[Part]) -> Iterator[int]:
    """Return the layers that have bytes in these parts; a layer may occur several times."""
    return (layer for part in parts if len(part.slots) for layer in part.device.geometry.layers)
