"""The report's document: one file that loads nothing, and in which only its own style sheet and script can run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files

from tiercache.replay.report.capacity import rates_by_capacity, times_by_capacity
from tiercache.replay.report.closing import every_run, making
from tiercache.replay.report.course import over_time
from tiercache.replay.report.holdings import kept, tiers
from tiercache.replay.report.markup import Html, element, join
from tiercache.replay.report.overview import contents, overview
from tiercache.replay.report.palette import markers, variables
from tiercache.replay.report.parts import unfold
from tiercache.replay.report.rounds import by_round
from tiercache.replay.report.study import Chapter, Size, Study
from tiercache.replay.report.words import count, counted

_FEW = 2
"""Largest number of sources with which all chapters are open at first."""


def document(study: Study, title: str, notes: Sequence[str]) -> str:
    """Return the whole file as text."""
    style = variables(len(study.policies), len(study.bounds)) + "\n" + _resource("report.css")
    script = _resource("report.js")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Html(style)),
    )
    main = element(
        "main", overview(study), *(_chapter(study, chapter) for chapter in study.chapters), every_run(study), making(study, notes)
    )
    body = element("body", markers(len(study.policies), len(study.bounds)), _top(study, title), main, element("script", Html(script)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _top(study: Study, title: str) -> Html:
    said = [
        counted(len(study.chapters), "source"),
        counted(len(study.policies), "policy", "policies"),
        *([counted(len(study.bounds), "bound")] if study.bounds else []),
        counted(len(study.sizes), "capacity", "capacities"),
        counted(len(study.results), "run"),
    ]
    tools = element(
        "p",
        element("button", "Open all", type="button", id="unfold", hidden=""),
        element("button", "Light or dark", type="button", id="theme", hidden=""),
        class_="tools",
    )
    return element("header", element("h1", title), element("p", " \u00b7 ".join(said), class_="note"), tools, contents(study))


def _chapter(study: Study, chapter: Chapter) -> Html:
    runs = [run for run in study.results if run.source == chapter.name]
    about = [
        f"{' or '.join(dict.fromkeys(count(run.requests) for run in runs))} requests",
        f"seed {', '.join(dict.fromkeys(str(run.seed) for run in runs))}",
        ", ".join(dict.fromkeys(run.profile for run in runs)),
    ]
    return element(
        "section",
        element("h2", chapter.name),
        element("p", " \u00b7 ".join(about), class_="note"),
        rates_by_capacity(chapter, study.measure),
        *_blocks(chapter, len(study.chapters) <= _FEW),
        id=chapter.anchor,
        class_="chapter",
    )


def _blocks(chapter: Chapter, is_open: bool) -> Iterator[Html]:
    latency = times_by_capacity(chapter)
    if latency is not None:
        yield unfold(element("h3", "Modelled time to first token"), latency, is_open=is_open, style="block")
    views: list[tuple[str, Callable[[Chapter, Size], Html | None]]] = [
        ("By round", by_round), ("Over time", over_time), ("By tier", tiers), ("What was kept", kept)
    ]  # fmt: skip
    for name, view in views:
        closest = view(chapter, chapter.chosen)
        others = [(one, found) for one in chapter.sizes if one != chapter.chosen and (found := view(chapter, one)) is not None]
        if closest is None and not others:
            continue
        more = [unfold(f"At {one}", found, is_open=closest is None, style="other") for one, found in others]
        where = join(name, element("span", f" at {chapter.chosen}", class_="note") if closest is not None else None)
        yield unfold(element("h3", where), closest, *more, is_open=is_open, style="block")


def _policy(style: str, script: str) -> str:
    return f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; form-action 'none'"


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")
