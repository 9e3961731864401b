"""Command line of the campaign: `python -m tests.benchmarks.policies run|tables RESULTS.jsonl`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tests.benchmarks.policies as package
from tests.benchmarks.policies import matrix
from tests.benchmarks.policies.rows import Rows, opened
from tests.benchmarks.policies.runner import Campaign, tell
from tests.benchmarks.policies.tables import page, written


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign or write its tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.policies",
        description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="make the runs that are not in the file")
    run.add_argument("results", type=Path)
    run.add_argument("--trace", default="", help="path of Mooncake's conversation trace")
    run.add_argument("--sessions", default="", help="directory of recorded agentic sessions")
    run.add_argument("--processes", type=int, default=2)
    run.add_argument("--limit", type=int, help="requests of each run, for a trial")
    for name, known in (("phases", matrix.PHASES), ("sources", None), ("policies", None)):
        among = f"; among {'; '.join(known)}".replace("%", "%%") if known else ""
        run.add_argument(f"--{name}", type=names, default=None, help=f"only these, with commas{among}")
    run.add_argument(
        "--seeds", type=lambda text: [int(part) for part in text.split(",")], default=matrix.SEEDS
    )
    run.set_defaults(work=campaign)
    tables = commands.add_parser("tables", help="make tables from the file")
    tables.add_argument("results", type=Path)
    tables.add_argument(
        "--write", type=Path, metavar="PAGE.md", help="write them between the marks of a page"
    )
    tables.set_defaults(work=tables_of)
    options = parser.parse_args(arguments)
    status: int = options.work(options)
    return status


def campaign(options: argparse.Namespace) -> int:
    """Make the runs that are missing."""
    sources = matrix.traffics(options.trace, options.sessions)
    sources = [one for one in sources if options.sources is None or one.name in options.sources]
    wanted = ["hvd", *matrix.RIVALS] if options.policies is None else options.policies
    found = [
        block
        for block in matrix.blocks(sources, options.seeds, wanted, matrix.CHECKPOINTS, options.limit)
        if options.phases is None or block.phase in options.phases
    ]
    with opened(options.results) as file:
        made = Campaign(found, Rows(options.results), file, version(), options.processes)
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in before:
                signal.signal(number, lambda *_: made.stop())
            made.go()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    tell(f"{made.made:,} runs made, {len(made.failed)} commands failed")
    return 1 if made.failed else 0


def tables_of(options: argparse.Namespace) -> int:
    """Write the tables to the page or to stdout."""
    rows = list(Rows(options.results))
    if not rows:
        print(f"{options.results} has no rows; make some with `run`", file=sys.stderr)
        return 1
    text = page(rows)
    if options.write:
        options.write.write_text(written(options.write.read_text(), text))
    else:
        print(text)
    return 0


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def version() -> str:
    """Return the version of the code as git describes it."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
