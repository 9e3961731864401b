"""The sources compile for the cards they are for. Nothing is run."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from shutil import copytree

import pytest
from tiercache_kernels.kernel import NAME, OPTIONS, THREADS, source

from tests.kernels.toolkit import NVCC, NVRTC, SOURCES, compiled, needs_nvcc

ARCHITECTURES = ["80", "90", "100"]
NVRTCS = [NVRTC] if NVRTC else ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
REGISTERS = 65_536 // 2 // THREADS
"""At most half of one multiprocessor's."""


def cubin(path: Path, architecture: str, folder: Path) -> str:
    """Compile a source with warnings as errors. Returns what the compiler says of registers and spills."""
    assert NVCC
    strict = ["-std=c++17", "-Werror", "all-warnings", "-Xptxas", "-v,-warn-spills"]
    out = str(folder / "out.cubin")
    return compiled([NVCC, "-cubin", f"-arch=sm_{architecture}", *strict, "-o", out, str(path)])


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.cu")), ids=lambda p: p.name)
def test_no_warning_and_no_spill(path: Path, architecture: str, tmp_path: Path) -> None:
    said = cubin(path, architecture, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    used = re.search(r"Used (\d+) registers", said)
    assert used
    assert int(used[1]) <= REGISTERS


@needs_nvcc
@pytest.mark.parametrize(("fault", "says"), [("int unused = 0;", "unused"), ("nonsense;", "nonsense")])
def test_a_warning_or_an_error_fails(fault: str, says: str, tmp_path: Path) -> None:
    copytree(SOURCES, tmp_path / "csrc")
    kernel = tmp_path / "csrc/copy_segments.cu"
    call = "tiercache::copy_segments(table"
    kernel.write_text(kernel.read_text().replace(call, f"{fault} {call}"))
    with pytest.raises(AssertionError, match=says):
        cubin(kernel, "90", tmp_path)


def nvrtc() -> ctypes.CDLL:
    for name in NVRTCS:
        try:
            return ctypes.CDLL(name)
        except OSError:
            if name == NVRTC:
                raise
    pytest.skip(f"none of {', '.join(NVRTCS)} can be loaded; make test-kernels installs one")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
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
    assert (code, log.value) == (0, b""), log.value.decode()
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, text)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert f".entry {NAME}(" in text.value.decode()
