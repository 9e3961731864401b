"""Storage side of a request: the query about its prompt, then fetches of what storage can restore."""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tiercache.controller.beliefs import forget_missing
from tiercache.controller.context import ControllerContext
from tiercache.controller.depths import best_depth, near_runs
from tiercache.controller.in_flight import InFlight
from tiercache.controller.operations import Fetch, PageRun, gather_runs
from tiercache.controller.store_calls import StoreCall
from tiercache.core import (
    ABSENT,
    Mask,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    Reason,
    StorageExtra,
    Tier,
    TokenArray,
    pending,
    reusable_pages,
)
from tiercache.errors import PoolFullError
from tiercache.index import Match, Node, Pin
from tiercache.keys import KEY_BYTES, page_keys
from tiercache.storage.hybrid import is_outage

_log = logging.getLogger(__name__)


class StorageQuery:
    """Query about the pages of one prompt: one `batch_exists_v2` on a background thread.

    Thread safety: the owner's thread (the engine's thread, which calls the controller). Only
    `_background_query` runs on another thread.
    """

    kind = "query"
    pins = ()

    def __init__(self, context: ControllerContext, tokens: TokenArray, extra: bytes, near_pages: int) -> None:
        self.done = False
        """Whether the query has ended; `result` and `reason` are valid only then."""
        self.result: PoolTransferResult | None = None
        """Answer of storage; None if the call failed."""
        self.reason = Reason.NONE
        """Reason why the call failed, or why storage could not answer."""
        self._context = context
        self._tokens = tokens
        self._extra = extra
        self._near_pages = near_pages
        """Number of pages, from the start, that are not asked for because they are near."""
        assert context.storage is not None
        probe = partial(context.storage.probe, context.pools[0], bytes(KEY_BYTES), read=False)
        context.in_flight.begin(self)
        context.queries.submit(
            StoreCall(
                self._background_query, landed=self._land, lost=self._lose, late=lambda _: None, probe=probe
            )
        )

    def _background_query(self) -> tuple[PoolTransferResult | None, Reason]:
        context = self._context
        assert context.storage is not None
        try:
            keys = page_keys(context.namespace, self._tokens, context.page_size, extra=self._extra)
            transfers = []
            for pool in context.pools:
                geometry = context.host[pool].geometry
                transfers.append(
                    PoolTransfer(pool, hit_policy=geometry.hit_policy, trailing=geometry.trailing)
                )
            near = keys[: self._near_pages]
            result = context.storage.batch_exists_v2(keys[self._near_pages :], transfers, StorageExtra(near))
            return result, result.reason
        except Exception:  # noqa: BLE001
            # an exception breaks the store's contract; only this query fails, with the reason `io_error`
            _log.exception("asking storage failed")
            return None, Reason.IO_ERROR

    def _land(self, answer: tuple[PoolTransferResult | None, Reason]) -> bool:
        (self.result, self.reason), self.done = answer, True
        if self.result is not None and self.reason is Reason.NONE:
            forget_missing(self._context, self._tokens, self._extra, self.result)
        self._context.in_flight.end(self)
        return self.result is not None

    def _lose(self, reason: Reason, begun: bool) -> None:
        self._land((None, reason))


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prompt, and what was known about it when it was looked up."""

    tokens: TokenArray
    extra: bytes
    """Bytes that the keys cover besides the tokens (see `keys.sequence_extra`)."""
    match: Match
    """Match of the prompt in the index."""
    near_tokens: int
    """Number of tokens that can be restored from device and host."""
    query: StorageQuery | None = None
    """Query of storage about the prompt; None if storage was not asked."""
    unasked: Reason = Reason.NONE
    """Reason why storage was not asked; NONE if storage was asked, or if device and host have everything."""


def look_up(
    context: ControllerContext, tokens: TokenArray, extra: bytes, *, limit: int | None = None
) -> Lookup:
    """Match a prompt in the index, and ask storage in the background about pages that are not near.

    `limit`, in pages, is the deepest depth of interest. By default, at least one token is left to compute.
    """
    limit = reusable_pages(len(tokens), context.page_size) if limit is None else limit
    match = context.index.match(tokens, extra, limit=limit)
    near_tokens = match.near_depth * context.page_size
    if match.near_depth >= limit:
        return Lookup(tokens, extra, match, near_tokens)
    if context.storage is None:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.DISABLED)
    if (limit - match.near_depth) * context.page_size < context.options.min_fetch_tokens:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.NOT_WORTH)
    if context.queries.is_suspended:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.UNAVAILABLE)
    if context.in_flight.count("query") >= context.options.max_queries:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.BUSY)
    query = StorageQuery(
        context, tokens[: limit * context.page_size], extra, near_runs(context, match, limit)[1]
    )
    return Lookup(tokens, extra, match, near_tokens, query)


_MAX_ROUNDS: Final = 8
"""Maximum number of rounds per admission. In each round, one depth is tried.

