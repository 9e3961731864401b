"""The page of `--report`: verdicts, charts and tables in one HTML file, which loads no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tiercache.cli.terminal import clean
from tiercache.errors import InputError
from tiercache_lab.replay.charts import PERCENT, Chart, Point, by_capacity
from tiercache_lab.replay.figures import counted, finite, percent, size
from tiercache_lab.replay.results import Result
from tiercache_lab.replay.tables import LEVEL, Grid, Group, grids, groups, legend

_TITLE: Final = "Replay: policies and capacities"


def render(found: Sequence[Result], *, title: str = _TITLE, notes: Sequence[str] = ()) -> str:
    """Return the report as HTML; the same results give the same text.

    `notes` are sentences on how the results were made. Raises InputError if there are no results.
    """
    if not found:
        raise InputError("a report needs at least one result, and there is none; replay something first")
    made = groups(found)
    flat = [run for group in made if not group.policies for run in group.bounds]
    return page(
        title,
        about=facts(found[0]),
        sentences=[verdict(group, flat) for group in made if group.policies],
        drawings=_charts(found, made, flat),
        tables=grids(found),
        notes=[*notes, "An asterisk in a chart marks a bound.", *legend(found)],
    )


def page(
    title: str,
    *,
    about: Sequence[str],
    sentences: Sequence[str],
    drawings: Sequence[Chart],
    tables: Sequence[Grid],
    notes: Sequence[str],
) -> str:
    """Return a page of sentences, charts and tables. The template engine escapes all names in it."""
    style = stylesheet() + _resource("report.css")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_readable, trim_blocks=True, lstrip_blocks=True
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.from_string(_resource("report.html.jinja")).render(
        # The policy allows the page's own style sheet. It forbids scripts and the loading of other files.
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none';"
        " form-action 'none'",
        style=Markup(style),  # noqa: S704 - our own resource
        title=title, about=about, sentences=sentences, drawings=drawings, tables=tables, notes=notes,
    )  # fmt: skip


def facts(run: Result) -> list[str]:
    """Return what is replayed, for the head of a page."""
    return [run.source, counted(run.requests, "request"), f"seed {run.seed}", run.profile]


def stylesheet() -> str:
    """Return the colours that all drawings use, light and dark."""
    return _resource("colours.css")


def verdict(group: Group, flat: Sequence[Result]) -> str:
    """Say in a sentence which policies of a group save most, and how far the others and the bounds are.

    `flat` are bounds that hold at every capacity.
    """
    saved = {one.policy: value for one in group.policies if (value := finite(one.flops_saved)) is not None}
    where = f"At {_capacity(group.policies[0])} ({size(group.policies[0].capacity_bytes)})"
    if not saved:
        return f"{where}, no policy has a figure."
    top = max(saved.values())
    best = [name for name, value in saved.items() if top - value < LEVEL]
    rest = sorted((one for one in saved if one not in best), key=lambda one: -saved[one])
    parts = [f"{_points(top - saved[name])} over {name}" for name in dict.fromkeys([*rest[:1], *rest[-1:]])]
    for one in (*group.bounds, *flat):
        if (bound := finite(one.flops_saved)) is not None:
            gap = top - bound
            near = "level with" if abs(gap) < LEVEL else f"{_points(gap)} {'below' if gap < 0 else 'above'}"
            parts.append(f"{near} {one.policy}")
    verb = "saves" if len(best) == 1 else "save"
    return f"{where}, {' and '.join(best)} {verb} {percent(top)} of the prefill: {', '.join(parts)}."


def _points(gap: float) -> str:
    return f"{abs(gap) * 100:.1f} points"


def _capacity(run: Result) -> str:
    """Return the capacity in the words of an axis."""
    fraction = finite(run.capacity)
    return f"{fraction * 100:.3g} %" if fraction is not None else size(run.capacity_bytes)


def _charts(found: Sequence[Result], made: Sequence[Group], flat: Sequence[Result]) -> list[Chart]:
    many = [group for group in made if group.policies]
    if len(many) < 2:
        return []  # the table of one capacity says as much
    saved = "Share of the FLOPs that computing all prompts would take."
    milliseconds = {"title": "ms", "tickCount": 5}
    per_second = {"title": "requests per second", "tickCount": 5}
    asked: list[tuple[str, str, Mapping[str, Any], Callable[[Result], float | None]]] = [
        ("Saved prefill FLOPs", saved, PERCENT, lambda run: run.flops_saved),
        ("Hit rate", "Share of all prompt tokens restored.", PERCENT, lambda run: run.token_hit_rate),
        (
            "Time to first token", "Mean, modelled; less is better.", milliseconds,
            lambda run: run.ttft_ms_mean,
        ),
    ]  # fmt: skip
    if found[0].serving is not None:
        late = "95th percentile, with the wait for a place; less is better."
        good = "Requests per second within the objective; more is better."
        asked += [
            ("Time to first token, p95", late, milliseconds, lambda run: run.ttft_ms_p95),
            ("Goodput", good, per_second, lambda run: run.serving.goodput if run.serving else None),
        ]
    return [
        by_capacity(title, note, points, axis)
        for title, note, axis, value in asked
        if (points := list(_points_of(many, flat, value)))
    ]


def _points_of(
    many: Sequence[Group], flat: Sequence[Result], value: Callable[[Result], float | None]
) -> Iterator[Point]:
    for group in many:
        for run in (*group.runs, *flat):
            if (known := finite(value(run))) is not None:
                yield Point(run.policy, run.is_bound, _capacity(group.policies[0]), known)


def _readable(value: object) -> object:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
