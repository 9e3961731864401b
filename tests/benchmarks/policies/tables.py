"""Tables of docs/policies.md, made from the rows of a campaign."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Final

from tests.benchmarks.policies.intervals import Interval, of_seeds, of_windows
from tests.benchmarks.policies.matrix import BOUNDS, INFINITE, RIVALS, RULES, WHOLE, traffics
from tiercache.policy import DEFAULT_PROFILE

OURS: Final = "hvd"
BEGIN: Final = "<!-- campaign: begin; written by python -m tests.benchmarks.policies tables -->"
END: Final = "<!-- campaign: end -->"
_DASH: Final = "\u2013"
_ORDER: Final = (*RIVALS, OURS, *BOUNDS, INFINITE)
_SOURCES: Final = tuple(source.name for source in traffics("trace", "sessions"))
_SMALL_GAP: Final = 0.005
"""Smallest gap between LRU and the clairvoyant cache of which a closed share is told."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """Rows of one size, checkpoint policy and model, by source, policy and seed."""

    rows: Mapping[tuple[str, str, int], Row]
    sources: Sequence[str]
    policies: Sequence[str]

    def saved(self, source: str, policy: str) -> dict[int, float]:
        """Return the saved fraction of the prefill FLOPs by seed."""
        return {
            seed: row["flops_saved"]
            for (of, by, seed), row in self.rows.items()
            if (of, by) == (source, policy)
        }

    def mean(self, source: str, policy: str) -> float:
        """Return the mean of `saved` over the seeds; NaN without runs."""
        return mean(self.saved(source, policy).values() or [math.nan])

    def lead(self, source: str, rival: str, policy: str = OURS) -> Interval | None:
        """Return how much more `policy` saves than `rival`, with its interval; None without common runs.

        Both serve the same requests, so the differences of the seeds are what is averaged.
        """
        ours, theirs = self.saved(source, policy), self.saved(source, rival)
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            return None
        first, second = (self.rows[source, name, seeds[0]].get("windows") for name in (policy, rival))
        if first and second and len(first) == len(second):
            lead = [mine[1] - other[1] for mine, other in zip(first, second, strict=True)]
            return of_windows([weight for weight, _ in first], lead)
        return of_seeds([ours[seed] - theirs[seed] for seed in seeds])

    def best_rival(self, source: str) -> str | None:
        """Return the rival with the highest mean; one that was best by chance is taken for the best."""
        found = [(self.mean(source, name), name) for name in self.policies if name in RIVALS]
        return max(((value, name) for value, name in found if not math.isnan(value)), default=(0, None))[1]

    def lead_on_mean(self, rival: str) -> Interval | None:
        """Return the lead on the mean over all sources, with its interval over the seeds.

        A source without seeds gives every seed the same lead. None if a run of any source is missing.
        """
        by_source = []
        for source in self.sources:
            ours, theirs = self.saved(source, OURS), self.saved(source, rival)
            by_source.append({seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()})
        several = [set(leads) for leads in by_source if len(leads) > 1]
        if not all(by_source):
            return None
        seeds = sorted(set.intersection(*several)) if several else [0]
        alone = [next(iter(leads.values())) for leads in by_source if len(leads) == 1]
        return of_seeds(
            [mean([*alone, *(leads[seed] for leads in by_source if len(leads) > 1)]) for seed in seeds]
        )


def setting(rows: Iterable[Row], keep: Callable[[Row], bool]) -> Setting:
    """Return the rows that `keep` accepts, arranged."""
    found = {(row["traffic"], row["policy"], row["seed"]): row for row in rows if keep(row)}
    sources = [source for source in _SOURCES if any(of == source for of, _, _ in found)]
    policies = {policy for _, policy, _ in found}
    known = [name for name in _ORDER if name in policies]
    return Setting(found, sources, [*sorted(policies - {*_ORDER}), *known])


def page(rows: Sequence[Row]) -> str:
    """Return everything that stands between the marks of the page."""
    whole = [row for row in rows if row["phase"] == WHOLE]
    alone = [row for row in rows if row["phase"] != WHOLE]
    plain = [row for row in alone if row["checkpoints"] == RULES and row["profile"] == DEFAULT_PROFILE]
    free = setting(plain, lambda row: row["policy"] == INFINITE).rows
    parts = [_introduction(rows, whole), _footprints(list(free.values()), whole)]
    sizes = {}
    for size in ("5 %", "10 %", "20 %"):
        limited = setting(
            plain, lambda row, size=size: row["size"] == size and row["policy"] != INFINITE
            and row["phase"] != "two tiers",
        )  # fmt: skip
        if OURS in limited.policies:
            sizes[size] = Setting({**limited.rows, **free}, limited.sources, [*limited.policies, INFINITE])
    if first := sizes.get("5 %"):
        parts += ["### At 5%", _means(first), _leads(first)]
    parts.append(_rivals(sizes))
    parts += [
        _tiers(plain),
        _checkpoints(alone, free),
        _profiles(alone),
        _whole(plain, whole),
        _commands(alone),
    ]
    return "\n\n".join(filter(None, parts))


def written(text: str, made: str) -> str:
    """Return a page whose part between the marks is `made`.

    Raises SystemExit if the marks are missing.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"the page must have these two lines, once each:\n{BEGIN}\n{END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}"


