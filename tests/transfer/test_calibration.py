"""Choice of the copy method by calibration, and the files in which a calibration is kept."""

from __future__ import annotations

import numpy as np

from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.transfer.cuda import Calibration, Card, Cell, Direction, Method, calibrate
from tiercache.transfer.cuda.calibration import COUNTS, LENGTHS
from tiercache.transfer.descriptors import Copies

SMALL = 4 << 20
"""Bytes of a buffer: memory is copied by a CPU here."""
CARD = Card("Simulated", "0000:00:00.0", 13000, 13000, 132)


def copies(length: int, count: int) -> Copies:
    return Copies(np.zeros(count, np.uint64), np.zeros(count, np.uint64), np.full(count, length, np.int64))


def cell(direction: Direction, length: int, count: int, **speeds: float) -> Cell:
    return Cell(direction, length, count, {Method(name): speed for name, speed in speeds.items()})


def slow_per_copy(method: Method, nbytes: int, count: int) -> float:
    """A batch costs 100 us a copy, a kernel 3 ms whatever it copies: few copies are for the batch, many for
    the kernel.
    """
    return {Method.BATCH: 100e-6 * count, Method.KERNEL: 3e-3, Method.MEMCPY: 500e-6}[method]


def test_the_fastest_method_is_found_where_it_is_the_fastest() -> None:
    device, shares = SimulatedDevice(seconds=slow_per_copy, own_clock=True), []
    with device.current():
        found = calibrate(device, nbytes=SMALL, progress=shares.append)
    assert device.leftovers == {}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert {(c.direction, c.length) for c in found.cells} == {(d, n) for d in Direction for n in LENGTHS}
    assert all(set(c.speeds) == set(Method) and min(c.speeds.values()) > 0 for c in found.cells)
    for direction in Direction:
        assert found.choose(direction, copies(4096, 1)) is Method.BATCH
        assert found.choose(direction, copies(4096, 1024)) is Method.KERNEL
        assert found.choose(direction, copies(5000, 3000)) is Method.KERNEL
        assert found.choose(direction, copies(1, 1)) is Method.BATCH
        assert found.choose(direction, copies(0, 0)) in Method


def test_methods_that_are_not_there_are_not_measured() -> None:
    device = SimulatedDevice(unavailable={Method.BATCH: "an old driver", Method.KERNEL: "no CuPy"})
    with device.current():
        found = calibrate(device, nbytes=SMALL)
    assert {c.best for c in found.cells} == {Method.MEMCPY}
    assert device.calls["copy_batch"] == device.calls["copy_table"] == 0


def test_where_two_are_as_fast_the_copy_engines_do_it() -> None:
    assert cell(Direction.TO_HOST, 1, 1, batch=98, memcpy=99, kernel=100).best is Method.BATCH
    assert cell(Direction.TO_HOST, 1, 1, batch=90, memcpy=98, kernel=100).best is Method.MEMCPY
    assert cell(Direction.TO_HOST, 1, 1, batch=90, memcpy=90, kernel=100).best is Method.KERNEL
    assert cell(Direction.TO_HOST, 1, 1, kernel=1, memcpy=1).best is Method.MEMCPY


def test_directions_are_apart() -> None:
    calibration = Calibration(
        CARD,
        [
            cell(Direction.TO_HOST, 4096, 16, batch=1, kernel=2),
            cell(Direction.TO_DEVICE, 4096, 16, batch=2, kernel=1),
        ],
    )
    assert calibration.choose(Direction.TO_HOST, copies(4096, 16)) is Method.KERNEL
    assert calibration.choose(Direction.TO_DEVICE, copies(4096, 16)) is Method.BATCH


def test_a_device_with_little_memory_is_measured_with_less() -> None:
    class Small(SimulatedDevice):
        def allocate(self, nbytes: int) -> int:
            if nbytes > 20 << 20:
                raise RuntimeError("out of memory")
            return super().allocate(nbytes)

    device = Small()
    with device.current():
        found = calibrate(device)
    assert {c.length for c in found.cells} == set(LENGTHS)
    assert max(c.length * c.count for c in found.cells) <= 8 << 20
    assert {c.count for c in found.cells if c.length == 4096} == set(COUNTS)
    assert device.leftovers == {}
