"""One object as a JSON record and as a row of text."""

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
"""Columns with their widths in characters, negative if aligned to the left; fixed, because rows are printed as they are scanned."""


def hangs(entry: ScanEntry) -> bool:
    """Whether the object is attached to a page, as a state is, and is not a page itself."""
    return entry.meta.parent == entry.key.page_key


def record(entry: ScanEntry) -> dict[str, Any]:
    """Return the object's fields for JSON."""
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
    """Return the heading line of the rows."""
    return _joined([name for name, _ in _WIDTHS])


def row(entry: ScanEntry, now: float) -> str:
    """Return the object as one line of text; `now`: seconds since 1970."""
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
