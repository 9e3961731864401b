"""Command-line interface: `tiercache VERB`."""

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
