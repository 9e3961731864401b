"""One run of a replay: every request of a source goes through a real controller over the null data plane."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tiercache.controller import Admission, ControllerOptions, HybridCacheController, Status
from tiercache.core import PoolName, Tier, TokenArray, full_pages
from tiercache.errors import ConfigError, PoolFullError
from tiercache.index import CheckpointRules
from tiercache.keys import Identity
from tiercache.policy import CheckpointKind, Costs, ModelProfile, Policy, policy_named
from tiercache.replay.base import Request, Source
from tiercache.replay.clairvoyant import Clairvoyant, Recorder
from tiercache.replay.plane import Inline, NullArena, NullEngine, block_bytes, device_pool, geometries
from tiercache.replay.results import Kept, TierUse
from tiercache.replay.store import NullStore
from tiercache.replay.tally import Tally

_SPARE_STATES: Final = 8
"""State slots reserved per request: for its checkpoints, for the state at its end, and for the state it was restored from."""
_STATE_SHARE: Final = 0.25
"""Fraction of the device's bytes used for states where `Tiers.device_states` is None."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine that the modelled time to the first token assumes.

    `flops`: FLOPs per second that a prefill reaches. `host_bandwidth` and `disk_bandwidth`: bytes per second of loads from each tier.
    """

    flops: float = 250e12
    host_bandwidth: float = 50e9
    disk_bandwidth: float = 6e9


@dataclass(frozen=True, slots=True)
class Tiers:
    """Bytes of each tier.

    Without `device_bytes` the device holds only what running requests need, so that the host is the cache. `device_states`: state slots
    of the device (default: a quarter of its bytes); pages get the rest. `disk_bytes` 0: no storage. `disk_policy`: the eviction policy of
    the store, whatever policy ranks in the tiers above.
    """

    host_bytes: int
    device_bytes: int | None = None
    disk_bytes: int = 0
    device_states: int | None = None
    disk_policy: str = "lru"

    @property
    def nbytes(self) -> int:
        """Sum of the bytes of all tiers that cache anything."""
        return (self.device_bytes or 0) + self.host_bytes + self.disk_bytes


@dataclass(frozen=True, slots=True)
class Setup:
    """Parameters of one run. `policy`: a policy's name, or a Policy object made by the caller, such as the clairvoyant bound."""

    policy: str | Policy
    profile: ModelProfile
    tiers: Tiers
    checkpoints: CheckpointRules = field(default_factory=CheckpointRules)
    machine: Machine = field(default_factory=Machine)
    refresh_path: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """Upper limits of what a source's requests take.

    `pages`: pages of all requests together if nothing were shared; `longest`: pages of the longest request.
    """

    requests: int
    pages: int
    longest: int


