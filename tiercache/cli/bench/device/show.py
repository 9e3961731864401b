"""The rows as tables: one for the copies of each model, and one for each other kind of row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiercache.cli.bench.device.copying import TRANSFERS
from tiercache.cli.bench.device.plan import Plan
from tiercache.cli.bench.device.rows import CellRow, CopyRow, DeviceRow, MatmulRow, OverlapRow, SkippedRow, StartRow
from tiercache.cli.bench.rows import MIB, Note, Target, size_text
from tiercache.cli.output import safe
from tiercache.transfer.cuda import CudaDevice, Direction, Method

_WIDTH: Final = 120
"""Columns of text where stdout is no terminal."""
_WAYS: Final = {Direction.TO_HOST: "to host", Direction.TO_DEVICE: "to device"}
_LEFT: Final = ("kind", "direction", "method", "model", "waits", "step", "best")
R = TypeVar("R", bound=DeviceRow)


@dataclass(frozen=True, slots=True)
class _Look:
    columns: tuple[str, ...]
    cells: Callable[[Any], Sequence[str]]


def tables(rows: Sequence[DeviceRow], said: Sequence[str]) -> None:
    """Print all rows, and below them the reasons of skipped cases and the sentences `said`."""
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(width=_WIDTH, highlight=False, emoji=False)
    _print(console, "start", _START, _of(StartRow, rows))
    _print(console, "calibration, GB/s", _CELLS, _of(CellRow, rows))
    for model, of_model in groupby(_of(CopyRow, rows), key=lambda row: row.model):
        _print(console, f"copies, {model}", _COPIES, list(of_model), section=lambda row: (row.kind, row.objects, row.direction))
    _print(console, "a load beneath compute", _OVERLAP, _of(OverlapRow, rows))
    _print(console, "matrix products beside copies", _MATMUL, _of(MatmulRow, rows))
    skipped = [f"{row.case} was not measured: {row.reason}" for row in _of(SkippedRow, rows)]
    for sentence in (*skipped, *said):
        console.print(sentence, style="dim", markup=False)


def footer(plan: Plan, device: CudaDevice, notes: Iterable[Note]) -> list[str]:
    """Return the sentences that explain the figures."""
    return [
        f"{device.card}. Medians of at least {plan.repeats} interleaved runs; objects in slots and blocks in no order.",
        "GB/s: queued in one stream, a load layer by layer, until the stream is through. limit: one contiguous copy of as many bytes,"
        f" page-locked by the driver. engine: {TRANSFERS} transfers in flight, of as many objects each where they fit.",
        *(f"{note.text[0].upper()}{note.text[1:]}." for note in notes),
    ]


def _print(console: Console, title: str, look: _Look, rows: Sequence[DeviceRow], section: Callable[[Any], object] = lambda _: None) -> None:
    if not rows:
        return
    shown = Table(title=title, title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in look.columns:
        shown.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for row, before in zip(rows, [rows[0], *rows], strict=False):
        if section(row) != section(before):
            shown.add_section()
        shown.add_row(*look.cells(row))
    console.print(shown)


def _of(kind: type[R], rows: Iterable[DeviceRow]) -> list[R]:
    return [row for row in rows if isinstance(row, kind)]


def _copy(row: CopyRow) -> list[str]:
    chosen = f": {' + '.join(row.chosen)}" if row.chosen else ""
    engine = f"{row.engine_gb_s:.2f}" if row.engine_gb_s is not None else ""
    return [
        row.kind, _WAYS[row.direction], f"{row.objects:,}", f"{row.nbytes / MIB:,.1f}", f"{row.copies:,}", f"{row.method}{chosen}",
        f"{row.gb_s:.2f}", f"{row.contiguous_gb_s:.2f}", f"{row.ratio:.2f}", engine, *_wanted(row.target, row.met),
    ]  # fmt: skip


def _matmul(row: MatmulRow) -> list[str]:
    return [row.method, _WAYS[row.direction], _ms(row.alone), _ms(row.beside), f"{row.slower:+.1f}", f"{row.gb_s:.2f}"]


def _overlap(row: OverlapRow) -> list[str]:
    times = [_ms(row.load), _ms(row.alone), _ms(row.both), f"{row.longer:+.1f}"]
    return [row.model, row.waiting, f"{row.pages}", f"{row.states}", f"{row.nbytes / MIB:,.1f}", *times, *_wanted(row.target, row.met)]


def _start(row: StartRow) -> list[str]:
    per_gib = f"{row.seconds_per_gib:.3f}" if row.seconds_per_gib is not None else ""
    return [row.what, f"{row.nbytes / MIB:,.0f}" if row.nbytes else "", f"{row.seconds:.3f}", per_gib]


def _cell(row: CellRow) -> list[str]:
    cell = row.cell
    speeds = [f"{cell.speeds[method]:.2f}" if method in cell.speeds else "" for method in Method]
    return [_WAYS[cell.direction], size_text(cell.length), f"{cell.count:,}", *speeds, cell.best]


def _wanted(target: Target | None, met: bool | None) -> list[str]:
    return [safe(str(target or "")), {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[met]]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


_COPIES: Final = _Look(
    ("kind", "direction", "objects", "MiB", "copies", "method", "GB/s", "limit", "ratio", "engine", "target", "met"), _copy
)
_MATMUL: Final = _Look(("method", "direction", "alone ms", "beside ms", "slower %", "copies GB/s"), _matmul)
_OVERLAP: Final = _Look(
    ("model", "waits", "pages", "states", "MiB", "load ms", "compute ms", "both ms", "longer %", "target", "met"), _overlap
)
_START: Final = _Look(("step", "MiB", "seconds", "s per GiB"), _start)
_CELLS: Final = _Look(("direction", "length", "count", *Method, "best"), _cell)
