"""Runs of campaigns: trials, rows of their counts, progress on stderr, one table at the end."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.campaign.model import Verdict

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


@dataclass
class Row:
    """One campaign over one store; `skipped` says why there were no trials."""

    campaign: str
    backend: str
    trials: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""

    @property
    def good(self) -> bool:
        return not (self.verdict.wrong or self.verdict.lost or self.verdict.failed)

    def take(self, trial: Callable[[], Verdict], name: str) -> None:
        """Run one trial; what it raises is a failure of the store or of the campaign to look at."""
        start = time.perf_counter()
        self.trials += 1
        try:
            found = trial()
            found.notes[:] = [f"{name}: {note}" for note in found.notes]
            self.verdict.add(found)
        except Exception:  # noqa: BLE001 (a campaign goes on, and says at the end what it met)
            self.verdict.count("failed", f"{name}: {traceback.format_exc(limit=-6)}")
        self.seconds += time.perf_counter() - start

    def count(self, figures: Mapping[str, int]) -> None:
        """Add to the figures."""
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0) + value

    def to_json(self) -> dict[str, Any]:
        """Everything, without what each trial found."""
        whole = asdict(self)
        verdict = whole.pop("verdict")
        del verdict["found"]
        times = verdict.pop("recovery")
        if times:
            verdict |= {"recovery_median_s": statistics.median(times), "recovery_max_s": max(times)}
        return whole | verdict | {"good": self.good}


class Run(NamedTuple):
    """Order to a campaign: the kind of store, the trials of each row, a seed, a directory, progress."""

    kind: str
    trials: int
    seed: int
    base: Path
    progress: Progress

    @property
    def seeds(self) -> range:
        """A number for each trial of a row; those of two seeds differ."""
        return range(self.seed * 100_003, self.seed * 100_003 + self.trials)

    def over(self, items: Sequence[T] | range, name: str) -> Iterator[T]:
        """Each item, counted on stderr."""
        task = self.progress.add_task(name, total=len(items))
        for item in items:
            yield item  # type: ignore[misc]
            self.progress.advance(task)

    def row(
        self, row: Row, trial: Callable[[T, Path], Verdict], items: Sequence[T] | range | None = None
    ) -> Row:
        """Make a trial of each item (default: seeds) in an empty directory of its own, which then goes."""
        for item in self.over(self.seeds if items is None else items, f"{row.campaign} {row.backend}"):
            directory = Path(mkdtemp(dir=self.base))
            row.take(lambda: trial(item, directory), str(item))  # noqa: B023 (called at once)
            rmtree(directory)
        return row


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress while the block runs."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        yield shown


def apart(module: str, *arguments: object) -> tuple[Verdict, dict[str, Any]]:
    """Run a module in a process of its own, and return the verdict and the figures that it prints."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"ended with status {done.returncode}: {done.stderr[-2000:]}")
    verdict, figures = json.loads(done.stdout)
    return Verdict(**verdict), figures


def table(rows: Iterable[Row]) -> Table:
    """The result."""
    made = Table(
        title="Campaign",
        caption=(
            "wrong, lost and failed must be 0; torn objects were found out by their checksum and not served"
        ),
    )
    names = "campaign,store,trials,wrong,lost,failed,torn found,present,recovery median,max,time,notes"
    for name in names.split(","):
        made.add_column(name, justify="left" if name in ("campaign", "store", "notes") else "right")
    for row in rows:
        v, times = row.verdict, row.verdict.recovery
        bad = [f"[red]{n}[/red]" if n else "0" for n in (v.wrong, v.lost, v.failed)]
        median = f"{statistics.median(times) * 1000:.1f} ms" if times else "-"
        slowest = f"{max(times) * 1000:.1f} ms" if times else "-"
        notes = row.skipped or ", ".join(f"{name} {value}" for name, value in row.figures.items())
        counts = (str(row.trials), *bad, str(v.torn), str(v.present))
        made.add_row(row.campaign, row.backend, *counts, median, slowest, f"{row.seconds:.0f} s", notes)
    return made
