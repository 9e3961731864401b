"""One pool for the tests of a module, in a network namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage_backends.mooncake.rig import Pool, own_network, require


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    require()
    with own_network(), Pool() as started:
        yield started
