"""Conversion of the options of `tiercache replay` that are about times: the machine, and the queue at it.

A wrong option raises ConfigError with a message that names the option.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tiercache.config import parse_duration, parse_size
from tiercache.errors import ConfigError
from tiercache.text import exact_duration, shown
from tiercache_lab.replay.machines import ReplayMachine, machine_named
from tiercache_lab.replay.queueing.figures import Objective
from tiercache_lab.replay.queueing.run import Queueing


def machine_of(name: str, flops: str, host_bandwidth: str, disk_bandwidth: str) -> ReplayMachine:
    """Return the speeds from which times are modelled.

    They are those of the machine `name`, which may be empty, where the other options are empty.
    """
    found = machine_named(name) if name else ReplayMachine()
    if flops:
        rate = number_of("--flops", flops, "FLOPs per second, such as 250e12")
        if not 0 < rate < math.inf:
            raise ConfigError(f"--flops {flops} is not possible; use a positive number, such as 250e12")
        found = replace(found, flops=rate)
    if host_bandwidth:
        found = replace(found, host_bandwidth=_bandwidth("--host-bandwidth", host_bandwidth))
    if disk_bandwidth:
        found = replace(found, disk_bandwidth=_bandwidth("--disk-bandwidth", disk_bandwidth))
    return found


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


def times(machine: ReplayMachine, queueing: Queueing | None) -> Iterator[str]:
    """Yield sentences for the report about the modelled times."""
    yield (
        f"Times to first token are calculated from {machine.flops / 1e12:g} TFLOP/s,"
        f" {machine.host_bandwidth / 1e9:g} GB/s from the host, {machine.disk_bandwidth / 1e9:g} GB/s"
        " from disk."
    )
    if queueing is None:
        return
    rate = f", {queueing.rate:g} per second" if queueing.rate is not None else ""
    how = "its pause after the previous one of its session" if queueing.closed else "at its own time"
    yield (
        f"Requests queue for {machine.batch} places{rate}; each comes {how}. They share the bandwidths, and"
        " one engine computes their prefills one after the other."
    )
    limits = [
        f"{name} of at most {exact_duration(limit)}"
        for name, limit in (
            ("a time to first token", queueing.objective.ttft),
            ("a time per further token", queueing.objective.tpot),
        )
        if limit is not None
    ]
    if limits:
        yield f"Goodput counts the requests with {' and '.join(limits)}."


def size_of(option: str, text: str) -> int:
    """Return a size in bytes."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def number_of(option: str, text: str, wanted: str) -> float:
    """Return a number; `wanted` describes it in the error message."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option}: {shown(text)} is not a number; use {wanted}") from None


def _bandwidth(option: str, text: str) -> float:
    nbytes = float(size_of(option, text))
    if not nbytes:
        raise ConfigError(f"{option} 0 is not possible; use bytes per second, such as 6GB")
    return nbytes


def _duration(option: str, text: str) -> float | None:
    if not text:
        return None
    try:
        return parse_duration(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
