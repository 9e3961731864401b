"""Answer of a plan: sentences, one row of figures, the table of all runs, and the drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tiercache_lab.replay import figures
from tiercache_lab.replay.charts import Chart, colour, dashes, drawn
from tiercache_lab.replay.figures import percent
from tiercache_lab.replay.plan.search import LITTLE, SizePlan, disk_of, host_of, worth_a_disk
from tiercache_lab.replay.report import facts as about
from tiercache_lab.replay.report import page, stylesheet
from tiercache_lab.replay.results import Result
from tiercache_lab.replay.tables import Grid, Line, Style

NOTHING: Final = 0.001
"""Saved fraction of the prefill below which a cache saves nothing that is worth telling."""
_WIDTH: Final = 620
_HEIGHT: Final = 300
_BAR: Final = 20
"""Length of the longest bar, in columns."""
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def facts(plan: SizePlan) -> dict[str, Any]:
    """Return the answer as plain JSON values. Fractions are of the prefill's FLOPs; sizes are in bytes."""
    curve, disk = plan.curve, plan.disk
    saves = curve.top >= NOTHING
    return {
        "unlimited_bytes": plan.footprint,
        "unlimited_saved": plan.unlimited.flops_saved,
        "knee_bytes": curve.knee() if saves else None,
        "host_bytes": plan.host if saves else 0,
        "host_saved": curve.at(plan.host) if saves else 0.0,
        "enough_bytes": curve.enough(0.9) if saves else 0,
        "doubling": curve.doubling(plan.host) if saves else 0.0,
        "disk_bytes": disk_of(disk) if disk else 0,
        "disk_saved": disk.flops_saved if disk else None,
        "disk_written_per_day": plan.written_per_day(disk) if disk else None,
        "sentences": list(sentences(plan)),
    }


def sentences(plan: SizePlan) -> Iterator[str]:
    """Yield the answer: how much host memory and disk save how much."""
    curve, unlimited = plan.curve, plan.unlimited
    if curve.top < NOTHING:
        if unlimited.token_hit_rate > 0:
            yield (
                f"Even a cache without a limit saves only {percent(curve.top)} of the prefill: the prompts"
                " repeat too little of what came before."
            )
        else:
            yield "Nothing is saved, whatever the size: no prompt repeats what came before."
        return
    if not plan.hosts:
        yield (
            f"A cache without a limit holds {size(plan.footprint)} and saves {percent(curve.top)} of the"
            " prefill; no smaller size has been run."
        )
        return
    host = plan.host
    alone = curve.at(host)
    yield (
        f"{size(host)} of host memory save {percent(alone)} of the prefill, {percent(alone / curve.top)} of"
        f" what an unlimited cache of {size(plan.footprint)} saves."
    )
    if curve.knee() is None:
        yield "The curve has no knee: all along it, more memory saves more in proportion."
    yield from _disk(plan, alone)
    twice = curve.doubling(host)
    yield (
        f"Twice the host memory would save {twice * 100:.1f} points more."
        if twice >= LITTLE
        else "More host memory brings less than 1 point per doubling."
    )
    enough = curve.enough(0.9)
    if enough != host:
        yield f"{percent(0.9)} of what an unlimited cache saves need {size(enough)} of host memory."


def _disk(plan: SizePlan, alone: float) -> Iterator[str]:
    disk = plan.disk
    if disk is not None:
        wear = plan.written_per_day(disk)
        wears = f"; {size(wear)} a day are written to it" if wear else ""
        yield f"{size(disk_of(disk))} of disk below it raise this to {percent(disk.flops_saved)}{wears}."
        before = next((one for one in plan.hosts if host_of(one) == plan.host), plan.unlimited)
        yield (
            "With this disk, the mean time to the first token goes from"
            f" {figures.milliseconds(before.ttft_ms_mean)} to {figures.milliseconds(disk.ttft_ms_mean)}."
        )
    elif plan.disks or not worth_a_disk(plan):
        yield "A disk below it, of any size, saves less than 1 point more."


def size(nbytes: float) -> str:
    """Write a number of bytes without needless decimals, because most sizes of a plan have two digits."""
    text, _, unit = figures.size(nbytes).partition(" ")
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def rows_of(plan: SizePlan) -> list[Result]:
    """Return all runs of the plan: hosts by size, then disks by the sizes of host and disk, then no limit."""
    disks = sorted(plan.disks, key=lambda one: (one.tiers["host"].capacity, disk_of(one)))
    return [*sorted(plan.hosts, key=lambda one: one.capacity_bytes), *disks, plan.unlimited]


def grid(plan: SizePlan) -> Grid:
    """Return the table of all runs, with those emphasised that the answer names."""
    lines = []
    for run in rows_of(plan):
        named = run is plan.disk or (run in plan.hosts and host_of(run) == plan.host)
        style = Style.BOUND if run is plan.unlimited else Style.BEST if named else Style.PLAIN
        lines.append(Line(_cells(plan, run), style))
    return Grid("All runs", [("", lines)])


