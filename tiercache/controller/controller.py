"""`HybridCacheController`: the one object through which an engine's worker uses the cache."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

from tiercache.controller.admission import Admission
from tiercache.controller.beliefs import Beliefs
from tiercache.controller.context import ControllerContext, split_pools
from tiercache.controller.continuation.continued import ResumedAdmission
from tiercache.controller.continuation.parked import Parked, Parking
from tiercache.controller.lent_slots import LentSlots, Taken, insert, states_by_page
from tiercache.controller.lookup import Lookup, Preview, look_up, own_tokens, preview
from tiercache.controller.options import WRITE_BACK, ControllerOptions
from tiercache.controller.prefetch import PrefetchQueue, PrefetchTicket
from tiercache.controller.ranks.base import RankFacts, RankGroup
from tiercache.controller.ranks.group_admission import GroupAdmission
from tiercache.controller.ranks.session import join_ranks
from tiercache.controller.residency_events import ResidencyEvents
from tiercache.controller.retention import Hints, PrefixPins
from tiercache.controller.store_calls import StoreCall
from tiercache.controller.values import Values
from tiercache.controller.waiting import apply_events
from tiercache.controller.write_back import Draining, WriteBack
from tiercache.controller.write_through import WriteThrough
from tiercache.core import Locations, PoolName, Tier, as_tokens
from tiercache.errors import AdmissionError, ClosedError, InputError, PoolFullError
from tiercache.events import ObjectGroup
from tiercache.events.base import EventSource
from tiercache.events.encoding import encode_batch
from tiercache.events.publisher import EventPublisher
from tiercache.events.settings import EventSettings
from tiercache.index import HybridIndex, checkpoints_named
from tiercache.keys import Identity, Shard, layout_digest, namespace_of
from tiercache.metrics import Metrics
from tiercache.policy import DEFAULT_PROFILE, Costs, Ending, ModelProfile, Policy, policy_named, profile_named
from tiercache.pools import BlockArena, DevicePool, HostPool
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.storage.hybrid import HybridStorage
from tiercache.storage.store_events import StoreEvents
from tiercache.threads import IoThreads
from tiercache.transfer import Fence, TransferEngine, engine_for

_log = logging.getLogger(__name__)
EngineFactory = Callable[[Mapping[PoolName, DevicePool], Mapping[PoolName, HostPool]], TransferEngine]


class HybridCacheController:
    """Cache that keeps KV pages and recurrent states across requests, on device, on host and in a store.

    The life of a request:

    1. `lookup`, then `admit`.
    2. `poll` until the admission is ready.
    3. Compute from the restored depth on, with a `commit` at every checkpoint and at the end.
    4. `release`.

    Depths are in tokens, and are multiples of the page size.

    The caller guarantees:

    - committed slots hold what the model computed for exactly the committed tokens, under `identity`;
    - a state slot that was handed to `commit` is not written to again;
    - device memory is not touched after `close`.

    The optional arguments:

    - `shard` says which part of each object this rank holds, for all pools or by pool. A pool that is not
      named is whole on every rank.
    - `ranks` joins this rank to the others that serve the model; `docs/ranks.md` has the rules. Making the
      controller then waits for all ranks, and raises RankError if they do not fit together, or do not come.
    - `profile` is the model's profile, by which the policy weighs bytes against computation. It defaults to
      `DEFAULT_PROFILE`, a Qwen3-Next.
    - `policy` replaces the eviction policy that the options name.
    - `engine` makes the transfer engine, and `threads` makes the threads that call the store.
    - `clock` returns the time in seconds.

    The controller owns the host pools, the index and its threads; `close` also closes `storage`, `ranks`
    and the arena. No method waits for storage except `flush` and `close`. In an event loop, `async with`
    applies events as they come, and closes without blocking the loop; admissions are awaited.

    Thread safety: one owner thread, the engine's. Copies and storage calls run on other threads, which post
    events. Every method first applies the events that have come in.

    A model of one layer of attention, of which nothing is computed here (`examples/own_engine.py` does):

        >>> import torch
        >>> from tiercache.pools import HostArena
        >>> from tiercache.pools.device import page_geometry_of
        >>> from tiercache.storage import open_backend
        >>> tensors = {(0, "k"): torch.zeros(1024, 8), (0, "v"): torch.zeros(1024, 8)}  # 1,024 tokens
        >>> pool = DevicePool.from_tensors(page_geometry_of(tensors, 16), tensors)
        >>> controller = HybridCacheController(
        ...     Identity("toy", "1", "float32", "float32", "float32", page_size=16),
        ...     {PoolName.KV: pool},
        ...     HostArena(1 << 20, block_bytes=4096),
        ...     open_backend("memory://"),
        ... )
        >>> for _ in range(2):
        ...     admission = controller.admit(controller.lookup(range(100)))
        ...     print("restored up to", admission.wait().depth)
        ...     admission.wait_layer(0)  # compute from there on, into these slots: admission.pages
        ...     table = controller.commit(admission, range(100), {})
        ...     controller.release(admission)
        restored up to 0
        restored up to 96
        >>> controller.flush(30)
        True
        >>> controller.close()
        True
    """

    def __init__(
        self,
        identity: Identity,
        device_pools: Mapping[PoolName, DevicePool],
        arena: BlockArena,
        storage: StorageBackend | None = None,
        *,
        shard: Shard | Mapping[PoolName, Shard] | None = None,
        ranks: RankGroup | None = None,
        options: ControllerOptions | None = None,
        profile: ModelProfile | None = None,
        policy: Policy | None = None,
        engine: EngineFactory = engine_for,
        threads: Callable[[str, int], IoThreads] = IoThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or ControllerOptions()
        page_pools, state_pools = split_pools(identity, device_pools)
        namespace = namespace_of(identity)
        record = NamespaceRecord.priced(identity, profile)  # not by the default profile, which is a guess
        self._tells_speed = profile is not None
        """Whether storage is to be told the speed of the prefill as soon as it is known."""
        profile = profile or profile_named(DEFAULT_PROFILE)
        costs = Costs(profile)
        host = {name: HostPool(pool.geometry, arena) for name, pool in device_pools.items()}
        self._backend = storage
        self._hybrid: HybridStorage | None = None
        shards = shard if isinstance(shard, Mapping) else dict.fromkeys(host, shard)
        if unknown := shards.keys() - host.keys():
            raise InputError(
                f"a shard is given for {', '.join(sorted(unknown))}, which is no pool here; the pools are"
                f" {', '.join(host)}"
            )
        size, page_size = 1 if ranks is None else ranks.size, identity.page_size
        prints = {name: pool.geometry.fingerprint for name, pool in host.items()}
        parts = {str(name): (shards.get(name) or Shard(), print_) for name, print_ in prints.items()}
        facts = RankFacts(size, page_size, namespace, parts)
        self._session = join_ranks(ranks, facts, options.join_deadline)
        if storage is not None:
            self._hybrid = HybridStorage(storage, namespace=record)
            for name, pool in host.items():
                self._hybrid.register_pool(pool, shards.get(name))
        self._context = ControllerContext(
            index=HybridIndex(
                page_size=page_size,
                namespace=namespace,
                page_pools=page_pools,
                state_pools=state_pools,
                policy=policy or policy_named(options.policy, costs),
                checkpoints=checkpoints_named(options.checkpoints),
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
            page_size=page_size,
            namespace=namespace,
            profile=profile,
            clock=clock,
            threads=threads,
        )
        if self._session is not None:
            # Which pools this rank writes is the session's answer, and its messages end a wait.
            writes, events = self._session.writes, self._context.events
            self._context.elsewhere = frozenset(p for p in self._context.pools if str(p) not in writes)
            self._session.wake = partial(events.post, lambda: None)
        self._values = Values(self._context)
        self._write_through = WriteThrough(self._context, self._values)
        self._write_back = WriteBack(self._context, self._write_through.write_unit)
        self.lent = LentSlots(self._context, self._write_through.send, self._enter)
        """Cache over slots that the engine lends, for engines that make no admissions."""
        self._beliefs = Beliefs(self._context)
        self._prefetches = PrefetchQueue(self._context)
        self._draining = Draining(self._context, self._write_through, self._write_back)
        self._pins = PrefixPins(self._context)
        self._hints = Hints(self._context)
        self._parking = Parking(self._context, self._values)
        self._context.on_landed, self._context.release = self._retry_waiting, self.release
        self._admissions: set[Admission] = set()
        self._closed = self._drained = False
        self.publisher = self._publish(options.events, shards)
        """Publisher of KV events, with its addresses and figures; None without `events` of the options."""

    @property
    def metrics(self) -> Metrics:
        """Counters of this controller."""
        return self._context.metrics

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._context.page_size

    def lookup(self, tokens: Any, extra: bytes = b"") -> Lookup:
        """Look a prompt up in the index, and ask storage in the background about what is not near.

        Reserves nothing and never waits.

        `tokens` are integers, preferably in a numpy array. `extra` stands for the adapter and the images (see
        `keys.sequence_extra`). Raises TokenError for an empty prompt or bad token ids.
        """
        self._enter()
        prompt = own_tokens(tokens)
        self._beliefs.check()
        return look_up(self._context, prompt, extra)

    def preview(self, tokens: Any, extra: bytes = b"") -> Preview:
        """Return what the index knows of a prompt; ask, reserve and count nothing.

        Raises TokenError as `lookup` does.
        """
        self._enter()
        return preview(self._context, own_tokens(tokens), extra)

    def admit(
        self, lookup: Lookup, *, tokens: int | None = None, states: int = 0, deadline: float | None = None
    ) -> Admission:
        """Reserve slots for `tokens` tokens and `states` states, and pin what the restore will read.

        `tokens` defaults to the length of the prompt. `deadline` is the maximum time to wait for storage, in
        seconds; it defaults to `restore_deadline` of the options. Who does not want to wait calls `start`.

        Raises PoolFullError, with nothing changed, if there would be too few slots even after the eviction of
        everything that is not in use.
        """
        self._enter()
        tokens = len(lookup.tokens) if tokens is None else tokens
        if tokens < len(lookup.tokens):
            raise InputError(
                f"an admission for {tokens} tokens cannot hold the prompt of {len(lookup.tokens)}; ask for at"
                " least that many"
            )
        if states < 0:
            raise InputError(f"{states} states cannot be reserved; pass 0 or more")
        wait = self._context.options.restore_deadline if deadline is None else deadline
        admission = (
            Admission(self._context, lookup, tokens, states, self._context.clock() + wait)
            if self._session is None
            else GroupAdmission(self._context, lookup, tokens, states, wait, self._session.begin())
        )
        try:
            admission.poll()
        except BaseException:
            admission.close()
            raise
        self._admissions.add(admission)
        return admission

    def park(
        self,
        admission: Admission,
        tokens: Any,
        states: Mapping[PoolName, int] | None = None,
        *,
        ttl: float,
        below: bool = False,
        fence: Fence | None = None,
    ) -> Parked:
        """End a request for now: keep its pages and its live state until `resume`, for `ttl` seconds.

        `tokens` are all tokens whose KV is in the slots; their last page need not be full. `states` are the
        slots of the state behind the last token, from `Admission.take_states`; with state pools they are
        required. The device passes `fence` when it has finished writing and reading the slots; None means
        that it has finished already. The admission is released. Its device slots serve other requests as soon
        as they have been copied to the host, which happens in the background.

        What is parked belongs to this request alone: no prompt finds it, and it is not evicted. Pages that
        the index has on the host already are not copied again. With `below`, everything is then written to
        storage under keys that only the ticket can derive, and leaves the host once storage has all of it;
        `Parked.to_bytes` then carries the request to another process. If storage does not take it, it stays
        on the host. After `ttl`, it is released. `docs/parking.md` has the rules.

        Raises AdmissionError, with nothing changed, beyond `park_share` of the host; PoolFullError if the
        host has no room; InputError or SlotError for tokens or states that are not this admission's.
        """
        self._enter()
        _require_single(self._session, "park")
        self._require_mine(admission)
        self._check_fence(fence)
        parked = self._parking.park(admission, as_tokens(tokens), states, ttl=ttl, below=below, fence=fence)
        self._admissions.discard(admission)
        return parked

    def resume(
        self,
        parked: Parked | bytes,
        *,
        tokens: int | None = None,
        states: int = 1,
        deadline: float | None = None,
    ) -> ResumedAdmission:
        """Go on with a parked request, or with the bytes of its ticket; each can be resumed once.

        Reserves slots for `tokens` tokens (by default those of the parked request) and `states` states, of
        which one is the live state. The admission is polled like any other. Once READY, its `resumed` says
        whether it goes on where it was parked: bit for bit the same pages, the last one included, and the
        same state in the slots of `live_states`. Otherwise, with a reason, it is an ordinary admission for
        the same tokens, at the deepest depth that can be restored. `deadline` is as in `admit`, and
        covers both.

        Raises PoolFullError, with nothing changed, if there are too few slots; AdmissionError for a request
        that was resumed, released or has expired, or of another controller; InputError for bytes that are
        damaged or of another identity.
        """
        self._enter()
        _require_single(self._session, "resume")
        found = self._parking.find(parked)
        count = len(found.tokens) if tokens is None else tokens
        if count < len(found.tokens):
            raise InputError(
                f"an admission for {count} tokens cannot hold the {len(found.tokens)} tokens of the parked"
                " request; ask for at least that many"
            )
        if states < bool(self._context.index.state_pools):
            raise InputError(f"{states} states cannot be reserved; pass 1 or more, for the live state")
        wait = self._context.options.restore_deadline if deadline is None else deadline
        end = self._context.clock() + wait
        admission = ResumedAdmission(self._context, self._parking, found, count, states, end)
        self._admissions.add(admission)
        with suppress(PoolFullError):  # what was parked is lost, and there are too few slots to compute it
            admission.poll()
        return admission

    def prefetch(self, tokens: Any, extra: bytes = b"") -> PrefetchTicket:
        """Bring what storage has of the whole pages of `tokens` to the host, without a request.

        This is for an engine or a router that knows which prompt will come. The prefetch goes on behind
        requests, within the blocks that fetches may hold. It waits for nothing and promises nothing: the
        ticket tells when it is over, and cancels it. `docs/prefetch.md` has the rules.

        Raises TokenError as `lookup` does.
        """
        self._enter()
        return self._prefetches.add(own_tokens(tokens), extra)

    def pin(self, tokens: Any, ttl: float, extra: bytes = b"") -> int:
        """Keep the whole pages of `tokens` in the hierarchy for `ttl` seconds; return their tokens' number.

        What the host has of the prefix, or gets later, is not evicted from it: all pages, and the deepest
        complete state. A prefix that is pinned already gets the new time. `docs/prefetch.md` has the rules.

        Raises InputError for a prefix of which the cache knows nothing, for less than a page and for an
        impossible `ttl`; AdmissionError, with nothing changed, for a pin beyond `pin_share`.
        """
        self._enter()
        return self._pins.pin(as_tokens(tokens), ttl, extra)

    def unpin(self, tokens: Any, extra: bytes = b"") -> bool:
        """End the pin of the whole pages of `tokens`; return False if there is none, or none any more."""
        self._enter()
        return self._pins.unpin(as_tokens(tokens), extra)

    def hint(self, tokens: Any, expected_in: float, extra: bytes = b"") -> int:
        """Tell the eviction policy that `tokens` will be continued in `expected_in` seconds.

        Returns the number of tokens whose restore the hint protects. A later hint replaces an earlier one.
        Raises InputError for a prefix of which nothing can be restored, and for an impossible `expected_in`.
        """
        self._enter()
        return self._hints.hint(as_tokens(tokens), expected_in, extra)

    def commit(
        self,
        admission: Admission,
        tokens: Any,
        states: Mapping[int, Mapping[PoolName, int]] | None = None,
        *,
        fence: Fence | None = None,
    ) -> Mapping[PoolName, Locations]:
        """Hand the whole pages of `tokens`, and the states at some depths, to the cache.

        Write-through starts in the background; with write-back, the copy to the host.

        `tokens` are all tokens of the sequence whose KV is in the slots. `states` gives, by depth in tokens,
        the slot of each state pool; these slots come from `Admission.take_states`. The device passes `fence`
        when it has finished writing and reading these slots; None means that the device has finished already.

        Returns the slot table to use from now on. For a page that the cache has already, the table names the
        cache's slot, and the request's slot is freed after the fence.

        Raises SlotError or InputError, with nothing changed, for slots that are not this admission's, for
        depths that are not whole pages, and for tokens that differ from the admitted ones.
        """
        # Everything is checked before anything changes: an error leaves cache and admission as they were.
        self._enter()
        self._require_mine(admission)
        admission.require_started()
        self._check_fence(fence)
        sequence = as_tokens(tokens)
        full = len(sequence) // self.page_size
        admission.check_sequence(sequence)
        admission.slots.check_pages(full)
        by_depth = states_by_page(states or {}, len(sequence), self.page_size)
        admission.slots.check_states(by_depth.values())
        whole = sequence[: full * self.page_size]
        taken = Taken(admission.plan.depths, admission.origin, admission.held_node(full))
        pages = {p: t[:full] for p, t in admission.pages.items()}
        inserted = insert(self._context, whole, pages, by_depth, admission.lookup.extra, taken, fence)
        admission.on_committed(inserted, whole, fence)
        # Write-through also gets the depth of the restored state, because storage may lack this state.
        depths = {*by_depth, admission.depth // self.page_size}
        self._write_through.send(inserted.node, whole, admission.lookup.extra, depths)
        return admission.pages

    def release(
        self, admission: Admission, *, fence: Fence | None = None, ending: Ending = Ending.UNKNOWN
    ) -> None:
        """End a request: release its pins, and the slots that belong to this request alone.

        The device passes `fence` when it has finished reading and writing the request's slots; None means
        that the device has finished already. `ending` tells policies that learn from it (`hvd`) whether
        a tool, a person or nobody will continue the request. Raises AdmissionError if the admission was
        released before, and InputError for an unknown ending.
        """
        self._enter()
        if ending not in Ending.__members__.values():
            raise InputError(f"the ending {ending!r} is unknown; use one of {', '.join(Ending.__members__)}")
        self._require_mine(admission)
        self._check_fence(fence)
        if ending:
            admission.note_ending(ending)
        admission.close(fence)
        self._admissions.discard(admission)
        self._values.tell()
        self._post_residency()

    def note_prefill(self, start: int, end: int, seconds: float, passes: float = 1.0) -> None:
        """Record that the device has computed tokens [start, end) of a sequence in `seconds`.

        With this, tokens are computed that would take longer to restore (see `load_or_recompute` of the
        options). `seconds` is the time of the computation alone, without waiting for the restore; `passes` is
        the part of a pass of the model that this was. Raises InputError for a range or a time that is not
        possible.
        """
        self._enter()
        if not 0 <= start < end or not 0.0 <= seconds < float("inf"):
            raise InputError(
                f"a prefill of tokens {start} to {end} in {seconds} s is not possible; give the first token,"
                " the one behind the last, and a finite number of seconds"
            )
        self._context.speeds.note_prefill(start, end, seconds, passes)
        if self._tells_speed and self._hybrid is not None:
            self._tell_speed(self._hybrid)

    def note_pass(self, computed: Sequence[tuple[int, int]], seconds: float) -> None:
        """Record that one pass of the model has computed these ranges of tokens, as `note_prefill` does.

        A pass of less than a page shows how long any pass takes, whatever was restored before it.
        """
        total = sum(end - start for start, end in computed)
        if 0 < total < self.page_size:
            self._context.speeds.note_least_pass(seconds)
            return
        for start, end in computed:
            part = (end - start) / total
            self.note_prefill(start, end, seconds * part, part)

    def _tell_speed(self, storage: HybridStorage) -> None:
        """Register the speed of the prefill, by which daemons know how much time a hit saves."""

        def tell_again(*_: object) -> None:
            self._tells_speed = True

        if (speed := self._context.speeds.prefill_flops_per_second) is not None:
            self._tells_speed = False
            self._context.writes.submit(StoreCall(partial(storage.register_speed, speed), bool, tell_again))

    def tick(self, wait: float = 0.0) -> bool:
        """Apply background events, after waiting up to `wait` seconds for an event.

        Returns whether an operation or a fence was pending at the call. If not, another tick changes nothing,
        and a request that was refused for lack of room would be refused again.

        Every method applies events, so only an idle engine needs to call this one now and then.
        """
        busy = self._context.under_way
        self._context.agree()
        self._enter()
        self._prefetches.advance()
        if wait and self._context.under_way:
            self._context.await_event(wait)
            self._context.drain()
        self._values.tell()
        self._post_residency()
        return busy

    def evict(self, tier: Tier) -> None:
        """Free every object in `tier` that no request, transfer or pin is using.

        Meant for engines that are about to sleep, and for measurements of the tier below. Raises InputError
        for Tier.STORAGE.
        """
        self._enter()
        if tier is Tier.STORAGE:
            raise InputError("storage is not emptied from here; flush its namespace with the store itself")
        self._context.allocator.evict_all(tier)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until all commits have been written to storage, and storage has flushed.

        With write-back, this writes what the host has and storage lacks, as far as it can be restored.

        Returns False, and logs it, if this takes longer than `timeout` seconds, or if some objects committed
        since the last flush are not in storage. The possible causes are: the host had no room, a copy failed,
        storage did not take the objects, or calls of storage are suspended. Raises StorageError if storage
        cannot flush, such as UnavailableError if it is out of reach.
        """
        self._enter()
        end = time.monotonic() + timeout
        if not self._draining.drain_all(timeout):
            _log.warning("not all objects reached storage within %g s", timeout)
            return False
        left = end - time.monotonic()
        if self._backend is not None and not self._draining.within(left, self._backend.flush):
            _log.warning("storage did not flush within %g s", timeout)
            return False
        is_whole, self._context.gave_up = not self._draining.lacks_objects, False
        if not is_whole:
            _log.warning(
                "some objects that were committed since the last flush are not in storage; see"
                " write_through_skipped_total"
            )
        return is_whole

    def close(self, deadline: float | None = None) -> bool:
        """Wait up to `deadline` seconds for all operations, then release threads, storage and arena.

        `deadline` defaults to `close_deadline` of the options.

        Returns True if all operations ended and no call hangs. Logs whether storage lacks some objects.
        While a thread hangs in the store, the store and the arena's memory stay open. A second call does
        nothing and returns the first result. In a forked process, the method does nothing.
        """
        if self._closed or self._context.is_forked:
            return self._drained
        end = time.monotonic() + (self._context.options.close_deadline if deadline is None else deadline)
        if self._context.landings is not None:
            self._context.landings.dissolve()
        self._context.drain()
        for admission in list(self._admissions):
            admission.close()
        self._admissions.clear()
        self._prefetches.close()
        self._pins.close()
        drained = self._draining.drain_all(end - time.monotonic())
        self._parking.close()
        if self._backend is not None and self._draining.lacks_objects:
            _log.warning("some objects that were committed since the last flush did not reach storage")
        self._closed = True
        self._post_residency()
        if self.publisher is not None:
            self.publisher.close()
        # Each part is closed before the parts that it uses: first the threads that call the store, then the
        # transfer engine, then the store, and last the arena, in whose memory all others work.
        idle = [
            t.close(max(0.1, end - time.monotonic()))
            for t in (self._context.queries, self._context.reads, self._context.writes)
        ]
        if self._session is not None:
            self._session.close()
        self._context.engine.close(max(0.1, end - time.monotonic()))
        quiet = all(idle)
        if self._backend is not None and quiet:
            quiet = self._draining.within(max(0.1, end - time.monotonic()), self._backend.close)
        self._context.drain()
        if quiet:  # otherwise a thread that hangs in the store may still use the arena's memory
            self._context.arena.close()
        self._drained = drained and quiet
        return self._drained

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._applying = asyncio.create_task(apply_events(self._context))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._applying.cancel()
        for admission in list(self._admissions):
            self.release(admission)
        await asyncio.shield(asyncio.to_thread(self.close))  # no task may call anything any more

    def _retry_waiting(self) -> None:
        """Begin what waited for room: writes of commits, prefetches, and the next check of beliefs."""
        self._pins.follow()
        self._write_through.retry_waiting()
        if self._context.options.write == WRITE_BACK:
            self._write_back.follow()
        self._prefetches.advance()
        self._beliefs.check()

    def _enter(self, *, drain: bool = True) -> None:
        if self._closed:
            raise ClosedError("this controller was closed; make a new one")
        if not drain:
            return
        self._context.drain()
        self._pins.expire()
        self._parking.expire()

    def _post_residency(self) -> None:
        """Publish all that has changed on device and host, because no other call may come for long."""
        if self._context.residency is not None:
            self._context.residency.post(self._context.clock(), everything=True)

    def _publish(
        self, settings: EventSettings | None, shards: Mapping[PoolName, Shard | None]
    ) -> EventPublisher | None:
        """Publish KV events of device, host and storage from now on, if there are settings."""
        if settings is None:
            return None
        context = self._context
        groups = {
            name: ObjectGroup(
                name,
                context.namespace,
                layout_digest(name, pool.geometry.fingerprint, shards.get(name) or Shard()),
                context.page_size,
            )
            for name, pool in context.host.items()
        }
        context.residency = ResidencyEvents(context.index, groups, tokens=settings.token_ids)
        sources: list[EventSource] = [context.residency]
        if self._backend is not None:
            sources.append(stored := StoreEvents(self._backend, "store"))
            stored.warn_of_silence()
        encode = partial(encode_batch, numbered=settings.token_ids)
        publisher = EventPublisher(settings, sources, encode=encode)
        for name in publisher.figures():
            context.metrics.tell(name, partial(publisher.figure, name))
        return publisher

    def _require_mine(self, admission: Admission) -> None:
        admission.require_open()
        if admission not in self._admissions:
            raise AdmissionError("this admission belongs to another controller; use the one that made it")

    def _check_fence(self, fence: Fence | None) -> None:
        if fence is not None:
            self._context.engine.check_fences([fence])


def _require_single(session: object, call: str) -> None:
    if session is not None:
        raise AdmissionError(
            f"{call} is not possible in a group of ranks, which cannot agree on parked requests; release"
            " the request, and admit it again"
        )
