"""Command-line interface: `tiercache VERB`.

Principles:

1. The module of a verb is imported when the verb is called.
2. A failure is one sentence on stderr with what to do, and an exit code from one table.
3. Whatever a person can read, a program can read with -o json.
"""

import sys

from tiercache.errors import MissingExtraError


def main() -> None:
    """Run the command; the entry point of the console script."""
    try:
        from tiercache.cli.app import main as run
    except ModuleNotFoundError as error:
        print(f"tiercache: {MissingExtraError('the command line', 'cli', error)}", file=sys.stderr)  # noqa: T201
        sys.exit(2)  # `Exit.MISUSED`
    run()


__all__ = ["main"]
