"""Replacements for packages that SGLang imports, for a machine without CUDA; and fixtures.

SGLang's host pools import model configs, and these import torchvision for images, which no test here
uses. The real torchvision needs a version of torch of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STAND_IN = Path(__file__).parents[2] / "servers/sglang/stand_ins/torchvision/__init__.py"

if importlib.util.find_spec("sglang") is not None and importlib.util.find_spec("torchvision") is None:
    spec = importlib.util.spec_from_file_location("torchvision", STAND_IN)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["torchvision"] = stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Close the backends that the test has left open."""
    from tests.engines.sglang import rig  # late: it imports SGLang

    yield
    while rig.OPENED:
        rig.OPENED.pop().close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A process group of one, in a process that is a rank of one."""
    from tests.engines.sglang import rig  # late, as above

    with rig.on_a_cpu(), rig.group_of_one(tmp_path) as group:
        yield group


@pytest.fixture
def engine(group: Any) -> Iterator[Any]:
    """SGLang's controller, to which the test attaches a store."""
    from tests.engines.sglang import rig  # late, as above

    made = rig.Engine(group)
    yield made
    made.detach()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store for one process."""
    return f"file://{tmp_path}/store?capacity=64MiB"


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """A store for several."""
    return f"lmdb://{tmp_path}/shared?capacity=64MiB"
