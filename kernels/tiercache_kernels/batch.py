"""Many copies in one call of the CUDA driver, `cuMemcpyBatchAsync`.

The device's copy engines do the work, and no multiprocessor is used. The call goes through ctypes, which
passes NumPy columns without conversion. Bindings that take Python lists would add about 1 ms for 6,000
copies.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from tiercache_kernels.driver import CudaError, Unavailable, error_name, load_driver

MINIMUM_DRIVER: Final = 12080
"""Version of the oldest driver that has the call: 12080 stands for CUDA 12.8."""

MAX_COPIES: Final = 4096
"""Maximum number of copies in one call of the driver.

NVIDIA names no limit, but vLLM's issue 49276 reports that 51,828 copies in one call crashed a driver for CUDA
13.0 (580.159.04, RTX PRO 6000). The limit costs almost nothing: 4,096 copies of 4 KiB take 300 us on the bus,
and a further call takes microseconds. Raise it only after a measurement on a real device.
"""

_SYMBOL: Final = "cuMemcpyBatchAsync"
_SUCCESS: Final = 0
_SOURCE_ORDER_STREAM: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PREFER_OVERLAP: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_NO_INDEX: Final = ctypes.c_size_t(-1).value  # SIZE_MAX: the error belongs to no copy


class _Location(ctypes.Structure):
    """CUmemLocation. It stays all zero, which means no hint. Only managed and pageable memory uses hints."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _Call(Protocol):
    argtypes: Any
    restype: Any

    def __call__(self, *arguments: Any) -> int: ...


class BatchCopy:
    """Batched copies by the CUDA driver, as a callable.

    Thread safety: any thread with a current CUDA context. The GIL is released while the driver works.
    """

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        # The name without a suffix is deliberate: this symbol has the ABI of CUDA 12.8 in every later driver.
        # The headers of CUDA 13 call `cuMemcpyBatchAsync_v2` instead. Drivers before 13.0 lack `_v2`, and
        # `_v2` does not report which copy failed.
        self._copy: _Call = driver[_SYMBOL]
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self._copy.restype = ctypes.c_int
        # With STREAM order, a source is read only after all earlier work of the stream, such as a forward
        # pass that writes it.
        self._attributes = _Attributes(source_order=_SOURCE_ORDER_STREAM, flags=_PREFER_OVERLAP)
        self._from_first = ctypes.c_size_t(0)  # index of the first copy to which the attributes apply

    @classmethod
    def load(cls, library: str = "libcuda.so.1") -> BatchCopy:
        """Load the driver's library and find the call.

        Raises `Unavailable` if the driver is missing, is older than CUDA 12.8, or does not export the call.
        """
        driver = load_driver(library, ["cuDriverGetVersion"])
        version = _driver_version(driver, library)
        if version < MINIMUM_DRIVER:
            raise Unavailable(
                f"batched copies need a driver for CUDA {_written(MINIMUM_DRIVER)}; {library} is for"
                f" {_written(version)}"
            )
        if not hasattr(driver, _SYMBOL):
            raise Unavailable(f"batched copies need {_SYMBOL}, which {library} does not export")
        return cls(driver)

    def __call__(
        self,
        sources: npt.NDArray[np.uint64],
        destinations: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.int64],
        stream: int,
    ) -> None:
        """Queue copies of `lengths[i]` bytes from `sources[i]` to `destinations[i]` in the raw `stream`.

        The columns are contiguous, have shape [n], and may be changed after the call. The order in which the
        driver makes the copies is undefined.

        The caller guarantees that there are at most `MAX_COPIES` copies, that every length is at least 1,
        that host memory is pinned, that all memory stays mapped until the stream has made these copies, that
        no destination overlaps another source or destination, and that the stream is no default stream, which
        the driver does not accept here. Raises `CudaError` if the driver refuses the call; some copies may
        then be queued.
        """
        failed = ctypes.c_size_t(_NO_INDEX)
        code = self._copy(
            destinations.ctypes.data,
            sources.ctypes.data,
            lengths.ctypes.data,
            len(lengths),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._from_first),
            1,  # one set of attributes, for all copies
            ctypes.addressof(failed),
            stream,
        )
        if code != _SUCCESS:
            index = None if failed.value == _NO_INDEX else failed.value
            raise CudaError(_SYMBOL, code, error_name(self._driver, code), index)


def _driver_version(driver: ctypes.CDLL, library: str) -> int:
    version = ctypes.c_int(0)
    code = driver.cuDriverGetVersion(ctypes.byref(version))
    if code != _SUCCESS:
        raise Unavailable(
            f"no batched copies: the CUDA driver {library} does not report its version"
            f" ({error_name(driver, code)})"
        )
    return version.value


def _written(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
