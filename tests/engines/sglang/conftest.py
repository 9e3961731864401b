"""Replacements for packages that SGLang imports, for a machine without CUDA; and fixtures.

SGLang's host pools import model configs, and these import torchvision for images, which no test here
uses. The real torchvision needs a version of torch of its own.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class InterpolationMode(enum.Enum):
    """Names that configs of vision models refer to."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _nothing(name: str) -> object:
    """Functions that are imported by name and never called."""
    if name.startswith("__"):
        raise AttributeError(name)
    return None


def _stub(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__version__ = "0"
    module.__getattr__ = _nothing
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


if importlib.util.find_spec("sglang") is not None and importlib.util.find_spec("torchvision") is None:
    for part in ("", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        _stub("torchvision" + part).InterpolationMode = InterpolationMode  # type: ignore[attr-defined]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """A process group of one, in a process that is a rank of one."""
    from tests.engines.sglang import rig  # late: it imports SGLang

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
