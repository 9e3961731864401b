"""Calibrations in files, so that a device is measured once for each set of methods.

A device is measured again if its file is invalid or gone. The file is removed when real copies turn out to be
faster or slower than measured (see `CalibrationWatch`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import log2
from pathlib import Path
from typing import Any, Final, TypeAlias

from blake3 import blake3

from tiercache.transfer.cuda.calibration import MAX_BYTES, Calibration, Cell, calibrate
from tiercache.transfer.cuda.device import Card, CudaDevice, Direction, Method
from tiercache.transfer.descriptors import Copies

_log = logging.getLogger(__name__)


FORMAT: Final = 2
"""Version of the file's format.

The version is also raised when a change to tiercache makes one of the methods faster or slower.
"""


_MAX_FILE_BYTES: Final = 1 << 20


_MAX_CELLS: Final = 1000


_MAX_COUNT: Final = 1 << 40


_CARD: Final[Mapping[str, type]] = {
    "name": str,
    "bus": str,
    "driver": int,
    "runtime": int,
    "multiprocessors": int,
    "uuid": str,
}
"""Fields of a card in a file, with their types."""


def calibrated(
    device: CudaDevice, directory: Path | None = None, *, nbytes: int = MAX_BYTES
) -> tuple[Calibration, str]:
    """Return the calibration of a device, and say in words whether it is from a file or was measured now.

    A file is replaced if it cannot be read, or belongs to another device, driver or set of methods. If the
    file cannot be written, the next start measures again. Processes that start at the same time all measure.
    Each replaces the file atomically, so the file of the last process stays.
    """
    path = calibration_path(device.card, device.methods, directory)
    known = read_calibration(path)
    if (
        known is not None
        and _key(known.card, device.methods) == _key(device.card, device.methods)
        and _covers(known, device.methods)
    ):
        return known, f"calibration from {path}"
    started = time.monotonic()
    found = calibrate(device, nbytes=nbytes)
    how = f"calibrated in {time.monotonic() - started:.1f} s"
    try:
        write_calibration(path, found)
    except OSError as error:
        _log.warning("the calibration of copies could not be kept in %s: %s", path, error)
    return found, how


def forget_calibration(wrong: Calibration, methods: Sequence[Method], directory: Path | None = None) -> None:
    """Remove the file of a wrong calibration, so that the next start measures again.

    A newer file, which another process has written, stays.
    """
    path = calibration_path(wrong.card, methods, directory)
    known = read_calibration(path)
    try:
        if known is not None and known.cells == wrong.cells:
            path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning(
            "%s could not be removed, though copies are no longer as fast as it says: %s", path, error
        )


def calibration_directory() -> Path:
    """Return the directory of calibration files: TIERCACHE_CACHE_DIR if this variable is set.

    Otherwise the directory is tiercache/ in XDG_CACHE_HOME, or else ~/.cache/tiercache.
    """
    if chosen := os.environ.get("TIERCACHE_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiercache"


def calibration_path(card: Card, methods: Sequence[Method], directory: Path | None = None) -> Path:
    """Return the path of the file for one card, driver and set of methods.

    The file's name has a digest of these, because device names may have any characters.
    """
    digest = blake3(json.dumps(_key(card, methods)).encode()).hexdigest(length=8)
    return (directory or calibration_directory()) / f"calibration-{digest}.json"


def read_calibration(path: Path) -> Calibration | None:
    """Return the calibration in a file; None if there is no file, or no valid one."""
    try:
        # O_NONBLOCK: opening a named pipe for reading would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1) or b""
            return _parse(text if len(text) <= _MAX_FILE_BYTES else b"")
    except OSError:
        return None
    except ValueError as error:
        _log.warning("%s is not a calibration and will be replaced: %s", path, error)
        return None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration to a file, in place of any earlier file. Raises OSError if that fails."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    document = json.dumps(_document(calibration), indent=1)
    # The temporary directory is on the file system of `path`, so the rename is atomic. The directory is
    # removed even after an error.
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        (Path(directory) / path.name).write_text(document)
        (Path(directory) / path.name).replace(path)


def _key(card: Card, methods: Sequence[Method]) -> list[object]:
    """Return the identity of a device, its driver's version, and the methods.

    The device is named by its UUID, or by its name and bus address if the driver is too old to report a UUID.
    """
    return [card.uuid or f"{card.name} at {card.bus}", card.driver, sorted(methods)]


def _covers(calibration: Calibration, methods: Sequence[Method]) -> bool:
    """Return whether a calibration has speeds of exactly these methods, in both directions."""
    return {c.direction for c in calibration.cells} == set(Direction) and all(
        c.speeds.keys() == set(methods) for c in calibration.cells
    )


def _document(calibration: Calibration) -> dict[str, object]:
    """Return the content of a calibration's file."""
    cells = [
        {"direction": c.direction, "length": c.length, "count": c.count, "gb_s": dict(c.speeds)}
        for c in calibration.cells
    ]
    return {"format": FORMAT, "card": asdict(calibration.card), "cells": cells}


