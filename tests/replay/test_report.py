"""The report as text, and as a real browser shows it."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.replay.browser import MISSING, PROGRAM, Page, chromium, pixels
from tiercache.errors import InputError
from tiercache.replay.report import palette, render, scale, words, write_report
from tiercache.replay.results import Kept, Result, Sample, TierUse

GIB: Final = 1 << 30
SOURCES: Final = {  # Saved by the infinite cache, and how much a policy can get wrong.
    "shared-prefix": (0.897, 0.42), "shared-prefix-zipf": (0.789, 0.38), "multi-turn": (0.869, 0.06), "multi-turn-stripped": (0.838, 0.24),
    "agent": (0.951, 0.02), "agent-collapse": (0.540, 0.05), "sharegpt": (0.059, 0.02), "mixed": (0.927, 0.07),
    "mooncake-conversation": (0.322, 0.20), "mooncake-synthetic": (0.602, 0.40),
}  # fmt: skip
POLICIES: Final = {"lru": 1.0, "seglen": 0.72, "marconi": 0.6, "gdsf": 0.45, "hvd": 0.2, "portfolio": 0.17}
HOSTILE: Final = '<script>window.bad=1</script><img src=x onerror=\'window.bad=1\'>" onfocus="window.bad=1"&amp;\x00\u202e\udc80]]>'


def result(**changes: object) -> Result:
    """One run whose tiers were given in bytes, without anything that may be left out."""
    fields: dict[str, object] = {
        "source": "seed-20457", "policy": "lru", "capacity": None, "capacity_bytes": 12 * GIB, "token_hit_rate": 0.547,
        "flops_saved": 0.531, "ttft_ms_mean": 212.0, "ttft_ms_p95": 611.0, "peak_bytes": 11 * GIB, "requests": 120, "seconds": 0.4,
        "seed": 20457, "profile": "9b",
    }  # fmt: skip
    return Result(**{**fields, **changes})  # type: ignore[arg-type]


def study(windows: int = 120) -> list[Result]:
    """What a replay could have found: ten sources, six policies, three bounds, three capacities; the same every time."""
    chance, made = np.random.default_rng(20457), []
    for source, (best, risk) in SOURCES.items():
        requests = 12_031 if source == "mooncake-conversation" else int(chance.integers(1_500, 4_000))
        footprint = float(chance.uniform(180, 1900)) * GIB
        made.append(run(chance, source, "infinite", None, footprint, best, requests, windows))
        for capacity in (0.02, 0.05, 0.10):
            lost = risk * math.log(0.5 / capacity, 25)
            shares = {name: share * float(chance.uniform(0.85, 1.15)) for name, share in POLICIES.items()}
            for policy, share in {**shares, "clairvoyant": 0.08, "upper bound": 0.03}.items():
                made.append(run(chance, source, policy, capacity, footprint, max(0.001, best - lost * share), requests, windows))
    return made


def run(
    chance: np.random.Generator, source: str, policy: str, part: float | None, footprint: float, saved: float, requests: int, windows: int
) -> Result:
    room, hits, ttft = int(footprint * (part or 1)), min(0.99, saved * 1.015), 1400 * (1 - saved) + 40
    tokens, kinds = requests * 6_200 * hits, ("prompt end", "request end", "branch", "ghost branch", "interval")
    tiers: dict[str, TierUse] = {}
    for (name, size), share in zip({"device": 0.05, "host": 0.15, "storage": 0.80}.items(), chance.dirichlet((5, 3, 2)), strict=True):
        moved = int(tokens * share * 24_576)
        tiers[name] = TierUse(int(room * size), int(room * size * 0.97), moved, int(moved * 0.8), 1_200, int(tokens * share))
    shares = zip(kinds, chance.dirichlet((4, 6, 3, 1, 1)), strict=True)
    kept = [Kept(kind, int(room * share / 2e8), int(room * share * 0.4), int(room * share * 0.6)) for kind, share in shares]
    ramps = [1 - math.exp(-9 * (index + 1) / windows) for index in range(windows)]
    waves = chance.normal(0, 0.02, windows)
    course = [
        Sample(requests * (index + 1) // windows, max(0, hits * ramp + wave), max(0, saved * ramp + wave), int(room * min(1, ramp * 1.2)))
        for index, (ramp, wave) in enumerate(zip(ramps, waves.tolist(), strict=True))
    ]
    rounds = range(12 if source.startswith("multi-turn") else 0)
    limit = policy in {"infinite", "upper bound"}
    return result(
        source=source,
        policy=policy,
        capacity=part,
        capacity_bytes=room,
        token_hit_rate=hits,
        flops_saved=saved,
        ttft_ms_mean=ttft,
        ttft_ms_p95=ttft * float(chance.uniform(2.2, 3.4)),
        peak_bytes=int(room * 0.97),
        requests=requests,
        seconds=float(chance.uniform(4, 40)),
        seed=7,
        profile="qwen3-next-80b-a3b",
        is_bound=limit or policy == "clairvoyant",
        tiers={} if limit else tiers,
        kept=() if limit else tuple(kept),
        over_time=tuple(course),
        by_round=tuple(hits * (1 - 0.9 * math.exp(-index / 1.5)) for index in rounds),
        published={"Infinite cache": 0.8976, "Without offload of states": 0.547} if source == "multi-turn" else {},
    )


def hostile() -> list[Result]:
    """Names that are markup wherever a name can be, and figures that are none."""
    bad = result(
        source=HOSTILE,
        policy=HOSTILE,
        profile=HOSTILE,
        capacity=0.05,
        tiers={HOSTILE: TierUse(GIB, GIB, 1, 1, 1, 1), "empty": TierUse(0, 0, 0, 0, 0, 0)},
        kept=(Kept(HOSTILE, 1, 1, 1),),
        by_round=(0.1, math.nan),
        published={HOSTILE: 0.5, "a time": 12.0},
        over_time=(Sample(1, math.nan, 0.1, 5), Sample(2, 0.2, math.inf, 6)),
    )
    missing: Any = None
    none = replace(
        bad, policy="none", token_hit_rate=missing, flops_saved=math.nan, ttft_ms_mean=math.inf, ttft_ms_p95=missing, seconds=math.nan
    )
    return [bad, none, replace(bad, policy="other", capacity=0.1), replace(bad, source=HOSTILE + "2")]


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


def contrast(one: Any, other: Any) -> float:
    """As WCAG 2 defines it; colours as three numbers to 255, or as #rrggbb."""

    def light(colour: Any) -> float:
        parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)] if isinstance(colour, str) else [int(part) for part in colour]
        linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def plain(page: str) -> str:
    """What is read, with ordinary spaces."""
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


