"""What computes while copies are under way: matrix products in a stream of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from tiercache.errors import ConfigError
from tiercache.transfer.cuda import CudaDevice


class Products(Protocol):
    """Products of two matrices on a device. Thread safety: one thread, with the device current."""

    stream: int
    """The device's handle of the stream they run in."""

    def queue(self, count: int) -> None:
        """Queue so many products, one behind the other, and return at once."""

    def close(self) -> None:
        """Give back what they use, once nothing is under way."""


MakeProducts: TypeAlias = Callable[[CudaDevice, int], Products]
"""Products of square matrices of a width; ConfigError, in words for a user, where there can be none."""


class TorchProducts:
    """By torch, in bfloat16. ConfigError without torch, or where it sees no CUDA. Thread safety: as `Products`."""

    def __init__(self, device: CudaDevice, width: int) -> None:
        try:
            import torch
        except ImportError as error:
            raise ConfigError(f"torch cannot be imported ({error}); pip install 'tiercache[cuda]'") from error
        if not torch.cuda.is_available():
            raise ConfigError(f"torch {torch.__version__} sees no CUDA device; install a build of torch for CUDA")
        self._torch: Any = torch
        self._stream = self._torch.cuda.Stream(device=device.ordinal)
        self.stream: int = self._stream.cuda_stream
        with self._torch.cuda.stream(self._stream):
            self._factors = [self._matrix(width, device.ordinal).normal_() for _ in range(2)]
            self._product = self._matrix(width, device.ordinal)

    def queue(self, count: int) -> None:  # noqa: D102
        with self._torch.cuda.stream(self._stream), self._torch.inference_mode():
            for _ in range(count):
                self._torch.matmul(*self._factors, out=self._product)

    def close(self) -> None:  # noqa: D102
        self._stream.synchronize()
        self._factors.clear()
        del self._product
        self._torch.cuda.empty_cache()

    def _matrix(self, width: int, ordinal: int) -> Any:
        return self._torch.empty(width, width, dtype=self._torch.bfloat16, device=f"cuda:{ordinal}")


def run_products(device: CudaDevice, products: Products, count: int) -> float:
    """Run `count` products to the end of the last: the seconds they took."""
    started = time.perf_counter()
    products.queue(count)
    device.synchronize_stream(products.stream)
    return time.perf_counter() - started


def count_for(device: CudaDevice, products: Products, seconds: float, sample: int) -> int:
    """How many products take about `seconds`, judged by `sample` of them, after as many to warm up."""
    run_products(device, products, sample)
    return max(1, round(seconds / run_products(device, products, sample) * sample))
