"""Hooks of MkDocs, which `mkdocs.yml` names: pages that are made, and links as a code host has them.

The texts of the site link to each other as files of the checkout (`docs/daemon.md`, `../SECURITY.md`), so
that they can be read on a code host too. Here each link is turned into one between pages of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

import reference
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
OUTSIDE: Final = {
    "README.md": "index.md",
    "deploy/README.md": "deploy/README.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Texts outside docs/, by their path in the checkout, and the pages that they become."""
LINK: Final = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
FENCE: Final = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Put the pages that are made into the navigation."""
    lists = {
        "EXAMPLES": [f"examples/{path.stem}.md" for path in reference.examples()],
        "API": [{module: f"reference/{module}.md"} for module in reference.MODULES],
        "DESIGN": ["design/index.md", *(f"design/{path.name}" for path in reference.decisions())],
    }
    config.nav = _filled(config.nav, lists)
    return config


def _filled(nav: Any, lists: dict[str, list[Any]]) -> Any:
    match nav:
        case str():
            return lists.get(nav, nav)
        case list():
            return [_filled(entry, lists) for entry in nav]
        case dict():
            return {title: _filled(entry, lists) for title, entry in nav.items()}
    return nav


def on_files(files: Files, config: Any) -> Files:
    """Add the texts that lie outside docs/, and the pages that are made."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page, text in reference.pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turn links between files of the checkout into links between pages."""
    here = page.file.src_uri
    source = next((source for source, made in OUTSIDE.items() if made == here), f"docs/{here}")
    parts = []
    end = 0
    for fence in FENCE.finditer(markdown):
        parts += [_linked(markdown[end : fence.start()], source, here), fence.group()]
        end = fence.end()
    return "".join([*parts, _linked(markdown[end:], source, here)])


def _linked(text: str, source: str, here: str) -> str:
    return LINK.sub(lambda link: _target(link.group(), source, here), text)


def _target(link: str, source: str, here: str) -> str:
    path, mark, anchor = link.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if target in OUTSIDE:
        page = OUTSIDE[target]
    elif target.startswith("examples/"):
        page = posixpath.splitext(target)[0] + ".md"
    elif target == "docs/design":
        page = "design/index.md"
    else:
        page = target.removeprefix("docs/")
    return posixpath.relpath(page, posixpath.dirname(here) or ".") + mark + anchor
