"""Fixtures of the controller's tests; no test leaves threads behind."""

import pytest

from tests.controller.harness import Engine, all_is_free
from tests.controller.parking import options
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


@pytest.fixture
def rig():
    """Make engines for parked requests; behind the test nobody holds anything on those that are open."""
    engines = []

    def make(*args, **kwargs):
        engines.append(Engine(*args, **{"blocks": 40, "options": options(), **kwargs}))
        return engines[-1]

    yield make
    for engine in engines:
        if not engine.controller._closed:  # private: a closed controller refuses every other question
            all_is_free(engine)
