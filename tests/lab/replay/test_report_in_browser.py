"""The report as a real browser shows it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.lab.replay import browser
from tests.lab.replay.browser import Page
from tests.lab.replay.report_samples import hostile, result, study
from tiercache_lab.replay.report import render

page = browser.page


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("reports")

    @functools.cache
    def report(name: str) -> Path:
        results = {
            "study": study,
            "flat": lambda: study(capacities=(0.05,)),
            "alone": lambda: [result()],
            "hostile": hostile,
        }[name]()
        page = folder / f"{name}.html"
        page.write_text(render(results, notes=["Replayed on one core."]), "utf-8")
        return page

    return report


SMALLEST: Final = """Math.min(99, ...[...document.querySelectorAll('svg text')].map(one => {
    const drawing = one.closest('svg');
    return parseFloat(getComputedStyle(one).fontSize) * drawing.getBoundingClientRect().width
        / drawing.viewBox.baseVal.width;
}))"""
WIDE: Final = """[...document.querySelectorAll('body *')].filter(one => {
    if (one.closest('.scroll, .markers') || !one.checkVisibility()) return false;
    const box = one.getBoundingClientRect();
    return box.right > innerWidth + 0.5 || box.left < -0.5;
}).map(one => one.outerHTML.slice(0, 200))"""
CROWDED: Final = """
[...document.querySelectorAll('svg')].filter(plot => plot.checkVisibility()).flatMap(plot => {
    const boxes = [...plot.querySelectorAll('text')]
        .map(one => ({said: one.textContent, box: one.getBoundingClientRect()}));
    const end = (box, start, length) => box[start] + box[length];
    const common = (a, b, ...side) =>
        Math.min(end(a, ...side), end(b, ...side)) - Math.max(a[side[0]], b[side[0]]);
    const meet = (a, b) => common(a.box, b.box, 'x', 'width') > 1 && common(a.box, b.box, 'y', 'height') > 4;
    return boxes.flatMap((a, index) =>
        boxes.slice(index + 1).filter(b => meet(a, b)).map(b => a.said + ' / ' + b.said));
})"""
PALE: Final = """(() => {
    const parse = said => {
        const found = said.match(/[\\d.]+/g).map(Number);
        return found.length < 4 ? [...found, 1] : found;
    };
    const light = colour => {
        const [r, g, b] = colour.map(v => v / 255)
            .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
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
        if ((Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5)
            found.pale.push(one.outerHTML.slice(0, 160));
    }
    return found;
})()"""


@pytest.mark.parametrize(
    ("name", "dark"),
    [
        ("study", False), pytest.param("study", True, marks=pytest.mark.slow), ("flat", True),
        ("alone", False), ("hostile", True),
    ],
)  # fmt: skip
def test_nothing_is_missing_pale_crowded_or_too_wide(page, reports, name, dark):
    for width in (1280, 360):
        page.open(reports(name), width=width, dark=dark)
        assert page.ask("document.documentElement.scrollWidth") <= width
        assert page.ask(WIDE) == []
        assert page.ask(SMALLEST) >= 8.5
    pale = page.ask(PALE)
    assert pale["checked"] > 20
    assert pale["pale"] == []
    assert page.ask(CROWDED) == []
    assert page.ask("typeof window.bad") == "undefined"
    assert page.complaints == []
    assert [asked for asked in page.asked if not asked.startswith("data:")] == [reports(name).as_uri()]


def test_the_keyboard_and_assistive_technology_get_names(page: Page, reports: Callable[[str], Path]) -> None:
    page.open(reports("study"))
    page.press("Tab", 9)
    assert page.ask("document.activeElement.ariaLabel") == "By capacity"
    nodes = [node for node in page.call("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]
    named = {(node["role"]["value"], node["name"]["value"]) for node in nodes if "name" in node}
    assert {("image", "Saved prefill FLOPs"), ("image", "Time to first token")} <= named
    described = [node for node in nodes if node["role"]["value"] == "image"]
    assert len(described) == page.ask("document.querySelectorAll('svg').length")
    assert all("the figures are in the table below" in node["description"]["value"] for node in described)
