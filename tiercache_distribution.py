"""Name of the distribution, and the `tiercache` command even where another project's package is in the way.

The registry of Python packages has a distribution `tiercache` of another project, with the same import
name. It may hide this one or replace files of it. So this module is not part of the package `tiercache`, and
imports nothing of it before `main` runs.
"""

from __future__ import annotations

import sys

DISTRIBUTION = "tiercache-hybrid"


def foreign_sentence() -> str:
    """Return a sentence about an installed distribution `tiercache`; empty if there is none."""
    from importlib.metadata import PackageNotFoundError, version  # takes longer than --help may

    try:
        found = version("tiercache")
    except PackageNotFoundError:
        return ""
    return (
        f"the distribution tiercache {found} in this environment is not {DISTRIBUTION}, but has the same"
        f" import name; pip uninstall tiercache {DISTRIBUTION}, then install {DISTRIBUTION} again from its"
        " checkout or wheel"
    )


def main() -> None:
    """Run the command; the entry point of the console script."""
    try:
        from tiercache.cli import main as run
    except ImportError:
        if not (sentence := foreign_sentence()):
            raise
        print(f"tiercache: {sentence}", file=sys.stderr)  # noqa: T201
        sys.exit(2)  # `Exit.MISUSED`
    run()
