"""Errors of the copies by descriptor.

RuntimeError
├── Unavailable    a way to copy that this machine does not have; another one does
└── CudaError      the driver refused, or reports an earlier failure
"""

from __future__ import annotations

import ctypes


class Unavailable(RuntimeError):  # noqa: N818
    """A way to copy is not available on this machine: its driver is missing or too old, or a package is not installed."""


class CudaError(RuntimeError):
    """The CUDA driver refused a call.

    `code` is its CUresult and `name` that code's name; `index` is the segment that was refused, None where the error belongs to no segment.
    Driver calls also report failures of earlier asynchronous work: then the segment is not the cause, and the context may be lost.
    """

    def __init__(self, call: str, code: int, name: str, index: int | None) -> None:
        super().__init__(f"{call} failed with {name} ({code})" + ("" if index is None else f" at segment {index}"))
        self.code = code
        self.name = name
        self.index = index


def error_name(driver: ctypes.CDLL, code: int) -> str:
    """Return the driver's name of a CUresult."""
    name = ctypes.c_char_p()
    if driver.cuGetErrorName(code, ctypes.byref(name)) != 0 or name.value is None:
        return "an unknown error"
    return name.value.decode()
