"""Conversion of the options of `tiercache replay` to the parameters of a study.

A wrong option raises ConfigError with a message that names the option.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from tiercache.config import parse_duration, parse_size
from tiercache.controller import WRITE_BACK
from tiercache.errors import ConfigError
from tiercache.index import CHECKPOINTS, CheckpointRules, checkpoints_named
from tiercache.policy import ModelProfile
from tiercache.text import exact_duration, exact_size, shown
from tiercache_lab.policies import MAIN
from tiercache_lab.replay.base import StorageTier, Tiers
from tiercache_lab.replay.chain import chain_settings
from tiercache_lab.replay.queueing.run import Queueing
from tiercache_lab.replay.results import Objective
from tiercache_lab.replay.sources import WorkloadSource, open_source
from tiercache_lab.replay.sources.base import parameters
from tiercache_lab.replay.study import Question, possible

T = TypeVar("T")

_CHECKPOINTS: Final = {"branch": "branch", "prompt": "prompt_end", "end": "request_end", "ghost": "ghost"}
"""Names of checkpoints in `--checkpoints`, and the field of CheckpointRules that each name sets."""
_OWN: Final = frozenset({"capacity", "bandwidth"})
"""Settings of `--tier` that belong to the replay."""
_OF_A_CHAIN: Final = frozenset({"write", "write_after", "write_per_day", "promote", "read_only"})
"""Settings of `--tier` that a tier of a chain has as well."""
ALL: Final = "all"
NONE: Final = "none"
_PLAN_POLICY: Final = "hvd"


def source(
    spec: str, seed: int, limit: int | None, *, closed: bool = False, page: int | None = None
) -> WorkloadSource:
    """Open the source to replay as `open_source` does; raises ConfigError if no source is named."""
    if not spec:
        raise ConfigError(
            "no source is named; give a trace file or a generator, such as seed-20457 (all generators:"
            " tiercache replay --list)"
        )
    return open_source(spec, seed=seed, limit=limit, closed=closed, page=page)


def policies(names: str, profile: ModelProfile, *, plan: bool) -> Sequence[str]:
    """Return the policies that `names` lists; "all" stands for the main ones that suit the model.

    A plan runs one policy; for it, "all" stands for that which controllers use. Raises ConfigError for more.
    """
    if names == ALL:
        return [_PLAN_POLICY] if plan else [name for name in MAIN if possible(name, profile)]
    named = _parts(names)
    if plan and len(named) > 1:
        raise ConfigError(f"--plan runs one policy, and --policy names {len(named)}; name one of them")
    return named


def check_plan(**given: object) -> None:
    """Raise ConfigError if an option gives a size, or how a tier behaves, which a plan decides itself."""
    wrong = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if wrong:
        raise ConfigError(f"--plan finds the sizes of host and disk itself; leave out {', '.join(wrong)}")


def check_writes(write: str, chance: float, tiers: Tiers | None) -> None:
    """Raise ConfigError for writes to storage that are not possible."""
    if not 0.0 <= chance <= 1.0:
        raise ConfigError(f"--write-chance {chance:g} is not a probability; use a number from 0 to 1")
    if write == WRITE_BACK and (tiers is None or not tiers.storage):
        raise ConfigError("--write write_back needs a storage tier to write to; add --disk-bytes or --tier")


def capacities(text: str) -> tuple[float, ...]:
    """Return the fractions that `--capacity` lists."""
    try:
        found = tuple(map(float, _parts(text)))
    except ValueError:
        found = ()
    if text and not found:
        raise ConfigError(
            f"--capacity {shown(text)} is not a list of numbers; use fractions of the bytes that an infinite"
            " cache would hold, such as 0.05,0.1"
        )
    return found


def tiers(device: str, host: str, disk: str, specs: Sequence[str]) -> Tiers | None:
    """Return the sizes of the tiers in bytes; None if no size is given.

    `specs` are the storage tiers of `--tier`; `disk` is the size of the only one if there are none.
    """
    nbytes = size_of("--disk-bytes", disk) if disk else 0
    if specs and disk:
        raise ConfigError(
            "--disk-bytes is short for --tier 'disk?capacity=SIZE'; give the disk as a --tier as well"
        )
    storage = [_storage_tier(spec) for spec in specs] or ([StorageTier("disk", nbytes)] if nbytes else [])
    if not (device or host or storage):
        return None
    found = Tiers(
        size_of("--host-bytes", host) if host else 0,
        size_of("--device-bytes", device) if device else None,
        tuple(storage),
    )
    chain_settings(found)  # a wrong setting raises here; the study would find it only after minutes
    return found


def _storage_tier(spec: str) -> StorageTier:
    name, _, query = spec.partition("?")
    given = parameters(name or "tier", query)
    if not name or "capacity" not in given:
        raise ConfigError(
            f"--tier {shown(spec)} has no {'capacity' if name else 'name'}; write it like"
            " 'disk?capacity=250GiB&bandwidth=6GB'"
        )
    known = _OWN | _OF_A_CHAIN
    if unknown := sorted(given.keys() - known):
        raise ConfigError(
            f"--tier {name} has no setting {shown(unknown[0])}; it has {', '.join(sorted(known))}"
        )
    bandwidth = None
    if "bandwidth" in given:
        bandwidth = float(size_of(f"--tier {name}, bandwidth", given["bandwidth"].removesuffix("/s")))
    return StorageTier(
        name,
        size_of(f"--tier {name}, capacity", given["capacity"]),
        bandwidth,
        {key: text for key, text in given.items() if key in _OF_A_CHAIN},
    )


def checkpoints(named: str) -> str | CheckpointRules:
    """Return where the model's recurrent states are saved: the name of a policy, or rules."""
    if named.partition(":")[0] in CHECKPOINTS:
        try:
            checkpoints_named(named)
        except ConfigError as error:
            raise ConfigError(f"--checkpoints: {error}") from error
        return named
    wanted = [] if named == NONE else _parts(named)
    for name in wanted:
        if name not in _CHECKPOINTS:
            raise ConfigError(
                f"--checkpoints {shown(name)} is not known; use {', '.join(_CHECKPOINTS)} or {NONE}, or a"
                f" policy: {', '.join(CHECKPOINTS)}"
            )
    return CheckpointRules(**{rule: name in wanted for name, rule in _CHECKPOINTS.items()})


