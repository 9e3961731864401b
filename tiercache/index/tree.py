"""Hybrid prefix index: match, insert, locations, eviction.

A page-granular radix tree over token ids. Where only page pools are registered, every depth up to which all pages are present is
restorable; where state pools are registered, a prefix is restorable only at the depths that carry a complete state (architecture.md,
invariant 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import numpy as np

from tiercache import keys
from tiercache.core import ABSENT, Locations, PoolName, Tier, TokenArray, as_tokens, full_pages, pending, reusable_pages
from tiercache.errors import ConfigError, InputError, PoolFullError
from tiercache.index.base import (
    Content,
    Eviction,
    Inserted,
    InsertedPages,
    Match,
    Origin,
    PageLocations,
    PathLocations,
    PlacedState,
    Span,
    StateLocation,
)
from tiercache.index.checkpoints import CheckpointRules, checkpoint_depths
from tiercache.index.eviction import Sweep, device_pages
from tiercache.index.forest import Pin
from tiercache.index.integrity import check_integrity
from tiercache.index.ledger import Ledger
from tiercache.index.node import ALIVE, Node
from tiercache.index.prefixes import Prefixes
from tiercache.index.queue import UnitQueue, Victim
from tiercache.policy import LEARN_EVERY, CheckpointKind, Lru, Policy, Reuse, UnitKind

MAX_STORED_PAGES: Final = 1 << 20
"""Most pages that the index remembers although they are in the store and in no other tier.