@pytest.mark.parametrize("results", [[result()], hostile(), study(12)], ids=["one", "hostile", "ten"])
def test_a_report_is_sound_and_contains_only_itself(results: list[Result]) -> None:
    page = render(results, title=HOSTILE, notes=[HOSTILE])
    assert page == render(results, title=HOSTILE, notes=[HOSTILE])
    page.encode()
    read = Reader(page)
    ids = read.all("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in read.all("href") if link.startswith("#")} <= set(ids)
    assert {link for link in read.all("href") if not link.startswith("#")} == {"data:,"}
    names = {name for _, attributes in read.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in {"style", "src"}}
    (policy,) = [attributes["content"] or "" for tag, attributes in read.elements if tag == "meta" and "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'; ")
    for kind in ("style", "script"):
        (inside,) = read.inside[kind]
        assert f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'" in policy
        assert not re.search(r"https?:|@import|url\(", inside)
    assert not re.search(r"\b(nan|inf|None|NaN|Infinity)\b", plain(page.partition("<body")[2].partition("<script>")[0]))


def test_names_are_shown_as_they_are_and_never_as_markup() -> None:
    read = Reader(render(hostile()))
    assert len(read.inside["script"]) == 1
    assert "img" not in read.inside
    shown = HOSTILE.translate({0: "\ufffd", 0x202E: "\ufffd", 0xDC80: "\ufffd"})
    assert shown in read.inside["h2"]
    assert any(shown in text for text in read.inside["li"])
    assert any(shown in text for text in read.inside["title"])


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
    found += [at("a", 0.1, 0.6501, 0.7), at("b", 0.1, 0.65, 0.7), at("end", 0.1, 0.64, 0.8, True), at("all", 1.0, 0.9, 0.9, True)]
    page = plain(render(found))
    assert "At 5 % 5.00 GiB a saves 60.0 % of prefill FLOPs 5.0 pp over b, 20.0 pp over c. 2.0 pp below end, 30.0 pp below all." in page
    assert "Highest token hit rate: b, 75.0 %." in page
    assert "At 10 % 10.0 GiB a and b save 65.0 % of prefill FLOPs 1.0 pp above end, 25.0 pp below all. 5.0 pp over the best at 5 %." in page
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
    assert "2 results had the source, policy and capacity of a later one" in plain(page)


def test_long_series_are_thinned_and_their_means_are_kept() -> None:
    course = tuple(Sample(index + 1, index % 2, 0.25, index) for index in range(12_031))
    page = render([result(over_time=course, requests=12_031), result(policy="b", over_time=course[:100])])
    assert len(page) < 80_000
    assert "50.0 %" in plain(page.partition("token hit rate over time")[2].lower() or page.partition("Token hit rate over time")[2])


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (words.percent(0.7811), "78.1 %"), (words.percent(-0.0001), "0.0 %"), (words.percent(math.inf), "\u2013"),
        (words.percent(None), "\u2013"), (words.short_percent(0.025), "2.5 %"), (words.points(-0.021), "2.1 pp"), (words.size(0), "0 B"),
        (words.size(1023.7), "1.00 KiB"), (words.size(12.3 * GIB), "12.3 GiB"), (words.size(1500 * GIB), "1.46 TiB"),
        (words.size(math.nan), "\u2013"), (words.milliseconds(1420), "1,420 ms"), (words.milliseconds(3.21), "3.2 ms"),
        (words.count(12031), "12,031"), (words.short_count(12000), "12k"), (words.listed(["a", "b", "c"]), "a, b and c"),
        (words.counted(1, "policy", "policies"), "1 policy"), (words.shortened("abcdef", 4), "abc\u2026"),
    ],
)  # fmt: skip
def test_figures_are_written_alike(said: str, shown: str) -> None:
    assert said.replace("\u202f", " ") == shown


