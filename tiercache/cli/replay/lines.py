"""A result as a line of JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from tiercache.replay.results import Result


def line(result: Result) -> str:
    """The row, without the course of the run, which is for the report; what is no number is null."""
    row = result.row()
    del row["over_time"]
    return json.dumps(_finite(row), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
