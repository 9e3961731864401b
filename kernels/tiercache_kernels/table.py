"""Table that the copy kernel reads: rows of four uint64, 32 bytes each, one row per segment and one end row.

    column 0  source address
    column 1  destination address
    column 2  length in bytes, at least 1
    column 3  first chunk: number of chunks of all segments above

A chunk is `CHUNK_BYTES` of one segment, counted from the segment's start; the last one may be shorter. The end row's first chunk is the
number of all chunks; its other columns are 0. The kernel counts chunks from the first chunk of the first row that it is given, and reads
only the first chunk of the end row. So rows [a, b] of a table are the table of segments a to b - 1, and one table serves all layers of a
transfer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

CHUNK_BYTES: Final = 32 << 10
"""Bytes that a block copies at a time: its threads have all of them in flight at once, in four vectors of 16 bytes each.

PCIe 5 x16 needs about 80 KiB in flight (55 GB/s x 1.5 us), so a handful of blocks fills it. Larger chunks would put no more in
flight and spread the work over fewer blocks: a layer's segment of 64 KiB is two chunks. `csrc/copy_segments.cuh` has the same number.
"""
COLUMNS: Final = 4
ROW_BYTES: Final = 32


def fill_table(
    out: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], destinations: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]
) -> int:
    """Write the table of `lengths[i]` bytes from `sources[i]` to `destinations[i]`, columns of shape [n], to `out` of shape [n + 1, 4].

    Returns the number of chunks. The caller guarantees that every length is at least 1. Raises ValueError if shapes do not match.
    """
    n = len(lengths)
    if not (out.shape == (n + 1, COLUMNS) and sources.shape == destinations.shape == lengths.shape == (n,)):
        raise ValueError(
            f"a table of shape {out.shape} cannot take columns of shapes {sources.shape}, {destinations.shape}, {lengths.shape}; "
            f"n segments need [n + 1, {COLUMNS}]"
        )
    out[:n, 0] = sources
    out[:n, 1] = destinations
    out[:n, 2] = lengths
    out[n, :3] = 0
    out[0, 3] = 0
    np.cumsum((out[:n, 2] + np.uint64(CHUNK_BYTES - 1)) // np.uint64(CHUNK_BYTES), out=out[1:, 3])
    return int(out[n, 3])