@given(st.lists(st.floats(-0.2, 1.2), min_size=1, max_size=9), st.integers(2, 6))
def test_an_axis_holds_its_values_between_round_ticks(values: list[float], steps: int) -> None:
    for axis in (
        scale.rates(values, steps=steps),
        scale.amounts([abs(one) * 1e13 for one in values], steps),
        scale.times([abs(one) * 1e4 for one in values]),
    ):
        assert axis.low < axis.high
        assert all(axis.low - 1e-9 <= tick <= axis.high + 1e-9 for tick in axis.ticks)
        assert 1 <= len(axis.ticks) <= 3 * steps + 8
    axis = scale.rates(values)
    assert axis.low <= min(values) + 1e-9
    assert max(values) <= axis.high + 1e-9


@given(st.lists(st.floats(-50, 300), min_size=1, max_size=12))
def test_labels_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    places = scale.spread(wanted, 13, 10, 212)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    assert all(places[after] - places[before] >= 13 - 1e-6 for before, after in pairwise(order))
    assert all(10 - 1e-6 <= place <= 212 + 1e-6 for place in places)
    if all(abs(one - other) >= 13 for one in wanted for other in wanted if one != other) and len(set(wanted)) == len(wanted):
        assert all(abs(place - max(10, min(212, want))) < 13 * len(wanted) for place, want in zip(places, wanted, strict=True))


def test_colours_stand_out_in_light_and_in_dark() -> None:
    for mode in (0, 1):
        ground = {name: pair[mode] for name, pair in palette.GROUNDS.items()}
        for name in ("page", "card"):
            assert all(
                contrast(pair[mode], ground[name]) >= 3 for pair in (*palette.POLICIES, *palette.BOUNDS, *palette.KINDS, *palette.TIERS[:3])
            )
            assert all(contrast(ground[text], ground[name]) >= 4.5 for text in ("ink", "soft", "link"))
        assert all(contrast(ground["ink"], pair[mode]) >= 4.5 for pair in palette.TINTS)
        assert all(contrast(one[mode], other[mode]) >= 1.25 for one, other in pairwise(palette.TIERS))


