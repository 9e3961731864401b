"""Leaving other threads' CUDA graphs alone."""

from __future__ import annotations

import ctypes
from typing import Final

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def relax_captures(library: str = "libcuda.so.1") -> bool:
    """Let the calling thread go on while another one captures a graph; False where the driver's library or its call is missing.

    While a thread captures in CUDA's strictest mode, which is torch's default, a call such as an event query on any thread that is not
    relaxed fails and spoils the capture with it. A relaxed thread promises not to depend on the order of what is being captured.
    """
    try:
        exchange = ctypes.CDLL(library).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    return bool(exchange(ctypes.byref(ctypes.c_int(_RELAXED))) == 0)
