"""A result as JSON has it."""

from __future__ import annotations

import math
from typing import Any

from tiercache.replay.results import Result


def record(result: Result) -> dict[str, Any]:
    """The row, without the course of the run, which is for the report; what is no number is null."""
    row = result.row()
    del row["over_time"]
    return {name: _finite(value) for name, value in row.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
