"""Structure under the index: one radix tree per distinct `extra`, pins, and counters that follow every change.

Rules for changes: code that writes a location calls `_settle(node)` afterwards; code that may leave a node without purpose calls
`_tidy(node)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tiercache.core import ABSENT, Locations, PoolName, Tier
from tiercache.errors import AdmissionError, InputError
from tiercache.index.base import Match, Span
from tiercache.index.eviction import ONE_BUDGET_KINDS, UNIT_KINDS
from tiercache.index.ghosts import Ghosts
from tiercache.index.node import BITS, FAR, NEAR, TIERS, Node
from tiercache.index.prefixes import Prefixes
from tiercache.index.queue import UnitQueue
from tiercache.index.units import UnitTable
from tiercache.keys import KEY_BYTES
from tiercache.policy import Policy

TOKEN_BYTES: Final = 8


class Walk(NamedTuple):
    """Result of following a sequence through a tree.

    `path`: the nodes that the sequence enters, downwards without the root. `depth`: the pages that it shares with them; the last node may
    be shared in part.
    """

    path: list[Node]
    depth: int


class Piece(NamedTuple):
    """Part of a span that lies in one node: as pages of the node's edge, and as pages of the span."""

    node: Node
    edge: slice
    span: slice


class Pin:
    """Hold on the pages of the path to a node, and on the node's own state, in some tiers; the node keeps its end depth and its identity.

    States further up the path are not held: a restored request reads one state and all pages, and a long conversation's older states would
    fill the state pool.
    Thread safety: the index's thread only.
    """

    __slots__ = ("_forest", "node", "tiers")

    def __init__(self, forest: Forest, node: Node, tiers: frozenset[Tier]) -> None:
        self._forest: Forest | None = forest
        self.node = node
        self.tiers = tiers

    def release(self) -> None:
        """Release the hold. Raises AdmissionError the second time."""
        if self._forest is None:
            raise AdmissionError(f"the pin at depth {self.node.end} was released before; release a pin once")
        forest, self._forest = self._forest, None
        forest._unpin(self)


