"""Results on a terminal: a group per capacity, policies first, bounds below; and what each tier did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiercache.cli.replay.words import milliseconds, percent, size, terminal
from tiercache.replay.report.verdict import LEVEL
from tiercache.replay.results import Result, TierUse

_BEST: Final = "*"
_NARROW: Final = 100
"""Columns of a terminal below which a table leaves out what `_SPARED` names."""
_SPARED: Final = ("written", "TTFT p95")
_LEGEND: Final = (
    f"{_BEST} saves most at its capacity; dim: bounds. FLOPs: of prefill, saved. TTFT: modelled mean time to the first token, and its 95th"
    " percentile. read, written, evicted: bytes restored from the {tiers}, bytes written there, objects evicted."
)


@dataclass(frozen=True, slots=True)
class Group:
    """The results at one capacity, in the order in which they were found: policies, then bounds."""

    title: str
    policies: tuple[Result, ...]
    bounds: tuple[Result, ...]

    @property
    def rows(self) -> tuple[Result, ...]:
        """All of them."""
        return self.policies + self.bounds

    def is_best(self, result: Result) -> bool:
        """Does no policy here save more? Without a second one, nothing is best."""
        most = max((one.flops_saved for one in self.policies), default=0.0)
        return len(self.policies) > 1 and not result.is_bound and most - result.flops_saved < LEVEL


def groups(found: Sequence[Result]) -> list[Group]:
    """One per capacity in rising order; the infinite cache last."""
    made = []
    free = [one for one in found if _is_infinite(one)]
    limited = [one for one in found if not _is_infinite(one)]
    for capacity in sorted({one.capacity for one in limited}, key=lambda one: one or 0.0):
        mine = [one for one in limited if one.capacity == capacity]
        first = mine[0]
        if capacity is None:
            title = ", ".join(f"{name} {size(use.capacity)}" for name, use in first.tiers.items())
        else:
            title = f"{capacity * 100:g} % of it, {size(first.capacity_bytes)}"
        policies, bounds = (tuple(one for one in mine if one.is_bound is bound) for bound in (False, True))
        made.append(Group(title, policies, bounds))
    return [*(Group("without a limit", (), (one,)) for one in free), *made]
