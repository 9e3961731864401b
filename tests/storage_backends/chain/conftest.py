"""Fixtures of the tests of chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tiercache_backends.chain import TierChain

from tests.storage_backends.chain import stores


@pytest.fixture
def chain_over() -> Iterator[Callable[..., TierChain]]:
    """Make a chain of open stores (`stores.chain_over`), which is closed at the end of the test."""
    with ExitStack() as made:

        def make(*opened: Any, **more: Any) -> TierChain:
            return made.enter_context(stores.chain_over(*opened, **more))

        yield make
