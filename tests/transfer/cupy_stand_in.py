"""Stand-in for the parts of CuPy that `CupyDevice` uses.

It works over simulated devices and the stand-in driver of `tests/kernels/driver.c`, which counts
contexts. As in CUDA's runtime, a call on a thread that has no context creates one, on device 0 unless the
thread has chosen another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.transfer.simulated_cuda import SimulatedDevice

NOT_READY = 600


class Runtime:
    """`cupy.cuda.runtime`. Thread safety: any thread."""

    streamNonBlocking = 1  # noqa: N815  CuPy's names
    eventBlockingSync = 1  # noqa: N815
    eventDisableTiming = 2  # noqa: N815
    memcpyDefault = 4  # noqa: N815

    def __init__(self, driver: ctypes.CDLL, devices: Sequence[SimulatedDevice]) -> None:
        self._driver, self._devices = driver, devices
        self.host_memory: dict[int, Any] = {}

    def _ask(self, call: str, *arguments: Any, **settings: Any) -> Any:
        """One call of the device that the driver has for this thread."""
        device = self._devices[self._driver.stand_in_runtime_call()]
        with device.current():
            return getattr(device, call)(*arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        """The calls that differ in nothing but their names."""
        call = {
            "malloc": "allocate", "hostRegister": "lock", "hostUnregister": "unlock",
            "streamDestroy": "destroy_stream", "streamSynchronize": "synchronize_stream",
            "eventDestroy": "destroy_event", "eventRecord": "record", "streamWaitEvent": "wait_event",
            "eventSynchronize": "synchronize_event",
        }[name]  # fmt: skip
        if call == "lock":
            return lambda address, nbytes, flags: self._ask("lock", address, nbytes)
        return lambda *arguments: self._ask(call, *arguments)

    def getDeviceCount(self) -> int:  # noqa: N802
        return len(self._devices)

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:  # noqa: N802
        return {"name": b"Stand-in", "multiProcessorCount": 132}

    def deviceGetPCIBusId(self, ordinal: int) -> str:  # noqa: N802
        return f"0000:{ordinal:02x}:00.0"

    def driverGetVersion(self) -> int:  # noqa: N802
        return 13000

    def free(self, address: int) -> None:
        if address:
            self._ask("release", address)
        else:
            self._driver.stand_in_runtime_call()

    def hostAlloc(self, nbytes: int, flags: int) -> int:  # noqa: N802
        array = self._ask("allocate_host", nbytes)
        self.host_memory[array.ctypes.data] = array
        return int(array.ctypes.data)

    def freeHost(self, address: int) -> None:  # noqa: N802
        self._driver.stand_in_runtime_call()
        del self.host_memory[address]

    def streamCreateWithPriority(self, flags: int, priority: int) -> Any:  # noqa: N802
        return self._ask("create_stream", urgent=priority < 0)

    def eventCreateWithFlags(self, flags: int) -> Any:  # noqa: N802
        return self._ask("create_event")

    def eventQuery(self, event: int) -> int:  # noqa: N802
        return 0 if self._ask("has_passed", event) else NOT_READY

    def memcpyAsync(self, destination: int, source: int, nbytes: int, kind: int, stream: int) -> None:  # noqa: N802
        self._ask("copy", source, destination, nbytes, stream)


def stand_in(driver: ctypes.CDLL, devices: Sequence[SimulatedDevice]) -> Any:
    """The module."""
    return SimpleNamespace(cuda=SimpleNamespace(runtime=Runtime(driver, devices)))
