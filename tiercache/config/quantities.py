"""Sizes ("64GiB") and durations ("250ms") as settings write them: parsing and formatting."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

from tiercache.errors import ConfigError

_SIZE_UNITS: Final = {
    "": 1, "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
}  # fmt: skip
_DURATION_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# At most 40 digits, so that neither a float nor int(text) overflows.
_QUANTITY: Final = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([a-zA-Z]*)\s*")
_SHOWN: Final = 80
"""Characters of a value that a message repeats at most."""


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as "64GiB", "1.5 TB" or 4096; raises ConfigError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{shown(text)} is not a size; write a number of bytes or a number with a unit, such as 64GiB or 500MB")
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def parse_duration(text: str | float) -> float:
    """Return the seconds of a duration such as "250ms", "2s", "1.5h" or a plain number; raises ConfigError for anything else."""
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < math.inf:
        # float() fails for a very large int: from 2**63 seconds on, use infinity.
        return float(text) if text < 2**63 else math.inf
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    unit = _DURATION_UNITS.get(match[2].lower() or "s") if match else None
    if match is None or unit is None:
        raise ConfigError(f"{shown(text)} is not a duration; write seconds or a number with a unit, such as 250ms, 2s or 1h")
    return float(match[1]) * unit


def size_text(size: int) -> str:
    """Format `size` in the shortest way, with a binary unit or as plain bytes; `parse_size` returns `size` again."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZE_UNITS[unit.lower()] == 0:
            return f"{size // _SIZE_UNITS[unit.lower()]}{unit}"
    return str(size)


def duration_text(seconds: float) -> str:
    """Format `seconds` with a unit; `parse_duration` returns `seconds` again."""
    for unit in ("h", "min", "s", "ms", "us"):
        count = round(seconds / _DURATION_UNITS[unit])
        if count and count * _DURATION_UNITS[unit] == seconds:
            return f"{count}{unit}"
    return f"{Decimal(repr(seconds)):f}s"


def shown(value: object) -> str:
    """Return a value as a message repeats it: on one line, and cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python converts to text
        return "a number with thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
