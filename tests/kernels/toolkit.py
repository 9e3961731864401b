"""Compilers that may be at hand, and how to call them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
HERE = Path(__file__).parent
SOURCES = Path(str(files("tiercache_kernels"))) / "csrc"


def _packaged(package: str, path: str) -> str | None:
    """Return a file of one of NVIDIA's packages; None if the package is not installed."""
    # Whether the file is there is not asked: a package that lacks it is a failure, and no reason to skip.
    try:
        return str(distribution(package).locate_file(path))
    except PackageNotFoundError:
        return None


NVCC = _packaged("nvidia-cuda-nvcc", "nvidia/cu13/bin/nvcc") or shutil.which("nvcc")
NVRTC = _packaged("nvidia-cuda-nvrtc", "nvidia/cu13/lib/libnvrtc.so.13")
GXX = shutil.which("g++")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc; make test-kernels installs it")
needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++ on the path")


def compiled(command: list[str]) -> str:
    """Run a compiler. Returns what it says, which is also what the test fails with."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}\n{said}"
    return said


def on_a_thread(work: Callable[[], T]) -> T:
    """Work on a thread that has never used a device; what it raises is raised here."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def build(folder: Path, *defines: str) -> Path:
    """The stand-in of `driver.c` as a library, compiled against NVIDIA's header."""
    # nvcc knows where its headers are, hands C to the host's compiler, and needs no runtime for it.
    library = folder / f"driver{'_'.join(defines)}.so"
    assert NVCC
    command = [
        NVCC, "-shared", "-cudart", "none", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror",
        *(f"-D{d}" for d in defines),
    ]  # fmt: skip
    compiled([*command, "-o", str(library), str(HERE / "driver.c")])
    return library
