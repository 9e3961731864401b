"""Radix trees under the index, one per distinct `extra`: nodes, walks, splits, merges and pins.

Code that writes a location must tell `counters`. Code that may leave a node empty must call `tidy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tiercache import keys
from tiercache.core import ABSENT, Locations, PoolName, Tier
from tiercache.errors import AdmissionError, InputError
from tiercache.index.base import Match, Span
from tiercache.index.counters import Counters
from tiercache.index.eviction_order import EvictionColumns
from tiercache.index.ghosts import Ghosts
from tiercache.index.node import LOCAL, TOKEN_BYTES, Node, Prefixes


class Walk(NamedTuple):
    """Result of following a sequence through a tree.

    The sequence may share only a part of the last node's edge.
    """

    path: list[Node]
    """Nodes that the sequence enters, downwards, without the node at which the walk began."""
    depth: int
    """Number of pages that the sequence shares with these nodes."""


class EdgeSlice(NamedTuple):
    """Part of a span that lies in one node, as a slice of the node's edge and as a slice of the span."""

    node: Node
    edge: slice
    span: slice


class Pin:
    """Hold on the pages of the path to a node, and on the node's own state, in some tiers.

    The pinned node is not removed or merged into another, and keeps its end depth. A pin does not hold the
    states of ancestors: a restored request reads only one state, and the older states of a long conversation
    would fill the state pool.
    """

    __slots__ = ("_release", "node", "tiers")

    def __init__(self, node: Node, tiers: frozenset[Tier], release: Callable[[Pin], None]) -> None:
        self.node = node
        self.tiers = tiers
        self._release: Callable[[Pin], None] | None = release

    def release(self) -> None:
        """Release the hold. Raises AdmissionError the second time."""
        if self._release is None:
            raise AdmissionError(f"the pin at depth {self.node.end} was released before; release a pin once")
        release, self._release = self._release, None
        release(self)


