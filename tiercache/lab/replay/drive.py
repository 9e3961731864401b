"""One run of a replay: all requests of a source go through a real controller, without payload."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tiercache.controller import (
    WRITE_CHANCE,
    WRITE_THROUGH,
    Admission,
    ControllerOptions,
    HybridCacheController,
    Status,
)
from tiercache.core import PoolName, Tier, TokenArray, full_pages
from tiercache.errors import ConfigError, PoolFullError
from tiercache.index import CheckpointRules
from tiercache.keys import Identity
from tiercache.lab.replay.base import Request, Source
from tiercache.lab.replay.chain import NullChain, chain_settings
from tiercache.lab.replay.clairvoyant import Clairvoyant, Recorder
from tiercache.lab.replay.failures import Witness, check_counters
from tiercache.lab.replay.plane import Inline, NullArena, NullEngine, block_bytes, device_pool, geometries
from tiercache.lab.replay.results import Kept, TierUse
from tiercache.lab.replay.store import NullStore
from tiercache.lab.replay.tally import Tally
from tiercache.lab.replay.tiers import ReplayMachine, Tiers
from tiercache.policy import CheckpointKind, Costs, ModelProfile, Policy, policy_named

_SPARE_STATES: Final = 8
"""Number of state slots that are reserved for each request.

These slots hold the states at the request's checkpoints and at its end, and the state from which the request
was restored.
"""
_STATE_SHARE: Final = 0.25
"""Fraction of the device's bytes that states get if `Tiers.device_states` is None."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Parameters of one run."""

    policy: str | Policy
    """Name of the eviction policy, or a Policy object that the caller made, such as `Clairvoyant`."""
    profile: ModelProfile
    tiers: Tiers
    checkpoints: CheckpointRules = field(default_factory=CheckpointRules)
    machine: ReplayMachine = field(default_factory=ReplayMachine)
    refresh_path: bool = False
    """The controller's option of the same name (see `ControllerOptions`)."""
    seed: int = 0
    """Seed of the controller's random draws."""
    write: str = WRITE_THROUGH
    write_chance: float = WRITE_CHANCE
    """The controller's options of these names."""


@dataclass(frozen=True, slots=True)
class Need:
    """Numbers that limit how much memory the requests of a source need."""

    requests: int
    """Number of requests."""
    pages: int
    """Number of pages of all requests together, as if no two requests shared a page."""
    longest: int
    """Number of pages of the longest request."""


