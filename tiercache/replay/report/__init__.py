"""The report of `tiercache replay --report`: one HTML file with plots and tables that loads nothing else.

Reading order: `study` (results put in order), `verdict` (the best policies and their margins); the sections: `overview`, `capacity`,
`course`, `rounds`, `holdings`, `closing`; the plots: `lines` and `bars`, on `scale` and `palette`; `parts` and `markup` (elements), `words`
(figures), `page` (the file).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tiercache.replay.report.page import document
from tiercache.replay.report.study import arrange
from tiercache.replay.results import Result

__all__ = ["render", "write_report"]

_TITLE = "Replay: policies and capacities"


def render(results: Sequence[Result], *, title: str = _TITLE, notes: Sequence[str] = ()) -> str:
    """Return the report as HTML; the same results give the same text.

    `notes`: sentences on how the results were made. Raises InputError without results.
    """
    return document(arrange(results), title, notes)


def write_report(results: Sequence[Result], path: Path, *, title: str = _TITLE, notes: Sequence[str] = ()) -> None:
    """Write the report to `path`, either completely or not at all. Raises InputError without results, OSError if it cannot be written."""
    content = render(results, title=title, notes=notes).encode()
    number, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            # mkstemp makes a file that only its owner can read; a report gets the permissions of an ordinary file.
            os.fchmod(number, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
