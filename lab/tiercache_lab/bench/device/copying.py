"""The speed of stores and loads, compared with one contiguous copy.

Stores and loads are measured by each method, by the method that the calibration chooses, and through the
transfer engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from tiercache.transfer.cuda import Direction, Method
from tiercache_lab.bench.device.bed import Bed
from tiercache_lab.bench.device.ground import Ground, Say, Work
from tiercache_lab.bench.device.plan import CHOICE, DevicePlan, Objects, TransferKind
from tiercache_lab.bench.device.rows import CopyRow
from tiercache_lab.bench.rows import MIB
from tiercache_lab.bench.timing import Side, medians

TRANSFERS: Final = 4
"""Number of transfers in the engine at once.

The engine queues three transfers in its stream; the fourth waits in the engine.
"""
_SMALL: Final = 64 * MIB
"""Size in bytes below which a group counts as small. Its copies take about 1 ms or less."""
_MORE: Final = 5
"""Factor by which the number of runs is multiplied for a small group."""
_PLAIN: Final = "contiguous"
"""Name of the side that makes one contiguous copy."""
_ENGINE: Final = "engine"
"""Name of the side that copies through the transfer engine."""


def copies(plan: DevicePlan, ground: Ground, methods: Sequence[Method], say: Say) -> Iterator[CopyRow]:
    """Measure the copies of all models and yield the rows.

    All copied bytes are compared before anything is timed.
    """
    for shapes in plan.models:
        for kind, objects in plan.groups(shapes):
            with ExitStack() as stack:
                # Each of the engine's transfers has as many objects as one group. If all transfers together
                # would be too large, the objects of one group are divided among the transfers.
                whole = objects.times(TRANSFERS)
                bed = Bed(ground, shapes, whole if whole.nbytes(shapes) <= plan.max_bytes else objects, stack)
                what = f"{shapes.name}, {objects.count} {kind}"
                _check(plan, bed, methods, lambda doing, what=what: say(f"{what}: {doing}"))  # type: ignore[misc]
                for direction in Direction:
                    say(f"{what}: {direction.replace('_', ' ')}")
                    yield from _Group(plan, bed, kind, objects, direction).rows(methods)


def _check(plan: DevicePlan, bed: Bed, methods: Sequence[Method], say: Say) -> None:
    works = [bed.work(direction, bed.objects) for direction in Direction]

    def move(work: Work, method: Method) -> None:
        bed.ground.mover.move(work, [method] * len(work.groups))

    for method in methods:
        say(f"comparing what {method} copies")
        bed.check(f"copies by {method}", partial(move, works[0], method), partial(move, works[1], method))
    if plan.choice:
        say("comparing what the engine copies")
        store, load = (
            lambda d=direction: bed.transfer(d, bed.units(d, TRANSFERS)) for direction in Direction
        )
        bed.check("transfers by the engine", store, load)


class _Group:
    """Measurement of one direction of one group of objects.

    Thread safety: one thread, with the device current.
    """

    def __init__(
        self, plan: DevicePlan, bed: Bed, kind: TransferKind, objects: Objects, direction: Direction
    ) -> None:
        self._plan, self._bed, self._kind, self._objects, self._direction = (
            plan,
            bed,
            kind,
            objects,
            direction,
        )
        self._work = bed.work(direction, objects)
        self._chosen = bed.choice(direction, self._work)
        self._transfers = bed.units(direction, TRANSFERS)

    def rows(self, methods: Sequence[Method]) -> Iterator[CopyRow]:
        nbytes, mover = self._work.copies.nbytes, self._bed.ground.mover
        ways = {str(method): [method] * len(self._work.groups) for method in methods}
        sides = [Side(_PLAIN, lambda _: self._bed.ground.contiguous(self._direction, nbytes))]
        if self._plan.choice:
            ways[CHOICE] = self._chosen
            sides.append(Side(_ENGINE, lambda _: self._bed.transfer(self._direction, self._transfers)))
        sides += [Side(name, lambda _, way=way: mover.move(self._work, way)) for name, way in ways.items()]  # type: ignore[misc]
        seconds = medians(sides, self._plan.repeats * (_MORE if nbytes < _SMALL else 1))
        for name in ways:
            yield self._row(name, nbytes / seconds[name], nbytes / seconds[_PLAIN], seconds.get(_ENGINE, 0.0))

    def _row(self, name: str, speed: float, limit: float, engine_seconds: float) -> CopyRow:
        shapes, chosen = self._bed.shapes, name == CHOICE
        through = self._bed.objects.nbytes(shapes)
        return CopyRow(
            shapes.name, self._kind, self._direction, self._objects.count, self._work.copies.nbytes,
            len(self._work.copies), name,
            speed / 1e9, limit / 1e9,
            chosen={str(method): count for method, count in Counter(self._chosen).items()} if chosen else {},
            engine_gb_s=through / engine_seconds / 1e9 if chosen else None,
            transfers=len(self._transfers) if chosen else 0,
        )  # fmt: skip
