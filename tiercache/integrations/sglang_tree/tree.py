"""tiercache's index and eviction policies in the place of SGLang's prefix tree.

SGLang keeps the slots of its requests and their rows; the cache takes over what requests have computed, and
gives slots back when SGLang asks for room. The docstring of the package has the options.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np
import torch
from sglang.srt.mem_cache import base_prefix_cache as sglang
from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.runtime_context import get_parallel, mamba_checkpoint_grid

from tiercache.controller import ControllerOptions, HybridCacheController
from tiercache.controller.lent_slots import Taken, branch_of
from tiercache.controller.ranks.landings import Ends
from tiercache.core import ABSENT, Locations, PoolName, Tier, TokenArray, pending
from tiercache.errors import PoolFullError
from tiercache.index import HybridIndex, Match, Node, Origin, Pin
from tiercache.integrations import attempt
from tiercache.integrations.settings import of_rank, profile_for
from tiercache.integrations.sglang_tree import store as below
from tiercache.integrations.sglang_tree.lent import LentPages, LentSource, PassLoads, lent_pools
from tiercache.keys import Shard
from tiercache.policy import CheckpointKind
from tiercache.pools import HostArena

_log = logging.getLogger(__name__)
_KV, _MAMBA = PoolName.KV, PoolName.MAMBA
_NO_HOST: Final = 4096
"""Bytes of the arena of a cache without a host tier, too small for a page and a state."""


@dataclass(slots=True, eq=False)
class Handle:
    """Depth in pages on the path to a node of the index, which SGLang calls a node."""

    node: Node | None
    """Node whose edge holds the last page; None for no page."""
    depth: int
    tokens: TokenArray
    extra: bytes

    @classmethod
    def at(cls, index: HybridIndex, match: Match, depth: int, tokens: TokenArray, extra: bytes) -> Self:
        """Return the handle of a depth of a match."""
        return cls(index.node_at(match, depth) if depth else None, depth, tokens, extra)


@dataclass(slots=True, kw_only=True)
class _Held(sglang.IncLockRefResult):  # type: ignore[misc]  # SGLang has no types
    """Receipt of a lock."""

    pin: Pin | None = None

    def to_dec_params(self) -> Any:
        return self


@dataclass(slots=True)
class _Visit:
    """Last match of a request, and what follows from it."""

    match: Match
    tokens: TokenArray
    extra: bytes
    plan: Mapping[int, CheckpointKind]
    """Depths in pages at which the request should leave states, and why."""
    origin: Origin
    result: MatchResult


class TierCacheTree(below.StoreBelow):
    """Prefix cache of one scheduler of SGLang, over the slots that SGLang's allocators lend.

    Construction raises ConfigError for what cannot be served, in a sentence that says what to change.

    Thread safety: the scheduler's thread.
    """

    def __init__(self, ctx: TreeCacheBuildContext) -> None:
        below.refuse(ctx)
        params = ctx.params
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = int(params.page_size)
        self.disable = False
        self.enable_mamba_extra_buffer = params.enable_mamba_extra_buffer
        self.sliding_window_size = None
        if params.enable_metrics:
            self.init_metrics_collector()
        settings, rule = below.read_settings()
        self._pages = LentPages(self.token_to_kv_pool_allocator, self.page_size)
        self._states = LentSource(self.req_to_token_pool.mamba_allocator) if ctx.is_hybrid_ssm else None
        pools = lent_pools(self._pages, self.token_to_kv_pool_allocator, self._states, self.req_to_token_pool)
        self._hybrid = self._states is not None
        self._grid = mamba_checkpoint_grid(self.page_size) if self._hybrid else self.page_size
        nbytes, block = below.host_sizes(pools) if ctx.enable_hierarchical_cache else (_NO_HOST, _NO_HOST)
        identity = below.identity_of(settings, ctx, pools[_KV].geometry.segments[0].dtype)
        store = below.opened(settings, ctx)
        self._controller = HybridCacheController(
            identity,
            pools,
            HostArena(nbytes, block),
            store,
            shard=Shard(ctx.tp_rank, ctx.tp_size),
            # Ranks would measure different speeds.
            options=ControllerOptions(
                policy=settings.policy,
                load_or_recompute=settings.load_or_recompute and ctx.tp_size == 1,
                events=settings.events
                and of_rank(settings.events, (get_parallel().dp_rank or 0) * ctx.tp_size + ctx.tp_rank),
            ),
            profile=profile_for(settings.profile, str(ctx.model_config.model_path)),
        )
        self._set_store(store, identity, rule)
        self._watch_weights(ctx.tp_worker)
        self._has_host = ctx.enable_hierarchical_cache
        self._lent = self._controller.lent
        self._is_one_of_several = ctx.tp_size > 1
        if self._is_one_of_several:
            # SGLang's ranks make the same batches, each by its own cache, so that these have to be alike.
            self._lent.agree_by(partial(_least, params.tp_cache_group))
        self._computed: list[tuple[int, int]] = []
        """Ranges of prompts that the last pass has computed."""
        self._has_loaded = False
        """Whether the last pass had to wait for a load, and says nothing of how fast tokens are computed."""
        self._round = self._computed_at = 0.0
        """Times at which SGLang's present round has begun, and at which it had the results of a prefill."""
        self._index = self._lent.index
        self._evictable = self._index.evictable_on_device
        """Pages, and states if there are any; SGLang asks some hundred times a request."""
        self.root_node = Handle(None, 0, np.empty(0, np.uint64), b"")
        device = str(self.token_to_kv_pool_allocator.device)
        self._stream = ctx.tp_worker.model_runner.forward_stream if device.startswith("cuda") else None
        self._loads = PassLoads(None if self._stream is None else self._stream.cuda_stream)
        if ctx.enable_hierarchical_cache:
            self.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(self._loads)
            if self._hybrid:
                self.req_to_token_pool.register_layer_transfer_counter(self._loads)
            ctx.tp_worker.register_hicache_layer_transfer_counter(self._loads)
        _log.info(
            "tiercache: index and policy %s in the place of SGLang's tree; pages of %d tokens%s; %s",
            settings.policy,
            self.page_size,
            f", states {self._grid} tokens apart" if self._hybrid else "",
            f"{nbytes} bytes on the host" if ctx.enable_hierarchical_cache else "nothing on the host",
        )

    def reset(self) -> None:
        """Give all slots back. SGLang calls this when nothing is running, before it clears its allocators."""
        self._lent.clear()
        assert not any(self.total_size()), "a lock or a copy outlived its request"

    # Reading.

    def match_prefix(self, params: sglang.MatchPrefixParams) -> MatchResult:
        """Return what the index has of a prompt; reserves nothing, except a state for `cow_mamba`.

        SGLang asks for each waiting request in each round. Only a request's first match, and one that is
        deeper than those before, count as hits.
        """
        if len(params.key) < self.page_size:
            root = self.root_node
            return MatchResult(0, root, root, root)
        visit = self._visit(params)
        if params.cow_mamba and params.req.kv.mamba_cow_src_index is not None:
            # Of an earlier round, in which the request was not admitted; the slot may have another state now.
            params.req.kv.mamba_cow_src_index, params.req.kv.mamba_needs_clear = None, True
        wanted = params.cow_mamba and self._hybrid and visit.result.device_prefix_len
        if wanted and not self._copy_state_later(params.req, visit.result.last_device_node):
            # All states are in use, or being copied: a miss, where SGLang's own tree would end the server.
            return MatchResult(0, self.root_node, self.root_node, self.root_node)
        return visit.result

    def _visit(self, params: sglang.MatchPrefixParams) -> _Visit:
        key, index = params.key, self._index
        before: _Visit | None = getattr(params.req, "tiercache_visit", None)
        # A copy, because SGLang appends to its array, which fails while something refers to the memory.
        tokens = np.frombuffer(memoryview(key.raw_token_ids()).tobytes(), np.uint64)
        extra = self._weights + _extra(key)
        is_current = before is not None and index.is_current(before.match) and before.extra == extra
        if before is not None and is_current and np.array_equal(before.tokens, tokens):
            index.touch(before.match, again=True)
            return before
        match = index.match(tokens, extra, limit=len(tokens) // self.page_size)
        if before is not None and match.depth <= before.match.depth:
            origin = before.origin
            index.touch(match, again=True)
        else:
            origin = index.touch(match, tokens)
        on_device = self._lent.device_depth(match)
        # The arena of a cache without a host may hold a page of a very small model, which SGLang never loads.
        depth = self._lent.near_depth(match, on_device) if self._has_host else on_device
        near = Handle.at(index, match, depth, tokens, extra)
        length = depth * self.page_size
        plan = index.plan_checkpoints(match, tokens, match.depth).depths
        device = near if on_device == near.depth else Handle.at(index, match, on_device, tokens, extra)
        branch = branch_of(plan, origin, length, self.page_size, self._grid) if self._hybrid else None
        result = MatchResult(
            on_device * self.page_size, device, near, near, mamba_branching_seqlen=branch,
            host_hit_length=length - on_device * self.page_size,
            mamba_host_hit_length=int(self._hybrid and near is not device),
            full_kv_hit_length=match.path_depth * self.page_size,
        )  # fmt: skip
        visit = _Visit(match, tokens, extra, plan, origin, result)
        if params.req is not None:
            params.req.tiercache_visit = visit
        return visit

    def _copy_state_later(self, req: Any, handle: Handle) -> bool:
        """Let the next pass copy the state at a depth into a slot of the request; False if none is free."""
        if not req.kv.holds_mamba:
            slot = self._state_slot(handle)
            if slot is None:
                return False
            req.kv.mamba_pool_idx = slot[0]
        assert handle.node is not None, "a state has a depth"
        at = np.array([handle.node.state(Tier.DEVICE, 0)])
        source = torch.from_numpy(at if at[0] >= 0 else pending(at))
        req.kv.mamba_cow_src_index = source.to(self.req_to_token_pool.device)
        req.kv.mamba_needs_clear = False
        return True

    def path_device_indices(self, node: Handle) -> torch.Tensor:
        """Return the rows of the KV on the path to `node`: int64, shape [tokens]."""
        path = [] if node.node is None else [*node.node.path()]
        parts = [np.empty(0, np.int64), *[at.where[Tier.DEVICE, 0] for at in reversed(path)]]
        pages = np.concatenate(parts)[: node.depth]
        # What is being loaded has its rows, too: a pass waits for it.
        loading = any(at.pages_in_flight for at in path)
        return self._pages.rows(np.where(pages < ABSENT, pending(pages), pages) if loading else pages)

    # The host.

    def init_load_back(self, params: sglang.InitLoadBackParams) -> tuple[int, Handle]:
        """Begin to load what only the host has of a match; return how many tokens come, and the new node.

        Either everything that the match has promised comes, or nothing, for lack of slots.
        """
        near, req = params.best_match_node, params.req
        held = self.inc_lock_ref(near)
        try:
            # SGLang frees slots which the batch that it has just begun still writes.
            fence = None if self._stream is None else self._stream.record_event()
            load = self._lent.load(near.node, near.depth, fence=fence)
        except PoolFullError:
            return 0, req.last_node
        else:
            self._loads.add_load(load)
            if self._hybrid and not self._copy_state_later(req, near):
                return 0, req.last_node
        finally:
            self.dec_lock_ref(near, held)
        return near.depth * self.page_size - req.prefix_len, near

    def ready_to_load_host_cache(self) -> int:
        """Return the number under which the batch that was prepared waits for its loads; -1 for none."""
        return self._loads.end_batch()

    def check_hicache_events(self) -> None:
        """Apply what has happened in the background; SGLang calls this in each round."""
        if self._is_one_of_several:  # they have to stay alike: one that fails ends the server
            self._controller.tick()
        else:
            attempt(self._controller.tick, None, "to note what has happened in the background")
        # A round waits for the results of one pass, which the device may have begun in the round before.
        computed, self._computed = self._computed, []
        if not self._has_loaded or sum(end - begin for begin, end in computed) < self.page_size:
            call = partial(self._controller.note_pass, computed, self._computed_at - self._round)
            attempt(call, None, "to measure a pass")
        self._has_loaded = False
        self._round = time.perf_counter()

    @property
    def ongoing_write_through(self) -> range:
        """Range as long as the list of copies under way, for which a flush has to wait."""
        return range(self._lent.copies)

    ongoing_load_back: Sequence[int] = ()

    # Locks.

    def inc_lock_ref(self, node: Handle) -> Any:
        """Hold the pages up to `node`, and the state there; the receipt goes to `dec_lock_ref`."""
        if node.node is None:
            return _Held()
        if node.node.end > node.depth:  # so that what is behind the depth can be evicted
            node.node = self._index.extend_path(node.tokens, node.depth, node.extra)
        return _Held(pin=self._index.pin(node.node, Tier.DEVICE))

    def dec_lock_ref(self, node: Handle, params: Any = None) -> sglang.DecLockRefResult:
        """End the hold of a receipt."""
        if params is not None and params.pin is not None:
            params.pin.release()
        return sglang.DecLockRefResult()

    # What requests have computed.

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        """Take over the whole pages of a request's first `up_to` tokens, and its last state among them.

        SGLang calls this after each pass of a long prefill, after the last, and when the request ends. A
        hybrid gives pages up to its state only. The slots of pages that the cache has twice are freed at
        once, and the request's row names the cache's from then on.
        """
        finished = req.finished()
        ids = req.full_untruncated_fill_ids[:up_to]
        length, kept, state = len(ids), None, None
        # Of a long prefill only the last pass is measured: SGLang tells of the others in the next round.
        if not finished and req.prefix_len < length >= len(req.origin_input_ids):
            self._computed.append((req.prefix_len, length))
            self._computed_at = time.perf_counter()
            visit: _Visit | None = getattr(req, "tiercache_visit", None)
            self._has_loaded |= visit is not None and visit.result.host_hit_length > 0
        if self._hybrid:
            length, kept, state = self._state_of(req, length, finished=finished)
        length = length // self.page_size * self.page_size
        adopted = False
        if length and (self._hybrid or length > req.kv.cache_protected_len):
            adopted = self._adopt(req, np.frombuffer(memoryview(ids), np.uint64)[:length], state, finished)
        if not self._hybrid:
            return
        if finished:
            kept = kept if adopted else None
            self.req_to_token_pool.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=kept)
            return
        if state is not None and not adopted:
            self.req_to_token_pool.mamba_allocator.free(state)
        req.kv.mamba_last_track_seqlen = req.kv.mamba_prev_track_seqlen = None

    def _state_of(
        self, req: Any, length: int, *, finished: bool
    ) -> tuple[int, int | None, torch.Tensor | None]:
        """Return (tokens, index in the track buffer, slot) of the request's last state within `length`.

        Of a request that goes on, the slot leaves its track buffer for a new one. The tokens are 0 if there
        is no such state, or no slot in its place.
        """
        pool, kv = self.req_to_token_pool, req.kv
        depth = kv.mamba_last_track_seqlen or 0
        index = pool.get_mamba_ping_pong_keep_idx(req)
        if depth > length:  # the last state is behind what may be kept; the one before it may do
            depth = kv.mamba_prev_track_seqlen or 0
            index = pool.get_mamba_ping_pong_other_idx(index)
            if not finished or pool.mamba_ping_pong_track_buffer_size != 2 or depth > length:
                return 0, None, None
        if not depth:
            return 0, None, None
        if finished:
            return depth, index, kv.mamba_ping_pong_track_buffer[index].view(-1)
        slot = self._state_slot()
        if slot is None:
            return 0, None, None
        return depth, index, pool.donate_mamba_ping_pong_slot(req, slot)

    def _state_slot(self, but: Handle | None = None) -> torch.Tensor | None:
        """Return a free slot for a state, shape [1]; None if all are in use.

        If needed, states are evicted, but not that of `but`.
        """
        allocator = self.req_to_token_pool.mamba_allocator
        slot: torch.Tensor | None = allocator.alloc(1)
        if slot is None:
            held = self.inc_lock_ref(but or self.root_node)
            if self._lent.make_room({_MAMBA: 1}):
                slot = allocator.alloc(1)
            self.dec_lock_ref(self.root_node, held)
        return slot

    def _adopt(self, req: Any, tokens: TokenArray, state: torch.Tensor | None, finished: bool) -> bool:
        """Hand pages and a state to the cache; return whether the cache owns the state's slot now."""
        visit: _Visit | None = getattr(req, "tiercache_visit", None)
        extra = self._weights + _extra(req)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(tokens) : self.page_size]
        depth, states = len(tokens) // self.page_size, {}
        if state is not None:
            states[len(tokens)] = {_MAMBA: int(state.item())}
        plan = {} if visit is None else visit.plan
        kind = CheckpointKind.END if finished else plan.get(depth, CheckpointKind.INTERVAL)
        after = None if req.lock is None else req.lock.receipt.pin
        origin = Origin() if visit is None else visit.origin
        taken = Taken({depth: kind}, origin, None if after is None else after.node)
        # What was computed is in its slots once the device has passed this point.
        fence = None if self._stream is None else self._stream.record_event()
        pages = {_KV: self._pages.slots(row)}
        made = self._lent.adopt(tokens, pages, states, extra, taken=taken, fence=fence)
        at = made.pages[_KV]
        adopted = int(np.count_nonzero(at.adopted))
        self._pages.held += adopted
        if self._states is not None:
            self._states.held += len(made.adopted_states)
        if adopted < len(at.adopted) and (at.duplicate | at.private).any():
            assert not at.private.any(), "nothing is loaded into other slots"
            self._pages.release(self._pages.slots(row[made.start :])[at.duplicate])
            begin = made.start * self.page_size
            rows = self._pages.rows(at.table).to(row.dtype)
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(begin, len(tokens))), rows)
        handle = Handle(made.node, depth, tokens, extra)
        lock = self.lock(handle)
        self.unlock(req.lock)
        req.lock, req.last_node = lock, handle
        req.kv.cache_protected_len = max(req.kv.cache_protected_len, len(tokens))
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, len(tokens))
        return bool(made.adopted_states)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Free the states of a request that has handed over nothing at its end."""
        if self._hybrid and not checkpointed:
            self.req_to_token_pool.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=None)

    # Room.

    def evict(self, params: sglang.EvictParams) -> sglang.EvictResult:
        """Give up to as many slots back as SGLang asks for."""
        began = time.perf_counter()
        states = params.mamba_num if self._states is not None else 0
        need = {_KV: -(-params.num_tokens // self.page_size), _MAMBA: states}
        freed = self._lent.make_room({pool: count for pool, count in need.items() if count > 0})
        tokens = freed.get(_KV, 0) * self.page_size
        self.update_eviction_metrics(tokens, began)
        return sglang.EvictResult(num_tokens_evicted=tokens, mamba_num_evicted=freed.get(_MAMBA, 0))

    def evictable_size(self) -> int:
        """Number of tokens that can be evicted."""
        return self._evictable[0] * self.page_size

    def protected_size(self) -> int:
        """Number of tokens in the cache that a lock holds."""
        return self._pages.held * self.page_size - self.evictable_size()

    full_evictable_size, full_protected_size = evictable_size, protected_size

    def mamba_evictable_size(self) -> int:
        """Number of states that can be evicted."""
        return self._evictable[1] if self._states is not None else 0

    def mamba_protected_size(self) -> int:
        """Number of states in the cache that a lock holds."""
        return self._states.held - self.mamba_evictable_size() if self._states is not None else 0

    def total_size(self) -> tuple[int, int]:
        """Numbers of tokens and of states in the cache."""
        return self._pages.held * self.page_size, 0 if self._states is None else self._states.held

    def all_values_flatten(self) -> torch.Tensor:
        """Return the rows of everything in the cache, for SGLang's census when a slot is lost."""
        return self._pages.rows(_on_device(self._index, _KV))

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """Return the slots of all states in the cache, for the same census."""
        return torch.from_numpy(_on_device(self._index, _MAMBA))

    def supports_mamba(self) -> bool:
        """Whether states are cached."""
        return self._states is not None

    def sanity_check(self) -> None:
        """Check what SGLang checks when it is idle: nothing is held, and the counts agree."""
        assert not self.protected_size(), "a lock outlived its request"

    def pretty_print(self) -> None:
        """Log how much the cache holds; SGLang calls this when it finds no slots."""
        _log.info("tiercache: %d tokens and %d states on the device", *self.total_size())

    def release_host_resources(self) -> None:
        """Close the cache, at the end of the scheduler."""
        self._controller.close()


def _least(group: Any, ends: Ends) -> Ends:
    """Return the least of what the ranks of a group give, element by element."""
    least = torch.from_numpy(ends)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group)
    return ends


def _on_device(index: HybridIndex, pool: PoolName) -> Locations:
    """Return the slots of a pool in the index: int64, shape [slots]."""
    held: list[Locations] = [np.empty(0, np.int64)]
    for node in index.nodes():
        at = node.where[Tier.DEVICE, 0] if pool is _KV else np.array([node.state(Tier.DEVICE, 0)])
        held.append(at[at >= 0])
    return np.concatenate(held)


def _extra(key: Any) -> bytes:
    """Return what a cached prefix depends on besides its tokens: adapter, salt and the caller's key."""
    parts = (key.extra_key, key.cache_salt)
    return repr(parts).encode() if any(parts) else b""
