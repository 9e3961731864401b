"""Picture of a plan: the savings by size as a drawing, and the page around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tiercache_lab.replay import figures
from tiercache_lab.replay.plan.answer import HEADS, NOTHING, cells, is_recommended, rows_of, sentences, size
from tiercache_lab.replay.plan.search import SizePlan, disk_of, host_of
from tiercache_lab.replay.report.charts import Chart, drawn
from tiercache_lab.replay.report.page import filled
from tiercache_lab.replay.report.palette import colour, dashes, style_rules
from tiercache_lab.replay.report.tables import Cell, Table

TITLE: Final = "How much memory saves how much"
_WIDTH: Final = 620
_HEIGHT: Final = 300
_ALONE: Final = "host alone"
_NOTE: Final = "Saved prefill FLOPs by the bytes of host and disk together."


def page(plan: SizePlan, notes: Sequence[str]) -> str:
    """Return the page as HTML: the answer, the drawing, and the table of all runs."""
    one = plan.unlimited
    about = [one.source, f"{figures.count(one.requests)} requests", f"seed {one.seed}", one.profile]
    return filled(
        "plan.html.jinja", title=TITLE, about=about, sentences=sentences(plan), chart=chart(plan),
        table=_table(plan), notes=notes,
    )  # fmt: skip


def picture(plan: SizePlan) -> str:
    """Return the drawing alone, as a file of SVG that loads nothing."""
    start, rest = chart(plan).svg.split(">", 1)
    return f'{start} style="background:var(--page)"><style>{style_rules()}</style>{rest}'


def chart(plan: SizePlan) -> Chart:
    """Draw the savings over the bytes of host and disk, with the recommended sizes marked."""
    unit, factor = figures.unit_of(plan.footprint)
    lines = {_ALONE: sorted([*plan.hosts, plan.unlimited], key=host_of)}
    for host in dict.fromkeys(host_of(one) for one in plan.disks):
        below = sorted((one for one in plan.disks if host_of(one) == host), key=disk_of)
        lines[f"host {size(host)} + disk"] = below
    rows = [
        {"line": name, "size": (host_of(one) + disk_of(one)) / factor, "saved": one.flops_saved}
        for name, runs in lines.items()
        for one in runs
    ]
    names = list(lines)
    series: dict[str, Any] = {
        "field": "line", "type": "nominal",
        "legend": {"orient": "bottom", "title": None, "labelLimit": 260, "columnPadding": 22},
    }  # fmt: skip
    colours = {"domain": names, "range": [colour("p", index) for index in range(len(names))]}
    x = {
        "field": "size", "type": "quantitative", "scale": {"type": "log", "nice": False},
        "axis": {"title": f"{unit} of host and disk, logarithmic", "tickCount": 8, "format": "~g"},
    }  # fmt: skip
    y = {
        "field": "saved", "type": "quantitative", "scale": {"zero": True, "nice": True},
        "axis": {"title": None, "format": "~%", "tickCount": 6},
    }  # fmt: skip
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"color": series | {"scale": colours}}},
        {
            "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
            "encoding": {"color": series | {"scale": colours}},
        },
    ]  # fmt: skip
    if plan.hosts and plan.curve.top >= NOTHING:
        layers += _marks(plan, factor)
    body = {
        "layer": layers, "encoding": {"x": x, "y": y}, "height": _HEIGHT, "width": _WIDTH,
    }  # fmt: skip
    return drawn("Saved prefill", _NOTE, f"{figures.counted(len(rows), 'point')}", rows, body)


def _marks(plan: SizePlan, factor: int) -> list[dict[str, Any]]:
    """Return vertical lines at the recommended host, and at host and disk together, with their sizes."""
    found = [(plan.host, size(plan.host))]
    if disk := plan.disk:
        found.append((plan.host + disk_of(disk), f"+ {size(disk_of(disk))} of disk"))
    x = {"field": "size", "type": "quantitative"}
    rule = {"type": "rule", "stroke": "var(--soft)", "strokeDash": list(dashes(0, is_bound=True))}
    # To the left of its line, no text leaves the drawing. Near the axis it covers no point, because a size
    # that is recommended saves much.
    text = {
        "type": "text",
        "align": "right",
        "baseline": "top",
        "dx": -4,
        "fill": "var(--ink)",
        "fontSize": 11,
    }
    layers: list[dict[str, Any]] = []
    for number, (nbytes, told) in enumerate(found):
        data = {"values": [{"size": nbytes / factor, "told": told}]}
        ends = {"x": x, "y": {"value": 0}, "y2": {"value": _HEIGHT}}
        place = {
            "x": x,
            "y": {"value": _HEIGHT - 40 + 18 * number},
            "text": {"field": "told", "type": "nominal"},
        }
        layers += [
            {"data": data, "mark": rule, "encoding": ends},
            {"data": data, "mark": text, "encoding": place},
        ]
    return layers


def _table(plan: SizePlan) -> Table:
    rows = []
    for run in rows_of(plan):
        style = "bound" if run is plan.unlimited else "top" if is_recommended(plan, run) else ""
        rows.append([Cell(text, style if not index else "") for index, text in enumerate(cells(plan, run))])
    return Table("All runs; the last one is a host without a limit.", HEADS, rows)
