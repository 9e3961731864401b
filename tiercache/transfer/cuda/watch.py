"""Are real copies as fast as the calibration says?"""

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
"""The groups of copies of one transfer, in order, each with its method."""

OFF: Final = 2.0
"""The factor, either way, by which a transfer is off."""
LOOKED_AT: Final = 32
"""Transfers of a direction that are compared at a time."""
_DOUBTFUL: Final = 24
"""How many of them must be off the same way: a busy bus or a thread that waits for the GIL makes some slow, a wrong calibration most."""
_LEAST_S: Final = 200e-6
_LEAST_BYTES: Final = 8 << 20
"""A transfer that is expected to take so long, or is so large that it must, says something about its copies by its time."""
_NEAR: Final = (1.0, 2.0)
"""How far from a measurement copies may be in length and in number, in doublings, for it to say how long they take."""


class Watch:
    """Compares the time of each transfer on the device with what `calibration` expects, and calls `doubt` once when most of the last
    `LOOKED_AT` of a direction were off by `OFF` the same way.

    Thread safety: any thread.
    """

    def __init__(self, calibration: Calibration, doubt: Callable[[], object]) -> None:
        self._calibration, self._doubt = calibration, doubt
        self._changed = threading.Lock()
        self._found: dict[Direction, deque[int]] = {direction: deque(maxlen=LOOKED_AT) for direction in Direction}
        """-1 for a transfer that was faster than expected, 1 for one that was slower, 0 for one that was neither."""
        self._doubted = False

    def saw(self, direction: Direction, queued: Queued, seconds: float) -> None:
        """A transfer took `seconds` from its first copy to its last."""
        expected = self._expected(direction, queued)
        if expected is None or (expected < _LEAST_S and sum(copies.nbytes for copies, _ in queued) < _LEAST_BYTES):
            return
        with self._changed:
            found = self._found[direction]
            found.append((seconds > OFF * expected) - (seconds * OFF < expected))
            if self._doubted or abs(sum(found)) < _DOUBTFUL:
                return
            self._doubted = True
        _log.warning(
            "copies %s take %.1f times what was measured; they are measured again at the next start", direction, seconds / expected
        )
        self._doubt()

    def _expected(self, direction: Direction, queued: Queued) -> float | None:
        """Seconds by the calibration; None where it has not measured such copies."""
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
