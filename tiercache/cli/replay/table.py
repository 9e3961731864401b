"""Tables of results on a terminal: a group per capacity, with policies above bounds; then the figures of each tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tiercache.cli.replay.words import milliseconds, percent, size, terminal
from tiercache.replay.report.verdict import LEVEL
from tiercache.replay.results import Result, TierUse

_BEST: Final = "*"
_GAP: Final = "  "
_LEFT: Final = ("policy", "tier")
_SPARED: Final = ("written", "p95", "evicted")
"""Columns that are left out on a narrow terminal, in this order."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table: its cells by column, and its style."""

    cells: dict[str, str]
    style: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Results of one capacity: policies in the order in which they were found, and bounds."""

    title: str
    policies: tuple[Result, ...]
    bounds: tuple[Result, ...]

    def is_best(self, result: Result) -> bool:
        """Return whether a policy is among the best of the group: none saves a fraction of FLOPs that is larger by LEVEL or more.

        False for a bound, and for every policy if the best and the worst differ by less than LEVEL.
        """
        saved = [one.flops_saved for one in self.policies]
        return not result.is_bound and max(saved) - result.flops_saved < LEVEL <= max(saved) - min(saved)


def show(found: Sequence[Result]) -> None:
    """Print all results except those by round."""
    console, made = terminal(), groups(found)
    several = any(len(one.tiers) > 1 for one in found)
    first = found[0]
    console.print(f"[bold]{first.source}[/]: {first.requests:,} requests, {first.profile}, seed {first.seed}\n")
    _print(console, [(group.title, list(_lines(group, several=several))) for group in made])
    if several:
        console.print()
        _print(console, [(group.title, list(_tier_lines(group))) for group in made if len(group.policies)])
    console.print()
    for sentence in _legend(made, several=several):
        console.print(sentence, style="dim", markup=False)


def groups(found: Sequence[Result]) -> list[Group]:
    """Return the infinite cache as a group, then one group per capacity in rising order."""
    free = [one for one in found if is_infinite(one)]
    limited = [one for one in found if not is_infinite(one)]
    made = [Group(f"without a limit, {size(one.capacity_bytes)}", (), (one,)) for one in free]
    for capacity in sorted({one.capacity for one in limited}, key=lambda one: one or 0.0):
        mine = [one for one in limited if one.capacity == capacity]
        policies, bounds = (tuple(one for one in mine if one.is_bound is bound) for bound in (False, True))
        if capacity is None:
            title = ", ".join(f"{name} {size(use.capacity)}" for name, use in mine[0].tiers.items())
        else:
            title = f"{capacity * 100:g} % of that, {size(mine[0].capacity_bytes)}"
        made.append(Group(title, policies, bounds))
    return made


def is_infinite(result: Result) -> bool:
    """Return whether this is the run without a limit, which the capacities are fractions of."""
    return result.is_bound and result.policy == "infinite"


def _lines(group: Group, *, several: bool) -> Iterator[Line]:
    for one in (*group.policies, *group.bounds):
        best = group.is_best(one)
        cells = {
            "": _BEST if best else "",
            "policy": one.policy,
            "hit rate": percent(one.token_hit_rate),
            "FLOPs": percent(one.flops_saved),
            "TTFT": milliseconds(one.ttft_ms_mean),
            "p95": milliseconds(one.ttft_ms_p95),
        }
        if not several:
            cells |= _moved(next(iter(one.tiers.values()), None))
        cells["peak"] = size(one.peak_bytes) if one.tiers else ""
        yield Line(cells, "dim" if one.is_bound else "bold green" if best else "")


def _tier_lines(group: Group) -> Iterator[Line]:
    for one in (*group.policies, *group.bounds):
        tokens = sum(use.tokens for use in one.tiers.values())
        there = [(name, use) for name, use in one.tiers.items() if use.capacity]
        for number, (name, use) in enumerate(there):
            share = one.token_hit_rate * use.tokens / tokens if tokens else 0.0
            cells = {"policy": "" if number else one.policy, "tier": name, "hit rate": percent(share)}
            yield Line(cells | _moved(use) | {"peak": size(use.peak)}, "dim" if one.is_bound else "")


def _moved(use: TierUse | None) -> dict[str, str]:
    if use is None:
        return {"read": "", "written": "", "evicted": ""}
    return {"read": size(use.read_bytes), "written": size(use.written_bytes), "evicted": f"{use.evicted:,}"}


def _print(console: Console, shown: Sequence[tuple[str, list[Line]]]) -> None:
    """Print groups under one header; each column is as wide as its widest cell in all groups."""
    lines = [line for _, group in shown for line in group]
    widths = {name: max(cell_len(text) for text in (name, *(line.cells[name] for line in lines))) for name in lines[0].cells}
    for spared in _SPARED:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= console.width:
            break
        widths.pop(spared, None)
    console.print(_aligned({name: name for name in widths}, widths), style="bold", soft_wrap=True)
    for title, group in shown:
        console.print(Text(title, style="cyan"), soft_wrap=True)
        for line in group:
            console.print(_aligned(line.cells, widths), style=line.style, soft_wrap=True)


def _aligned(cells: dict[str, str], widths: dict[str, int]) -> Text:
    texts = []
    for name, width in widths.items():
        blank = " " * (width - cell_len(cells[name]))
        texts.append(cells[name] + blank if name in _LEFT else blank + cells[name])
    return Text(_GAP.join(texts).rstrip())


def _legend(made: Sequence[Group], *, several: bool) -> Iterator[str]:
    if any(group.is_best(one) for group in made for one in group.policies):
        yield f"{_BEST} saves most at its capacity."
    yield f"Dim rows are bounds, which are no policies: {', '.join(dict.fromkeys(one.policy for group in made for one in group.bounds))}."
    yield (
        "hit rate: of prompt tokens. FLOPs: of prefill, saved. TTFT: mean time to the first token, modelled; p95: its 95th percentile."
        " read and written: bytes that a tier gave and took. evicted: objects."
    )
    if several:
        yield "Tiers below each other hold copies: a peak is that of each tier at its own time, and above it their sum."
