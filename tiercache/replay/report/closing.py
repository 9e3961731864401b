"""End of a report: the table of every run, how the results were made, and what the terms mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tiercache.replay.report.markup import Html, element
from tiercache.replay.report.parts import Cell, paragraphs, table
from tiercache.replay.report.study import Study
from tiercache.replay.report.words import DASH, count, counted, finite, milliseconds, percent, seconds, short_percent, size
from tiercache.replay.results import Result

_HEAD: Final = (
    "Source", "Policy", "Capacity", "In bytes", "Saved FLOPs", "Hit rate", "TTFT mean", "TTFT p95", "Peak", "Of capacity", "Requests",
    "Seed", "Profile", "Replayed in",
)  # fmt: skip
_WORDS: Final = (
    ("Saved prefill FLOPs", "Floating-point operations of prefill that the cache made unnecessary, as a share of those without any cache."),
    ("Token hit rate", "Prompt tokens whose prefill was not computed, as a share of all prompt tokens."),
    ("TTFT", "Time to first token, modelled from the model's profile; nothing was run on a device."),
    ("Capacity", "Where it is a percentage: of the bytes that an infinite cache would hold in the end."),
    ("Bound", "No policy but a limit, drawn dashed: what a cache without end, or one that knows the future, would reach."),
    ("pp", "Percentage points: the difference of two shares."),
)


def every_run(study: Study) -> Html:
    """Return the section with the table of all runs."""
    caption = counted(len(study.results), "run") + ("; a bound is marked with an asterisk" if study.bounds else "")
    return element(
        "section",
        element("h2", "All runs"),
        table(
            caption,
            _HEAD,
            map(_row, study.results),
            texts=2,
            style="sortable",
        ),
        id="runs",
    )


def making(study: Study, notes: Sequence[str]) -> Html:
    """Return the section with seeds, profiles and requests by source, the given notes, and the explanation of terms."""
    said = list(notes)
    if study.replaced:
        said.append(
            f"{counted(study.replaced, 'result')} had the source, policy and capacity of a later one; plots show the later one, the table"
            " of all runs shows all."
        )
    rows = [_made(chapter.name, [run for run in study.results if run.source == chapter.name]) for chapter in study.chapters]
    return element(
        "section",
        element("h2", "How it was made"),
        table("By source", ("Source", "Requests", "Runs", "Seed", "Profile", "Replayed in"), rows, texts=1),
        paragraphs(said),
        element("h2", "How to read it"),
        element("dl", *(part for word, meaning in _WORDS for part in (element("dt", word), element("dd", meaning)))),
        id="making",
    )


def _row(run: Result) -> list[str | Cell]:
    fraction, held, room = finite(run.capacity), finite(run.peak_bytes), finite(run.capacity_bytes)
    share = held / room if held is not None and room else None
    return [
        run.source,
        Cell(run.policy + ("*" if run.is_bound else ""), style="bound" if run.is_bound else None),
        Cell(DASH if fraction is None else short_percent(fraction), fraction),
        Cell(size(room), room),
        Cell(percent(run.flops_saved), run.flops_saved),
        Cell(percent(run.token_hit_rate), run.token_hit_rate),
        Cell(milliseconds(run.ttft_ms_mean), run.ttft_ms_mean),
        Cell(milliseconds(run.ttft_ms_p95), run.ttft_ms_p95),
        Cell(size(held), held),
        Cell(percent(share), share),
        Cell(count(run.requests), run.requests),
        Cell(str(run.seed), run.seed),
        run.profile,
        Cell(seconds(run.seconds), run.seconds),
    ]


def _made(name: str, runs: Sequence[Result]) -> list[str | Cell]:
    def distinct(values: Sequence[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    spent = sum(value for run in runs if (value := finite(run.seconds)) is not None)
    return [
        name,
        distinct([count(run.requests) for run in runs]),
        Cell(count(len(runs)), len(runs)),
        distinct([str(run.seed) for run in runs]),
        distinct([run.profile for run in runs]),
        Cell(seconds(spent), spent),
    ]
