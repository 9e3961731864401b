"""Machines whose times a replay models: their speeds, and the TOML files that describe them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from tiercache.errors import ConfigError
from tiercache.policy import ModelProfile
from tiercache.text import parse_size, shown

_Seconds = Annotated[float, Strict(), Field(ge=0, le=3600)]
_Rate = Annotated[float, Strict(), Field(gt=0, le=1e21)]
"""FLOPs or bytes per second."""


def _plain_bytes(value: object) -> object:
    return float(parse_size(value.removesuffix("/s"))) if isinstance(value, str) else value


_ByteRate = Annotated[_Rate, BeforeValidator(_plain_bytes)]
"""Bytes per second, which a file may give as a text such as "6GB"."""
_Tokens = Annotated[int, Strict(), Field(ge=1, le=2**22)]


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of the loads from one tier."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    bandwidth: _ByteRate
    """Bytes per second, which all loads share."""
    latency: _Seconds = 0.0
    """Seconds before the first byte of each request's load."""


@dataclass(frozen=True, slots=True)
class ReplayMachine:
    """Speeds of the machine for which times are modelled."""

    flops: _Rate = 250e12
    """FLOPs per second that a prefill reaches."""
    host_bandwidth: _ByteRate = 50e9
    """Bytes per second of loads from the host."""
    disk_bandwidth: _ByteRate = 6e9
    """Bytes per second of loads from a storage tier that has no bandwidth of its own."""
    cut_seconds: _Seconds = 0.002
    """Seconds that each cut of a prefill costs: it is one more forward pass, with its launches and its copy.
    A prefill is cut at every checkpoint before the prompt's end."""
    host_latency: _Seconds = 0.0
    """Seconds before the first byte of a load from the host."""
    disk_latency: _Seconds = 0.0
    """The same for a storage tier that has no speed of its own."""
    tiers: dict[str, Speed] = field(default_factory=dict)
    """Speeds of storage tiers by name."""
    request_seconds: _Seconds = 0.0
    """Seconds of the engine that each request costs, whatever its length."""
    pass_seconds: _Seconds = 0.0
    """Seconds that each forward pass of a prefill costs, whatever its length."""
    chunk: _Tokens | None = None
    """Most tokens of one forward pass of a prefill; None for no limit."""
    batch: Annotated[int, Strict(), Field(ge=1, le=4096)] = 1
    """Most requests that have a place at a time."""
    decode_seconds: _Seconds = 0.0
    """Seconds of one token of decoding, whatever the number of requests that decode."""
    decode_seconds_per_request: _Seconds = 0.0
    """Further seconds for each request that decodes."""
    memory_bandwidth: _ByteRate | None = None
    """Bytes per second at which decoding reads the active weights (2 bytes each) for every token. None: that
    time is part of `decode_seconds`."""

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
            self.pass_seconds + profile.flops(*edge) / self.flops + self.cut_seconds * (edge[1] in cuts)
            for edge in pairwise(edges)
        ]
        seconds[0] += self.request_seconds
        return seconds

    def step(self, profile: ModelProfile, requests: int) -> float:
        """Return the seconds of one token of decoding for each of `requests` requests."""
        if not requests:
            return 0.0
        weights = profile.flops_per_token / self.memory_bandwidth if self.memory_bandwidth else 0.0
        return self.decode_seconds + weights + self.decode_seconds_per_request * requests


_MAX_FILE: Final = 2**16
_SUFFIX: Final = ".toml"
MACHINES: Final = tuple(
    sorted(Path(file.name).stem for file in files(__package__).iterdir() if file.name.endswith(_SUFFIX))
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
        raise ConfigError(f"the file is larger than {_MAX_FILE} bytes; is it the description of a machine?")
    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {shown(str(error))}") from error


def _machine(row: dict[str, Any]) -> ReplayMachine:
    given: dict[str, Any] = {"tiers": row.pop("tier", {})}
    row.pop("about", None)
    places = {"tiers": "tier"}
    for table, settings in row.items():
        if table not in _TABLES:
            raise ConfigError(f"{shown(table)} is not known; use about, {', '.join(_TABLES)}, tier")
        if not isinstance(settings, dict):
            raise ConfigError(f"{table} must be a table, [{table}], not {shown(settings)}")
        for key, value in settings.items():
            name = _TABLES[table].get(key)
            if name is None:
                raise ConfigError(
                    f"[{table}] has no setting {shown(key)}; it has {', '.join(_TABLES[table])}"
                )
            given[name], places[name] = value, f"[{table}] {key}"
    try:
        return _CHECKED.validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        name, *inner = map(str, first["loc"])
        place = ".".join([places[name], *inner])
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{place}: {reason}, not {shown(first['input'])}") from error


_CHECKED: Final = TypeAdapter(ReplayMachine)
_TABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "prefill": {name: name for name in ("flops", "pass_seconds", "cut_seconds", "request_seconds", "chunk")},
    "decode": {
        "seconds": "decode_seconds",
        "seconds_per_request": "decode_seconds_per_request",
        "memory_bandwidth": "memory_bandwidth",
    },
    "serving": {"batch": "batch"},
    "host": {"bandwidth": "host_bandwidth", "latency": "host_latency"},
    "storage": {"bandwidth": "disk_bandwidth", "latency": "disk_latency"},
}
"""Settings of each table of a file, and the field of `ReplayMachine` that each sets."""
