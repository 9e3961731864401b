"""Conversion of the options of `tiercache replay` to the parameters of a study.

A wrong option raises ConfigError with a message that names the option.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tiercache.controller import WRITE_BACK
from tiercache.errors import ConfigError
from tiercache.index import CHECKPOINTS, CheckpointRules, checkpoints_named
from tiercache.policy import DEFAULT_PROFILE, POLICIES, policy_named, profile_named
from tiercache.text import exact_size, shown
from tiercache_lab.replay.base import Source
from tiercache_lab.replay.chain import chain_settings
from tiercache_lab.replay.machines import ReplayMachine
from tiercache_lab.replay.queueing.run import Queueing
from tiercache_lab.replay.sources import WorkloadSource, open_source
from tiercache_lab.replay.sources.options import parameters
from tiercache_lab.replay.study import Question, possible
from tiercache_lab.replay.tiers import StorageTier, Tiers
from tiercache_lab.replay.verb.timing import number_of, size_of, times

_CHECKPOINTS: Final = {"branch": "branch", "prompt": "prompt_end", "end": "request_end", "ghost": "ghost"}
"""Names of checkpoints in `--checkpoints`, and the field of CheckpointRules that each name sets."""
_OWN: Final = frozenset({"capacity", "bandwidth", "policy"})
"""Settings of `--tier` that belong to the replay."""
_OF_A_CHAIN: Final = frozenset({"write", "write_after", "write_per_day", "promote", "read_only"})
"""Settings of `--tier` that a tier of a chain has as well."""
ALL: Final = "all"
NONE: Final = "none"


def source(
    spec: str,
    seed: int,
    limit: int | None,
    *,
    closed: bool = False,
    page: int | None = None,
    arrivals: Path | None = None,
) -> Source:
    """Open the source to replay; the other parameters are those of `open_source`.

    Raises ConfigError if no source is named.
    """
    if not spec:
        raise ConfigError(
            "no source is named; give a trace file or a generator, such as seed-20457 (all generators:"
            " tiercache replay --list)"
        )
    return open_source(spec, seed=seed, limit=limit, closed=closed, page=page, arrivals=arrivals)


def about(source: Source) -> str:
    """Return a sentence on how the source is replayed, which may be empty."""
    return source.about if isinstance(source, WorkloadSource) else ""


def question(
    source: Source,
    policies: str,
    profile: str,
    capacities: Sequence[float],
    tiers: Tiers | None,
    checkpoints: str | CheckpointRules,
    machine: ReplayMachine,
    *,
    refresh_path: bool,
    seed: int,
    write: str,
    write_chance: float,
    bounds: bool,
    queueing: Queueing | None = None,
    index_only: bool = False,
) -> Question:
    """Return the study's parameters.

    `policies` lists names of policies. "all" stands for the main policies that suit the model (`POLICIES`).
    """
    model = profile_named(profile or DEFAULT_PROFILE)
    named: Sequence[str] = _parts(policies)
    if policies == ALL:
        named = [name for name in POLICIES if possible(name, model)]
    if not 0.0 <= write_chance <= 1.0:
        raise ConfigError(f"--write-chance {write_chance:g} is not a probability; use a number from 0 to 1")
    if write == WRITE_BACK and (tiers is None or not tiers.storage):
        raise ConfigError("--write write_back needs a storage tier to write to; add --disk-bytes or --tier")
    return Question(
        source,
        named,
        model,
        capacities,
        tiers,
        checkpoints,
        machine,
        refresh_path,
        seed,
        write,
        write_chance,
        queueing,
        index_only,
        bounds,
    )


def capacities(text: str) -> tuple[float, ...]:
    """Return the fractions that `--capacity` lists."""
    if text and not _parts(text):
        raise ConfigError(
            f"--capacity {shown(text)} contains no number; use fractions of the bytes that an infinite"
            " cache would hold, such as 0.05,0.1"
        )
    return tuple(number_of("--capacity", part, "a fraction, such as 0.1") for part in _parts(text))


def tiers(device: str, host: str, storage: Sequence[StorageTier], states: int | None) -> Tiers | None:
    """Return the sizes of the tiers in bytes; None if no size is given."""
    if states is not None and states < 0:
        raise ConfigError(f"--device-states {states} is not possible; use 0 or more")
    if states is not None and not device:
        raise ConfigError(
            "--device-states sets how many states the device tier holds; give --device-bytes as well"
        )
    if not (device or host or storage):
        return None
    found = Tiers(
        size_of("--host-bytes", host) if host else 0,
        size_of("--device-bytes", device) if device else None,
        tuple(storage),
        states,
    )
    chain_settings(found)  # a wrong setting raises here; the study would find it only after minutes
    return found


def storage(specs: Sequence[str], disk: str, disk_policy: str) -> list[StorageTier]:
    """Return the storage tiers that `--tier` names, or the one of `--disk-bytes`."""
    policy_named(disk_policy)
    nbytes = size_of("--disk-bytes", disk) if disk else 0
    if specs and disk:
        raise ConfigError(
            "--disk-bytes is short for --tier 'disk?capacity=SIZE'; give the disk as a --tier as well"
        )
    if not specs:
        return [StorageTier("disk", nbytes, policy=disk_policy)] if nbytes else []
    return [_storage_tier(spec) for spec in specs]


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
        given.get("policy", "lru"),
        {key: text for key, text in given.items() if key in _OF_A_CHAIN},
    )


def checkpoints(named: str, every: int, per_path: int) -> str | CheckpointRules:
    """Return where the model's recurrent states are saved: the name of a policy, or rules."""
    if every < 0:
        raise ConfigError(f"--every {every} is not possible; use 0 or a number of tokens")
    if per_path < 0:
        raise ConfigError(f"--states-per-path {per_path} is not possible; use 0 or more")
    if named.partition(":")[0] in CHECKPOINTS:
        try:
            checkpoints_named(named)
        except ConfigError as error:
            raise ConfigError(f"--checkpoints: {error}") from error
        if every or per_path:
            raise ConfigError(
                f"--every and --states-per-path belong to kinds of checkpoints, not to --checkpoints {named};"
                " name kinds, such as branch,prompt,end,ghost"
            )
        return named
    wanted = [] if named == NONE else _parts(named)
    for name in wanted:
        if name not in _CHECKPOINTS:
            raise ConfigError(
                f"--checkpoints {shown(name)} is not known; use {', '.join(_CHECKPOINTS)} or {NONE}, or a"
                f" policy: {', '.join(CHECKPOINTS)}"
            )
    taken = {rule: name in wanted for name, rule in _CHECKPOINTS.items()}
    return CheckpointRules(**taken, every=every, per_path=per_path)


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
    machine, tiers = question.machine, question.tiers
    said = [
        (
            f"States are taken {_places(question.checkpoints)}."
            f" A hit marks {'its whole path' if question.refresh_path else 'the last node that it needs'}"
            " as recently used."
        ),
        *times(machine, question.queueing),
    ]
    if question.write == WRITE_BACK:
        said.append(
            "The host writes to storage what it evicts next and what is hit again with a chance of at least"
            f" {question.write_chance:g}."
        )
    if question.index_only:
        said.append("The index served the requests alone: no controller, no copies, no times.")
    said += [text] if (text := about(question.source)) else []
    if tiers is not None:
        device = "caches nothing"
        if tiers.device_bytes is not None:
            device = exact_size(tiers.device_bytes)
        stores = [_described(tier, machine) for tier in tiers.storage]
        said.append(f"Device: {device}; {'; '.join([f'host: {exact_size(tiers.host_bytes)}', *stores])}.")
    return said


def _places(checkpoints: str | CheckpointRules) -> str:
    if isinstance(checkpoints, str):
        return f"by the policy {checkpoints}"
    taken = [name for name, rule in _CHECKPOINTS.items() if getattr(checkpoints, rule)]
    taken += [f"every {checkpoints.every} tokens"] if checkpoints.every else []
    limit = f", at most {checkpoints.per_path} per path" if checkpoints.per_path else ""
    return f"at: {', '.join(taken) or NONE}{limit}"


def _described(tier: StorageTier, machine: ReplayMachine) -> str:
    bandwidth = machine.storage(tier.name, tier.bandwidth).bandwidth / 1e9
    settings = [f"policy {tier.policy}", *(f"{name} {text}" for name, text in tier.settings.items())]
    return f"{tier.name}: {exact_size(tier.nbytes)} at {bandwidth:g} GB/s, {', '.join(settings)}"


def _parts(text: str) -> list[str]:
    """Return the different parts of `text` between commas, stripped of white space, without empty parts."""
    parts = dict.fromkeys(part.strip() for part in text.split(","))
    return [part for part in parts if part]
