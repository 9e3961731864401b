"""A whole run of `bench device`, on a GPU or on a simulated device."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Final

from tiercache.errors import ConfigError, TierCacheError, TransferError
from tiercache.pools import HostArena
from tiercache.transfer.cuda import Calibration, CudaDevice, Method, calibrate, calibrated
from tiercache.transfer.cuda.calibration import self_test
from tiercache.transfer.cuda.copying import LockedArena
from tiercache_lab.bench.device.copying import copies
from tiercache_lab.bench.device.ground import Ground, Say
from tiercache_lab.bench.device.overlap import MakeProducts, overlap
from tiercache_lab.bench.device.plan import DeviceCase, DevicePlan
from tiercache_lab.bench.device.rows import CellRow, DeviceRow, StartRow
from tiercache_lab.bench.rows import Note
from tiercache_lab.bench.timing import Side, medians


def run(plan: DevicePlan, device: CudaDevice, make: MakeProducts, say: Say) -> Generator[DeviceRow | Note]:
    """Yield every row and note as soon as it is known.

    Closing the generator releases everything on the device. Raises TransferError if copied bytes are wrong or
    the driver fails. Raises ConfigError if this device cannot carry out the plan.
    """
    try:
        with device.current(), ExitStack() as stack:
            yield from _run(plan, device, make, say, stack)
    except TierCacheError:
        raise
    except RuntimeError as error:
        raise TransferError(f"{device.card} failed: {error}") from error


def _run(
    plan: DevicePlan, device: CudaDevice, make: MakeProducts, say: Say, stack: ExitStack
) -> Generator[DeviceRow | Note]:
    say("trying each method")
    self_test(device)
    methods = _methods(plan, device)
    for method, reason in device.unavailable.items():
        yield Note(f"no copies by {method}: {reason}")
    say("looking for a calibration")
    known, how = calibrated(device)
    yield Note(f"the choice: {how}")
    if DeviceCase.START in plan.cases:
        yield from start(plan, device, known, say)
    if plan.cases <= {DeviceCase.START}:
        return
    ground = Ground(device, known, plan.device_bytes, stack)
    if DeviceCase.COPY in plan.cases:
        yield from copies(plan, ground, methods, say)
    if DeviceCase.OVERLAP in plan.cases:
        yield from overlap(plan, ground, make, say)


def _methods(plan: DevicePlan, device: CudaDevice) -> list[Method]:
    """Return the methods to measure.

    Raises ConfigError if a requested method is not available on this device.
    """
    for method in plan.methods or ():
        if method in device.unavailable:
            raise ConfigError(f"--method {method} is not available here: {device.unavailable[method]}")
    return [
        method
        for method in Method
        if method not in device.unavailable and (plan.methods is None or method in plan.methods)
    ]


_GIB: Final = 1 << 30


def start(plan: DevicePlan, device: CudaDevice, known: Calibration, say: Say) -> Iterator[StartRow | CellRow]:
    """Measure the steps of a start, and yield their durations and the cells of the calibration `known`.

    The steps are: `arena` (allocating an arena), `page-lock` (page-locking an arena) and `calibrate`.
    """
    yield from _memory(plan, device, say)
    say("calibrating")
    started = time.perf_counter()
    calibrate(device)  # even if a file has a calibration: this measures how long a new one takes
    yield StartRow("calibrate", time.perf_counter() - started)
    for cell in known.cells:
        yield CellRow(cell)


def _memory(plan: DevicePlan, device: CudaDevice, say: Say) -> Iterator[StartRow]:
    block_bytes = plan.models[0].pages.padded_nbytes
    nbytes = max(1, min(plan.max_bytes, _GIB) // block_bytes) * block_bytes
    arenas: list[HostArena] = []
    locked: list[LockedArena] = []
    with ExitStack() as stack:
        stack.callback(_close, arenas, locked)
        say("faulting in and page-locking an arena")
        sides = [
            Side("arena", lambda _: arenas.append(HostArena(nbytes, block_bytes)),
             after=lambda _: _close(arenas, [])),
            Side(
                "page-lock", lambda _: locked.append(LockedArena(arenas[0], device)),
                before=lambda _: arenas.append(HostArena(nbytes, block_bytes)),
                after=lambda _: _close(arenas, locked),
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
