"""Formatting of figures. A figure that is missing or not finite is written as a dash."""

from __future__ import annotations

import math
from typing import Final

DASH: Final = "\u2013"
_NARROW: Final = "\u202f"
"""Narrow no-break space between a figure and its unit."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def finite(value: float | None) -> float | None:
    """Return `value`, or None where it is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def percent(value: float | None) -> str:
    """Write a fraction as in 78.1 %."""
    known = finite(value)
    return DASH if known is None else f"{_signless(known * 100, 1)}{_NARROW}%"


def short_percent(value: float) -> str:
    """Write a fraction without needless decimals: 5 %, 2.5 %."""
    return f"{value * 100:.3g}{_NARROW}%" if value < 10 else f"{value * 100:,.0f}{_NARROW}%"


def points(value: float | None) -> str:
    """Write a difference of two fractions in percentage points, without a sign."""
    known = finite(value)
    return DASH if known is None else f"{abs(known) * 100:.1f}{_NARROW}pp"


def size(value: float | None) -> str:
    """Write bytes with three digits: 1.23 TiB, 12.3 GiB."""
    known = finite(value)
    if known is None:
        return DASH
    unit = 0
    # 1,023.6 would be written as 1,024 of the smaller unit.
    while abs(known) >= 999.5 and unit < len(_UNITS) - 1:
        known, unit = known / 1024, unit + 1
    decimals = 0 if not unit or abs(known) >= 99.95 else 1 if abs(known) >= 9.995 else 2
    return f"{known:,.{decimals}f}{_NARROW}{_UNITS[unit]}"


def milliseconds(value: float | None) -> str:
    """Write a time in milliseconds as in 1,420 ms or 3.2 ms."""
    known = finite(value)
    return DASH if known is None else f"{known:,.{1 if abs(known) < 9.95 else 0}f}{_NARROW}ms"


def seconds(value: float | None) -> str:
    """Write a time in seconds as in 12.3 s."""
    known = finite(value)
    return DASH if known is None else f"{known:,.1f}{_NARROW}s"


def count(value: float | None) -> str:
    """Write a whole number as in 12,031."""
    known = finite(value)
    return DASH if known is None else f"{known:,.0f}"


def short_count(value: float) -> str:
    """Write a number at an axis: 800, 12k, 3.5M."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            scaled = value / (1e3 if letter == "k" else unit)
            return f"{scaled:.3g}{letter}" if scaled < 1000 else f"{scaled:,.0f}{letter}"
    return f"{value:,.0f}"


def number(value: float | None) -> str:
    """Write a figure of an unknown unit."""
    known = finite(value)
    return DASH if known is None else f"{known:,.6g}"


def shortened(name: str, longest: int) -> str:
    """Shorten a name to `longest` letters, so that it fits beside a plot."""
    return name if len(name) <= longest else f"{name[: longest - 1]}\u2026"


def listed(names: list[str]) -> str:
    """Write names as a part of a sentence: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def counted(many: int, one: str, several: str = "") -> str:
    """Write a number and its noun: 1 policy, 3 policies."""
    return f"{many:,} {one if many == 1 else several or one + 's'}"


def _signless(value: float, decimals: int) -> str:
    written = f"{value:,.{decimals}f}"
    # A value such as -0.04 would be written as -0.0; the minus sign is dropped.
    return written.lstrip("-") if float(written.replace(",", "")) == 0 else written
