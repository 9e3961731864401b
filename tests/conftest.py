"""The order of the tests, and what every test may rely on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.examples import QUICK, THOROUGH
from tests.order import ALONE, LONGEST

HERE = Path(__file__).parent

# What a change has broken shows in every run, or in none; `ARGS=--hypothesis-profile=default` draws anew each
# time.
settings.register_profile("quick", derandomize=True, max_examples=QUICK)
settings.register_profile("thorough", derandomize=True, max_examples=THOROUGH)
settings.load_profile("quick")

# Threads of torch that share small products wait for each other: on a busy CPU that takes ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what is behind `&` with Ctrl-C ignored, and every process that a test starts would inherit
# that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs alone, and put the longest files first."""
    order = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(_path(item), len(order)))
    for item in items:
        if _path(item) in ALONE:
            item.add_marker("alone")


def _path(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).as_posix()
