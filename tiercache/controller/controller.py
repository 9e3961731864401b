"""`HybridCacheController`: the one object through which an engine's worker uses the cache."""

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
    """Cache that keeps KV pages and recurrent states across requests, on the device, in host memory and in a store.

    The life of a request: `lookup`; `admit`; `poll` until it is ready; compute from the restored depth, with a `commit` at every checkpoint
    and at the end; `release`. Depths are in tokens and multiples of the page size.

    The caller guarantees: committed slots hold what the model computed for exactly those tokens, under `identity`; a state slot handed to
    `commit` is not written again; device memory is not touched after `close`.

    `shard`: which part of each object this rank holds, for all pools or by pool; a pool that is not named is whole on every rank.
    `profile`: the model's profile, by which the policy weighs bytes against computation (default: `DEFAULT_PROFILE`, a Qwen3-Next).
    `policy`: an eviction policy to use instead of the one that the options name.

    The controller owns the host pools, the index and its threads; `close` also closes `storage` and the arena. No method waits for storage
    except `flush` and `close`.

    Thread safety: one owner thread, the engine's. Copies and storage calls run on their own threads and post events; each call drains them.
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
        """Look a prompt up in the index, and ask storage in the background about the rest. Reserves nothing and never waits.

        `tokens`: integers, ideally a numpy array. `extra`: see `keys.sequence_extra`. Raises TokenError for an empty prompt or bad ids.
        """
        self._enter()
        prompt = as_tokens(tokens)
        if not len(prompt):
            raise TokenError("the prompt is empty; pass at least one token")
        if prompt is tokens or prompt.base is not None:
            prompt = prompt.copy()  # the engine may reuse its token buffer while the request goes on
        self._beliefs.check()
        return look_up(self._state, prompt, extra)

    def admit(self, lookup: Lookup, *, tokens: int | None = None, states: int = 0, deadline: float | None = None) -> Admission:
        """Reserve slots for `tokens` tokens (default: the prompt) and `states` states, and pin what will be read.

        All or nothing: raises PoolFullError, with nothing changed, if evicting everything that is not in use would not be enough.
        `deadline`: most seconds to wait for storage (default: the options' `restore_deadline`).
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
        """Give the full pages of `tokens`, and states by depth in tokens, to the cache; write-through starts in the background.

        `tokens` are all tokens of the sequence whose KV is in the slots. The slots in `states` come from `Admission.take_states`. `pages`
        may repeat the slot table, to have it checked. `fence`: passed when the device has finished writing and reading those slots
        (default: it has finished already).

        Returns the slot table to use from now on: where the cache held a page already, its slot takes the place of the request's own,
        which is freed after the fence. Raises SlotError or InputError, with nothing changed, for slots that are not this admission's,
        depths that are not whole pages, or tokens that are not those admitted.
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
        depths = {*by_depth, admission.depth // self.page_size}  # the restored state may not have been written through so far
        self._write_through.send(inserted.node, sequence[: full * self.page_size], admission.lookup.extra, depths)
        return admission.pages

    def release(self, admission: Admission, *, fence: Fence | None = None) -> None:
        """End a request: release its pins and its own slots. Raises AdmissionError if it was released before.

        `fence`: passed when the device no longer reads or writes the request's slots (default: it does not any more).
        """
        self._enter()
        self._require_mine(admission)
        self._check_fence(fence)
        admission.close(fence)
        self._admissions.discard(admission)
        if self._shadows is not None and admission.committed:
            self._shadows.served(admission.lookup.tokens, admission.sequence, admission.lookup.extra)

    def tick(self, wait: float = 0.0) -> bool:
        """Apply background events, waiting up to `wait` seconds for one; return whether anything was under way.

        If nothing was, the next tick will find nothing new, and a request refused for lack of room will be refused again. Every call of the
        controller applies events, so that only an idle engine needs to tick now and then.
        """
        busy = self._state.under_way
        self._enter()
        if wait and self._state.under_way:
            self._state.await_event(wait)
            self._state.drain()
        return busy

    def contents(self) -> Iterator[Content]:
        """Iterate over what the cache holds in any tier, one edge of the radix tree at a time."""
        self._enter()
        return self._state.index.contents()

    def evict(self, tier: Tier) -> None:
        """Free everything in `tier` that no request and no transfer is using.

        Meant for use before a sleep, to hand memory over, or to measure the tier below. Raises InputError for Tier.STORAGE.
        """
        self._enter()
        if tier is Tier.STORAGE:
            raise InputError("storage is not emptied from here; flush its namespace with the store itself")
        self._state.evict_all(tier)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until nothing committed so far is on its way, and storage has flushed what it took.

        Returns False if that took longer than `timeout` seconds, or if some objects did not reach storage since the last flush: the host
        had no room, a copy failed, or storage did not take them or is left alone because it hangs or fails. `unstored` is their number. A
        flush that did not time out logs that number and resets the count of those that were given up.
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
        """Number of objects committed since the last flush that were given up, or that wait for room or for the store."""
        return self._state.unstored + self._write_through.objects + sum(call.objects for call in list(self._state.writes.waiting))

    def close(self, deadline: float | None = None) -> bool:
        """Drain for at most `deadline` seconds (default: the options' `close_deadline`), then release threads, storage and arena.

        Returns True if everything was drained and no call hangs. While a thread still hangs in the store, the store and the arena's memory
        stay open. A second call is harmless and returns the first result. In a forked process it does nothing.
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
        if quiet:  # otherwise a thread that hangs in the store may still use the arena's memory
            self._state.arena.close()
        self._drained = drained and quiet
        return self._drained

    def check_integrity(self) -> None:
        """Raise AssertionError for a slot, block or pin that is lost or held twice. For tests, while nothing else is running."""
        self._state.drain()
        self._state.check_integrity([a.slots.private() for a in self._admissions], [pin for a in self._admissions for pin in a.pins])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _within(self, timeout: float, call: Callable[[], None]) -> bool:
        """Run `call` on a thread and return whether it ended within `timeout` seconds; False at once while an earlier one still hangs.

        The thread may hang for ever. An exception of the call is raised here.
        """
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
        """Drain until nothing is in flight except writes that wait for a store that is left alone; False after `timeout` seconds."""
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
        """Begin what waited for an operation to land."""
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
    """Return the page pools and the state pools among `pools`; raise GeometryError for a pool that the index cannot serve."""
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
