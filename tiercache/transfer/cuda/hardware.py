"""A real CUDA device, through CuPy."""

# ruff: noqa: D102 (the contract documents these methods)
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tiercache_kernels.batch import BatchCopy
from tiercache_kernels.capture import relax_captures
from tiercache_kernels.kernel import CopyKernel

from tiercache.errors import ConfigError
from tiercache.transfer.cuda.device import Card, CudaDevice, Method
from tiercache.transfer.descriptors import Copies

_NOT_READY: Final = 600
"""cudaErrorNotReady: no failure."""
_REGISTERED: Final = 1 | 2
"""cudaHostRegisterPortable | cudaHostRegisterMapped; cudaHostAlloc's flags have the same values."""
_HIGHEST: Final = -100
_LOWEST: Final = 0
"""Priorities of streams; CUDA takes the nearest that it has."""


class CupyDevice(CudaDevice):
    """Device `ordinal` of this process, in the context that torch and CuPy share.

    Raises ConfigError, saying what to install or to look at, if there is no CuPy or no such device.
    """

    def __init__(self, ordinal: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise ConfigError(f"device cuda:{ordinal} needs CuPy ({error}); pip install 'tiercache[cuda]'") from error
        self.ordinal = ordinal
        self._cupy: Any = cupy
        self._runtime: Any = cupy.cuda.runtime
        try:
            count = self._runtime.getDeviceCount()
        except RuntimeError as error:
            raise ConfigError(f"device cuda:{ordinal} cannot be used: {error}; `nvidia-smi` should list it") from error
        if ordinal >= count:
            raise ConfigError(f"there is no device cuda:{ordinal}, this process sees {count}; see CUDA_VISIBLE_DEVICES")
        with self.current():
            self._runtime.free(0)  # makes the context
            self.card = self._describe()
            self.unavailable: dict[Method, str] = {}
            self._batch = self._open(Method.BATCH, BatchCopy.load)
            self._kernel = self._open(Method.KERNEL, self._load_kernel)

    def activate(self) -> None:
        self._runtime.setDevice(self.ordinal)
        self._runtime.free(0)  # with a CUDA before 12 it takes a call to make the context current
        relax_captures()

    @contextmanager
    def current(self) -> Iterator[None]:
        before = self._runtime.getDevice()
        if before == self.ordinal:  # not set again: on a thread that never used it, that would be the first use of another device
            yield
            return
        self._runtime.setDevice(self.ordinal)
        try:
            yield
        finally:
            self._runtime.setDevice(before)

    def create_stream(self, *, urgent: bool) -> int:
        stream: int = self._runtime.streamCreateWithPriority(self._runtime.streamNonBlocking, _HIGHEST if urgent else _LOWEST)
        return stream

    def destroy_stream(self, stream: int) -> None:
        self._runtime.streamDestroy(stream)

    def synchronize_stream(self, stream: int) -> None:
        self._runtime.streamSynchronize(stream)

    def create_event(self) -> int:
        event: int = self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming | self._runtime.eventBlockingSync)
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
            raise RuntimeError(f"CUDA error {status} while an event was looked at")
        return bool(status == 0)

    def allocate(self, nbytes: int) -> int:
        address: int = self._runtime.malloc(nbytes)
        return address

    def release(self, address: int) -> None:
        self._runtime.free(address)

    def allocate_host(self, nbytes: int) -> npt.NDArray[np.uint8]:
        memory = self._cupy.cuda.PinnedMemory(nbytes, _REGISTERED)
        return np.frombuffer(self._cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    def lock(self, address: int, nbytes: int) -> None:
        self._runtime.hostRegister(address, nbytes, _REGISTERED)

    def unlock(self, address: int) -> None:
        self._runtime.hostUnregister(address)

    def copy(self, source: int, destination: int, nbytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(destination, source, nbytes, self._runtime.memcpyDefault, stream)

    def copy_batch(self, copies: Copies, stream: int) -> None:
        self._batch(copies.source, copies.destination, copies.length, stream)

    def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        self._kernel.launch(table, rows, chunks, blocks, stream)

    def _describe(self) -> Card:
        properties = self._runtime.getDeviceProperties(self.ordinal)
        return Card(
            name=properties["name"].decode(errors="replace"),
            bus=self._runtime.deviceGetPCIBusId(self.ordinal),
            driver=self._runtime.driverGetVersion(),
            runtime=self._runtime.runtimeGetVersion(),
            multiprocessors=properties["multiProcessorCount"],
        )

    def _open(self, method: Method, load: Any) -> Any:
        try:
            return load()
        except Exception as error:  # noqa: BLE001  whatever a compiler or a driver says: this method is not to be had, others are
            self.unavailable[method] = str(error) or type(error).__name__
            return None

    def _load_kernel(self) -> CopyKernel:
        same = self._runtime.deviceGetAttribute(self._runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, self.ordinal)
        if not same:
            raise RuntimeError("page-locked memory has another address on this device than on the host")
        return CopyKernel()
