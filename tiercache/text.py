"""Conversion of sizes, durations and ages from and to text.

The text of an `exact_*` function is a setting, which `parse_*` turns back into the same value. The
`readable_*` functions round their values.
"""

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
_BINARY_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGE_UNITS: Final = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
# At most 40 digits, so that neither a float nor int(text) overflows.
_QUANTITY: Final = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([a-zA-Z]*)\s*")
_MAX_SHOWN: Final = 80
"""Maximum number of characters of a value that a message quotes."""


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as "64GiB", "1.5 TB" or 4096; raise ConfigError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{shown(text)} is not a size; write a number of bytes or a number with a unit, such as 64GiB or"
            " 500MB"
        )
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def parse_duration(text: str | float) -> float:
    """Return the seconds of a duration such as "250ms", "1.5h" or 2; raise ConfigError for anything else."""
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < math.inf:
        # float() fails for an int from about 1e308 on. Every duration from 2**63 seconds on is infinite.
        return float(text) if text < 2**63 else math.inf
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    unit = _DURATION_UNITS.get(match[2].lower() or "s") if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{shown(text)} is not a duration; write seconds or a number with a unit, such as 250ms, 2s or 1h"
        )
    return float(match[1]) * unit


def exact_size(nbytes: int) -> str:
    """Format bytes as a setting, such as "64GiB" or "4097"; `parse_size` returns the same number again."""
    for unit in reversed(_BINARY_UNITS[1:-1]):
        if nbytes and nbytes % _SIZE_UNITS[unit.lower()] == 0:
            return f"{nbytes // _SIZE_UNITS[unit.lower()]}{unit}"
    return str(nbytes)


def exact_duration(seconds: float) -> str:
    """Format seconds as a setting, such as "250ms"; `parse_duration` returns the same number again."""
    for unit in ("h", "min", "s", "ms", "us"):
        count = round(seconds / _DURATION_UNITS[unit])
        if count and count * _DURATION_UNITS[unit] == seconds:
            return f"{count}{unit}"
    return f"{Decimal(repr(seconds)):f}s"


def readable_size(nbytes: int) -> str:
    """Format bytes for reading, such as "4.0 KiB"."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_BINARY_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_BINARY_UNITS[unit]}" if unit else f"{nbytes} B"


def readable_age(seconds: float | None) -> str:
    """Format an age in seconds for reading, such as "3 min"; "-" if it is not known."""
    if seconds is None:
        return "-"
    # The largest unit of which there are at least two: 119 s stays "119 s", and 120 s becomes "2 min".
    unit, factor = next((unit for unit in _AGE_UNITS if seconds >= 2 * unit[1]), _AGE_UNITS[-1])
    return f"{max(0.0, seconds) / factor:.0f} {unit}"


def readable_seconds(seconds: float) -> str:
    """Format a duration, which may be negative, such as "12.5 s" or "3.2 h"."""
    return f"{seconds / 3600:,.1f} h" if abs(seconds) >= 2 * 3600 else f"{seconds:,.1f} s"


def shown(value: object) -> str:
    """Return the `repr` of a value for a message, cut if it is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int with more digits than Python converts to text
        return "a number with thousands of digits"
    except RecursionError:
        return f"a {type(value).__name__} of thousands of levels"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
