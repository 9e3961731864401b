"""`tiercache bench device` on a simulated device: the rows, and that everything is given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.cli.store.test_samples import call
from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.errors import ConfigError, TransferError
from tiercache.geometry import kv_geometry, state_geometry
from tiercache.policy import profile_named
from tiercache.transfer import cuda
from tiercache.transfer.cuda import Method
from tiercache.transfer.descriptors import Descriptors
from tiercache_lab.bench.device import (
    MODEL,
    PAGES,
    STATES,
    Bed,
    ContiguousCopy,
    DevicePlan,
    Direction,
    device_plan,
    footer,
    run,
)  # fmt: skip
from tiercache_lab.bench.rows import MIB

TINY = {
    "pages": kv_geometry((0, 2), 2, 8, "bfloat16", 64),
    "states": state_geometry(
        [
            (n, *part)
            for n in (1, 3)
            for part in (("conv", (6, 3), "bfloat16"), ("ssm", (3, 9, 5), "float32"))
        ],
        64,
    ),
}
METHODS = [str(method) for method in Method]
ALL = [*METHODS, "choice"]


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    gc.collect()
    assert device.leftovers == {}


@pytest.fixture
def installed(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """The command finds the simulated device."""
    monkeypatch.setattr(cuda, "CupyDevice", lambda ordinal: device)
    return device


def rows_of(
    device: SimulatedDevice, counts: tuple[int, ...] = (4,), say: Any = lambda _: None, name: str = "copy"
) -> list[dict[str, Any]]:
    """Return the rows of one name, as JSON has them."""
    with closing(run(DevicePlan(MIB, 5, counts, **TINY), device, say)) as found:
        records = [row.record() for row in found]
    return [row for row in records if row["name"] == name]


def test_shapes_are_those_of_the_profile() -> None:
    profile = profile_named(MODEL)
    assert PAGES.nbytes == 64 * profile.kv_bytes_per_token
    assert STATES.nbytes == profile.state_bytes
    assert [segment.nbytes for segment in PAGES.segments] == [64 << 10] * 24
    assert [segment.nbytes for segment in STATES.segments] == [48 << 10, 2 << 20] * 36


def test_groups_are_as_large_as_fits() -> None:
    made = device_plan("1GiB", 5)
    found: dict[str, list[int]] = {}
    for kind, geometry, count in made.groups():
        found.setdefault(kind, []).append(count)
        assert count * geometry.nbytes <= made.max_bytes
    assert found == {"pages": [1, 4, 16, 64, 256], "states": [1, 4]}


@pytest.mark.slow
def test_every_group_has_its_rows(device: SimulatedDevice) -> None:
    rows = rows_of(device, (1, 4))
    groups = [("pages", 1), ("states", 1), ("pages", 4), ("states", 4)]
    assert [(row["kind"], row["objects"], row["direction"], row["method"]) for row in rows] == [
        (kind, objects, direction, method)
        for kind, objects in groups
        for direction in Direction
        for method in ALL
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["gb_s"] / row["contiguous_gb_s"], rel=2e-3)
    assert {row["mib"] for row in rows if (row["kind"], row["objects"]) == ("states", 1)} == {
        round(TINY["states"].nbytes / MIB, 3)
    }


@pytest.mark.parametrize("method", Method)
def test_each_method_is_measured_alone(device: SimulatedDevice, method: Method) -> None:
    with device.current(), ExitStack() as stack:
        bed = Bed(ContiguousCopy(device, 16 * MIB, stack), TINY["pages"], 4, 4096, stack)
        device.moved.clear()
        bed.transfer(Direction.TO_HOST, method)
        # The kernel's table of copies is copied to the device as well.
        assert {*device.moved} - {Method.MEMCPY} == {method} - {Method.MEMCPY}


class WrongBatches(SimulatedDevice):
    """Leaves out the last copy of more than a few."""

    def copy_batch(self, copies: Descriptors, stream: int) -> None:
        super().copy_batch(copies[:-1] if len(copies) > 3 else copies, stream)


class BrokenKernel(SimulatedDevice):
    def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        raise RuntimeError("no kernels today")


@pytest.mark.parametrize(
    ("kind", "method", "reason"),
    [
        (BrokenKernel, "kernel", "no kernels today"),
        (WrongBatches, "batch", "of 4194304 bytes were wrong in a trial"),
    ],
)
def test_a_method_that_does_not_work_is_left_out_and_named(kind, method, reason):
    device = kind()
    assert {row["method"] for row in rows_of(device, (1,))} == {*ALL} - {method}
    [said] = [one for one in footer(DevicePlan(MIB, 5), device) if "No copies" in one]
    assert said.startswith(f"No copies by {method}: ")
    assert said.endswith(f"{reason}.")
    gc.collect()
    assert device.leftovers == {}


@pytest.mark.parametrize("step", [1, 3, 8])
def test_an_interrupted_run_gives_everything_back(device: SimulatedDevice, step: int) -> None:
    told: list[str] = []

    def say(doing: str) -> None:
        told.append(doing)
        if len(told) == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rows_of(device, (1, 4), say)
    assert device.lost is None


@pytest.mark.parametrize(
    ("where", "refused", "at"),
    [
        ("4 states: host to device", "copy_batch", 3),  # with two layers of a load under way
        ("4 states: host to device", "copy_table", 2),
        ("4 states: device to host", "copy_table", 1),
    ],
)
def test_a_device_that_fails_ends_the_run_in_one_sentence(where: str, refused: str, at: int) -> None:
    device = SimulatedDevice(seconds=lambda method, nbytes, count: 2e-4)
    armed = []

    def say(doing: str) -> None:
        if doing.startswith(where) and not armed:
            armed.append(device.fail(refused, at=at))

    with pytest.raises((TransferError, ConfigError), match=r"was refused|lower --most"):
        rows_of(device, say=say)
    gc.collect()
    assert device.leftovers == {}
    assert device.lost is None


def test_a_device_that_is_lost_ends_the_run_in_one_sentence() -> None:
    device = SimulatedDevice()
    with pytest.raises(TransferError, match="an illegal address was accessed"):
        rows_of(device, say=lambda doing: device.lose() if doing.startswith("4 states") else None)


@pytest.mark.slow
def test_the_command_prints_rows_and_nothing_else(installed: SimulatedDevice) -> None:
    done = call("bench", "device", "--most", "2MiB", "-o", "jsonl")
    copies = [row for row in done.lines if row["name"] == "copy"]
    found = [(row["objects"], row["mib"], row["method"]) for row in copies]
    assert found == [(1, 1.5, method) for method in ALL] * 2
    assert "Simulated at 0000:00:00.0" in done.error
    shown = call("bench", "device", "--most", "2MiB").out
    assert "contiguous_gb_s" in shown
    assert "choice" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "99"], "device cuda:99"),
        (["--most", "much"], "--most: 'much' is not a size"),
        (
            ["--most", "1MiB"],
            "--most 1048576 does not hold one page of qwen3-next-80b-a3b; give at least 1572864",
        ),
        (["--repeat", "4"], "--repeat"),
    ],
)
def test_a_mistake_gets_one_sentence(arguments: list[str], sentence: str) -> None:
    done = call("bench", "device", *arguments, ok=2)
    assert sentence in done.error
    assert done.out == ""
