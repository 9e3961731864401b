"""How figures are written. A figure that is missing or not finite is a dash."""

from __future__ import annotations

import math
from typing import Final

DASH: Final = "\u2013"
_NARROW: Final = "\u202f"
"""A narrow space at which no line is broken, between a figure and its unit."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def finite(value: float | None) -> float | None:
    """`value`, or None where it is no number to calculate with."""
    return float(value) if value is not None and math.isfinite(value) else None


def percent(value: float | None) -> str:
    """A fraction, as 78.1 %."""
    known = finite(value)
    return DASH if known is None else f"{_signless(known * 100, 1)}{_NARROW}%"


def short_percent(value: float) -> str:
    """A fraction without decimals that say nothing: 5 %, 2.5 %."""
    return f"{value * 100:.3g}{_NARROW}%" if value < 10 else f"{value * 100:,.0f}{_NARROW}%"


def points(value: float | None) -> str:
    """A difference of two fractions, in percentage points, without a sign."""
    known = finite(value)
    return DASH if known is None else f"{abs(known) * 100:.1f}{_NARROW}pp"


def size(value: float | None) -> str:
    """Bytes, with three digits: 1.23 TiB, 12.3 GiB."""
    known = finite(value)
    if known is None:
        return DASH
    unit = 0
    # 1,023.6 would be written as 1024, in the unit below.
    while abs(known) >= 999.5 and unit < len(_UNITS) - 1:
        known, unit = known / 1024, unit + 1
    decimals = 0 if not unit or abs(known) >= 99.95 else 1 if abs(known) >= 9.995 else 2
    return f"{known:,.{decimals}f}{_NARROW}{_UNITS[unit]}"


def milliseconds(value: float | None) -> str:
    """A time, as 1,420 ms or 3.2 ms."""
    known = finite(value)
    return DASH if known is None else f"{known:,.{1 if abs(known) < 9.95 else 0}f}{_NARROW}ms"


def seconds(value: float | None) -> str:
    """A time, as 12.3 s."""
    known = finite(value)
    return DASH if known is None else f"{known:,.1f}{_NARROW}s"


def count(value: float | None) -> str:
    """A whole number, as 12,031."""
    known = finite(value)
    return DASH if known is None else f"{known:,.0f}"


def short_count(value: float) -> str:
    """A number at an axis: 800, 12k, 3.5M."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            scaled = value / (1e3 if letter == "k" else unit)
            return f"{scaled:.3g}{letter}" if scaled < 1000 else f"{scaled:,.0f}{letter}"
    return f"{value:,.0f}"


def number(value: float | None) -> str:
    """A figure of an unknown unit."""
    known = finite(value)
    return DASH if known is None else f"{known:,.6g}"


def shortened(name: str, longest: int) -> str:
    """A name that fits beside a plot."""
    return name if len(name) <= longest else f"{name[: longest - 1]}\u2026"


def listed(names: list[str]) -> str:
    """Names as a part of a sentence: a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def counted(many: int, one: str, several: str = "") -> str:
    """A noun and how many of it: 1 policy, 3 policies."""
    return f"{many:,} {one if many == 1 else several or one + 's'}"


def _signless(value: float, decimals: int) -> str:
    written = f"{value:,.{decimals}f}"
    # -0.04 is no negative percentage.
    return written.lstrip("-") if float(written.replace(",", "")) == 0 else written