def measure(source: Source, step: Callable[[], object] = lambda: None) -> Need:
    """Read a source once and return what its requests take at most; `step` is called after each request."""
    requests = pages = longest = 0
    for request in source:
        size = -(-(len(request.prompt) + len(request.output)) // source.page_size)
        requests, pages, longest = requests + 1, pages + size, max(longest, size)
        step()
    return Need(requests, pages, longest)


def infinite(source: Source, need: Need, profile: ModelProfile, rules: CheckpointRules) -> Tiers:
    """Return tiers whose host never has to evict."""
    block = block_bytes(geometries(profile, source.page_size)[PoolName.KV])
    states = need.requests * _SPARE_STATES + (need.pages * source.page_size // rules.every if rules.every else 0)
    return Tiers(need.pages * block + states * (-(-profile.state_bytes // block) * block))


class Run:
    """A replay of one source through a controller.

    Raises ConfigError if the tiers do not hold one request. Thread safety: one thread.
    """

    def __init__(self, source: Source, need: Need, setup: Setup) -> None:
        geometry = geometries(setup.profile, source.page_size)
        self._source = source
        self._setup = setup
        self._now = 0.0
        self._running: deque[_Running] = deque()
        self._object_bytes = {name: one.nbytes for name, one in geometry.items()}
        self._tokens_from: Counter[Tier] = Counter()
        self._device_peak = 0
        block = block_bytes(geometry[PoolName.KV])
        # An arena larger than the whole source could fill would only cost bookkeeping memory.
        fillable = infinite(source, need, setup.profile, setup.checkpoints).host_bytes
        self._arena = NullArena(min(setup.tiers.host_bytes, fillable), block)
        self._device = {name: device_pool(one, slots) for (name, one), slots in zip(geometry.items(), self._slots(need), strict=False)}
        self._store: NullStore | None = None
        if setup.tiers.disk_bytes:
            disk_policy = policy_named(setup.tiers.disk_policy, Costs(setup.profile))
            self._store = NullStore(setup.tiers.disk_bytes, disk_policy, source.page_size)
        self._engine: list[NullEngine] = []
        self._controller = HybridCacheController(
            Identity(setup.profile.name, "replay", "bytes", "bytes", "bytes", page_size=source.page_size),
            self._device,
            self._arena,
            self._store,
            options=ControllerOptions(
                checkpoints=setup.checkpoints,
                seed=setup.seed,
                refresh_path=setup.refresh_path,
                in_flight_share=1.0,
                belief_checks=0,
                write_retries=0,  # the null store would answer the same until the next request
            ),
            profile=setup.profile,
            policy=self._policy(),
            engine=self._make_engine,
            threads=Inline,
            clock=lambda: self._now,
        )
        self.tally = Tally(setup.profile, need.requests, lambda: (self._arena.blocks - self._arena.available) * block)

    def go(self, step: Callable[[], object] = lambda: None) -> None:
        """Serve every request; `step` is called after each."""
        for request in self._source:
            while self._running and (len(self._running) >= self._source.concurrency or self._waits_for(request)):
                self._finish()
            self._now = max(self._now, request.arrival)
            if isinstance(self._setup.policy, Recorder | Clairvoyant):
                self._setup.policy.requested()
            self._begin(request)
            if self._source.concurrency == 1:
                self._finish()
            step()
        while self._running:
            self._finish()

    @property
    def controller(self) -> HybridCacheController:
        """The controller that the run drives, for callers that inspect it."""
        return self._controller

    @property
    def under_way(self) -> tuple[Request, ...]:
        """Requests that have begun and not yet ended, the oldest first."""
        return tuple(one.request for one in self._running)

    @property
    def peak_bytes(self) -> int:
        """Sum in bytes of the peaks of all tiers that cache anything; each tier's peak may be at another time."""
        return sum(use.peak for use in self.uses().values())

    def uses(self) -> Mapping[str, TierUse]:
        """Return the usage of each tier by name: `device` and `disk` only where they are configured, `host` always."""
        engine, host = self._engine[0], self._setup.tiers
        found: dict[str, TierUse] = {}
        if host.device_bytes is not None:
            tokens = self._tokens_from[Tier.DEVICE]
            found["device"] = TierUse(host.device_bytes, self._device_peak, 0, engine.loaded_bytes, self._evicted(Tier.DEVICE), tokens)
        found["host"] = TierUse(
            host.host_bytes,
            self._arena.peak * self._arena.block_bytes,
            engine.loaded_bytes,
            engine.stored_bytes + (self._store.read_bytes if self._store else 0),
            self._evicted(Tier.HOST),
            self._tokens_from[Tier.HOST],
        )
        if self._store is not None:
            store = self._store
            tokens = self._tokens_from[Tier.STORAGE]
            found["disk"] = TierUse(host.disk_bytes, store.peak, store.read_bytes, store.written_bytes, store.evicted, tokens)
        return found

    def kept(self) -> tuple[Kept, ...]:
        """Return what the cache holds now, by kind of checkpoint; pages below the last state of their path count as `none`."""
        states: Counter[CheckpointKind] = Counter()
        pages: Counter[CheckpointKind] = Counter()
        for kind, count, with_state in self._controller.contents():
            pages[kind] += count
            states[kind] += with_state
        page, state = self._object_bytes[PoolName.KV], self._setup.profile.state_bytes
        return tuple(Kept(str(kind), states[kind], states[kind] * state, pages[kind] * page) for kind in CheckpointKind if pages[kind])

    def _policy(self) -> Policy:
        policy = self._setup.policy
        return policy if isinstance(policy, Policy) else policy_named(policy, Costs(self._setup.profile))

    def _make_engine(self, *pools: object) -> NullEngine:
        self._engine.append(NullEngine(self._object_bytes))
        return self._engine[0]

    def _slots(self, need: Need) -> tuple[int, int]:
        """Return the numbers of page slots and state slots of the device.

        Raises ConfigError if the device does not hold what runs at once.
        """
        source, tiers, every = self._source, self._setup.tiers, self._setup.checkpoints.every
        own = _SPARE_STATES + (need.longest * source.page_size // every if every else 0)
        least = (need.longest + 1) * source.concurrency, own * source.concurrency
        if tiers.device_bytes is None:
            return least
        page, state = self._object_bytes[PoolName.KV], self._setup.profile.state_bytes
        # Only one request ends at a time; each of the others holds just the state it was restored from.
        ending = own + source.concurrency - 1 if state else 0
        states = tiers.device_states
        if states is None:
            states = int(tiers.device_bytes * _STATE_SHARE) // state if state else 0
        elif states < ending:
            raise ConfigError(f"{states} state slots on the device are too few for what runs at once; give it at least {ending}")
        pages = (tiers.device_bytes - states * state) // page
        if pages < least[0] or states < ending:
            wanted = least[0] * page + states * state
            if state and tiers.device_states is None:
                wanted = math.ceil(max(ending * state / _STATE_SHARE, least[0] * page / (1 - _STATE_SHARE)))
            raise ConfigError(
                f"a device of {tiers.device_bytes} bytes does not hold what runs at once ({least[0]} pages and {ending} states);"
                f" give it at least {wanted}"
            )
        return min(pages, need.pages + least[0]), min(states, need.requests * own + ending)

    def _evicted(self, tier: Tier) -> int:
        value = self._controller.metrics.value
        return int(sum(value("evicted_objects_total", str(tier), kind) for kind in ("demoted", "lost")))

    def _waits_for(self, request: Request) -> bool:
        return any(one.request.session == request.session for one in self._running)

    def _begin(self, request: Request) -> None:
        controller = self._controller
        self._land()
        try:
            admission = controller.admit(controller.lookup(request.prompt))
        except PoolFullError as error:
            raise ConfigError(f"the device is too small for what runs at once: {error}") from error
        while admission.poll().status is Status.PENDING:
            pass
        slowest = admission.sources.slowest()
        if slowest is not None:
            self._tokens_from[slowest] += admission.depth
        self.tally.add(request, admission.depth, self._seconds(request, admission))
        self._running.append(_Running(request, admission))

    def _seconds(self, request: Request, admission: Admission) -> float:
        """Return the modelled seconds to the first token: the loads, then the prefill of what is not restored."""
        machine, seconds = self._setup.machine, 0.0
        for (tier, pool), count in admission.sources.objects.items():
            if tier is not Tier.DEVICE:
                bandwidth = machine.host_bandwidth if tier is Tier.HOST else machine.disk_bandwidth
                seconds += count * self._object_bytes[pool] / bandwidth
        return seconds + self._setup.profile.flops(admission.depth, len(request.prompt)) / machine.flops

    def _land(self) -> None:
        """Wait until every copy under way has landed: copies hold device slots until then."""
        while self._controller.tick():
            pass

    def _finish(self) -> None:
        """End the oldest running request: commit its pages and states to the cache and release it."""
        running = self._running.popleft()
        request, admission, controller = running.request, running.admission, self._controller
        sequence = tokens_of(request)
        depths = [*admission.checkpoints] if self._setup.profile.state_bytes else []
        end = full_pages(len(sequence), controller.page_size) * controller.page_size
        has_end = bool(self._setup.profile.state_bytes) and self._setup.checkpoints.request_end and end > max(admission.depth, *depths, 0)
        self._land()
        try:
            admission.extend(len(sequence), len(depths) + has_end)
        except PoolFullError as error:
            raise ConfigError(f"the device is too small for what runs at once: {error}") from error
        if self._setup.tiers.device_bytes is not None:
            held = sum((pool.capacity - pool.available) * self._object_bytes[name] for name, pool in self._device.items())
            self._device_peak = max(self._device_peak, held)
        controller.commit(admission, request.prompt, {depth: admission.take_states() for depth in depths})
        if end > len(request.prompt) or has_end:
            controller.commit(admission, sequence, {end: admission.take_states()} if has_end else {})
        controller.release(admission)
        if self._setup.tiers.device_bytes is None:
            self._land()
            controller.evict(Tier.DEVICE)


@dataclass(frozen=True, slots=True)
class _Running:
    request: Request
    admission: Admission


def tokens_of(request: Request) -> TokenArray:
    """Return all tokens whose KV exists when a request has ended; the KV of the last output token is never computed."""
    return np.concatenate([request.prompt, request.output[:-1]])
