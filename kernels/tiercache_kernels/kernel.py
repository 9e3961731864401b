"""The copy kernel on a CUDA device, through CuPy, and the table of copies that the kernel reads.

A table has one row of four uint64, 32 bytes, per segment, and one end row:

    column        0 source    1 destination   2 length   3 first chunk
    segment 0     0x7f10...   0x55a0...          65536        0     two chunks of 32 KiB: 0 and 1
    segment 1     0x7f18...   0x55c0...            100        2     one short chunk: 2
    end row               0           0              0        3     number of all chunks

Addresses and lengths are in bytes, and a length is at least 1. Each segment is divided into chunks of
`CHUNK_BYTES`; the last chunk may be shorter. The chunks of all segments are numbered from 0 on, and column 3
has the number of the row's first chunk.

A part of a table is itself a table: the rows a to b describe the segments a to b - 1, and row b is the end
row. The kernel counts chunks from the value in column 3 of row a, and reads only column 3 of row b. One table
therefore serves all layers of a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache_kernels.driver import Unavailable

CHUNK_BYTES: Final = 32 << 10
"""Bytes that a thread block copies at a time: 512 threads x four vectors of 16 bytes.

All of these bytes are in flight at once. PCIe 5 x16 needs about 80 KiB in flight (55 GB/s x 1.5 us), so a
few blocks use the bus fully. Larger chunks would not increase the bytes in flight, and would divide the work
among fewer blocks: a layer's segment of 64 KiB has only two chunks.

`csrc/copy_segments.cuh` has the same number.
"""
COLUMNS: Final = 4
ROW_BYTES: Final = 32


def fill_table(
    out: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    destinations: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.int64],
) -> int:
    """Write a table of copies to `out`, of shape [n + 1, 4], and return the number of chunks.

    Copy i takes `lengths[i]` bytes from `sources[i]` to `destinations[i]`. These columns have shape [n]. The
    caller guarantees that every length is at least 1. Raises ValueError if shapes do not match.
    """
    n = len(lengths)
    if not (out.shape == (n + 1, COLUMNS) and sources.shape == destinations.shape == lengths.shape == (n,)):
        raise ValueError(
            f"a table of shape {out.shape} cannot take columns of shapes {sources.shape},"
            f" {destinations.shape}, {lengths.shape}; n segments need [n + 1, {COLUMNS}]"
        )
    out[:n, 0] = sources
    out[:n, 1] = destinations
    out[:n, 2] = lengths
    out[n, :3] = 0
    out[0, 3] = 0
    np.cumsum((out[:n, 2] + np.uint64(CHUNK_BYTES - 1)) // np.uint64(CHUNK_BYTES), out=out[1:, 3])
    return int(out[n, 3])


THREADS: Final = 512
"""Threads of a block.

Together they have a whole chunk in flight, four vectors of 16 bytes each. With 32 registers a thread, a
block takes a quarter of a multiprocessor's threads and registers. A block of 256 threads with eight vectors
each would need about as many registers, and its code would be twice as long.

`csrc/copy_segments.cuh` has the same number.
"""
NAME: Final = "tiercache_copy_segments"
OPTIONS: Final = ("--std=c++17",)

_BODY: Final = "copy_segments.cuh"
_KERNEL: Final = "copy_segments.cu"


def source() -> str:
    """Return the kernel's source as one text, with its include inlined.

    NVRTC, which compiles the text, does not know the package's folder.
    """
    folder = files("tiercache_kernels") / "csrc"
    body = (folder / _BODY).read_text("utf-8").replace("#pragma once\n", "")
    return (folder / _KERNEL).read_text("utf-8").replace(f'#include "{_BODY}"\n', body)


@dataclass(frozen=True, slots=True)
class _Stream:
    """Stand-in for a CuPy stream: CuPy reads only `ptr` at a launch.

    CuPy's own `ExternalStream` works too, but it warns from CuPy 14 on.
    """

    ptr: int


class CopyKernel:
    """The copy kernel, compiled for the calling thread's current device.

    Raises `Unavailable` if CuPy is not installed. Raises CuPy's own errors (RuntimeError, CompileException)
    if there is no device or the compiler fails.

    Thread safety: any thread whose current device is the one for which the kernel was compiled.
    """

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise Unavailable(
                f"the copy kernel needs CuPy, which cannot be imported ({error}); install cupy-cuda13x"
            ) from error
        # `get_function` loads the module on the current device. So the kernel is compiled here and not at the
        # first launch.
        self._kernel = cupy.RawModule(code=source(), options=OPTIONS).get_function(NAME)

    def launch(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        """Queue the copies of `rows` segments in the raw `cudaStream_t` `stream`.

        `chunks` is the number of chunks of these segments. `blocks` is the maximum number of thread blocks.
        `table` is the device's address of the first row. The table should be in device memory, because each
        block searches it for each chunk.

        The caller guarantees that the table and all segments stay mapped until the stream has made these
        copies, and that no destination overlaps another segment. The call allocates nothing and waits for
        nothing. Raises CuPy's CUDADriverError if the launch is refused.
        """
        if chunks == 0:
            return
        # CuPy takes an argument's width from the dtype of a NumPy scalar, but from the value of a Python int.
        self._kernel(
            (min(blocks, chunks),), (THREADS,), (np.uint64(table), np.uint64(rows)), stream=_Stream(stream)
        )
