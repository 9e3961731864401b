"""A load during a forward pass: the extra time of the pass if it waits layer by layer, or for the whole load first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Final

from tiercache.cli.bench.device.bed import Bed, finish
from tiercache.cli.bench.device.ground import Ground, Say
from tiercache.cli.bench.device.plan import Case, Plan
from tiercache.cli.bench.device.products import MakeProducts, Products, count_for
from tiercache.cli.bench.device.rows import OverlapRow, SkippedRow, Waiting
from tiercache.cli.bench.device.shapes import Shapes
from tiercache.cli.bench.timing import Side, medians
from tiercache.errors import ConfigError, TransferError
from tiercache.transfer.base import LayerTicket
from tiercache.transfer.cuda import Direction

_WIDTH: Final = 2048
"""Width of the matrices: a product takes about 30 us, so that several make a layer."""
_SAMPLE: Final = 50
"""Products that are timed to choose the number of products of a layer."""
_MORE: Final = 1.2
"""Compute time of a layer, as a multiple of the mean load time of a layer."""
_PATIENCE_S: Final = 60.0
"""Seconds to wait until a layer of a load is queued."""
_ALONE: Final = "alone"
_LOAD: Final = "load"


def overlap(plan: Plan, ground: Ground, make: MakeProducts, say: Say) -> Iterator[OverlapRow | SkippedRow]:
    """Yield two rows for each model; or one row with the reason if no products can be computed."""
    with ExitStack() as stack:
        try:
            products = stack.enter_context(closing(make(ground.device, _WIDTH)))
        except ConfigError as error:
            yield SkippedRow(Case.OVERLAP, str(error))
            return
        for shapes in plan.models:
            say(f"{shapes.name}: a load beneath compute")
            with ExitStack() as inner:
                bed = Bed(ground, shapes, plan.prompt(shapes), inner)
                yield from _Forward(bed, shapes, products).rows(plan.repeats)


class _Forward:
    """A forward pass over all layers, with a load before it or during it.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, bed: Bed, shapes: Shapes, products: Products) -> None:
        self._bed, self._shapes, self._products = bed, shapes, products
        self._device = bed.ground.device
        [self._units] = bed.units(Direction.TO_DEVICE)
        self._per_layer = 1
        self._ticket: LayerTicket | None = None

    def rows(self, repeats: int) -> Iterator[OverlapRow]:
        """Time the load to choose the compute per layer; then time all sides in turns and yield their rows."""
        load = Side(_LOAD, lambda _: finish([self._bed.engine.load(self._units)]))
        seconds = medians([load], repeats)[_LOAD] * _MORE / self._shapes.layers
        self._per_layer = count_for(self._device, self._products, seconds, _SAMPLE)
        ways = {Waiting.LAYERS: self._beneath, Waiting.WHOLE: self._behind}
        sides = [Side(way, lambda _, run=run: run(), after=self._end) for way, run in ways.items()]  # type: ignore[misc]
        found = medians([load, Side(_ALONE, lambda _: self._alone()), *sides], repeats)
        for way in ways:
            yield OverlapRow(
                self._shapes.name, way, self._bed.objects.pages, self._bed.objects.states, self._bed.objects.nbytes(self._shapes),
                self._shapes.layers, self._per_layer, found[_LOAD], found[_ALONE], found[way],
            )  # fmt: skip

    def _alone(self) -> None:
        for _ in range(self._shapes.layers):
            self._products.queue(self._per_layer)
        self._device.synchronize_stream(self._products.stream)

    def _beneath(self) -> None:
        self._ticket = self._bed.engine.load(self._units)
        for layer in range(self._shapes.layers):
            if not self._ticket.wait_layer(layer, _PATIENCE_S, stream=self._products.stream):
                raise TransferError(f"layer {layer} of a load was not queued after {_PATIENCE_S:g} s")
            self._products.queue(self._per_layer)
        self._device.synchronize_stream(self._products.stream)

    def _behind(self) -> None:
        self._ticket = self._bed.engine.load(self._units)
        finish([self._ticket])
        self._alone()

    def _end(self, _: int) -> None:
        if self._ticket is not None:
            finish([self._ticket])
