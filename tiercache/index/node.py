"""Node of the tree: an edge of whole pages, where their objects are, and the state at its end.

Each node *announces* to its parent in which tiers its subtree has objects, and whether its subtree has a
complete state. A state is *complete* if every state pool has its part of the state in some tier.

`radix_tree.py` adds, splits, merges and removes nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from tiercache.core import ABSENT, Locations, Tier, leading
from tiercache.policy import CheckpointKind, Ending

Digests: TypeAlias = npt.NDArray[np.uint64]
"""Digests, one per page: entry i covers the sequence from its start to the end of page i."""
TIERS: Final = tuple(Tier)
"""All tiers. Every change of a node iterates over them, and iterating over the enum class itself is slow."""
ALIVE: Final = len(Tier)
"""Number of the bit that stands for a complete state. The bits with lower numbers stand for the tiers."""
BITS: Final = range(len(Tier) + 1)
"""Numbers of all bits: one per tier, and `ALIVE`."""
LOCAL: Final = 1 << Tier.DEVICE | 1 << Tier.HOST
"""Bit mask of the device and the host tier."""
IN_STORAGE: Final = 1 << Tier.STORAGE
"""Bit mask of the storage tier."""
STORED: Final = 0
"""Location of every object that is known to be stored. A store finds objects by key, not by location."""
BASE: Final = 0x9E3779B97F4A7C15
"""Base of the polynomial whose values are the digests of prefixes."""
MIX: Final = 0xD6E8FEB86659FD93
"""Factor that mixes the sum of a page's tokens."""
_WORD: Final = 2**64 - 1
_FEW: Final = 32
_MOST_EXPECTED: Final = 16
"""Number of prompts whose digests are kept for the insert that follows."""
TOKEN_BYTES: Final = 8
_SEED: Final = 0x7469657263616368
_SHIFT: Final = np.uint64(32)


