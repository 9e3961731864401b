"""Which tests need the machine for themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

ALONE = ("daemon", "grpc", "transfer", "worker/test_cuda.py", "cli/test_serve.py", "cli/test_store_live.py", "cli/test_demo.py")
"""Folders and files with daemons, devices or processes that have deadlines to meet: another test beside them can make them late."""

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).as_posix().startswith(ALONE):
            item.add_marker("alone")
