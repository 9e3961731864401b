"""The site, built as `make site` builds it; needs its packages (docs/generator/requirements.txt)."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.cli.test_streams import EVERY
from tests.docs.pages import ROOT
from tiercache.config.document import every_setting

pytestmark = pytest.mark.slow
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""Attributes by which a page makes a browser fetch something."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a broken link or anchor fails the build."""
    pytest.importorskip("mkdocstrings_handlers.python", reason="`make site` installs MkDocs")
    where = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return where


class Fetched(HTMLParser):
    """Collector of the addresses that a page fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name == FETCHED.get(tag)]


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    foreign = set()
    for page in site.rglob("*.html"):
        parser = Fetched()
        parser.feed(page.read_text())
        foreign |= {address for address in parser.found if re.match(r"[a-z]+:|//", address)}
    for style in site.rglob("*.css"):
        foreign |= set(re.findall(r"url\(\"?(https?:[^)]*)|@import", style.read_text()))
    assert foreign == set()


def test_the_reference_has_every_verb_and_every_setting(site: Path) -> None:
    verbs = (site / "reference/cli.html").read_text()
    assert [name for name in EVERY if f'id="tiercache-{name}"' not in verbs] == []
    settings = (site / "reference/configuration.html").read_text()
    names = {name.rpartition(".")[2] for name, _, _ in every_setting()}
    assert [name for name in names if f"<code>{name}</code>" not in settings] == []


def test_the_reference_has_the_docstrings_of_public_names(site: Path) -> None:
    page = (site / "reference/tiercache.controller.html").read_text()
    assert 'id="tiercache.controller.HybridCacheController.admit"' in page
    assert "Slots and pins that one request holds" in page


def test_the_search_finds_pages_and_titles(site: Path) -> None:
    index = (site / "search/search_index.json").read_text()
    assert "daemon.html#who-may-call" in index
    assert "reference/cli.html#tiercache-status" in index
