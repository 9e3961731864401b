"""`tiercache bench device`: stores and loads between a CUDA device and the host, beside one contiguous copy.

Stores and loads are measured by each method, by the method that the calibration chooses, and through the
transfer engine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from tiercache.config import parse_size
from tiercache.errors import ConfigError, TierCacheError, TransferError
from tiercache.transfer.cuda import CudaDevice, Direction, Method, calibrate
from tiercache.transfer.cuda.calibration import self_test
from tiercache_lab.bench.device_memory import Bed, Ground, Objects, Shapes, Work, shapes_of
from tiercache_lab.bench.rows import MIB, Note, Row, Target, Unit
from tiercache_lab.bench.timing import Side, medians

MODEL: Final = "qwen3-next-80b-a3b"
"""Model whose pages and states are copied."""
CHOICE: Final = "choice"
"""Way that stands for the methods that the calibration chooses."""
COUNTS: Final = (1, 4, 16, 64, 256)
"""Numbers of objects in a group."""
_PER_STATE: Final = 32
"""In a mix, one of this many objects is a state. States are saved more rarely than pages."""
_RATIO_FROM: Final = 16 * MIB
"""Minimum bytes of a group whose ratio has a target."""
_RATIO: Final = Target(0.95, Unit.RATIO)
"""Target of copies by the calibration's choice: their speed as a multiple of the contiguous copy's speed."""
Say = Callable[[str], None]
"""Function that shows progress. It is called with a description of each step."""
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


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Plan of one run of `bench device`."""

    shapes: Shapes
    max_bytes: int
    """Maximum payload bytes of a group."""
    repeats: int
    """Number of runs for each median. One more run comes first and is not counted."""
    counts: tuple[int, ...] = COUNTS
    """Numbers of objects in a group."""

    def groups(self) -> Iterator[tuple[str, Objects]]:
        """Yield the groups of objects: pages, states, and both, with all counts that fit into `max_bytes`."""
        for count in self.counts:
            mixed = max(1, count // _PER_STATE)
            found = {"pages": Objects(pages=count), "states": Objects(states=count)}
            if count > mixed:
                found["mix"] = Objects(count - mixed, mixed)
            for kind, objects in found.items():
                if objects.nbytes(self.shapes) <= self.max_bytes:
                    yield kind, objects

    @property
    def device_bytes(self) -> int:
        """Bytes that the largest group needs on the device, with one free slot in each pool."""
        pages, states = self.shapes.pages.nbytes, self.shapes.states.nbytes
        spare = pages + (states if states <= self.max_bytes else 0)
        return self.max_bytes + spare + MIB  # for the alignment of tensors


def device_plan(most: str, repeats: int) -> DevicePlan:
    """Return the plan that the options describe; raises ConfigError if it cannot be carried out."""
    shapes = shapes_of(MODEL)
    try:
        nbytes = parse_size(most.strip())
    except ConfigError as error:
        raise ConfigError(f"--most: {error}") from error
    if nbytes < shapes.pages.nbytes:
        raise ConfigError(
            f"--most {nbytes} does not hold one page of {MODEL}; give at least {shapes.pages.nbytes}"
        )
    return DevicePlan(shapes, nbytes, repeats)


def footer(plan: DevicePlan, device: CudaDevice, notes: Sequence[Note]) -> list[str]:
    """Return the sentences that explain the figures."""
    return [
        (
            f"{device.card}. Medians of at least {plan.repeats} interleaved runs; objects in random slots and"
            " blocks."
        ),
        (
            "gb_s: all copies in one stream, from the start of queuing to the end of the last copy. A load"
            " queues its copies layer by layer. contiguous_gb_s: one contiguous copy of the same size, with"
            " host memory that the driver page-locked. engine_gb_s: through the transfer engine, with"
            f" {TRANSFERS} transfers at once. Each transfer has as many objects as the row says. If that"
            " would exceed --most, the objects of the row are divided among the transfers."
        ),
        *(f"{note.text[0].upper()}{note.text[1:]}." for note in notes),
    ]


def run(plan: DevicePlan, device: CudaDevice, say: Say) -> Generator[Row | Note]:
    """Yield every row and note as soon as it is known.

    Closing the generator releases everything on the device. Raises TransferError if copied bytes are wrong or
    the driver fails. Raises ConfigError if this device cannot carry out the plan.
    """
    try:
        with device.current(), ExitStack() as stack:
            yield from _run(plan, device, say, stack)
    except TierCacheError:
        raise
    except RuntimeError as error:
        raise TransferError(f"{device.card} failed: {error}") from error


def _run(plan: DevicePlan, device: CudaDevice, say: Say, stack: ExitStack) -> Generator[Row | Note]:
    say("trying each method")
    self_test(device)
    for method, reason in device.unavailable.items():
        yield Note(f"no copies by {method}: {reason}")
    say("measuring each method")
    known = calibrate(device)
    for cell in known.cells:
        figures = {
            "direction": str(cell.direction), "length": cell.length, "count": cell.count,
            "best": str(cell.best), **{str(method): cell.speeds.get(method) for method in Method},
        }  # fmt: skip
        yield Row("calibration", figures, section=(cell.direction, cell.length))
    methods = [method for method in Method if method not in device.unavailable]
    ground = Ground(device, known, plan.device_bytes, stack)
    yield from copies(plan, ground, methods, say)


def copies(plan: DevicePlan, ground: Ground, methods: Sequence[Method], say: Say) -> Iterator[Row]:
    """Measure the copies of all groups. All copied bytes are compared before anything is timed."""
    for kind, objects in plan.groups():
        with ExitStack() as stack:
            # Each of the engine's transfers has as many objects as one group. If all transfers together would
            # be too large, the objects of one group are divided among the transfers.
            whole = objects.times(TRANSFERS)
            fits = whole.nbytes(plan.shapes) <= plan.max_bytes
            bed = Bed(ground, plan.shapes, whole if fits else objects, stack)
            what = f"{objects.count} {kind}"
            _check(bed, methods, lambda doing, what=what: say(f"{what}: {doing}"))  # type: ignore[misc]
            for direction in Direction:
                say(f"{what}: {direction.replace('_', ' ')}")
                yield from _Group(plan, bed, kind, objects, direction).rows(methods)


def _check(bed: Bed, methods: Sequence[Method], say: Say) -> None:
    works = [bed.work(direction, bed.objects) for direction in Direction]

    def move(work: Work, method: Method) -> None:
        bed.ground.mover.move(work, [method] * len(work.groups))

    for method in methods:
        say(f"comparing what {method} copies")
        bed.check(f"copies by {method}", partial(move, works[0], method), partial(move, works[1], method))
    say("comparing what the engine copies")
    store, load = (lambda d=direction: bed.transfer(d, bed.units(d, TRANSFERS)) for direction in Direction)
    bed.check("transfers by the engine", store, load)


class _Group:
    """Measurement of one direction of one group of objects.

    Thread safety: one thread, with the device current.
    """

    def __init__(self, plan: DevicePlan, bed: Bed, kind: str, objects: Objects, direction: Direction) -> None:
        self._plan, self._bed, self._kind = plan, bed, kind
        self._objects, self._direction = objects, direction
        self._work = bed.work(direction, objects)
        self._chosen = bed.choice(direction, self._work)
        self._transfers = bed.units(direction, TRANSFERS)

    def rows(self, methods: Sequence[Method]) -> Iterator[Row]:
        nbytes, mover = self._work.copies.nbytes, self._bed.ground.mover
        ways = {str(method): [method] * len(self._work.groups) for method in methods} | {CHOICE: self._chosen}
        sides = [
            Side(_PLAIN, lambda _: self._bed.ground.contiguous(self._direction, nbytes)),
            Side(_ENGINE, lambda _: self._bed.transfer(self._direction, self._transfers)),
            *(Side(name, lambda _, way=way: mover.move(self._work, way)) for name, way in ways.items()),  # type: ignore[misc]
        ]
        seconds = medians(sides, self._plan.repeats * (_MORE if nbytes < _SMALL else 1))
        for name in ways:
            yield self._row(name, nbytes / seconds[name], nbytes / seconds[_PLAIN], seconds[_ENGINE])

    def _row(self, name: str, speed: float, limit: float, engine_seconds: float) -> Row:
        chosen, copies = name == CHOICE, self._work.copies
        through = self._bed.objects.nbytes(self._bed.shapes) / engine_seconds
        figures = {
            "kind": self._kind, "direction": str(self._direction), "objects": self._objects.count,
            "mib": round(copies.nbytes / MIB, 3), "copies": len(copies), "method": name,
            "chosen": " + ".join(map(str, dict.fromkeys(self._chosen))) if chosen else None,
            "gb_s": speed / 1e9, "contiguous_gb_s": limit / 1e9, "ratio": speed / limit,
            "engine_gb_s": through / 1e9 if chosen else None,
            "transfers": len(self._transfers) if chosen else None,
        }  # fmt: skip
        target = _RATIO if chosen and copies.nbytes >= _RATIO_FROM else None
        section = (self._kind, self._objects.count, self._direction)
        return Row("copy", figures, target, speed / limit, section)
