"""A device's context on any thread: entered without a call that another device would hear, and left as it was found."""

from __future__ import annotations

import ctypes
from typing import Final
from uuid import UUID

from tiercache_kernels.errors import CudaError, Unavailable, error_name

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SUCCESS: Final = 0
_SAME_ADDRESS: Final = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_SYMBOLS: Final = ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")


class DeviceContext:
    """The primary context of device `ordinal`, which torch, CuPy and CUDA's runtime share; it exists from now on, and no other one does.

    CUDA's runtime uses the context that is current by the driver's stack. A thread that has none gets, at its first call, one on device 0:
    hundreds of MiB there. So does `cudaSetDevice`, from CUDA 12 on, also where it only puts back what `cudaGetDevice` had said. The stack
    does neither.

    While a thread captures a graph in CUDA's strictest mode, which is torch's default, a call such as an event query on any thread that is
    not relaxed fails and spoils the capture with it. So a thread is relaxed before anything else is asked of the driver.

    Raises CudaError if the driver refuses. Thread safety: any thread.
    """

    def __init__(self, driver: ctypes.CDLL, ordinal: int) -> None:
        self._driver = driver
        self._device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        before = self._relax()
        try:
            self._call("cuInit", ctypes.c_uint(0))
            self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(ordinal))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        finally:
            self._exchange(before)

    @classmethod
    def load(cls, ordinal: int, library: str = "libcuda.so.1") -> DeviceContext:
        """Find the driver's library; `Unavailable` if there is none, or one that lacks a call."""
        try:
            driver = ctypes.CDLL(library)
        except OSError as error:
            raise Unavailable(f"the CUDA driver cannot be loaded: {error}") from error
        for symbol in _SYMBOLS:
            if not hasattr(driver, symbol):
                raise Unavailable(f"{library} is not a CUDA driver that can be used: it does not export {symbol}")
        return cls(driver, ordinal)

    def enter(self) -> int:
        """Make the context the calling thread's, on top of the one it has; what `leave` wants to be told."""
        before = self._relax()
        try:
            self._call("cuCtxPushCurrent_v2", self._context)
        except CudaError:
            self._exchange(before)
            raise
        return before

    def leave(self, before: int) -> None:
        """Undo `enter`, which said `before`, on the same thread."""
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))  # it fails only where there is no driver left
        self._exchange(before)

    def uuid(self) -> str:
        """What tells the device, or its MIG instance, from all others; empty if the driver does not say."""
        raw = (ctypes.c_ubyte * 16)()
        for symbol in ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"):
            if hasattr(self._driver, symbol) and self._driver[symbol](ctypes.byref(raw), self._device) == _SUCCESS:
                return str(UUID(bytes=bytes(raw)))
        return ""

    def reads_host_addresses(self) -> bool:
        """Does the device know page-locked memory by the address that it has on the host?"""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_SAME_ADDRESS), self._device)
        return bool(value.value)

    def mapped_address(self, address: int) -> int:
        """By which address the device knows registered memory that the host has at `address`. On a thread that has entered."""
        found = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
        return found.value

    def _call(self, symbol: str, *arguments: object) -> None:
        code = self._driver[symbol](*arguments)
        if code != _SUCCESS:
            raise CudaError(symbol, code, error_name(self._driver, code), None)

    def _relax(self) -> int:
        return self._exchange(_RELAXED)

    def _exchange(self, mode: int) -> int:
        """Set the thread's mode; the one before. A driver that lacks the call (CUDA 10.0) knows no modes either."""
        value = ctypes.c_int(mode)
        if hasattr(self._driver, "cuThreadExchangeStreamCaptureMode"):
            self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
        return value.value
