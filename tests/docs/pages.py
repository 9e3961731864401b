"""The texts of the project: pages of docs/, and those outside it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("docs/**/*.md"),
        *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        ROOT / "deploy/README.md",
    ]
)
FENCE = re.compile(r"(?ms)^ *```.*?^ *```$")


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", (ROOT / page).read_text())


def anchors(page: str) -> set[str]:
    """The anchors that a code host and the site give to the titles of a page."""
    titles = re.findall(r"(?m)^#+ (.*)$", prose(page))
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
