"""Results of a replay on a terminal and as JSON.

The first table has one group of rows per capacity, with policies above bounds. If there are several tiers, a
table of the tiers follows, and a table of the times if requests queue. The last table has the figures that
were published for the same traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiercache.cli.terminal import console
from tiercache_lab.replay import figures
from tiercache_lab.replay.queueing.run import ENGINE
from tiercache_lab.replay.report.verdict import LEVEL
from tiercache_lab.replay.results import NO_CACHE, WITHOUT_OFFLOAD, Result, TierUse

_BEST: Final = "*"
"""Mark of the best policies."""
_GAP: Final = "  "
"""Space between two columns."""
_LEFT: Final = ("policy", "tier")
"""Columns that are aligned left."""
_OPTIONAL_COLUMNS: Final = ("written", "p95", "evicted", "per read")
"""Columns that are left out one after the other, in this order, until the table fits the terminal."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table: its cells by the names of their columns, and its style."""

    cells: dict[str, str]
    style: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Results of one capacity, separately for policies and bounds, in the order of the runs."""

    title: str
    policies: tuple[Result, ...]
    bounds: tuple[Result, ...]

    def is_best(self, result: Result) -> bool:
        """Return whether a policy is one of the best in the group.

        The best policies are those whose saved FLOPs differ from the maximum by less than LEVEL. If the worst
        policy is among them, no policy is called best. A bound is never called best.
        """
        saved = [one.flops_saved for one in self.policies]
        return not result.is_bound and max(saved) - result.flops_saved < LEVEL <= max(saved) - min(saved)


def show_results(found: Sequence[Result], about: str = "") -> None:
    """Print the results, except the hit rates by round, which `show_published` prints.

    `about` is a sentence on how the source was replayed, which may be empty.
    """
    to, made = console(), groups(found)
    several = any(len(one.tiers) > 1 for one in found)
    first = found[0]
    to.print(f"[bold]{first.source}[/]: {first.requests:,} requests, {first.profile}, seed {first.seed}\n")
    _print(to, [(group.title, list(_lines(group, several=several))) for group in made])
    if several:
        to.print()
        _print(to, [(group.title, list(_tier_lines(group))) for group in made if len(group.policies)])
    if first.serving is not None:
        to.print()
        _print(to, [(group.title, list(_queue_lines(group))) for group in made])
    to.print()
    for sentence in ([about] if about else []) + [*_legend(made, several=several)]:
        to.print(sentence, style="dim", markup=False)


def groups(found: Sequence[Result]) -> list[Group]:
    """Return a group for the infinite cache, followed by one group per capacity, ascending."""
    free = [one for one in found if is_infinite(one)]
    without = [one for one in found if one.policy == NO_CACHE]
    limited = [one for one in found if not is_infinite(one) and one not in without]
    made = [Group(f"without a limit, {size(one.capacity_bytes)}", (), (one,)) for one in free]
    for capacity in sorted({one.capacity for one in limited}, key=lambda one: one or 0.0):
        mine = [one for one in limited if one.capacity == capacity]
        policies, bounds = (tuple(one for one in mine if one.is_bound is bound) for bound in (False, True))
        if capacity is None:
            title = ", ".join(f"{name} {size(use.capacity)}" for name, use in mine[0].tiers.items())
        else:
            title = f"{capacity * 100:g} % of that, {size(mine[0].capacity_bytes)}"
        made.append(Group(title, policies, bounds))
    return made + [Group("without a cache", (), (one,)) for one in without]


def is_infinite(result: Result) -> bool:
    """Return whether this is the run of the infinite cache."""
    return result.is_bound and result.policy == "infinite"


def _lines(group: Group, *, several: bool) -> Iterator[Line]:
    for one in (*group.policies, *group.bounds):
        best = group.is_best(one)
        cells = {
            "": _BEST if best else "",
            "policy": one.policy if one.alpha is None else f"{one.policy} ({one.alpha:g})",
            "hit rate": percent(one.token_hit_rate),
            "FLOPs": percent(one.flops_saved),
            "TTFT": milliseconds(one.ttft_ms_mean),
            "p95": milliseconds(one.ttft_ms_p95),
        }
        if not several:
            cells |= _transfers(next(iter(one.tiers.values()), None))
        cells["peak"] = size(one.peak_bytes) if one.tiers else ""
        yield Line(cells, "dim" if one.is_bound else "bold green" if best else "")


def _tier_lines(group: Group) -> Iterator[Line]:
    for one in (*group.policies, *group.bounds):
        tokens = sum(use.tokens for use in one.tiers.values())
        there = [(name, use) for name, use in one.tiers.items() if use.capacity]
        for number, (name, use) in enumerate(there):
            share = one.token_hit_rate * use.tokens / tokens if tokens else 0.0
            cells = {"policy": "" if number else one.policy, "tier": name, "hit rate": percent(share)}
            yield Line(cells | _transfers(use) | {"peak": size(use.peak)}, "dim" if one.is_bound else "")


def _queue_lines(group: Group) -> Iterator[Line]:
    for one in (*group.policies, *group.bounds):
        if (queue := one.serving) is None:
            continue
        cells = {
            "policy": one.policy,
            "p50": milliseconds(one.ttft_ms_p50),
            "p95": milliseconds(one.ttft_ms_p95),
            "wait": milliseconds(queue.wait_ms_mean),
            "loads": milliseconds(queue.load_ms_mean),
            "prefill": milliseconds(queue.prefill_ms_mean),
            "per token": milliseconds(queue.tpot_ms_mean),
            "served": per_second(queue.served_per_second),
        }
        if queue.objective.is_given:
            cells |= {"in time": percent(queue.within), "goodput": per_second(queue.goodput)}
        cells["engine"] = percent(queue.busy.get(ENGINE))
        yield Line(cells, "dim" if one.is_bound else "")


def _transfers(use: TierUse | None) -> dict[str, str]:
    if use is None:
        return {"read": "", "written": "", "per read": "", "evicted": ""}
    return {
        "read": size(use.read_bytes),
        "written": size(use.written_bytes),
        "per read": figures.ratio(use.written_per_read),
        "evicted": f"{use.evicted:,}",
    }


def _print(to: Console, shown: Sequence[tuple[str, list[Line]]]) -> None:
    """Print groups under one header. Each column is as wide as the column's widest cell in all groups."""
    lines = [line for _, group in shown for line in group]
    widths = {
        name: max(cell_len(text) for text in (name, *(line.cells[name] for line in lines)))
        for name in lines[0].cells
    }
    for spared in _OPTIONAL_COLUMNS:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= to.width:
            break
        widths.pop(spared, None)
    to.print(_aligned({name: name for name in widths}, widths), style="bold", soft_wrap=True)
    for title, group in shown:
        to.print(Text(title, style="cyan"), soft_wrap=True)
        for line in group:
            to.print(_aligned(line.cells, widths), style=line.style, soft_wrap=True)


