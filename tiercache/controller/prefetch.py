"""Fetches of what storage can restore: those of a request, and those of a prompt that will come."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.depths import best_depth
from tiercache.controller.in_flight import InFlight
from tiercache.controller.lookup import Lookup, look_up
from tiercache.controller.operations import Fetch, PageRun, gather_runs
from tiercache.core import ABSENT, Mask, PoolName, Reason, Tier, TokenArray, full_pages, pending
from tiercache.errors import PoolFullError
from tiercache.index import Match, Node, Pin
from tiercache.storage.hybrid import is_outage

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
    """

    def __init__(self, context: ControllerContext, lookup: Lookup, limit: int, share: int = 1) -> None:
        """Prepare fetches of the prompt of `lookup`, up to the depth of `limit` pages.

        A wave takes at most one part in `share` of the blocks that all fetches may hold.
        """
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
        self._wave = max(context.in_flight.fetching.blocks // share, context.allocator.widest)
        """Number of host blocks, at most, that a wave takes."""
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

    def begin(self, target: int, *, to_device: bool = False) -> Step:
        """Begin the next wave of fetches for depth `target` (in pages).

        With `to_device`, the caller loads what has landed to the device, so that the host need not hold the
        whole depth.
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
            return self._begin_wave(node, target, to_device)
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

        This is the deepest one, unless computing its last tokens is faster. Returns 0 if there is none.
        """
        depths, context = self.restorable(match, beyond=match.near_depth), self._context
        part, wave = Fetch.part_bytes(context), self._wave * context.arena.block_bytes
        return best_depth(context, match, depths, self._limit, part, wave) if depths else 0

    def is_gain_too_small(self, match: Match) -> bool:
        """Return whether storage could restore more tokens, but those are not worth a fetch."""
        depths = self.restorable(match, beyond=match.near_depth)
        return bool(depths) and max(depths) > self.worthwhile_depth(match)

    @property
    def is_cut_off(self) -> bool:
        """Whether storage cannot be read now, so that a fetch would evict other objects for nothing."""
        return self._met_outage or self._context.reads.is_suspended

    def restorable(self, match: Match, beyond: int) -> Collection[int]:
        """Return the depths, in pages, above `beyond` that may be restored with the help of storage."""
        query = self._lookup.query
        is_out = query is not None and is_outage(query.reason)
        if is_out or self._context.storage is None or self.rounds == _MAX_ROUNDS:
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

    def _begin_wave(self, node: Node, depth: int, to_device: bool) -> Step:
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
            blocks_of = context.allocator.blocks_of
            context.allocator.require_host(sum(blocks_of(p, int(m.sum())) for p, m in absent.items()))
        fetch = self._fetch(node, absent)
        self._fetching = {o for o in waiting if isinstance(o, Fetch)} | ({fetch} if fetch else set())
        for each in self._fetching:
            each.join(self)
        if self._fetching:
            return Step.BEGUN
        if any(mask.any() for mask in absent.values()) and not context.in_flight.count("fetch"):
            # No fetch is under way that could give blocks back later.
            raise PoolFullError("reads that hang hold every block that fetches may have")
        return Step.LATER

    def _fetch(self, node: Node, absent: dict[PoolName, Mask]) -> Fetch | None:
        """Fetch the first absent objects, as many as fetches may hold. The state at the end comes last.

        Returns None if nothing is absent, or if fetches hold too many blocks now. Raises PoolFullError if the
        host has no room for the wave.
        """
        context = self._context
        cost = {pool: context.allocator.blocks_of(pool, 1) for pool in absent}
        # The absent objects of page i take blocks[i] host blocks. The wave has as many pages, from the start,
        # as fit. With blocks 0 2 2 6 and room for 5 blocks, the wave has the first three pages.
        blocks = sum(mask * cost[pool] for pool, mask in absent.items())
        most = min(context.in_flight.fetching.left, self._wave)
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


_MAX_WAITING: Final = 1024
"""Maximum number of prefetches that are not over."""
_MAX_TOKENS: Final = 1 << 24
"""Maximum number of tokens of all these prefetches together. A token takes 8 bytes."""
_SHARE: Final = 4
"""A prefetch may hold a fourth of the blocks that all fetches may hold, which leaves room for requests."""


class PrefetchTicket:
    """Prefetch of one prefix from storage to the host, which no request waits for."""

    def __init__(self, context: ControllerContext, tokens: TokenArray, extra: bytes) -> None:
        self.done = False
        """Whether the prefetch is over."""
        self.reason = Reason.NONE
        """Reason why less than the prefix can be restored; NONE if storage has no more of it."""
        self.tokens = 0
        """Number of tokens that device and host could restore at the end of the prefetch; 0 before."""
        self.length = len(tokens)
        """Number of tokens of the prefix."""
        self.fetched: Mapping[PoolName, Mask] = {}
        """Mask of the pages that came from storage, by pool, at the end; a state counts as its last page."""
        self._context = context
        self._prompt = tokens
        self._extra = extra
        self._pages = full_pages(len(tokens), context.page_size)
        self._prefetch: Prefetch | None = None

    def cancel(self) -> None:
        """End the prefetch. What has been fetched stays; reads that have not begun are cancelled.

        Does nothing if the prefetch is over.
        """
        if not self.done:
            self._end(self._match(), "cut_short")

    def refuse(self) -> None:
        """End the prefetch before its begin, because too many others wait."""
        self.reason = Reason.BUSY
        self._end(self._match(), "refused")

    def advance(self) -> None:
        """Go on as far as possible without waiting. The queue of prefetches calls this."""
        if self._prefetch is None and not self._ask():
            return
        prefetch = self._prefetch
        assert prefetch is not None, "storage was asked"
        if prefetch.waiting:
            return
        for reason in prefetch.collect_results():
            self.reason = reason
        match = self._match()
        while target := prefetch.target(match):
            # Requests go first: while one of them fetches, no further wave begins.
            if self._context.in_flight.count("fetch"):
                return
            if prefetch.begin(target) is not Step.NO_ROOM:
                return
            prefetch.give_up()
            self.reason = Reason.BUSY
            match = self._match()
        if self.reason is Reason.NONE:
            self.reason = prefetch.shortfall(match)
        self._end(match, "complete")

    def _ask(self) -> bool:
        """Ask storage; return whether the prefetch goes on. It is over if there is nothing to ask for."""
        lookup = look_up(self._context, self._prompt, self._extra, limit=self._pages)
        if lookup.unasked is Reason.BUSY:
            return False  # requests have all the queries; another attempt follows when one has landed
        if lookup.query is None:
            self.reason = lookup.unasked
            self._end(lookup.match, "complete")
            return False
        self._prefetch = Prefetch(self._context, lookup, self._pages, _SHARE)
        return True

    def _match(self) -> Match:
        return self._context.index.match(self._prompt, self._extra, limit=self._pages)

    def _end(self, match: Match, outcome: str) -> None:
        self.done = True
        self.tokens = match.near_depth * self._context.page_size
        if self._prefetch is not None:
            self.fetched = self._prefetch.fetched
            self._prefetch.close()
            self._prefetch = None
        self._prompt = self._prompt[:0]
        self._context.metrics.increment("prefetches_total", "hint", outcome)


class PrefetchQueue:
    """Queue of the prefetches without a request, of which one at a time goes on.

    Thread safety: the owner's thread. No method waits.
    """

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._tickets: deque[PrefetchTicket] = deque()

    def add(self, tokens: TokenArray, extra: bytes) -> PrefetchTicket:
        """Queue a prefetch of the whole pages of `tokens`; return it, refused if too many are waiting."""
        self._tickets = deque(ticket for ticket in self._tickets if not ticket.done)
        ticket = PrefetchTicket(self._context, tokens, extra)
        total = sum(other.length for other in self._tickets) + len(tokens)
        if len(self._tickets) >= _MAX_WAITING or total > _MAX_TOKENS:
            ticket.refuse()
        else:
            self._tickets.append(ticket)
            self.advance()
        return ticket

    def advance(self) -> None:
        """Let the first prefetch go on, and the next ones when it is over."""
        while self._tickets and not self._context.is_draining:
            first = self._tickets[0]
            if not first.done:
                first.advance()
            if not first.done:
                return
            self._tickets.popleft()

    def close(self) -> None:
        """Cancel all prefetches."""
        for ticket in self._tickets:
            ticket.cancel()
        self._tickets.clear()
