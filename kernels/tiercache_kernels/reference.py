"""Copying of segments with the CPU, the reference for the kernels and the method on machines without CUDA.

The speed depends mostly on how often a copy releases the GIL. A thread that has released the GIL may have to
wait until another thread gives the GIL up. A thread of pure Python may keep the GIL for 5 ms. `copy_segments`
therefore follows a rule. It makes each large copy without the GIL. It holds the GIL during smaller copies,
and offers the GIL to other threads once after every `MAX_HELD_BYTES` of them.

The table has the speed of copies of 64 KiB segments beside one other thread. That thread runs pure Python, or
calls into C all the time as torch does. Measured with CPython 3.11 on a virtual machine whose memory copies
at 6.7 GB/s; "-" was not measured.

    GIL released            pure Python          torch-like         effect on the other thread
    around every segment    0.03 GB/s            1.9 GB/s
    never                   3.2 GB/s             -                  stops for 5 ms at a time
    by the rule             0.4 to 1.5 GB/s      5.1 to 5.7 GB/s    waits about 1 ms at worst (torch-like)

Without another thread, the rule costs about a tenth of the speed. Each segment costs 0.3 us besides the
copying of its bytes, which is 3 % of the 10.3 us for a segment of 64 KiB.
"""

from __future__ import annotations

import ctypes
import time
from typing import Final

import numpy as np
import numpy.typing as npt

MIN_RELEASED_BYTES: Final = 1 << 20
"""Smallest size in bytes of a single copy that is made without the GIL. Such a copy takes 150 us."""
MAX_HELD_BYTES: Final = 4 << 20
"""Number of bytes, copied with the GIL held, after which other threads may take the GIL once.

Copying these bytes takes 600 us.
"""
_OFFER_S: Final = 50e-6
"""Seconds of sleep during which other threads may take the GIL.

A waiting thread needs this time to wake up and take the GIL. `sleep(0)` is too short.
"""

_PROTOTYPE: Final = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_releasing = ctypes.CDLL(None).memmove
_holding = ctypes.PyDLL(None).memmove
_releasing.argtypes = _holding.argtypes = _PROTOTYPE
_releasing.restype = _holding.restype = None


def copy_segments(
    sources: npt.NDArray[np.uint64], destinations: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]
) -> None:
    """Copy `lengths[i]` bytes from address `sources[i]` to address `destinations[i]`, in order.

    The columns have shape [segments]. The caller guarantees that all segments are in mapped memory of this
    process, and that no destination overlaps another segment. Nothing is checked.
    """
    held = 0  # bytes copied since the GIL was last released
    for destination, source, length in zip(
        destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True
    ):
        if length >= MIN_RELEASED_BYTES:
            _releasing(destination, source, length)
            held = 0
            continue
        _holding(destination, source, length)
        held += length
        if held >= MAX_HELD_BYTES:
            time.sleep(_OFFER_S)
            held = 0


def copy_table(table: npt.NDArray[np.uint64]) -> None:
    """Copy the segments of a table of shape [segments + 1, 4], as the copy kernel does on a GPU.

    `tiercache_kernels.kernel` describes the table. The last row is the end row, which is not copied.
    """
    segments = table[:-1]
    copy_segments(segments[:, 0], segments[:, 1], segments[:, 2].astype(np.int64))
