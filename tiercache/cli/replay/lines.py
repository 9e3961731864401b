"""Conversion of a result to JSON."""

from __future__ import annotations

import math
from typing import Any

from tiercache.replay.results import Result


def record(result: Result) -> dict[str, Any]:
    """Return the row of a result without its course over time, which only the report uses; numbers that are not finite become None."""
    row = result.row()
    del row["over_time"]
    return {name: _finite(value) for name, value in row.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
