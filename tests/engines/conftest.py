"""Tests under inference engines, which `make test-engines` installs, each into an environment of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ABSENT = [name for name in ("dynamo", "sglang", "vllm") if find_spec(name) is None]
collect_ignore_glob = [f"{name}/test_*.py" for name in ABSENT]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, so that they run by `-m integration` only."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("integration")
