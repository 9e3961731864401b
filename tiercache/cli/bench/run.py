"""A whole run of `bench disk`: one size after another, each in directories that are removed before the next begins."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tiercache.cli.bench.disk import SizeBench
from tiercache.cli.bench.lookups import many
from tiercache.cli.bench.machine import Machine
from tiercache.cli.bench.plan import TINY, Plan
from tiercache.cli.bench.rows import Case, Note, Row, size_text
from tiercache.cli.bench.subject import Buffers

_FILL: Final = 4096
"""Tiny objects that one set stores at most."""
_STEADY: Final = frozenset({Case.SET_CACHED, Case.SET_UNCACHED})
"""Cases that run on a full store; all others run on a growing one."""


def run(plan: Plan, root: Path, machine: Machine, say: Callable[[str], None]) -> Generator[Row | Note]:
    """Yield every row and note as soon as it is known. Writes below `root`, which the caller removes."""
    for size in plan.sizes:
        for wanted, cases in ((plan.cases & _STEADY, SizeBench.steady), (plan.cases - _STEADY, SizeBench.growing)):
            if wanted:
                with ExitStack() as stack:
                    where = Path(stack.enter_context(TemporaryDirectory(dir=root)))
                    yield from cases(
                        SizeBench(plan, machine, Buffers(size, plan.count(size)), _prefixed(say, size_text(size)), stack), where
                    )
    if plan.objects:
        with TemporaryDirectory(dir=root) as name:
            yield from many(plan, Buffers(TINY, min(_FILL, plan.objects)), Path(name), _prefixed(say, size_text(TINY)))


def _prefixed(say: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda doing: say(f"{prefix}: {doing}")
