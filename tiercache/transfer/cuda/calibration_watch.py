"""Comparison of real transfers with the speeds in the calibration."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import log2
from typing import Final, TypeAlias

from tiercache.transfer.cuda.calibration import Calibration, Cell
from tiercache.transfer.cuda.device import Direction, Method
from tiercache.transfer.descriptors import Copies

_log = logging.getLogger(__name__)

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