def _introduction(rows: Sequence[Row], whole: Sequence[Row]) -> str:
    seeds = sorted({row["seed"] for row in rows})
    codes = sorted({row["code"] for row in rows})
    also = [row for row in rows if row["phase"] == "two tiers"]
    through = [*(["runs in two tiers"] if also else []), *(["some others"] if whole else [])]
    others = f";\n  {' and '.join(through)}, through the controller as well" if through else ""
    return (
        "## Measured over several seeds\n\n"
        f"{len(rows):,} runs of `tiercache replay` (seeds {_span(seeds)};\n"
        f"code {', '.join(codes)}).\n"
        "All figures are fractions of prefill FLOPs saved.\n"
        "`python -m tests.benchmarks.policies run` makes the rows, and `tables` these tables.\n"
        "Nothing is tuned on these seeds, nor on the third of the agentic sessions that is replayed here.\n\n"
        "- A size is a fraction of the bytes that the infinite cache holds at the end of the same requests.\n"
        f"- Runs in one pool go through the index alone (`--index-only`){others}.\n"
        "- Intervals are at 95 %.\n"
        "  With seeds they are Student's t over the differences of the seeds; for the conversation trace, a\n"
        "  moving-block bootstrap over windows of its one run, which says nothing about other days.\n"
        "- The best rival is the one with the highest mean here, chosen afterwards, which favours it."
    )


def _whole(plain: Sequence[Row], whole: Sequence[Row]) -> str:
    """Return what the runs through the controller save beside those through the index alone."""
    found = {(row["traffic"], row["policy"], row["seed"]): row["flops_saved"] for row in whole}
    beside = {
        (row["traffic"], row["policy"], row["seed"]): row["flops_saved"]
        for row in plain
        if row["size"] == "5 %"
    }
    shared = [key for key in found if key in beside and key[1] != INFINITE]
    if not shared:
        return ""
    most = max(abs(found[key] - beside[key]) for key in shared)
    return (
        "### Through the controller\n\n"
        f"{len(shared)} runs at 5 % went through the index alone and through the controller, which copies\n"
        f"to a host arena with blocks and slots. The largest difference is {most * 100:.1f} points."
    )


def _footprints(free: Sequence[Row], whole_runs: Sequence[Row]) -> str:
    lines = []
    for source in dict.fromkeys(row["traffic"] for row in free):
        mine = [row for row in free if row["traffic"] == source]
        whole = [row["capacity_bytes"] for row in mine]
        spread = f" ({_gib(min(whole))} to {_gib(max(whole))})" if len(whole) > 1 else ""
        beside = max((row["working_bytes"] for row in whole_runs if row["traffic"] == source), default=0)
        lines.append(
            [
                source, f"{mean(row['requests'] for row in mine):,.0f}", f"{_gib(mean(whole))}{spread}",
                _gib(beside) if beside else _DASH, f"{mean(row['flops_saved'] for row in mine):.3f}",
            ]
        )  # fmt: skip
    return (
        "### Footprints\n\n"
        "Bytes of all cached pages and states. *Beside it* is the most that running requests held on the\n"
        "device; only runs through the controller know it. *Saved* is by the infinite cache.\n\n"
        + _table(("source", "requests", "infinite cache, GiB", "beside it, GiB", "saved"), lines)
    )


def _means(found: Setting) -> str:
    lines = []
    for policy in found.policies:
        values = [found.mean(source, policy) for source in found.sources]
        name = f"**{policy}**" if policy == OURS else policy
        lines.append([name, *(_fraction(value) for value in values), _fraction(mean(values))])
    return "Means over the seeds:\n\n" + _table(["", *found.sources, "mean"], lines)


def _leads(found: Setting) -> str:
    lines = []
    for source in found.sources:
        rival = found.best_rival(source)
        lead = found.lead(source, rival) if rival else None
        if rival is None or lead is None:
            continue
        lru, ours, best = (found.mean(source, name) for name in ("lru", OURS, "clairvoyant"))
        gap = best - lru
        closed = f"{(ours - lru) / gap * 100:.0f} %" if gap >= _SMALL_GAP else _DASH
        lines.append([source, rival, _points(lead), closed])
    heads = ("source", "best rival", f"lead of {OURS}, points", "gap closed")
    return (
        f"Lead of `{OURS}` over the best rival of each source, and the share that it closes of the gap\n"
        "between LRU and the clairvoyant cache:\n\n" + _table(heads, lines)
    )


