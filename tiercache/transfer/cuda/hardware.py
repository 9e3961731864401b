"""A real CUDA device, through CuPy."""

# ruff: noqa: D102 (the contract documents these methods)
from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tiercache_kernels.batch import BatchCopy
from tiercache_kernels.driver import DeviceContext
from tiercache_kernels.kernel import CopyKernel

from tiercache.errors import ConfigError, install_line
from tiercache.transfer.cuda.device import Card, CudaDevice, Method
from tiercache.transfer.descriptors import Descriptors

_NOT_READY: Final = 600
"""cudaErrorNotReady: the event has not passed yet. This is not a failure."""
_REGISTERED: Final = 1 | 2
"""Flags cudaHostRegisterPortable and cudaHostRegisterMapped. cudaHostAlloc has flags of the same values."""
_HIGHEST: Final = -100
_LOWEST: Final = 0
"""Stream priorities that are requested. CUDA takes the nearest that the device has."""


def _cupy(ordinal: int) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"device cuda:{ordinal} needs CuPy ({error}); {install_line('cuda')}") from error
    return cupy


class CupyDevice(CudaDevice):
    """Device number `ordinal` of this process, in the CUDA context that torch and CuPy share.

    `cupy` is a module to use in CuPy's place. `library` is the file name of the driver's library. A call on a
    thread that has not entered the device raises RuntimeError.

    Raises ConfigError if CuPy, the driver or the device is missing.

    Thread safety: as `CudaDevice`.
    """

    def __init__(self, ordinal: int, *, cupy: Any = None, library: str = "libcuda.so.1") -> None:
        self.ordinal = ordinal
        self._cupy: Any = cupy or _cupy(ordinal)
        self._here = threading.local()
        """Per thread, `entered` is above 0 after `activate`, or within blocks of `current`."""
        try:
            count = self._cupy.cuda.runtime.getDeviceCount()
            if ordinal < count:
                self._context = DeviceContext.load(ordinal, library)
                is_able = self._context.reads_host_addresses()
        except RuntimeError as error:
            raise ConfigError(
                f"device cuda:{ordinal} cannot be used: {error}; `nvidia-smi` should list it"
            ) from error
        if ordinal >= count:
            raise ConfigError(
                f"there is no device cuda:{ordinal}, this process sees {count}; see CUDA_VISIBLE_DEVICES"
            )
        if not is_able:
            raise ConfigError(
                f"device cuda:{ordinal} has page-locked memory at addresses of its own, which the transfer"
                " engine does not know; use another device"
            )
        with self.current():
            self._runtime.free(0)  # initializes CUDA's runtime in the context
            self.card = self._describe()
            self.unavailable: dict[Method, str] = {}
            self._batch = self._open(Method.BATCH, lambda: BatchCopy.load(library))
            self._kernel = self._open(Method.KERNEL, CopyKernel)

    def activate(self) -> None:
        self._context.enter()
        self._here.entered = 1

    @contextmanager
    def current(self) -> Iterator[None]:
        before = self._context.enter()
        self._here.entered = getattr(self._here, "entered", 0) + 1
        try:
            yield
        finally:
            self._here.entered -= 1
            self._context.leave(before)

    @property
    def _runtime(self) -> Any:
        """CUDA's runtime. Raises RuntimeError on a thread that has not entered the device."""
        self._require_entered()
        return self._cupy.cuda.runtime

    def _require_entered(self) -> None:
        if not getattr(self._here, "entered", 0):
            raise RuntimeError(f"device cuda:{self.ordinal} is used on a thread that has not entered it")

    def create_stream(self, *, urgent: bool) -> int:
        stream: int = self._runtime.streamCreateWithPriority(
            self._runtime.streamNonBlocking, _HIGHEST if urgent else _LOWEST
        )
        return stream

    def destroy_stream(self, stream: int) -> None:
        self._runtime.streamDestroy(stream)

    def synchronize_stream(self, stream: int) -> None:
        self._runtime.streamSynchronize(stream)

    def create_event(self) -> int:
        runtime = self._runtime
        event: int = runtime.eventCreateWithFlags(runtime.eventBlockingSync | runtime.eventDisableTiming)
        return event

    def destroy_event(self, event: int) -> None:
        self._runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        self._runtime.eventRecord(event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._runtime.streamWaitEvent(stream, event)

    def synchronize_event(self, event: int) -> None:
        self._runtime.eventSynchronize(event)

    def has_passed(self, event: int) -> bool:
        status = self._runtime.eventQuery(event)
        if status not in (0, _NOT_READY):
            raise RuntimeError(f"CUDA error {status} while an event was queried")
        return bool(status == 0)

    def allocate(self, nbytes: int) -> int:
        address: int = self._runtime.malloc(nbytes)
        return address

    def release(self, address: int) -> None:
        self._runtime.free(address)

    def allocate_host(self, nbytes: int) -> npt.NDArray[np.uint8]:
        address = self._runtime.hostAlloc(nbytes, _REGISTERED)
        buffer: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        memory: npt.NDArray[np.uint8] = np.frombuffer(buffer, np.uint8, nbytes)
        # Not at exit: CUDA's runtime may be gone by then.
        weakref.finalize(memory, self._free_host, address).atexit = False
        return memory

    def lock(self, address: int, nbytes: int) -> None:
        self._runtime.hostRegister(address, nbytes, _REGISTERED)

    def unlock(self, address: int) -> None:
        self._runtime.hostUnregister(address)

    def copy(self, source: int, destination: int, nbytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(destination, source, nbytes, self._runtime.memcpyDefault, stream)

    def copy_batch(self, copies: Descriptors, stream: int) -> None:
        self._require_entered()
        self._batch(copies.source, copies.destination, copies.length, stream)

    def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        self._require_entered()
        self._kernel.launch(table, rows, chunks, blocks, stream)

    def _describe(self) -> Card:
        properties = self._runtime.getDeviceProperties(self.ordinal)
        return Card(
            name=properties["name"].decode(errors="replace"),
            bus=self._runtime.deviceGetPCIBusId(self.ordinal),
            driver=self._runtime.driverGetVersion(),
            multiprocessors=properties["multiProcessorCount"],
        )

    def _open(self, method: Method, load: Any) -> Any:
        try:
            return load()
        except Exception as error:  # noqa: BLE001
            # a compiler or driver may raise any exception; the other methods may still work
            self.unavailable[method] = str(error) or type(error).__name__
            return None

    def _free_host(self, address: int) -> None:
        """Free page-locked memory. Runs on the thread that drops the last reference to the array."""
        with contextlib.suppress(RuntimeError), self.current():  # RuntimeError: the device is lost
            self._runtime.freeHost(address)
