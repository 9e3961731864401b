"""Child processes that are killed when the command that started them ends.

    subprocess.Popen(children.command("tiercache_lab.bench.raw"))

This starts `python -m tiercache_lab.children PARENT MODULE ARGUMENT...`. Before the child runs the module, it
asks the kernel for a SIGKILL at the end of its parent (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module as a child process that dies with this process.

    Start the child from a thread that lives as long as the child is needed, because the kernel kills the
    child when that thread ends.
    """
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def _run(parent: int, module: str, *arguments: str) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) or os.getppid() != parent:
        sys.exit(1)  # the kernel refused the request, or the parent had ended before the request
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run(int(sys.argv[1]), *sys.argv[2:])
