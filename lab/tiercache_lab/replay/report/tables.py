"""Tables of the report, with all figures of the charts and with every run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiercache_lab.replay.figures import (
    DASH,
    count,
    counted,
    finite,
    milliseconds,
    percent,
    points,
    rate,
    ratio,
    seconds,
    short_percent,
    size,
)
from tiercache_lab.replay.queueing.run import ENGINE
from tiercache_lab.replay.report.charts import thinned
from tiercache_lab.replay.report.comparison import Chapter, Comparison, Measure, Size
from tiercache_lab.replay.report.verdict import LEVEL, means
from tiercache_lab.replay.results import Result

STEPS = (LEVEL, 0.01, 0.03, 0.10)
"""Limits that decide the background colour of a rate.

The limits are distances, as fractions, from the rate of the best policy in the same row. A rate closer than
STEPS[0] has the first colour, else a rate closer than STEPS[1] has the second colour, and so on.
"""
TINTS = ("level with the best", "within 1 pp", "within 3 pp", "within 10 pp", "further behind")
"""Meanings of the background colours of figures, in the order of `palette.TINTS`."""
_MARKS = 8
"""Maximum number of rows of the table that `over_requests` returns."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table."""

    shown: str
    style: str = ""
    """CSS classes."""
    hint: str = ""
    """Text of the tooltip."""
    link: str = ""
    """Id of an element in the same document."""


@dataclass(frozen=True, slots=True)
class Table:
    """Table whose first column has the names of the rows."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    texts: int = 1
    """Number of leading columns that are aligned left, because they have texts."""


def by_source(comparison: Comparison, capacity: Size, measure: Measure) -> Table:
    """Return the rates of all policies and bounds at one capacity: a row per source, and a row of means."""
    chapters = [chapter for chapter in comparison.chapters if capacity in chapter.sizes]
    rows = [_source_row(comparison, chapter, capacity, measure) for chapter in chapters]
    averages = means(chapters, comparison.policies, capacity, measure)
    limits = means(chapters, comparison.bounds, capacity, measure)
    best = max(averages.values(), default=None)
    rows.append([Cell("Mean", "mean"), *_rates(comparison, {**averages, **limits}, best, "mean ")])
    caption = f"{measure.words[0].upper()}{measure.words[1:]} at {capacity}"
    return Table(caption, ["Source", *comparison.policies, *comparison.bounds], rows)


def by_capacity(chapter: Chapter) -> Table:
    """Return rates and modelled times of one source, by policy and capacity."""
    runs = [(one, capacity, one.at(capacity)) for one in chapter.series for capacity in chapter.sizes]
    rows = [
        _cells(
            one.name, str(capacity), percent(run.flops_saved), percent(run.token_hit_rate),
            milliseconds(run.ttft_ms_mean), milliseconds(run.ttft_ms_p95), size(run.peak_bytes),
        )
        for one, capacity, run in runs
        if run is not None
    ]  # fmt: skip
    head = ["Policy", "Capacity", "Saved FLOPs", "Hit rate", "TTFT mean", "TTFT p95", "Peak"]
    return Table(f"{chapter.name}: by capacity", head, rows, texts=2)


def in_queue(chapter: Chapter) -> Table:
    """Return the times and the goodput of one source's runs with a queue, by policy and capacity."""
    rows = []
    for one in chapter.series:
        for capacity in chapter.sizes:
            run = one.at(capacity)
            if run is not None and (queue := run.serving) is not None:
                rows.append(
                    _cells(
                        one.name, str(capacity),
                        *map(milliseconds, (run.ttft_ms_p50, run.ttft_ms_p95, queue.wait_ms_mean)),
                        *map(milliseconds, (queue.load_ms_mean, queue.prefill_ms_mean, queue.tpot_ms_mean)),
                        percent(queue.within), rate(queue.goodput), percent(queue.busy.get(ENGINE)),
                    )
                )  # fmt: skip
    head = [
        "Policy", "Capacity", "TTFT p50", "TTFT p95", "Wait", "Loads", "Prefill", "Per token", "In time",
        "Goodput", "Engine busy",
    ]  # fmt: skip
    return Table(f"{chapter.name}: in the queue", head, rows, texts=2)