# What a browser makes of it.


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, ten = tmp_path_factory.mktemp("reports"), study()
    found = {"ten": ten, "one": [one for one in ten if one.source == "multi-turn"], "alone": [result()], "hostile": hostile()}
    found["flat"] = [one for one in found["one"] if one.capacity in {None, 0.05}]
    for name, results in found.items():
        write_report(results, folder / f"{name}.html", notes=["Replayed on one core."])
    return {name: folder / f"{name}.html" for name in found}


OPEN: Final = "for (const one of document.querySelectorAll('details')) one.open = true"
WIDE: Final = """[...document.querySelectorAll('body *')].filter(one => {
    if (one.closest('.scroll, .markers') || !one.checkVisibility()) return false;
    const box = one.getBoundingClientRect();
    return box.right > innerWidth + 0.5 || box.left < -0.5;
}).map(one => one.outerHTML.slice(0, 200))"""
CROWDED: Final = """[...document.querySelectorAll('svg.plot')].filter(plot => plot.checkVisibility()).flatMap(plot => {
    const boxes = [...plot.querySelectorAll('text')].map(one => ({said: one.textContent, box: one.getBBox()}));
    const end = (box, start, length) => box[start] + box[length];
    const common = (a, b, ...side) => Math.min(end(a, ...side), end(b, ...side)) - Math.max(a[side[0]], b[side[0]]);
    const meet = (a, b) => common(a.box, b.box, 'x', 'width') > 1 && common(a.box, b.box, 'y', 'height') > 4;
    return boxes.flatMap((a, index) => boxes.slice(index + 1).filter(b => meet(a, b)).map(b => a.said + ' / ' + b.said));
})"""
PALE: Final = """(() => {
    const parse = said => { const found = said.match(/[\\d.]+/g).map(Number); return found.length < 4 ? [...found, 1] : found; };
    const light = colour => {
        const [r, g, b] = colour.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const ground = one => {
        for (; one; one = one.parentElement) {
            const colour = parse(getComputedStyle(one).backgroundColor);
            if (colour[3] === 1) return colour;
        }
        return [255, 255, 255, 1];
    };
    const found = {checked: 0, pale: []};
    for (const one of document.querySelectorAll('body *')) {
        const said = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
        if (!said || !one.checkVisibility() || one.closest('title, desc, script')) continue;
        const style = getComputedStyle(one);
        const [a, b] = [parse(one.closest('svg') ? style.fill : style.color), ground(one)].map(light);
        found.checked++;
        if ((Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5) found.pale.push(one.outerHTML.slice(0, 160));
    }
    return found;
})()"""


@pytest.mark.parametrize(
    ("name", "dark"),
    [
        pytest.param("ten", False, marks=pytest.mark.slow),
        pytest.param("ten", True, marks=pytest.mark.slow),
        ("one", False),
        ("flat", True),
        ("alone", False),
        ("hostile", True),
    ],
)
def test_nothing_is_missing_pale_crowded_or_too_wide(page: Page, reports: dict[str, Path], name: str, dark: bool) -> None:
    for width in (320, 1280) if name == "ten" else (320, 390, 820, 1280, 1920):
        page.open(reports[name], width=width, dark=dark)
        page.ask(OPEN)
        assert page.ask("document.documentElement.scrollWidth") <= width
        assert page.ask(WIDE) == []
    pale = page.ask(PALE)
    assert pale["checked"] > 50
    assert pale["pale"] == []
    assert page.ask(CROWDED) == []
    assert page.ask("typeof window.bad") == "undefined"
    assert page.complaints == []
    assert [asked for asked in page.asked if not asked.startswith("data:")] == [reports[name].as_uri()]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_picture_is_light_or_dark_and_can_be_turned_over(page: Page, reports: dict[str, Path], dark: bool) -> None:
    page.open(reports["one"], width=420, dark=dark)
    for turned in (False, True):
        colours = pixels(page.picture("h1")).reshape(-1, 3)
        brightness = colours.sum(1)
        ground = colours[0]
        assert (ground.mean() < 60) == (dark != turned)
        assert max(contrast(ground, colours[brightness.argmin()]), contrast(ground, colours[brightness.argmax()])) >= 12
        page.ask("document.getElementById('theme').click()")
    lines = pixels(page.picture("#source-1 svg.plot .series")).reshape(-1, 3)
    assert max(contrast(lines[0], colour) for colour in np.unique(lines, axis=0)) >= 3


