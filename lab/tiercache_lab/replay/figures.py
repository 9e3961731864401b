"""Figures as text; a figure that is missing or not finite becomes a dash."""

from __future__ import annotations

import math
from typing import Final

DASH: Final = "\u2013"
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def finite(value: float | None) -> float | None:
    """Return `value`, or None where it is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def percent(value: float | None) -> str:
    """Write a fraction in percent, with one decimal: 78.1 %."""
    known = finite(value)
    # With one decimal, -0.0004 would be written as -0.0. Adding 0.0 drops the sign.
    return DASH if known is None else f"{round(known * 100, 1) + 0.0:,.1f} %"


def size(value: float | None) -> str:
    """Write a number of bytes with three digits and a unit: 1.23 TiB, 12.3 GiB."""
    known = finite(value)
    if known is None:
        return DASH
    unit, factor = unit_of(known)
    return f"{_three_digits(known / factor, 0 if factor == 1 else 2)} {unit}"


def unit_of(value: float) -> tuple[str, int]:
    """Return the unit in which `value` bytes have at most three digits before the point.

    The second result is the size of this unit in bytes.
    """
    unit = 0
    # The limit is 999.5 and not 1024, so that no figure has four digits: 1,023.6 would become 1,024.
    while abs(value) / 1024**unit >= 999.5 and unit < len(_UNITS) - 1:
        unit += 1
    return _UNITS[unit], 1024**unit


def milliseconds(value: float | None) -> str:
    """Write a time given in milliseconds: 1,420 ms, 3.2 ms."""
    known = finite(value)
    return DASH if known is None else f"{known:,.{1 if abs(known) < 9.95 else 0}f} ms"


def rate(value: float | None) -> str:
    """Write a number per second, with three digits: 2.35/s."""
    known = finite(value)
    return DASH if known is None else f"{ratio(known)}/s"


def ratio(value: float | None) -> str:
    """Write a ratio with two decimals, or as many as three digits need: 0.85, 12.0, 310."""
    known = finite(value)
    return DASH if known is None else _three_digits(known, 2)


def counted(many: int, one: str) -> str:
    """Write a number and its noun: 1 run, 3 runs."""
    return f"{many:,} {one if many == 1 else one + 's'}"


def _three_digits(value: float, decimals: int) -> str:
    # Rounding can add a digit: with two decimals, 9.995 would become 10.00, which has four digits.
    fitting = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{min(decimals, fitting)}f}"
