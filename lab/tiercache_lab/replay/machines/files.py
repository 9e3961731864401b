"""Files that describe machines, in TOML, and those that come with tiercache.

about = "one sentence"

[prefill]            # FLOPs per second, or a curve of measured passes, and what a pass or request costs
flops = 400e12
curve = [[64, 0.01], [1024, 0.1]]
pass_seconds = 0.005
cut_seconds = 0.002
request_seconds = 0.001
chunk = 8192

[decode]
seconds = 0.01
seconds_per_request = 0.0002
memory_bandwidth = "2.5TB"

[serving]
batch = 64

[host]
bandwidth = "50GB"
latency = 0.0001

[storage]            # of tiers without a table of their own
bandwidth = "6GB"
latency = 0.0005

[tier.remote]        # of the storage tier with this name
bandwidth = "1GB"
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

import tomli_w

from tiercache.errors import ConfigError
from tiercache.text import parse_size, shown
from tiercache_lab.replay.machines.base import ReplayMachine, Speed

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


def machine_text(machine: ReplayMachine, about: str) -> str:
    """Return the file that describes a machine; `machine_named` gives an equal machine for it."""
    found: dict[str, Any] = {"about": about}
    for table, keys in _TABLES.items():
        for key, (name, _) in keys.items():
            value = getattr(machine, name)
            if value != _DEFAULTS[name] or name in ("flops", "batch"):
                found.setdefault(table, {})[key] = (
                    [list(point) for point in value] if name == "curve" else value
                )
    tiers = {
        name: {"bandwidth": speed.bandwidth, "latency": speed.latency}
        for name, speed in machine.tiers.items()
    }
    return tomli_w.dumps(found | ({_TIER: tiers} if tiers else {}))


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
_DEFAULTS: Final = {one.name: getattr(ReplayMachine(), one.name) for one in fields(ReplayMachine)}
