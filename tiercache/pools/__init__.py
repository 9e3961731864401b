"""Device pools over the engine's tensors, and the host arena that all host pools share.

Principles:

1. The engine owns its tensors: a device pool gives out slots in them, and neither makes nor copies any.
2. All kinds of objects share the blocks of one arena; no kind has a budget of its own.
3. Memory that a call may still write to is in quarantine, and handed out to nobody.
"""

from tiercache.memory import MemoryReadings, read_memory
from tiercache.pools.arena import HostArena, HostPool, SizePlan, plan_size
from tiercache.pools.blocks import BlockArena
from tiercache.pools.device import (
    DevicePool,
    DeviceTensor,
    SegmentTable,
    by_layer,
    page_geometry_of,
    state_geometry_of,
)
from tiercache.pools.slots import SlotAllocator, SlotSource

__all__ = [
    "BlockArena",
    "DevicePool",
    "DeviceTensor",
    "HostArena",
    "HostPool",
    "MemoryReadings",
    "SegmentTable",
    "SizePlan",
    "SlotAllocator",
    "SlotSource",
    "by_layer",
    "page_geometry_of",
    "plan_size",
    "read_memory",
    "state_geometry_of",
]
