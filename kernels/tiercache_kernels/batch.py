"""Many copies in one call of the CUDA driver: `cuMemcpyBatchAsync`, which uses the copy engines and no multiprocessor.

The call is made through ctypes and passes the columns as they are: bindings that take Python lists need about 1 ms for 6,000 copies.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from tiercache_kernels.errors import CudaError, Unavailable, error_name

MINIMUM_DRIVER: Final = 12080
"""Oldest driver that has the call: CUDA 12.8, as the driver encodes versions."""

MOST_COPIES: Final = 4096
"""Largest number of copies in one call of the driver.

NVIDIA names no limit; 51,828 copies in one call were reported to crash a driver for CUDA 13.0 (580.159.04, RTX PRO 6000) in vLLM's issue
49276. 4,096 copies of 4 KiB take 300 us on the bus and a call takes microseconds, so the limit costs nothing. Raise it only on the evidence
of a measurement on a card.
"""

_SYMBOL: Final = "cuMemcpyBatchAsync"
_SUCCESS: Final = 0
_SOURCE_ORDER_STREAM: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_PREFER_OVERLAP: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_DEFAULT_STREAMS: Final = {0: "the legacy default stream", 1: "the legacy default stream", 2: "the per-thread default stream"}
_NOWHERE: Final = ctypes.c_size_t(-1).value  # SIZE_MAX: no copy of the batch is to blame


class _Location(ctypes.Structure):
    """CUmemLocation. All zero means no hint: hints are for managed and pageable memory only."""

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

    Thread safety: any thread that has a CUDA context current. The GIL is released while the driver works.
    """

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        # The plain name is deliberate. The headers of CUDA 13 call `cuMemcpyBatchAsync_v2` instead, which does not say where it failed
        # and which drivers before 13.0 lack. The symbol without a suffix keeps its first ABI, that of 12.8, in every later driver.
        self._copy: _Call = driver[_SYMBOL]
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self._copy.restype = ctypes.c_int
        # With STREAM order a source is read only after the stream's previous work is over; the forward pass may still be writing it.
        self._attributes = _Attributes(source_order=_SOURCE_ORDER_STREAM, flags=_PREFER_OVERLAP)
        self._from_first = ctypes.c_size_t(0)  # index of the first copy to which the attributes apply

    @classmethod
    def load(cls, library: str = "libcuda.so.1") -> BatchCopy:
        """Load the driver's library and find the call. Raises `Unavailable` without a driver for CUDA 12.8 or later that exports it."""
        try:
            driver = ctypes.CDLL(library)
        except OSError as error:
            raise Unavailable(f"no batched copies without the CUDA driver: {error}") from error
        version = _driver_version(driver, library)
        if version < MINIMUM_DRIVER:
            raise Unavailable(f"batched copies need a driver for CUDA {_written(MINIMUM_DRIVER)}; {library} is for {_written(version)}")
        if not hasattr(driver, _SYMBOL):
            raise Unavailable(f"batched copies need {_SYMBOL}, which {library} does not export")
        return cls(driver)

    def __call__(
        self, sources: npt.NDArray[np.uint64], destinations: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], stream: int
    ) -> None:
        """Queue copies of `lengths[i]` bytes from `sources[i]` to `destinations[i]`, columns of shape [n], in the raw stream `stream`.

        The driver keeps nothing of the columns; contiguous ones are handed over as they are, `MOST_COPIES` at a time. The copies are made
        in no particular order. The caller guarantees that every length is at least 1, that host memory is pinned, that all of it stays
        mapped until the stream has passed this point, and that no destination overlaps another segment. Raises ValueError for columns that
        differ in shape, and for a default stream, which the driver does not accept here. Raises `CudaError` if the driver refuses; then
        some of the copies may have been queued.
        """
        if stream in _DEFAULT_STREAMS:
            raise ValueError(f"batched copies cannot be queued in {_DEFAULT_STREAMS[stream]} ({stream}); give them a stream of their own")
        if not sources.shape == destinations.shape == lengths.shape == (len(lengths),):
            raise ValueError(f"columns of shapes {sources.shape}, {destinations.shape}, {lengths.shape}; they must be [n], all three")
        if not len(lengths):
            return
        # These names keep the arrays alive until the driver has read them; `ascontiguousarray` may have made copies.
        froms, tos = np.ascontiguousarray(sources, np.uint64), np.ascontiguousarray(destinations, np.uint64)
        sizes = np.ascontiguousarray(lengths, np.int64)
        for first in range(0, len(sizes), MOST_COPIES):
            rows = slice(first, first + MOST_COPIES)
            self._queue(tos[rows], froms[rows], sizes[rows], stream, first)

    def _queue(
        self, tos: npt.NDArray[np.uint64], froms: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], stream: int, first: int
    ) -> None:
        """Make one call of the driver. `first`: number of copies given to earlier calls, added to the index in a CudaError."""
        failed = ctypes.c_size_t(_NOWHERE)
        code = self._copy(
            tos.ctypes.data,
            froms.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._from_first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if code != _SUCCESS:
            raise CudaError(_SYMBOL, code, error_name(self._driver, code), None if failed.value == _NOWHERE else first + failed.value)


def _driver_version(driver: ctypes.CDLL, library: str) -> int:
    version = ctypes.c_int(0)
    try:
        code = driver.cuDriverGetVersion(ctypes.byref(version))
    except AttributeError as error:
        raise Unavailable(f"no batched copies: {library} is not a CUDA driver, it does not export cuDriverGetVersion") from error
    if code != _SUCCESS:
        raise Unavailable(f"no batched copies: the CUDA driver {library} does not tell its version ({error_name(driver, code)})")
    return version.value


def _written(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
