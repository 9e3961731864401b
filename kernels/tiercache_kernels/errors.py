"""Errors of this package.

RuntimeError
├── Unavailable    this machine cannot copy in this way; copy in another way
└── CudaError      the driver refused a call, or reports an earlier failure
"""

from __future__ import annotations

import ctypes


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
