"""Room for the requests of a source: pages, slots of the device, and the host of an infinite cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.index import CheckpointRules, checkpoints_named
from tiercache.policy import ModelProfile
from tiercache_lab.replay.base import Tiers
from tiercache_lab.replay.plane import block_bytes, geometries
from tiercache_lab.replay.sources.base import WorkloadSource

_SPARE_STATES: Final = 3
"""Number of state slots that are reserved for each request besides those for the states that it may leave.
One of them holds the state from which the request was restored."""
_STATE_SHARE: Final = 0.25
"""Fraction of the device's bytes that states get if `Tiers.device_states` is None."""


@dataclass(frozen=True, slots=True)
class Need:
    """Numbers that limit how much memory the requests of a source need."""

    requests: int
    pages: int
    """Number of pages of all requests together, as if no two requests shared a page."""
    longest: int
    """Number of pages of the longest request."""
    last: float = 0.0
    """Arrival of the last request, in seconds since the start."""


def measure(source: WorkloadSource, step: Callable[[], object] = lambda: None) -> Need:
    """Read a source once and return what its requests need. `step` is called after each request."""
    requests = pages = longest = 0
    last = 0.0
    for request in source:
        size = -(-(len(request.prompt) + len(request.output)) // source.page_size)
        requests, pages, longest = requests + 1, pages + size, max(longest, size)
        last = request.arrival
        step()
    return Need(requests, pages, longest, last)


def infinite(
    source: WorkloadSource, need: Need, profile: ModelProfile, checkpoints: str | CheckpointRules
) -> Tiers:
    """Return tiers with a host so large that it never evicts."""
    # A page takes one block. A state takes as many whole blocks as its bytes need.
    geometry = geometries(profile, source.page_size)
    block, pages = block_bytes(geometry), need.pages if PoolName.KV in geometry else 0
    mean = -(-need.pages * source.page_size // max(1, need.requests))
    states = need.requests * _states_of(checkpoints, mean, source.page_size)
    return Tiers(pages * block + states * (-(-profile.state_bytes // block) * block))


def _states_of(checkpoints: str | CheckpointRules, tokens: int, page_size: int) -> int:
    """Return the number of state slots of a request of `tokens` tokens.

    It grows at most in proportion to the tokens, so that a request of the mean length tells of all requests.
    """
    return _SPARE_STATES + checkpoints_named(checkpoints).most(tokens, page_size)


def device_slots(
    profile: ModelProfile,
    tiers: Tiers,
    need: Need,
    checkpoints: str | CheckpointRules,
    page_size: int,
    at_once: int,
) -> tuple[int, int]:
    """Return the numbers of page slots and state slots of a device for `at_once` requests.

    Raises ConfigError if the device does not hold the requests that run at once.
    """
    own = _states_of(checkpoints, need.longest * page_size, page_size)
    kv = geometries(profile, page_size).get(PoolName.KV)
    page, state = kv.nbytes if kv else 0, profile.state_bytes
    state_share = _STATE_SHARE if page else 1.0
    # (page slots, state slots) of the requests that run at once
    minimum = (need.longest + 1) * at_once if page else 0, own * at_once
    if tiers.device_bytes is None:
        return minimum
    # Only one request ends at a time, and it alone takes `own` slots. Each other running request holds
    # one slot: that of the state from which it was restored.
    ending = own + at_once - 1 if state else 0
    states = tiers.device_states
    if states is None:
        states = int(tiers.device_bytes * state_share) // state if state else 0
    elif states < ending:
        raise ConfigError(
            f"{states} state slots on the device are too few for the requests that run at once;"
            f" use at least {ending}"
        )
    pages = (tiers.device_bytes - states * state) // page if page else 0
    if pages < minimum[0] or states < ending:
        wanted = minimum[0] * page + states * state
        if state and tiers.device_states is None:
            # States and pages each get a fixed share of the bytes. `wanted` is the larger of two sizes:
            # the first makes the share of the states large enough, the second the share of the pages.
            wanted = math.ceil(max(ending * state / state_share, minimum[0] * page / (1 - _STATE_SHARE)))
        raise ConfigError(
            f"a device of {tiers.device_bytes} bytes does not hold the requests that run at once"
            f" ({minimum[0]} pages and {ending} states); give it at least {wanted} bytes"
        )
    return min(pages, need.pages + minimum[0]), min(states, need.requests * own + ending)
