"""The cache of a replay: a real controller over pools, copies and storage tiers without bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

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
from tiercache.policy import Costs, ModelProfile, Policy, policy_named
from tiercache_lab.replay.base import Request, Tiers
from tiercache_lab.replay.chain import NullChain, chain_settings
from tiercache_lab.replay.clairvoyant import Clairvoyant, Recorder
from tiercache_lab.replay.machines import ReplayMachine
from tiercache_lab.replay.needs import Need, device_slots, infinite
from tiercache_lab.replay.plane import Inline, NullArena, NullEngine, block_bytes, device_pool, geometries
from tiercache_lab.replay.results import TierUse
from tiercache_lab.replay.sources.base import WorkloadSource
from tiercache_lab.replay.store import NullStore, Witness, check_counters


@dataclass(frozen=True, slots=True)
class Setup:
    """Parameters of one run."""

    policy: str | Policy
    """Name of the eviction policy, or a Policy object that the caller made, such as `Clairvoyant`."""
    profile: ModelProfile
    tiers: Tiers
    checkpoints: str | CheckpointRules = "rules"
    """The controller's option of the same name."""
    machine: ReplayMachine = field(default_factory=ReplayMachine)
    seed: int = 0
    """Seed of the controller's random draws."""
    write: str = WRITE_THROUGH
    write_chance: float = WRITE_CHANCE
    """The controller's options of these names."""


@dataclass(slots=True, eq=False)
class Running:
    """Request that has begun but not ended."""

    request: Request
    admission: Admission
    loads: Mapping[str, float]
    """Bytes that it loads, by the name of the tier from which they come, the fastest first."""
    is_computed: bool = False
    """Whether its prompt has been committed."""

    @property
    def cuts(self) -> tuple[int, ...]:
        """Depths in tokens at which its prefill is cut: the checkpoints before the prompt's end."""
        length = len(self.request.prompt)
        return tuple(depth for depth in self.admission.checkpoints if depth < length)


