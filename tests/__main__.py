"""Run the tests: `python -m tests [arguments of pytest]`.

In two parts: first on two processes all that only computes; then, with nothing beside it, what has deadlines of its own to meet. With a
marker expression (`-m`) of the caller's, once and in one process, as `pytest` does it.
"""

from __future__ import annotations

import subprocess
import sys

NO_TESTS = 5
QUICK = "not gpu and not slow and not stress and not integration"
PARTS = (
    ["-n", "2", "--dist", "loadfile", "-m", f"{QUICK} and not alone"],
    ["-m", f"{QUICK} and alone"],
)


def main(arguments: list[str]) -> int:
    """The exit status, as pytest has them."""
    parts = ([],) if "-m" in arguments else PARTS
    ends = [subprocess.call([sys.executable, "-m", "pytest", *part, *arguments]) for part in parts]
    return status_of(ends, chosen=bool(arguments))


def status_of(ends: list[int], *, chosen: bool) -> int:
    """The status of the whole. Only of a choice of tests may a part have none; a part that a signal ended (below 0) has failed."""
    failed = [end for end in ends if end != 0 and not (chosen and end == NO_TESTS)]
    if failed:
        return failed[0] if failed[0] > 0 else 1
    return 0 if 0 in ends else NO_TESTS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
