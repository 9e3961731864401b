"""Entering of a device's CUDA context on any thread: no call involves another device, and the thread is left as it was found."""

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
    """The primary context of device `ordinal`, which torch, CuPy and CUDA's runtime share.

    Construction makes sure that it exists, and creates no context on another device.

    CUDA's runtime uses the context that is current on the driver's stack. A thread that has none gets, at its first call, one on device 0,
    which takes hundreds of MiB there. `cudaSetDevice` also creates one, from CUDA 12 on, even where it only restores what `cudaGetDevice`
    returned. Pushing to the driver's stack does neither.

    While a thread captures a graph in CUDA's strictest mode, which is torch's default, a call such as an event query on any thread that is
    not in the relaxed mode fails, and the capture fails with it. So a thread is set to the relaxed mode before any other call of the
    driver.

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
        """Load the driver's library. Raises `Unavailable` if there is none, or if it lacks a required call."""
        try:
            driver = ctypes.CDLL(library)
        except OSError as error:
            raise Unavailable(f"the CUDA driver cannot be loaded: {error}") from error
        for symbol in _SYMBOLS:
            if not hasattr(driver, symbol):
                raise Unavailable(f"{library} is not a CUDA driver that can be used: it does not export {symbol}")
        return cls(driver, ordinal)

    def enter(self) -> int:
        """Push the context onto the calling thread's stack; return the capture mode that `leave` needs."""
        before = self._relax()
        try:
            self._call("cuCtxPushCurrent_v2", self._context)
        except CudaError:
            self._exchange(before)
            raise
        return before

    def leave(self, before: int) -> None:
        """Undo `enter` on the same thread; `before` is what `enter` returned."""
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))  # it fails only if no driver is left
        self._exchange(before)

    def uuid(self) -> str:
        """Return the UUID of the device, or of its MIG instance; empty if the driver does not report one."""
        raw = (ctypes.c_ubyte * 16)()
        for symbol in ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"):
            if hasattr(self._driver, symbol) and self._driver[symbol](ctypes.byref(raw), self._device) == _SUCCESS:
                return str(UUID(bytes=bytes(raw)))
        return ""

    def reads_host_addresses(self) -> bool:
        """Return whether the device can use the host address of page-locked memory."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_SAME_ADDRESS), self._device)
        return bool(value.value)

    def mapped_address(self, address: int) -> int:
        """Return the device's address of registered memory at the host address `address`. The calling thread must have entered."""
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
        """Set the thread's capture mode and return the previous one.

        A driver without the call (CUDA 10.0) has no modes: nothing is set, and `mode` is returned.
        """
        value = ctypes.c_int(mode)
        if hasattr(self._driver, "cuThreadExchangeStreamCaptureMode"):
            self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
        return value.value
