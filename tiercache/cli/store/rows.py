"""One object as JSON and as a row of text."""

from __future__ import annotations

from typing import Any, Final

from tiercache.cli.output import SHORT, SHORTER, age_text, clean, size_text
from tiercache.storage.base import ScanEntry

_WIDTHS: Final = (
    ("page key", -SHORT),
    ("pool", -8),
    ("namespace", -9),
    ("depth", 7),
    ("size", 10),
    ("stored", 7),
    ("parent", -SHORT),
    ("layout", -8),
)
"""Columns and how wide they are; to the left where negative. Fixed, because rows are printed as they come."""


def hangs(entry: ScanEntry) -> bool:
    """Does the object hang on a page, as a state does, and is none itself?"""
    return entry.meta.parent == entry.key.page_key


def record(entry: ScanEntry) -> dict[str, Any]:
    """The object's fields for JSON."""
    key, meta = entry.key, entry.meta
    return {
        "page_key": key.page_key.hex(),
        "pool": str(key.pool),
        "namespace": meta.namespace.hex(),
        "depth": meta.depth,
        "bytes": meta.length,
        "stored_at": entry.stored_at,
        "parent": None if meta.parent is None else meta.parent.hex(),
        "layout": key.layout.hex(),
        "checksum": meta.checksum.hex(),
    }


def header() -> str:
    """The line above the rows."""
    return _joined([name for name, _ in _WIDTHS])


def row(entry: ScanEntry, now: float) -> str:
    """The object on one line."""
    key, meta = entry.key, entry.meta
    return _joined(
        [
            key.page_key.hex()[:SHORT],
            clean(str(key.pool)),
            meta.namespace.hex()[:SHORTER],
            "-" if meta.depth is None else str(meta.depth),
            size_text(meta.length),
            age_text(None if entry.stored_at is None else now - entry.stored_at),
            "-" if meta.parent is None else "(own page)" if hangs(entry) else meta.parent.hex()[:SHORT],
            key.layout.hex()[:SHORTER],
        ]
    )


def _joined(cells: list[str]) -> str:
    padded = (cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, (_, width) in zip(cells, _WIDTHS, strict=True))
    return "  ".join(padded).rstrip()
