"""No test leaves threads behind."""

import pytest

from tests.controller.harness import Engine


@pytest.fixture(autouse=True)
def _close_what_was_opened():
    yield
    while Engine.opened:
        Engine.opened.pop().close(deadline=1.0)
