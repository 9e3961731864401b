"""The stream in which torch works, and what has to be said aloud where others take over from it.

On a CPU, a call of torch's is over when it returns. On CUDA it is queued, and three things happen behind its back unless they are told
otherwise: copies to the host start before the pages are written, loads come after they were read, and clocks stop before the work is done.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final, TypeAlias

import torch

from tiercache.controller.state import Fence
from tiercache.errors import ConfigError

Mark: TypeAlias = Any
"""A place in a stream, to take times from: seconds, or a `torch.cuda.Event`."""

_WORKSPACE: Final = ":4096:8"
"""cuBLAS's memory to sum up in; with a choice of its own it may add in another order from call to call."""


class TorchStream:
    """The CPU's, where nothing is ever under way. Thread safety: the thread that computes."""

    handle: int | None = None
    """What a restored layer is to be handed over to: CUDA's handle of the stream, or None for the calling thread."""

    def fence(self) -> Fence | None:
        """Passed when all that was queued so far is over; None if it is."""
        return None

    def synchronize(self) -> None:
        """Return once all that was queued so far is over."""

    def mark(self) -> Mark:
        """Where the stream stands now."""
        return time.perf_counter()

    def seconds(self, start: Mark, end: Mark) -> float:
        """The time from one mark to a later one, both of which are passed."""
        return float(end - start)


class CudaStream(TorchStream):
    """Whichever stream is current on a CUDA device when it is asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def handle(self) -> int:  # type: ignore[override]
        """See `TorchStream`; 0 is the default stream."""
        return int(self._current.cuda_stream)

    def fence(self) -> Fence:  # noqa: D102
        event: Fence = self._current.record_event()  # a new one each time: who passes a fence on must leave it alone
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
    """The stream of a device. ConfigError for a kind whose work could not be waited for."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the model's cache is on {device}, and only CPU and CUDA memory are served; move the model there")
    return CudaStream(device) if device.type == "cuda" else TorchStream()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU's on `device`, without waiting for what is queued there: only page-locked memory is copied in passing."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def find_device(name: str) -> torch.device:
    """The device `cpu`, `cuda` or `cuda:N`, made torch's current one. ConfigError, saying what to do, if it is not there."""
    if name == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ConfigError(f"device {name} needs a torch that was built for CUDA; pip install 'tiercache[cuda]', or name one that torch has")
    count = torch.cuda.device_count()
    ordinal = int(name.partition(":")[2] or 0)
    if ordinal >= count:
        raise ConfigError(f"there is no device {name}, torch sees {count}; see `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    torch.cuda.set_device(ordinal)  # kernels that are compiled for a model start where the thread is, not where its tensors are
    return torch.device("cuda", ordinal)


def describe(device: torch.device) -> str:
    """A device by name, for people."""
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return f"{device}: {torch.get_num_threads()} threads"


def rounds_parts(device: torch.device) -> bool:
    """May products of 16-bit tensors round the parts of a sum, and not only the whole? cuBLAS does, unless it is told not to."""
    products = torch.backends.cuda.matmul
    allowed = (products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction)
    return device.type == "cuda" and any(allowed)


def compute_repeatably() -> None:
    """Let equal calls on CUDA give equal bits, for the whole process; before its first product. Costs speed.

    Atomic sums come in any order, and so may those of cuBLAS. Where torch has no other kernel than one that it calls non-deterministic
    (sums along a vector) it warns; whether a model repeats itself is what the probe sees. TF32 and narrow sums have nothing to do with
    order, but with them a cut moves the logits by more than the probe takes for rounding.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # every restored page would be written twice
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
