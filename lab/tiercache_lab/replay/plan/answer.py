"""Answer of a plan in sentences and as one row of figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tiercache_lab.replay import figures
from tiercache_lab.replay.figures import percent
from tiercache_lab.replay.plan.search import LITTLE, SizePlan, disk_of, host_of, worth_a_disk
from tiercache_lab.replay.results import Result

NOTHING: Final = 0.001
"""Saved fraction of the prefill below which a cache saves nothing that is worth telling."""
HEADS: Final = ("host", "disk", "saved", "of unlimited", "hit rate", "TTFT", "p95", "written a day")
"""Columns of the table of all runs."""


def sentences(plan: SizePlan) -> list[str]:
    """Return the answer: how much host memory and disk save how much."""
    return [text.replace("\u202f", " ") for text in _sentences(plan)]


def facts(plan: SizePlan) -> dict[str, Any]:
    """Return the answer as plain JSON values. Fractions are of the prefill's FLOPs; sizes are in bytes."""
    curve, disk = plan.curve, plan.disk
    saves = curve.top >= NOTHING
    return {
        "unlimited_bytes": plan.footprint,
        "unlimited_saved": plan.unlimited.flops_saved,
        "knee_bytes": curve.knee() if saves else None,
        "host_bytes": plan.host if saves else 0,
        "host_saved": curve.at(plan.host) if saves else 0.0,
        "enough_bytes": curve.enough(0.9) if saves else 0,
        "doubling": curve.doubling(plan.host) if saves else 0.0,
        "disk_bytes": disk_of(disk) if disk else 0,
        "disk_saved": disk.flops_saved if disk else None,
        "disk_written_per_day": plan.written_per_day(disk) if disk else None,
        "sentences": sentences(plan),
    }


def _sentences(plan: SizePlan) -> Iterator[str]:
    curve, unlimited = plan.curve, plan.unlimited
    if curve.top < NOTHING:
        if unlimited.token_hit_rate > 0:
            yield (
                f"Even a cache without a limit saves only {percent(curve.top)} of the prefill: the prompts"
                " repeat too little of what came before."
            )
        else:
            yield "Nothing is saved, whatever the size: no prompt repeats what came before."
        return
    if not plan.hosts:
        yield (
            f"A cache without a limit holds {size(plan.footprint)} and saves {percent(curve.top)} of the"
            " prefill; no smaller size has been run."
        )
        return
    host = plan.host
    alone = curve.at(host)
    yield (
        f"{size(host)} of host memory save {percent(alone)} of the prefill, {percent(alone / curve.top)} of"
        f" what an unlimited cache of {size(plan.footprint)} saves."
    )
    if curve.knee() is None:
        yield "The curve has no knee: all along it, more memory saves more in proportion."
    yield from _disk(plan, alone)
    twice = curve.doubling(host)
    yield (
        f"Twice the host memory would save {twice * 100:.1f} points more."
        if twice >= LITTLE
        else "More host memory brings less than 1 point per doubling."
    )
    enough = curve.enough(0.9)
    if enough != host:
        yield f"{percent(0.9)} of what an unlimited cache saves need {size(enough)} of host memory."


def _disk(plan: SizePlan, alone: float) -> Iterator[str]:
    disk = plan.disk
    if disk is not None:
        wear = plan.written_per_day(disk)
        wears = f"; {size(wear)} a day are written to it" if wear else ""
        yield f"{size(disk_of(disk))} of disk below it raise this to {percent(disk.flops_saved)}{wears}."
        before = next((one for one in plan.hosts if host_of(one) == plan.host), plan.unlimited)
        yield (
            "With this disk, the mean time to the first token goes from"
            f" {figures.milliseconds(before.ttft_ms_mean)} to {figures.milliseconds(disk.ttft_ms_mean)}."
        )
    elif plan.disks or not worth_a_disk(plan):
        yield "A disk below it, of any size, saves less than 1 point more."


def size(nbytes: float) -> str:
    """Write a number of bytes without needless decimals, because most sizes of a plan have two digits."""
    text, _, unit = figures.size(nbytes).partition("\u202f")
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}\u202f{unit}"


def rows_of(plan: SizePlan) -> list[Result]:
    """Return all runs of the plan: hosts by size, then disks by the sizes of host and disk, then no limit."""
    disks = sorted(plan.disks, key=lambda one: (one.tiers["host"].capacity, disk_of(one)))
    return [*sorted(plan.hosts, key=lambda one: one.capacity_bytes), *disks, plan.unlimited]


def cells(plan: SizePlan, run: Result) -> tuple[str, ...]:
    """Return a run as the texts of a table's row, in the order of `HEADS`."""
    top = plan.curve.top
    return (
        size(host_of(run)),
        size(disk_of(run)) if disk_of(run) else "",
        figures.percent(run.flops_saved),
        figures.percent(run.flops_saved / top) if top >= NOTHING else "",
        figures.percent(run.token_hit_rate),
        figures.milliseconds(run.ttft_ms_mean),
        figures.milliseconds(run.ttft_ms_p95),
        size(written) if (written := plan.written_per_day(run)) is not None else "",
    )


def is_recommended(plan: SizePlan, run: Result) -> bool:
    """Return whether the answer names this run."""
    return run is plan.disk or (run in plan.hosts and host_of(run) == plan.host)