Each takes 8 bytes per token and 24 bytes per page pool; the limit is about half a GiB at 64 tokens a page.
"""


class HybridIndex(Ledger):
    """Index of the pages and states that exist for token sequences, and of the tiers in which they are.

    `page_pools` hold one object per page, `state_pools` one object at the end of a node. `policy` ranks what may be evicted (default: LRU).
    `refresh` says whether a hit refreshes the last matched node only ("last") or its whole path ("path"). `max_stored_pages` bounds how
    many pages are remembered that are in the store and in no other tier. `checkpoints` says which states are asked for. `object_bytes`
    gives the payload bytes of one object of each pool, which policies weigh. `seed` seeds what is drawn at random. With `one_budget`
    the device's pools share their memory (see `evict_device_bytes`). Raises ConfigError for a policy that cannot rank these pools.
    Thread safety: one owner thread; other threads hand in events.
    """

    def __init__(
        self,
        *,
        page_size: int,
        namespace: bytes,
        page_pools: Sequence[PoolName],
        state_pools: Sequence[PoolName] = (),
        policy: Policy | None = None,
        refresh: Literal["last", "path"] = "last",
        max_stored_pages: int = MAX_STORED_PAGES,
        checkpoints: CheckpointRules | None = None,
        object_bytes: Mapping[PoolName, int] | None = None,
        seed: int = 0,
        one_budget: bool = False,
    ) -> None:
        if refresh not in ("last", "path"):
            raise InputError(f"refresh {refresh!r} is unknown; use 'last' or 'path'")
        policy = policy or Lru()
        if policy.needs_states and not state_pools:
            raise ConfigError(f"policy {policy.name!r} ranks recurrent states, and no state pool is registered; use lru, gdsf or hvd")
        super().__init__(page_size, namespace, page_pools, state_pools, policy, max_stored_pages, object_bytes or {}, seed, one_budget)
        self.checkpoints = checkpoints or CheckpointRules()
        self.policy = policy
        self._refresh_path = refresh == "path"
        self._requests = 0

    # -- asking --------------------------------------------------------------------------------------------------------

    def match(self, tokens: TokenArray, extra: bytes = b"", *, limit: int | None = None) -> Match:
        """Return how much of `tokens` is known and how much is restorable; changes nothing.

        `limit` (pages) bounds the restorable depths; by default at least one token is left to compute.
        """
        tokens = as_tokens(tokens)
        pages = full_pages(len(tokens), self.page_size)
        limit = reusable_pages(len(tokens), self.page_size) if limit is None else min(limit, pages)
        root = self._root(extra)
        path, path_depth = self._walk(root, tokens[: pages * self.page_size].tobytes())
        limit = max(0, min(limit, path_depth))
        whole = near = state_depth = near_state_depth = 0
        restorable: list[int] = []
        for node in path:
            start, end = node.end - node.pages, node.end
            if near == start:
                near += node.near
            if whole == start:
                whole += node.whole
            if node.own and whole == end <= limit and node.is_complete:
                restorable.append(state_depth := end)
                if node.state_near and near == end:
                    near_state_depth = end
        node = path[-1] if path else root
        if self.state_pools:
            return Match(node, path_depth, state_depth, near_state_depth, tuple(restorable), self._generation)
        depth = min(whole, limit)
        return Match(node, path_depth, depth, min(near, limit), (depth,) if depth else (), self._generation)

    def is_current(self, match: Match) -> bool:
        """Return whether `match` would come out the same now."""
        return match.generation == self._generation

    def locations(self, where: Node | Match, depth: int) -> PathLocations:
        """Return the locations of pages [0, depth) and of the states exactly at `depth`.

        Pending entries are returned as pending, so that callers can share loads that are under way.
        """
        node = self.node_at(where, depth)
        at = self._gather(node, depth)
        pages = {
            pool: PageLocations(at[Tier.DEVICE, row].copy(), at[Tier.HOST, row].copy(), at[Tier.STORAGE, row] >= 0)
            for row, pool in enumerate(self.page_pools)
        }
        states = {pool: _state_at(node, number, depth) for number, pool in enumerate(self.state_pools)}
        return PathLocations(pages, states)

    def page_keys(self, where: Node | Match, depth: int, start: int = 0) -> list[bytes]:
        """Return the keys of pages [start, depth) of the path to `where`; an edge's keys are computed on first use and kept."""
        node = self.node_at(where, depth)
        parts: list[list[bytes]] = []
        for at in node.path():
            if at.end <= start:
                break
            parts.append(at.keys if at.keys is not None else self._make_keys(at))
        first = node.end - sum(map(len, parts))
        return [key for part in reversed(parts) for key in part][start - first : depth - first]

    def _make_keys(self, node: Node) -> list[bytes]:
        lacking: list[Node] = []
        parent = b""
        for at in node.path():
            if at.keys is not None:
                parent = at.keys[-1]
                break
            lacking.append(at)
        for at in reversed(lacking):
            at.keys = made = keys.page_keys(self.namespace, np.frombuffer(at.edge, "<u8"), self.page_size, parent, at.extra)
            parent = made[-1]
        return made

    def evictable(self, tier: Tier) -> Mapping[PoolName, int]:
        """Return how many objects of each pool an eviction could free in `tier` now: present and not held by a pin."""
        return dict(zip(self.pools, self._evictable[tier], strict=True))

    def contents(self) -> Iterator[Content]:
        """Yield one entry for each edge that has something in some tier. Walks the tree."""
        for node in self.nodes():
            if node.own:
                yield Content(node.checkpoint if node.is_complete else CheckpointKind.NONE, node.whole, node.is_complete)

    def owned(self, tier: Tier, pool: PoolName) -> Locations:
        """Return every location of a pool in a near tier, both present and pending, as plain numbers.

        Walks the tree; for integrity checks.
        """
        number = self._number[pool]
        state = number - len(self.page_pools)
        parts = [node.where[tier, number] if state < 0 else np.array([node.state(tier, state)]) for node in self.nodes()]
        held = np.concatenate([*parts, np.empty(0, np.int64)])
        owned: Locations = np.where(held < ABSENT, pending(held), held)[held != ABSENT]
        return owned

    def check_integrity(self) -> None:
        """Recompute every counter and invariant from scratch. Raises AssertionError naming the first that does not hold."""
        check_integrity(self)

    # -- changing ------------------------------------------------------------------------------------------------------

    def plan_checkpoints(self, match: Match, tokens: TokenArray, depth: int) -> Mapping[int, CheckpointKind]:
        """Return the depths at which a prompt that is restored to `depth` should leave states, each with its reason.

        Depths are in pages, ascending; there are none without state pools. Changes nothing.
        """
        if not self.state_pools:
            return {}
        tokens = as_tokens(tokens)
        ghost = match.path_depth
        if self.checkpoints.ghost and len(self._ghosts):
            rest = tokens[match.path_depth * self.page_size :]
            ghost += self._ghosts.repeated(self._prefixes.of(rest, self._digest_at(match)))
        return checkpoint_depths(depth, match.path_depth, len(tokens), self.page_size, ghost_depth=ghost, rules=self.checkpoints)

    def touch(self, match: Match, tokens: TokenArray | None = None) -> Origin:
        """Record that a request used the match, and return the `origin` for its `insert`.

        Refreshes the node at the match's restorable depth, or with `refresh="path"` everything up to it. If the prompt's `tokens` are
        given, the policy also learns of the evicted unit that would have answered this request deeper, if there was one.
        """
        self._begin_request()
        found: list[Reuse] = []
        if match.depth:
            node = self.node_at(match, match.depth)
            found.append(_reuse(node, self._units.now))
            node.hits += 1
            self._units.now += 1
            self._refresh(node)
        if tokens is not None and self._ghosts.has_units and (missed := self._missed(match, as_tokens(tokens))) is not None:
            found.append(missed)
        for reuse in found:
            self.policy.reused(reuse)
        if not found:
            return Origin()
        last = found[-1]
        continues = last.checkpoint in (CheckpointKind.END, CheckpointKind.PROMPT)
        return Origin(last.lineage + 1 if continues else 0, last.depth)

    def _begin_request(self) -> None:
        self._requests += 1
        self._ghosts.begin()
        if self._requests % LEARN_EVERY == 0:
            self._units.sync()
            self.policy.learn(self._units.view(self._units.complete()), self._ghosts.view(self._units))

    def _missed(self, match: Match, tokens: TokenArray) -> Reuse | None:
        """Return and forget the lost unit that would have answered this prompt deeper than the match, or return None."""
        limit = reusable_pages(len(tokens), self.page_size)
        known = np.concatenate([at.digests for at in reversed(list(match.node.path()))] or [np.empty(0, np.uint64)])[: match.path_depth]
        rest = self._prefixes.of(tokens[match.path_depth * self.page_size :], self._digest_at(match))
        digests = np.concatenate([known, rest])[match.depth : limit]
        place = self._ghosts.deepest(digests)
        return None if place is None else self._ghosts.reuse(int(digests[place]), self._units.now)

    def _digest_at(self, match: Match) -> int:
        """Return the digest of the prefix that the prompt shares with the tree."""
        node = match.node.covering(match.path_depth)
        return int(node.digests[match.path_depth - node.start - 1]) if match.path_depth else Prefixes.start(node.extra)

    @contextmanager
    def pinned(self, where: Node | Match, *tiers: Tier) -> Iterator[Pin]:
        """Hold a `pin` for the length of a with-block."""
        pin = self.pin(where, *tiers)
        try:
            yield pin
        finally:
            pin.release()

    def insert(
        self,
        tokens: TokenArray,
        pages: Mapping[PoolName, Locations],
        states: Mapping[int, Mapping[PoolName, int]] | None = None,
        extra: bytes = b"",
        *,
        checkpoints: Mapping[int, CheckpointKind] | None = None,
        origin: Origin = Origin(),  # noqa: B008 (immutable)
    ) -> Inserted:
        """Insert the device slots of pages [0, d), one array of length d per page pool, and the slots of states by depth.

        `checkpoints` says why each state was taken (default: END); `origin` is what `touch` returned for this request. `InsertedPages` and
        `Inserted` describe what becomes of each slot. Refreshes only the node that covers page d - 1, and nodes that get a state they did
        not have. Raises InputError, and changes nothing, for arrays that do not fit.
        """
        tokens, states = as_tokens(tokens), states or {}
        depth = self._check_pages(len(tokens), pages)
        self._check_states(states, depth)
        self._units.now += 1
        node = self._path_to(tokens[: depth * self.page_size].tobytes(), extra)
        answer, changed = self._adopt_pages(node, depth, pages)
        adopted, rejected = self._adopt_states(node, states, changed)
        for state in adopted:
            self._describe(node.covering(state.depth), (checkpoints or {}).get(state.depth, CheckpointKind.END), origin)
        # Announced only now that the states are entered: otherwise every new page would be queued as dead weight. Shallow nodes first.
        for at in sorted(dict.fromkeys(changed), key=lambda at: at.end):
            self._announce(at)
        node = node.covering(depth)
        self._refresh(node)
        return Inserted(node, depth, answer, tuple(adopted), tuple(rejected))

    def extend_path(self, tokens: TokenArray, depth: int, extra: bytes = b"") -> Node:
        """Return the node that ends exactly at `depth` of `tokens`; create it without any objects where the tree lacks it.

        For objects that are fetched from storage: the caller pins the node and reserves their places on it. `prune` removes the node again,
        and so does the release of its pin. Raises InputError for a depth that is not within the whole pages of `tokens`.
        """
        tokens = as_tokens(tokens)
        if not 1 <= depth <= full_pages(len(tokens), self.page_size):
            raise InputError(f"depth {depth} is not within the whole pages of {len(tokens)} tokens (page size {self.page_size})")
        self._units.now += 1
        node = self._path_to(tokens[: depth * self.page_size].tobytes(), extra)
        return self._split(node, depth) if node.end > depth else node

    def evict_device(self, need: Mapping[PoolName, int]) -> Eviction:
        """Free at least `need[pool]` slots of each pool; a need for states alone frees nothing else.

        Raises PoolFullError, and changes nothing, when the unpinned objects do not suffice; InputError for an unknown pool, or with
        `one_budget`.
        """
        wanted = [need.get(pool, 0) for pool in self.pools]
        if self._device_pages.kind is not device_pages:
            raise InputError("the device's pools share their memory in this index; use evict_device_bytes")
        if unknown := set(need) - set(self.pools):
            raise InputError(f"{', '.join(unknown)}: no such pool in this index; it has {', '.join(self.pools)}")
        for pool, want, there in zip(self.pools, wanted, self._evictable[Tier.DEVICE], strict=True):
            if want > there:
                raise PoolFullError(
                    f"{want} {pool} slots are needed and {there} can be evicted; release admissions or make the pool larger"
                )
        sweep = Sweep(Tier.DEVICE, self.pools, len(self.page_pools))
        # Pages first: evicting a leaf also frees its state, so that only the rest of the need must come from states alone.
        self._sweep(sweep, self._device_pages, range(len(self.page_pools)), wanted)
        self._sweep(sweep, self._device_states, range(len(self.page_pools), len(self.pools)), wanted)
        self._forget_far()
        return sweep.result()

    def evict_device_bytes(self, nbytes: int, cost: Mapping[PoolName, int]) -> Eviction:
        """Free objects worth at least `nbytes` bytes of a device whose pools share their memory.

        One object of a pool takes `cost[pool]` bytes. Raises PoolFullError, and changes nothing, when the unpinned objects do not suffice;
        InputError without `one_budget`.
        """
        if self._device_pages.kind is device_pages:
            raise InputError("the device's pools have memory of their own; make the index with one_budget=True, or use evict_device")
        return self._evict_budget(Tier.DEVICE, self._device_pages, nbytes, cost)

    def evict_host(self, blocks: int, cost: Mapping[PoolName, int]) -> Eviction:
        """Free objects worth at least `blocks` arena blocks, where one object of a pool takes `cost[pool]` blocks.

        Raises PoolFullError, and changes nothing, when the unpinned objects do not suffice.
        """
        return self._evict_budget(Tier.HOST, self._host_units, blocks, cost)

    # -- parts of insert -----------------------------------------------------------------------------------------------

    def _check_pages(self, tokens: int, pages: Mapping[PoolName, Locations]) -> int:
        if set(pages) != set(self.page_pools):
            raise InputError(f"slots came for {', '.join(pages) or 'no pool'}; pass them for {', '.join(self.page_pools)}")
        depth = len(next(iter(pages.values())))
        for pool, slots in pages.items():
            if slots.shape != (depth,) or slots.dtype != np.int64 or (depth and int(slots.min()) < 0):
                raise InputError(f"{pool}: every page pool needs {depth} int64 slots >= 0, one per page, not {slots!r}")
        if depth > full_pages(tokens, self.page_size):
            raise InputError(f"{depth} pages of {self.page_size} tokens are more than {tokens} tokens; pass whole pages only")
        return depth

    def _check_states(self, states: Mapping[int, Mapping[PoolName, int]], depth: int) -> None:
        for at, slots in states.items():
            if not 1 <= at <= depth:
                raise InputError(f"a state at depth {at} is outside the {depth} pages that came with it; depths are in pages")
            for pool, slot in slots.items():
                self._state_number(pool)  # raises for a pool that has no states
                if slot < 0:
                    raise InputError(f"{pool}: {slot} is not a slot")

    def _adopt_pages(self, node: Node, depth: int, pages: Mapping[PoolName, Locations]) -> tuple[dict[PoolName, InsertedPages], list[Node]]:
        """Enter the slots where the device has nothing; return what became of them, and the changed nodes, which the caller announces."""
        held = self._gather(node, depth)[Tier.DEVICE]
        absent, present = held == ABSENT, held >= 0
        given = np.stack([pages[pool] for pool in self.page_pools])
        table, duplicate, private = np.where(present, held, given), present & (held != given), held < ABSENT
        missing = absent.any(axis=0)
        first = int(missing.argmax()) if missing.any() else depth  # usually only the last pages of a deep path are absent
        changed: list[Node] = []
        for at, edge, part in self._pieces(Span(node, first, depth)):
            if missing[first:][part].any():
                np.copyto(at.where[Tier.DEVICE, :, edge], given[:, first:][:, part], where=absent[:, first:][:, part])
                self._recount(at)
                changed.append(at)
        columns = enumerate(self.page_pools)
        return {pool: InsertedPages(table[row], absent[row], duplicate[row], private[row]) for row, pool in columns}, changed

    def _adopt_states(
        self, node: Node, states: Mapping[int, Mapping[PoolName, int]], changed: list[Node]
    ) -> tuple[list[PlacedState], list[PlacedState]]:
        """Enter the states that the device lacks; return those adopted and those rejected, and add the changed nodes to `changed`."""
        adopted: list[PlacedState] = []
        rejected: list[PlacedState] = []
        whole = _whole_depth(node) if states else 0
        for depth in sorted(states):
            for pool, slot in states[depth].items():
                at, number = node.covering(depth), self._state_number(pool)
                held = at.state(Tier.DEVICE, number) if at.end == depth else ABSENT
                if depth > whole or held not in (ABSENT, slot):
                    rejected.append(PlacedState(depth, pool, slot))
                elif held == ABSENT:
                    adopted.append(PlacedState(depth, pool, slot))
                    at = at if at.end == depth else self._split(at, depth)
                    at.set_state(Tier.DEVICE, number, slot)
                    at.last_access = self._units.now
                    self._recount_states(at)
                    changed.append(at)
        return adopted, rejected

    def _describe(self, node: Node, checkpoint: CheckpointKind, origin: Origin) -> None:
        """Record why the state at the end of `node` was taken, and mark the path's states beyond `per_path` as surplus."""
        node.checkpoint, node.lineage, node.surplus = checkpoint, origin.lineage, False
        node.grown = max(0, node.end - origin.known)
        if self.checkpoints.per_path:
            on_path = [at for at in node.path() if at.is_complete and len(at.children) < 2]
            for at in on_path[self.checkpoints.per_path :]:
                at.surplus = True
                self._units.mark(at)

    def _refresh(self, node: Node) -> None:
        node.last_access = self._units.now
        self._units.mark(node)
        if self._refresh_path:
            for above in node.path():
                above.last_access = self._units.now
                self._units.mark(above)

    # -- parts of evict ------------------------------------------------------------------------------------------------

    def _sweep(self, sweep: Sweep, queue: UnitQueue, wanting: range, wanted: Sequence[int]) -> None:
        """Evict from `queue` until each pool in `wanting` has freed `wanted[pool]` objects; states of pools that are not short stay."""
        passed: list[Node] = []
        while short := [pool for pool in wanting if sweep.counts[pool] < wanted[pool]]:
            victim = queue.pop()
            if queue is self._device_states and victim and not any(victim.node.resident[Tier.DEVICE][pool] for pool in short):
                passed.append(victim.node)
            else:
                self._evict(sweep, victim)
        for node in passed:
            self._units.mark(node)

    def _evict_budget(self, tier: Tier, queue: UnitQueue, need: int, cost: Mapping[PoolName, int]) -> Eviction:
        if missing := set(self.pools) - set(cost):
            raise InputError(f"{', '.join(missing)}: the cost of an object is missing")
        each = [cost[pool] for pool in self.pools]
        there = _total(self._evictable[tier], each)
        if need > there:
            raise PoolFullError(
                f"{need} {tier} units are needed and {there} can be evicted; release admissions or make the {tier} tier larger"
            )
        sweep = Sweep(tier, self.pools, len(self.page_pools))
        while _total(sweep.counts, each) < need:
            self._evict(sweep, queue.pop())
        self._forget_far()
        return sweep.result()

    def _evict(self, sweep: Sweep, victim: Victim | None) -> None:
        assert victim is not None, "the counters say that there is more to evict, and the queue is empty"
        node = victim.node
        if victim.rank is not None:
            self.policy.evicted(victim.rank)
        unit = _reuse(node, self._units.now) if node.can_answer else None
        sweep.take(victim)
        if victim.kind is UnitKind.STATE:
            self._settle_states(node)
        elif not node.in_flight and node.own & ~(1 << ALIVE) == 1 << sweep.tier:
            before = node.restorable  # short cut for the usual case: the node is empty now, so there is nothing to recount
            self._account(node, -1)
            node.clear(sweep.tier)
            self._shade(node, before)
            self._announce(node)
        else:
            self._settle(node)
        if unit is not None and not node.can_answer:
            self._ghosts.note_unit(node.digest, unit, self._units.now)
        if victim.kind is UnitKind.LEAF and not node.own:
            self._ghosts.note_pages(node.digests)
        self._tidy(node)


def _reuse(node: Node, now: int) -> Reuse:
    age = now - node.last_access
    return Reuse(
        node.end, node.replay, node.branches, node.hits, node.checkpoint, node.lineage, node.grown, age, node.signature, evicted=False
    )


def _state_at(node: Node, number: int, depth: int) -> StateLocation:
    if node.end != depth or not node.pages:
        return StateLocation(ABSENT, ABSENT, False)
    return StateLocation(node.state(Tier.DEVICE, number), node.state(Tier.HOST, number), node.state(Tier.STORAGE, number) >= 0)


def _whole_depth(node: Node) -> int:
    """Return the depth, in pages, up to which every page pool has every page of the path in some tier."""
    whole = 0
    for at in reversed(list(node.path())):
        whole = at.start + at.whole
        if whole < at.end:
            break
    return whole


def _total(counts: Sequence[int], cost: Sequence[int]) -> int:
    return sum(count * each for count, each in zip(counts, cost, strict=True))
