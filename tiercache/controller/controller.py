"""`HybridCacheController`: the one object that an engine's worker talks to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from tiercache.controller.admission import Admission
from tiercache.controller.beliefs import Beliefs
from tiercache.controller.io_threads import IoThreads
from tiercache.controller.lookup import Lookup, look_up
from tiercache.controller.shadows import Shadows
from tiercache.controller.state import ControllerOptions, ControllerState, Fence
from tiercache.controller.write_through import WriteThrough
from tiercache.core import HitPolicy, Locations, PoolName, Tier, TokenArray, as_tokens
from tiercache.errors import AdmissionError, ClosedError, GeometryError, InputError, SlotError, TokenError
from tiercache.index import Content, HybridIndex
from tiercache.keys import Identity, Shard, namespace_of
from tiercache.metrics import Metrics
from tiercache.policy import DEFAULT_PROFILE, Costs, ModelProfile, Policy, Portfolio, policy_named, profile_named
from tiercache.policy.costs import LOAD_FLOPS_PER_BYTE
from tiercache.pools import BlockArena, DevicePool, HostPool
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.storage.hybrid import HybridStorage
from tiercache.transfer import TransferEngine, engine_for

_log = logging.getLogger(__name__)

EngineFactory = Callable[[Mapping[PoolName, DevicePool], Mapping[PoolName, HostPool]], TransferEngine]


class HybridCacheController:
    """Keeps KV pages and recurrent states across requests, on the device, in host memory and in a store.

    A request is `lookup` -> `admit` -> `poll` until ready -> compute from the restored depth, `commit` at every checkpoint and at the end
    ->
    `release`. Depths are in tokens and multiples of the page size.

    The caller guarantees: committed slots hold what the model computed for exactly those tokens, under `identity`; a state slot handed to
    `commit` is not written again; device memory is not touched after `close`.

    `shard`: which part of each object this rank holds, of all pools or by pool; a pool that is not named is whole on every rank.
    `profile`: of the model, by which the policy weighs bytes against computation (default: that of a Qwen3-Next);
    `policy`: one made elsewhere, instead of the options'.

    The controller owns the host pools, the index and its threads; it closes `storage` and the arena with itself. Nothing here waits for
    storage, except `flush` and `close`, which say so.

    Thread safety: one owner thread, the engine's. Copies and storage run on threads of their own and hand in events, which each call drains.
    """

    def __init__(
        self,
        identity: Identity,
        device_pools: Mapping[PoolName, DevicePool],
        arena: BlockArena,
        storage: StorageBackend | None = None,
        *,
        shard: Shard | Mapping[PoolName, Shard] | None = None,
        options: ControllerOptions | None = None,
        profile: ModelProfile | None = None,
        policy: Policy | None = None,
        engine: EngineFactory = engine_for,
        threads: Callable[[str, int], IoThreads] = IoThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or ControllerOptions()
        page_pools, state_pools = _kinds(identity, device_pools)
        namespace = namespace_of(identity)
        profile = profile or profile_named(DEFAULT_PROFILE)
        costs = Costs(profile, options.load_flops_per_byte or LOAD_FLOPS_PER_BYTE)
        host = {name: HostPool(pool.geometry, arena) for name, pool in device_pools.items()}
        self._backend = storage
        self._hybrid: HybridStorage | None = None
        if storage is not None:
            self._hybrid = HybridStorage(storage, namespace=NamespaceRecord(namespace, identity.public_record()))
            shards = shard if isinstance(shard, Mapping) else dict.fromkeys(host, shard)
            if unknown := shards.keys() - host.keys():
                raise InputError(
                    f"a shard is given for {', '.join(sorted(unknown))}, which is no pool here; the pools are {', '.join(host)}"
                )
            for name, pool in host.items():
                self._hybrid.register_pool(pool, shards.get(name))
        self._state = ControllerState(
            index=HybridIndex(
                page_size=identity.page_size,
                namespace=namespace,
                page_pools=page_pools,
                state_pools=state_pools,
                policy=policy or policy_named(options.policy, costs),
                refresh="path" if options.refresh_path else "last",
                checkpoints=options.checkpoints,
                object_bytes={name: pool.geometry.nbytes for name, pool in device_pools.items()},
                seed=options.seed,
            ),
            device=device_pools,
            host=host,
            arena=arena,
            engine=engine(device_pools, host),
            storage=self._hybrid,
            metrics=Metrics(device_pools),
            options=options,
            page_size=identity.page_size,
            namespace=namespace,
            profile=profile,
            clock=clock,
            threads=threads,
        )
        self._write_through = WriteThrough(self._state)
        self._beliefs = Beliefs(self._state)
        self._state.on_landed = self._go_on
        chosen = self._state.index.policy
        self._shadows = Shadows(self._state, chosen) if isinstance(chosen, Portfolio) else None
        self._admissions: set[Admission] = set()
        self._closed = self._drained = False
        self._hanging: threading.Thread | None = None

    @property
    def metrics(self) -> Metrics:
        """Counters of this controller."""
        return self._state.metrics

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._state.page_size

    def lookup(self, tokens: Any, extra: bytes = b"") -> Lookup:
        """What is known of a prompt; asks storage in the background about the rest. Changes nothing and never waits.

        `tokens`: integers, ideally a numpy array. `extra`: see `keys.sequence_extra`. TokenError for an empty prompt or bad ids.
        """
        self._enter()
        prompt = as_tokens(tokens)
        if not len(prompt):
            raise TokenError("the prompt is empty; pass at least one token")
        if prompt is tokens or prompt.base is not None:
            prompt = prompt.copy()  # an engine may use its token buffer again, while the request goes on
        self._beliefs.check()
        return look_up(self._state, prompt, extra)

    def admit(self, lookup: Lookup, *, tokens: int | None = None, states: int = 0, deadline: float | None = None) -> Admission:
        """Reserve slots for `tokens` tokens (default: the prompt) and `states` states, and pin what will be read.

        All or nothing: PoolFullError, with nothing changed, if evicting everything that is not in use would not be enough. `deadline`:
        seconds to wait for storage at most (default: the options').
        """
        self._enter()
        tokens = len(lookup.tokens) if tokens is None else tokens
        if tokens < len(lookup.tokens):
            raise InputError(f"an admission for {tokens} tokens cannot hold the prompt of {len(lookup.tokens)}; ask for at least that many")
        if states < 0:
            raise InputError(f"{states} states cannot be reserved; pass 0 or more")
        wait = self._state.options.restore_deadline if deadline is None else deadline
        admission = Admission(self._state, lookup, tokens, states, self._state.clock() + wait)
        try:
            admission.poll()
        except BaseException:
            admission.close()
            raise
        self._admissions.add(admission)
        return admission

    def commit(
        self,
        admission: Admission,
        tokens: Any,
        states: Mapping[int, Mapping[PoolName, int]] | None = None,
        *,
        pages: Mapping[PoolName, Locations] | None = None,
        fence: Fence | None = None,
    ) -> Mapping[PoolName, Locations]:
        """Give the full pages of `tokens`, and states by depth in tokens, to the cache; write-through starts behind.

        `tokens` are all tokens of the sequence whose KV is in the slots. `states` slots come from `Admission.take_states`. `pages` may
        repeat the slot table, to have it checked. `fence`: passed when the device has finished writing and reading those slots (default:
        it has).

        Returns the slot table to use from now on: where the cache held a page already, its slot takes the place of the request's own,
        which is freed after the fence. SlotError or InputError, with nothing changed, for slots that are not this admission's, depths that
        are not whole pages, or tokens that are not those admitted.
        """
        self._enter()
        self._require_mine(admission)
        admission.require_started()
        self._check_fence(fence)
        sequence, by_depth = as_tokens(tokens), {}
        self._check_tokens(admission, sequence)
        for depth, slots in (states or {}).items():
            if depth % self.page_size or not 0 < depth <= len(sequence):
                raise InputError(
                    f"a state at {depth} tokens cannot be committed; use multiples of {self.page_size} up to the {len(sequence)} given"
                )
            by_depth[depth // self.page_size] = dict(slots)
        admission.slots.check_states(by_depth.values())
        full = len(sequence) // self.page_size
        _check_pages(admission, pages, full)
        table = {p: t[:full] for p, t in admission.pages.items()}
        self._state.note_fence(fence, [*table.items(), *(pair for slots in by_depth.values() for pair in slots.items())])
        inserted = self._state.index.insert(
            sequence[: full * self.page_size],
            table,
            by_depth,
            admission.lookup.extra,
            checkpoints=admission.checkpoint_kinds,
            origin=admission.origin,
        )
        admission.follow(inserted, sequence[: full * self.page_size], fence)
        depths = {*by_depth, admission.depth // self.page_size}  # a state that was there already may not have come down then
        self._write_through.send(inserted.node, sequence[: full * self.page_size], admission.lookup.extra, depths)
        return admission.pages

    def release(self, admission: Admission, *, fence: Fence | None = None) -> None:
        """End a request: unpin, give its own slots back. AdmissionError if that was done before.

        `fence`: passed when the device no longer reads or writes the request's slots (default: it does not).
        """
        self._enter()
        self._require_mine(admission)
        self._check_fence(fence)
        admission.close(fence)
        self._admissions.discard(admission)
        if self._shadows is not None and admission.committed:
            self._shadows.served(admission.lookup.tokens, admission.sequence, admission.lookup.extra)

    def tick(self, wait: float = 0.0) -> bool:
        """Apply what has happened in the background, after up to `wait` seconds if nothing has; was anything under way?

        If not, the next tick will find nothing new, and what was refused for want of room will be refused again. Every call applies events;
        an idle engine ticks now and then.
        """
        busy = self._state.under_way
        self._enter()
        if wait and self._state.under_way:
            self._state.await_event(wait)
            self._state.drain()
        return busy

    def contents(self) -> Iterator[Content]:
        """What the cache holds in any tier, edge by edge."""
        self._enter()
        return self._state.index.contents()

    def evict(self, tier: Tier) -> None:
        """Free everything in `tier` that no request and no transfer is using.

        Before a sleep, to hand memory over, or to measure a tier below.
        """
        self._enter()
        if tier is Tier.STORAGE:
            raise InputError("storage is not emptied from here; flush its namespace with the store itself")
        self._state.evict_all(tier)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until nothing committed so far is on its way, and storage has flushed what it took.

        False if that took longer than `timeout` seconds, or if something did not get there since the last flush: the host had no room, a
        copy failed, storage did not take it, or is left alone because it hangs. `unstored` says how many objects; a flush that waited for
        all the others logs it, and forgets those that were given up.
        """
        self._enter()
        end = time.monotonic() + timeout
        if not self._settle(timeout):
            return False
        if self._backend is not None and not self._within(end - time.monotonic(), self._backend.flush):
            _log.warning("storage did not flush within %g s", timeout)
            return False
        missing, self._state.unstored = self.unstored, 0
        if missing:
            _log.warning("%d objects that were committed since the last flush are not in storage; see write_through_skipped_total", missing)
        return not missing

    @property
    def unstored(self) -> int:
        """Objects committed since the last flush that did not get to storage, and will not while nothing changes."""
        return self._state.unstored + self._write_through.objects + sum(call.objects for call in list(self._state.writes.waiting))

    def close(self, deadline: float | None = None) -> bool:
        """Drain within `deadline` seconds (default: the options'), or abandon what is left; then release threads, storage and arena.

        True if everything was drained. If a thread still hangs in the store, that stays open, as does the memory under it. Twice is
        harmless, and says what the first time said; in a process that was forked off it does nothing.
        """
        if self._closed or self._state.is_forked:
            return self._drained
        end = time.monotonic() + (self._state.options.close_deadline if deadline is None else deadline)
        self._state.drain()
        for admission in list(self._admissions):
            admission.close()
        self._admissions.clear()
        drained = self._settle(end - time.monotonic())
        self._closed = True
        idle = [t.close(max(0.1, end - time.monotonic())) for t in (self._state.queries, self._state.reads, self._state.writes)]
        if self._shadows is not None:
            self._shadows.close(max(0.1, end - time.monotonic()))
        self._state.engine.close(max(0.1, end - time.monotonic()))
        quiet = all(idle)
        if self._backend is not None and quiet:
            quiet = self._within(max(0.1, end - time.monotonic()), self._backend.close)
        self._state.drain()
        if quiet:  # else a thread that hangs in the store still works with the arena's memory
            self._state.arena.close()
        self._drained = drained and quiet
        return self._drained

    def check_integrity(self) -> None:
        """Recount everything; AssertionError on a slot, block or pin that is lost or held twice. For tests, at a quiet moment."""
        self._state.drain()
        self._state.check_integrity([a.slots.private() for a in self._admissions], [pin for a in self._admissions for pin in a.pins])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _within(self, timeout: float, call: Callable[[], None]) -> bool:
        """Call the store for `timeout` seconds at most: did it return? It may hang for ever on its thread. What it raises is raised."""
        if self._hanging is not None and self._hanging.is_alive():
            return False
        raised: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001  raised below, on the caller's thread
                raised.append(error)

        self._hanging = threading.Thread(target=run, name="tiercache-flush", daemon=True)
        self._hanging.start()
        self._hanging.join(max(0.0, timeout))
        if raised:
            raise raised[0]
        return not self._hanging.is_alive()

    def _settle(self, timeout: float) -> bool:
        """Drain until nothing is in flight, but for what waits for a store that is left alone."""
        end = time.monotonic() + timeout
        self._state.drain()
        while len(self._state.operations) > len(self._state.writes.waiting) or not self._write_through.is_idle:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._state.arrived.wait(min(left, 0.1))
            self._state.drain()
        return True

    def _go_on(self) -> None:
        """Something has landed: begin what waited for it."""
        self._write_through.go_on()
        self._beliefs.check()

    def _enter(self) -> None:
        if self._closed:
            raise ClosedError("this controller was closed; make a new one")
        self._state.drain()

    def _require_mine(self, admission: Admission) -> None:
        if admission.released:
            raise AdmissionError("this admission was released already; each is released once, as the last thing")
        if admission not in self._admissions:
            raise AdmissionError("this admission belongs to another controller; use the one that made it")

    def _check_fence(self, fence: Fence | None) -> None:
        if fence is not None:
            self._state.engine.check_fences([fence])

    def _check_tokens(self, admission: Admission, tokens: TokenArray) -> None:
        admission.check_sequence(tokens)
        covered = min((len(t) for t in admission.pages.values()), default=0)
        if len(tokens) // self.page_size > covered:
            raise SlotError(f"{len(tokens)} tokens fill more than the {covered} pages of this admission; extend it before computing them")


def _check_pages(admission: Admission, pages: Mapping[PoolName, Locations] | None, full: int) -> None:
    for pool, slots in (pages or {}).items():
        expected = admission.pages.get(pool)
        if expected is None or len(slots) < full or not np.array_equal(expected[:full], slots[:full]):
            raise SlotError(f"the slots given for pool {pool} are not this admission's; commit the slots of its own table")


def _kinds(identity: Identity, pools: Mapping[PoolName, DevicePool]) -> tuple[list[PoolName], list[PoolName]]:
    """The page pools and the state pools among `pools`; GeometryError for what the index cannot serve."""
    kinds: dict[HitPolicy, list[PoolName]] = {HitPolicy.ALL_PAGES: [], HitPolicy.TRAILING_PAGES: []}
    for name, pool in pools.items():
        geometry = pool.geometry
        if geometry.pool is not name:
            raise GeometryError(f"the pool given as {name} is a {geometry.pool} pool; name each by its own kind")
        if geometry.page_size != identity.page_size:
            raise GeometryError(
                f"pool {name} has pages of {geometry.page_size} tokens and the identity {identity.page_size}; make them equal"
            )
        if geometry.hit_policy is HitPolicy.TRAILING_PAGES and geometry.trailing != 1:
            raise GeometryError(
                f"pool {name} needs its last {geometry.trailing} pages; the controller serves whole prefixes and single states"
            )
        kinds[geometry.hit_policy].append(name)
    if PoolName.KV not in kinds[HitPolicy.ALL_PAGES]:
        raise GeometryError("there is no page pool named kv; a hit is anchored on KV pages")
    return kinds[HitPolicy.ALL_PAGES], kinds[HitPolicy.TRAILING_PAGES]
