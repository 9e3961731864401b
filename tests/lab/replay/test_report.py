"""The report as text: self-contained, with the figures of its results, and safe from the names in them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.lab.replay.browser import contrast
from tests.lab.replay.report_samples import GIB, HOSTILE, hostile, result, study
from tiercache.cli.terminal import clean
from tiercache.errors import InputError
from tiercache_lab.replay import figures
from tiercache_lab.replay.report import render, stylesheet
from tiercache_lab.replay.results import Result


class Reader(HTMLParser):
    """Checks that elements are closed in order, and keeps ids, links, attributes, elements and text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.elements.append((tag, dict(attrs)))
        self.inside.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.inside[self.open[-1]][-1] += data

    def all(self, name: str) -> list[str]:
        return [value for _, attributes in self.elements if (value := attributes.get(name)) is not None]


def plain(page: str) -> str:
    """Return the text of a page without its tags and with ordinary spaces."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_without_results_there_is_no_report() -> None:
    with pytest.raises(InputError, match=r"^[^.]*; replay something first$"):
        render([])


@pytest.mark.parametrize("results", [[result()], hostile(), study()], ids=["one", "hostile", "study"])
def test_a_report_is_sound_and_contains_only_itself(results: list[Result]) -> None:
    page = render(results, title=HOSTILE, notes=[HOSTILE])
    page.encode()
    read = Reader(page)
    ids = read.all("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in read.all("href") if link.startswith("#")} <= set(ids)
    assert {link for link in read.all("href") if not link.startswith("#")} == {"data:,"}
    names = {name for _, attributes in read.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in {"style", "src"}}
    assert not {"script", "img", "image", "iframe", "object", "foreignobject", "use"} & set(read.inside)
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in read.elements
        if tag == "meta" and "http-equiv" in attributes
    ]
    (style,) = read.inside["style"]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert "script-src" not in policy
    assert not re.search(r"https?:|@import|url\(", style)
    assert not re.search(r"\b(nan|inf|None|NaN|Infinity|undefined|null)\b", plain(page.partition("<body")[2]))


def test_the_figures_of_the_report_are_those_of_the_rows() -> None:
    results = study()
    table = render(results).partition("<h2>By capacity</h2>")[2].partition("</table>")[0]
    rows = re.findall(r'<tr class="(?:plain|best|bound)">(.*?)</tr>', table, re.DOTALL)
    assert len(rows) == len(results)
    for row, run in zip(rows, results, strict=True):
        cells = [plain(cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        told = json.loads(json.dumps(run.row()))
        assert cells[1:5] == [
            told["policy"], f"{told['token_hit_rate'] * 100:.1f} %", f"{told['flops_saved'] * 100:.1f} %",
            f"{told['ttft_ms_mean']:,.0f} ms",
        ]  # fmt: skip


def test_charts_show_the_figures_and_name_the_table() -> None:
    rates = {0.1: 0.25, 0.2: 0.5, 0.4: 1.0}
    page = render([result(capacity=capacity, flops_saved=rate) for capacity, rate in rates.items()])
    drawing = page.partition("<svg")[2].partition("</svg>")[0]
    # Three points of one line: the last step is twice as high as the first.
    [line] = re.findall(r'd="M([\d.,L]+)" stroke=', drawing)
    first, second, third = (float(point.partition(",")[2]) for point in line.split("L"))
    assert second - third == pytest.approx(2 * (first - second))
    assert (
        "<title>Saved prefill FLOPs</title><desc>1 line; the figures are in the table below.</desc>"
        in drawing
    )
    assert "<svg" not in render([result(), result(policy="hvd")]), "the table of one capacity says as much"


def test_names_are_shown_as_they_are_and_never_as_markup() -> None:
    read = Reader(render(hostile()))
    assert not {"script", "img"} & set(read.inside)
    shown = clean(HOSTILE)
    assert any(shown in text for text in read.inside["p"])
    assert shown in read.inside["td"]
    # In charts: in the legends, and at the bars.
    assert sum(text.startswith(shown[:8]) for text in read.inside["text"]) >= 3


def test_a_verdict_says_who_wins_and_by_how_much() -> None:
    def at(policy: str, capacity: float, saved: float, *, bound: bool = False) -> Result:
        return result(
            policy=policy, capacity=capacity, capacity_bytes=int(capacity * 100 * GIB), flops_saved=saved,
            is_bound=bound,
        )  # fmt: skip

    found = [
        at("infinite", 1.0, 0.9, bound=True), at("a", 0.05, 0.60), at("b", 0.05, 0.55), at("c", 0.05, 0.40),
        at("d", 0.05, 0.45), at("end", 0.05, 0.62, bound=True), at("a", 0.1, 0.6501), at("b", 0.1, 0.65),
        at("end", 0.1, 0.64, bound=True),
    ]  # fmt: skip
    page = plain(render(found))
    assert (
        "At 5 % (5.00 GiB), a saves 60.0 % of the prefill: 5.0 points over b, 20.0 points over c, 2.0 points"
        " below end, 30.0 points below infinite." in page
    )
    assert (
        "At 10 % (10.0 GiB), a and b save 65.0 % of the prefill: 1.0 points above end, 25.0 points below"
        " infinite." in page
    )
    unknown = plain(render([replace(one, flops_saved=math.nan) for one in found]))
    assert "At 5 % (5.00 GiB), no policy has a figure." in unknown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (figures.percent(0.7811), "78.1 %"), (figures.percent(-0.0001), "0.0 %"),
        (figures.percent(math.inf), "\u2013"),
        (figures.percent(None), "\u2013"), (figures.size(0), "0 B"),
        (figures.size(1023.7), "1.00 KiB"), (figures.size(12.3 * GIB), "12.3 GiB"),
        (figures.size(1500 * GIB), "1.46 TiB"),
        (figures.size(math.nan), "\u2013"), (figures.milliseconds(1420), "1,420 ms"),
        (figures.milliseconds(3.21), "3.2 ms"),
        (figures.counted(1, "run"), "1 run"), (figures.counted(2, "run"), "2 runs"),
    ],
)  # fmt: skip
def test_figures_are_written_alike(said: str, shown: str) -> None:
    assert said == shown


def test_colours_stand_out_in_light_and_in_dark() -> None:
    light, dark = stylesheet().split("@media")
    for part in (light, dark):
        colours = dict(re.findall(r"--([a-z]+\d?): (#[0-9a-f]{6})", part))
        assert len(colours) == 17
        for ground in ("page", "card"):
            for name, colour in colours.items():
                if name not in ("page", "card", "rule"):
                    least = 4.5 if name in ("ink", "soft", "link") else 3
                    assert contrast(colour, colours[ground]) >= least, (name, ground)
