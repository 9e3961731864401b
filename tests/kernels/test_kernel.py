"""`CopyKernel`'s calls of CuPy, with a stand-in that has the few names that it uses."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tiercache_kernels.driver import Unavailable
from tiercache_kernels.kernel import NAME, OPTIONS, THREADS, CopyKernel, source

TABLE = 0x7F00_0000_0020
STREAM = 0x5500_0000_0010


@dataclass
class CuPy:
    compiled: list[tuple[str, tuple[str, ...], str]] = field(default_factory=list)
    launched: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], int]] = field(
        default_factory=list
    )

    def raw_module(self, *, code: str, options: tuple[str, ...]) -> Any:
        def get_function(name: str) -> Any:
            self.compiled.append((code, options, name))
            return lambda grid, block, args, *, stream: self.launched.append((grid, block, args, stream.ptr))

        module = ModuleType("raw")
        module.get_function = get_function  # type: ignore[attr-defined]
        return module


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> CuPy:
    stand_in, module = CuPy(), ModuleType("cupy")
    module.RawModule = stand_in.raw_module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    return stand_in


def test_it_is_compiled_at_construction(cupy: CuPy) -> None:
    CopyKernel()
    assert cupy.compiled == [(source(), OPTIONS, NAME)]


@pytest.mark.parametrize(("chunks", "blocks", "grid"), [(1000, 16, 16), (3, 16, 3), (16, 16, 16)])
def test_the_grid_is_capped(cupy: CuPy, chunks: int, blocks: int, grid: int) -> None:
    CopyKernel().launch(TABLE, 2, chunks, blocks, STREAM)
    [(launched, block, args, stream)] = cupy.launched
    assert (launched, block, stream) == ((grid,), (THREADS,), STREAM)
    assert args == (TABLE, 2)
    assert [type(arg) for arg in args] == [np.uint64, np.uint64]


def test_no_chunks_make_no_launch(cupy: CuPy) -> None:
    CopyKernel().launch(TABLE, 0, 0, 16, STREAM)
    assert not cupy.launched


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Unavailable, match="needs CuPy"):
        CopyKernel()
