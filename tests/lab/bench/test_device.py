"""`tiercache bench device` on a simulated device: the rows, the check of every byte, and that everything is
given back.
"""

from __future__ import annotations

import gc
import io
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.cli.store.test_samples import call
from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.cli.terminal import Output
from tiercache.errors import ConfigError, TransferError
from tiercache.geometry import kv_geometry, state_geometry
from tiercache.policy import profile_named
from tiercache.transfer import cuda
from tiercache.transfer.cuda import Cell, Direction, Method
from tiercache.transfer.cuda.calibration_files import calibrated
from tiercache.transfer.descriptors import Copies
from tiercache_lab.bench import show as lines
from tiercache_lab.bench.device import show
from tiercache_lab.bench.device.overlap import TorchProducts
from tiercache_lab.bench.device.plan import (
    MODELS,
    DeviceCase,
    DevicePlan,
    Objects,
    Shapes,
    TransferKind,
    plan,
    shapes_of,
)
from tiercache_lab.bench.device.rows import CopyRow, OverlapRow, Waiting
from tiercache_lab.bench.device.run import run
from tiercache_lab.bench.rows import MIB, Note

TINY = Shapes(
    "tiny",
    kv_geometry((0, 2), 2, 8, "bfloat16", 64),
    state_geometry(
        [
            (n, *part)
            for n in (1, 3)
            for part in (("conv", (6, 3), "bfloat16"), ("ssm", (3, 9, 5), "float32"))
        ],
        64,
    ),
)
METHODS = [str(method) for method in Method]
ALL = [*METHODS, "choice"]


class SimulatedProducts:
    """A product is a kernel that takes its time."""

    def __init__(self, device: SimulatedDevice, width: int) -> None:
        self._device = device
        self.stream = device.create_stream(urgent=False)

    def queue(self, count: int) -> None:
        for _ in range(count):
            self._device.run(self.stream, lambda: time.sleep(1e-4))

    def close(self) -> None:
        self._device.synchronize_stream(self.stream)
        self._device.destroy_stream(self.stream)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the simulated device."""
    device, directory = SimulatedDevice(), tmp_path_factory.mktemp("calibration")
    with device.current():
        calibrated(device, directory, nbytes=4 * MIB)
    return directory


@pytest.fixture(autouse=True)
def kept(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where this test looks for one."""
    directory = Path(shutil.copytree(measured, tmp_path / "kept"))
    monkeypatch.setenv("TIERCACHE_CACHE_DIR", str(directory))
    return directory


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


def tiny(**changes: Any) -> DevicePlan:
    settings: dict[str, Any] = {
        "models": (TINY,), "counts": (1, 4, 40), "max_bytes": MIB, "methods": None, "choice": True,
        "repeats": 5,
        "cases": frozenset(DeviceCase),
    }  # fmt: skip
    return DevicePlan(**(settings | changes))


def copies_only(**changes: Any) -> DevicePlan:
    return tiny(cases=frozenset({DeviceCase.COPY}), **changes)


def rows_of(
    device: SimulatedDevice, made: DevicePlan, make: Any = SimulatedProducts, say: Any = lambda _: None
) -> list[Any]:
    with closing(run(made, device, make, say)) as found:
        return [item for item in found if not isinstance(item, Note)]


def test_shapes_are_those_of_the_profiles() -> None:
    for name in MODELS:
        shapes, profile = shapes_of(name), profile_named(name)
        assert shapes.pages.nbytes == 64 * profile.kv_bytes_per_token
        assert shapes.states.nbytes == profile.state_bytes
    known = shapes_of("qwen3-next-80b-a3b")
    assert known.layers == 48
    assert known.pages.layers == tuple(range(3, 48, 4))
    assert [segment.nbytes for segment in known.pages.segments] == [64 << 10] * 24
    assert [segment.nbytes for segment in known.states.segments] == [48 << 10, 2 << 20] * 36


