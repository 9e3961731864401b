"""Runs of the campaign, in blocks that one command makes, the most important ones first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tiercache.policy import DEFAULT_PROFILE
from tiercache_lab.replay.sources import SOURCES

RIVALS: Final = (
    "lru", "s3fifo", "sieve", "arc", "ttl", "lpc", "gdsf", "seglen", "seglen:additive", "marconi",
)  # fmt: skip
"""Eviction policies that `hvd` is compared with."""
IN_TIERS: Final = ("hvd", "lru", "arc", "s3fifo", "gdsf", "seglen:additive", "marconi")
"""Policies of the two-tier runs."""
BY_PROFILE: Final = ("hvd", "lru", "gdsf", "seglen:additive", "marconi")
"""Policies of the runs with other models."""
BOUNDS: Final = ("clairvoyant",)
"""Rows that a replay adds with `--bounds`."""
INFINITE: Final = "infinite"
"""Row of the infinite cache, which every replay begins with."""
SEEDS: Final = (1000, 1001, 1002, 1003, 1004)
"""Seeds of the generators. Nothing is tuned on seeds of 1000 and more."""
RULES: Final = ""
"""Checkpoint policy of rows that do not name one: the default of `tiercache replay`."""
CHECKPOINTS: Final = ("every:2048", "every:8192", "end", "prompt,end", "branch,end")
"""Other checkpoint policies, as `--checkpoints` takes them."""
PROFILES: Final = ("qwen3.5-9b", "kimi-linear-48b-a3b", "nemotron-h-8b", "jamba-1.5-mini")
"""Other models, between whose states and KV pages the ratio of bytes differs."""
WHOLE: Final = "controller"
"""Phase whose runs of one pool go through the controller; those of other phases, through the index alone."""
PHASES: Final = ("5 %", "10 and 20 %", "two tiers", "checkpoints", WHOLE, "profiles")
"""Parts of the campaign, in their order."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A source of the campaign."""

    name: str
    """Heading of its column."""
    spec: str
    """SOURCE of its commands, without the path on this machine."""
    opened: str = ""
    """Name to open on this machine instead of `spec`; empty: `spec` itself."""
    seeded: bool = True
    """Whether a seed makes other requests. If not, intervals come from windows of the one run."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a cache: a fraction of the infinite cache, or tiers in bytes that are such fractions."""

    host: float
    disk: float = 0.0
    in_bytes: bool = False
    """Whether the command gives the host in bytes; with a disk it always does."""

    def __str__(self) -> str:
        host = f"{self.host * 100:g} %"
        return f"host {host} + disk {self.disk * 100:g} %" if self.disk else host

    def options(self, footprint: int) -> list[str]:
        """Return the options of the command; `footprint` is that of the infinite cache in bytes."""
        if self.disk or self.in_bytes:
            disk = ["--disk-bytes", str(int(footprint * self.disk))] if self.disk else []
            return ["--host-bytes", str(int(footprint * self.host)), *disk]
        return ["--capacity", f"{self.host:g}"]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a policy on a source, with everything that its figures depend on."""

    traffic: Traffic
    seed: int
    policy: str
    """Name of the eviction policy, or the label of a bound."""
    size: Size
    checkpoints: str = RULES
    profile: str = DEFAULT_PROFILE
    limit: int | None = None
    whole: bool = False
    """Whether a run of one pool goes through the controller, too."""

    def command(self, footprint: int = 0) -> str:
        """Return the one command that makes the row; `footprint` counts only for sizes in bytes."""
        policy = "lru" if self.policy in (INFINITE, *BOUNDS) else self.policy
        return shlex.join(
            ["tiercache", "replay", self.traffic.spec, *options(self, (policy,), (self.size,), footprint)]
            + ([] if self.policy in BOUNDS else ["--no-bounds"])
        )


@dataclass(frozen=True, slots=True)
class Block:
    """Runs of one command: several policies at several sizes, which share the run of the infinite cache."""

    phase: str
    traffic: Traffic
    seed: int
    policies: tuple[str, ...]
    sizes: tuple[Size, ...]
    checkpoints: str = RULES
    profile: str = DEFAULT_PROFILE
    limit: int | None = None
    bounds: bool = False
    whole: bool = False
    """Whether runs of one pool go through the controller, too."""

    @property
    def needs_footprint(self) -> bool:
        """Whether the sizes are bytes, which are known only after the block of the same source at 5 %."""
        return any(size.disk or size.in_bytes for size in self.sizes)

    def runs(self) -> Iterator[Run]:
        """Yield the runs; the first is that of the infinite cache."""
        yield infinite(self.traffic, self.seed, self.checkpoints, self.profile, self.limit, whole=self.whole)
        for policy in (*self.policies, *(BOUNDS if self.bounds else ())):
            for size in self.sizes:
                yield Run(
                    self.traffic, self.seed, policy, size, self.checkpoints, self.profile, self.limit,
                    self.whole,
                )  # fmt: skip

    def arguments(self, policies: Sequence[str], footprint: int, *, bounds: bool) -> list[str]:
        """Return the arguments of `tiercache replay` for some of the policies."""
        run = next(self.runs())
        return [
            self.traffic.opened or self.traffic.spec, *options(run, policies, self.sizes, footprint),
            *(() if bounds else ("--no-bounds",)), *(() if self.traffic.seeded else ("--samples",)),
        ]  # fmt: skip


def infinite(
    traffic: Traffic,
    seed: int,
    checkpoints: str = RULES,
    profile: str = DEFAULT_PROFILE,
    limit: int | None = None,
    *,
    whole: bool = False,
) -> Run:
    """Return the run of the infinite cache, which is the first row of any command; this one is at 5 %."""
    return Run(traffic, seed, INFINITE, Size(0.05), checkpoints, profile, limit, whole)


def options(run: Run, policies: Sequence[str], sizes: Sequence[Size], footprint: int) -> list[str]:
    """Return the options that decide the figures of these policies at these sizes."""
    if len(sizes) > 1:
        assert not any(size.disk or size.in_bytes for size in sizes), "one command has one hierarchy"
        sized = ["--capacity", ",".join(f"{size.host:g}" for size in sizes)]
    else:
        sized = sizes[0].options(footprint)
    return [
        "--seed", str(run.seed),
        *(("--limit", str(run.limit)) if run.limit else ()),
        "--policy", ",".join(policies),
        *sized,
        *(() if run.whole or any(size.disk or size.in_bytes for size in sizes) else ("--index-only",)),
        *(("--checkpoints", run.checkpoints) if run.checkpoints != RULES else ()),
        *(("--profile", run.profile) if run.profile != DEFAULT_PROFILE else ()),
    ]  # fmt: skip


def traffics(trace: str = "", sessions: str = "") -> list[Traffic]:
    """Return the generators, and the recorded traffic whose paths are given."""
    found = [Traffic(name, name) for name, kind in SOURCES.items() if not kind.fixed]
    if trace:
        found.append(Traffic("conversation trace", "conversation_trace.jsonl", trace, seeded=False))
    if sessions:
        # A third of the sessions is kept aside: nothing is tuned on them. The seed decides their starts.
        query = "folds=3&fold=2"
        found.append(Traffic("agentic sessions", f"agentic/?{query}", f"{sessions.rstrip('/')}/?{query}"))
    return found


def blocks(
    sources: Sequence[Traffic],
    seeds: Sequence[int],
    policies: Sequence[str],
    checkpoints: Sequence[str] = CHECKPOINTS,
    limit: int | None = None,
) -> Iterator[Block]:
    """Yield all blocks in the order in which they are run; one seed of all sources comes before the next.

    `policies` are those that exist.
    """
    small, larger = (Size(0.05),), (Size(0.1), Size(0.2))

    def some(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in policies)

    of_phase: Mapping[str, Sequence[tuple[tuple[str, ...], tuple[Size, ...], str, str, bool]]] = {
        "5 %": [(tuple(policies), small, RULES, DEFAULT_PROFILE, True)],
        "10 and 20 %": [(tuple(policies), larger, RULES, DEFAULT_PROFILE, True)],
        "two tiers": [
            (some(IN_TIERS), (Size(0.05, 0.25),), RULES, DEFAULT_PROFILE, False),
            (some(("hvd",)), (Size(0.3),), RULES, DEFAULT_PROFILE, False),
        ],
        "checkpoints": [(some(("hvd",)), small, taken, DEFAULT_PROFILE, False) for taken in checkpoints],
        WHOLE: [(some(("hvd", "lru")), small, RULES, DEFAULT_PROFILE, False)],
        "profiles": [(some(BY_PROFILE), small, RULES, profile, False) for profile in PROFILES],
    }
    for phase in PHASES:
        for place, seed in enumerate(seeds):
            for source in sources:
                if place and not source.seeded:
                    continue
                for named, sizes, taken, profile, bounds in of_phase[phase]:
                    if named:
                        yield Block(
                            phase, source, seed, named, sizes, taken, profile, limit, bounds, phase == WHOLE
                        )
