"""The copy kernel on a CUDA device, through CuPy."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import numpy as np

from tiercache_kernels.errors import Unavailable

THREADS: Final = 512
"""Threads of a block.

With four vectors of 16 bytes each they have a whole chunk in flight, at 32 registers a thread: a quarter of one multiprocessor's threads
and registers. Half as many threads with eight vectors each take about as many registers, in twice the code. `csrc/copy_segments.cuh` has
the same number.
"""
NAME: Final = "tiercache_copy_segments"
OPTIONS: Final = ("--std=c++17",)

_BODY: Final = "copy_segments.cuh"
_KERNEL: Final = "copy_segments.cu"


def source() -> str:
    """Return the kernel's source as one text, with its include inlined: NVRTC does not know the package's folder."""
    folder = files("tiercache_kernels") / "csrc"
    body = (folder / _BODY).read_text("utf-8").replace("#pragma once\n", "")
    return (folder / _KERNEL).read_text("utf-8").replace(f'#include "{_BODY}"\n', body)


@dataclass(frozen=True, slots=True)
class _Stream:
    """Stand-in for a CuPy stream: CuPy reads only `ptr` at a launch. Its `ExternalStream` works too, but warns from CuPy 14 on."""

    ptr: int


class CopyKernel:
    """The copy kernel, compiled for the calling thread's current device.

    Raises `Unavailable` if CuPy is not installed, and CuPy's own errors (RuntimeError, or CompileException) if there is no device or
    the compiler fails. Thread safety: any thread whose current device is the one of construction; streams keep the order.
    """

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise Unavailable(f"the copy kernel needs CuPy, which cannot be imported ({error}); install tiercache[cuda]") from error
        # The kernel is compiled here and not at the first launch: `get_function` loads the module on the current device.
        self._kernel = cupy.RawModule(code=source(), options=OPTIONS).get_function(NAME)

    def launch(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        """Queue the copies of `rows` segments, which are `chunks` chunks, in the raw `cudaStream_t` `stream`; at most `blocks` blocks run.

        `table` is the first row's address on the device (see `tiercache_kernels.table`); device memory is best, as each block searches
        the table for each chunk. The caller guarantees that the table and all segments stay mapped until the stream has passed this
        point, and that no destination overlaps another segment. Nothing is allocated or waited for. Raises ValueError if `blocks` is
        less than 1, and CuPy's CUDADriverError if the launch is refused.
        """
        if blocks < 1:
            raise ValueError(f"a grid of at most {blocks} blocks copies nothing; give 1 or more")
        if chunks == 0:
            return
        # The arguments are NumPy scalars, so that their dtype and not their value decides how wide an argument is.
        self._kernel((min(blocks, chunks),), (THREADS,), (np.uint64(table), np.uint64(rows)), stream=_Stream(stream))