def test_the_keyboard_goes_from_plot_to_plot_and_from_point_to_point(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["one"])
    stops = page.ask("[...document.querySelectorAll('svg.plot')].map(plot => plot.querySelectorAll('[tabindex=\"0\"]').length)")
    assert len(stops) > 10
    assert set(stops) == {1}
    page.ask("document.querySelector('svg.plot .spot').focus()")
    told = []
    for _ in range(2):
        told.append(page.ask("document.getElementById('tip').textContent").replace("\u202f", " "))
        page.press("ArrowRight", 39)
    assert re.fullmatch(r"lru at 2 %: \d\d\.\d %", told[0])
    assert told[1].startswith("lru at 5 %: ")
    assert page.ask("document.getElementById('tip').checkVisibility()")
    page.press("Tab", 9)
    assert page.ask("document.activeElement.closest('figure').querySelector('b').textContent") == "Token hit rate"


def test_assistive_technology_gets_names_and_descriptions(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["flat"])
    nodes = [node for node in page.call("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]
    names = {(node["role"]["value"], node["name"]["value"].replace("\u202f", " ")) for node in nodes if "name" in node}
    assert ("heading", "multi-turn") in names
    assert any(role == "group" and name == "Saved prefill FLOPs" for role, name in names)
    assert any(role in {"img", "image"} and re.fullmatch(r"hvd: \d\d\.\d %", name) for role, name in names)
    assert all(page.ask("[...document.querySelectorAll('svg.plot, .spot')].map(one => !!one.querySelector(':scope > title').textContent)"))
    assert all(page.ask("[...document.querySelectorAll('svg.plot')].map(one => !!one.querySelector(':scope > desc').textContent)"))


def test_tables_sort_by_figures_and_keep_the_mean_below(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["ten"])

    def column(table: str, number: int) -> list[str]:
        found: list[str] = page.ask(
            f"[...document.querySelectorAll('{table} tbody tr > :nth-child({number})')].map(one => one.textContent)"
        )
        return found

    page.ask("document.querySelectorAll('#runs th button')[4].click()")
    rates = [float(cell.split("\u202f")[0]) for cell in column("#runs", 5)]
    assert len(rates) == 250
    assert rates == sorted(rates, reverse=True)
    page.ask("document.querySelectorAll('#runs th button')[4].click()")
    assert column("#runs", 3).index("\u2013") >= 0
    assert [float(cell.split("\u202f")[0]) for cell in column("#runs", 5)] == sorted(rates)
    page.ask("document.querySelectorAll('#runs th button')[2].click()")
    assert column("#runs", 3)[-10:] == ["\u2013"] * 10
    page.ask("document.querySelector('.heat th button').click()")
    assert column(".heat", 1)[:10] == sorted(SOURCES)
    assert column(".heat", 1)[10] == "Mean"


def test_everything_is_there_without_a_script_and_on_paper(page: Page, reports: dict[str, Path]) -> None:
    page.open(reports["one"], script=False)
    assert page.ask("document.getElementById('tip')") is None
    assert page.ask("[...document.querySelectorAll('button')].some(one => one.checkVisibility())") is False
    assert page.ask("[...document.querySelectorAll('svg.plot')].filter(one => one.checkVisibility()).length") >= 9
    assert page.complaints == []
    page.open(reports["one"], width=1050, dark=True, media="print")
    assert page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.ask(PALE)["pale"] == []
    assert page.pdf().count(b"/Type /Page\n") in range(3, 9)
