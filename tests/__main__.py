"""Run the tests: `python -m tests [--slow] [arguments of pytest]`.

Two parts: first everything that waits and computes, on four processes, which keep two cores busy; then, with
nothing of that beside it, everything that floods the machine. With `--slow` these are the
tests marked slow, and those that draw examples, which then draw all of them. With a marker expression (`-m`)
among the arguments there is one part in one process, as `pytest` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.order import ALONE

NO_TESTS = 5
ELSEWHERE = "not gpu and not stress and not integration"
QUICK = (f"not slow and {ELSEWHERE}",)
SLOW = (f"(slow or hypothesis) and {ELSEWHERE}", "--hypothesis-profile=thorough", "--timeout=2400")
TOGETHER = ("-n", "4", "--dist", "loadscope", "--no-loadscope-reorder")


def main(arguments: list[str]) -> int:
    """Return the exit status, with the meanings that pytest gives it."""
    # Hundreds of processes are started: they share what is compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    marks, *options = SLOW if "--slow" in arguments else QUICK
    arguments = [argument for argument in arguments if argument != "--slow"]
    if "-m" in arguments:
        parts: list[Sequence[str]] = [options]
    else:
        parts = [
            [*TOGETHER, "-m", f"{marks} and not alone", *options],
            # Their paths, because to collect all tests again takes longer than many of these.
            ["-m", f"{marks} and alone", *options, *([] if arguments else map(_path, ALONE))],
        ]
    ends = [subprocess.call([sys.executable, "-m", "pytest", *part, *arguments]) for part in parts]
    return status_of(ends, chosen=bool(arguments))


def _path(test: str) -> str:
    return f"tests/{test}"


def status_of(ends: list[int], *, chosen: bool) -> int:
    """Return the status of the whole: a part may have no tests only where the caller chose tests, and a part
    that a signal ended (below 0) has failed.
    """
    failed = [end for end in ends if end != 0 and not (chosen and end == NO_TESTS)]
    if failed:
        return failed[0] if failed[0] > 0 else 1
    return 0 if 0 in ends else NO_TESTS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
