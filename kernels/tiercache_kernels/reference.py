"""Copying of segments with the CPU: the oracle for the CUDA kernels, and the implementation on machines without them.

Costs were measured with CPython 3.11 on a virtual machine whose memory copies at 6.7 GB/s. A descriptor costs 0.3 us beside its bytes,
which is 3 % of a 64 KiB segment (10.3 us). The GIL matters more. A thread that releases it gets it back only when the other threads let go,
up to 5 ms later beside pure Python; so releasing it around every 64 KiB segment copied at 0.03 GB/s beside such a thread, and at 1.9 GB/s
beside one that calls into C all the time as torch does. Never releasing it copied at 3.2 GB/s, but stopped the other thread for 5 ms at a
time. The rule in `copy_segments` gave 0.4 to 1.5 GB/s beside pure Python and 5.1 to 5.7 GB/s beside a torch-like thread, which waited about
1 ms at worst; offering the GIL costs a lone copy of 64 KiB segments about a tenth of its speed.
"""

from __future__ import annotations

import ctypes
import time
from typing import Final

import numpy as np
import numpy.typing as npt

RELEASE_FROM: Final = 1 << 20
"""Smallest size in bytes of a single copy that is made without the GIL (150 us)."""
HOLD_AT_MOST: Final = 4 << 20
"""Bytes of smaller copies (600 us) after which the GIL is offered to other threads once."""
_OFFER_S: Final = 50e-6
"""Seconds of sleep that offer the GIL: long enough for a waiting thread to wake up and take it; `sleep(0)` is too short for that."""

_PROTOTYPE: Final = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_releasing = ctypes.CDLL(None).memmove
_holding = ctypes.PyDLL(None).memmove
_releasing.argtypes = _holding.argtypes = _PROTOTYPE
_releasing.restype = _holding.restype = None


def copy_segments(sources: npt.NDArray[np.uint64], destinations: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]) -> None:
    """Copy `lengths[i]` bytes from address `sources[i]` to address `destinations[i]`, in order; columns of shape [segments].

    The caller guarantees that all of it is mapped memory of this process, and that no destination overlaps another segment.
    Nothing is checked.
    """
    held = 0
    for destination, source, length in zip(destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        if length >= RELEASE_FROM:
            _releasing(destination, source, length)
            held = 0
            continue
        _holding(destination, source, length)
        held += length
        if held >= HOLD_AT_MOST:
            time.sleep(_OFFER_S)
            held = 0


def copy_table(table: npt.NDArray[np.uint64]) -> None:
    """Copy the segments of a table of shape [segments + 1, 4] (see `tiercache_kernels.table`), or of any of its rows [a, b].

    This is the CPU reference of the copy kernel; the last row given is not copied.
    """
    segments = table[:-1]
    copy_segments(segments[:, 0], segments[:, 1], segments[:, 2].astype(np.int64))