Another round follows if objects turn out to be missing or corrupt, or if the host has no room for a depth.
"""


class Step(enum.Enum):
    """Result of an attempt to begin a fetch."""

    BEGUN = "begun"
    LATER = "later"
    """Other fetches hold all blocks that fetches may hold. Try again when a fetch has landed."""
    NO_ROOM = "no_room"
    """The host cannot hold the objects that the depth needs. Make room, or give the depth up."""


class Prefetch:
    """Fetches of one admission, which bring the objects that a depth lacks from storage to the host.

    The objects of a depth are fetched in waves. A wave has as many objects as fit into the host blocks that
    fetches may hold. A pin keeps the objects of earlier waves on the host, unless the device has all of them.

    Thread safety: the owner's thread.
    """

    def __init__(self, context: ControllerContext, lookup: Lookup, limit: int) -> None:
        """Prepare fetches of the prompt of `lookup`, up to the depth of `limit` pages."""
        self.fetched: dict[PoolName, Mask] = {p: np.zeros(limit, np.bool_) for p in context.pools}
        """Mask of the pages that were fetched for this prompt, by pool.

        A state counts as the page on which it ends.
        """
        self.rounds = 0
        """Number of depths that were tried."""
        self.pin: Pin | None = None
        """Pin of the path that is being fetched; None if there is no such path."""
        self._context = context
        self._lookup = lookup
        self._limit = limit
        self._keys: list[bytes] = []
        """Page keys of the path that is being fetched."""
        self._missing: set[tuple[PoolName, int]] = set()
        """Pool and depth of each object that could not be fetched."""
        self._too_large: set[int] = set()
        """Depths, in pages, for which the host has no room."""
        self._fetching: set[Fetch] = set()
        self._waves = 0
        self._met_outage = False
        """Whether an object could not be fetched because of an outage. Then nothing more is fetched."""
        self._depth = 0
        """Depth, in pages, that is being fetched; 0 if there is no such depth."""

    @property
    def path(self) -> tuple[Node, int] | None:
        """Node of the path that is being fetched, and its depth in pages; None if there is no such path."""
        return None if self.pin is None else (self.pin.node, self._depth)

    @property
    def progress(self) -> tuple[int, int]:
        """Value that changes when a wave begins, and when a part of it has landed on the host."""
        return self._waves, sum(fetch.landed for fetch in self._fetching)

    @property
    def waiting(self) -> bool:
        """Whether an answer or an object is still on its way."""
        query = self._lookup.query
        return (query is not None and not query.done) or not all(fetch.done for fetch in self._fetching)

    def collect_results(self) -> set[Reason]:
        """Record which objects of this prompt could not be fetched, and return the reasons.

        A shared fetch may also bring pages of another prompt. Their failures are left out.
        """
        failed: dict[tuple[PoolName, bytes], Reason] = {}
        for fetch in self._fetching:
            failed |= fetch.failed
        self._fetching = set()
        reasons: set[Reason] = set()
        if failed:
            depths = {key: depth for depth, key in enumerate(self._keys, 1)}
            for (pool, key), reason in failed.items():
                if key in depths:
                    self._missing.add((pool, depths[key]))
                    reasons.add(reason)
        self._met_outage |= any(map(is_outage, reasons))
        return reasons

    def begin(self, target: int, *, share: int = 1, to_device: bool = False) -> Step:
        """Begin the next wave of fetches for depth `target` (in pages).

        The wave takes at most one part in `share` of the blocks that all fetches may hold. With `to_device`,
        the caller loads what has landed to the device, so that the host need not hold the whole depth.
        """
        context, lookup = self._context, self._lookup
        if target != self._depth:
            self.rounds += 1
        node = context.index.extend_path(lookup.tokens, target, lookup.extra)
        # The new pin is taken before the old pin is released. In the other order, objects of the path could
        # be evicted in between.
        tiers = (Tier.DEVICE,) if to_device and self._has_all(node, target) else (Tier.DEVICE, Tier.HOST)
        held, self.pin = self.pin, context.index.pin(node, *tiers)
        if held is not None:
            held.release()
        self._keys = context.index.page_keys(node, target)
        self._depth = target
        self._waves += 1
        try:
            return self._begin_wave(node, target, share, to_device)
        except PoolFullError:
            return Step.NO_ROOM

    def give_up(self) -> None:
        """Give up the depth for which there was no room. It is not tried again."""
        self._too_large.add(self._depth)
        self._depth = 0
        self._release_pin()  # removes the nodes that were made for this fetch

    def _has_all(self, node: Node, depth: int) -> bool:
        """Return whether the device has everything that the host has of the path to `node`."""
        pages, states = self._context.index.locations(node, depth)
        return all(((at.device >= 0) | (at.host == ABSENT)).all() for at in pages.values()) and all(
            one.device >= 0 or one.host == ABSENT for one in states.values()
        )

    def close(self) -> None:
        """Leave the fetches, and release the path.

        If no other admission waits for a fetch, its reads that have not begun are cancelled.
        """
        for fetch in self._fetching:
            fetch.leave(self)
        self._release_pin()

    def target(self, match: Match) -> int:
        """Return the deepest depth, in pages, that a fetch should try next; 0 if there is none."""
        return 0 if self.is_cut_off else self.worthwhile_depth(match)

    def worthwhile_depth(self, match: Match) -> int:
        """Return the depth, in pages, that is best restored from storage, provided that reads succeed.

        This is the deepest one, unless computing its last tokens is faster. Returns 0 if there is none, or if
        it adds too few tokens to be worth a fetch.
        """
        depths = self.restorable(match, beyond=match.near_depth)
        depth = best_depth(self._context, match, depths, self._limit, Fetch.part_bytes(self._context))
        # The gain is what the whole fetch adds to the near depth at lookup. Each wave that has landed raises
        # the present near depth. Compared with the present near depth, the last waves would look too small
        # to be worth a fetch.
        near = min(match.near_depth, self._lookup.match.near_depth)
        return (
            depth if (depth - near) * self._context.page_size >= self._context.options.min_fetch_tokens else 0
        )

    def is_gain_too_small(self, match: Match) -> bool:
        """Return whether storage could restore more tokens, but those are not worth a fetch."""
        return max(self.restorable(match, beyond=match.near_depth), default=0) > self.worthwhile_depth(match)

    @property
    def is_cut_off(self) -> bool:
        """Whether storage cannot be read now, so that a fetch would evict other objects for nothing."""
        return self._met_outage or self._context.reads.is_suspended

    def restorable(self, match: Match, beyond: int) -> Collection[int]:
        """Return the depths, in pages, above `beyond` that may be restored with the help of storage."""
        query = self._lookup.query
        if (
            self._context.storage is None
            or self.rounds == _MAX_ROUNDS
            or (query is not None and is_outage(query.reason))
        ):
            return ()
        # Depths that the index or the answer of storage names as restorable, if the host has room for them.
        known = {*match.restorable, match.depth}
        if query is not None and query.result is not None:
            known.update(query.result.restorable_prefix_pages)
        known -= self._too_large
        return [d for d in known if beyond < d <= self._limit and self._may_exist(d)]

    def shortfall(self, match: Match) -> Reason:
        """Return the reason why nothing more is fetched; NONE if storage has nothing more."""
        query = self._lookup.query
        if query is not None and query.reason is not Reason.NONE:
            return query.reason
        if self._context.reads.is_suspended and self.worthwhile_depth(match):
            return Reason.UNAVAILABLE
        return Reason.NOT_WORTH if self.is_gain_too_small(match) else Reason.NONE

    def has_storage_lost_more(self, depth: int) -> bool:
        """Return whether storage cannot restore a depth beyond `depth` that the index noted as restorable."""
        query, believed = self._lookup.query, min(self._lookup.match.depth, self._limit)
        if query is None or query.result is None or is_outage(query.reason):
            return False
        return believed > depth and believed not in query.result.restorable_prefix_pages

    def _may_exist(self, depth: int) -> bool:
        """Return whether no object that `depth` needs has turned out to be missing."""
        pages = self._context.index.page_pools
        return not any(d <= depth if pool in pages else d == depth for pool, d in self._missing)

    def _release_pin(self) -> None:
        if self.pin is not None:
            self.pin.release()
            self.pin = None

    def _begin_wave(self, node: Node, depth: int, share: int, to_device: bool) -> Step:
        """Fetch absent objects on the path to `node`; join other fetches that bring objects of this path."""
        context = self._context
        #   page      0      1        2       3          4
        #   device    yes    -        -       -          -
        #   host      -      yes      -       pending    -
        #   absent    -      -        x       -          x      fetched now, as far as there is room
        #   arriving  -      -        -       x          -      on its way in another fetch: join that fetch
        located, states = context.index.locations(node, depth)
        absent = {p: (at.device < 0) & (at.host == ABSENT) for p, at in located.items()}
        waiting: set[InFlight] = set()
        for pool, at in located.items():
            arriving = (at.device < 0) & (at.host < ABSENT)
            waiting |= context.in_flight.claimants(Tier.HOST, pool, pending(at.host[arriving]))
            self.fetched[pool][:depth] |= absent[pool] | arriving
        for pool, one in states.items():
            if one.device < 0 and one.host < ABSENT:
                waiting |= context.in_flight.claimants(Tier.HOST, pool, pending(np.array([one.host])))
            absent[pool] = np.zeros(depth, np.bool_)
            absent[pool][-1] = one.device < 0 and one.host == ABSENT
            self.fetched[pool][depth - 1] |= one.device < 0 and one.host < 0
        if not to_device:
            context.allocator.require_host(
                sum(context.allocator.blocks_of(p, int(mask.sum())) for p, mask in absent.items())
            )
        fetch = self._fetch(node, absent, share)
        self._fetching = {o for o in waiting if isinstance(o, Fetch)} | ({fetch} if fetch else set())
        for each in self._fetching:
            each.join(self)
        if (
            not self._fetching
            and any(mask.any() for mask in absent.values())
            and not context.in_flight.count("fetch")
        ):
            # No fetch is under way that could give blocks back later.
            raise PoolFullError("reads that hang hold every block that fetches may have")
        return Step.BEGUN if self._fetching else Step.LATER

    def _fetch(self, node: Node, absent: dict[PoolName, Mask], share: int) -> Fetch | None:
        """Fetch the first absent objects, as many as fetches may hold. The state at the end comes last.

        Returns None if nothing is absent, or if fetches hold too many blocks now. Raises PoolFullError if the
        host has no room for the wave.
        """
        context = self._context
        cost = {pool: context.allocator.blocks_of(pool, 1) for pool in absent}
        # The absent objects of page i take blocks[i] host blocks. The wave has as many pages, from the start,
        # as fit. With blocks 0 2 2 6 and room for 5 blocks, the wave has the first three pages.
        blocks = sum(mask * cost[pool] for pool, mask in absent.items())
        budget = context.in_flight.fetching
        most = min(budget.left, max(budget.blocks // share, context.allocator.widest))
        pages = int(np.searchsorted(np.cumsum(blocks), most, "right"))
        wave = {pool: mask[:pages] for pool, mask in absent.items()}
        if not any(mask.any() for mask in wave.values()):
            return None
        handles = context.allocator.take_host({p: int(mask.sum()) for p, mask in wave.items()})
        runs: list[PageRun] = []
        for pool, mask in wave.items():
            runs += gather_runs(pool, node, 0, np.zeros(len(mask), np.int64), mask, handles[pool])
        # The device is not held, because the fetch may go on, or hang, when no request waits for it any more.
        return Fetch(context, runs, self._keys, [context.index.pin(node, Tier.HOST)])
