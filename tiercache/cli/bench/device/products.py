"""The computation that runs beside copies: matrix products in a stream of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from tiercache.errors import ConfigError
from tiercache.transfer.cuda import CudaDevice


class Products(Protocol):
    """Products of two matrices on a device.

    Thread safety: one thread, with the device current.
    """

    stream: int
    """Handle of the device stream that the products run in."""

    def queue(self, count: int) -> None:
        """Queue `count` products, one after another, and return at once."""

    def close(self) -> None:
        """Wait for queued products, then release the memory that they use."""


MakeProducts: TypeAlias = Callable[[CudaDevice, int], Products]
"""A function of device and width that returns products of square matrices; raises ConfigError, worded for users, if it cannot."""


class TorchProducts:
    """Products computed by torch in bfloat16. Raises ConfigError if torch is missing or sees no CUDA device.

    Thread safety: as `Products`.
    """

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
    """Run `count` products, wait for the last, and return the seconds they took."""
    started = time.perf_counter()
    products.queue(count)
    device.synchronize_stream(products.stream)
    return time.perf_counter() - started


def count_for(device: CudaDevice, products: Products, seconds: float, sample: int) -> int:
    """Return the number of products that take about `seconds`, from a run of `sample` products after as many for warm-up."""
    run_products(device, products, sample)
    return max(1, round(seconds / run_products(device, products, sample) * sample))