class RadixTree:
    """Radix trees of nodes, with counts of the evictable objects of each tier.

    If a node changes, the tree marks the node in `columns`. If a node becomes able to answer a hit, `ghosts`
    forgets the lost unit of this node.
    """

    def __init__(
        self,
        page_size: int,
        namespace: bytes,
        page_pools: Sequence[PoolName],
        state_pools: Sequence[PoolName],
        columns: EvictionColumns,
        ghosts: Ghosts,
    ) -> None:
        if page_size < 1:
            raise InputError(
                f"page size {page_size} is not possible; use a positive number of tokens, such as 64"
            )
        if len(namespace) != keys.KEY_BYTES:
            raise InputError(
                f"a namespace has {keys.KEY_BYTES} bytes, not {len(namespace)}; use keys.namespace_of"
            )
        self.page_size = page_size
        self.page_pools = tuple(page_pools)
        self.state_pools = tuple(state_pools)
        self.pools = self.page_pools + self.state_pools
        if not self.pools or len(set(self.pools)) < len(self.pools):
            raise InputError(
                f"pools {self.pools} are not possible; name at least one pool, and each pool once"
            )
        self.number: Mapping[PoolName, int] = {name: number for number, name in enumerate(self.pools)}
        """Number of each pool: page pools first, then state pools."""
        self.prefixes = Prefixes(page_size)
        self.counters = Counters(len(self.page_pools), len(self.state_pools), columns.mark, ghosts.restored)
        self._columns = columns
        self._namespace = namespace
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._pins: set[Pin] = set()

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
        """Return the node on the path to `where` whose edge holds page `depth - 1`; the root for depth 0.

        The node ends at `depth` or deeper. Raises InputError for a depth that is not on the path.
        """
        node = self.node(where)
        if not 0 <= depth <= node.end:
            raise InputError(f"depth {depth} is not on the path to a node that ends at depth {node.end}")
        return node.covering(depth)

    def pin(self, where: Node | Match, tiers: Iterable[Tier], release: Callable[[Pin], None]) -> Pin:
        """Hold the path to `where` in `tiers`. `Pin.release` calls `release`, which must call `unpin`."""
        pin = Pin(self.node(where), frozenset(tiers), release)
        for tier in pin.tiers:
            self.counters.pin(pin.node, tier)
        pin.node.ends += 1
        self._pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """End the hold of a pin."""
        self._pins.remove(pin)
        for tier in pin.tiers:
            self.counters.unpin(pin.node, tier)
        node = pin.node
        node.ends -= 1
        # The node may have become a unit again: its state, or all of it if only storage has its objects.
        if (pin.tiers and node.states is not None) or not (node.ends or node.resident_mask & LOCAL):
            self._columns.mark(node)
        self.tidy(node)

    def check_state_pool(self, pool: PoolName) -> None:
        """Raise InputError if `pool` is not a state pool of this index."""
        if pool not in self.state_pools:
            raise InputError(
                f"{pool} is not a state pool of this index; it has {', '.join(self.state_pools) or 'none'}"
            )

    # -- finding

    def node(self, where: Node | Match) -> Node:
        """Return the node that `where` names. Raises InputError if it was removed."""
        node = where.node if isinstance(where, Match) else where
        if node.is_removed:
            raise InputError(
                f"the node that ended at depth {node.end} is no longer in the index; pin what must stay, or"
                " match again"
            )
        return node

    def root(self, extra: bytes) -> Node:
        """Return the root for `extra`, or else a new root that is not in the table of roots yet."""
        return self._roots.get(extra) or Node.root(len(self.page_pools), len(self.state_pools), extra)

    def walk(self, start: Node, data: bytes) -> Walk:
        """Follow `data`, the tokens of whole pages, from the end of `start` as far as the tree has them."""
        size = self._page_bytes
        path: list[Node] = []
        children, at = start.children, 0
        while at < len(data) and (child := children.get(data[at : at + size])) is not None:
            path.append(child)
            if not data.startswith(child.edge, at):
                return Walk(path, (at + _common_bytes(child.edge, data, at)) // size)
            at += len(child.edge)
            children = child.children
        return Walk(path, at // size)

    def edge_slices(self, span: Span) -> Iterator[EdgeSlice]:
        """Yield the parts of `span` by node, upwards.

        Raises InputError if the span is not on the path to its node.
        """
        # For a span [3, 8) on a path of the nodes a [0, 5) and b [5, 9):
        #   node b    edge [0, 3)    span [2, 5)
        #   node a    edge [3, 5)    span [0, 2)
        node = self.node(span.node)
        if not 0 <= span.start <= span.end <= node.end:
            raise InputError(
                f"pages [{span.start}, {span.end}) are not on the path to a node that ends at depth"
                f" {node.end}"
            )
        start, end = span.start, span.end
        for at in node.path():
            first = at.end - at.pages
            low, high = max(start, first), min(end, at.end)
            if low < high:
                yield EdgeSlice(at, slice(low - first, high - first), slice(low - start, high - start))
            if first <= start:
                return

    def gather(self, node: Node, depth: int, start: int = 0) -> Locations:
        """Return `out[tier, page pool, page]`: locations of pages [start, depth) of the path to `node`."""
        parts: list[Locations] = []
        at = node
        while (parent := at.parent) is not None and at.end > start:
            parts.append(at.where)
            at = parent
        if not parts:
            return np.empty((len(Tier), len(self.page_pools), 0), np.int64)
        return np.concatenate(parts[::-1], axis=2)[:, :, start - at.end : depth - at.end]

    def page_keys(self, node: Node, depth: int, start: int) -> list[bytes]:
        """Return the keys of pages [start, depth) of the path to `node`; each edge keeps its keys."""
        found: list[bytes] = []
        for at in node.path():
            if at.end <= start:
                break
            found[:0] = at.keys if at.keys is not None else self._make_keys(at)
        first = node.end - len(found)  # page `start` lies in the edge that was looked at last
        return found[start - first : depth - first]

    def _make_keys(self, node: Node) -> list[bytes]:
        """Compute the keys of the path's edges that have none; return the keys of the node's own edge."""
        # The first loop goes upwards to the nearest edge that has keys. The second loop goes downwards from
        # there, because a key depends on the key before it.
        lacking: list[Node] = []
        parent = b""
        for at in node.path():
            if at.keys is not None:
                parent = at.keys[-1]
                break
            lacking.append(at)
        for at in reversed(lacking):
            tokens = np.frombuffer(at.edge, "<u8")
            at.keys = made = keys.page_keys(self._namespace, tokens, self.page_size, parent, at.extra)
            parent = made[-1]
        return made

    # -- growing and shrinking

    def path_to(self, start: Node, data: bytes) -> Node:
        """Return the node that covers the last page of `data`, which follows the end of `start`.

        Creates the missing part of the path, without objects.
        """
        path, depth = self.walk(start, data)
        node = path[-1] if path else start
        if depth * self._page_bytes == len(data):
            return node
        if node.end > start.end + depth:
            node = self.split(node, start.end + depth)
        return self._grow(node, data[depth * self._page_bytes :])

    def _grow(self, parent: Node, edge: bytes) -> Node:
        self.counters.generation += 1
        if parent.parent is None:
            self._roots[parent.extra] = parent
        shape = (len(Tier), len(self.page_pools), len(edge) // self._page_bytes)
        digests = self.prefixes.of_edge(edge, parent.digest)
        node = Node(parent, edge, digests, np.full(shape, ABSENT), len(self.state_pools), parent.extra)
        node.last_access = node.created = self._columns.now
        parent.children[edge[: self._page_bytes]] = node
        if len(parent.children) <= 2:  # see `Node.branches`
            self._columns.mark(parent)
        return node

    def split(self, node: Node, depth: int) -> Node:
        """Cut `node` at `depth` and return the new upper part:

            parent --[      node      )           parent --[ upper )--[ node )

        `node` itself becomes the lower part, and keeps its state and the pins that end on it. These pins now
        hold the pages of both parts.
        """
        parent = node.parent
        assert parent is not None, "a root has no edge to cut"
        assert node.start < depth < node.end, "a cut is inside an edge"
        pages = depth - node.start
        cut = pages * self._page_bytes
        self.counters.add(node, -1)
        where = node.where[:, :, :pages].copy()
        upper = Node(parent, node.edge[:cut], node.digests[:pages], where, node.state_pools, node.extra)
        upper.pins = [int(pins > 0) for pins in node.pins]
        upper.last_access, upper.hits, upper.nearest_state = node.last_access, node.hits, node.nearest_state
        upper.expected, upper.created = node.expected, node.created
        upper.children = {node.edge[cut : cut + self._page_bytes]: node}
        parent.children[node.edge[: self._page_bytes]] = upper
        node.parent, node.edge, node.digests = upper, node.edge[cut:], node.digests[pages:]
        node.where, node.pages = node.where[:, :, pages:].copy(), node.pages - pages
        if node.keys is not None:
            upper.keys, node.keys = node.keys[:pages], node.keys[pages:]
        # The upper part takes over the bits that the whole node had announced to the parent. The lower part
        # has not announced anything to its new parent, the upper part, so far.
        upper.announced_mask, node.announced_mask = node.announced_mask, 0
        if self.counters.changed is not None and node in self.counters.changed:
            self.counters.changed[upper] = None
        for part in (upper, node):
            part.recount()
            self.counters.add(part, +1)
        self.counters.announce(node)
        self.counters.announce(upper)
        return upper

    def _merge(self, node: Node) -> Node:
        """Merge a node into its only child, and return the child, whose edge gets longer.

        The child keeps its end and stays the same object:

            parent --[ node )--[ child )          parent --[     child     )
        """
        (child,) = node.children.values()
        parent = node.parent
        assert parent is not None, "a root is never merged"
        assert node.pins == [int(pins > 0) for pins in child.pins], "only the child can be pinned"
        if self.counters.changed is not None:
            self._follow_merge(node, child, self.counters.changed)
        self.counters.add(node, -1)
        self.counters.add(child, -1)
        parent.children[node.edge[: self._page_bytes]] = child
        child.parent, child.edge = parent, node.edge + child.edge
        child.digests = np.concatenate([node.digests, child.digests])
        child.where = np.concatenate([node.where, child.where], axis=2)
        child.keys = None if node.keys is None or child.keys is None else node.keys + child.keys
        child.last_access, child.hits = max(node.last_access, child.last_access), max(node.hits, child.hits)
        child.expected = max(node.expected, child.expected)
        child.announced_mask = node.announced_mask
        child.join(node)
        self._discard(node)
        self.counters.add(child, +1)
        self.counters.announce(child)
        return child

    def _follow_merge(self, node: Node, child: Node, changed: dict[Node, None]) -> None:
        """Keep the keys that one of two nodes has, and follow the child instead of both."""
        if (node.keys is None) != (child.keys is None):
            self._make_keys(child if child.keys is None else node)
        if node in changed:
            del changed[node]
            changed[child] = None

    def tidy(self, node: Node) -> None:
        """Remove or merge nodes that are not needed any more, from `node` upwards."""
        # A removal takes a child from the parent. The parent may then be empty, or have a single child left.
        while (parent := node.parent) is not None:
            if node.is_removable:
                del parent.children[node.edge[: self._page_bytes]]
                self._discard(node)
                if len(parent.children) < 2:
                    self._columns.mark(parent)
                node = parent
            elif node.is_mergeable:
                self._merge(node)
                return
            else:
                return
        if not node.children and not node.ends and self._roots.get(node.extra) is node:
            del self._roots[node.extra]

    def _discard(self, node: Node) -> None:
        self.counters.generation += 1
        self._columns.drop(node)
        node.detach()


def _common_bytes(edge: bytes, data: bytes, at: int) -> int:
    """Return how many leading bytes of `edge` equal `data[at:]`, rounded down to whole tokens.

    Needed only for the last edge of a walk, which the sequence may leave before the edge's end.
    """
    tokens = min(len(edge), len(data) - at) // TOKEN_BYTES
    same = np.frombuffer(edge, np.uint64, tokens) == np.frombuffer(data, np.uint64, tokens, at)
    return TOKEN_BYTES * (tokens if same.all() else int(same.argmin()))
