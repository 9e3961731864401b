"""Run the blocks of a page, as a reader does who has one terminal for each program that goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.docs.blocks import Block
from tests.docs.pages import ROOT
from tests.processes import free_port

GUARD = 240
"""Seconds that a block may take."""
MARKS = {"<N>": r"[\d.,]+", "<SIZE>": r"[\d.,]+ ?(?:[KMGT]i?)?B", "<TIME>": r"[\d.,]+ ?(?:[mu]?s|min|h|d)"}
"""Patterns of the values that may differ in an output of a page, by their marks."""
CHECKOUT = ("examples", "deploy", "tests")
"""Folders of the checkout that the commands of a page name."""


class Reader:
    """A reader of one page: a folder that looks like a checkout, an environment, and programs that go on."""

    def __init__(self, home: Path) -> None:
        for name in CHECKOUT:
            (home / name).symlink_to(ROOT / name)
        self._home = home
        self._folder = str(home)
        self._program = ""  # all programs of the page, which go on from each other
        self._instead: list[tuple[str, str]] = []
        self._going: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._said = ""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERCACHE_")}
        # One thread of torch, because threads that spin for each other take longer on a busy machine.
        fixed = {
            "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self._environment = kept | fixed | {"PATH": path, "HOME": str(home)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for process, _ in self._going:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(GUARD)

    def read(self, page: Iterable[Block]) -> None:
        """Do what each block says; AssertionError names the block that does not do as the page says."""
        for block in page:
            if block.reason is None:
                self._read(block)
        if self._program:
            file = self._home / ".program.py"
            file.write_text(f"from pathlib import Path\nfrom tests.docs import given\n{self._program}")
            self._run(block, f"PYTHONPATH=$PWD python {file}", 0)

    def _read(self, block: Block) -> None:
        text = self._replaced(block.text)
        match block.language, block.verb:
            case "", "ports":
                self._instead += [(port.strip(" ,"), str(free_port())) for port in block.rest.split()]
            case "", "write":
                old, _, new = block.rest.partition(" as ")
                self._instead.append((old.strip(), new.strip().replace("HERE", str(self._home))))
            case "", "first":
                self._run(block, block.rest.replace("HERE", str(self._home)), 0)
            case "", "stop":
                self._stop(block)
            case "sh", "background":
                self._start(block, text)
            case "sh", "needs":
                if shutil.which(block.rest):
                    self._run(block, text, 0)
            case "sh", "until":
                self._until(block, text)
            case "sh", verb:
                self._run(block, text, int(block.rest) if verb == "exit" else 0)
            case "toml", "file":
                Path(self._replaced(block.rest)).write_text(text)
            case "python", verb:
                if verb == "given":
                    self._program += f"globals().update(given.{block.rest}(Path.cwd()))\n"
                self._program += text
            case "text", "log":
                self._wait(block, pattern(text, like=True))
            case "text", "output" | "like":
                expected = pattern(text, like=block.verb == "like")
                assert re.fullmatch(expected, self._said.strip(), re.DOTALL), (
                    f"{block.where}: the page says\n{text}\nbut the command printed\n{self._said}"
                )

    def _replaced(self, text: str) -> str:
        for old, new in self._instead:
            text = text.replace(old, new)
        return text

    def _run(self, block: Block, text: str, code: int) -> None:
        after = self._home / ".after"
        done = subprocess.run(
            ["bash", "-c", f"set -e\n{text}\n(pwd; env -0) > {after}"],
            cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=GUARD, check=False,
        )  # fmt: skip
        self._said = re.sub(r" +$", "", done.stdout.decode(), flags=re.MULTILINE)
        assert done.returncode == code, f"{block.where}: exit code {done.returncode}\n{text}\n{self._said}"
        if code == 0:
            self._folder, _, variables = after.read_text().partition("\n")
            pairs = (pair.partition("=") for pair in variables.split("\0") if pair)
            self._environment = {name: value for name, _, value in pairs}

    def _start(self, block: Block, text: str) -> None:
        log = self._home / f".log{len(self._going)}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", text], cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._going.append((process, log))
        self._wait(block, pattern(block.rest, like=True))

    def _wait(self, block: Block, expected: str) -> None:
        """Wait until what was started last has said this."""
        process, log = self._going[-1]
        end = time.monotonic() + GUARD
        while not re.search(expected, said := log.read_text()):
            assert process.poll() is None, f"{block.where}: it ended\n{said}"
            assert time.monotonic() < end, f"{block.where}: it does not say so\n{said}"
            time.sleep(0.05)
        self._said = re.sub(r" +$", "", said, flags=re.MULTILINE)

    def _until(self, block: Block, text: str) -> None:
        end = time.monotonic() + GUARD
        while True:
            self._run(block, text, 0)
            if re.search(pattern(block.rest, like=True), self._said):
                return
            assert time.monotonic() < end, f"{block.where}: it never says {block.rest!r}\n{self._said}"
            time.sleep(1)

    def _stop(self, block: Block) -> None:
        process, log = self._going.pop(int(block.rest or -1))
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(GUARD)
        self._said = log.read_text()
        assert code in (0, 130), f"{block.where}: exit code {code}\n{self._said}"


def pattern(text: str, *, like: bool) -> str:
    """A regular expression for the output that a page shows."""
    expected = re.escape(text.strip()).replace(r"\.\.\.", ".*")
    if like:
        expected = re.sub(r"[─━]{3,}", "[─━]+", expected)
        expected = re.sub(r"(?:\\?\s)+", r"\\s+", expected)
    for mark, values in MARKS.items():
        expected = expected.replace(mark, values)
    return expected
