"""The examples in the docstrings of the public entrances, run as they stand."""

from __future__ import annotations

import doctest
import sys

import pytest

import tiercache
from tiercache.index import CheckpointRules
from tiercache.policy import Policy
from tiercache.storage import StorageBackend

ENTRANCES = {
    name: getattr(tiercache, name) for name in ("HybridCacheController", "HybridStorage", "open_backend")
} | {"CheckpointRules": CheckpointRules, "Policy": Policy, "StorageBackend": StorageBackend}


def run(entrance: object) -> None:
    """Run the examples of a docstring, with the names of its module."""
    module = vars(sys.modules[entrance.__module__])
    [test] = doctest.DocTestFinder(recurse=False).find(entrance, globs=dict(module))
    said: list[str] = []
    found = doctest.DocTestRunner().run(test, out=said.append)
    assert found.attempted
    assert not found.failed, "".join(said)


@pytest.mark.parametrize("name", ENTRANCES)
def test_the_example_of_an_entrance_is_true(name: str) -> None:
    run(ENTRANCES[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_example_of_the_worker_is_true() -> None:
    run(tiercache.Worker)
