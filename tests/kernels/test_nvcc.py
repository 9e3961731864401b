"""The sources compile for the cards they are for. Nothing is run."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from tiercache_kernels.kernel import NAME, OPTIONS, THREADS, source

from tests.kernels.toolkit import NVCC, SOURCES, compiled, needs_nvcc

ARCHITECTURES = ["80", "90", "100"]
NVRTC = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
REGISTERS = 65_536 // 2 // THREADS
"""At most half of one multiprocessor's."""


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.cu")), ids=lambda p: p.name)
def test_no_warning_and_no_spill(path: Path, architecture: str, tmp_path: Path) -> None:
    assert NVCC
    command = [
        NVCC,
        "-cubin",
        f"-arch=sm_{architecture}",
        "-std=c++17",
        "-Werror",
        "all-warnings",
        "-Xptxas",
        "-v,-warn-spills",
    ]
    said = compiled([*command, "-o", str(tmp_path / "out.cubin"), str(path)])
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    used = re.search(r"Used (\d+) registers", said)
    assert used
    assert int(used[1]) <= REGISTERS


def nvrtc() -> ctypes.CDLL:
    for name in NVRTC:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip(f"none of {', '.join(NVRTC)} can be loaded")


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_the_one_text_compiles_without_any_header(architecture: str) -> None:
    library, program = nvrtc(), ctypes.c_void_p()
    assert (
        library.nvrtcCreateProgram(
            ctypes.byref(program), source().encode(), b"copy_segments.cu", 0, None, None
        )
        == 0
    )
    options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture=compute_{architecture}")]
    code = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert code == 0, log.value.decode()
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, text)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert f".entry {NAME}(" in text.value.decode()
