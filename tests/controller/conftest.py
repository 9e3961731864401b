"""Fixtures of the controller's tests; no test leaves threads behind."""

import pytest

from tests.controller.harness import Engine
from tiercache.storage.registry import open_backend


@pytest.fixture(autouse=True)
def _close_what_was_opened():
    yield
    while Engine.opened:
        Engine.opened.pop().close(deadline=1.0)


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    return open_backend(
        "memory://" if request.param == "memory" else f"file://{tmp_path}/store?capacity=16MiB"
    )
