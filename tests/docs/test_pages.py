"""Pages, read to the end by somebody who types every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import blocks
from tests.docs.pages import PAGES
from tests.docs.shell import Reader

QUICK = ("docs/beyond.md", "docs/daemon.md", "docs/stores.md")
"""Pages that are read in a few seconds."""
READ = sorted(
    {
        block.page
        for page in PAGES
        for block in blocks(page)
        if block.reason is None and block.language in ("sh", "python")
    }
)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page in QUICK else pytest.mark.slow) for page in READ]
)
def test_every_command_of_a_page_does_what_the_page_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Reader(tmp_path) as reader:
        reader.read(blocks(page))
