"""The pages that a `file` store's objects lie on or depend on: a hash table in columns, some 60 bytes a page.

A million Python objects take half a gigabyte and seconds to make; columns take a fifteenth of that, and are filled with a few sorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

PAGE_KEY_BYTES: Final = 32
NONE: Final = -1
"""In a column of links: nothing follows. It never leaves this table and the one of objects."""
_WORDS: Final = PAGE_KEY_BYTES // 8
_FIRST_NODES: Final = 1024

Ints = npt.NDArray[np.int64]
Links = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


class Pages:
    """Page key -> node. A node knows its first object and how many objects, stored or being written, depend on its page.

    Buckets lead to chains of nodes through `chain`; nodes that are free are chained too. A node lives while an object lies on it or
    something depends on it.

    Thread rule: none of its own; the store calls it under its mutex.
    """

    def __init__(self) -> None:
        self._free = NONE
        self._used = 0
        self._bind(
            np.zeros((_FIRST_NODES, _WORDS), np.uint64),
            np.full(_FIRST_NODES, NONE, np.int32),
            np.full(_FIRST_NODES, NONE, np.int32),
            np.zeros(_FIRST_NODES, np.uint32),
        )
        self._rehash()

    def load(self, keys: Words, parents: Words, known: Ints) -> tuple[Ints, Ints]:
        """Take in the pages of all objects of an empty table at once, oldest first, some of them repeated; keys of shape (n, 4).

        Object i depends on the page parents[i] for each i in `known`. Returns the node of every object's page, and of each known parent.
        """
        order, begins = _groups(keys)
        nodes = np.empty(len(keys), np.int64)
        nodes[order] = np.cumsum(begins) - 1
        self._fill(keys[order[begins]])
        # Mostly an object was stored right behind its parent, or hangs on its own page; only the others are looked up.
        above = np.full(len(known), NONE, np.int64)
        for guess in (known - 1, known):
            right = (guess >= 0) & (above < 0)
            right[right] = (keys[guess[right]] == parents[known[right]]).all(1)
            above[right] = nodes[guess[right]]
        left = np.flatnonzero(above < 0)
        above[left] = self.find_many(parents[known[left]])
        for i in np.flatnonzero(above < 0).tolist():
            above[i] = self.obtain(parents[known[i]].tobytes())
        self.dependents_column += np.bincount(above, minlength=len(self.dependents_column)).astype(np.uint32)
        return nodes, above

    def find(self, page: bytes) -> int:
        """The node of a page, or NONE."""
        node = self._buckets[int.from_bytes(page[:8], "little") & self._mask]
        while node >= 0 and self._raw[node * PAGE_KEY_BYTES : (node + 1) * PAGE_KEY_BYTES] != page:
            node = self._chain[node]
        return int(node)

    def find_many(self, keys: Words) -> Links:
        """The node of each page, or NONE; shape (n, 4) -> (n,)."""
        nodes = self.bucket_column[(keys[:, 0] & np.uint64(self._mask)).astype(np.int64)]
        wrong = np.flatnonzero(nodes >= 0)
        while len(wrong):
            here = nodes[wrong]
            wrong = wrong[(self.key_column[here] != keys[wrong]).any(1)]
            nodes[wrong] = self.chain_column[nodes[wrong]]
            wrong = wrong[nodes[wrong] >= 0]
        return nodes

    def obtain(self, page: bytes) -> int:
        """The node of a page, made where it is missing. Without an object or a dependent it must be given back with `tidy`."""
        node = self.find(page)
        if node >= 0:
            return node
        node = self._take()
        self._raw[node * PAGE_KEY_BYTES : (node + 1) * PAGE_KEY_BYTES] = page
        bucket = int.from_bytes(page[:8], "little") & self._mask
        self._chain[node] = self._buckets[bucket]
        self._buckets[bucket] = node
        self.first[node] = NONE
        self.dependents[node] = 0
        return node

    def tidy(self, node: int) -> None:
        """Give a node up if nothing needs it any more."""
        if self.first[node] >= 0 or self.dependents[node]:
            return
        bucket = int.from_bytes(self._raw[node * PAGE_KEY_BYTES : node * PAGE_KEY_BYTES + 8], "little") & self._mask
        at = self._buckets[bucket]
        if at == node:
            self._buckets[bucket] = self._chain[node]
        else:
            while self._chain[at] != node:
                at = self._chain[at]
            self._chain[at] = self._chain[node]
        self._chain[node] = self._free
        self._free = node

    def key(self, node: int) -> bytes:
        """The page key of a node."""
        return bytes(self._raw[node * PAGE_KEY_BYTES : (node + 1) * PAGE_KEY_BYTES])

    def nbytes(self) -> int:
        """Memory of the columns."""
        columns = (self.key_column, self.chain_column, self.first_column, self.dependents_column, self.bucket_column)
        return sum(column.nbytes for column in columns)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every node is either found by its key and needed, or free."""
        free = set()
        node = self._free
        while node >= 0:
            free.add(node)
            node = self._chain[node]
        for node in range(self._used):
            assert node in free or self.find(self.key(node)) == node, "a page is found by its key"
            assert node in free or self.first[node] >= 0 or self.dependents[node], "a page that nothing needs is given up"

    def _fill(self, keys: Words) -> None:
        """Make a node for each of these distinct pages."""
        size = max(_FIRST_NODES, len(keys) + len(keys) // 8)
        longer = np.zeros((size, _WORDS), np.uint64)
        longer[: len(keys)] = keys
        self._bind(longer, np.full(size, NONE, np.int32), np.full(size, NONE, np.int32), np.zeros(size, np.uint32))
        self._used = len(keys)
        self._rehash()

    def _take(self) -> int:
        node = self._free
        if node >= 0:
            self._free = self._chain[node]
            return node
        if self._used == len(self.chain_column):
            self._grow()
        self._used += 1
        return self._used - 1

    def _grow(self) -> None:
        size = self._used * 3 // 2
        self._bind(
            grown(self.key_column, size),
            grown(self.chain_column, size),
            grown(self.first_column, size),
            grown(self.dependents_column, size),
        )
        if size > len(self.bucket_column):
            self._rehash()

    def _bind(self, keys: Words, chain: Links, first: Links, dependents: npt.NDArray[np.uint32]) -> None:
        self.key_column, self.chain_column, self.first_column, self.dependents_column = keys, chain, first, dependents
        self._raw = keys.reshape(-1).view(np.uint8).data
        self._chain = chain.data
        self.first = first.data
        """By node: its first object's row, or NONE."""
        self.dependents = dependents.data
        """By node: how many objects depend on its page."""

    def _rehash(self) -> None:
        """Chain all nodes anew, in buckets for as many nodes as there is room; only while none is free."""
        self._mask = (1 << (len(self.chain_column) - 1).bit_length()) - 1
        self.bucket_column = np.full(self._mask + 1, NONE, np.int32)
        self._buckets = self.bucket_column.data
        buckets = (self.key_column[: self._used, 0] & np.uint64(self._mask)).astype(np.int64)
        link_groups(buckets, self.bucket_column, self.chain_column)


def grown(column: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """A longer copy of a column, with zeros at the end."""
    longer = np.zeros((size, *column.shape[1:]), column.dtype)
    longer[: len(column)] = column
    return longer


def link_groups(group: Ints, heads: Links, links: Links) -> None:
    """Chain all members i of each group g: heads[g] is its first one, links[i] the one after i, NONE behind the last."""
    order = np.argsort(group, kind="stable")
    sorted_groups = group[order]
    same = sorted_groups[1:] == sorted_groups[:-1]
    links[order[:-1]] = np.where(same, order[1:], NONE)
    links[order[-1:]] = NONE
    leads = np.concatenate([[True], ~same]) if len(order) else np.zeros(0, np.bool_)
    heads[sorted_groups[leads]] = order[leads]


def column_of(keys: Sequence[bytes], width: int) -> Words:
    """Keys of one width, a multiple of 8 bytes, as rows of words."""
    return np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), width // 8)


def _groups(keys: Words) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """An order in which equal keys are neighbours, and where in it a new key begins.

    By their first word alone, which is enough for digests; two that share it and differ send us to a full sort.
    """
    order = np.argsort(keys[:, 0], kind="stable")
    ordered = keys[order]
    differs = (ordered[1:] != ordered[:-1]).any(1)
    if (differs & (ordered[1:, 0] == ordered[:-1, 0])).any():
        order = np.lexsort(tuple(keys[:, word] for word in range(_WORDS)))
        ordered = keys[order]
        differs = (ordered[1:] != ordered[:-1]).any(1)
    return order, np.concatenate([[True], differs]) if len(order) else np.zeros(0, np.bool_)