def _aligned(cells: dict[str, str], widths: dict[str, int]) -> Text:
    texts = []
    for name, width in widths.items():
        blank = " " * (width - cell_len(cells[name]))
        texts.append(cells[name] + blank if name in _LEFT else blank + cells[name])
    return Text(_GAP.join(texts).rstrip())


def _legend(made: Sequence[Group], *, several: bool) -> Iterator[str]:
    if any(group.is_best(one) for group in made for one in group.policies):
        yield f"{_BEST} saves the most FLOPs at its capacity."
    yield (
        "Dim rows are bounds, not policies:"
        f" {', '.join(dict.fromkeys(one.policy for group in made for one in group.bounds))}."
    )
    yield (
        "hit rate: restored share of the prompt tokens. FLOPs: saved share of the prefill. TTFT: calculated"
        " time to the first token, mean; p95: its 95th percentile. read, written: bytes read from a tier and"
        " written to it; per read: bytes written for each byte read. evicted: number of objects."
    )
    working = max(one.working_bytes for group in made for one in (*group.policies, *group.bounds))
    if working:
        yield f"Beside these sizes, running requests hold up to {size(working)} on the device."
    if any(one.serving for group in made for one in (*group.policies, *group.bounds)):
        yield (
            "p50, p95: of the time to the first token. wait: for a place in the batch; loads; prefill: after"
            " the loads, with waits for the engine; per token: after the first; all means. served, goodput:"
            " requests per second, all of them and those in time. engine: share of the time in which it"
            " computed."
        )
    if several:
        yield (
            "peak: most bytes that a tier held at any time; in the first table, the sum over the tiers, which"
            " may hold copies of the same objects."
        )