def test_groups_are_as_large_as_fits() -> None:
    made = plan(models="", most="1GiB", methods="", cases="", repeats=5, quick=False)
    groups = list(made.groups(made.models[0]))
    assert [(kind, objects) for kind, objects in groups if kind is not TransferKind.PAGES] == [
        (TransferKind.STATES, Objects(states=1)),
        (TransferKind.STATES, Objects(states=4)),
        *(
            (TransferKind.MIX, Objects(count - states, states))
            for count, states in ((4, 1), (16, 1), (64, 2), (256, 8))
        ),
    ]
    assert [objects.count for kind, objects in groups if kind is TransferKind.PAGES] == [1, 4, 16, 64, 256]
    assert made.prompt(made.models[0]) == Objects(255, 1)
    assert all(objects.nbytes(made.models[0]) <= made.max_bytes for _, objects in groups)


@pytest.fixture(scope="module")
def everything(measured: Path) -> list[Any]:
    """The rows of all cases."""
    device = SimulatedDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERCACHE_CACHE_DIR", str(measured))
        rows = rows_of(device, tiny(counts=(1, 4)))
    gc.collect()
    assert device.leftovers == {}
    return rows


@pytest.mark.slow
def test_every_case_has_its_rows(everything: list[Any], kept: Path) -> None:
    records = [row.record() for row in everything]
    by_case = {
        name: [record for record in records if record["name"] == name]
        for name in (*DeviceCase, "calibration")
    }
    assert len(records) == sum(map(len, by_case.values()))
    copies = by_case["copy"]
    groups = [("pages", 1), ("pages", 4), ("states", 1), ("states", 4), ("mix", 4)]
    assert [(row["kind"], row["objects"], row["direction"], row["method"]) for row in copies] == [
        (kind, objects, direction, method)
        for kind, objects in groups
        for direction in Direction
        for method in ALL
    ]
    for row in copies:
        assert row["ratio"] == pytest.approx(row["gb_s"] / row["contiguous_gb_s"], rel=2e-3)
        chosen = row["method"] == "choice"
        assert (row["chosen"] is not None, row["engine_gb_s"] is not None, row["transfers"] is not None) == (
            chosen,
        ) * 3
        assert (row["target"], row["met"]) == (None, None), "nothing is wanted of so few bytes"
    [state, _] = [
        row for row in copies if (row["kind"], row["objects"], row["method"]) == ("states", 1, "batch")
    ]
    assert (state["copies"], state["mib"]) == (4, round(TINY.states.nbytes / MIB, 3))
    assert {row["transfers"] for row in copies if row["method"] == "choice"} == {4}
    loads = [row for row in copies if row["method"] == "choice" and row["direction"] == "host_to_device"]
    assert {sum(row["chosen"].values()) for row in loads} == {1}, (
        "layers that are as small as these are queued together"
    )
    assert [(row["waiting"], row["pages"], row["states"], row["layers"]) for row in by_case["overlap"]] == [
        (waiting, 127, 1, 4) for waiting in Waiting
    ]
    assert [row["target"] for row in by_case["overlap"]] == ["<= 10 %", None]
    assert [(row["what"], row["mib"]) for row in by_case["start"]] == [
        ("arena", 1),
        ("page-lock", 1),
        ("calibrate", None),
    ]
    [path] = kept.iterdir()
    known = cuda.read_calibration(path)
    assert known is not None
    assert [
        (row["direction"], row["length"], row["count"], row["best"]) for row in by_case["calibration"]
    ] == [(cell.direction, cell.length, cell.count, cell.best) for cell in known.cells]


def test_methods_and_counts_are_filtered(device: SimulatedDevice) -> None:
    rows = rows_of(device, copies_only(methods=(Method.KERNEL,), choice=False, counts=(4,)))
    assert {row.method for row in rows} == {"kernel"}
    assert {row.engine_gb_s for row in rows} == {None}
    assert len(rows) == 6
    rows = rows_of(device, copies_only(methods=(), counts=(4,)))
    assert {row.method for row in rows} == {"choice"}
    assert all(row.engine_gb_s > 0 for row in rows)


