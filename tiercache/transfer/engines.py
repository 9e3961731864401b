"""Choice of the transfer engine for a set of pools."""

from __future__ import annotations

from collections.abc import Mapping

from tiercache.core import PoolName
from tiercache.pools.device import DevicePool
from tiercache.pools.host import HostPool
from tiercache.transfer.base import TransferEngine
from tiercache.transfer.copy import CopyEngine


def engine_for(device_pools: Mapping[PoolName, DevicePool], host_pools: Mapping[PoolName, HostPool]) -> TransferEngine:
    """Return the engine for the device that the pools are on: `CudaEngine`, or `CopyEngine` for CPU memory. Raises as these do."""
    if any(pool.device.startswith("cuda") for pool in device_pools.values()):
        from tiercache.transfer.cuda import CudaEngine

        return CudaEngine(device_pools, host_pools)
    return CopyEngine(device_pools, host_pools)
