"""Table of the pages of a store, in columns, with a link from each page to the page before it.

A node is the row of a page in the columns. A node takes some 110 bytes, and a few sorts fill the columns for
a whole store. With one Python object per page, a million pages would take half a gigabyte, and seconds to
build.

    parent_node   page 1 <- page 2 <- page 3   leads from a page to the page before it
    kv               1         1         1     objects that are the page itself (KV of one layout or several)
    states           0         1         0     objects attached to the page (recurrent states)
    live             1         1         0     states of the page, plus live pages directly after the page

A page is live if its `live` is above 0. No restore can use a page that is not live. If the prefixes of its
namespace need no states, a stored page also counts itself in `live`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

PAGE_KEY_BYTES: Final = 32
NONE: Final = -1
"""Value of a link that leads nowhere."""
_WORDS: Final = PAGE_KEY_BYTES // 8
_FIRST_NODES: Final = 1024

BROKEN: Final = 1
"""Flag of a node: no object on the node can be restored.

The page of the node, or a page before it, is not stored or has the flag CUT.
"""
SERVED: Final = 2
"""Flag of a node: its page can be restored now, or was restorable at some time in the past.

A page with this flag is evicted before all others as soon as it can no longer be restored. A page without the
flag is given some time to become restorable.
"""
CUT: Final = 4
"""Flag of a node: the link to its parent was left out, because it would close a circle of parents."""
QUEUED: Final = 8
"""First of four flags that say in which queue of the eviction order (`eviction`) the page of a node waits.

