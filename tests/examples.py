"""Division of examples and parameters between `make test` and `make test-slow`, which runs the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

QUICK = 20
THOROUGH = 100
"""Examples of a test that names no number, in `make test` and in `make test-slow`."""


def example_count(thorough: int) -> int:
    """Return how many examples a test draws that draws `thorough` of them in `make test-slow`."""
    return max(2, thorough * settings.default.max_examples // THOROUGH)


def slow_after(quick: int, values: Iterable[Any]) -> list[Any]:
    """Return a test's parameters; those after the first `quick` are slow, as they repeat the same proof."""
    return [value if n < quick else _slow(value) for n, value in enumerate(values)]


def _slow(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return value._replace(marks=[*value.marks, pytest.mark.slow])
    row = value if isinstance(value, tuple) else (value,)
    return pytest.param(*row, marks=pytest.mark.slow)
