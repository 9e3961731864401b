"""The copy kernel's body, built by a host compiler, moves the bytes that its twin moves, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.host_cases import CASES
from tests.kernels.toolkit import GXX, HERE, SOURCES, compiled, needs_gxx

# A wrongly aligned vector is a fault on a GPU, but not on every CPU: the sanitizer makes it one.
FLAGS = [
    "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing",
    "-shared", "-fPIC",
]  # fmt: skip
SANITIZE = ["-fsanitize=alignment,bounds,shift", "-fsanitize-undefined-trap-on-error"]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert GXX
    built = tmp_path_factory.mktemp("host_grid") / "host_grid.so"
    compiled([GXX, *FLAGS, *SANITIZE, f"-I{SOURCES}", "-o", str(built), str(HERE / "host_grid.cpp")])
    return built


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_the_body_copies_as_its_twin_does(case: str, library: Path) -> None:
    command = [sys.executable, str(HERE / "host_cases.py"), str(library), case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit {done.returncode} (negative: killed by that signal)\n{done.stderr}"
