"""Published figures of a benchmark beside the measured ones: figures of the whole run, and hit rates by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tiercache.cli.replay.table import is_infinite
from tiercache.cli.replay.words import terminal
from tiercache.replay.results import Result
from tiercache.replay.study import WITHOUT_OFFLOAD

_RATE: Final = "token_hit_rate"
_INFINITE: Final = f"{_RATE}_infinite"
_WITHOUT: Final = f"{_RATE}_without_state_offload"


def show(found: Sequence[Result]) -> None:
    """Print the figures that were published for the source of `found`; nothing if there are none."""
    published = next((one.published for one in found if one.published), None)
    if published is None:
        return
    console = terminal()
    runs = [one for one in found if one.by_round and one.published and one.policy != "clairvoyant"]
    if runs:
        console.print()
        console.print(_by_round(runs))
    others = [f"{name.replace('_', ' ')} {value:g}" for name, value in published.items() if not (runs and name.startswith(_RATE))]
    if others:
        console.print(f"Published, on other machines: {', '.join(others)}.", style="dim")


def _by_round(runs: Sequence[Result]) -> Table:
    shown = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title="Token hit rate by round", title_style="bold", title_justify="left"
    )  # fmt: skip
    shown.add_column("round", justify="right", vertical="bottom")
    columns = _alike(runs)
    for alike in columns:
        names = "every policy" if len(alike) == sum(_is_plain(run) for run in runs) > 1 else ",\n".join(run.policy for run in alike)
        shown.add_column(names, justify="right", vertical="bottom", style="dim" if alike[0].is_bound else "")
    firsts = [alike[0] for alike in columns]
    for number in range(max(len(run.by_round) for run in firsts)):
        shown.add_row(str(number + 1), *(f"{run.by_round[number]:.4f}" if number < len(run.by_round) else "" for run in firsts))
    shown.add_section()
    shown.add_row("all", *(f"{run.token_hit_rate:.6f}" for run in firsts), style="bold")
    shown.add_row("published", *(_published(run) for run in firsts), style="cyan")
    return shown


def _alike(runs: Sequence[Result]) -> list[list[Result]]:
    """Group runs into columns: policies with equal rates in all rounds share one; a bound or a run without offload stands alone."""
    columns: list[list[Result]] = []
    for run in runs:
        same = [one for one in columns if _is_plain(run) and _is_plain(one[0]) and one[0].by_round == run.by_round]
        if same:
            same[0].append(run)
        else:
            columns.append([run])
    return columns


def _is_plain(run: Result) -> bool:
    return not run.is_bound and not run.policy.endswith(WITHOUT_OFFLOAD)


def _published(run: Result) -> str:
    """Return the published figure that corresponds to `run`; empty if there is none."""
    name = _INFINITE if is_infinite(run) else _RATE if _is_plain(run) else _WITHOUT
    return f"{run.published[name]:g}" if name in run.published else ""