class WrongBatches(SimulatedDevice):
    """Leaves out the last copy of more than a few, as nothing before the bench would notice."""

    wrong = True

    def copy_batch(self, copies: Copies, stream: int) -> None:
        super().copy_batch(copies[:-1] if len(copies) > 12 and self.wrong else copies, stream)


class TouchesMore(SimulatedDevice):
    """Writes a byte behind each of many copies, but for the last, which nothing may lie behind."""

    def copy_batch(self, copies: Copies, stream: int) -> None:
        length = copies.length.copy()
        if len(length) > 12:
            length += 1
            last = [copies.source.argmax(), copies.destination.argmax()]
            length[last] = copies.length[last]
        super().copy_batch(Copies(copies.source, copies.destination, length), stream)


@pytest.mark.parametrize("kind", [WrongBatches, TouchesMore])
def test_wrong_bytes_end_the_run(kind: type[SimulatedDevice]) -> None:
    device = kind()
    with pytest.raises(
        TransferError, match=r"copies by batch: \d+ segments of \d+ objects of tiny were wrong"
    ):
        rows_of(device, copies_only(methods=(Method.BATCH,), counts=(40,)))
    gc.collect()
    assert device.leftovers == {}


def test_what_the_engine_gets_wrong_ends_the_run(kept: Path) -> None:
    device = WrongBatches()
    [path] = kept.iterdir()
    document = json.loads(path.read_text())
    for cell in document["cells"]:
        cell["gb_s"] |= {"batch": 1000.0}
    path.write_text(json.dumps(document))
    with pytest.raises(TransferError, match="transfers by the engine: "):
        rows_of(device, copies_only(methods=(Method.KERNEL,), counts=(40,)))
    gc.collect()
    assert device.leftovers == {}


class BrokenKernel(SimulatedDevice):
    def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        raise RuntimeError("no kernels today")


def test_a_method_that_does_not_work_is_left_out_and_named() -> None:
    device = BrokenKernel()
    with closing(run(copies_only(counts=(1,)), device, SimulatedProducts, lambda _: None)) as found:
        everything = list(found)
    assert {row.method for row in everything if isinstance(row, CopyRow)} == {"batch", "memcpy", "choice"}
    assert "no copies by kernel: no kernels today" in [
        item.text for item in everything if isinstance(item, Note)
    ]
    with pytest.raises(ConfigError, match="--method kernel is not available here: no kernels today"):
        rows_of(device, copies_only(methods=(Method.KERNEL,)))
    gc.collect()
    assert device.leftovers == {}


@pytest.mark.parametrize("step", [1, 3, 10, 20, 33])
def test_an_interrupted_run_gives_everything_back(device: SimulatedDevice, step: int) -> None:
    said: list[str] = []

    def say(doing: str) -> None:
        said.append(doing)
        if len(said) == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rows_of(device, tiny(cases=frozenset(DeviceCase) - {DeviceCase.START}, counts=(1, 4)), say=say)
    assert device.lost is None


def _case_of(doing: str) -> DeviceCase:
    """Return the case to which a message of progress belongs."""
    return DeviceCase.OVERLAP if doing.endswith("a load") else DeviceCase.COPY


@pytest.mark.parametrize(
    ("where", "refused", "at"),
    [
        ("tiny, 4 mix: comparing what batch", "copy_batch", 3),  # with two layers of a load under way
        ("tiny, 4 mix: comparing what kernel", "copy_table", 2),
        ("tiny, 4 mix: comparing what the engine", "copy_batch", 1),
        ("tiny: a load", "lock", 1),
        ("tiny: a load", "synchronize_stream", 1),
    ],
)
def test_a_device_that_fails_ends_the_run_in_one_sentence(where: str, refused: str, at: int) -> None:
    device = SimulatedDevice(seconds=lambda method, nbytes, count: 2e-4)
    armed = []

    def say(doing: str) -> None:
        if doing.startswith(where) and not armed:
            armed.append(device.fail(refused, at=at))

    with pytest.raises((TransferError, ConfigError), match="was refused"):
        rows_of(device, tiny(cases=frozenset({_case_of(where)}), counts=(4,)), say=say)
    gc.collect()
    assert device.leftovers == {}
    assert device.lost is None


