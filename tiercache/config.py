"""How settings are written: sizes ("64GiB") and durations ("250ms")."""

from __future__ import annotations

import math
import re
from typing import Final

from tiercache.errors import ConfigError

_SIZE_UNITS: Final = {
    "": 1, "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
}  # fmt: skip
_DURATION_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes of a size such as "64GiB", "1.5 TB" or 4096; raises ConfigError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a size; write a number of bytes or a number with a unit, such as 64GiB or 500MB")
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


def parse_duration(text: str | float) -> float:
    """Seconds of a duration such as "250ms", "2s", "1.5h" or a plain number of seconds; raises ConfigError for anything else."""
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < math.inf:
        return float(text)
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    unit = _DURATION_UNITS.get(match[2].lower() or "s") if match else None
    if match is None or unit is None:
        raise ConfigError(f"{text!r} is not a duration; write seconds or a number with a unit, such as 250ms, 2s or 1h")
    return float(match[1]) * unit
