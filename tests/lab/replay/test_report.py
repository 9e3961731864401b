"""The report as text: self-contained, with the figures of its results, and safe from the names in them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tests.lab.replay.browser import contrast
from tests.lab.replay.report_samples import GIB, HOSTILE, hostile, result, study
from tiercache.errors import InputError
from tiercache_lab.replay import figures
from tiercache_lab.replay.report import palette, render, write_report
from tiercache_lab.replay.results import Result, Sample


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
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.replace("\u202f", " ")))


def test_without_results_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^[^.]*; replay something first$"):
        write_report([], tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_a_report_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("before")
    write_report([result()], target)
    assert target.read_text("utf-8") == render([result()])
    before = os.umask(0o027)
    try:
        write_report([result()], target)
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == 0o640
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_report([result()], tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "report.html"]


@pytest.mark.parametrize("results", [[result()], hostile(), study(12, 2)], ids=["one", "hostile", "two"])
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
    results = study(12, 1)
    runs = render(results).partition('id="runs"')[2].partition("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", runs, re.DOTALL)[1:]
    assert len(rows) == len(results)
    for row, run in zip(rows, results, strict=True):
        cells = [plain(cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        told = json.loads(json.dumps(run.row()))
        assert cells[0] == told["source"]
        assert cells[1] == told["policy"] + "*" * told["is_bound"]
        assert cells[4] == f"{told['flops_saved'] * 100:.1f} %"
        assert cells[5] == f"{told['token_hit_rate'] * 100:.1f} %"
        assert cells[6] == f"{told['ttft_ms_mean']:,.0f} ms"
        assert cells[8] == f"{told['cuts']:.2f}"
        assert cells[10:12] == [f"{told['requests']:,}", str(told["seed"])]


def test_charts_show_the_figures_and_name_the_table() -> None:
    page = render([result(policy=name, flops_saved=rate) for name, rate in (("a", 0.25), ("b", 0.5))])
    drawing = page.partition("<svg")[2].partition("</svg>")[0]
    # Bars from zero, one twice as long as the other.
    lengths = re.findall(r'd="M0,[\d.]+h([\d.]+)v', drawing)
    assert [round(float(length)) for length in lengths][-2:] == [150, 300]
    assert (
        "<title>Saved prefill FLOPs</title><desc>2 bars; the figures are in the table below.</desc>"
        in drawing
    )


def test_names_are_shown_as_they_are_and_never_as_markup() -> None:
    read = Reader(render(hostile()))
    assert not {"script", "img"} & set(read.inside)
    shown = HOSTILE.translate({0: "\ufffd", 0x202E: "\ufffd", 0xDC80: "\ufffd"})
    assert shown in read.inside["h2"]
    assert shown in read.inside["b"]
    assert shown in read.inside["th"]
    # In charts: in the legends, and at the bars.
    assert sum(text.startswith(shown[:8]) for text in read.inside["text"]) > 5


def test_a_chapter_says_who_wins_and_by_how_much() -> None:
    def at(policy: str, capacity: float, saved: float, hits: float, bound: bool = False) -> Result:
        return result(
            policy=policy,
            capacity=capacity,
            capacity_bytes=int(capacity * 100 * GIB),
            flops_saved=saved,
            token_hit_rate=hits,
            is_bound=bound,
        )

    found = [
        at("a", 0.05, 0.60, 0.7),
        at("b", 0.05, 0.55, 0.75),
        at("c", 0.05, 0.40, 0.1),
        at("d", 0.05, 0.45, 0.2),
        at("end", 0.05, 0.62, 0.8, True),
    ]
    found += [
        at("a", 0.1, 0.6501, 0.7),
        at("b", 0.1, 0.65, 0.7),
        at("end", 0.1, 0.64, 0.8, True),
        at("all", 1.0, 0.9, 0.9, True),
    ]
    page = plain(render(found))
    assert (
        "At 5 % (5.00 GiB) a saves 60.0 % of prefill FLOPs 5.0 pp over b, 20.0 pp over c. 2.0 pp below end,"
        " 30.0 pp below all." in page
    )
    assert "Highest hit rate: b, 75.0 %." in page
    assert (
        "At 10 % (10.0 GiB) a and b save 65.0 % of prefill FLOPs 1.0 pp above end, 25.0 pp below all. 5.0 pp"
        " over the best at 5 %." in page
    )
    unknown = plain(render([replace(one, flops_saved=math.nan) for one in found]))
    assert "b hits 75.0 % of tokens 5.0 pp over a, 65.0 pp over c." in unknown


def test_the_overview_means_the_same_sources_for_every_policy() -> None:
    found = [
        result(source=s, policy=p, capacity=0.1, flops_saved=f)
        for s, p, f in (("x", "a", 0.5), ("x", "b", 0.4), ("y", "a", 0.5), ("y", "b", 0.7))
    ]
    page = plain(render([*found, result(source="x", policy="c", capacity=0.1, flops_saved=0.99)]))
    assert "At 10 % b saves most on average, 55.0 %: ahead or level in 1 of 2 sources, 5.0 pp over a" in page
    assert "Mean 50.0 % 55.0 % \u2013" in page


def test_every_run_is_in_the_last_table_and_of_equal_ones_the_last_is_drawn() -> None:
    found = [result(seed=seed, token_hit_rate=seed / 10, flops_saved=seed / 10) for seed in (1, 2, 3)]
    page = render(found)
    runs = page.partition('id="runs"')[2].partition("</section>")[0]
    assert runs.count("<tr>") == 4
    assert "lru saves 30.0 % of prefill" in plain(page)
    assert "2 results had the same source, policy and capacity as a later result" in plain(page)


def test_long_series_are_thinned_and_their_means_are_kept() -> None:
    course = tuple(Sample(index + 1, 0.25, index % 2, index) for index in range(12_031))
    page = render([result(over_time=course, requests=12_031), result(policy="b", over_time=course[:100])])
    assert len(page) < 120_000
    assert "50.0 %" in plain(page.partition("saved prefill FLOPs over requests")[2])


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (figures.percent(0.7811), "78.1 %"), (figures.percent(-0.0001), "0.0 %"),
        (figures.percent(math.inf), "\u2013"),
        (figures.percent(None), "\u2013"), (figures.short_percent(0.025), "2.5 %"),
        (figures.points(-0.021), "2.1 pp"), (figures.size(0), "0 B"),
        (figures.size(1023.7), "1.00 KiB"), (figures.size(12.3 * GIB), "12.3 GiB"),
        (figures.size(1500 * GIB), "1.46 TiB"),
        (figures.size(math.nan), "\u2013"), (figures.milliseconds(1420), "1,420 ms"),
        (figures.milliseconds(3.21), "3.2 ms"),
        (figures.count(12031), "12,031"), (figures.counted(1, "policy", "policies"), "1 policy"),
    ],
)  # fmt: skip
def test_figures_are_written_alike(said: str, shown: str) -> None:
    assert said.replace("\u202f", " ") == shown


def test_colours_stand_out_in_light_and_in_dark() -> None:
    for mode in (0, 1):
        ground = {name: pair[mode] for name, pair in palette.GROUNDS.items()}
        for name in ("page", "card"):
            assert all(
                contrast(pair[mode], ground[name]) >= 3
                for pair in (*palette.POLICIES, *palette.BOUNDS, *palette.KINDS, *palette.TIERS)
            )
            assert all(contrast(ground[text], ground[name]) >= 4.5 for text in ("ink", "soft", "link"))
        assert all(contrast(ground["ink"], pair[mode]) >= 4.5 for pair in palette.TINTS)
        assert all(contrast(one[mode], other[mode]) >= 1.25 for one, other in pairwise(palette.TIERS))
