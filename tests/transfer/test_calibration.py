"""Choice of the copy method by calibration, and the files in which a calibration is kept."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.transfer.cuda import (
    Calibration,
    Card,
    Cell,
    Direction,
    Method,
    calibrate,
    calibrated,
    calibration_directory,
    read_calibration,
)
from tiercache.transfer.cuda.calibration import COUNTS, LENGTHS
from tiercache.transfer.cuda.calibration_files import calibration_path
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


class TestTheFile:
    def test_it_is_kept_and_found(self, tmp_path: Path) -> None:
        device = SimulatedDevice(seconds=slow_per_copy, own_clock=True)
        with device.current():
            first, how = calibrated(device, tmp_path / "a" / "b", nbytes=SMALL)
            calls = device.calls["copy_batch"]
            second, again = calibrated(device, tmp_path / "a" / "b", nbytes=SMALL)
        (path,) = (tmp_path / "a" / "b").iterdir()
        assert how.startswith("calibrated in ")
        assert again == f"calibration from {path}"
        assert device.calls["copy_batch"] == calls
        assert second.cells == first.cells
        assert second.card == first.card == device.card
        assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[: len(text) // 2],
            lambda text: "",
            lambda text: "\x00" * 100,
            lambda text: "[]",
            lambda text: text.replace('"format": 2', '"format": 3'),
            lambda text: text.replace("kernel", "teleport", 1),
            lambda text: text.replace('"length": 4096', '"length": 0', 1),
            lambda text: text.replace('"length": 4096', '"length": "4096"', 1),
            lambda text: json.dumps(json.loads(text) | {"surprise": 1}),
            lambda text: json.dumps(json.loads(text) | {"cells": []}),
            lambda text: text.replace("device_to_host", "host_to_device"),
            lambda text: text + " " * (1 << 20) + "x",
            lambda text: text.replace("e+", "e+99").replace('"gb_s": {', '"gb_s": {"kernel": NaN,', 1),
        ],
    )
    def test_a_damaged_one_is_replaced(self, tmp_path: Path, damage: Any) -> None:
        device = SimulatedDevice()
        with device.current():
            calibrated(device, tmp_path, nbytes=SMALL)
            path = calibration_path(device.card, device.methods, tmp_path)
            text = path.read_text()
            path.write_text(damage(text))
            assert path.read_text() != text
            found, how = calibrated(device, tmp_path, nbytes=SMALL)
            assert how.startswith("calibrated in ")
            assert calibrated(device, tmp_path, nbytes=SMALL)[1].startswith("calibration from")
        assert found.cells

    def test_it_is_of_one_machine_and_of_what_it_can(self, tmp_path: Path) -> None:
        device, other = SimulatedDevice(), SimulatedDevice(name="Another")
        with device.current():
            calibrated(device, tmp_path, nbytes=SMALL)
        with other.current():
            assert calibrated(other, tmp_path, nbytes=SMALL)[1].startswith("calibrated in ")
        poorer = SimulatedDevice(unavailable={Method.KERNEL: "no CuPy"})
        with poorer.current():
            found, how = calibrated(poorer, tmp_path, nbytes=SMALL)
        assert how.startswith("calibrated in ")
        assert {c.best for c in found.cells} <= {Method.BATCH, Method.MEMCPY}
        # A file by the right name that tells of another card is not believed.
        path = calibration_path(device.card, device.methods, tmp_path)
        path.write_bytes(calibration_path(other.card, other.methods, tmp_path).read_bytes())
        with device.current():
            assert calibrated(device, tmp_path, nbytes=SMALL)[1].startswith("calibrated in ")

    def test_it_is_of_a_device_a_driver_and_a_set_of_methods(self, tmp_path: Path) -> None:
        """Each has its own file, so that they do not replace each other's; where a card is plugged in,
        nothing depends on.
        """
        device = SimulatedDevice()
        with device.current():
            calibrated(device, tmp_path, nbytes=SMALL)
        for other in (replace(device.card, uuid="another"), replace(device.card, driver=13010)):
            device.card, before = other, device.card
            with device.current():
                assert calibrated(device, tmp_path, nbytes=SMALL)[1].startswith("calibrated in ")
            device.card = before
        device.card = replace(device.card, bus="0000:01:00.0", name="Simulated once more")
        with device.current():
            assert calibrated(device, tmp_path, nbytes=SMALL)[1].startswith("calibration from ")
        poorer = SimulatedDevice(unavailable={Method.BATCH: "an old driver"})
        with poorer.current():
            assert calibrated(poorer, tmp_path, nbytes=SMALL)[1].startswith("calibrated in ")
            assert calibrated(poorer, tmp_path, nbytes=SMALL)[1].startswith("calibration from ")
        with device.current():
            assert calibrated(device, tmp_path, nbytes=SMALL)[1].startswith("calibration from ")
        assert len(list(tmp_path.iterdir())) == 4

    @pytest.mark.parametrize(
        "make", [lambda path: os.mkfifo(path), lambda path: path.mkdir(), lambda path: path.symlink_to(path)]
    )
    def test_what_is_no_file_holds_nobody_up(self, tmp_path: Path, make: Any) -> None:
        device = SimulatedDevice()
        make(calibration_path(device.card, device.methods, tmp_path))
        with device.current():
            assert calibrated(device, tmp_path, nbytes=SMALL)[1].startswith("calibrated in ")

    def test_processes_that_start_together(self, tmp_path: Path) -> None:
        """Each writes its own, over and over; whoever reads meanwhile finds one of them whole."""
        script = textwrap.dedent("""
            import sys
            from pathlib import Path
            from tests.transfer.simulated_cuda import SimulatedDevice
            from tiercache.transfer.cuda import Cell, Calibration, Direction, Method
            from tiercache.transfer.cuda.calibration_files import calibration_path, write_calibration
            device, directory, speed = SimulatedDevice(), Path(sys.argv[1]), float(sys.argv[2])
            cells = [Cell(d, n, 1, dict.fromkeys(Method, speed)) for d in Direction for n in range(1, 400)]
            for _ in range(60):
                path = calibration_path(device.card, device.methods, directory)
                write_calibration(path, Calibration(device.card, cells))
        """)
        writers = [
            subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(speed)])
            for speed in (1.0, 2.0)
        ]
        path, seen = calibration_path(SimulatedDevice().card, list(Method), tmp_path), set()
        while any(writer.poll() is None for writer in writers):
            if path.exists():
                found = read_calibration(path)
                assert found is not None
                (speed,) = {s for c in found.cells for s in c.speeds.values()}
                seen.add(speed)
        assert [writer.returncode for writer in writers] == [0, 0]
        assert seen <= {1.0, 2.0}
        assert [p.name for p in tmp_path.iterdir()] == [path.name], "nothing else is left"

    def test_a_directory_that_cannot_be_written_costs_no_start(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        device = SimulatedDevice()
        with device.current():
            assert calibrated(device, tmp_path / "file" / "below", nbytes=SMALL)[1].startswith(
                "calibrated in "
            )
        assert "could not be kept" in caplog.text

    def test_where_it_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TIERCACHE_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert calibration_directory() == tmp_path / "cache" / "tiercache"
        monkeypatch.setenv("TIERCACHE_CACHE_DIR", str(tmp_path / "mine"))
        assert calibration_directory() == tmp_path / "mine"
        assert read_calibration(tmp_path / "nothing") is None
