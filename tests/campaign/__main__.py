"""Crash campaigns over the local stores, simulated controllers, and fuzzing, run by `make campaign`.

    python -m tests.campaign [--backend file,lmdb] [--only kill,open,...] [--quick] [--seed N] [-o FILE.json]

Crashes, power cuts and full disks are repeated until the counts are convincing; one table at the end sums
them up. Exit status: 1 if something was wrong, lost or failed. `power` and `enospc` mount
file systems, which requires root; without it they report that they were skipped.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tests.campaign import clones, full_disk, fuzz, growth, kill, opening, power, simulation, soak
from tests.campaign.report import Row, Run, progress, table
from tests.campaign.stores import KINDS, available


class Campaign(NamedTuple):
    """A kind of trouble: its rows, the trials of each, and those of --quick."""

    rows: Callable[[Run], Iterable[Row]]
    trials: int
    quick: int
    kinds: tuple[str, ...] = KINDS
    """Stores that it is made for; those that choose their stores themselves have one name."""


OWN = ("own",)
CAMPAIGNS = {
    "kill": Campaign(kill.campaign, 500, 24), "open": Campaign(opening.campaign, 500, 22),
    "grow": Campaign(growth.campaign, 60, 4), "clones": Campaign(clones.campaign, 100, 8),
    "power": Campaign(power.campaign, 50, 4), "enospc": Campaign(full_disk.campaign, 10, 1),
    "soak": Campaign(soak.campaign, 120, 15), "simulate": Campaign(simulation.campaign, 10_000, 50, OWN),
    "fuzz": Campaign(fuzz.campaign, 600, 5, OWN),
}  # fmt: skip
"""Trials, of `power` in its first two rows, of others in all; seconds of soak, and of each target of fuzz."""


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; returns the exit status."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    logging.disable(logging.CRITICAL)  # stores warn of every fault that is made for them here
    # Below the working directory: a real disk, where the directory for temporary files may be memory.
    with tempfile.TemporaryDirectory(prefix=".campaign-", dir=Path.cwd()) as base, progress() as shown:
        rows: list[Row] = []
        for name in options.only:
            campaign = CAMPAIGNS[name]
            amount = options.trials or (campaign.quick if options.quick else campaign.trials)
            for kind in campaign.kinds:
                if kind in (*options.backend, *OWN):
                    rows += campaign.rows(Run(kind, amount, options.seed, Path(base), shown))
    _report(rows, options.output)
    return 0 if all(row.good for row in rows) else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description="Crash campaigns over the local stores."
    )
    some = f"some of {', '.join(KINDS)}"
    parser.add_argument("--backend", type=_names(available()), default=available(), help=some)
    some = f"some of {', '.join(CAMPAIGNS)}"
    parser.add_argument("--only", type=_names(list(CAMPAIGNS)), default=list(CAMPAIGNS), help=some)
    parser.add_argument("--quick", action="store_true", help="a few trials of each")
    parser.add_argument("--trials", type=int, help="so many of each (for soak and fuzz: seconds)")
    note = "another seed, other histories; the moments of a kill are not repeatable"
    parser.add_argument("--seed", type=int, default=0, help=note)
    parser.add_argument("-o", "--output", type=Path, help="write the result as JSON")
    return parser.parse_args(arguments)


def _names(known: list[str]):
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}")
        return names

    return parse


def _interrupt(_number: int, _frame: object) -> None:
    """End like Ctrl-C, so that everything mounted is unmounted."""
    raise KeyboardInterrupt


def _report(rows: list[Row], output: Path | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else 220)
    for row in rows:
        for note in row.verdict.notes[:20]:
            console.print(f"{row.campaign} {row.backend}: {note}", markup=False, highlight=False)
    console.print(table(rows))
    if output is not None:
        output.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