class SimulatedCache:
    """Cache whose decisions are real and whose bytes are not.

    Raises ConfigError if the tiers are too small for `at_once` requests. Thread safety: one thread.
    """

    def __init__(self, source: WorkloadSource, need: Need, setup: Setup, at_once: int) -> None:
        page_size, geometry = source.page_size, geometries(setup.profile, source.page_size)
        self._setup = setup
        self.now = 0.0
        """Virtual time in seconds; the caller sets it, and it never goes back."""
        self._object_bytes = {name: one.nbytes for name, one in geometry.items()}
        self._tokens_from: Counter[str] = Counter()
        self.running: list[Running] = []
        """Requests that have begun but not ended, the oldest first."""
        self._device_peak = self._working_peak = 0
        block = block_bytes(geometry)
        # The requests cannot fill more than `fillable` bytes. A larger arena would only cost bookkeeping.
        fillable = infinite(source, need, setup.profile, setup.checkpoints).host_bytes
        self._arena = NullArena(min(setup.tiers.host_bytes, fillable), block)
        slots = device_slots(setup.profile, setup.tiers, need, setup.checkpoints, page_size, at_once)
        self._device = {
            name: device_pool(one, count)
            for name, count in zip((PoolName.KV, PoolName.MAMBA), slots, strict=True)
            if (one := geometry.get(name))
        }
        self._store: NullChain | None = None
        if setup.tiers.storage:
            stores = [NullStore(tier.nbytes, lambda: self.now) for tier in setup.tiers.storage]
            self._store = NullChain(chain_settings(setup.tiers), stores, lambda: self.now)
        self._witness = Witness(self._store) if self._store else None
        self._engine: list[NullEngine] = []
        self.controller = HybridCacheController(
            Identity(setup.profile.name, "replay", "bytes", "bytes", "bytes", page_size=page_size),
            self._device,
            self._arena,
            self._witness,
            options=ControllerOptions(
                checkpoints=setup.checkpoints,
                seed=setup.seed,
                in_flight_share=1.0,
                write=setup.write,
                write_chance=setup.write_chance,
                write_retries=0,  # the null store's answer stays the same until the next request
            ),
            profile=setup.profile,
            policy=self._policy(),
            engine=self._make_engine,
            threads=Inline,
            clock=lambda: self.now,
        )
        """The controller, for callers that inspect it."""

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

    def _policy(self) -> Policy:
        policy = self._setup.policy
        return policy if isinstance(policy, Policy) else policy_named(policy, Costs(self._setup.profile))

    def _make_engine(self, *pools: object) -> NullEngine:
        self._engine.append(NullEngine(self._object_bytes))
        return self._engine[0]

    def _evicted(self, tier: Tier) -> int:
        value = self.controller.metrics.value
        return int(sum(value("evicted_objects_total", str(tier), kind) for kind in ("demoted", "lost")))

    def begin(self, request: Request) -> Running:
        """Look a prompt up, admit the request, and restore what is found.

        Raises ConfigError if the device has no room for it.
        """
        if isinstance(self._setup.policy, Recorder | Clairvoyant):
            self._setup.policy.requested()
        controller = self.controller
        self._finish_copies()
        try:
            admission = controller.admit(controller.lookup(request.prompt))
        except PoolFullError as error:
            raise self._too_small(error) from error
        # Inline threads have done each fetch when the call that starts it returns, so this loop is short.
        while admission.poll().status is Status.PENDING:
            pass
        loads = self._loads(admission)
        slowest = admission.sources.slowest()
        if slowest is not None:
            storage = [name for name in loads if name != str(Tier.HOST)]
            name = storage[-1] if slowest is Tier.STORAGE else str(slowest)
            self._tokens_from[name] += admission.depth
        begun = Running(request, admission, loads)
        self.running.append(begun)
        return begun

    def compute(self, running: Running) -> None:
        """Commit the prompt of a request whose prefill has ended, before the request ends."""
        admission, depths = running.admission, self._depths(running)
        self._extend(admission, len(running.request.prompt), len(depths))
        states = {depth: admission.take_states() for depth in depths}
        self.controller.commit(admission, running.request.prompt, states)
        running.is_computed = True

    def end(self, running: Running) -> None:
        """Commit the pages and states of a request, and release its admission."""
        self.running.remove(running)
        request, admission, controller = running.request, running.admission, self.controller
        # sequence:   prompt . . . . . . . . . . . . . . | output without the last token . . . |
        # states at:        ^ admission.checkpoints ^                        ^ end (last whole page)
        sequence, depths = tokens_of(request), self._depths(running)
        end = full_pages(len(sequence), controller.page_size) * controller.page_size
        has_end = (
            bool(self._setup.profile.state_bytes)
            and admission.keeps_end
            and len(request.prompt) <= end
            and end > max(admission.depth, *depths, 0)
        )
        if running.is_computed:
            depths = []
        self._extend(admission, len(sequence), len(depths) + has_end)
        self._count_working()
        if not running.is_computed:
            states = {depth: admission.take_states() for depth in depths}
            controller.commit(admission, request.prompt, states)
        if end > len(request.prompt) or has_end:
            controller.commit(admission, sequence, {end: admission.take_states()} if has_end else {})
        controller.release(admission, ending=request.ending)
        if self._setup.tiers.device_bytes is None:
            # The device is no cache: when the copies to the host are done, nothing stays on the device.
            self._finish_copies()
            controller.evict(Tier.DEVICE)

    def check(self) -> None:
        """Raise RuntimeError if a call of storage has failed, or if the counters contradict each other."""
        self._check_storage()
        check_counters(self.controller.metrics)

    def _depths(self, running: Running) -> list[int]:
        return [*running.admission.checkpoints] if self._setup.profile.state_bytes else []

    def _extend(self, admission: Admission, tokens: int, states: int) -> None:
        self._finish_copies()
        try:
            admission.extend(tokens, states)
        except PoolFullError as error:
            raise self._too_small(error) from error

    def _count_working(self) -> None:
        """Count what the requests hold on the device, one of which has left `running` and is ending."""
        held = sum(
            (pool.capacity - pool.available) * self._object_bytes[name] for name, pool in self._device.items()
        )
        # Two kinds of states have no slot in a replay: the one that the engine advances for each running
        # request, and those at the checkpoints of requests that do not end yet.
        advanced = len(self.running) + 1
        waiting = sum(len(one.admission.checkpoints) for one in self.running if not one.is_computed)
        if self._setup.tiers.device_bytes is not None:
            self._device_peak = max(self._device_peak, held)
            held = waiting = 0  # the device is a tier, whose bytes have been counted
        states = (advanced + waiting) * self._setup.profile.state_bytes
        self._working_peak = max(self._working_peak, held + states)

    def _loads(self, admission: Admission) -> Mapping[str, float]:
        """Return the bytes that the last request loads from each tier, the host first."""
        read = self._store.take_reads() if self._store else {}
        needed: Counter[Tier] = Counter()
        for (tier, pool), count in admission.sources.objects.items():
            needed[tier] += count * self._object_bytes[pool]
        host = {str(Tier.HOST): float(needed[Tier.HOST])} if needed[Tier.HOST] else {}
        below = sum(read.values())
        return host | {name: needed[Tier.STORAGE] * nbytes / below for name, nbytes in read.items() if nbytes}

    def _finish_copies(self) -> None:
        """Wait until no copy is under way, because copies hold device slots."""
        while self.controller.tick():
            self._check_storage()  # a write that waits for the end of an outage would wait for ever
        self._check_storage()

    def _check_storage(self) -> None:
        if self._witness is not None:
            self._witness.check()

    @staticmethod
    def _too_small(error: PoolFullError) -> ConfigError:
        return ConfigError(f"the device is too small for the requests that run at once: {error}")


def tokens_of(request: Request) -> TokenArray:
    """Return the tokens whose KV a request computes: its prompt, and its output without the last token."""
    return np.concatenate([request.prompt, request.output[:-1]])
