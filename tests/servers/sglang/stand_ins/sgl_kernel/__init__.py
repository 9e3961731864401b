"""SGLang's kernels for a CPU, as far as a tiny model needs them; the real package is built for CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    rows: Any, table: Any, starts: Any, ends: Any, slots: Any, width: int
) -> None:
    """Write the slots of several requests, one after the other, into their rows of the table."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=False):
        table[row, start:end] = slots[at : at + end - start].to(table.dtype)
        at += end - start


def no_stand_in(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return fail


__getattr__ = no_stand_in


class _ScalarTypes:
    """Names of number formats, each of which is itself."""

    def __getattr__(self, name: str) -> str:
        return name


for _part in ("elementwise", "flash_attn", "kvcacheio", "quantization", "utils", "scalar_type"):
    _module = ModuleType(f"sgl_kernel.{_part}")
    _module.__spec__ = ModuleSpec(_module.__name__, None)
    _module.__getattr__ = no_stand_in
    sys.modules[_module.__name__] = _module
sys.modules["sgl_kernel.scalar_type"].scalar_types = _ScalarTypes()
sys.modules["sgl_kernel.scalar_type"].ScalarType = str
