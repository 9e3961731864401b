"""How much longer a forward pass takes while its cache is loaded: layer by layer, or whole before the pass.

The forward pass is simulated by matrix products, a few for each layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, Final, TypeAlias

from tiercache.errors import ConfigError, TransferError, install_line
from tiercache.transfer.base import LayerTicket
from tiercache.transfer.cuda import CudaDevice, Direction
from tiercache_lab.bench.device_memory import Bed, Ground, Objects, Shapes, finish
from tiercache_lab.bench.rows import MIB, Note, Row, Target, Unit
from tiercache_lab.bench.timing import Side, medians

_TARGET: Final = Target(10, Unit.PERCENT)
"""Target of a pass that waits layer by layer: so much longer than without a load."""
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


class Products:
    """Matrix products, computed on a device by torch in bfloat16.

    Raises ConfigError if torch is missing or finds no CUDA device.

    Thread safety: one thread, with the device current.
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
        """Handle of the device stream in which the products run."""
        make = {"dtype": torch.bfloat16, "device": f"cuda:{device.ordinal}"}
        with self._torch.cuda.stream(self._stream):
            self._factors = [self._torch.randn(width, width, **make) for _ in range(2)]
            self._product = self._torch.empty(width, width, **make)

    def queue(self, count: int) -> None:
        """Queue `count` products, one after another, and return at once."""
        with self._torch.cuda.stream(self._stream), self._torch.inference_mode():
            for _ in range(count):
                self._torch.matmul(*self._factors, out=self._product)

    def close(self) -> None:
        """Wait for queued products, then release the memory that they use."""
        self._stream.synchronize()
        self._factors.clear()
        del self._product
        self._torch.cuda.empty_cache()


MakeProducts: TypeAlias = Callable[[CudaDevice, int], Products]
"""Function that takes a device and the width of square matrices, and returns products of that width.

It raises ConfigError if the products cannot be computed.
"""


def overlap(
    ground: Ground, shapes: Shapes, objects: Objects, repeats: int, make: MakeProducts
) -> Iterator[Row | Note]:
    """Yield a row for each way to wait; only a note with the reason if no products can be computed."""
    with ExitStack() as stack:
        try:
            products = stack.enter_context(closing(make(ground.device, _WIDTH)))
        except ConfigError as error:
            yield Note(f"no forward pass beside a load: {error}")
            return
        yield from _Forward(Bed(ground, shapes, objects, stack), products).rows(repeats)


class _Forward:
    """Forward pass over all layers, with a load before it or during it.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, bed: Bed, products: Products) -> None:
        self._bed, self._products = bed, products
        self._layers = 1 + max(*bed.shapes.pages.layers, *bed.shapes.states.layers)
        [self._units] = bed.units(Direction.TO_DEVICE)
        self._per_layer = 1
        self._ticket: LayerTicket | None = None

    def rows(self, repeats: int) -> Iterator[Row]:
        """Measure the load, choose the number of products per layer, and yield one row per way to wait."""
        bed, ways = self._bed, {"layers": self._load_by_layers, "whole": self._load_first}
        load = Side("load", lambda _: finish([bed.engine.load(self._units)]))
        self._per_layer = self._count_for(medians([load], repeats)["load"] * _MORE / self._layers)
        sides = [Side(way, lambda _, run=run: run(), after=self._end) for way, run in ways.items()]  # type: ignore[misc]
        found = medians([load, Side("alone", lambda _: self._compute()), *sides], repeats)
        for way in ways:
            longer = (found[way] / found["alone"] - 1) * 100
            figures = {
                "waiting": way, "pages": bed.objects.pages, "states": bed.objects.states,
                "mib": round(bed.objects.nbytes(bed.shapes) / MIB, 3), "layers": self._layers,
                "products_per_layer": self._per_layer, "load_ms": found["load"] * 1e3,
                "compute_ms": found["alone"] * 1e3, "both_ms": found[way] * 1e3, "longer_percent": longer,
            }  # fmt: skip
            yield Row("overlap", figures, _TARGET if way == "layers" else None, longer)

    def _compute(self) -> None:
        for _ in range(self._layers):
            self._products.queue(self._per_layer)
        self._synchronize()

    def _load_by_layers(self) -> None:
        self._ticket = self._bed.engine.load(self._units)
        for layer in range(self._layers):
            if not self._ticket.wait_layer(layer, _TIMEOUT_S, stream=self._products.stream):
                raise TransferError(f"layer {layer} of a load was not queued within {_TIMEOUT_S:g} s")
            self._products.queue(self._per_layer)
        self._synchronize()

    def _load_first(self) -> None:
        self._ticket = self._bed.engine.load(self._units)
        finish([self._ticket])
        self._compute()

    def _end(self, _: int) -> None:
        if self._ticket is not None:
            finish([self._ticket])

    def _synchronize(self) -> None:
        self._bed.ground.device.synchronize_stream(self._products.stream)

    def _count_for(self, seconds: float) -> int:
        """Return the number of products that take about `seconds`."""
        for _ in range(2):  # the first time is a warm-up
            started = time.perf_counter()
            self._products.queue(_SAMPLE)
            self._synchronize()
            measured = time.perf_counter() - started
        return max(1, round(seconds / measured * _SAMPLE))
