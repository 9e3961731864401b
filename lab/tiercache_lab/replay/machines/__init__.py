"""Machines whose times a replay models: their speeds, and the TOML files that describe them."""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from tiercache.errors import ConfigError
from tiercache.policy import ModelProfile
from tiercache.text import parse_size, shown

_NONE: Final[Mapping[str, Speed]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of the loads from one tier."""

    bandwidth: float
    """Bytes per second, which all loads share."""
    latency: float = 0.0
    """Seconds before the first byte of each request's load."""


@dataclass(frozen=True, slots=True)
class ReplayMachine:
    """Speeds of the machine for which times are modelled."""

    flops: float = 250e12
    """FLOPs per second that a prefill reaches."""
    host_bandwidth: float = 50e9
    """Bytes per second of loads from the host."""
    disk_bandwidth: float = 6e9
    """Bytes per second of loads from a storage tier that has no bandwidth of its own."""
    cut_seconds: float = 0.002
    """Seconds that each cut of a prefill costs: it is one more forward pass, with its launches and its copy.

    A prefill is cut at every checkpoint before the prompt's end.
    """
    host_latency: float = 0.0
    """Seconds before the first byte of a load from the host."""
    disk_latency: float = 0.0
    """The same for a storage tier that has no speed of its own."""
    tiers: Mapping[str, Speed] = field(default_factory=lambda: _NONE)
    """Speeds of storage tiers by name."""
    request_seconds: float = 0.0
    """Seconds of the engine that each request costs, whatever its length."""
    pass_seconds: float = 0.0
    """Seconds that each forward pass of a prefill costs, whatever its length."""
    curve: tuple[tuple[int, float], ...] = ()
    """Tokens, and seconds of one forward pass that computes so many tokens of a new prompt; both ascending.

    With a curve, `flops` is only for the attention to earlier tokens, and for passes longer than the curve;
    `pass_seconds` is then part of the curve.
    """
    chunk: int | None = None
    """Most tokens of one forward pass of a prefill; None for no limit."""
    batch: int = 1
    """Most requests that have a place at a time."""
    decode_seconds: float = 0.0
    """Seconds of one token of decoding, whatever the number of requests that decode."""
    decode_seconds_per_request: float = 0.0
    """Further seconds for each request that decodes."""
    memory_bandwidth: float | None = None
    """Bytes per second at which decoding reads the active weights (2 bytes each) for every token.

    None: that time is part of `decode_seconds`.
    """

    def storage(self, name: str, bandwidth: float | None) -> Speed:
        """Return the speed of a storage tier; a `bandwidth` that is not None replaces that of the machine."""
        found = self.tiers.get(name, Speed(self.disk_bandwidth, self.disk_latency))
        return Speed(bandwidth, found.latency) if bandwidth is not None else found

    def prefill(self, profile: ModelProfile, start: int, end: int, cuts: tuple[int, ...]) -> list[float]:
        """Return the seconds of each forward pass that computes the tokens [start, end) of a prompt.

        A pass ends at each depth in `cuts`, and after `chunk` tokens.
        """
        edges = [start]
        for cut in (*(cut for cut in sorted(cuts) if start < cut < end), end):
            while self.chunk is not None and cut - edges[-1] > self.chunk:
                edges.append(edges[-1] + self.chunk)
            edges.append(cut)
        seconds = [
            self._pass(profile, *edge) + self.cut_seconds * (edge[1] in cuts) for edge in pairwise(edges)
        ]
        seconds[0] += self.request_seconds
        return seconds

    def step(self, profile: ModelProfile, requests: int) -> float:
        """Return the seconds of one token of decoding for each of `requests` requests."""
        if not requests:
            return 0.0
        weights = profile.flops_per_token / self.memory_bandwidth if self.memory_bandwidth else 0.0
        return self.decode_seconds + weights + self.decode_seconds_per_request * requests

    def _pass(self, profile: ModelProfile, start: int, end: int) -> float:
        if not self.curve:
            return self.pass_seconds + profile.flops(start, end) / self.flops
        # The pass of a new prompt, and the attention of its tokens to those before them.
        new = profile.flops(0, end - start)
        return self._new(profile, end - start) + (profile.flops(start, end) - new) / self.flops

    def _new(self, profile: ModelProfile, tokens: int) -> float:
        """Return the seconds of a pass of a new prompt by the curve."""
        at = bisect_left(self.curve, tokens, key=lambda point: point[0])
        if at == len(self.curve):
            last, seconds = self.curve[-1]
            return seconds + profile.flops(last, tokens) / self.flops
        if at == 0:
            return self.curve[0][1]
        (low, before), (high, after) = self.curve[at - 1 : at + 1]
        return before + (after - before) * (tokens - low) / (high - low)


_MAX_FILE: Final = 2**16
_MAX_POINTS: Final = 1024
_MAX_SECONDS: Final = 3600.0
_MAX_RATE: Final = 1e21
"""Maximum number of FLOPs or bytes per second."""
_SUFFIX: Final = ".toml"

MACHINES: Final = tuple(
    sorted(
        file.name.removesuffix(_SUFFIX)
        for file in files(__package__).iterdir()
        if file.name.endswith(_SUFFIX)
    )
)
"""Names of the machines that come with tiercache. Their speeds are assumptions, not measurements."""


def machine_named(name_or_path: str) -> ReplayMachine:
    """Return a machine that comes with tiercache, or the one that the file at a path describes.

    What a file leaves out is as in `ReplayMachine`. Raises ConfigError if there is no such machine, and for a
    file that is not such a description; the message names the file and the place in it.
    """
    if name_or_path in MACHINES:
        text = files(__package__).joinpath(name_or_path + _SUFFIX).read_bytes()
    else:
        text = _read(Path(name_or_path))
    try:
        return _machine(_parsed(text))
    except ConfigError as error:
        raise ConfigError(f"machine {shown(Path(name_or_path).name)}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        if path.is_file():  # a pipe or a device could block
            with path.open("rb") as file:
                return file.read(_MAX_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise ConfigError(f"machine {shown(str(path))} cannot be read: {error}") from error
    raise ConfigError(
        f"there is no machine and no file {shown(str(path))}; give the path of a TOML file, or one of"
        f" {', '.join(MACHINES)}"
    )


def _parsed(text: bytes) -> dict[str, Any]:
    if len(text) > _MAX_FILE:
        _refuse(f"the file is larger than {_MAX_FILE} bytes; is it the description of a machine?")
    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {shown(str(error))}") from error


def _machine(row: dict[str, Any]) -> ReplayMachine:
    given: dict[str, Any] = {}
    known = ("about", *_TABLES, _TIER)
    for table, value in row.items():
        if table not in known:
            _refuse(f"{shown(table)} is not known; use {', '.join(known)}")
        if table == "about":
            if not isinstance(value, str):
                _refuse(f"about must be a text, not {shown(value)}")
        elif not isinstance(value, dict):
            _refuse(f"{table} must be a table, [{table}], not {shown(value)}")
        elif table == _TIER:
            given["tiers"] = {name: _speed(name, one) for name, one in value.items()}
        else:
            given |= _fields(f"[{table}]", _TABLES[table], value)
    if given.get("curve") and given.get("pass_seconds"):
        _refuse("[prefill] has a curve, whose seconds are those of whole passes; leave out pass_seconds")
    return ReplayMachine(**given)


def _fields(place: str, keys: Mapping[str, _Field], table: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in table.items():
        if key not in keys:
            _refuse(f"{place} has no setting {shown(key)}; it has {', '.join(keys)}")
        name, parse = keys[key]
        try:
            found[name] = parse(value)
        except ConfigError as error:
            raise ConfigError(f"{place} {key}: {error}") from error
    return found


def _speed(name: str, table: object) -> Speed:
    place = f"[{_TIER}.{name}]"
    if not isinstance(table, dict):
        _refuse(f"{place} must be a table with bandwidth and perhaps latency, not {shown(table)}")
    found = _fields(place, {"bandwidth": ("bandwidth", _bytes), "latency": ("latency", _seconds)}, table)
    if "bandwidth" not in found:
        _refuse(f"{place} has no bandwidth; give bytes per second, such as 6GB")
    return Speed(**found)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
        _refuse(f"{shown(value)} is not a number")
    return float(value) if abs(value) < 1e300 else math.inf


def _seconds(value: object) -> float:
    seconds = _number(value)
    if not 0 <= seconds <= _MAX_SECONDS:
        _refuse(f"{shown(value)} is not possible; use seconds from 0 to {_MAX_SECONDS:g}")
    return seconds


def _rate(value: object) -> float:
    rate = _number(value)
    if not 0 < rate <= _MAX_RATE:
        _refuse(f"{shown(value)} is not possible; use a number per second above 0, up to {_MAX_RATE:g}")
    return rate


def _bytes(value: object) -> float:
    return _rate(parse_size(value.removesuffix("/s")) if isinstance(value, str) else value)


def _whole(most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if type(value) is not int or not 1 <= value <= most:
            _refuse(f"{shown(value)} is not possible; use a whole number from 1 to {most}")
        return value

    return parse


def _curve(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_POINTS:
        _refuse(f"{shown(value)} is not a list of 1 to {_MAX_POINTS} points; write [[tokens, seconds], ...]")
    found = []
    for point in value:
        if not isinstance(point, list) or len(point) != 2:
            _refuse(f"{shown(point)} is not a point; write [tokens, seconds]")
        found.append((_whole(2**22)(point[0]), _seconds(point[1])))
    for (tokens, before), (more, after) in pairwise(found):
        if more <= tokens or after < before:
            _refuse(
                f"the point [{more}, {after:g}] does not follow [{tokens}, {before:g}]; sort the points by"
                " tokens, and let no longer pass take less time than a shorter one"
            )
    return tuple(found)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


_Field = tuple[str, Callable[[object], Any]]
"""Field of `ReplayMachine`, and the function that checks a value for it."""
_TIER: Final = "tier"
_TABLES: Final[Mapping[str, Mapping[str, _Field]]] = {
    "prefill": {
        "flops": ("flops", _rate),
        "curve": ("curve", _curve),
        "pass_seconds": ("pass_seconds", _seconds),
        "cut_seconds": ("cut_seconds", _seconds),
        "request_seconds": ("request_seconds", _seconds),
        "chunk": ("chunk", _whole(2**22)),
    },
    "decode": {
        "seconds": ("decode_seconds", _seconds),
        "seconds_per_request": ("decode_seconds_per_request", _seconds),
        "memory_bandwidth": ("memory_bandwidth", _bytes),
    },
    "serving": {"batch": ("batch", _whole(4096))},
    "host": {"bandwidth": ("host_bandwidth", _bytes), "latency": ("host_latency", _seconds)},
    "storage": {"bandwidth": ("disk_bandwidth", _bytes), "latency": ("disk_latency", _seconds)},
}
