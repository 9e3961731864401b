"""Print the results of `bench device`: one table of copies per model, and one table per other kind of row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeVar

from rich.console import Console

from tiercache.cli.terminal import console
from tiercache.transfer.cuda import CudaDevice, Direction, Method
from tiercache_lab.bench.device.copying import TRANSFERS
from tiercache_lab.bench.device.plan import DevicePlan
from tiercache_lab.bench.device.rows import CellRow, CopyRow, DeviceRow, OverlapRow, SkippedRow, StartRow
from tiercache_lab.bench.rows import MIB, Note, size_text
from tiercache_lab.bench.show import print_rows, wanted

_WAYS: Final = {Direction.TO_HOST: "to host", Direction.TO_DEVICE: "to device"}
_LEFT: Final = ("kind", "direction", "method", "model", "waits", "step", "best")
"""Columns that are aligned left."""
R = TypeVar("R", bound=DeviceRow)


@dataclass(frozen=True, slots=True)
class _TableLayout:
    columns: tuple[str, ...]
    cells: Callable[[Any], Sequence[str]]


def tables(rows: Sequence[DeviceRow], said: Sequence[str]) -> None:
    """Print all rows, then the reasons why cases were skipped, then the sentences `said`."""
    to = console()
    _print(to, "start", _START, _rows_of(StartRow, rows))
    _print(to, "calibration, GB/s", _CELLS, _rows_of(CellRow, rows))
    for model, rows_of_model in groupby(_rows_of(CopyRow, rows), key=lambda row: row.model):
        _print(
            to,
            f"copies, {model}",
            _COPIES,
            list(rows_of_model),
            section=lambda row: (row.kind, row.objects, row.direction),
        )
    _print(to, "a load during compute", _OVERLAP, _rows_of(OverlapRow, rows))
    skipped = [f"{row.case} was not measured: {row.reason}" for row in _rows_of(SkippedRow, rows)]
    for sentence in (*skipped, *said):
        to.print(sentence, style="dim", markup=False)


def footer(plan: DevicePlan, device: CudaDevice, notes: Iterable[Note]) -> list[str]:
    """Return the sentences that explain the figures."""
    return [
        (
            f"{device.card}. Medians of at least {plan.repeats} interleaved runs; objects in random slots and"
            " blocks."
        ),
        (
            "GB/s: all copies in one stream, from the start of queuing to the end of the last copy. A load"
            " queues its copies layer by layer. limit: GB/s of one contiguous copy of the same size, with"
            " host memory that the driver page-locked. engine: GB/s through the transfer engine, with"
            f" {TRANSFERS} transfers at once. Each transfer has as many objects as the row says. If that"
            " would exceed --most, the objects of the row are divided among the transfers."
        ),
        *(f"{note.text[0].upper()}{note.text[1:]}." for note in notes),
    ]


def _print(
    to: Console,
    title: str,
    layout: _TableLayout,
    rows: Sequence[DeviceRow],
    section: Callable[[Any], object] = lambda _: None,
) -> None:
    if rows:
        print_rows(to, title, layout.columns, rows, layout.cells, left=_LEFT, section=section)


def _rows_of(kind: type[R], rows: Iterable[DeviceRow]) -> list[R]:
    return [row for row in rows if isinstance(row, kind)]


def _copy(row: CopyRow) -> list[str]:
    chosen = f": {' + '.join(row.chosen)}" if row.chosen else ""
    engine = f"{row.engine_gb_s:.2f}" if row.engine_gb_s is not None else ""
    return [
        row.kind, _WAYS[row.direction], f"{row.objects:,}", f"{row.nbytes / MIB:,.1f}", f"{row.copies:,}",
        f"{row.method}{chosen}",
        f"{row.gb_s:.2f}", f"{row.contiguous_gb_s:.2f}", f"{row.ratio:.2f}", engine,
        *wanted(row.target, row.met),
    ]  # fmt: skip


def _overlap(row: OverlapRow) -> list[str]:
    times = [_ms(row.load), _ms(row.alone), _ms(row.both), f"{row.longer:+.1f}"]
    return [
        row.model,
        row.waiting,
        f"{row.pages}",
        f"{row.states}",
        f"{row.nbytes / MIB:,.1f}",
        *times,
        *wanted(row.target, row.met),
    ]


def _start(row: StartRow) -> list[str]:
    per_gib = f"{row.seconds_per_gib:.3f}" if row.seconds_per_gib is not None else ""
    return [row.what, f"{row.nbytes / MIB:,.0f}" if row.nbytes else "", f"{row.seconds:.3f}", per_gib]


def _cell(row: CellRow) -> list[str]:
    cell = row.cell
    speeds = [f"{cell.speeds[method]:.2f}" if method in cell.speeds else "" for method in Method]
    return [_WAYS[cell.direction], size_text(cell.length), f"{cell.count:,}", *speeds, cell.best]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


_COPIES: Final = _TableLayout(
    (
        "kind",
        "direction",
        "objects",
        "MiB",
        "copies",
        "method",
        "GB/s",
        "limit",
        "ratio",
        "engine",
        "target",
        "met",
    ),
    _copy,
)
_OVERLAP: Final = _TableLayout(
    (
        "model",
        "waits",
        "pages",
        "states",
        "MiB",
        "load ms",
        "compute ms",
        "both ms",
        "longer %",
        "target",
        "met",
    ),
    _overlap,
)
_START: Final = _TableLayout(("step", "MiB", "seconds", "s per GiB"), _start)
_CELLS: Final = _TableLayout(("direction", "length", "count", *Method, "best"), _cell)
