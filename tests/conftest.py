"""Which tests need the machine for themselves, and what every test may rely on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

ALONE = (
    "daemon/test_access.py",
    "daemon/test_attach.py",
    "daemon/test_floods.py",
    "daemon/test_fuzz.py",
    "daemon/test_hostile.py",
    "daemon/test_metrics.py",
    "daemon/test_uids.py",
    "grpc/test_outage.py",
    "grpc/test_embargo.py",
    "transfer/test_calibration.py",
    "transfer/test_cuda",
    "transfer/test_fences.py",
    "transfer/test_watch.py",
    "worker/test_cuda.py",
    "cli/test_serve.py",
    "cli/test_store_live.py",
    "cli/test_demo.py",
)
"""Beginnings of the paths of tests with daemons, devices or processes that have deadlines to meet, which others beside them make late."""

HERE = Path(__file__).parent

# What a change has broken shows in every run, or in none; `ARGS=--hypothesis-profile=default` draws anew each time.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# Two processes of tests whose threads of torch spin for each other, on two cores, take twice as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what is behind `&` with Ctrl-C ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).as_posix().startswith(ALONE):
            item.add_marker("alone")
