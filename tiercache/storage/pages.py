"""The pages of a store as a forest, in columns of some 110 bytes a page: which page follows which, and what can still be restored.

A million Python objects take half a gigabyte and seconds to make; columns take a fraction of that, and are filled with a few sorts.

    up      page 1 <- page 2 <- page 3        `up` leads from a page to the one before it
    kv         1         1         1          objects that are the page itself (KV of one layout or several)
    states     0         1         0          objects that hang on it (recurrent states)
    live       1         1         0          what a restore could use at or below: own states, and children that are live
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

PAGE_KEY_BYTES: Final = 32
NONE: Final = -1
"""Link of a column that leads nowhere. It never leaves the tables of residents."""
_WORDS: Final = PAGE_KEY_BYTES // 8
_FIRST_NODES: Final = 1024

BROKEN: Final = 1
"""Flag of a node: the page or one before it is not stored, or a circle was cut there, so what lies on it cannot be restored."""
SERVED: Final = 2
"""Flag of a node: its page could be restored once.

If such a page cannot be restored any more it is dead at once; other useless pages may still become useful.
"""
CUT: Final = 4
"""Flag of a node: its page lay on a circle of parents, which was cut here."""
QUEUED: Final = 8
"""First of four flags of a node: its page waits in an eviction order (8: live, 16: dead, 32 and 64: may yet become useful)."""

_COLUMNS: Final[dict[str, npt.DTypeLike]] = {
    "chain": np.int32, "first": np.int32, "up": np.int32, "children": np.uint32, "holds": np.uint32, "coming": np.uint32, "kv": np.uint32,
    "states": np.uint32, "live": np.uint32, "space": np.uint32, "depth": np.uint32, "tick": np.uint64, "number": np.uint64,
    "nbytes": np.uint64, "flags": np.uint8,
}  # fmt: skip
_LINKS: Final = ("chain", "first", "up")

Ints = npt.NDArray[np.int64]
Links = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class Pages:
    """Hash table from page key to node, and the links between nodes. A node lives while it has an object, a child or a call that holds it.

    Columns by node: `first` object (a row of the owner's table), `up` (the page before it, while a page object names it), `children`
    (number of nodes whose `up` it is), `holds` (by calls that are writing), `coming` (page objects that are being written), `kv`, `states`,
    `live`, `space` (the owner's number of its namespace), `depth` (pages up to its end; 0: not known), `tick` (last use of it or of what
    was evicted below it), `number` (of its newest object), `nbytes` (of all objects on it), `flags`; `chain` links the nodes of a bucket,
    or the free nodes.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    chain: memoryview
    first: memoryview
    up: memoryview
    children: memoryview
    holds: memoryview
    coming: memoryview
    kv: memoryview
    states: memoryview
    live: memoryview
    space: memoryview
    depth: memoryview
    tick: memoryview
    number: memoryview
    nbytes: memoryview
    flags: memoryview

    keys: Words
    """Page keys by node, shape (nodes, 4)."""
    columns: dict[str, npt.NDArray[Any]]
    _bucket_column: Links

    def __init__(self) -> None:
        self._free = NONE
        self.used = 0
        """Number of nodes that were in use at some time: all lie below it."""
        self._make(_FIRST_NODES)
        self._rehash()

    def load(self, keys: Words) -> Ints:
        """Make a node for each distinct key, shape (n, 4), in an empty table; return the node of each key."""
        order, begins = groups_of(keys)
        firsts = order[begins]
        # Nodes in the order in which they first appear, so that what was stored together lies together.
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
        """Make each of these nodes follow its parent, the first one where a node has several. No node may follow another yet."""
        self.columns["up"][children[::-1]] = parents[::-1]
        up = self.columns["up"][: self.used]
        self.columns["children"][:] = np.bincount(up[up >= 0], minlength=len(self.columns["up"]))

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
        wrong = np.flatnonzero(nodes >= 0)
        while len(wrong):
            here = nodes[wrong]
            wrong = wrong[(self.keys[here] != keys[wrong]).any(1)]
            nodes[wrong] = chain[nodes[wrong]]
            wrong = wrong[nodes[wrong] >= 0]
        return nodes

    def obtain(self, page: bytes) -> int:
        """Return the node of a page, made if it is missing. If nothing comes to need the node, give it back with `tidy`."""
        node = self.find(page)
        if node >= 0:
            return node
        node = self._take()  # this may rebuild the buckets
        self._raw[node * PAGE_KEY_BYTES : (node + 1) * PAGE_KEY_BYTES] = page
        buckets, bucket = self._buckets, hash(page) & self._mask
        self.chain[node], buckets[bucket] = buckets[bucket], node
        return node

    def tidy(self, node: int) -> None:
        """Give up a node if nothing needs it any more."""
        if self.first[node] >= 0 or self.children[node] or self.holds[node]:
            return
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

    def key(self, node: int) -> bytes:
        """Return the page key of a node."""
        return bytes(self._raw[node * PAGE_KEY_BYTES : (node + 1) * PAGE_KEY_BYTES])

    def is_below(self, node: int, above: int) -> bool:
        """Return whether `node` is the page `above` or follows it at any distance. Walks up, so call it only where a circle could close."""
        while node >= 0 and node != above:
            node = self.up[node]
        return node == above

    def recount(self, sustains: Mask) -> None:
        """Compute anew what is live and what is broken, and cut circles.

        `sustains`: by node, whether its KV may be restored without a state.

        Pointer doubling: after round k every node has looked at all its ancestors up to distance 2**k, so a chain of a million pages takes
        20 rounds and not a million. A round in which nothing changes is the last, where depths prove that there are no circles.
        """
        while not self._recount(sustains):
            pass

    def memory_bytes(self) -> int:
        """Return the bytes of memory of the columns."""
        return self.keys.nbytes + self._bucket_column.nbytes + sum(column.nbytes for column in self.columns.values())

    def nodes(self) -> Iterator[int]:
        """Return an iterator over the nodes that are in use."""
        free = set()
        node = self._free
        while node >= 0:
            free.add(node)
            node = self.chain[node]
        return (node for node in range(self.used) if node not in free)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every node is found by its key, needed, and counted right."""
        children = np.zeros(len(self.columns["up"]), np.int64)
        for node in self.nodes():
            assert self.find(self.key(node)) == node, "a page is found by its key"
            assert self.first[node] >= 0 or self.children[node] or self.holds[node], "a page that nothing needs is given up"
            assert self.up[node] < 0 or self.kv[node], "only a page that is stored follows another"
            if self.up[node] >= 0:
                children[self.up[node]] += 1
        assert (children == self.columns["children"])[list(self.nodes())].all(), "children are counted right"

    def _recount(self, sustains: Mask) -> bool:
        n = self.used
        up, kv, states = (self.columns[name][:n] for name in ("up", "kv", "states"))
        flags = self.columns["flags"][:n]
        own = (kv > 0) & sustains[:n]
        alive = own | (states > 0)
        whole = (kv > 0) & (flags & CUT == 0)
        at = up.copy()
        follows = np.flatnonzero(up >= 0)
        depth = self.columns["depth"]
        acyclic = bool((depth[up[follows]] < depth[follows]).all())
        known: int | None = None
        for _ in range(n.bit_length() + 1):
            on = np.flatnonzero(at >= 0)
            told = int(np.count_nonzero(alive) - np.count_nonzero(whole))
            if not len(on) or (acyclic and told == known):
                break
            known = told
            far = at[on]
            alive[far[alive[on]]] = True
            whole[on] &= whole[far]
            at[on] = at[far]
        else:
            # A node that still has an ancestor after more steps than there are nodes leads into a circle, and that ancestor lies on one.
            circle = np.unique(at[at >= 0])
            np.subtract.at(self.columns["children"], up[circle], 1)
            up[circle] = NONE
            flags[circle] |= CUT
            return False
        self.columns["live"][:n] = states + own + np.bincount(up[alive & (up >= 0)], minlength=n)[:n].astype(np.uint32)
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
        self.first[self.used - 1] = self.up[self.used - 1] = NONE
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
        """Rebuild the chains of all nodes, with at least one bucket for each node there is room for; call it only while no node is free."""
        self._mask = (1 << (len(self.keys) - 1).bit_length()) - 1
        self._bucket_column = np.full(self._mask + 1, NONE, np.int32)
        self._buckets = self._bucket_column.data
        link_groups(self._buckets_of(self.keys[: self.used]), self._bucket_column, self.columns["chain"])

    def _buckets_of(self, keys: Words) -> Ints:
        """Return the bucket of each page.

        Python keys its hash of bytes anew in every process, so page keys cannot be chosen to share one bucket.
        """
        pages = np.ascontiguousarray(keys).view(f"V{PAGE_KEY_BYTES}").ravel().tolist()
        return np.fromiter(map(hash, pages), np.int64, len(keys)) & self._mask


def grown(column: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return a longer copy of a column, with zeros at the end."""
    longer = np.zeros((size, *column.shape[1:]), column.dtype)
    longer[: len(column)] = column
    return longer


def link_groups(group: Ints, heads: Links, links: Links) -> None:
    """Chain all members i of each group g: heads[g] becomes its first one, links[i] the one after i, NONE behind the last."""
    heads[group[::-1]] = np.arange(len(group))[::-1]
    links[: len(group)] = NONE
    # Most members are alone in their group, so only the others are sorted.
    crowded = np.flatnonzero(np.bincount(group)[group] > 1)
    order = crowded[np.argsort(group[crowded], kind="stable")]
    same = group[order[1:]] == group[order[:-1]]
    links[order[:-1][same]] = order[1:][same]


def column_of(keys: Sequence[bytes], width: int) -> Words:
    """Return keys of one width, a multiple of 8 bytes, as rows of words."""
    return np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), width // 8)


def groups_of(keys: Words) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Order keys, shape (n, 4), so that equal ones are neighbours; return the order, and where in it a new key begins.

    The order is that of the first word alone, which is enough for digests; if two keys share it and differ, all words are sorted.
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
