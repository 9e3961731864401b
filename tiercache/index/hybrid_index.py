"""Hybrid prefix index: match, insert, locations, eviction.

The index is a radix tree over token ids. Its edges are whole pages. With page pools alone, every depth up to
which all pages are present is restorable. With state pools, such a depth is restorable only if every state
pool has a state exactly there. With state pools alone, the pages have no objects, and a depth is restorable
wherever the states are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from tiercache.core import (
    ABSENT,
    Locations,
    Mask,
    PoolName,
    Tier,
    TokenArray,
    as_tokens,
    full_pages,
    reusable_pages,
)
from tiercache.errors import ConfigError, InputError
from tiercache.index.appraisal import Appraiser
from tiercache.index.base import (
    Eviction,
    Inserted,
    Match,
    Origin,
    PageLocations,
    PathLocations,
    Span,
    StateLocation,
)
from tiercache.index.checkpoints import CheckpointPlan, CheckpointRules, checkpoint_depths
from tiercache.index.eviction import UNIT_KINDS, Evictor, reuse_of
from tiercache.index.eviction_order import EvictionColumns, EvictionQueue, UnitRows
from tiercache.index.ghosts import Ghosts
from tiercache.index.node import ALIVE, IN_STORAGE, Node, Prefixes
from tiercache.index.radix_tree import Pin, RadixTree
from tiercache.index.residency import Residency, adopt_pages, adopt_states, check_pages, check_states
from tiercache.policy import LEARN_EVERY, CheckpointKind, Ending, Lru, Policy, Reuse, UnitKind

MAX_STORED_PAGES: Final = 1 << 20
"""Maximum number of pages in the index that only the store has.

