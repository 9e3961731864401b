"""Speeds of a machine, from which the times of a replay are calculated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from tiercache.policy import ModelProfile

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
