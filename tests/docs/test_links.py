"""Links between the texts, as a code host follows them, and the navigation of the site."""

from __future__ import annotations

import os
import re

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, prose


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_to_a_title_of_it(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if not (ROOT / target).exists() or (
            anchor and target.endswith(".md") and anchor not in anchors(target)
        ):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    """Decisions, examples and modules are put there by docs/generator/hooks.py; `make site` proves that."""
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]))
    own = {page.removeprefix("docs/") for page in PAGES if not page.startswith("docs/design/")}
    assert own - {"README.md"} == {page for page in named if not page.startswith("reference/")} - {"index.md"}