def over_requests(chapter: Chapter, capacity: Size) -> Table:
    """Return the saved FLOPs of a source's runs at one capacity, at each eighth of the requests."""
    runs = [
        (one.name, thinned(run.over_time, lambda sample: sample.flops_saved))
        for one, run in chapter.runs(capacity)
        if run.over_time
    ]
    last = max((samples[-1][0] for _, samples in runs if samples), default=0)
    marks = sorted({round(last * (index + 1) / _MARKS) for index in range(_MARKS)})
    rows = [_cells(count(mark), *(_at(samples, mark) for _, samples in runs)) for mark in marks if mark]
    head = ["Requests", *(name for name, _ in runs)]
    return Table(f"{chapter.name}: saved prefill FLOPs over requests", head, rows)


def by_tier(chapter: Chapter, capacity: Size) -> Table:
    """Return what each tier did, by policy: tokens served, objects evicted, bytes moved, and peak."""
    rows = [
        _cells(
            one.name, name, count(use.tokens), count(use.evicted),
            *map(size, (use.read_bytes, use.written_bytes)), ratio(use.written_per_read),
            *map(size, (use.peak, use.capacity)),
        )
        for one, run in chapter.runs(capacity)
        for name, use in run.tiers.items()
    ]  # fmt: skip
    head = ["Policy", "Tier", "Tokens", "Evicted", "Read", "Written", "Per byte read", "Peak", "Capacity"]
    return Table(f"{chapter.name}: tiers", head, rows, texts=2)


def by_kind(chapter: Chapter, capacity: Size) -> Table:
    """Return the states and pages that each policy's cache held at the end, by kind of checkpoint."""
    rows = [
        _cells(one.name, part.kind, count(part.states), size(part.state_bytes), size(part.page_bytes))
        for one, run in chapter.runs(capacity)
        for part in run.kept
    ]
    head = ["Policy", "Checkpoint", "States", "Bytes of states", "Bytes of pages"]
    return Table(f"{chapter.name}: kept at the end", head, rows, texts=2)


def every_run(comparison: Comparison) -> Table:
    """Return one row per result, also for results that no chart shows."""
    head = [
        "Source", "Policy", "Capacity", "In bytes", "Saved FLOPs", "Hit rate", "TTFT mean", "TTFT p95",
        "Cuts", "Peak", "Requests", "Seed", "Profile", "Replayed in",
    ]  # fmt: skip
    marked = "; a bound is marked with an asterisk" if comparison.bounds else ""
    rows = [_run_row(run) for run in comparison.results]
    return Table(counted(len(rows), "run") + marked, head, rows, texts=2)


def _source_row(comparison: Comparison, chapter: Chapter, capacity: Size, measure: Measure) -> list[Cell]:
    rates: dict[str, float] = {}
    for one in chapter.series:
        value = measure.of(one.at(capacity))
        if value is not None:
            rates[one.name] = value
    best = max((rates[one.name] for one in chapter.policies if one.name in rates), default=None)
    return [Cell(chapter.name, link=chapter.anchor), *_rates(comparison, rates, best, "")]


def _rates(
    comparison: Comparison, rates: Mapping[str, float], best: float | None, style: str
) -> Iterator[Cell]:
    for name in comparison.policies:
        value = rates.get(name)
        if value is None or best is None:
            yield Cell(DASH, style)
            continue
        behind = best - value
        tint = sum(behind >= step for step in STEPS)  # index into TINTS
        hint = f"{name}: {f'{points(behind)} behind the best' if tint else 'best'}"
        yield Cell(percent(value), f"{style}q{tint}{'' if tint else ' top'}", hint)
    for name in comparison.bounds:
        yield Cell(percent(rates.get(name)), f"{style}bound")


def _run_row(run: Result) -> list[Cell]:
    fraction = finite(run.capacity)
    return _cells(
        run.source, f"{run.policy}{'*' if run.is_bound else ''}",
        DASH if fraction is None else short_percent(fraction), size(run.capacity_bytes),
        percent(run.flops_saved), percent(run.token_hit_rate), milliseconds(run.ttft_ms_mean),
        milliseconds(run.ttft_ms_p95), f"{run.cuts:.2f}", size(run.peak_bytes), count(run.requests),
        str(run.seed), run.profile, seconds(run.seconds),
    )  # fmt: skip


def _cells(*shown: str) -> list[Cell]:
    return [Cell(one) for one in shown]


def _at(samples: Iterable[tuple[int, float]], mark: int) -> str:
    before = [rate for requests, rate in samples if requests <= mark]
    return percent(before[-1]) if before else DASH
