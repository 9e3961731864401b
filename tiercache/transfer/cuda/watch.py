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

OFF: Final = 2.0
"""Factor, either way, from which on a transfer counts as off."""
LOOKED_AT: Final = 32
"""Number of the last transfers of a direction that are looked at together."""
_DOUBTFUL: Final = 24
"""How many of them, net, must be off the same way.

A busy bus or a thread that waits for the GIL makes some slow, a wrong calibration most."""
_LEAST_S: Final = 200e-6
_LEAST_BYTES: Final = 8 << 20
"""Expected seconds, or bytes, from which on the time of a transfer says something about the speed of its copies; one suffices."""
_NEAR: Final = (1.0, 2.0)
"""Largest distance of copies from a measurement that predicts their time, in doublings: of the length, and of the number."""


class Watch:
    """Watch that compares the time of each transfer on the device with what `calibration` predicts.

    It calls `doubt` once, when most of the last `LOOKED_AT` transfers of a direction were off by the factor `OFF` the same way.

    Thread safety: any thread.
    """

    def __init__(self, calibration: Calibration, doubt: Callable[[], object]) -> None:
        self._calibration, self._doubt = calibration, doubt
        self._changed = threading.Lock()
        self._found: dict[Direction, deque[int]] = {direction: deque(maxlen=LOOKED_AT) for direction in Direction}
        """By direction: -1 for a transfer that was faster than expected, 1 for one that was slower, 0 for one that was neither."""
        self._doubted = False

    def saw(self, direction: Direction, queued: Queued, seconds: float) -> None:
        """Take note of a transfer that took `seconds` from its first copy to its last."""
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
        """Return the seconds that the calibration predicts; None where it has not measured such copies."""
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
