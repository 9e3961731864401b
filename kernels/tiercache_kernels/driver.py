"""The CUDA driver: its errors, and the context of a device, which any thread can enter and leave.

RuntimeError
├── Unavailable    this machine cannot copy in this way; copy in another way
└── CudaError      the driver refused a call, or reports an earlier failure
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SUCCESS: Final = 0
_SAME_ADDRESS: Final = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_SYMBOLS: Final = (
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
)


class Unavailable(RuntimeError):  # noqa: N818
    """A way to copy is not available on this machine.

    The CUDA driver is missing or too old, or a package is not installed.
    """


class CudaError(RuntimeError):
    """The CUDA driver refused a call.

    A driver call also reports failures of earlier asynchronous work. Such a failure belongs to no segment
    (one copy of the call), and the CUDA context may be unusable after it.
    """

    def __init__(self, call: str, code: int, name: str, index: int | None) -> None:
        super().__init__(
            f"{call} failed with {name} ({code})" + ("" if index is None else f" at segment {index}")
        )
        self.code = code
        """CUresult of the call."""
        self.name = name
        """Name of the code."""
        self.index = index
        """Number of the segment that the driver refused; None if the error belongs to no segment."""


def error_name(driver: ctypes.CDLL, code: int) -> str:
    """Return the name that the driver has for a CUresult."""
    name = ctypes.c_char_p()
    if driver.cuGetErrorName(code, ctypes.byref(name)) != 0 or name.value is None:
        return "an unknown error"
    return name.value.decode()


def load_driver(library: str, symbols: Sequence[str]) -> ctypes.CDLL:
    """Load the driver's library. Raises `Unavailable` if there is none, or if it lacks one of `symbols`."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise Unavailable(f"the CUDA driver cannot be loaded: {error}") from error
    for symbol in symbols:
        if not hasattr(driver, symbol):
            raise Unavailable(f"{library} is not a CUDA driver that can be used: it does not export {symbol}")
    return driver


class DeviceContext:
    """The primary context of device `ordinal`, which torch, CuPy and CUDA's runtime share.

    The constructor creates this context if it does not exist yet. It creates no context on another device.

    `enter` pushes the context onto the driver's stack, because a push creates no context. CUDA's runtime uses
    the top context of the calling thread's stack. If the stack is empty, the runtime's first call creates a
    context on device 0, and takes hundreds of MiB there. From CUDA 12 on, `cudaSetDevice` creates a context,
    too, even if it only restores the device that `cudaGetDevice` returned.

    `enter` also sets the thread to the relaxed capture mode. Another thread may be capturing a graph in
    CUDA's strictest mode, which is torch's default. During such a capture, calls such as an event query fail
    on every thread that is not in the relaxed mode, and the failed call makes the capture fail.

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
        """Load the driver's library, and make the context of device `ordinal`.

        Raises `Unavailable` if there is no such library, or if the library lacks a required call.
        """
        return cls(load_driver(library, _SYMBOLS), ordinal)

    def enter(self) -> int:
        """Push the context onto the calling thread's stack; return the capture mode that `leave` restores."""
        before = self._relax()
        try:
            self._call("cuCtxPushCurrent_v2", self._context)
        except CudaError:
            self._exchange(before)
            raise
        return before

    def leave(self, before: int) -> None:
        """Undo `enter` on the same thread; `before` is what `enter` returned."""
        # The result is ignored: this call fails only while the process ends and the driver is unloaded.
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        self._exchange(before)

    def reads_host_addresses(self) -> bool:
        """Return whether the device can use the host address of page-locked memory."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_SAME_ADDRESS), self._device)
        return bool(value.value)

    def _call(self, symbol: str, *arguments: object) -> None:
        code = self._driver[symbol](*arguments)
        if code != _SUCCESS:
            raise CudaError(symbol, code, error_name(self._driver, code), None)

    def _relax(self) -> int:
        return self._exchange(_RELAXED)

    def _exchange(self, mode: int) -> int:
        """Set the thread's capture mode and return the previous one."""
        value = ctypes.c_int(mode)
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
        return value.value