def _parse(text: bytes) -> Calibration:
    """Return the calibration that a file's content describes; raise ValueError for any other content."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    version, card, cells = _fields(document, {"format": int, "card": dict, "cells": list})
    if version != FORMAT or len(cells) > _MAX_CELLS:
        raise ValueError(f"it has format {version} and {len(cells)} cells")
    _fields(card, _CARD)
    _require(1 <= card["multiprocessors"] <= _MAX_COUNT, card)
    return Calibration(Card(**card), [_cell(cell) for cell in cells])


def _refuse_constant(name: str) -> object:
    """Raise ValueError for NaN and the infinities, which Python's `json` reads although JSON forbids them."""
    raise ValueError(f"it has the number {name}")


def _cell(found: object) -> Cell:
    direction, length, count, speeds = _fields(
        found, {"direction": str, "length": int, "count": int, "gb_s": dict}
    )
    _require(1 <= length <= _MAX_COUNT and 1 <= count <= _MAX_COUNT and len(speeds) > 0, found)
    for speed in speeds.values():
        _require(type(speed) in (int, float) and 0 < speed < math.inf, found)
    return Cell(Direction(direction), length, count, {Method(name): gb for name, gb in speeds.items()})


def _fields(found: object, types: Mapping[str, type]) -> list[Any]:
    """Return the values of a JSON object with exactly these names and types; raise ValueError otherwise."""
    if not isinstance(found, dict) or found.keys() != types.keys():
        raise ValueError(f"a table with {', '.join(types)} is missing")
    # `type` instead of isinstance, because a boolean must not pass as an integer.
    _require(all(type(found[name]) is kind for name, kind in types.items()), found)
    return [found[name] for name in types]


def _require(true: bool, found: object) -> None:
    if not true:
        raise ValueError(f"{str(found)[:200]} has an impossible value")


Queued: TypeAlias = Sequence[tuple[Copies, Method]]
"""Groups of copies of one transfer, in order, each with its method."""


OFF_FACTOR: Final = 2.0
"""A transfer is too slow if it takes more than this many times the expected time.

It is too fast if the expected time is more than this many times the real time.
"""


WINDOW: Final = 32
"""Number of transfers in a window: the last transfers of one direction, which are judged together."""


_MIN_OFF: Final = 24
"""Minimum difference between the numbers of too slow and too fast transfers in a window.

From this difference on, the calibration counts as wrong.

A busy bus, or a thread that waits for the GIL, makes some transfers slow. A wrong calibration makes most
transfers slow, or most of them fast.
"""


_MIN_S: Final = 200e-6


_MIN_BYTES: Final = 8 << 20
"""A transfer is judged if it should take `_MIN_S` seconds or more, or has `_MIN_BYTES` bytes or more.

The time of a smaller transfer says little about the speed of its copies.
"""


_NEAR: Final = (1.0, 2.0)
"""Maximum distance between copies and the measurement that predicts their time, in powers of two.

The first number limits the distance of the lengths, and the second limits the distance of the numbers of
copies. For example, copies may be up to twice as long as in the measurement, and four times as many.
"""


class CalibrationWatch:
    """Watch that compares the time of each transfer on the device with the prediction of `calibration`.

    The watch calls `on_wrong` once, when most of the last `WINDOW` transfers of a direction were too slow, or
    most were too fast.

    Thread safety: any thread.
    """

    def __init__(self, calibration: Calibration, on_wrong: Callable[[], object]) -> None:
        self._calibration, self._on_wrong = calibration, on_wrong
        self._changed = threading.Lock()
        self._found: dict[Direction, deque[int]] = {
            direction: deque(maxlen=WINDOW) for direction in Direction
        }
        """Judgements of the last transfers, by direction: 1 too slow, -1 too fast, 0 as expected."""
        self._is_wrong = False

    def record(self, direction: Direction, queued: Queued, seconds: float) -> None:
        """Judge a transfer that took `seconds` seconds from the start of its first copy to its end."""
        expected = self._expected(direction, queued)
        if expected is None or (
            expected < _MIN_S and sum(copies.nbytes for copies, _ in queued) < _MIN_BYTES
        ):
            return
        with self._changed:
            found = self._found[direction]
            found.append((seconds > OFF_FACTOR * expected) - (seconds * OFF_FACTOR < expected))
            if self._is_wrong or abs(sum(found)) < _MIN_OFF:
                return
            self._is_wrong = True
        _log.warning(
            "copies %s take %.1f times as long as measured; they are measured again at the next start",
            direction,
            seconds / expected,
        )
        self._on_wrong()

    def _expected(self, direction: Direction, queued: Queued) -> float | None:
        """Return the seconds that the calibration predicts; None if it has not measured such copies."""
        total = 0.0
        for copies, method in queued:
            cell = self._calibration.nearest(direction, copies)
            if method not in cell.speeds or not _is_near(cell, copies):
                return None
            total += copies.nbytes / cell.speeds[method] / 1e9
        return total


def _is_near(cell: Cell, copies: Copies) -> bool:
    length = copies.nbytes / len(copies)
    return abs(log2(cell.length / length)) <= _NEAR[0] and abs(log2(cell.count / len(copies))) <= _NEAR[1]
