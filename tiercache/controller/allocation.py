"""Allocation of device slots and host objects, and the release of slots that the device may still use."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from tiercache.core import Locations, PoolName, Tier
from tiercache.errors import PoolFullError
from tiercache.index import Eviction, HybridIndex, Pin
from tiercache.metrics import Metrics
from tiercache.pools import BlockArena, DevicePool, HostPool
from tiercache.transfer import Fence

_log = logging.getLogger(__name__)
_Slots = Mapping[PoolName, Locations]


class ObjectAllocator:
    """Allocator of device slots and host objects, which makes room by eviction."""

    def __init__(
        self,
        index: HybridIndex,
        device: Mapping[PoolName, DevicePool],
        host: Mapping[PoolName, HostPool],
        arena: BlockArena,
        metrics: Metrics,
    ) -> None:
        self._index = index
        self._device = device
        self._host = host
        self._arena = arena
        self._metrics = metrics
        self._cost = {p: pool.blocks_per_object for p, pool in host.items()}
        self.widest = sum(self._cost.values())
        """Sum over all pools of the host blocks that one object takes."""
        self.taken_blocks = 0
        """Number of host blocks that were taken so far."""

    def blocks_of(self, pool: PoolName, objects: int) -> int:
        """Return the number of host blocks that `objects` objects of `pool` take."""
        return objects * self._cost[pool]

    def take_device(self, need: Mapping[PoolName, int]) -> dict[PoolName, Locations]:
        """Allocate device slots for every pool of `need`, with evictions where there are too few.

        Raises PoolFullError, with nothing changed, if evictions cannot free enough slots.
        """
        short = {p: n - self._device[p].available for p, n in need.items() if n > self._device[p].available}
        if short:
            self._free_evicted(self._index.evict_device(short), Tier.DEVICE)
        return {p: self._device[p].alloc(n) for p, n in need.items()}

    def make_room(self, need: Mapping[PoolName, int]) -> dict[PoolName, int]:
        """Evict up to `need[pool]` device objects of each pool; return how many slots became free."""
        evictable = self._index.evictable(Tier.DEVICE)
        eviction = self._index.evict_device({p: min(n, evictable.get(p, n)) for p, n in need.items()})
        self._free_evicted(eviction, Tier.DEVICE)
        return {pool: len(slots) for pool, slots in eviction.freed.items()}

    def take_host(self, need: Mapping[PoolName, int]) -> dict[PoolName, Locations]:
        """Allocate host objects for every pool of `need`, with evictions if there are too few blocks.

        Raises PoolFullError, with nothing taken, if evictions cannot free enough blocks. Before this error,
        objects are evicted in one case only: there seem to be enough of them, but some of their blocks turn
        out to be in quarantine.
        """
        blocks = sum(self.blocks_of(p, n) for p, n in need.items())
        arena = self._arena
        if blocks > arena.blocks:
            raise PoolFullError(
                f"{blocks} blocks are needed at once, and the host arena has {arena.blocks}; give it more"
                " bytes"
            )
        if blocks > arena.available:
            self._free_evicted(self._index.evict_host(blocks - arena.available, self._cost), Tier.HOST)
            # Evicted blocks may be in quarantine. This is checked before any pool allocates: if a later pool
            # failed, the objects of earlier pools would leak.
            if blocks > arena.available:
                raise PoolFullError(
                    f"{blocks} blocks are needed, {arena.available} are free and {arena.withheld} in"
                    " quarantine"
                )
        self.taken_blocks += blocks
        return {p: self._host[p].alloc(n) for p, n in need.items()}

    def require_host(self, blocks: int) -> None:
        """Raise PoolFullError unless the host has `blocks` blocks that are free or can be evicted.

        Every object that is not in use can be evicted.
        """
        evictable = sum(self.blocks_of(p, count) for p, count in self._index.evictable(Tier.HOST).items())
        if blocks > self._arena.available + evictable:
            raise PoolFullError(
                f"{blocks} blocks are needed, {self._arena.available} are free and {evictable} can be evicted"
            )

    def evict_all(self, tier: Tier) -> None:
        """Free every object of `tier` (device or host) that is not pinned."""
        evictable = self._index.evictable(tier)
        if tier is Tier.DEVICE:
            self.make_room(evictable)
        else:
            blocks = sum(self.blocks_of(p, n) for p, n in evictable.items())
            self._free_evicted(self._index.evict_host(blocks, self._cost), tier)

    def free_device(self, pool: PoolName, slots: Locations) -> None:
        """Give device slots back to their pool."""
        if len(slots):
            self._device[pool].free(slots)

    def free_host(self, pool: PoolName, handles: Locations) -> None:
        """Give host objects back to the arena."""
        if len(handles):
            self._host[pool].free(handles)

    def _free_evicted(self, eviction: Eviction, tier: Tier) -> None:
        free = self.free_device if tier is Tier.DEVICE else self.free_host
        for pool, locations in eviction.freed.items():
            free(pool, locations)
        for fate, count in (("demoted", eviction.demoted), ("lost", eviction.lost)):
            if count:
                self._metrics.increment("evicted_objects_total", str(tier), fate, by=count)


@dataclass(frozen=True, slots=True)
class Retired:
    """Slots and pins that are still used, but only by device work that was queued before `fence`."""

    fence: Fence
    slots: _Slots
    pins: Sequence[Pin]


class DeviceWork:
    """Record of device work under way, which delays the release of the slots and pins that the work uses.

    Every fence gets a number, in the order in which fences are noted. For each slot, the record keeps the
    number of the last fence that was noted for the slot.
    """

    def __init__(self, allocator: ObjectAllocator, slots: Mapping[PoolName, int]) -> None:
        """Make an empty record. `slots` is the number of device slots of each pool."""
        self.retired: list[Retired] = []
        """Slots and pins that wait for their fence."""
        self.freed = False
        """Whether slots or pins were freed since the controller last cleared this flag."""
        self._allocator = allocator
        self._pending: dict[int, Fence] = {}
        """Fences that the device may not have passed yet, by number, in ascending order."""
        self._last_number = 0
        self._has_warned = False
        self._last_use = {p: np.zeros(n, np.int64) for p, n in slots.items()}
        """For each device slot, by pool: the number of the last fence noted for the slot; 0 for none."""

    def note(self, fence: Fence | None, slots: Iterable[tuple[PoolName, Locations | int]]) -> None:
        """Record that device work queued before `fence` may still use `slots`.

        From now on, other requests may read these slots, or get them for new objects.
        """
        self._pending = {n: other for n, other in self._pending.items() if not self._has_passed(other)}
        if fence is None or self._has_passed(fence):
            return
        number = self._last_number = self._last_number + 1
        self._pending[number] = fence
        for pool, mine in slots:
            self._last_use[pool][mine] = number

    def fences(self, slots: Iterable[tuple[PoolName, Locations]]) -> list[Fence]:
        """Return the fences that a copy from or into these device slots must wait for.

        Device work queued before these fences may still be using the slots.
        """
        if not self._pending:
            return []
        # A slot remembers its newest fence only. An older fence may cover the slot too, and may belong to
        # another stream. The newest fence says nothing about the work in that stream. So every fence up to
        # the newest counts:
        #   note(f1, slots 3 4), note(f2, slot 4), note(f3, slot 9)
        #   a copy of slot 4 waits for f1 and f2; a copy of slot 3 for f1; a copy of slot 5 for none
        newest = max((int(self._last_use[pool][mine].max(initial=0)) for pool, mine in slots), default=0)
        return [fence for n, fence in self._pending.items() if n <= newest and not self._has_passed(fence)]

    def retire(self, slots: _Slots, fence: Fence | None, pins: Sequence[Pin] = ()) -> None:
        """Free slots and release pins once the device has passed `fence`, or at once if `fence` is None."""
        if fence is not None and not self._has_passed(fence):
            self.retired.append(Retired(fence, slots, pins))
            return
        for pool, mine in slots.items():
            self._allocator.free_device(pool, mine)
        for pin in pins:
            pin.release()
        self.freed = True  # makes the controller retry the writes that wait for room

    def free_passed(self) -> None:
        """Free the slots and pins whose fences the device has passed by now."""
        if not self.retired:
            return
        passed = [self._has_passed(r.fence) for r in self.retired]
        waiting = self.retired
        self.retired = [r for r, free in zip(waiting, passed, strict=True) if not free]
        for retired in compress(waiting, passed):
            self.retire(retired.slots, None, retired.pins)

    def _has_passed(self, fence: Fence) -> bool:
        """Return whether the device is known to have passed the fence.

        A fence that cannot be queried counts as not passed, so its slots stay out of use.
        """
        try:
            return fence.query()
        except Exception as error:  # noqa: BLE001
            # a driver may raise any exception, for example after it has lost its device
            if not self._has_warned:
                _log.warning("a fence cannot be queried; slots that wait for it stay out of use: %s", error)
            self._has_warned = True
            return False
