"""The stream in which torch works, and how other streams and threads wait for it.

On a CPU, a torch call is over when it returns. On CUDA it is only queued, and without synchronisation three things go wrong: copies to the
host start before the pages are written, loads arrive after the pages were read, and clocks stop before the work is done.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final, TypeAlias

import torch

from tiercache.controller.state import Fence
from tiercache.errors import ConfigError

Mark: TypeAlias = Any
"""A place in a stream, for measuring times: seconds of `time.perf_counter`, or a `torch.cuda.Event`."""

_WORKSPACE: Final = ":4096:8"
"""Workspace that cuBLAS must use for sums: if it chose one itself, it could add in another order from call to call."""


class TorchStream:
    """The stream of a CPU, where no work is ever pending after a call; subclasses stand for other devices.

    Thread safety: one owner thread, the one that computes.
    """

    handle: int | None = None
    """CUDA's handle of the stream that must wait for a restored layer; None for the calling thread."""

    def fence(self) -> Fence | None:
        """Return a fence that is passed when all work queued so far is over; None if it is over already."""
        return None

    def synchronize(self) -> None:
        """Wait until all work queued so far is over."""

    def mark(self) -> Mark:
        """Return a mark of where the stream is now."""
        return time.perf_counter()

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds from one mark to a later one; the stream must have passed both."""
        return float(end - start)


class CudaStream(TorchStream):
    """The stream that is current on a CUDA device at the time of each call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def handle(self) -> int:  # type: ignore[override]
        """CUDA's handle of the current stream; 0 is the default stream."""
        return int(self._current.cuda_stream)

    def fence(self) -> Fence:  # noqa: D102
        event: Fence = self._current.record_event()  # a new event each time: recording an event again would move a fence that is in use
        return event

    def synchronize(self) -> None:  # noqa: D102
        self._current.synchronize()

    def mark(self) -> Mark:  # noqa: D102
        event: Mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return self._current.record_event(event)

    def seconds(self, start: Mark, end: Mark) -> float:  # noqa: D102
        return float(start.elapsed_time(end)) / 1e3

    @property
    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


def stream_of(device: torch.device) -> TorchStream:
    """Return the stream of a device. Raises ConfigError for a kind of device whose work could not be waited for."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the model's cache is on {device}, and only CPU and CUDA memory are served; move the model there")
    return CudaStream(device) if device.type == "cuda" else TorchStream()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` without waiting for work that is queued there.

    CUDA copies asynchronously only from page-locked memory, so the tensor is page-locked first.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def find_device(name: str) -> torch.device:
    """Return the device `cpu`, `cuda` or `cuda:N`; make a CUDA device torch's current one.

    Raises ConfigError, saying what to do, if the device is not there.
    """
    if name == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ConfigError(f"device {name} needs a torch that was built for CUDA; pip install 'tiercache[cuda]', or name one that torch has")
    count = torch.cuda.device_count()
    ordinal = int(name.partition(":")[2] or 0)
    if ordinal >= count:
        raise ConfigError(f"there is no device {name}, torch sees {count}; see `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    torch.cuda.set_device(ordinal)  # kernels compiled for a model run on the thread's current device, not on that of the tensors
    return torch.device("cuda", ordinal)


def describe(device: torch.device) -> str:
    """Return a description of a device for people: its name, or the number of threads of a CPU."""
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return f"{device}: {torch.get_num_threads()} threads"


def rounds_parts(device: torch.device) -> bool:
    """Return whether products of 16-bit tensors may round the parts of a sum, and not only the whole.

    cuBLAS does so unless it is told not to.
    """
    products = torch.backends.cuda.matmul
    allowed = (products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction)
    return device.type == "cuda" and any(allowed)


def compute_repeatably() -> None:
    """Make equal calls on CUDA give equal bits, for the whole process; call it before the first matrix product. Costs speed.

    Atomic sums are added in any order, and sums of cuBLAS may be too. Where torch has only a kernel that it calls non-deterministic (sums
    along a vector), it warns; the probe then finds out whether the model repeats itself. TF32 and narrow sums do not affect the order, but
    with them a cut moves the logits by more than the probe attributes to rounding.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # every restored page would be written twice
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
