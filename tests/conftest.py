"""The order of the tests, and what every test may rely on."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.examples import QUICK, THOROUGH
from tests.order import ALONE, LONGEST

HERE = Path(__file__).parent

# What a change has broken shows in every run, or in none; `ARGS=--hypothesis-profile=default` draws anew each
# time. What an example takes on a busy machine is no failure.
settings.register_profile("quick", derandomize=True, max_examples=QUICK, deadline=None)
settings.register_profile("thorough", derandomize=True, max_examples=THOROUGH, deadline=None)
settings.load_profile("quick")

# Threads of torch that share small products wait for each other: on a busy CPU that takes ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what is behind `&` with Ctrl-C ignored, and every process that a test starts would inherit
# that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests, and no garbage beside it."""
    # What is collected, 700,000 objects, stays until the end. To walk over it again and again takes a third
    # of a first collecting, in each process of tests, and half a second whenever a test asks for it.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs alone, and put the longest files first."""
    order = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(_path(item), len(order)))
    for item in items:
        if _path(item) in ALONE:
            item.add_marker("alone")


def _path(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).as_posix()