class Forest:
    """Radix trees of nodes, with counts of the evictable objects of each tier. Thread safety: the index's thread only."""

    def __init__(
        self,
        page_size: int,
        namespace: bytes,
        page_pools: Sequence[PoolName],
        state_pools: Sequence[PoolName],
        policy: Policy,
        far_limit: int,
        object_bytes: Mapping[PoolName, int],
        seed: int,
        one_budget: bool,
    ) -> None:
        if page_size < 1:
            raise InputError(f"page size {page_size} is not possible; use a positive number of tokens, such as 64")
        if len(namespace) != KEY_BYTES:
            raise InputError(f"a namespace has {KEY_BYTES} bytes, not {len(namespace)}; use keys.namespace_of")
        self.page_size = page_size
        self.namespace = namespace
        self.page_pools = tuple(page_pools)
        self.state_pools = tuple(state_pools)
        self.pools = self.page_pools + self.state_pools
        if not self.page_pools or len(set(self.pools)) < len(self.pools):
            raise InputError(f"pools {self.pools} are not possible; name at least one page pool, and each pool once")
        self._number: Mapping[PoolName, int] = {name: number for number, name in enumerate(self.pools)}
        self._page_range = range(len(self.page_pools))
        self._state_range = range(len(self.page_pools), len(self.pools))
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._pins: set[Pin] = set()
        self._generation = 0
        """Counter that increases at every change after which a match could come out differently."""
        self._evictable = [[0] * len(self.pools) for _ in Tier]
        """Present objects that no pin holds, by tier and pool."""
        self._far_pages = 0
        """Pages of nodes that have something in the storage tier and nothing on the device or the host; see `_forget_far`."""
        self._far_limit = far_limit
        self._prefixes = Prefixes(page_size)
        self._ghosts = Ghosts()
        kinds = ONE_BUDGET_KINDS if one_budget else UNIT_KINDS
        self._units = UnitTable(kinds, [object_bytes.get(pool, 1) for pool in self.pools], len(self.page_pools), page_size)
        rng = np.random.default_rng(seed)
        self._queues = tuple(UnitQueue(self._units, number, policy, rng) for number in range(len(kinds)))
        self._device_pages, self._device_states, self._host_units, self._stored_leaves = self._queues

    def nodes(self) -> Iterator[Node]:
        """Yield every node, parents before children, roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def roots(self) -> list[Node]:
        """Return the root of each tree."""
        return list(self._roots.values())

    def node_at(self, where: Node | Match, depth: int) -> Node:
        """Return the node on the path to `where` whose edge holds page `depth - 1`: it ends at `depth` or deeper. The root for depth 0."""
        node = self._node(where)
        if not 0 <= depth <= node.end:
            raise InputError(f"depth {depth} is not on the path to a node that ends at depth {node.end}")
        return node.covering(depth)

    def pin(self, where: Node | Match, *tiers: Tier) -> Pin:
        """Hold the path to `where` in `tiers` until the pin's `release`; without tiers hold only the node's identity.

        Pinning a match holds the whole edge that the prompt enters last; `pin(index.node_at(match, match.depth), ...)` holds less.
        """
        node = self._node(where)
        pin = Pin(self, node, frozenset(tiers))
        for tier in pin.tiers:
            self._count_pin(node, tier, +1)
        node.ends += 1
        self._pins.add(pin)
        return pin

    def holds_only(self, pins: Iterable[Pin]) -> bool:
        """Return whether the pins that are not released yet are exactly `pins`."""
        return self._pins == set(pins)

    def prune(self, node: Node) -> None:
        """Remove the path to `node` as far as it is empty, unpinned and leads nowhere; a no-op for a node that was removed already."""
        self._tidy(node)

    # -- finding -------------------------------------------------------------------------------------------------------

    def _node(self, where: Node | Match) -> Node:
        node = where.node if isinstance(where, Match) else where
        if node.is_removed:
            raise InputError(f"the node that ended at depth {node.end} is no longer in the index; pin what must stay, or match again")
        return node

    def _root(self, extra: bytes) -> Node:
        """Return the root for `extra`; a new one that is not linked yet where nothing has been inserted."""
        return self._roots.get(extra) or Node.root(len(self.page_pools), len(self.state_pools), extra)

    def _walk(self, root: Node, data: bytes) -> Walk:
        """Follow `data`, the tokens of whole pages, from `root` as far as the tree has them."""
        size = self._page_bytes
        path: list[Node] = []
        children, at = root.children, 0
        while at < len(data) and (child := children.get(data[at : at + size])) is not None:
            path.append(child)
            if not data.startswith(child.edge, at):
                return Walk(path, (at + _common_bytes(child.edge, data, at)) // size)
            at += len(child.edge)
            children = child.children
        return Walk(path, at // size)

    def _pieces(self, span: Span) -> Iterator[Piece]:
        """Yield the parts of `span` by node, upwards. Raises InputError if the span is not on the path to its node."""
        node = self._node(span.node)
        if not 0 <= span.start <= span.end <= node.end:
            raise InputError(f"pages [{span.start}, {span.end}) are not on the path to a node that ends at depth {node.end}")
        for at in node.path():
            low, high = max(span.start, at.start), min(span.end, at.end)
            if low < high:
                yield Piece(at, slice(low - at.start, high - at.start), slice(low - span.start, high - span.start))
            if at.start <= span.start:
                return

    def _gather(self, node: Node, depth: int) -> Locations:
        """Return `out[tier, page pool, page]`: the locations of pages [0, depth) of the path to `node`."""
        parts = [at.where for at in node.path()]
        if not parts:
            return np.empty((len(Tier), len(self.page_pools), 0), np.int64)
        return np.concatenate(parts[::-1], axis=2)[:, :, :depth]

    # -- growing and shrinking -----------------------------------------------------------------------------------------

    def _path_to(self, data: bytes, extra: bytes) -> Node:
        """Return the node that covers the last page of `data`; create what is missing of the path, without any objects."""
        root = self._root(extra)
        path, depth = self._walk(root, data)
        node = path[-1] if path else root
        if depth * self._page_bytes == len(data):
            return node
        if node.end > depth:
            node = self._split(node, depth)
        return self._grow(node, data[depth * self._page_bytes :])

    def _grow(self, parent: Node, edge: bytes) -> Node:
        self._generation += 1
        if parent.parent is None:
            self._roots[parent.extra] = parent
        shape = (len(Tier), len(self.page_pools), len(edge) // self._page_bytes)
        digests = self._prefixes.of(np.frombuffer(edge, "<u8"), parent.digest)
        node = Node(parent, edge, digests, np.full(shape, ABSENT), len(self.state_pools), parent.extra)
        node.last_access = self._units.now
        parent.children[edge[: self._page_bytes]] = node
        if len(parent.children) <= 2:  # see `Node.branches`
            self._offer(parent)
        return node

    def _split(self, node: Node, depth: int) -> Node:
        """Cut `node` at `depth` and return the new upper part.

        State, identity and the ends of pins stay with the lower part; pins hold both parts.
        """
        parent = node.parent
        assert parent is not None, "a root has no edge to cut"
        assert node.start < depth < node.end, "a cut is inside an edge"
        pages = depth - node.start
        cut = pages * self._page_bytes
        self._account(node, -1)
        upper = Node(parent, node.edge[:cut], node.digests[:pages], node.where[:, :, :pages].copy(), node.state_pools, node.extra)
        upper.pins = list(node.pins)
        upper.last_access, upper.hits, upper.above = node.last_access, node.hits, node.above
        upper.children = {node.edge[cut : cut + self._page_bytes]: node}
        parent.children[node.edge[: self._page_bytes]] = upper
        node.parent, node.edge, node.where, node.pages = upper, node.edge[cut:], node.where[:, :, pages:].copy(), node.pages - pages
        node.digests = node.digests[pages:]
        if node.keys is not None:
            upper.keys, node.keys = node.keys[:pages], node.keys[pages:]
        # The parent knows already what both halves hold together; the lower half announces itself to the upper one anew.
        upper.shown, node.shown = node.shown, 0
        for part in (upper, node):
            part.recount()
            self._account(part, +1)
        self._announce(node)
        self._announce(upper)
        return upper

    def _merge(self, node: Node) -> Node:
        """Put a needless node's edge in front of its only child's, and return the child, which keeps its end and its identity."""
        (child,) = node.children.values()
        parent = node.parent
        assert parent is not None, "a root is never needless"
        assert node.pins == child.pins, "all pins on a node without an end of its own come from its only child"
        self._account(node, -1)
        self._account(child, -1)
        parent.children[node.edge[: self._page_bytes]] = child
        child.parent, child.edge = parent, node.edge + child.edge
        child.digests = np.concatenate([node.digests, child.digests])
        child.where = np.concatenate([node.where, child.where], axis=2)
        child.pages += node.pages
        child.keys = None if node.keys is None or child.keys is None else node.keys + child.keys
        child.last_access, child.hits = max(node.last_access, child.last_access), max(node.hits, child.hits)
        child.shown = node.shown
        self._discard(node)
        child.recount()
        self._account(child, +1)
        self._announce(child)
        return child

    def _tidy(self, node: Node) -> None:
        """Remove or merge nodes that have lost their purpose, from `node` upwards."""
        while (parent := node.parent) is not None:
            if node.is_spare:
                del parent.children[node.edge[: self._page_bytes]]
                self._discard(node)
                if len(parent.children) < 2:
                    self._offer(parent)
                node = parent
            elif node.is_needless:
                self._merge(node)
                return
            else:
                return
        if not node.children and not node.ends and self._roots.get(node.extra) is node:
            del self._roots[node.extra]

    def _discard(self, node: Node) -> None:
        self._generation += 1
        self._units.drop(node)
        node.detach()

    # -- counting ------------------------------------------------------------------------------------------------------

    def _settle(self, node: Node) -> None:
        """Update everything that depends on the node's locations, which were just written."""
        self._recount(node)
        self._announce(node)

    def _settle_states(self, node: Node) -> None:
        """Update what `_settle` does, where no page's location changed."""
        self._recount_states(node)
        self._announce(node)

    def _recount(self, node: Node) -> None:
        """Do the first half of `_settle`, for a node that is announced later."""
        self._count_anew(node, node.recount)

    def _recount_states(self, node: Node) -> None:
        """Do the first half of `_settle_states`, for a node that is announced later."""
        self._count_anew(node, node.recount_states)

    def _count_anew(self, node: Node, recount: Callable[[], None]) -> None:
        before, could = node.restorable, node.can_answer
        self._account(node, -1)
        recount()
        self._account(node, +1)
        self._shade(node, before)
        if node.can_answer and not could:
            self._ghosts.restored(node.digest)

    def _shade(self, node: Node, before: int) -> None:
        """Tell the nodes below that a complete state came to the node's end or left it, on each path as far as the next complete state."""
        now = node.restorable
        if now == before:
            return
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            below.above = now
            self._units.mark(below)
            if not below.is_complete:
                stack += below.children.values()

    def _account(self, node: Node, sign: int) -> None:
        """Add what the node contributes to the totals (`sign` +1), or subtract it (-1)."""
        self._generation += 1
        for tier in TIERS:
            if node.own >> tier & 1:
                if not node.pins[tier]:
                    self._add_evictable(node, tier, sign, self._page_range)
                if not node.state_pins[tier]:
                    self._add_evictable(node, tier, sign, self._state_range)
        if node.own & (NEAR | FAR) == FAR:
            self._far_pages += sign * node.pages

    def _add_evictable(self, node: Node, tier: Tier, sign: int, pools: range) -> None:
        total, counts = self._evictable[tier], node.resident[tier]
        for pool in pools:
            total[pool] += sign * counts[pool]

    def _announce(self, node: Node) -> None:
        """Tell the ancestors what the subtree holds now, and mark every node that this makes evictable or worth less."""
        self._offer(node)
        while (parent := node.parent) is not None:
            held = node.own
            for bit in BITS:
                held |= bool(node.below[bit]) << bit
            changed = held ^ node.shown
            if not changed:
                return
            crossed = False
            for bit in BITS:
                if changed >> bit & 1:
                    came = held >> bit & 1
                    parent.below[bit] += 1 if came else -1
                    crossed |= parent.below[bit] == came
            node.shown = held
            node = parent
            if not crossed:  # the parent's units depend on whether any child announced a bit, not on how many did
                return
            self._offer(node)

    def _offer(self, node: Node) -> None:
        self._units.mark(node)

    def _forget_far(self) -> None:
        """Forget pages that are known only to be stored, the leaf that is worth least first, until they are within their limit."""
        while self._far_pages > self._far_limit and (victim := self._stored_leaves.pop()) is not None:
            node = victim.node
            node.where[Tier.STORAGE] = ABSENT
            node.states = None
            self._settle(node)
            self._tidy(node)

    # -- pins ----------------------------------------------------------------------------------------------------------

    def _count_pin(self, node: Node, tier: Tier, by: int) -> None:
        for at in node.path():
            before = at.pins[tier]
            at.pins[tier] = after = before + by
            if not before:
                self._add_evictable(at, tier, -1, self._page_range)
            elif not after:
                self._add_evictable(at, tier, +1, self._page_range)
                self._offer(at)
        before = node.state_pins[tier]
        node.state_pins[tier] = before + by
        if not before or before + by == 0:
            self._add_evictable(node, tier, -by, self._state_range)

    def _unpin(self, pin: Pin) -> None:
        self._pins.remove(pin)
        for tier in pin.tiers:
            self._count_pin(pin.node, tier, -1)
        pin.node.ends -= 1
        self._offer(pin.node)
        self._tidy(pin.node)
        self._forget_far()


def _common_bytes(edge: bytes, data: bytes, at: int) -> int:
    """Return how many bytes of `edge` are in `data` from `at` on, in whole tokens. Only the last edge of a walk is compared this way."""
    tokens = min(len(edge), len(data) - at) // TOKEN_BYTES
    same = np.frombuffer(edge, np.uint64, tokens) == np.frombuffer(data, np.uint64, tokens, at)
    return TOKEN_BYTES * (tokens if same.all() else int(same.argmin()))