def _rivals(sizes: Mapping[str, Setting]) -> str:
    """Return the means at every size, and the leads at the first one."""
    if not sizes:
        return ""
    size, first = next(iter(sizes.items()))
    lines = []
    for policy in first.policies:
        means = [mean(found.mean(source, policy) for source in found.sources) for found in sizes.values()]
        lead = score = ""
        if policy in RIVALS:
            known = [one for source in first.sources if (one := first.lead(source, policy)) is not None]
            wins = sum(one.excludes_zero and one.mean > 0 for one in known)
            losses = sum(one.excludes_zero and one.mean < 0 for one in known)
            score = f"{wins} / {len(known) - wins - losses} / {losses}"
            lead = _points(first.lead_on_mean(policy))
        name = f"**{policy}**" if policy == OURS else policy
        lines.append([name, *map(_fraction, means), lead, score])
    return (
        f"### By size\n\nMeans over the sources, and the lead of `{OURS}` in points. A source is won or\n"
        "lost if the interval of its lead excludes 0, and else drawn:\n\n"
        + _table(["", *sizes, f"lead at {size}", "won / drawn / lost"], lines)
    )


def _tiers(plain: Sequence[Row]) -> str:
    hierarchy = setting(plain, lambda row: "disk" in row["size"] and row["policy"] != INFINITE)
    if not hierarchy.rows:
        return ""
    size = next(iter(hierarchy.rows.values()))["size"]
    pool = setting(plain, lambda row: row["phase"] == "two tiers" and row["size"] == "30 %")
    means = {
        policy: mean(hierarchy.mean(source, policy) for source in hierarchy.sources)
        for policy in hierarchy.policies
    } | {f"{OURS} in one pool of 30 %": mean(pool.mean(source, OURS) for source in hierarchy.sources)}
    lines = [[policy, _fraction(value)] for policy, value in means.items() if not math.isnan(value)]
    return f"### Two tiers: {size}\n\nOf policies with runs of every source:\n\n" + _table(
        ["", "mean"], lines
    )


def _checkpoints(rows: Sequence[Row], free: Mapping[Any, Row]) -> str:
    lines: list[list[str]] = []
    kinds = dict.fromkeys(row["checkpoints"] for row in rows if row["phase"] == "checkpoints")
    seeds = {row["seed"] for row in rows if row["phase"] == "checkpoints"}
    default = setting(
        rows, lambda row: row["phase"] == "5 %" and row["policy"] == OURS
        and row["profile"] == DEFAULT_PROFILE and row["seed"] in seeds,
    )  # fmt: skip
    free = {key: row for key, row in free.items() if row["seed"] in seeds}
    if not kinds:
        return ""
    sources = default.sources
    for kind, name in ((RULES, "default"), *((kind, kind) for kind in kinds)):
        limited = default if kind == RULES else setting(
            rows, lambda row, kind=kind: row["checkpoints"] == kind and row["policy"] == OURS
        )  # fmt: skip
        whole = Setting(free, sources, ()) if kind == RULES else setting(
            rows, lambda row, kind=kind: row["checkpoints"] == kind and row["policy"] == INFINITE
        )  # fmt: skip
        values = (
            mean(of.mean(source, policy) for source in sources)
            for of, policy in ((limited, OURS), (whole, INFINITE))
        )
        lines.append([name, *map(_fraction, values)])
    return (
        "### Checkpoints compared\n\n"
        "The sizes are the same bytes in all rows: 5 % of the infinite cache with the default rules.\n"
        f"Means over the sources and the seeds {_span(sorted(seeds))}.\n\n"
        + _table(["checkpoints", f"{OURS} at 5 %", "infinite cache"], lines)
    )


def _profiles(rows: Sequence[Row]) -> str:
    profiles = list(dict.fromkeys(row["profile"] for row in rows if row["phase"] == "profiles"))
    found = {
        name: setting(rows, lambda row, name=name: row["profile"] == name and row["policy"] != INFINITE)
        for name in profiles
    }
    policies = dict.fromkeys(policy for one in found.values() for policy in one.policies)
    lines = [
        [
            policy,
            *(_fraction(mean(one.mean(source, policy) for source in one.sources)) for one in found.values()),
        ]
        for policy in policies
    ]
    return (
        "### Other models\n\nMeans over the sources, at 5 %:\n\n" + _table(["", *profiles], lines)
        if lines
        else ""
    )


def _commands(rows: Sequence[Row]) -> str:
    """Return one command of `OURS` for each phase."""
    shown = {row["phase"]: row["command"] for row in reversed(rows) if row["policy"] == OURS}
    return (
        "### Commands\n\n"
        "Each row is made by one command, which is in its line of the file. Some of them:\n\n```sh\n"
        + "\n".join(reversed(shown.values()))
        + "\n```"
    )


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        + ["| " + " | ".join(line) + " |" for line in lines]
    )


def _fraction(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _points(lead: Interval | None) -> str:
    if lead is None:
        return ""
    told = f"{lead.mean * 100:+.2f}"
    return f"{told} [{lead.low * 100:+.2f}, {lead.high * 100:+.2f}]" if lead.is_known else told


def _gib(nbytes: float) -> str:
    value = nbytes / 2**30
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def _span(seeds: Sequence[int]) -> str:
    together = list(range(seeds[0], seeds[-1] + 1)) == list(seeds) and len(seeds) > 1
    return f"{seeds[0]} to {seeds[-1]}" if together else ", ".join(map(str, seeds))