_RATE: Final = "token_hit_rate"
_INFINITE: Final = f"{_RATE}_infinite"
_WITHOUT: Final = f"{_RATE}_without_state_offload"


def show_published(found: Sequence[Result]) -> None:
    """Print the figures that were published for the source of `found`, beside the hit rates by round.

    Print nothing if no figures were published.
    """
    published = next((one.published for one in found if one.published), None)
    if published is None:
        return
    to = console()
    runs = [one for one in found if one.by_round and one.published and one.policy != "clairvoyant"]
    if runs:
        to.print()
        to.print(_by_round(runs))
    others = [
        f"{name.replace('_', ' ')} {value:g}"
        for name, value in published.items()
        if not (runs and name.startswith(_RATE))
    ]
    if others:
        to.print(f"Published, on other machines: {', '.join(others)}.", style="dim")


def _by_round(runs: Sequence[Result]) -> Table:
    shown = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title="Hit rate by round",
        title_style="bold", title_justify="left"
    )  # fmt: skip
    shown.add_column("round", justify="right", vertical="bottom")
    columns = _columns(runs)
    for alike in columns:
        names = (
            "every policy"
            if len(alike) == sum(_is_plain(run) for run in runs) > 1
            else ",\n".join(run.policy for run in alike)
        )
        shown.add_column(names, justify="right", vertical="bottom", style="dim" if alike[0].is_bound else "")
    firsts = [alike[0] for alike in columns]
    for number in range(max(len(run.by_round) for run in firsts)):
        shown.add_row(
            str(number + 1),
            *(f"{run.by_round[number]:.4f}" if number < len(run.by_round) else "" for run in firsts),
        )
    shown.add_section()
    shown.add_row("all", *(f"{run.token_hit_rate:.6f}" for run in firsts), style="bold")
    shown.add_row("published", *(_published(run) for run in firsts), style="cyan")
    return shown


def _columns(runs: Sequence[Result]) -> list[list[Result]]:
    """Group runs into columns.

    Policies with equal rates in all rounds share a column. A bound has a column of its own, and so has a run
    without offload.
    """
    columns: list[list[Result]] = []
    for run in runs:
        same = [
            one for one in columns if _is_plain(run) and _is_plain(one[0]) and one[0].by_round == run.by_round
        ]
        if same:
            same[0].append(run)
        else:
            columns.append([run])
    return columns


def _is_plain(run: Result) -> bool:
    return not run.is_bound and not run.policy.endswith(WITHOUT_OFFLOAD)


def _published(run: Result) -> str:
    """Return the published figure that corresponds to `run`, or an empty text if there is none."""
    name = _INFINITE if is_infinite(run) else _RATE if _is_plain(run) else _WITHOUT
    return f"{run.published[name]:g}" if name in run.published else ""


def percent(value: float | None) -> str:
    """Format a fraction as a percentage, such as "78.1 %"."""
    return _plain(figures.percent(value))


def size(value: float | None) -> str:
    """Format a number of bytes, such as "12.3 GiB"."""
    return _plain(figures.size(value))


def milliseconds(value: float | None) -> str:
    """Format a time in milliseconds, such as "1,420 ms"."""
    return _plain(figures.milliseconds(value))


def per_second(value: float | None) -> str:
    """Format a rate, such as "2.35/s"."""
    return _plain(figures.rate(value))


def _plain(text: str) -> str:
    # Many terminal fonts lack the narrow no-break space of the HTML report.
    return text.replace("\u202f", " ")


def record(result: Result, *, samples: bool = False) -> dict[str, Any]:
    """Return a result as a dictionary for JSON, with `over_time` only if `samples`.

    Numbers that are not finite become None.
    """
    row = result.row()
    if not samples:
        del row["over_time"]
    return {name: _finite(value) for name, value in row.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
