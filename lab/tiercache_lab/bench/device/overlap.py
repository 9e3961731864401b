"""The time of a forward pass that waits for a load.

There are two ways to wait. Either each layer of the pass waits only for the bytes of this layer, or the first
layer waits for the whole load. The forward pass is simulated by matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, Final, Protocol, TypeAlias

from tiercache.errors import ConfigError, TransferError, install_line
from tiercache.transfer.base import LayerTicket
from tiercache.transfer.cuda import CudaDevice, Direction
from tiercache_lab.bench.device.bed import Bed, finish
from tiercache_lab.bench.device.ground import Ground, Say
from tiercache_lab.bench.device.plan import DeviceCase, DevicePlan, Shapes
from tiercache_lab.bench.device.rows import OverlapRow, SkippedRow, Waiting
from tiercache_lab.bench.timing import Side, medians

_WIDTH: Final = 2048
"""Width of the matrices. A product takes about 30 us, so a layer consists of several products."""
_SAMPLE: Final = 50
"""Number of products in the sample that is timed to choose the number of products per layer."""
_MORE: Final = 1.2
"""Time to compute a layer, as a multiple of the mean time to load a layer.

It is above 1, so that the compute can hide the whole load.
"""
_TIMEOUT_S: Final = 60.0
"""Seconds to wait until a layer of a load is queued."""
_ALONE: Final = "alone"
"""Name of the side with only the forward pass."""
_LOAD: Final = "load"
"""Name of the side with only the load."""


def overlap(
    plan: DevicePlan, ground: Ground, make: MakeProducts, say: Say
) -> Iterator[OverlapRow | SkippedRow]:
    """Yield two rows for each model.

    If no products can be computed, yield only one row with the reason.
    """
    with ExitStack() as stack:
        try:
            products = stack.enter_context(closing(make(ground.device, _WIDTH)))
        except ConfigError as error:
            yield SkippedRow(DeviceCase.OVERLAP, str(error))
            return
        for shapes in plan.models:
            say(f"{shapes.name}: a load during compute")
            with ExitStack() as inner:
                bed = Bed(ground, shapes, plan.prompt(shapes), inner)
                yield from _Forward(bed, shapes, products).rows(plan.repeats)


class _Forward:
    """Forward pass over all layers, with a load before it or during it.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, bed: Bed, shapes: Shapes, products: Products) -> None:
        self._bed, self._shapes, self._products = bed, shapes, products
        self._device = bed.ground.device
        [self._units] = bed.units(Direction.TO_DEVICE)
        self._per_layer = 1
        self._ticket: LayerTicket | None = None

    def rows(self, repeats: int) -> Iterator[OverlapRow]:
        """Measure the load, choose the number of products per layer, and yield one row per way of waiting."""
        load = Side(_LOAD, lambda _: finish([self._bed.engine.load(self._units)]))
        seconds = medians([load], repeats)[_LOAD] * _MORE / self._shapes.layers
        self._per_layer = count_for(self._device, self._products, seconds, _SAMPLE)
        ways = {Waiting.LAYERS: self._load_by_layers, Waiting.WHOLE: self._load_first}
        sides = [Side(way, lambda _, run=run: run(), after=self._end) for way, run in ways.items()]  # type: ignore[misc]
        found = medians([load, Side(_ALONE, lambda _: self._alone()), *sides], repeats)
        for way in ways:
            yield OverlapRow(
                self._shapes.name, way, self._bed.objects.pages, self._bed.objects.states,
                self._bed.objects.nbytes(self._shapes),
                self._shapes.layers, self._per_layer, found[_LOAD], found[_ALONE], found[way],
            )  # fmt: skip

    def _alone(self) -> None:
        for _ in range(self._shapes.layers):
            self._products.queue(self._per_layer)
        self._device.synchronize_stream(self._products.stream)

    def _load_by_layers(self) -> None:
        self._ticket = self._bed.engine.load(self._units)
        for layer in range(self._shapes.layers):
            if not self._ticket.wait_layer(layer, _TIMEOUT_S, stream=self._products.stream):
                raise TransferError(f"layer {layer} of a load was not queued within {_TIMEOUT_S:g} s")
            self._products.queue(self._per_layer)
        self._device.synchronize_stream(self._products.stream)

    def _load_first(self) -> None:
        self._ticket = self._bed.engine.load(self._units)
        finish([self._ticket])
        self._alone()

    def _end(self, _: int) -> None:
        if self._ticket is not None:
            finish([self._ticket])


class Products(Protocol):
    """Computation of matrix products on a device.

    Thread safety: one thread, with the device current.
    """

    stream: int
    """Handle of the device stream in which the products run."""

    def queue(self, count: int) -> None:
        """Queue `count` products, one after another, and return at once."""

    def close(self) -> None:
        """Wait for queued products, then release the memory that they use."""


MakeProducts: TypeAlias = Callable[[CudaDevice, int], Products]
"""Function that takes a device and the width of square matrices, and returns `Products` of that width.

It raises ConfigError if the products cannot be computed.
"""


class TorchProducts:
    """Products computed by torch in bfloat16.

    Raises ConfigError if torch is missing or finds no CUDA device.

    Thread safety: as `Products`.
    """

    def __init__(self, device: CudaDevice, width: int) -> None:
        try:
            import torch
        except ImportError as error:
            raise ConfigError(f"torch cannot be imported ({error}); {install_line('cuda')}") from error
        if not torch.cuda.is_available():
            raise ConfigError(
                f"torch {torch.__version__} finds no CUDA device; install a build of torch for CUDA"
            )
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


def count_for(device: CudaDevice, products: Products, seconds: float, sample: int) -> int:
    """Measure `sample` products and return the number of products that take about `seconds`."""
    for _ in range(2):  # the first time is a warm-up
        started = time.perf_counter()
        products.queue(sample)
        device.synchronize_stream(products.stream)
        measured = time.perf_counter() - started
    return max(1, round(seconds / measured * sample))
