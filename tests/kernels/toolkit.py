"""Compilers that may be at hand, and how to call them."""

from __future__ import annotations

import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = Path(str(files("tiercache_kernels"))) / "csrc"
NVCC = shutil.which("nvcc")
GXX = shutil.which("g++")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc on the path")
needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++ on the path")


def compiled(command: list[str]) -> str:
    """Run a compiler. Returns what it says, which is also what the test fails with."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}\n{said}"
    return said
