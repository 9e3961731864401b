"""The report's page: texts, charts and tables of all sections, filled into the template."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tiercache_lab.replay.figures import count, counted, finite, number, percent, readable
from tiercache_lab.replay.report import charts, tables
from tiercache_lab.replay.report.charts import Chart
from tiercache_lab.replay.report.comparison import Chapter, Comparison, Measure, Series
from tiercache_lab.replay.report.palette import style_rules
from tiercache_lab.replay.report.tables import Table
from tiercache_lab.replay.report.verdict import Statement, overall, statements
from tiercache_lab.replay.results import Kept, Result

_SAVED: Final = "Saved prefill FLOPs"
_HITS: Final = "Hit rate"


@dataclass(frozen=True, slots=True)
class _Figures:
    """Charts that belong together, and the tables of their figures."""

    name: str
    charts: Sequence[Chart]
    tables: Sequence[Table]


@dataclass(frozen=True, slots=True)
class _Section:
    """Part of the page about one source."""

    name: str
    anchor: str
    about: str
    verdicts: Sequence[Statement]
    published: str
    figures: Sequence[_Figures]


def document(comparison: Comparison, title: str, notes: Sequence[str]) -> str:
    """Return the whole page as text."""
    return filled(
        "report.html.jinja",
        title=title,
        about=_about(comparison),
        overview=_overview(comparison),
        tints=tables.TINTS,
        measure=comparison.measure.words,
        sections=[_section(chapter, comparison.measure) for chapter in comparison.chapters],
        runs=tables.every_run(comparison),
        notes=[*notes, *_replaced(comparison)],
    )


def filled(template: str, **fields: Any) -> str:
    """Return a page made from one of our templates, with the report's style and security policy.

    The template engine escapes all names in the page.
    """
    style = f"{style_rules()}\n{_resource('report.css')}"
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_readable, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_resource(template)).render(
        style=Markup(style),  # noqa: S704 - our own resource
        policy=_policy(style),
        **fields,
    )


def _about(comparison: Comparison) -> list[str]:
    return [
        counted(len(comparison.chapters), "source"),
        counted(len(comparison.policies), "policy", "policies"),
        *([counted(len(comparison.bounds), "bound")] if comparison.bounds else []),
        counted(len(comparison.sizes), "capacity", "capacities"),
        counted(len(comparison.results), "run"),
    ]


def _overview(comparison: Comparison) -> Mapping[str, Any] | None:
    """Return the verdicts and tables over all sources.

    Return None if no two sources have a capacity in common, or if there are no policies.
    """
    chapters, policies = comparison.chapters, comparison.policies
    shared = [one for one in comparison.sizes if sum(one in chapter.sizes for chapter in chapters) > 1]
    if not shared or not policies:
        return None
    found = [overall(comparison, one) for one in reversed(shared)]
    verdicts = [one for one in found if one is not None]
    made = [tables.by_source(comparison, one, comparison.measure) for one in shared]
    other = Measure.TOKENS if comparison.measure is Measure.FLOPS else None
    more = [tables.by_source(comparison, one, other) for one in shared] if other else []
    return {"verdicts": verdicts, "tables": made, "more": more}


def _section(chapter: Chapter, measure: Measure) -> _Section:
    runs = [run for one in chapter.series for run in _runs(one)]
    about = [
        f"{_distinct(count(run.requests) for run in runs)} requests",
        f"seed {_distinct(str(run.seed) for run in runs)}",
        _distinct(run.profile for run in runs),
    ]
    published = dict.fromkeys((name, value) for run in runs for name, value in run.published.items())
    return _Section(
        chapter.name,
        chapter.anchor,
        " \u00b7 ".join(about),
        statements(chapter, measure),
        ", ".join(f"{name} {_published(value)}" for name, value in published),
        list(_figures(chapter)),
    )


def _figures(chapter: Chapter) -> Iterator[_Figures]:
    at, footprint = chapter.chosen, " Capacity: a share of the infinite cache's footprint."
    extent = footprint if chapter.sizes[0].relative else " Capacity: bytes of all tiers."
    limits = " An asterisk marks a bound." if chapter.bounds else ""
    # If there is only one run, its verdict already has all figures, and charts would add nothing.
    if len(chapter.series) > 1 or len(chapter.sizes) > 1:
        saved = f"Share of the FLOPs that computing all prompts would take.{extent}{limits}"
        hits = "Share of all prompt tokens that were restored."
        times = "Mean, modelled; less is better."
        drawn = [
            charts.rate_by_capacity(chapter, _SAVED, saved, lambda run: run.flops_saved),
            charts.rate_by_capacity(chapter, _HITS, hits, lambda run: run.token_hit_rate),
            charts.time_by_capacity(chapter, "Time to first token", times, lambda run: run.ttft_ms_mean),
        ]
        yield from _shown("By capacity", drawn, [tables.by_capacity(chapter)])
        yield from _shown("In the queue", _queue(chapter), [tables.in_queue(chapter)])
    detail = [_course(chapter), _tiers(chapter), *_kinds(chapter)]
    made = [tables.over_requests(chapter, at), tables.by_tier(chapter, at), tables.by_kind(chapter, at)]
    yield from _shown(f"In detail at {at}", detail, [table for table in made if table.rows])


def _shown(name: str, drawn: Sequence[Chart | None], made: Sequence[Table]) -> Iterator[_Figures]:
    found = [one for one in drawn if one is not None]
    if found:
        yield _Figures(name, found, made)


def _queue(chapter: Chapter) -> list[Chart | None]:
    """Draw goodput and times of runs with a queue; nothing for other runs."""
    if not any(run.serving for one in chapter.series for run in _runs(one)):
        return []
    good = "Requests per second within the objective; more is better."
    late = "95th percentile, with the wait for a place; less is better."
    return [
        charts.throughput_by_capacity(
            chapter, "Goodput", good, lambda run: run.serving.goodput if run.serving else None
        ),
        charts.time_by_capacity(
            chapter, "Time to first token, p95", late, lambda run: run.ttft_ms_p95 if run.serving else None
        ),
    ]


def _course(chapter: Chapter) -> Chart | None:
    note = "Share within each window of requests."
    title = f"{_SAVED} over requests"
    return charts.rate_over_requests(chapter, chapter.chosen, title, note, lambda sample: sample.flops_saved)


def _tiers(chapter: Chapter) -> Chart | None:
    served = [(one, _served(run)) for one, run in chapter.runs(chapter.chosen)]
    note = (
        "Share of all prompt tokens that were restored. All restored tokens of a request count for the"
        " slowest tier from which the request read. The other tokens are computed."
    )
    return charts.stacked(
        "Tokens served by tier", note, "t", [(one, found) for one, found in served if found]
    )


def _kinds(chapter: Chapter) -> list[Chart | None]:
    fields: list[tuple[str, Callable[[Kept], int]]] = [
        ("Bytes of states kept", lambda part: part.state_bytes),
        ("Bytes of KV pages kept", lambda part: part.page_bytes),
    ]
    note = "At the end, by kind of checkpoint."
    return [charts.stacked(title, note, "k", _kept(chapter, field), in_bytes=True) for title, field in fields]


def _served(run: Result) -> dict[str, float]:
    tokens, rate = sum(use.tokens for use in run.tiers.values()), finite(run.token_hit_rate)
    if not tokens or rate is None:
        return {}
    return {name: rate * use.tokens / tokens for name, use in run.tiers.items()}


def _kept(chapter: Chapter, field: Callable[[Kept], int]) -> list[tuple[Series, dict[str, float]]]:
    found: list[tuple[Series, dict[str, float]]] = []
    for one, run in chapter.runs(chapter.chosen):
        values: dict[str, float] = {}
        for part in run.kept:
            values[part.kind] = values.get(part.kind, 0) + field(part)
        if values:
            found.append((one, values))
    return found


def _runs(one: Series) -> list[Result]:
    return [*one.runs.values(), *([one.flat] if one.flat is not None else [])]


def _distinct(values: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _published(value: float) -> str:
    # Figures outside [0, 1] are not rates, but for example times.
    known = finite(value)
    return percent(value) if known is not None and 0 <= known <= 1 else number(value)


def _replaced(comparison: Comparison) -> list[str]:
    if not comparison.replaced:
        return []
    return [
        f"{counted(comparison.replaced, 'result')} had the same source, policy and capacity as a later"
        " result; charts show only the later result, and the table of all runs shows every result."
    ]


def _readable(value: object) -> object:
    return readable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _policy(style: str) -> str:
    """Return the page's content security policy.

    The policy allows the page's own style sheet. It forbids scripts and the loading of other files.
    """
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
