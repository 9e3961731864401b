"""The time that an engine needs before its first copy: page-locking the arena and calibrating."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from tiercache.cli.bench.device.ground import Say
from tiercache.cli.bench.device.plan import Plan
from tiercache.cli.bench.device.rows import CellRow, StartRow
from tiercache.cli.bench.timing import Side, medians
from tiercache.pools import HostArena
from tiercache.transfer.cuda import Calibration, CudaDevice, calibrate
from tiercache.transfer.cuda.locked import LockedArena

_GIB: Final = 1 << 30


def start(plan: Plan, device: CudaDevice, known: Calibration, say: Say) -> Iterator[StartRow | CellRow]:
    """Measure page-locking and calibrating; yield their times, and every cell of the `known` calibration."""
    yield from _memory(plan, device, say)
    say("calibrating")
    started = time.perf_counter()
    calibrate(device)  # even if a file holds one, because its time is measured here
    yield StartRow("calibrate", time.perf_counter() - started)
    for cell in known.cells:
        yield CellRow(cell)


def _memory(plan: Plan, device: CudaDevice, say: Say) -> Iterator[StartRow]:
    block_bytes = plan.models[0].pages.padded_nbytes
    nbytes = max(1, min(plan.most, _GIB) // block_bytes) * block_bytes
    arenas: list[HostArena] = []
    locked: list[LockedArena] = []
    with ExitStack() as stack:
        stack.callback(_close, arenas, locked)
        say("faulting in and page-locking an arena")
        sides = [
            Side("arena", lambda _: arenas.append(HostArena(nbytes, block_bytes)), after=lambda _: _close(arenas, [])),
            Side(
                "page-lock", lambda _: locked.append(LockedArena(arenas[0], device)),
                before=lambda _: arenas.append(HostArena(nbytes, block_bytes)), after=lambda _: _close(arenas, locked),
            ),
        ]  # fmt: skip
        found = medians(sides, plan.repeats)
    for what, seconds in found.items():
        yield StartRow(what, seconds, nbytes)


def _close(arenas: list[HostArena], locked: list[LockedArena]) -> None:
    while locked:
        locked.pop().unlock()
    while arenas:
        arenas.pop().close()
