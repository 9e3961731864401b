"""Figures as text; a figure that is missing or not finite becomes a dash."""

from __future__ import annotations

import math
import unicodedata
from typing import Final

DASH: Final = "\u2013"
_NARROW: Final = "\u202f"
"""Narrow no-break space between a figure and its unit."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_BIDIRECTIONAL: Final = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
"""Unicode's names of the kinds of characters that change the direction of writing."""


def finite(value: float | None) -> float | None:
    """Return `value`, or None where it is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def percent(value: float | None) -> str:
    """Write a fraction in percent, with one decimal: 78.1 %."""
    known = finite(value)
    return DASH if known is None else f"{_signless(known * 100, 1)}{_NARROW}%"


def short_percent(value: float) -> str:
    """Write a fraction in percent, without needless decimals: 5 %, 2.5 %."""
    return f"{value * 100:.3g}{_NARROW}%" if value < 10 else f"{value * 100:,.0f}{_NARROW}%"


def points(value: float | None) -> str:
    """Write a difference of two fractions in percentage points, without a sign."""
    known = finite(value)
    return DASH if known is None else f"{abs(known) * 100:.1f}{_NARROW}pp"


def size(value: float | None) -> str:
    """Write a number of bytes with three digits and a unit: 1.23 TiB, 12.3 GiB."""
    known = finite(value)
    if known is None:
        return DASH
    unit, factor = unit_of(known)
    scaled = known / factor
    # Rounding can add a digit: with two decimals, 9.995 would become 10.00, which has four digits.
    decimals = 0 if factor == 1 or abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:,.{decimals}f}{_NARROW}{unit}"


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
    return DASH if known is None else f"{known:,.{1 if abs(known) < 9.95 else 0}f}{_NARROW}ms"


def seconds(value: float | None) -> str:
    """Write a time given in seconds: 12.3 s."""
    known = finite(value)
    return DASH if known is None else f"{known:,.1f}{_NARROW}s"


def rate(value: float | None) -> str:
    """Write a number per second, with three digits: 2.35/s."""
    known = finite(value)
    return DASH if known is None else f"{ratio(known)}/s"


def count(value: float | None) -> str:
    """Write a number without decimals: 12,031."""
    known = finite(value)
    return DASH if known is None else f"{known:,.0f}"


def number(value: float | None) -> str:
    """Write a figure whose unit is not known, with up to six digits."""
    known = finite(value)
    return DASH if known is None else f"{known:,.6g}"


def ratio(value: float | None) -> str:
    """Write a ratio with two decimals, or as many as three digits need: 0.85, 12.0, 310."""
    known = finite(value)
    if known is None:
        return DASH
    return f"{known:,.{0 if abs(known) >= 99.95 else 1 if abs(known) >= 9.995 else 2}f}"


def counted(many: int, one: str, several: str = "") -> str:
    """Write a number and its noun: 1 policy, 3 policies."""
    return f"{many:,} {one if many == 1 else several or one + 's'}"


def readable(text: str) -> str:
    """Return text in which U+FFFD stands for each character that cannot be shown.

    Control characters, surrogates and characters that change the direction of writing cannot be shown. Names
    of traces may contain them.
    """
    return "".join("\ufffd" if _is_unreadable(character) else character for character in text)


def _is_unreadable(character: str) -> bool:
    # Printable ASCII, which is nearly all text, needs no lookup in the Unicode tables.
    if " " <= character <= "~":
        return False
    if unicodedata.category(character) in {"Cc", "Cs"}:
        return True
    return unicodedata.bidirectional(character) in _BIDIRECTIONAL


def _signless(value: float, decimals: int) -> str:
    written = f"{value:,.{decimals}f}"
    # With one decimal, -0.04 would be written as -0.0. The minus sign is dropped.
    return written.lstrip("-") if float(written.replace(",", "")) == 0 else written
