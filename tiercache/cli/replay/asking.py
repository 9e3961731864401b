"""Conversion of option texts to a question for a study; a wrong option raises ConfigError with one sentence that names it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tiercache.config import parse_size
from tiercache.config.quantities import shown, size_text
from tiercache.errors import ConfigError
from tiercache.index import CheckpointRules
from tiercache.policy import DEFAULT_PROFILE, POLICIES, policy_named, profile_named
from tiercache.replay.base import Source
from tiercache.replay.drive import Machine, Tiers
from tiercache.replay.sources import open_source
from tiercache.replay.study import Question, possible

_CHECKPOINTS: Final = {"branch": "branch", "prompt": "prompt_end", "end": "request_end", "ghost": "ghost"}
"""Names of checkpoints in the options, and the fields of CheckpointRules that they set."""
ALL: Final = "all"
NONE: Final = "none"


def source(spec: str, seed: int, limit: int | None) -> Source:
    """Open the source to replay; raises ConfigError if none is named."""
    if not spec:
        raise ConfigError("no source is named; give a trace file or a generator, such as seed-20457, or see tiercache replay --list")
    return open_source(spec, seed=seed, limit=limit)


def question(
    source: Source,
    policies: str,
    profile: str,
    capacities: Sequence[float],
    tiers: Tiers | None,
    rules: CheckpointRules,
    machine: Machine,
    *,
    refresh_path: bool,
    seed: int,
    bounds: bool,
) -> Question:
    """Return the question; "all" as `policies` stands for every policy that can be used with the model of the profile."""
    model = profile_named(profile or DEFAULT_PROFILE)
    named: Sequence[str] = _parts(policies)
    if policies == ALL:
        named = [name for name in POLICIES if possible(name, model)]
    return Question(source, named, model, capacities, tiers, rules, machine, refresh_path, seed, bounds)


def capacities(text: str) -> tuple[float, ...]:
    """Return the fractions that `--capacity` lists."""
    if text and not _parts(text):
        raise ConfigError(f"--capacity {shown(text)} names none; use fractions of the infinite cache, such as 0.05,0.1")
    return tuple(_number("--capacity", part, "a fraction of the infinite cache, such as 0.1") for part in _parts(text))


def tiers(device: str, host: str, disk: str, states: int | None, disk_policy: str) -> Tiers | None:
    """Return the sizes of the tiers in bytes; None if no size is given."""
    if states is not None and states < 0:
        raise ConfigError(f"--device-states {states} is not possible; use 0 or more")
    if states is not None and not device:
        raise ConfigError("--device-states divides the bytes of a device; give --device-bytes as well")
    policy_named(disk_policy)  # checked now: the study would find the mistake only after minutes
    if not (device or host or disk):
        return None
    return Tiers(
        _size("--host-bytes", host) if host else 0,
        _size("--device-bytes", device) if device else None,
        _size("--disk-bytes", disk) if disk else 0,
        states,
        disk_policy,
    )


def rules(checkpoints: str, every: int, per_path: int) -> CheckpointRules:
    """Return the rules for where states are taken."""
    if every < 0:
        raise ConfigError(f"--every {every} is not possible; use 0 or a number of tokens")
    if per_path < 0:
        raise ConfigError(f"--states-per-path {per_path} is not possible; use 0 or more")
    wanted = [] if checkpoints == NONE else _parts(checkpoints)
    for name in wanted:
        if name not in _CHECKPOINTS:
            raise ConfigError(f"--checkpoints {shown(name)} is not known; use {', '.join(_CHECKPOINTS)} or {NONE}")
    taken = {rule: name in wanted for name, rule in _CHECKPOINTS.items()}
    return CheckpointRules(**taken, every=every, per_path=per_path)


def machine(flops: str, host_bandwidth: str, disk_bandwidth: str) -> Machine:
    """Return the rates from which times are modelled: FLOPs per second, and bytes per second from host and disk."""
    rates = [_number("--flops", flops, "FLOPs per second, such as 250e12")]
    if not 0 < rates[0] < math.inf:
        raise ConfigError(f"--flops {flops} is not possible; use a positive number, such as 250e12")
    for option, text in (("--host-bandwidth", host_bandwidth), ("--disk-bandwidth", disk_bandwidth)):
        rates.append(float(_size(option, text)))
        if not rates[-1]:
            raise ConfigError(f"{option} 0 is not possible; use bytes per second, such as 6GB")
    return Machine(*rates)


def check_report(path: Path) -> None:
    """Raise ConfigError if a report could not be written to `path` at the end."""
    if path.is_dir():
        raise ConfigError(f"--report {path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--report {path}: its directory does not exist; create it first")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"--report {path}: its directory cannot be written to ({error.strerror}); name another one") from error


def notes(question: Question) -> list[str]:
    """Return sentences for the report on how its results were made."""
    rules, machine, tiers = question.checkpoints, question.machine, question.tiers
    taken = [name for name, rule in _CHECKPOINTS.items() if getattr(rules, rule)]
    taken += [f"every {rules.every} tokens"] if rules.every else []
    said = [
        f"States are taken at: {', '.join(taken) or NONE}{f', at most {rules.per_path} a path' if rules.per_path else ''}. A hit makes"
        f" {'its whole path' if question.refresh_path else 'the last node that it needs'} young.",
        f"Times to first token are modelled: {machine.flops / 1e12:g} TFLOP/s, {machine.host_bandwidth / 1e9:g} GB/s from the host,"
        f" {machine.disk_bandwidth / 1e9:g} GB/s from disk.",
    ]
    if tiers is not None:
        device = "as large as what runs" if tiers.device_bytes is None else size_text(tiers.device_bytes)
        said.append(f"Device: {device}; host: {size_text(tiers.host_bytes)}; disk: {size_text(tiers.disk_bytes)}.")
    return said


def _parts(text: str) -> list[str]:
    """Return the parts of `text` between commas: stripped, without empty ones and repetitions."""
    return list(dict.fromkeys(part for one in text.split(",") if (part := one.strip())))


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _number(option: str, text: str, wanted: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option}: {shown(text)} is not a number; use {wanted}") from None
