"""Campaign behind docs/policies.md: every policy on every source, at several sizes and seeds.

    python -m tests.benchmarks.policies run results.jsonl --trace conversation_trace.jsonl --sessions agentic/
    python -m tests.benchmarks.policies tables results.jsonl

`run` makes the commands of `tiercache replay` that are not in the file, some at once, and appends a JSON line
for each of their rows. A command's rows are written when it has ended, so that a campaign that was stopped
goes on where it stopped. `tables` prints, for each part, the saved fractions by policy and source, and the
lead of `hvd` over every other policy with its interval over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final

from tiercache_lab.replay.sources import SOURCES

OURS: Final = "hvd"
RIVALS: Final = ("lru", "lpc", "seglen", "seglen:additive", "marconi")
SEEDS: Final = (1000, 1001, 1002, 1003, 1004)
"""Seeds of the generators. Nothing is tuned on seeds of 1000 and more."""
_ALL: Final = ("--policy", ",".join((OURS, *RIVALS)))
_TIERS: Final = "two tiers"
_FEW: Final = "hvd,lru,seglen:additive,marconi"
PARTS: Final[Mapping[str, Sequence[str]]] = {
    "5 %": (*_ALL, "--capacity", "0.05"),
    "10 and 20 %": (*_ALL, "--capacity", "0.1,0.2"),
    _TIERS: ("--policy", _FEW),  # a host of 5 % and a disk of 25 %, in bytes
    **{
        f"checkpoints {name}": ("--policy", OURS, "--capacity", "0.05", "--checkpoints", name, "--no-bounds")
        for name in ("every:2048", "every:8192", "end", "prompt,end", "branch,end")
    },
    **{
        f"model {name}": ("--policy", _FEW, "--capacity", "0.05", "--profile", name, "--no-bounds")
        for name in ("qwen3.5-9b", "kimi-linear-48b-a3b", "nemotron-h-8b", "jamba-1.5-mini")
    },
}
"""Options of the commands, by the part of the campaign."""
T_QUANTILES: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom.

Source: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2.
"""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the campaign."""

    part: str
    source: str
    """SOURCE as it is opened on this machine."""
    seed: int
    limit: int = 0

    def arguments(self, footprint: int) -> list[str]:
        """Return the arguments of `tiercache replay`; `footprint` are the bytes of the infinite cache."""
        sizes = ["--host-bytes", str(footprint // 20), "--disk-bytes", str(footprint // 4)]
        return [
            self.source, "--seed", str(self.seed), *(("--limit", str(self.limit)) if self.limit else ()),
            *PARTS[self.part], *(sizes if self.part == _TIERS else ()),
        ]  # fmt: skip


class Campaign:
    """The rows of a file, and the commands that add to them; any thread may call `run`."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):  # a kill cut the last line short
            path.write_text("".join(lines[:-1]))
            lines.pop()
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.failed: list[Command] = []

    def run(self, command: Command) -> None:
        """Run a command unless the file has its rows, and append them."""
        footprint = next(
            (
                row["capacity_bytes"]
                for row in self.rows
                if (row["part"], row["source"], row["seed"], row["policy"])
                == ("5 %", command.source, command.seed, "infinite")
            ),
            0,
        )
        arguments = command.arguments(footprint)
        if any(row["arguments"] == arguments for row in self.rows):
            return
        done = subprocess.run(
            [sys.executable, "-m", "tiercache.cli", "replay", *arguments, "--output", "jsonl"],
            capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        tell = f"{command.part}, {command.source}, seed {command.seed}"
        if done.returncode:
            self.failed.append(command)
            print(f"FAILED: {tell}: {done.stderr.strip()[-500:]}", file=sys.stderr, flush=True)
            return
        own = {"part": command.part, "arguments": arguments, "source": command.source}
        found = [json.loads(line) | own for line in done.stdout.splitlines()]
        with self._lock, self._path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
            self.rows += found
        print(f"{tell}: {len(found)} rows", file=sys.stderr, flush=True)


def commands(sources: Sequence[str], seeds: Sequence[int], limit: int = 0) -> Iterator[Command]:
    """Yield all commands in the order in which they are run; a trace has one seed."""
    for part in PARTS:
        for seed in seeds:
            for source in sources:
                if seed == seeds[0] or not source.endswith(".jsonl"):
                    yield Command(part, source, seed, limit)


def interval(values: Sequence[float]) -> str:
    """Return the mean in points, and its interval at 95 %, of one value for each of up to ten seeds."""
    told = f"{mean(values) * 100:+.2f}"
    if len(values) == 1:
        return told
    half = T_QUANTILES[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return f"{told} [{(mean(values) - half) * 100:+.2f}, {(mean(values) + half) * 100:+.2f}]"


def tables(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a table in Markdown for each part and size."""
    saved: dict[tuple[str, float], dict[str, dict[str, dict[int, float]]]] = {}
    for row in rows:
        # The infinite cache has no size; it stands in its part once.
        group = saved.setdefault((row["part"], (row["capacity"] or 0) % 1), {})
        by_source = group.setdefault(row["policy"], defaultdict(dict))
        by_source[row["source"]][row["seed"]] = row["flops_saved"]
    for (part, capacity), group in saved.items():
        sources = list(dict.fromkeys(source for found in group.values() for source in found))
        lines = [f"### {part}" + (f", at {capacity:.0%}" if capacity else ""), ""]
        lines += [f"|  | {' | '.join(sources)} | mean | lead of {OURS}, points |"]
        lines += ["|---" * (len(sources) + 3) + "|"]
        for policy, found in group.items():
            means = [mean(found[source].values()) if source in found else math.nan for source in sources]
            cells = [f"{one:.3f}" for one in (*means, mean(means))]
            lines += [f"| {policy} | {' | '.join(cells)} | {_lead(group.get(OURS, {}), found)} |"]
        yield "\n".join(lines)


def _lead(ours: Mapping[str, Mapping[int, float]], other: Mapping[str, Mapping[int, float]]) -> str:
    """Return the lead on the mean over sources, by seed; a source with one seed leads alike in all."""
    leads = [
        {seed: ours[source][seed] - value for seed, value in found.items() if seed in ours.get(source, {})}
        for source, found in other.items()
    ]
    if not leads or not all(leads) or ours is other:
        return ""
    seeds = set.intersection(*(set(one) for one in leads if len(one) > 1), max(map(set, leads), key=len))
    return interval(
        [mean(one.get(seed, next(iter(one.values()))) for one in leads) for seed in sorted(seeds)]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign or print its tables; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.policies",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("work", choices=("run", "tables"))
    parser.add_argument("results", type=Path, metavar="RESULTS.jsonl")
    parser.add_argument("--trace", help="path of Mooncake's conversation trace")
    parser.add_argument("--sessions", help="directory of recorded agentic sessions")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=int, default=0, help="requests of each run, for a trial")
    parser.add_argument("--sources", help="only these, with commas")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help=f"number of seeds, from {SEEDS[0]} on")
    options = parser.parse_args(arguments)
    campaign = Campaign(options.results)
    if options.work == "tables":
        print("\n\n".join(tables(campaign.rows)))
        return 0
    # A third of the sessions is kept aside: nothing is tuned on them. The seed decides their starts.
    recorded = [options.trace, options.sessions and f"{options.sessions.rstrip('/')}/?folds=3&fold=2"]
    names = (
        options.sources.split(",") if options.sources else [*(n for n, k in SOURCES.items() if not k.fixed)]
    )
    wanted = list(commands([*names, *filter(None, recorded)], SEEDS[: options.seeds], options.limit))
    with ThreadPoolExecutor(options.processes) as threads:
        for part in PARTS:  # one after the other: the sizes of the tiers follow from the rows of the first
            list(threads.map(campaign.run, [one for one in wanted if one.part == part]))
    return 1 if campaign.failed else 0


if __name__ == "__main__":
    sys.exit(main())