def test_a_device_that_is_lost_ends_the_run_in_one_sentence() -> None:
    device = SimulatedDevice()
    with pytest.raises(TransferError, match="an illegal address was accessed"):
        rows_of(
            device,
            copies_only(counts=(4,)),
            say=lambda doing: device.lose() if doing.startswith("tiny, 4 mix") else None,
        )


def test_too_little_memory_is_said(device: SimulatedDevice) -> None:
    with pytest.raises(ConfigError, match="lower --most"):
        rows_of(
            device,
            copies_only(counts=(4,)),
            say=lambda doing: device.fail("allocate") if doing == "looking for a calibration" else None,
        )


def test_without_torch_a_row_says_why(device: SimulatedDevice) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    rows = rows_of(device, tiny(cases=frozenset({DeviceCase.OVERLAP})), TorchProducts)
    assert [row.record()["name"] for row in rows] == ["overlap"]
    assert all("finds no CUDA device" in row.record()["skipped"] for row in rows)
    out = io.StringIO()
    with redirect_stdout(out):
        show.tables(rows, [])
    assert "overlap was not measured: torch" in out.getvalue()


def test_the_command_prints_rows_and_nothing_else(installed: SimulatedDevice) -> None:
    asked = ("--most", "2MiB", "--model", "Qwen3-Next-80B-A3B", "--case", "copy", "--method", "batch,choice")
    done = call("bench", "device", *asked, "-o", "jsonl")
    found = [(row["objects"], row["mib"], row["copies"], row["method"]) for row in done.lines]
    assert found == [(1, 1.5, 24, "batch"), (1, 1.5, 24, "choice")] * 2
    assert "Simulated at 0000:00:00.0" in done.error
    assert "The choice: calibration from" in done.error


def test_tables_name_every_row(everything: list[Any], device: SimulatedDevice) -> None:
    rows = [
        *everything,
        CopyRow("other", TransferKind.MIX, Direction.TO_HOST, 256, 64 * MIB, 9000, "choice", 50.0, 50.5,
         {"batch": 1},
         49.0, 4),
        OverlapRow("other", Waiting.LAYERS, 255, 1, 456 * MIB, 48, 8, 0.009, 0.0108, 0.0119, ),
    ]  # fmt: skip
    out = io.StringIO()
    with redirect_stdout(out):
        show.tables(rows, show.footer(tiny(), device, [Note("nothing else ran")]))
    said = out.getvalue()
    for title in ("start", "calibration, GB/s", "copies, tiny", "copies, other", "a load during compute"):
        assert title in said
    assert "…" not in said, "a column is cut off"
    assert ">= 0.95 x  yes" in said
    assert "<= 10 %   no" in said
    assert "Nothing else ran." in said
    with redirect_stdout(io.StringIO()) as out:
        assert lines.collect(iter([*rows[:2], Note("x")]), Output.JSONL)[1] == [Note("x")]
    assert len(out.getvalue().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "99"], "device cuda:99"),
        (["--method", "magic"], "--method 'magic' is not known; use batch, memcpy, kernel, choice"),
        (["--case", "copies"], "--case 'copies' is not known; use start, copy, overlap"),
        (["--model", "gpt"], "--model 'gpt' is not known; use qwen3-next-80b-a3b"),
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


def test_help_teaches_by_example() -> None:
    done = call("bench", "device", "--help")
    assert "tiercache bench device --quick --case copy" in " ".join(done.out.split())


def test_a_cell_says_what_is_best(capsys: pytest.CaptureFixture[str]) -> None:
    cell = Cell(Direction.TO_HOST, 4096, 1, {Method.BATCH: 1.0, Method.KERNEL: 2.0})
    show.tables([show.CellRow(cell)], [])
    assert capsys.readouterr().out.split()[-1] == "kernel"
