"""Fixtures of the tests of buckets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage_backends.s3.proxy import Proxy


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy before the service, which a test lets fail."""
    with Proxy() as made:
        yield made