8: pages that can be restored. 16: pages that are evicted first, because no restore can use them. 32 and 64:
pages that may still become restorable.
"""

_COLUMNS: Final[dict[str, npt.DTypeLike]] = {
    "chain": np.int32, "first": np.int32, "parent_node": np.int32, "children": np.uint32, "holds": np.uint32,
    "coming": np.uint32, "kv": np.uint32,
    "states": np.uint32, "live": np.uint32, "namespace_id": np.uint32, "depth": np.uint32, "tick": np.uint64,
    "number": np.uint64,
    "nbytes": np.uint64, "flags": np.uint8,
}  # fmt: skip
_HINTS: Final[dict[str, npt.DTypeLike]] = {
    "rank": np.float64, "worker": np.uint64, "state_rank": np.float64, "state_worker": np.uint64,
}  # fmt: skip
_LINKS: Final = ("chain", "first", "parent_node")

Ints = npt.NDArray[np.int64]
Links = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class PageTable:
    """Hash table from page key to node, and the links between nodes.

    A node is kept while it has an object or a child, or while a call holds it. The owner of the table is the
    table of objects (`residents`).

    The columns have one value per node:

        chain         next node of the same bucket; for a free node, the next free node
        first         first object of the node, a row of the owner's table
        parent_node   node of the page before it, while a stored page object names that page as its parent
        children      number of nodes whose `parent_node` is this node
        holds         number of calls that hold this node while they write
        coming        number of page objects that are being written
        kv, states, live   as in the drawing at the top of this file
        namespace_id  number that the owner gave to the namespace
        depth         pages from the start of the sequence to the end of this page; 0: not known
        tick          last use of this page, or of a page after it that was evicted (the owner's clock)
        number        number of the newest object in the store at the time when this page got its last object
        nbytes        payload bytes of all objects on the node
        flags         see `BROKEN`, `SERVED`, `CUT` and `QUEUED`

    and, after `keep_hints`, what `values` knows of the page's KV and of its states:

        rank, state_rank      rank by the values that callers gave; 0: none was given
        worker, state_worker  who gave it

    Thread safety: none of its own; the store calls it under its mutex.
    """

    chain: memoryview
    first: memoryview
    parent_node: memoryview
    children: memoryview
    holds: memoryview
    coming: memoryview
    kv: memoryview
    states: memoryview
    live: memoryview
    namespace_id: memoryview
    depth: memoryview
    tick: memoryview
    number: memoryview
    nbytes: memoryview
    flags: memoryview
    rank: memoryview[float]
    worker: memoryview
    state_rank: memoryview[float]
    state_worker: memoryview

    keys: Words
    """Page keys by node, shape (nodes, 4)."""
    columns: dict[str, npt.NDArray[Any]]
    _bucket_column: Links

    def __init__(self) -> None:
        self._free = NONE
        self.used = 0
        """Number of nodes that are in use or were in use: the nodes from 0 to `used` - 1."""
        self.hinted = False
        """Whether the table has the columns of hints (see `keep_hints`)."""
        self._make(_FIRST_NODES)
        self._rehash()

    def load(self, keys: Words) -> Ints:
        """Fill an empty table with one node for each distinct key, and return the node of each key.

        `keys` has the shape (n, 4).
        """
        order, begins = groups_of(keys)
        firsts = order[begins]
        # Nodes are numbered in the order in which their keys first appear, so that pages stored together are
        # neighbours:
        #   keys      c  a  c  b
        #   appears   1  1  0  1
        #   nodes     0  1  0  2
        appears = np.zeros(len(keys), np.bool_)
        appears[firsts] = True
        number = np.cumsum(appears) - 1
        nodes = np.empty(len(keys), np.int64)
        nodes[order] = number[firsts][np.cumsum(begins) - 1]
        distinct = keys[appears]
        self._make(max(_FIRST_NODES, len(distinct) + len(distinct) // 8))
        self.keys[: len(distinct)] = distinct
        self.used = len(distinct)
        self._rehash()
        return nodes

    def link_all(self, children: Ints, parents: Ints) -> None:
        """Link each of these nodes to its parent.

        A node that is given with several parents gets the first of them. Call this only while no node of the
        table has a parent.
        """
        # Reversed, because NumPy keeps the last of several values for one index.
        self.columns["parent_node"][children[::-1]] = parents[::-1]
        up = self.columns["parent_node"][: self.used]
        self.columns["children"][:] = np.bincount(up[up >= 0], minlength=len(self.columns["parent_node"]))

    def find(self, page: bytes) -> int:
        """Return the node of a page, or NONE."""
        node = self._buckets[hash(page) & self._mask]
        while node >= 0 and self._raw[node * PAGE_KEY_BYTES : (node + 1) * PAGE_KEY_BYTES] != page:
            node = self.chain[node]
        return int(node)

    def find_many(self, keys: Words) -> Links:
        """Return the node of each page, or NONE; shape (n, 4) -> (n,)."""
        chain = self.columns["chain"]
        nodes = self._bucket_column[self._buckets_of(keys)]
        # In each round, all nodes with a wrong key move one step along the chain of their bucket.
        wrong = np.flatnonzero(nodes >= 0)
        while len(wrong):
            here = nodes[wrong]
            wrong = wrong[(self.keys[here] != keys[wrong]).any(1)]
            nodes[wrong] = chain[nodes[wrong]]
            wrong = wrong[nodes[wrong] >= 0]
        return nodes

    def obtain(self, page: bytes) -> int:
        """Return the node of a page; make one if there is none.

        A caller that does not use a new node must give it back with `tidy`.
        """
        node = self.find(page)
        if node >= 0:
            return node
        node = self._take()  # before the bucket is looked up, because this may rebuild the buckets
        self._raw[node * PAGE_KEY_BYTES : (node + 1) * PAGE_KEY_BYTES] = page
        buckets, bucket = self._buckets, hash(page) & self._mask
        self.chain[node], buckets[bucket] = buckets[bucket], node
        return node

    def tidy(self, node: int) -> None:
        """Free a node if nothing needs it any more."""
        if self.first[node] >= 0 or self.children[node] or self.holds[node]:
            return
        # Unlink the node from the chain of its bucket.
        bucket = hash(self.key(node)) & self._mask
        at = self._buckets[bucket]
        if at == node:
            self._buckets[bucket] = self.chain[node]
        else:
            while self.chain[at] != node:
                at = self.chain[at]
            self.chain[at] = self.chain[node]
        self.chain[node] = self._free
        self._free = node
        self.flags[node] = self.depth[node] = self.tick[node] = self.nbytes[node] = 0
        if self.hinted:
            self.rank[node] = self.state_rank[node] = 0.0

    def keep_hints(self) -> None:
        """Add the columns of hints, which take 32 more bytes for each node."""
        size = len(self.keys)
        self.columns |= {name: np.zeros(size, dtype) for name, dtype in _HINTS.items()}
        self.hinted = True
        self._bind()

    def key(self, node: int) -> bytes:
        """Return the page key of a node."""
        return bytes(self._raw[node * PAGE_KEY_BYTES : (node + 1) * PAGE_KEY_BYTES])

    def is_below(self, node: int, above: int) -> bool:
        """Return whether the page of `node` is the page of `above`, or follows that page at any distance.

        This walks the whole path to the first page. Call it only where a new link could close a circle.
        """
        while node >= 0 and node != above:
            node = self.parent_node[node]
        return node == above

    def recount(self, stateless: Mask) -> None:
        """Recompute which pages are live and which are broken, and cut circles of parents.

        `stateless` tells for each node whether KV on the node may be restored without a state.
        """
        while not self._recount(stateless):
            pass

    def memory_bytes(self) -> int:
        """Return the bytes of memory of the columns."""
        return (
            self.keys.nbytes
            + self._bucket_column.nbytes
            + sum(column.nbytes for column in self.columns.values())
        )

    def _recount(self, stateless: Mask) -> bool:
        """Recompute `live` and `flags`; if there are circles, cut them instead and return False."""
        n = self.used
        up, kv, states = (self.columns[name][:n] for name in ("parent_node", "kv", "states"))
        flags = self.columns["flags"][:n]
        own = (kv > 0) & stateless[:n]
        alive = own | (states > 0)
        whole = (kv > 0) & (flags & CUT == 0)
        follows = np.flatnonzero(up >= 0)
        depth = self.columns["depth"]
        circle = spread(up, alive, whole, acyclic=bool((depth[up[follows]] < depth[follows]).all()))
        if len(circle):
            np.subtract.at(self.columns["children"], up[circle], 1)
            up[circle] = NONE
            flags[circle] |= CUT
            return False
        self.columns["live"][:n] = (
            states + own + np.bincount(up[alive & (up >= 0)], minlength=n)[:n].astype(np.uint32)
        )
        flags &= 0xFF ^ BROKEN
        flags[~whole] |= BROKEN
        flags[alive & whole] |= SERVED
        return True

    def _take(self) -> int:
        node = self._free
        if node >= 0:
            self._free = self.chain[node]
            return node
        if self.used == len(self.keys):
            self._grow()
        self.used += 1
        self.first[self.used - 1] = self.parent_node[self.used - 1] = NONE
        return self.used - 1

    def _grow(self) -> None:
        size = self.used * 3 // 2
        self.keys = grown(self.keys, size)
        self.columns = {name: grown(column, size) for name, column in self.columns.items()}
        self._bind()
        if size > len(self._bucket_column):
            self._rehash()

    def _make(self, size: int) -> None:
        self.keys = np.zeros((size, _WORDS), np.uint64)
        self.columns = {name: np.zeros(size, dtype) for name, dtype in _COLUMNS.items()}
        for name in _LINKS:
            self.columns[name][:] = NONE
        self._bind()

    def _bind(self) -> None:
        self._raw = self.keys.reshape(-1).view(np.uint8).data
        for name, column in self.columns.items():
            setattr(self, name, column.data)

    def _rehash(self) -> None:
        """Rebuild the buckets and the chains of all nodes.

        The number of buckets is a power of two, not below the number of nodes for which the table has room.

        Call this only while no node is free.
        """
        self._mask = (1 << (len(self.keys) - 1).bit_length()) - 1
        self._bucket_column = np.full(self._mask + 1, NONE, np.int32)
        self._buckets = self._bucket_column.data
        link_groups(self._buckets_of(self.keys[: self.used]), self._bucket_column, self.columns["chain"])

    def _buckets_of(self, keys: Words) -> Ints:
        """Return the bucket of each page.

        The bucket comes from Python's hash of bytes, which depends on a secret that is new in every process.
        A client therefore cannot choose page keys that all fall into one bucket.
        """
        pages = np.ascontiguousarray(keys).view(f"V{PAGE_KEY_BYTES}").ravel().tolist()
        return np.fromiter(map(hash, pages), np.int64, len(keys)) & self._mask


def spread(up: Links, alive: Mask, whole: Mask, *, acyclic: bool = False) -> Ints:
    """Make pages alive that lead to one that is, and broken those behind one that is; in place.

    `up` has the node of the page before each page, or NONE. Returns nodes on circles of pages; if there are
    any, the masks are not complete. `acyclic`: it is known that there are none.

    This is pointer doubling: after round k every node has seen all of its ancestors up to distance 2**k.
    A chain of a million pages takes 20 rounds instead of a million. If there are no circles, the first round
    that changes nothing is the last.
    """
    at = up.copy()
    last: int | None = None
    # In round k, `at` has the ancestor of each node at distance 2**k, or NONE if there is none. A page is
    # alive if it, or one of its descendants, has a state or needs none. A page is whole if it and all of
    # its ancestors are stored and not CUT. Each round doubles the distance covered:
    #   page                 1 <- 2 <- 3 <- 4 <- 5     page 5 has a state
    #   alive before         .    .    .    .    x
    #   after round 0        .    .    .    x    x     distance 1
    #   after round 1        .    x    x    x    x     distance 2
    #   after round 2        x    x    x    x    x     distance 4
    for _ in range(len(up).bit_length() + 1):
        on = np.flatnonzero(at >= 0)
        # Pages only become alive, and only cease to be whole, so this number grows with every change.
        changes = int(np.count_nonzero(alive) - np.count_nonzero(whole))
        if not len(on) or (acyclic and changes == last):
            return on[:0]
        last = changes
        far = at[on]
        alive[far[alive[on]]] = True
        whole[on] &= whole[far]
        at[on] = at[far]
    # `at` is now more steps away than there are nodes. A node that still has an ancestor at that distance
    # leads into a circle, and that ancestor is on the circle.
    return np.unique(at[at >= 0]).astype(np.int64)


def grown(column: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return a longer copy of a column, with zeros at the end."""
    longer = np.zeros((size, *column.shape[1:]), column.dtype)
    longer[: len(column)] = column
    return longer


def link_groups(group: Ints, heads: Links, links: Links) -> None:
    """Chain the members of each group.

    `group[i]` is the group of member i. `heads[g]` becomes the first member of group g. `links[i]` becomes
    the member after i in the same group, or NONE for the last member.
    """
    # Reversed, because NumPy keeps the last of several values for one index.
    heads[group[::-1]] = np.arange(len(group))[::-1]
    links[: len(group)] = NONE
    # Most members are alone in their group and need no link. Only the others are sorted.
    crowded = np.flatnonzero(np.bincount(group)[group] > 1)
    order = crowded[np.argsort(group[crowded], kind="stable")]
    same = group[order[1:]] == group[order[:-1]]
    links[order[:-1][same]] = order[1:][same]


def column_of(keys: Sequence[bytes], width: int) -> Words:
    """Return keys as rows of words of 8 bytes.

    `width`: bytes of every key, a multiple of 8.
    """
    return np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), width // 8)


def groups_of(keys: Words) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return an order of keys in which equal keys are neighbours, and a mask of that order.

    `keys` has the shape (n, 4). The mask is True where a key differs from the key before it in the order.
    Keys are sorted by their first word, which is enough for digests. If different keys share a first word,
    all keys are sorted by all words instead.
    """
    order = np.argsort(keys[:, 0], kind="stable")
    first = keys[order, 0]
    begins = np.ones(len(order), np.bool_)
    np.not_equal(first[1:], first[:-1], out=begins[1:])
    again = np.flatnonzero(~begins)
    if (keys[order[again]] != keys[order[again - 1]]).any():
        order = np.lexsort(tuple(keys[:, word] for word in range(_WORDS)))
        begins[1:] = (keys[order][1:] != keys[order][:-1]).any(1)
    return order, begins