class Prefixes:
    """Digests of all prefixes of a sequence that end with a page, computed for whole arrays at once.

    The index recognises evicted prefixes by these digests (see `Ghosts`). A digest takes eight bytes a page.
    In one microsecond, the digests of several hundred tokens are computed. Digests need not resist attacks: a
    client that makes two prefixes collide only gets a useless checkpoint. Objects are never found by digest:
    in memory they are found by their tokens, and in storage by their keys.

    All arithmetic is modulo 2^64. The digest h(k) of page k alone is the sum of its tokens, weighted by
    random odd numbers and then mixed. The digest of a prefix of k pages is H(k) = H(k-1) * b + h(k), a
    polynomial in b (`BASE`). H(k) equals b^k * (H(0) + sum of h(i) * b^-i for i = 1 to k), so that one
    cumulative sum gives all digests.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.weights = np.random.default_rng(_SEED).integers(0, 2**64, page_size, np.uint64) | np.uint64(1)
        """One random odd number for each token of a page."""
        self._powers = self._mixers = np.empty(0, np.uint64)
        self._expected: dict[int, tuple[bytes, Digests]] = {}
        """Pages of prompts and their digests, by the digest before them."""

    @staticmethod
    def start(extra: bytes) -> int:
        """Return the digest of the empty prefix, for sequences with this `extra`."""
        return xxhash.xxh64_intdigest(extra, _SEED)

    def of(self, tokens: npt.NDArray[np.uint64], before: int) -> Digests:
        """Return the digests at the end of each whole page of `tokens`.

        The tokens follow a prefix with the digest `before`.
        """
        count = len(tokens) // self.page_size
        pages = tokens[: count * self.page_size].reshape(count, self.page_size) @ self.weights
        if count <= _FEW:  # the arithmetic of so few numbers takes less time than NumPy's calls
            digests, digest = [], before
            for page in pages.tolist():
                digest = (digest * BASE + (page ^ page >> 32) * MIX) & _WORD
                digests.append(digest)
            return np.array(digests, np.uint64)
        if count > len(self._powers):
            self._extend(2 * count)
        # Without the next two steps, a digest would be a linear function of the tokens. Differences in two
        # pages could then cancel each other out.
        pages ^= pages >> _SHIFT
        pages *= self._mixers[:count]  # entry k - 1 is now h(k) * b^-k
        out: Digests = pages.cumsum()  # entry k - 1 is the sum of h(i) * b^-i for i = 1 to k
        out += np.uint64(before)  # H(0)
        out *= self._powers[:count]  # b^k
        return out

    def expect(self, tokens: npt.NDArray[np.uint64], before: int) -> Digests:
        """Return what `of` does, for pages of a prompt, which an insert will probably ask for again."""
        digests = self.of(tokens, before)
        if len(digests):
            self._expected[before] = tokens[: len(digests) * self.page_size].tobytes(), digests
        if len(self._expected) > _MOST_EXPECTED:
            del self._expected[next(iter(self._expected))]
        return digests

    def of_edge(self, edge: bytes, before: int) -> Digests:
        """Return what `of` does, for the tokens of a new edge."""
        tokens, (expected, digests) = np.frombuffer(edge, "<u8"), self._expected.pop(before, (b"", None))
        common = min(len(edge), len(expected))
        if digests is None or edge[:common] != expected[:common]:
            return self.of(tokens, before)
        known = digests[: common // TOKEN_BYTES // self.page_size]
        more = tokens[common // TOKEN_BYTES :]
        return np.concatenate([known, self.of(more, int(known[-1]))]) if len(more) else known

    def _extend(self, count: int) -> None:
        self._powers = np.cumprod(np.full(count, BASE, np.uint64), dtype=np.uint64)
        inverse = np.full(count, pow(BASE, -1, 2**64), np.uint64)
        self._mixers = np.cumprod(inverse, dtype=np.uint64) * np.uint64(MIX)


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """Node of the tree: an edge of whole pages, their locations, and the state at its end.

    A root has no parent and no pages. A node that has pages and no parent was removed.

    The counts of a new node are those of a node without objects. If the locations in `where` name objects,
    the caller of the constructor calls `recount`.
    """

    parent: Node | None
    edge: bytes
    """Tokens of the edge's pages as little-endian u64."""
    digests: Digests
    """One digest per page, of the path to the page's end (see `Prefixes`)."""
    where: Locations
    """Locations of the pages: `where[tier, page pool, page]` is ABSENT, pending or present.

    A present page of the storage tier has the location `STORED`.
    """
    state_pools: int
    """Number of state pools."""
    extra: bytes
    """Bytes that separate sequences with equal tokens (see `keys.sequence_extra`)."""
    pages: int = field(init=False)
    """Number of pages of the edge."""
    end: int = field(init=False)
    """Depth of the edge's end, in pages."""
    children: dict[bytes, Node] = field(init=False)
    """Children by the bytes of their first page."""
    keys: list[bytes] | None = field(init=False, default=None)
    """Page keys of the edge; None before they are first needed."""
    states: list[list[int]] | None = field(init=False, default=None)
    """Locations of the state at the end: `states[tier][state pool]`, as in `where`.

    None if no state is present or pending.
    """
    # The next eight describe the node's units to policies; `Units` explains them.
    last_access: int = field(init=False, default=0)
    created: int = field(init=False, default=0)
    hits: int = field(init=False, default=0)
    expected: int = field(init=False, default=0)
    checkpoint: CheckpointKind = field(init=False, default=CheckpointKind.NONE)
    lineage: int = field(init=False, default=0)
    ending: Ending = field(init=False, default=Ending.UNKNOWN)
    new_pages: int = field(init=False, default=0)
    """Number of pages on the path that no request had before the one that took the state.

    Policies read this number as `Units.grown`.
    """
    nearest_state: int = field(init=False)
    """Depth of the nearest complete state above the node; 0 if there is none."""
    row: int = field(init=False, default=-1)
    """Row of the `EvictionColumns` that describes the node; -1 if there is none yet."""
    pins: list[int] = field(init=False)
    """By tier: number of pins that end on this node, and of its children that are pinned in this sense.

    The node's pages are held while this is not 0.
    """
    state_pins: list[int] = field(init=False)
    """By tier: number of pins that end on this node. They hold the node's state as well."""
    ends: int = field(init=False, default=0)
    """Number of pins that end here, in any tier or none. They keep the node from removal and merges."""
    subtree_counts: list[int] = field(init=False)
    """By bit: number of children with objects of the tier in their subtree.

    For `ALIVE`: number of children with a complete state in their subtree.
    """
    announced_mask: int = field(init=False, default=0)
    """Bits that the node announced to its parent."""
    resident: list[list[int]] = field(init=False)
    """Number of objects present, by tier and pool."""
    complete_pages: int = field(init=False)
    """Number of leading pages of the edge that every page pool has in some tier.

    Without page pools these are all pages, because nothing of them is needed.
    """
    local_pages: int = field(init=False)
    """Number of leading pages of the edge that every page pool has on the device or the host."""
    pages_in_flight: int = field(init=False, default=0)
    """Number of pending locations of pages."""
    in_flight: int = field(init=False, default=0)
    """Number of pending locations of pages and states."""
    state_local: bool = field(init=False, default=False)
    """Whether every state pool has a state here on the device or the host."""
    resident_mask: int = field(init=False, default=0)
    """Bits of the node itself: the tiers in which the node has objects, and `ALIVE`."""

    def __post_init__(self) -> None:
        parent, (_, pools, pages) = self.parent, self.where.shape
        self.pages = int(pages)
        self.end = self.pages + (parent.end if parent else 0)
        self.children = {}
        self.nearest_state = 0 if parent is None else parent.restorable
        self.pins, self.state_pins = [0] * len(Tier), [0] * len(Tier)
        self.subtree_counts = [0] * len(BITS)
        self.resident = [[0] * (pools + self.state_pools) for _ in TIERS]
        self.complete_pages = self.local_pages = 0 if pools else self.pages

    @classmethod
    def root(cls, page_pools: int, state_pools: int, extra: bytes) -> Self:
        """Return a new root, the start of all sequences with this `extra`."""
        where = np.empty((len(Tier), page_pools, 0), np.int64)
        return cls(None, b"", np.empty(0, np.uint64), where, state_pools, extra)

    def recount(self) -> None:
        """Recompute all counts from the locations: objects present, objects in flight, and complete pages."""
        self.resident = (self.where >= 0).sum(axis=2).tolist()
        for counts in self.resident:
            counts += [0] * self.state_pools
        self.pages_in_flight = int(np.count_nonzero(self.where < ABSENT))
        self._count_leading()
        self.recount_states()

    def _count_leading(self) -> None:
        local = _leading(self.where[: Tier.STORAGE], self.resident[: Tier.STORAGE])
        self.local_pages = local
        self.complete_pages = local if local == self.pages else _leading(self.where, self.resident)

    def recount_states(self) -> None:
        """Recompute the counts that depend on states. This is enough if no location of a page changed."""
        first, states = self.where.shape[1], self.states
        self.in_flight, self.state_local, mask = self.pages_in_flight, False, 0
        if states is not None:
            # This runs for every unit that is evicted. Loops over so few numbers are faster than generators.
            for counts, tier in zip(self.resident, states, strict=True):
                for pool, at in enumerate(tier, first):
                    counts[pool] = int(at >= 0)
                    self.in_flight += at < ABSENT
            by_pool = list(zip(*states, strict=True))
            self.state_local = min([max(tiers[: Tier.STORAGE]) for tiers in by_pool]) >= 0
            mask = (min([max(tiers) for tiers in by_pool]) >= 0) << ALIVE
        else:
            for counts in self.resident:
                counts[first:] = [0] * self.state_pools
        for number, counts in enumerate(self.resident):
            if any(counts):
                mask |= 1 << number
        self.resident_mask = mask

    def join(self, above: Node) -> None:
        """Count the pages of the node above, which has no state, as the first of this node; see `recount`."""
        pools = range(self.where.shape[1])
        for counts, more in zip(self.resident, above.resident, strict=True):
            for pool in pools:
                counts[pool] += more[pool]
        if above.complete_pages < above.pages:
            self.complete_pages = above.complete_pages
        else:
            self.complete_pages += above.pages
        if above.local_pages < above.pages:
            self.local_pages = above.local_pages
        else:
            self.local_pages += above.pages
        self.pages += above.pages
        self.expect(pages=above.pages_in_flight)
        self.resident_mask |= above.resident_mask

    def expect(self, *, pages: int = 0, states: int = 0) -> None:
        """Count more objects in flight at this node. `recount` would find the same counts, but is slower."""
        self.pages_in_flight += pages
        self.in_flight += pages + states

    def clear(self, tier: Tier) -> None:
        """Reset the counts after everything was taken from `tier`.

        The result is that of `recount`. The caller guarantees that no other tier held anything.
        """
        self.resident[tier] = [0] * len(self.resident[tier])
        self.resident_mask = 0
        self.complete_pages = self.local_pages = 0 if self.where.shape[1] else self.pages
        self.state_local = False

    def shift(self, tier: Tier, pool: int, present: int, in_flight: int) -> None:
        """Count so many more pages of a pool in a tier as present and in flight; see `recount`."""
        counts = self.resident[tier]
        counts[pool] += present
        self.expect(pages=in_flight)
        self._count_leading()
        bit = 1 << tier
        self.resident_mask = self.resident_mask | bit if any(counts) else self.resident_mask & ~bit

    @property
    def digest(self) -> int:
        """Digest of the path to the node's end."""
        return int(self.digests[-1]) if self.pages else Prefixes.start(self.extra)

    @property
    def signature(self) -> int:
        """Digest as a signed 64-bit number, as in the columns for policies."""
        digest = int(self.digests[-1])
        return digest - (1 << 64) if digest >> 63 else digest

    @property
    def branches(self) -> int:
        """Number of continuations (children); 2 stands for two or more."""
        return min(2, len(self.children))

    @property
    def start(self) -> int:
        """Depth before the first page of the edge."""
        return self.end - self.pages

    @property
    def is_removed(self) -> bool:
        """Whether the node was evicted, or merged into its child."""
        return self.parent is None and self.pages > 0

    @property
    def is_removable(self) -> bool:
        """Whether the node has no objects, nothing in flight, no children, and no pins that end here."""
        return not (self.resident_mask or self.in_flight or self.children or self.ends)

    @property
    def is_mergeable(self) -> bool:
        """Whether the node has a single child, no state, and no pin that ends here.

        Such a node can be merged with its child. A merge joins the edges of both.
        """
        return self.parent is not None and len(self.children) == 1 and self.states is None and not self.ends

    @property
    def is_alive(self) -> bool:
        """Whether a complete state is at the node's end or below it."""
        return bool(self.resident_mask >> ALIVE or self.subtree_counts[ALIVE])

    @property
    def is_complete(self) -> bool:
        """Whether every state pool has a state here, each in some tier."""
        return bool(self.resident_mask >> ALIVE)

    @property
    def can_answer(self) -> bool:
        """Whether a hit could end here.

        With state pools, the node must have a complete state. Without state pools, every page pool must have
        every page of the edge.
        """
        return bool(self.resident_mask >> ALIVE) if self.state_pools else self.complete_pages == self.pages

    @property
    def restorable(self) -> int:
        """Depth of the deepest complete state on the path to this node's end; 0 if there is none."""
        return self.end if self.resident_mask >> ALIVE else self.nearest_state

    @property
    def replay(self) -> int:
        """Number of pages to compute if the node's objects are lost; at least 1.

        With state pools these are the pages since the nearest complete state above. Without, every depth is
        restorable, and these are the edge's own pages.
        """
        return max(1, self.end - self.nearest_state if self.state_pools else self.pages)

    def holds(self, tier: Tier) -> bool:
        """Return whether anything of the node itself is present in `tier`."""
        return bool(self.resident_mask >> tier & 1)

    def has_pages(self, tier: Tier) -> bool:
        """Return whether every page pool has all pages of the edge in `tier`."""
        pools = self.where.shape[1]
        return self.resident[tier][:pools] == [self.pages] * pools

    def has_state(self, tier: Tier) -> bool:
        """Return whether every state pool has the state at the end in `tier`."""
        return all(self.resident[tier][self.where.shape[1] :])

    def path(self) -> Iterator[Node]:
        """Yield the node and its ancestors, upwards, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def covering(self, depth: int) -> Node:
        """Return the node on the path to this one whose edge holds page `depth - 1`; the root for depth 0."""
        node = self
        while node.parent is not None and node.end - node.pages >= depth:
            node = node.parent
        return node

    def set_state(self, tier: Tier, pool: int, location: int) -> None:
        """Write one state's location; the caller updates the counts afterwards."""
        if self.states is None:
            self.states = [[ABSENT] * self.state_pools for _ in TIERS]
        self.states[tier][pool] = location
        # `is_mergeable` relies on `states` being None if no state is present or pending.
        if self.states == [[ABSENT] * self.state_pools] * len(TIERS):
            self.states = None

    def state(self, tier: Tier, pool: int) -> int:
        """Return one state's location."""
        return ABSENT if self.states is None else self.states[tier][pool]

    def detach(self) -> None:
        """Mark the node as removed, which `is_removed` then reports."""
        self.parent = None
        self.children = {}
        self.resident_mask = 0


def _leading(where: Locations, counts: list[list[int]]) -> int:
    """Return the number of leading pages that every page pool has in some tier.

    Usually every pool has all pages in some tier, or one pool has no page. Then the counts give the answer.

    `where` has the shape [tier, pool, page]; `counts[tier][pool]` says how many of the pages are present.
    """
    _, pools, pages = where.shape
    least = min([*map(max, *counts)][:pools], default=pages)
    if least in (0, pages):
        return int(least)
    # Some pools have some pages: for each page, whether every pool has it in some tier.
    return leading(np.logical_and.reduce((where >= 0).any(axis=0)))
