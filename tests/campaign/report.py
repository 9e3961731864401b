"""Reports of campaigns: rows of counts, progress on stderr while they run, one table at the end."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.campaign.model import Verdict

T = TypeVar("T")


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
        """Run one trial; what it raises is a failure of the store or of the campaign, and either must be
        looked at.
        """
        start = time.perf_counter()
        self.trials += 1
        try:
            found = trial()
            found.notes[:] = [f"{name}: {note}" for note in found.notes]
            self.verdict.add(found)
        except Exception:  # noqa: BLE001 (a campaign goes on, and says at the end what it met)
            self.verdict.failed += 1
            self.verdict.notes.append(f"{name}: {traceback.format_exc(limit=-6)}")
        self.seconds += time.perf_counter() - start

    def to_json(self) -> dict[str, Any]:
        """Everything, without what each trial found."""
        whole = asdict(self)
        verdict = whole.pop("verdict")
        del verdict["found"]
        times = verdict.pop("recovery")
        if times:
            verdict |= {"recovery_median_s": statistics.median(times), "recovery_max_s": max(times)}
        return whole | verdict | {"good": self.good}


class Steps:
    """Progress on stderr.

    Thread safety: one thread.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def over(self, items: Sequence[T] | range, name: str) -> Iterator[T]:
        """Each item, counted."""
        task = self._progress.add_task(name, total=len(items))
        for item in items:
            yield item  # type: ignore[misc]
            self._progress.advance(task)


@contextmanager
def steps() -> Iterator[Steps]:
    """Progress while the block runs."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Steps(progress)


def table(rows: Iterable[Row]) -> Table:
    """The result."""
    made = Table(
        title="Campaign",
        caption=(
            "wrong, lost and failed must be 0; torn objects were found out by their checksum and not served"
        ),
    )
    for name in (
        "campaign",
        "store",
        "trials",
        "wrong",
        "lost",
        "failed",
        "torn found",
        "present",
        "recovery median",
        "max",
        "time",
        "notes",
    ):
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