In the index, a page takes 8 bytes per token and 24 bytes per page pool. With 64 tokens a page, the limit is
about half a GiB of the process's memory.
"""
MAX_AHEAD: Final = 1 << 40
"""Maximum number of ticks ahead at which a hit can be expected."""


class HybridIndex:
    """Index of the pages and states that exist for token sequences, and of the tiers in which they are.

    - `page_pools` have one object per page, `state_pools` one object at the end of a node. Either may be
      empty.
    - `policy` ranks the units that may be evicted (default: LRU).
    - `max_stored_pages` is the maximum number of pages in the index that only the store has.
    - `checkpoints` says where requests should leave states (default: `CheckpointRules`).
    - `object_bytes` are the payload bytes of one object of each pool, which policies weigh.
    - `seed` is for the random sample of units that a policy ranks.

    Raises ConfigError for a policy that cannot rank these pools. Thread safety: one owner thread; other
    threads post events to it.
    """

    def __init__(
        self,
        *,
        page_size: int,
        namespace: bytes,
        page_pools: Sequence[PoolName],
        state_pools: Sequence[PoolName] = (),
        policy: Policy | None = None,
        max_stored_pages: int = MAX_STORED_PAGES,
        checkpoints: CheckpointRules | None = None,
        object_bytes: Mapping[PoolName, int] | None = None,
        seed: int = 0,
    ) -> None:
        policy = policy or Lru()
        if policy.needs_states and not state_pools:
            raise ConfigError(
                f"policy {policy.name!r} ranks recurrent states, and no state pool is registered; use lru or"
                " hvd"
            )
        self.namespace = namespace
        self.page_size = page_size
        self.page_pools = tuple(page_pools)
        self.state_pools = tuple(state_pools)
        self.pools = self.page_pools + self.state_pools
        self.checkpoints = checkpoints or CheckpointRules()
        self.policy = policy
        self._requests = 0
        nbytes = [(object_bytes or {}).get(pool, 1) for pool in self.pools]
        self._columns = EvictionColumns(UNIT_KINDS, nbytes, len(page_pools), page_size)
        self._ghosts = Ghosts()
        self._tree = RadixTree(
            page_size, namespace, self.page_pools, self.state_pools, self._columns, self._ghosts
        )
        self.evictable_on_device: Sequence[int] = self._tree.counters.evictable[Tier.DEVICE]
        """Numbers of `evictable` on the device in the order of `pools`; they follow all changes."""
        rng = np.random.default_rng(seed)
        self._queues = [
            EvictionQueue(self._columns, number, policy, rng) for number in range(len(UNIT_KINDS))
        ]
        self.residency = Residency(self._tree, self._queues[-1], max_stored_pages)
        """Locations by span and pool, which transfers reserve, publish, cancel and drop.

        A state is named as a span of one page, the last page of its node.
        """
        page_bytes, state_bytes = sum(nbytes[: len(page_pools)]), sum(nbytes[len(page_pools) :])
        self.appraiser = Appraiser(self._columns, policy, page_bytes, state_bytes)
        """Values of the objects of nodes, by which stores rank."""
        self._evictor = Evictor(self._tree, self._columns, self._ghosts, self._queues)
        self._located: tuple[tuple[Node, int, int, int], PathLocations] | None = None
        """Last answer of `locations`, and what it depends on."""
        self._beyond: tuple[Match, TokenArray, list[int]] | None = None
        """Digests of the pages of the last prompt that its match does not know."""

    # -- reading

    def match(self, tokens: TokenArray, extra: bytes = b"", *, limit: int | None = None) -> Match:
        """Return how many pages of `tokens` the index knows and which depths it can restore; change nothing.

        `limit`, in pages, bounds the restorable depths. By default, at least one token is left to compute.
        """
        tokens = as_tokens(tokens)
        pages = full_pages(len(tokens), self.page_size)
        limit = reusable_pages(len(tokens), self.page_size) if limit is None else min(limit, pages)
        root = self._tree.root(extra)
        path, path_depth = self._tree.walk(root, tokens[: pages * self.page_size].tobytes())
        limit = max(0, min(limit, path_depth))
        complete = local = state_depth = near_state_depth = held = 0
        restorable: list[int] = []
        # `complete` is the number of leading pages that every page pool has in some tier, and `local` the
        # number on the device or the host. A node adds its pages only if there is no gap before its start:
        #   node             a [0, 4)   b [4, 7)   c [7, 9)
        #   complete_pages      4          2          2
        #   complete            4          6          6       c adds nothing: page 6 is missing
        for node in path:
            end, mask = node.end, node.resident_mask
            start = end - node.pages
            held |= mask
            if local == start:
                local += node.local_pages
            if complete == start:
                complete += node.complete_pages
            if mask >> ALIVE and complete == end <= limit:
                restorable.append(state_depth := end)
                if node.state_local and local == end:
                    near_state_depth = end
        node = path[-1] if path else root
        generation, on_host = self._tree.counters.generation, bool(held >> Tier.HOST & 1)
        if not self.state_pools:
            state_depth, near_state_depth = min(complete, limit), min(local, limit)
            restorable = [state_depth] if state_depth else []
        return Match(node, path_depth, state_depth, near_state_depth, tuple(restorable), generation, on_host)

    @property
    def now(self) -> int:
        """Present tick of the logical clock (see `Units`)."""
        return self._columns.now

    def is_current(self, match: Match) -> bool:
        """Return whether the call that made the match would return the same now."""
        return match.generation == self._tree.counters.generation

    def nodes(self) -> Iterator[Node]:
        """Yield every node, parents before children, roots included."""
        return self._tree.nodes()

    def roots(self) -> list[Node]:
        """Return the root of each tree."""
        return self._tree.roots()

    def node_at(self, where: Node | Match, depth: int) -> Node:
        """Return the node on the path to `where` whose edge holds page `depth - 1`; the root for depth 0.

        The node ends at `depth` or deeper. Raises InputError for a depth that is not on the path.
        """
        return self._tree.node_at(where, depth)

    def locations(self, where: Node | Match, depth: int) -> PathLocations:
        """Return the locations of pages [0, depth) and of the states exactly at `depth`.

        Pending locations are returned as pending, so that callers can share loads that are under way. The
        arrays are read-only. A request that asks again before anything has changed gets the same ones.
        """
        node, counters = self.node_at(where, depth), self._tree.counters
        asked = (node, depth, counters.generation, counters.reservations)
        if self._located is None or self._located[0] != asked:
            at = self._tree.gather(node, depth)
            at.flags.writeable = False
            pages = {
                pool: PageLocations(at[Tier.DEVICE, row], at[Tier.HOST, row], at[Tier.STORAGE, row] >= 0)
                for row, pool in enumerate(self.page_pools)
            }
            states = {pool: _state_at(node, number, depth) for number, pool in enumerate(self.state_pools)}
            self._located = asked, PathLocations(pages, states)
        return self._located[1]

    def page_locations(self, where: Node | Match, depth: int) -> Locations:
        """Return `out[tier, page pool, page]`: locations of pages [0, depth), with `STORED` in storage."""
        return self._tree.gather(self.node_at(where, depth), depth)

    def follow_changes(self) -> dict[Node, None]:
        """Return the nodes whose locations change from now on; the caller takes out those it has looked at.

        Nodes that were removed are among them. A node that was merged into another is not, but the other is.
        """
        self._tree.counters.changed = {}
        return self._tree.counters.changed

    def page_keys(self, where: Node | Match, depth: int, start: int = 0) -> list[bytes]:
        """Return the keys of pages [start, depth) of the path to `where`.

        The keys of an edge are computed on first use and then kept.
        """
        return self._tree.page_keys(self.node_at(where, depth), depth, start)

    def evictable(self, tier: Tier) -> Mapping[PoolName, int]:
        """Return the number of objects in `tier` that no pin holds, by pool. Eviction can free them all."""
        return dict(zip(self.pools, self._tree.counters.evictable[tier], strict=True))

    # -- changing

    def plan_checkpoints(self, match: Match, tokens: TokenArray, depth: int) -> CheckpointPlan:
        """Return where a prompt that is restored to `depth` should leave states, and why.

        Without state pools, there are no depths. Changes nothing.
        """
        if not self.state_pools:
            return CheckpointPlan({}, end=False)
        tokens, ghost = as_tokens(tokens), match.path_depth
        if len(self._ghosts):
            ghost += self._ghosts.repeated(self._digests_beyond(match, tokens))
        depths = checkpoint_depths(
            depth, match.path_depth, len(tokens), self.page_size, ghost_depth=ghost, rules=self.checkpoints
        )
        return CheckpointPlan(depths, self.checkpoints.request_end)

    def touch(self, match: Match, tokens: TokenArray | None = None, *, again: bool = False) -> Origin:
        """Record that a request used the match, and return the `origin` for its `insert`.

        The node at the match's restorable depth counts as used now. If `tokens` (the prompt) are given and an
        evicted unit would have restored more of them, the policy learns of that unit, too.

        `again`: the request waits, and was counted before. The node only counts as used now.
        """
        if again:
            if match.depth:
                self._columns.now += 1
                self._refresh(self.node_at(match, match.depth))
            return Origin()
        # The request is counted first, then the hit, then the miss. The miss is deeper than the hit. The
        # request continues the deeper of the two units.
        self._begin_request()
        found: list[Reuse] = []
        expected = False
        if match.depth:
            node = self.node_at(match, match.depth)
            found.append(reuse_of(node, self._columns.now))
            node.hits += 1
            expected, node.expected = node.expected > 0, 0
            self._columns.now += 1
            self._refresh(node)
        if (
            tokens is not None
            and self._ghosts.has_units
            and (missed := self._missed(match, as_tokens(tokens))) is not None
        ):
            found.append(missed)
        for reuse in found:
            self.policy.reused(reuse)
        if not found:
            return Origin()
        last = found[-1]
        continues = last.checkpoint in (CheckpointKind.END, CheckpointKind.PROMPT)
        return Origin(last.lineage + 1 if continues else 0, last.depth, expected)

    def expect(self, match: Match, ticks: int) -> None:
        """Note that a hit on the match is expected in `ticks` ticks, which raises the unit's rank until then.

        A later call replaces an earlier one, and a hit ends the expectation. The caller guarantees that the
        match has a restorable depth.
        """
        node = self.node_at(match, match.depth)
        node.expected = self._columns.now + min(ticks, MAX_AHEAD)
        self._columns.mark(node)

    def _begin_request(self) -> None:
        self._requests += 1
        self._ghosts.begin()
        if self._requests % LEARN_EVERY == 0:
            self._columns.sync()
            live = UnitRows(self._columns, self._columns.complete())
            self.policy.learn(live, self._ghosts.view(self._columns.now, self.page_size))

    def _missed(self, match: Match, tokens: TokenArray) -> Reuse | None:
        """Return and forget the deepest lost unit that would have restored more of this prompt, or None."""
        limit = reusable_pages(len(tokens), self.page_size)
        # Only depths that the match did not restore and that a restore of this prompt may reach are searched:
        #   depth      match.depth + 1 ... path_depth     path_depth + 1 ... limit
        #   digests    from the tree                      from the prompt
        digests = self._digests_beyond(match, tokens)[: max(0, limit - match.path_depth)]
        at, last, found = match.node, min(limit, match.path_depth), self._ghosts.deepest(digests)
        while found is None and at.end > match.depth and (above := at.parent) is not None:
            digests = at.digests[max(0, match.depth - above.end) : max(0, last - above.end)].tolist()
            at, found = above, self._ghosts.deepest(digests)
        return None if found is None else self._ghosts.reuse(found, self._columns.now)

    def _digests_beyond(self, match: Match, tokens: TokenArray) -> list[int]:
        """Return the digests of the pages of a prompt behind those in the tree."""
        if self._beyond is None or self._beyond[0] is not match or self._beyond[1] is not tokens:
            rest = tokens[match.path_depth * self.page_size :]
            digests = self._tree.prefixes.expect(rest, self._digest_at(match))
            self._beyond = match, tokens, digests.tolist()
        return self._beyond[2]

    def _digest_at(self, match: Match) -> int:
        """Return the digest of the part of the prompt that is in the tree."""
        node, depth = match.node.covering(match.path_depth), match.path_depth
        return int(node.digests[depth - node.start - 1]) if depth else Prefixes.start(node.extra)

    # -- pins

    def pin(self, where: Node | Match, *tiers: Tier) -> Pin:
        """Hold the path to `where` in `tiers` until the pin's `release`.

        Without tiers, the pin keeps the node in the tree, but its objects may be evicted. A pin on a match
        holds the whole path to `match.node`, which may go deeper than the prompt. For a restore, a pin on
        `index.node_at(match, match.depth)` is enough.
        """
        return self._tree.pin(where, tiers, self._unpin)

    def _unpin(self, pin: Pin) -> None:
        self._tree.unpin(pin)
        self.residency.forget_excess()

    @contextmanager
    def pinned(self, where: Node | Match, *tiers: Tier) -> Iterator[Pin]:
        """Hold a pin for the duration of a with-block."""
        pin = self.pin(where, *tiers)
        try:
            yield pin
        finally:
            pin.release()

    # -- inserting

    def insert(
        self,
        tokens: TokenArray,
        pages: Mapping[PoolName, Locations],
        states: Mapping[int, Mapping[PoolName, int]] | None = None,
        extra: bytes = b"",
        *,
        checkpoints: Mapping[int, CheckpointKind] | None = None,
        origin: Origin = Origin(),  # noqa: B008 (immutable)
        after: Node | None = None,
    ) -> Inserted:
        """Insert the device slots of pages [0, d) and of states.

        `pages` has one array of shape (d,) per page pool, and `states` the slots by depth and pool.
        `checkpoints` says why each state was taken (default: END). `origin` is the result of `touch` for this
        request. `after` is a pinned node on the path of `tokens`: the caller guarantees that the slots up to
        its end are the index's own, and only the pages after it are looked at. `InsertedPages` and `Inserted`
        say what becomes of each slot.

        Refreshes the node with page d - 1, and the nodes that get a state which they did not have. Without
        page pools, the pages behind the deepest state have no objects: pin their node. Raises
        InputError, and changes nothing, for arrays that do not fit.
        """
        tokens, states = as_tokens(tokens), states or {}
        tree = self._tree
        depth = check_pages(tree, len(tokens), pages)
        check_states(tree, states, depth)
        self._columns.now += 1
        # The root of an empty tree, which a request may have pinned, gives way to that of the next insert.
        after = tree.node(after) if after is not None and after.end else tree.root(extra)
        assert after.end <= depth, "a commit of fewer pages than are known to be held"
        node = tree.path_to(after, tokens[after.end * self.page_size : depth * self.page_size].tobytes())
        answer, changed = adopt_pages(tree, node, after.end, depth, pages)
        adopted, rejected = adopt_states(tree, node, states, self._columns.now, changed)
        for state in adopted:
            self._describe(
                node.covering(state.depth), (checkpoints or {}).get(state.depth, CheckpointKind.END), origin
            )
        # Changes are announced only now that the states are entered: a page without its state would be queued
        # as dead weight (see `eviction_order`). Parents are announced before children.
        for at in sorted(dict.fromkeys(changed), key=lambda at: at.end):
            tree.counters.announce(at)
        node = node.covering(depth)
        if not tree.page_pools and node.is_removable:
            # Pages behind the deepest state. The release of the last pin removes them.
            self._ghosts.note_pages(node.digests)
        self._refresh(node)
        return Inserted(node, after.end, depth, answer, tuple(adopted), tuple(rejected))

    def ended(self, node: Node, ending: Ending) -> None:
        """Note how a request ended whose last commit was up to the end of `node`.

        It counts for the deepest state on the path to `node`, from which the session goes on.
        """
        for at in node.path():
            if at.is_complete:
                at.ending = ending
                self._columns.mark(at)
                return

    def extend_path(self, tokens: TokenArray, depth: int, extra: bytes = b"") -> Node:
        """Return the node that ends exactly at `depth` of `tokens`, created without objects if it is new.

        This is for fetches from storage: the caller pins the node, and reserves the locations of the fetched
        objects on the node's path. If the node stays empty, the release of its pin removes it.
        Raises InputError for a depth that is not within the whole pages of `tokens`.
        """
        tokens = as_tokens(tokens)
        if not 1 <= depth <= full_pages(len(tokens), self.page_size):
            raise InputError(
                f"depth {depth} is not within the whole pages of {len(tokens)} tokens (page size"
                f" {self.page_size})"
            )
        self._columns.now += 1
        node = self._tree.path_to(self._tree.root(extra), tokens[: depth * self.page_size].tobytes())
        return self._tree.split(node, depth) if node.end > depth else node

    def _describe(self, node: Node, checkpoint: CheckpointKind, origin: Origin) -> None:
        """Record why the state at the end of `node` was taken, and in which session."""
        node.checkpoint, node.lineage = checkpoint, origin.lineage
        node.new_pages = max(0, node.end - origin.known)
        node.ending = Ending.UNKNOWN

    def _refresh(self, node: Node) -> None:
        node.last_access = self._columns.now
        self._columns.mark(node)

    # -- transfers: a state is handled as a span of one page, the last page of its node

    def forget_stored(self, span: Span, pool: PoolName, mask: Mask) -> int:
        """Record that the objects under `mask` are not in the store; return how many were thought to be.

        The units and pages that are lost with them are remembered as ghosts.
        """
        now = self._columns.now
        nodes = [part.node for part in self._tree.edge_slices(span)]
        units = [(node, node.digest, reuse_of(node, now)) for node in nodes if node.can_answer]
        pages = [node.digests for node in nodes if node.resident_mask & ~(1 << ALIVE) == IN_STORAGE]
        is_end = not any(node.children for node in nodes)
        forgotten = self.residency.forget_stored(span, pool, mask)
        for node, digest, unit in units:
            if not node.can_answer:
                self._ghosts.note_unit(digest, unit, now)
        is_lost = pool in self.page_pools if self.page_pools else is_end and not nodes[0].resident_mask
        if is_lost and mask.all():
            for digests in pages:
                self._ghosts.note_pages(digests)
        return forgotten

    # -- evicting

    def evict_device(self, need: Mapping[PoolName, int]) -> Eviction:
        """Free at least `need[pool]` slots of each pool. If only states are needed, no page is evicted.

        Without state pools, no more pages are freed than are needed.

        Raises PoolFullError, and changes nothing, if the unpinned objects do not suffice. Raises InputError
        for an unknown pool.
        """
        return self._evicted(self._evictor.device(need))

    def evict_host(self, blocks: int, cost: Mapping[PoolName, int]) -> Eviction:
        """Free objects of at least `blocks` arena blocks in total.

        One object of a pool takes `cost[pool]` blocks. Raises PoolFullError, and changes nothing, if the
        unpinned objects do not suffice.
        """
        return self._evicted(self._evictor.host(blocks, cost))

    def _evicted(self, eviction: Eviction) -> Eviction:
        self.residency.forget_excess()
        return eviction

    def coldest_on_host(self) -> Iterator[tuple[Node, UnitKind]]:
        """Yield the units that the host would evict, the first to go first; nothing is evicted.

        A node above a leaf becomes a leaf only when that is evicted, so it comes in a later call. Change no
        node while the iterator is in use.
        """
        return self._evictor.coldest_on_host()


def _state_at(node: Node, number: int, depth: int) -> StateLocation:
    if node.end != depth or not node.pages:
        return StateLocation(ABSENT, ABSENT, False)
    return StateLocation(
        node.state(Tier.DEVICE, number), node.state(Tier.HOST, number), node.state(Tier.STORAGE, number) >= 0
    )
