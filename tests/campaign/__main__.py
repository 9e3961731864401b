"""Crash campaigns over the local stores, simulated controllers, and fuzzing, run by `make campaign`.

    python -m tests.campaign [--backend file,lmdb] [--only kill,open,...] [--quick] [--seed N] [-o FILE.json]

Crashes, power cuts and full disks are repeated until the counts are convincing; one table at the end sums
them up. Exit status: 1 if something was wrong, lost or failed. `power`, `enospc` and a part of `gone` mount
file systems, which requires root; without it they report that they were skipped.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.campaign import (
    clocks,
    clones,
    forks,
    full_disk,
    fuzz,
    gone,
    growth,
    hosts,
    kill,
    late,
    opening,
    power,
    rot,
    simulation,
    soak,
)
from tests.campaign.report import Row, steps, table
from tests.campaign.stores import KINDS, available

CAMPAIGNS = {
    "kill": (kill.campaign, 500, 24),
    "open": (opening.campaign, 500, 22),
    "grow": (growth.campaign, 60, 4),
    "fork": (forks.campaign, 20, 2),
    "clock": (clocks.campaign, 8, 1),
    "gone": (gone.campaign, 6, 1),
    "clones": (clones.campaign, 100, 8),
    "rot": (rot.campaign, 400, 6),
    "power": (power.campaign, 50, 4),
    "enospc": (full_disk.campaign, 10, 1),
    "late": (late.campaign, 1000, 10),
    "soak": (soak.campaign, 120, 15),
    "simulate": (simulation.campaign, 10_000, 50),
    "hosts": (hosts.campaign, 6, 1),
    "fuzz": (fuzz.campaign, 600, 5),
}
"""Each with its trials (`open`: in all; `grow`, `fork`, `clock`, `gone`, `clones`, `rot`, `late`: for each
row; soak: seconds; `simulate`, `hosts`: seeds; `fuzz`: seconds for each target), and those of --quick.
"""
STORELESS = ("late", "simulate", "hosts", "fuzz")
"""Campaigns that choose their stores themselves."""


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; returns the exit status."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    logging.disable(logging.CRITICAL)  # stores warn of every fault that is made for them here
    # Below the working directory: a real disk, where the directory for temporary files may be memory.
    with tempfile.TemporaryDirectory(prefix=".campaign-", dir=Path.cwd()) as base, steps() as progress:
        rows: list[Row] = []
        for name in options.only:
            run, full, quick = CAMPAIGNS[name]
            amount = options.trials or (quick if options.quick else full)
            for kind in options.backend if name not in STORELESS else ["memory"]:
                rows += run(kind, amount, options.seed, Path(base), progress)
    _report(rows, options.output)
    return 0 if all(row.good for row in rows) else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description="Crash campaigns over the local stores."
    )
    parser.add_argument(
        "--backend", type=_names(available()), default=available(), help=f"some of {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--only",
        type=_names(list(CAMPAIGNS)),
        default=list(CAMPAIGNS),
        help=f"some of {', '.join(CAMPAIGNS)}",
    )
    parser.add_argument("--quick", action="store_true", help="a few trials of each")
    parser.add_argument("--trials", type=int, help="so many of each (for soak and fuzz: seconds)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="another seed, other histories; the moments of a kill are not repeatable",
    )
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
