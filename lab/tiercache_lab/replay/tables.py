"""Results of a replay as tables, which the terminal and the report show alike.

The first table has one group of rows per capacity, with policies above bounds. If there are several tiers, a
table of the tiers follows, and a table of the times if requests queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tiercache_lab.replay import figures
from tiercache_lab.replay.figures import milliseconds, percent, size
from tiercache_lab.replay.queueing.run import ENGINE
from tiercache_lab.replay.results import NO_CACHE, Result, TierUse

LEVEL: Final = 0.0005
"""Difference of two saved fractions below which the two policies count as level."""
_BEST: Final = "*"


class Style(StrEnum):
    """Emphasis of a row."""

    PLAIN = "plain"
    BEST = "best"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table: its cells by the names of their columns."""

    cells: dict[str, str]
    style: Style = Style.PLAIN


@dataclass(frozen=True, slots=True)
class Grid:
    """Table whose rows stand in groups with a title each; all rows have the same columns."""

    name: str
    groups: Sequence[tuple[str, Sequence[Line]]]

    @property
    def lines(self) -> list[Line]:
        """All rows."""
        return [line for _, lines in self.groups for line in lines]


@dataclass(frozen=True, slots=True)
class Group:
    """Results of one capacity, separately for policies and bounds, in the order of the runs."""

    title: str
    policies: tuple[Result, ...]
    bounds: tuple[Result, ...]

    @property
    def runs(self) -> tuple[Result, ...]:
        """All results of the group."""
        return *self.policies, *self.bounds

    def is_best(self, result: Result) -> bool:
        """Return whether a policy is one of the best in the group.

        The best policies are those whose saved FLOPs differ from the maximum by less than LEVEL. If the worst
        policy is among them, no policy is called best. A bound is never called best.
        """
        saved = [one.flops_saved for one in self.policies]
        return not result.is_bound and max(saved) - result.flops_saved < LEVEL <= max(saved) - min(saved)


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


def grids(found: Sequence[Result]) -> list[Grid]:
    """Return the tables of the results."""
    made = groups(found)
    several = has_tiers(found)
    all_of_it = [Grid("By capacity", [(one.title, [*_lines(one, several=several)]) for one in made])]
    if several:
        all_of_it.append(
            Grid("By tier", [(one.title, [*_tier_lines(one)]) for one in made if len(one.policies)])
        )
    if found[0].serving is not None:
        all_of_it.append(Grid("In the queue", [(one.title, [*_queue_lines(one)]) for one in made]))
    return all_of_it


def has_tiers(found: Sequence[Result]) -> bool:
    """Return whether any run has several tiers."""
    return any(len(one.tiers) > 1 for one in found)


def legend(found: Sequence[Result]) -> Iterator[str]:
    """Yield sentences that explain the columns and rows of the tables."""
    made = groups(found)
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
    if working := max(one.working_bytes for one in found):
        yield f"Beside these sizes, running requests hold up to {size(working)} on the device."
    if any(one.serving for one in found):
        yield (
            "p50, p95: of the time to the first token. wait: for a place in the batch; loads; prefill: after"
            " the loads, with waits for the engine; per token: after the first; all means. served, goodput:"
            " requests per second, all of them and those in time. engine: share of the time in which it"
            " computed."
        )
    if has_tiers(found):
        yield (
            "peak: most bytes that a tier held at any time; in the first table, the sum over the tiers, which"
            " may hold copies of the same objects."
        )
    published = next((one.published for one in found if one.published), {})
    if published:
        told = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in published.items())
        yield f"Published, on other machines: {told}."


def _lines(group: Group, *, several: bool) -> Iterator[Line]:
    for one in group.runs:
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
            cells |= _transfers(next(iter(one.tiers.values()), None))
        cells["peak"] = size(one.peak_bytes) if one.tiers else ""
        yield Line(cells, Style.BOUND if one.is_bound else Style.BEST if best else Style.PLAIN)


def _tier_lines(group: Group) -> Iterator[Line]:
    for one in group.runs:
        there = [(name, use) for name, use in one.tiers.items() if use.capacity]
        for number, (name, use) in enumerate(there):
            cells = {
                "policy": "" if number else one.policy,
                "tier": name,
                "hit rate": percent(one.served_by(name)),
                **_transfers(use),
                "peak": size(use.peak),
            }
            yield Line(cells, Style.BOUND if one.is_bound else Style.PLAIN)


def _queue_lines(group: Group) -> Iterator[Line]:
    for one in group.runs:
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
            "served": figures.rate(queue.served_per_second),
        }
        if queue.objective.is_given:
            cells |= {"in time": percent(queue.within), "goodput": figures.rate(queue.goodput)}
        cells["engine"] = percent(queue.busy.get(ENGINE))
        yield Line(cells, Style.BOUND if one.is_bound else Style.PLAIN)


def _transfers(use: TierUse | None) -> dict[str, str]:
    if use is None:
        return {"read": "", "written": "", "per read": "", "evicted": ""}
    return {
        "read": size(use.read_bytes),
        "written": size(use.written_bytes),
        "per read": figures.ratio(use.written_per_read),
        "evicted": f"{use.evicted:,}",
    }
