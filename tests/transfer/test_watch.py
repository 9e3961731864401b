"""A calibration that is no longer right is noticed by the times of real copies, and measured again."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from tests.transfer.machines import Simulated
from tests.transfer.rigs import SLOTS, Kind, Rig
from tests.transfer.test_calibration import CARD, SMALL, cell, copies
from tiercache.pools import DevicePool, HostArena, HostPool
from tiercache.transfer.cuda import Calibration, Direction, Method, calibrated
from tiercache.transfer.cuda.calibration_files import (
    WINDOW,
    CalibrationWatch,
    calibration_path,
    forget_calibration,
    write_calibration,
)

KNOWN = Calibration(
    CARD, [cell(d, n, c, batch=10.0) for d in Direction for n in (4096, 65536) for c in (16, 128)]
)
"""10 GB/s: 128 copies of 64 KiB take 839 us."""


class Doubts:
    def __init__(self) -> None:
        self.count = 0
        self.watch = CalibrationWatch(KNOWN, self.add)

    def add(self) -> None:
        self.count += 1

    def saw(
        self,
        factor: float,
        times: int = 1,
        direction: Direction = Direction.TO_HOST,
        length: int = 65536,
        count: int = 128,
    ) -> None:
        for _ in range(times):
            self.watch.record(
                direction, [(copies(length, count), Method.BATCH)], factor * length * count / 10e9
            )


@pytest.mark.parametrize(
    ("factor", "doubted"), [(1.0, 0), (1.9, 0), (0.55, 0), (2.1, 1), (0.45, 1), (100.0, 1)]
)
def test_it_takes_a_factor_of_two(factor: float, doubted: int) -> None:
    doubts = Doubts()
    doubts.saw(factor, 3 * WINDOW)
    assert doubts.count == doubted


def test_speeds_that_no_bus_has_are_noticed_too() -> None:
    found: list[str] = []
    fast = Calibration(CARD, [cell(d, 65536, 128, batch=1e6) for d in Direction])
    watch = CalibrationWatch(fast, lambda: found.append("doubt"))
    for _ in range(WINDOW):
        watch.record(Direction.TO_DEVICE, [(copies(65536, 128), Method.BATCH)], 1e-3)
    assert found == ["doubt"]


def test_some_that_are_off_say_nothing() -> None:
    doubts = Doubts()
    for _ in range(10 * WINDOW):
        doubts.saw(1.0)
        doubts.saw(50.0)
        doubts.saw(0.1)
    assert doubts.count == 0
    doubts.saw(50.0, WINDOW // 2)
    doubts.saw(1.0, WINDOW)
    assert doubts.count == 0


def test_directions_are_apart() -> None:
    doubts = Doubts()
    for _ in range(WINDOW):
        doubts.saw(3.0, direction=Direction.TO_HOST)
        doubts.saw(1.0, direction=Direction.TO_DEVICE)
    assert doubts.count == 1


def test_what_was_not_measured_says_nothing() -> None:
    doubts = Doubts()
    doubts.saw(9.0, 2 * WINDOW, length=16 << 20, count=1)
    doubts.saw(9.0, 2 * WINDOW, length=65536, count=10_000)
    doubts.saw(9.0, 2 * WINDOW, length=4096, count=16)  # 6 us, of which the clock sees nothing
    for _ in range(2 * WINDOW):
        doubts.watch.record(Direction.TO_HOST, [(copies(65536, 128), Method.KERNEL)], 9.0)
        doubts.watch.record(Direction.TO_HOST, [], 9.0)
    assert doubts.count == 0


@pytest.fixture
def rig_of_large_slots() -> Rig:
    """Slots of four segments of 64 KiB, on a device with batches only."""
    machine = Simulated(
        unavailable=dict.fromkeys((Method.MEMCPY, Method.KERNEL), "not today"), own_clock=True
    )
    shapes = {(layer, "ssm"): ((SLOTS, 65536), "uint8") for layer in range(4)}
    kind = Kind.make(machine, np.random.default_rng(1), shapes, 64)
    arena = HostArena(SLOTS * 4 * 65536, 65536)
    return Rig(
        machine,
        kind,
        DevicePool.from_tensors(kind.geometry, kind.tensors),
        HostPool(kind.geometry, arena),
        arena,
    )


def test_an_engine_whose_copies_are_slower_lets_the_next_one_measure(
    rig_of_large_slots: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TIERCACHE_CACHE_DIR", str(tmp_path))
    rig, pause = rig_of_large_slots, [2e-3]
    device = rig.machine.device  # type: ignore[attr-defined]
    device.seconds = lambda method, nbytes, count: pause[0]
    with device.current():
        calibrated_before, _ = calibrated(device, tmp_path, nbytes=SMALL)
    path = calibration_path(device.card, device.methods, tmp_path)
    handles = rig.host.alloc(SLOTS).tolist()

    def serve() -> str:
        with rig.engine(calibration=None, group_bytes=1 << 30) as engine, caplog.at_level(logging.WARNING):
            for _ in range(WINDOW + 2):
                stored = engine.store(rig.units(list(range(SLOTS)), handles))
                assert stored.wait(30)
                assert stored.error is None
            return engine.report

    assert f"calibration from {path}" in serve()
    assert path.exists(), "it is right"
    pause[0] = 20e-3
    assert f"calibration from {path}" in serve()
    assert not path.exists()
    assert "they are measured again at the next start" in caplog.text
    write_calibration(path, KNOWN)
    forget_calibration(calibrated_before, device.methods, tmp_path)
    assert path.exists(), "another process has measured meanwhile"
    path.unlink()
    with device.current():
        assert calibrated(device, tmp_path, nbytes=SMALL)[1].startswith("calibrated in")
    rig.arena.close()
