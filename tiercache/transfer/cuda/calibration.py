"""Which method is fastest on this machine, per direction, size and number of copies: measured once, and remembered in a file."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import numpy as np
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiercache.transfer.cuda.copying import CopySet, bus_blocks
from tiercache.transfer.cuda.device import Card, CudaDevice, Direction, Method
from tiercache.transfer.descriptors import Copies

_log = logging.getLogger(__name__)

FORMAT: Final = 1
"""Of the file; raised as well when a method of ours gets another speed."""
LENGTHS: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Bytes a copy: pages of small models, of 16 and of 64 tokens; convolution and recurrent states."""
COUNTS: Final = (1, 16, 128, 1024)
"""Copies at once: a layer of one object, of some, of a long prompt; a whole store."""
MOST_BYTES: Final = 64 << 20
"""Of one measurement, and of the buffers on either side."""
_ROUNDS: Final = 5
_AS_GOOD: Final = 0.97
"""A method as fast as this share of the fastest is taken for its place in `Method`: the copy engines cost no computing."""
_MOST_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: `count` copies of `length` bytes each; GB/s by method."""

    direction: Direction
    length: int
    count: int
    speeds: Mapping[Method, float]

    @property
    def best(self) -> Method:
        """The method of choice."""
        enough = _AS_GOOD * max(self.speeds.values())
        return next(method for method in Method if self.speeds.get(method, 0.0) >= enough)


class Calibration:
    """What was measured on one machine. Thread rule: immutable; any thread."""

    def __init__(self, card: Card, cells: Sequence[Cell]) -> None:
        self.card = card
        self.cells = tuple(cells)
        self._known: dict[tuple[Direction, int, int], Method] = {}

    def choose(self, direction: Direction, copies: Copies) -> Method:
        """The method of the measurement that is nearest to these copies, by factors."""
        count = max(1, len(copies))
        length = max(1, copies.nbytes // count)
        near = (direction, length.bit_length(), count.bit_length())
        if near not in self._known:
            cells = (cell for cell in self.cells if cell.direction is direction)
            self._known[near] = min(cells, key=lambda cell: abs(log2(cell.length / length)) + abs(log2(cell.count / count))).best
        return self._known[near]


def calibrate(device: CudaDevice, *, nbytes: int = MOST_BYTES, progress: Callable[[float], object] = lambda _: None) -> Calibration:
    """Measure every method that `device` has, in turn. `progress` is told the share that is done.

    The buffers are of `nbytes`, or half of it and so on if the device has no room for them. Thread rule: one thread, with the device
    current.
    """
    methods = [method for method in Method if method not in device.unavailable]
    cells = []
    with ExitStack() as stack:
        nbytes, on_device = _most(device, nbytes)
        stack.callback(device.release, on_device)
        stream = device.create_stream(urgent=False)
        stack.callback(device.destroy_stream, stream)
        resources = CopySet(device)
        stack.callback(resources.destroy)
        on_host = device.allocate_host(nbytes)
        stack.callback(device.synchronize_stream, stream)
        plan = [(d, n, c) for d in Direction for n, c in _sizes(nbytes)]
        for number, (direction, length, count) in enumerate(plan):
            ends = on_device, on_host.ctypes.data
            copies = _spread(*(ends if direction is Direction.TO_HOST else ends[::-1]), length, count, nbytes)
            speeds = {method: _speed(device, copies, method, resources, stream) for method in methods}
            cells.append(Cell(direction, length, count, speeds))
            progress((number + 1) / len(plan))
    return Calibration(device.card, cells)


def calibrated(device: CudaDevice, directory: Path | None = None, *, nbytes: int = MOST_BYTES) -> tuple[Calibration, str]:
    """What was measured here before, or what is measured now and then kept in `directory`; and which of the two, in words.

    A file that cannot be read, or is for another machine, is replaced; one that cannot be written costs the next start a calibration.
    """
    path = calibration_path(device.card, directory)
    methods = {method for method in Method if method not in device.unavailable}
    known = read_calibration(path)
    if known is not None and known.card == device.card and _covers(known, methods):
        return known, f"calibration from {path}"
    started = time.monotonic()
    found = calibrate(device, nbytes=nbytes)
    how = f"calibrated in {time.monotonic() - started:.1f} s"
    try:
        _write(path, found)
    except OSError as error:
        _log.warning("the calibration of copies could not be kept in %s: %s", path, error)
    return found, how


def calibration_directory() -> Path:
    """Where calibrations are kept: TIERCACHE_CACHE_DIR, else tiercache/ in the user's cache directory."""
    if chosen := os.environ.get("TIERCACHE_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiercache"


def calibration_path(card: Card, directory: Path | None = None) -> Path:
    """The file of one card. Its name is a digest: names of devices are not ours."""
    digest = blake3(json.dumps(asdict(card), sort_keys=True).encode()).hexdigest(length=8)
    return (directory or calibration_directory()) / f"calibration-{digest}.json"


def read_calibration(path: Path) -> Calibration | None:
    """A calibration that was kept; None if there is none, or none that can be understood."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1)
            document = _Document.model_validate_json(text if len(text) <= _MOST_FILE_BYTES else b"")
    except OSError:
        return None
    except ValidationError as error:
        _log.warning("%s is not a calibration and will be replaced: %s", path, error.errors()[0]["msg"])
        return None
    return document.calibration()


def _write(path: Path, calibration: Calibration) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    document = _Document.of(calibration).model_dump_json(indent=1)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:  # on the same file system, and gone whatever happens
        (Path(directory) / path.name).write_text(document)
        (Path(directory) / path.name).replace(path)


def _covers(calibration: Calibration, methods: set[Method]) -> bool:
    """Does it say something for both directions, and of just these methods?"""
    return {cell.direction for cell in calibration.cells} == set(Direction) and all(set(c.speeds) == methods for c in calibration.cells)


def _most(device: CudaDevice, nbytes: int) -> tuple[int, int]:
    """The bytes of a buffer on the device, and its address."""
    while True:
        try:
            return nbytes, device.allocate(nbytes)
        except RuntimeError:
            nbytes //= 2
            if nbytes < 2 * max(LENGTHS):
                raise


def _sizes(nbytes: int) -> Iterator[tuple[int, int]]:
    """(length, count) of every measurement that fits in `nbytes` with as much space between the copies."""
    for length in LENGTHS:
        yield from ((length, count) for count in COUNTS if 2 * length * count <= nbytes or count == 1)


def _spread(source: int, destination: int, length: int, count: int, nbytes: int) -> Copies:
    """Copies that lie apart and in no order, as slots and blocks do."""
    places = nbytes // length
    rng = np.random.default_rng(count)
    at = [base + rng.choice(places // 2, count, replace=False) * 2 * length for base in (source, destination)]
    return Copies(at[0].astype(np.uint64), at[1].astype(np.uint64), np.full(count, length, np.int64))


def _speed(device: CudaDevice, copies: Copies, method: Method, resources: CopySet, stream: int) -> float:
    """GB/s from the call to the end of the copies, as a transfer meets it; the first round is for free."""
    times = []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        rows = slice(0, len(copies))
        resources.queue(copies, [(rows, method)], bus_blocks(device.card.multiprocessors), stream).put(rows, method)
        device.synchronize_stream(stream)
        times.append(time.perf_counter() - started)
    return copies.nbytes / median(times[1:]) / 1e9


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_Count = Annotated[int, Field(ge=1, le=1 << 40)]


class _CellDocument(_Strict):
    direction: Annotated[Direction, Field(strict=False)]
    length: _Count
    count: _Count
    gb_s: dict[Annotated[Method, Field(strict=False)], Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)


class _CardDocument(_Strict):
    name: str
    bus: str
    driver: int
    runtime: int
    multiprocessors: _Count


class _Document(_Strict):
    """The file."""

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    card: _CardDocument
    cells: Annotated[list[_CellDocument], Field(max_length=1000)]

    @classmethod
    def of(cls, calibration: Calibration) -> _Document:
        cells = [_CellDocument(direction=c.direction, length=c.length, count=c.count, gb_s=dict(c.speeds)) for c in calibration.cells]
        return cls(format=FORMAT, card=_CardDocument(**asdict(calibration.card)), cells=cells)

    def calibration(self) -> Calibration:
        """What it says."""
        cells = [Cell(c.direction, c.length, c.count, c.gb_s) for c in self.cells]
        return Calibration(Card(**self.card.model_dump()), cells)
