"""The report of `tiercache replay --report`: one HTML file with charts and tables, which loads no other file.

Reading order: `comparison` (results arranged), `verdict` (the best policies and their margins), `charts`,
`tables`, `page` with its template and style sheet; `palette` (colours).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tiercache_lab.replay.results import Result

__all__ = ["render", "write_report", "write_whole"]

_TITLE = "Replay: policies and capacities"


def render(results: Sequence[Result], *, title: str = _TITLE, notes: Sequence[str] = ()) -> str:
    """Return the report as HTML; the same results give the same text.

    `notes` are sentences on how the results were made. Raises InputError if there are no results.
    """
    # Imported here because the libraries below take long to load.
    from tiercache_lab.replay.report.comparison import arrange
    from tiercache_lab.replay.report.page import document

    return document(arrange(results), title, notes)


def write_report(
    results: Sequence[Result], path: Path, *, title: str = _TITLE, notes: Sequence[str] = ()
) -> None:
    """Write the report to `path`, either completely or not at all.

    Raises InputError if there are no results, and OSError if the file cannot be written.
    """
    write_whole(path, render(results, title=title, notes=notes))


def write_whole(path: Path, content: str) -> None:
    """Write a file, either completely or not at all. Raises OSError if that fails."""
    number, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content.encode())
            # A file from mkstemp can be read only by its owner. Give it the permissions of an ordinary file.
            os.fchmod(number, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:  # also Ctrl-C: no half file is left, and it is raised again
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