def bar(share: float) -> str:
    """Return a bar of block characters, whose length is a share of 20 columns."""
    eighths = round(min(1.0, max(0.0, share)) * _BAR * 8)
    return _EIGHTHS[8] * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def explanations() -> list[str]:
    """Return sentences on the columns of the table."""
    return [
        (
            "saved: share of the prefill; of unlimited: of what a cache without a limit saves. TTFT:"
            " calculated time to the first token, mean; p95: its 95th percentile. written a day: by the times"
            " of the source. The last row is a cache without a limit."
        ),
        (
            "The host that the answer names is the knee of the curve: the size whose savings lie farthest"
            " above the straight line from no cache to a cache without a limit. The disk is the smallest"
            " below this host that brings 90 % of what the largest one brings."
        ),
    ]


def plan_page(plan: SizePlan, notes: Sequence[str]) -> str:
    """Return the page as HTML: the answer, the drawing, and the table of all runs."""
    return page(
        "How much memory saves how much", about=about(plan.unlimited), sentences=list(sentences(plan)),
        drawings=[chart(plan)], tables=[grid(plan)], notes=[*notes, *explanations()],
    )  # fmt: skip


def picture(plan: SizePlan) -> str:
    """Return the drawing alone, as a file of SVG that loads nothing."""
    start, rest = chart(plan).svg.split(">", 1)
    return f'{start} style="background:var(--page)"><style>{stylesheet()}</style>{rest}'


def chart(plan: SizePlan) -> Chart:
    """Draw the savings over the bytes of host and disk, with the recommended sizes marked."""
    unit, factor = figures.unit_of(plan.footprint)
    lines = {"host alone": sorted([*plan.hosts, plan.unlimited], key=host_of)}
    for host in dict.fromkeys(host_of(one) for one in plan.disks):
        below = sorted((one for one in plan.disks if host_of(one) == host), key=disk_of)
        lines[f"host {size(host)} + disk"] = below
    rows = [
        {"line": name, "size": (host_of(one) + disk_of(one)) / factor, "saved": one.flops_saved}
        for name, runs in lines.items()
        for one in runs
    ]
    series: dict[str, Any] = {
        "field": "line", "type": "nominal",
        "legend": {"orient": "bottom", "title": None, "labelLimit": 260, "columnPadding": 22},
        "scale": {"domain": list(lines), "range": [colour("policy", index) for index in range(len(lines))]},
    }  # fmt: skip
    x = {
        "field": "size", "type": "quantitative", "scale": {"type": "log", "nice": False},
        "axis": {"title": f"{unit} of host and disk, logarithmic", "tickCount": 8, "format": "~g"},
    }  # fmt: skip
    y = {
        "field": "saved", "type": "quantitative", "scale": {"zero": True, "nice": True},
        "axis": {"title": None, "format": "~%", "tickCount": 6},
    }  # fmt: skip
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"color": series}},
        {"mark": {"type": "point", "filled": True, "size": 55, "opacity": 1}, "encoding": {"color": series}},
    ]
    if plan.hosts and plan.curve.top >= NOTHING:
        layers += _marks(plan, factor)
    body = {"layer": layers, "encoding": {"x": x, "y": y}, "height": _HEIGHT, "width": _WIDTH}
    note = "Saved prefill FLOPs by the bytes of host and disk together."
    return drawn("Saved prefill", note, figures.counted(len(rows), "point"), rows, body)


def _marks(plan: SizePlan, factor: int) -> list[dict[str, Any]]:
    """Return vertical lines at the recommended host, and at host and disk together, with their sizes."""
    found = [(plan.host, size(plan.host))]
    if disk := plan.disk:
        found.append((plan.host + disk_of(disk), f"+ {size(disk_of(disk))} of disk"))
    x = {"field": "size", "type": "quantitative"}
    rule = {"type": "rule", "stroke": "var(--soft)", "strokeDash": dashes(0)}
    # To the left of its line, no text leaves the drawing. Near the axis it covers no point, because a size
    # that is recommended saves much.
    text = {
        "type": "text", "align": "right", "baseline": "top", "dx": -4, "fill": "var(--ink)", "fontSize": 11
    }  # fmt: skip
    layers: list[dict[str, Any]] = []
    for number, (nbytes, told) in enumerate(found):
        data = {"values": [{"size": nbytes / factor, "told": told}]}
        ends = {"x": x, "y": {"value": 0}, "y2": {"value": _HEIGHT}}
        y = {"value": _HEIGHT - 40 + 18 * number}
        place = {"x": x, "y": y, "text": {"field": "told", "type": "nominal"}}
        layers += [
            {"data": data, "mark": rule, "encoding": ends},
            {"data": data, "mark": text, "encoding": place},
        ]
    return layers


def _cells(plan: SizePlan, run: Result) -> dict[str, str]:
    top = plan.curve.top
    return {
        "host": size(host_of(run)),
        "disk": size(disk_of(run)) if disk_of(run) else "",
        "saved": percent(run.flops_saved),
        "of unlimited": percent(run.flops_saved / top) if top >= NOTHING else "",
        "hit rate": percent(run.token_hit_rate),
        "TTFT": figures.milliseconds(run.ttft_ms_mean),
        "p95": figures.milliseconds(run.ttft_ms_p95),
        "written a day": size(written) if (written := plan.written_per_day(run)) is not None else "",
        "share": bar(run.flops_saved / top) if top > 0 else "",
    }
