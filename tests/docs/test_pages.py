"""Pages, read to the end by somebody who types every command."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import blocks
from tests.docs.pages import PAGES
from tests.docs.shell import Reader, pattern

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
def test_every_command_of_a_page_does_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Reader(tmp_path) as reader:
        reader.read(blocks(page))


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("200 tokens, 192 restored", "200 tokens, 192 restored", True),
        ("200 tokens, 192 restored", "200 tokens, 0 restored", False),
        ("17 objects, 56.4 KiB, <N> GB/s", "17 objects, 56.4 KiB, 1.25 GB/s", True),
        ("17 objects, 56.4 KiB, <N> GB/s", "17 objects, 56.4 MiB, 1.25 GB/s", False),
        ("has <SIZE> free", "has 252.0 GiB free", True),
        ("up <TIME>, ready", "up 300 ms,  ready", True),
        ("up <TIME>, ready", "up a while, ready", False),
    ],
)
def test_a_number_that_is_not_marked_is_compared(shown: str, printed: str, *, same: bool) -> None:
    assert bool(re.fullmatch(pattern(shown, like=True), printed, re.DOTALL)) is same