def queueing_of(
    machine: str, *, rate: float | None, closed: bool, slo_ttft: str, slo_tpot: str
) -> Queueing | None:
    """Return the queue in front of a machine; None if `machine` is empty.

    Raises ConfigError for an option of a queue without a machine.
    """
    given = {"--rate": rate is not None, "--open": not closed}
    given |= {"--slo-ttft": bool(slo_ttft), "--slo-tpot": bool(slo_tpot)}
    extra = [option for option, there in given.items() if there]
    if not machine and extra:
        raise ConfigError(
            f"{extra[0]} is for requests that queue at a machine; add --machine, such as --machine h100"
        )
    if rate is not None and not 0 < rate < math.inf:
        raise ConfigError(f"--rate {rate:g} is not possible; use requests per second, such as 2")
    objective = Objective(_duration("--slo-ttft", slo_ttft), _duration("--slo-tpot", slo_tpot))
    return Queueing(rate, closed, objective) if machine else None


def check_report(path: Path) -> None:
    """Raise ConfigError if the report could not be written to `path`."""
    if path.is_dir():
        raise ConfigError(f"--report {path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--report {path}: its directory does not exist; create it first")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(
            f"--report {path}: its directory cannot be written to ({error.strerror}); name another one"
        ) from error


def notes(question: Question) -> list[str]:
    """Return sentences for the report about how the results were made."""
    machine, tiers, queueing, checkpoints = (
        question.machine, question.tiers, question.queueing, question.checkpoints,
    )  # fmt: skip
    places = f"by the policy {checkpoints}"
    if isinstance(checkpoints, CheckpointRules):
        taken = [name for name, rule in _CHECKPOINTS.items() if getattr(checkpoints, rule)]
        places = f"at: {', '.join(taken) or NONE}"
    said = [
        f"States are taken {places}.",
        f"Times to first token are calculated from {machine.flops / 1e12:g} TFLOP/s,"
        f" {machine.host_bandwidth / 1e9:g} GB/s from the host, {machine.disk_bandwidth / 1e9:g} GB/s"
        " from disk.",
    ]
    if queueing is not None:
        rate = f", {queueing.rate:g} per second" if queueing.rate is not None else ""
        said.append(f"Requests queue for {machine.batch} places{rate}.")
        times = {"to the first token": queueing.objective.ttft, "per further token": queueing.objective.tpot}
        limits = [f"{exact_duration(limit)} {name}" for name, limit in times.items() if limit is not None]
        if limits:
            said.append(f"Goodput counts the requests with at most {' and '.join(limits)}.")
    if question.write == WRITE_BACK:
        said.append(
            "The host writes to storage what it evicts next and what is hit again with a chance of at least"
            f" {question.write_chance:g}."
        )
    said += [question.source.about] if question.source.about else []
    if tiers is not None:
        device = "caches nothing" if tiers.device_bytes is None else exact_size(tiers.device_bytes)
        held = [f"Device: {device}", f"host: {exact_size(tiers.host_bytes)}"]
        for tier in tiers.storage:
            bandwidth = machine.storage(tier.name, tier.bandwidth).bandwidth / 1e9
            settings = [f"{name} {text}" for name, text in tier.settings.items()]
            held.append(
                ", ".join([f"{tier.name}: {exact_size(tier.nbytes)} at {bandwidth:g} GB/s", *settings])
            )
        said.append(f"{'; '.join(held)}.")
    return said


def _parts(text: str) -> list[str]:
    """Return the different parts of `text` between commas, stripped of white space, without empty parts."""
    parts = dict.fromkeys(part.strip() for part in text.split(","))
    return [part for part in parts if part]


def size_of(option: str, text: str) -> int:
    """Return a size in bytes."""
    return _parsed(option, parse_size, text)


def _duration(option: str, text: str) -> float | None:
    return _parsed(option, parse_duration, text) if text else None


def _parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
