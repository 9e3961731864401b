"""Run the tests: `python -m tests [--slow] [arguments of pytest]`.

Two parts: first everything that waits and computes, on five processes, which keep two cores busy; then, with
nothing of that beside it, everything that floods the machine. Of the five, one has the tests that share much
(`order.BESIDE`), and its output comes last. With `--slow` these are the tests marked slow, and those that
draw examples, which then draw all of them. With `--slow` or arguments of pytest, all have a part of
everything, and with a marker expression (`-m`) there is one process, as `pytest` runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tests.order import ALONE, BESIDE

NO_TESTS = 5
ELSEWHERE = "not gpu and not stress and not integration"
QUICK = (f"not slow and {ELSEWHERE}",)
SLOW = (f"(slow or hypothesis) and {ELSEWHERE}", "--hypothesis-profile=thorough", "--timeout=2400")
TOGETHER = ("--dist", "loadscope", "--no-loadscope-reorder")


def main(arguments: list[str]) -> int:
    """Return the exit status, with the meanings that pytest gives it."""
    # Hundreds of processes are started: they share what is compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Plug-ins of pydantic are sought in everything that is installed, by each of these processes.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    is_slow = "--slow" in arguments
    marks, *options = SLOW if is_slow else QUICK
    arguments = [argument for argument in arguments if argument != "--slow"]
    if "-m" in arguments:
        return status_of([_run([*options, *arguments])], chosen=True)
    together = [*TOGETHER, "-m", f"{marks} and not alone", *options]
    if is_slow or arguments:
        ends = [_run(["-n", "5", *together, *arguments])]
    else:
        beside = ["-m", f"{marks} and not alone", *options, *map(_path, BESIDE)]
        elsewhere = [f"--ignore={_path(path)}" for path in (*BESIDE, *ALONE)]
        ends = _run_beside(["-n", "4", *together, *elsewhere], beside)
    # Their paths, because to collect all tests again takes longer than many of these.
    paths = [] if arguments else map(_path, ALONE)
    ends.append(_run(["-m", f"{marks} and alone", *options, *paths, *arguments]))
    return status_of(ends, chosen=bool(arguments))


def _run(arguments: Sequence[str]) -> int:
    return subprocess.call([sys.executable, "-m", "pytest", *arguments])


def _run_beside(shown: Sequence[str], beside: Sequence[str]) -> list[int]:
    """Run two parts at once, and show what the second one has said when both have ended."""
    with tempfile.TemporaryFile() as said:
        second = subprocess.Popen([sys.executable, "-m", "pytest", *beside], stdout=said, stderr=said)
        ends = [_run(shown), second.wait()]
        said.seek(0)
        shutil.copyfileobj(said, sys.stdout.buffer)
        sys.stdout.flush()
    return ends


def _path(test: str) -> str:
    return f"tests/{test}"


def status_of(ends: list[int], *, chosen: bool) -> int:
    """Return the status of all parts: only chosen tests leave one empty; a signal (below 0) is a failure."""
    failed = [end for end in ends if end != 0 and not (chosen and end == NO_TESTS)]
    if failed:
        return failed[0] if failed[0] > 0 else 1
    return 0 if 0 in ends else NO_TESTS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
