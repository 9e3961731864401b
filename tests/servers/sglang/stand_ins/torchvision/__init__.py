"""SGLang imports this for images, of which the tests have none; the real one needs a torch of its own."""

from __future__ import annotations

import enum
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0"


class InterpolationMode(enum.Enum):
    """Names that configurations of vision models refer to."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> object:
    """Functions that are imported by name and never called."""
    if name.startswith("__"):
        raise AttributeError(name)
    return None


for _part in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _module = ModuleType(f"torchvision.{_part}")
    _module.__spec__ = ModuleSpec(_module.__name__, None, is_package=True)
    _module.__path__ = []
    _module.__getattr__ = __getattr__
    _module.InterpolationMode = InterpolationMode
    sys.modules[_module.__name__] = _module
    _parent, _, _last = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
