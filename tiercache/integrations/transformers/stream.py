"""Stream in which torch works, and ways for other streams and threads to wait for it.

On a CPU, a torch call has finished its work when it returns. On CUDA, the call has only queued its work.
Without synchronisation three things would go wrong: copies to the host would start before the pages are
written, loads would arrive after the pages were read, and clocks would stop before the work is done.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final, TypeAlias

import torch

from tiercache.errors import ConfigError, install_line
from tiercache.transfer import Fence

Mark: TypeAlias = Any
"""Position in a stream, for measuring times: seconds of `time.perf_counter`, or a `torch.cuda.Event`."""

_WORKSPACE: Final = ":4096:8"
"""Workspaces that cuBLAS must use: 8 of 4,096 KiB each.

If cuBLAS chose its workspaces itself, it could add in a different order in each call.
"""


class TorchStream:
    """Stream of a CPU, where no work is pending after a call; subclasses are for other devices.

    Thread safety: one owner thread, the one that computes.
    """

    handle: int | None = None
    """CUDA's handle of the stream that must wait for a restored layer; None if the calling thread waits."""

    def fence(self) -> Fence | None:
        """Return a fence that is passed when all work queued so far is over; None if it is over already."""
        return None

    def synchronize(self) -> None:
        """Wait until all work queued so far is over."""

    def mark(self) -> Mark:
        """Return a mark of the present position in the stream."""
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
        # A new event each time: recording an event again would move a fence that is in use.
        event: Fence = self._current.record_event()
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
    """Return the stream of a device.

    Raises ConfigError for any device that is neither a CPU nor CUDA, because this module cannot wait for the
    work of such a device.
    """
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"the model's cache is on {device}, and only CPU and CUDA memory are served; move the model there"
        )
    return CudaStream(device) if device.type == "cuda" else TorchStream()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` without waiting for work that is queued there.

    CUDA copies asynchronously only from page-locked memory, so this page-locks the tensor first.
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def find_device(name: str) -> torch.device:
    """Return the device `cpu`, `cuda` or `cuda:N`; make a CUDA device torch's current one.

    Raises ConfigError, saying what to do, if the device does not exist.
    """
    if name == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ConfigError(
            f"device {name} needs a torch that was built for CUDA; {install_line('cuda')}, or name one"
            " that torch has"
        )
    count = torch.cuda.device_count()
    ordinal = int(name.partition(":")[2] or 0)
    if ordinal >= count:
        raise ConfigError(
            f"there is no device {name}, torch sees {count}; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        )
    # Kernels compiled for a model run on the thread's current device, not on that of the tensors.
    torch.cuda.set_device(ordinal)
    return torch.device("cuda", ordinal)


def describe(device: torch.device) -> str:
    """Return a description of a device for people: its name, or the number of threads of a CPU."""
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return f"{device}: {torch.get_num_threads()} threads"


def rounds_parts(device: torch.device) -> bool:
    """Return whether products of 16-bit tensors may round partial sums, and not only the final sum.

    cuBLAS may do so unless both settings of torch that allow it are off.
    """
    products = torch.backends.cuda.matmul
    allowed = (
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
    )
    return device.type == "cuda" and any(allowed)


def compute_repeatably() -> None:
    """Make equal calls on CUDA give equal bits, for the whole process.

    Call this function before the first matrix product; products become slower. Without this call, atomic
    additions are done in any order, and cuBLAS may also add in any order. For some operations, such as
    cumulative sums, torch has no kernel that it calls deterministic. Torch then warns, and the probe finds
    out whether equal calls of the model give equal results.

    This function also switches off TF32 and 16-bit partial sums. They do not change the order of additions,
    but with them a cut prefill differs by more than the probe accepts as rounding.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # In deterministic mode torch fills new tensors, so every restored page would be written twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