def measure(source: Source, step: Callable[[], object] = lambda: None) -> Need:
    """Read a source once and return what its requests need.

    `step` is called after each request.
    """
    requests = pages = longest = 0
    for request in source:
        size = -(-(len(request.prompt) + len(request.output)) // source.page_size)
        requests, pages, longest = requests + 1, pages + size, max(longest, size)
        step()
    return Need(requests, pages, longest)


def infinite(source: Source, need: Need, profile: ModelProfile, rules: CheckpointRules) -> Tiers:
    """Return tiers with a host so large that it never evicts."""
    # A page takes one block. A state takes as many whole blocks as its bytes need.
    geometry = geometries(profile, source.page_size)
    block, pages = block_bytes(geometry), need.pages if PoolName.KV in geometry else 0
    states = need.requests * _SPARE_STATES + (
        need.pages * source.page_size // rules.every if rules.every else 0
    )
    return Tiers(pages * block + states * (-(-profile.state_bytes // block) * block))


class Run:
    """A replay of one source through a controller.

    Raises ConfigError if the tiers are too small for the requests that run at once.

    Thread safety: one thread.
    """

    def __init__(self, source: Source, need: Need, setup: Setup) -> None:
        geometry = geometries(setup.profile, source.page_size)
        self._source = source
        self._setup = setup
        self._now = 0.0
        self._running: deque[_Running] = deque()
        self._object_bytes = {name: one.nbytes for name, one in geometry.items()}
        self._tokens_from: Counter[str] = Counter()
        self._bandwidths = {
            tier.name: tier.bandwidth or setup.machine.disk_bandwidth for tier in setup.tiers.storage
        }
        self._device_peak = self._working_peak = 0
        block = block_bytes(geometry)
        # The requests cannot fill more than `fillable` bytes. A larger arena would only cost bookkeeping.
        fillable = infinite(source, need, setup.profile, setup.checkpoints).host_bytes
        self._arena = NullArena(min(setup.tiers.host_bytes, fillable), block)
        self._device = {
            name: device_pool(one, slots)
            for name, slots in zip((PoolName.KV, PoolName.MAMBA), self._slots(need), strict=True)
            if (one := geometry.get(name))
        }
        self._store: NullChain | None = None
        if setup.tiers.storage:
            costs = Costs(setup.profile)
            stores = [
                NullStore(tier.nbytes, policy_named(tier.policy, costs), source.page_size, lambda: self._now)
                for tier in setup.tiers.storage
            ]
            self._store = NullChain(chain_settings(setup.tiers), stores, lambda: self._now)
        self._witness = Witness(self._store) if self._store else None
        self._engine: list[NullEngine] = []
        self._controller = HybridCacheController(
            Identity(setup.profile.name, "replay", "bytes", "bytes", "bytes", page_size=source.page_size),
            self._device,
            self._arena,
            self._witness,
            options=ControllerOptions(
                checkpoints=setup.checkpoints,
                seed=setup.seed,
                refresh_path=setup.refresh_path,
                in_flight_share=1.0,
                write=setup.write,
                write_chance=setup.write_chance,
                write_retries=0,  # the null store's answer stays the same until the next request
            ),
            profile=setup.profile,
            policy=self._policy(),
            engine=self._make_engine,
            threads=Inline,
            clock=lambda: self._now,
        )
        self.tally = Tally(
            setup.profile, need.requests, lambda: (self._arena.blocks - self._arena.available) * block
        )

    def go(self, step: Callable[[], object] = lambda: None) -> None:
        """Serve all requests; `step` is called after each request has begun.

        Raises RuntimeError if a call of storage has failed: the figures would be those of another cache.
        """
        for request in self._source:
            while self._running and (
                len(self._running) >= self._source.concurrency or self._waits_for(request)
            ):
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
        self._check_storage()
        check_counters(self._controller.metrics)

    @property
    def controller(self) -> HybridCacheController:
        """Controller of the run, for callers that inspect it."""
        return self._controller

    @property
    def stores(self) -> tuple[NullStore, ...]:
        """Stores of the storage tiers, in the order of the tiers."""
        return self._store.stores if self._store else ()

    @property
    def under_way(self) -> tuple[Request, ...]:
        """Requests that have begun but not ended, the oldest first."""
        return tuple(one.request for one in self._running)

    @property
    def peak_bytes(self) -> int:
        """Sum of the peaks of all tiers that are caches, in bytes.

        The tiers may reach their peaks at different times.
        """
        return sum(use.peak for use in self.uses().values())

    @property
    def working_bytes(self) -> int:
        """Peak of the bytes that running requests held on the device outside of every tier."""
        return self._working_peak

    def uses(self) -> Mapping[str, TierUse]:
        """Return the usage of each tier by the tier's name.

        The names are `device` if the device is a cache, `host`, and those of the storage tiers.
        """
        engine, tiers = self._engine[0], self._setup.tiers
        found: dict[str, TierUse] = {}
        if tiers.device_bytes is not None:
            found["device"] = TierUse(
                tiers.device_bytes,
                self._device_peak,
                0,
                engine.loaded_bytes,
                self._evicted(Tier.DEVICE),
                self._tokens_from[str(Tier.DEVICE)],
            )
        found["host"] = TierUse(
            tiers.host_bytes,
            self._arena.peak * self._arena.block_bytes,
            engine.loaded_bytes,
            engine.stored_bytes + (self._store.read_bytes if self._store else 0),
            self._evicted(Tier.HOST),
            self._tokens_from[str(Tier.HOST)],
        )
        for tier, store in zip(tiers.storage, self._store.stores if self._store else (), strict=True):
            tokens = self._tokens_from[tier.name]
            found[tier.name] = TierUse(
                tier.nbytes, store.peak, store.read_bytes, store.written_bytes, store.evicted, tokens
            )
        return found

    def kept(self) -> tuple[Kept, ...]:
        """Return the contents of the cache by kind of checkpoint.

        The pages of an edge of the index's radix tree count for the kind of the state at the edge's end. If
        there is no state, they count for the kind `none`.
        """
        states: Counter[CheckpointKind] = Counter()
        pages: Counter[CheckpointKind] = Counter()
        for kind, count, with_state in self._controller.contents():
            pages[kind] += count
            states[kind] += with_state
        page, state = self._object_bytes.get(PoolName.KV, 0), self._setup.profile.state_bytes
        return tuple(
            Kept(str(kind), states[kind], states[kind] * state, pages[kind] * page)
            for kind in CheckpointKind
            if pages[kind]
        )

    def _policy(self) -> Policy:
        policy = self._setup.policy
        return policy if isinstance(policy, Policy) else policy_named(policy, Costs(self._setup.profile))

    def _make_engine(self, *pools: object) -> NullEngine:
        self._engine.append(NullEngine(self._object_bytes))
        return self._engine[0]

    def _slots(self, need: Need) -> tuple[int, int]:
        """Return the numbers of page slots and state slots of the device.

        Raises ConfigError if the device does not hold the requests that run at once.
        """
        source, tiers, every = self._source, self._setup.tiers, self._setup.checkpoints.every
        # State slots that one request can take: the spare ones, and one for each interval of `every` tokens.
        own = _SPARE_STATES + (need.longest * source.page_size // every if every else 0)
        page, state = self._object_bytes.get(PoolName.KV, 0), self._setup.profile.state_bytes
        state_share = _STATE_SHARE if page else 1.0
        # (page slots, state slots) of the requests that run at once
        minimum = (need.longest + 1) * source.concurrency if page else 0, own * source.concurrency
        if tiers.device_bytes is None:
            return minimum
        # Only one request ends at a time, and it alone takes `own` slots. Each other running request holds
        # one slot: that of the state from which it was restored.
        ending = own + source.concurrency - 1 if state else 0
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

    def _evicted(self, tier: Tier) -> int:
        value = self._controller.metrics.value
        return int(sum(value("evicted_objects_total", str(tier), kind) for kind in ("demoted", "lost")))

    def _waits_for(self, request: Request) -> bool:
        return any(one.request.session == request.session for one in self._running)

    def _begin(self, request: Request) -> None:
        controller = self._controller
        self._finish_copies()
        try:
            admission = controller.admit(controller.lookup(request.prompt))
        except PoolFullError as error:
            raise ConfigError(
                f"the device is too small for the requests that run at once: {error}"
            ) from error
        # Inline threads have done each fetch when the call that starts it returns, so this loop is short.
        while admission.poll().status is Status.PENDING:
            pass
        read = self._read_of_storage()
        slowest = admission.sources.slowest()
        if slowest is not None:
            self._tokens_from[[*read][-1] if slowest is Tier.STORAGE else str(slowest)] += admission.depth
        cuts = sum(depth < len(request.prompt) for depth in admission.checkpoints)
        self.tally.add(request, admission.depth, self._seconds(request, admission, read, cuts), cuts)
        self._running.append(_Running(request, admission))

    def _read_of_storage(self) -> Mapping[str, float]:
        """Return the share of each storage tier in what the last request read of storage.

        The tiers are in their order, without those of which nothing was read.
        """
        read = self._store.take_reads() if self._store else {}
        return {name: nbytes / sum(read.values()) for name, nbytes in read.items() if nbytes}

    def _seconds(self, request: Request, admission: Admission, read: Mapping[str, float], cuts: int) -> float:
        """Return the modelled time to the first token, in seconds.

        All loads come first, one after the other. The prefill of the other tokens follows, with its cuts.
        """
        machine = self._setup.machine
        seconds = cuts * machine.cut_seconds
        for (tier, pool), count in admission.sources.objects.items():
            nbytes = count * self._object_bytes[pool]
            if tier is Tier.HOST:
                seconds += nbytes / machine.host_bandwidth
            elif tier is Tier.STORAGE:
                for name, share in read.items():
                    seconds += nbytes * share / self._bandwidths[name]
        return seconds + self._setup.profile.flops(admission.depth, len(request.prompt)) / machine.flops

    def _finish_copies(self) -> None:
        """Wait until no copy is under way, because copies hold device slots."""
        while self._controller.tick():
            self._check_storage()  # a write that waits for the end of an outage would wait for ever
        self._check_storage()

    def _check_storage(self) -> None:
        if self._witness is not None:
            self._witness.check()

    def _finish(self) -> None:
        """End the oldest running request: commit its pages and states, and release its admission."""
        running = self._running.popleft()
        request, admission, controller = running.request, running.admission, self._controller
        # sequence:   prompt . . . . . . . . . . . . . . | output without the last token . . . |
        # states at:        ^ admission.checkpoints ^                        ^ end (last whole page)
        sequence = tokens_of(request)
        depths = [*admission.checkpoints] if self._setup.profile.state_bytes else []
        end = full_pages(len(sequence), controller.page_size) * controller.page_size
        has_end = (
            bool(self._setup.profile.state_bytes)
            and self._setup.checkpoints.request_end
            and end > max(admission.depth, *depths, 0)
        )
        self._finish_copies()
        try:
            admission.extend(len(sequence), len(depths) + has_end)
        except PoolFullError as error:
            raise ConfigError(
                f"the device is too small for the requests that run at once: {error}"
            ) from error
        held = sum(
            (pool.capacity - pool.available) * self._object_bytes[name] for name, pool in self._device.items()
        )
        # Two kinds of states have no slot in a replay: the one that the engine advances for each running
        # request, and those at the checkpoints of requests that do not end yet.
        advanced, waiting = (
            len(self._running) + 1,
            sum(len(one.admission.checkpoints) for one in self._running),
        )
        if self._setup.tiers.device_bytes is not None:
            self._device_peak = max(self._device_peak, held)
            held = waiting = 0  # the device is a tier, whose bytes have been counted
        states = (advanced + waiting) * self._setup.profile.state_bytes
        self._working_peak = max(self._working_peak, held + states)
        controller.commit(admission, request.prompt, {depth: admission.take_states() for depth in depths})
        if end > len(request.prompt) or has_end:
            controller.commit(admission, sequence, {end: admission.take_states()} if has_end else {})
        controller.release(admission)
        if self._setup.tiers.device_bytes is None:
            # The device is no cache: when the copies to the host are done, nothing stays on the device.
            self._finish_copies()
            controller.evict(Tier.DEVICE)


@dataclass(frozen=True, slots=True)
class _Running:
    request: Request
    admission: Admission


def tokens_of(request: Request) -> TokenArray:
    """Return the tokens whose KV a request computes: its prompt, and its output without the last token."""
    return np.concatenate([request.prompt, request.output[:-1]])
