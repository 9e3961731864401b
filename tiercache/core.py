"""Basic types of tiercache and pure functions over them. Nothing here does I/O or holds a lock.

`docs/glossary.md` explains the words. Depths are counted in pages from the start of the sequence, unless a
name says `tokens`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tiercache.errors import InputError, TokenError

Locations: TypeAlias = npt.NDArray[np.int64]
"""Locations of a pool's objects in one tier.

A location is a device slot or a host handle (a number from 0), or `ABSENT`, or pending (a number below
`ABSENT`, see `pending`).
"""

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Flags, one per object."""

TokenArray: TypeAlias = npt.NDArray[np.uint64]
"""Token ids of one sequence, one-dimensional; see `as_tokens`."""

BLOCK_ALIGN: Final = 4096
"""Alignment of arena blocks, slab blocks and I/O buffers, in bytes.

This is the size of a memory page, and it is enough for O_DIRECT.
"""

MOST_TRAILING: Final = 2**31
"""Maximum of a pool's `trailing` (see `HitPolicy`), in pages. No sequence has that many pages."""

ABSENT: Final = -1
"""Location of an object that is not in a tier, and that no transfer is bringing to the tier."""


def pending(location: Locations) -> Locations:
    """Encode locations as pending, or decode pending locations.

    A pending location is one that a transfer is still filling. Nobody may read it yet, and no other transfer
    may fill it.

    The encoding maps location 0 to -2, 1 to -3, and so on. The encoding is its own inverse.
    """
    return -2 - location


def leading(flags: Mask) -> int:
    """Return the number of set flags before the first flag that is not set."""
    first = int(flags.argmin()) if len(flags) else 0
    return first if len(flags) and not flags[first] else len(flags)


class PoolName(enum.StrEnum):
    """Name of a cache kind.

    The geometry of a pool says of which bytes an object consists, and which objects a prefix needs.
    """

    KV = "kv"
    """Keys and values of full attention."""
    MAMBA = "mamba"
    """Recurrent states of any kind."""
    SWA = "swa"
    """Keys and values of attention with a sliding window."""
    INDEXER = "indexer"
    """Keys by which sparse attention selects tokens."""
    DRAFT = "draft"
    """Caches of a model that drafts tokens for speculative decoding."""


class Tier(enum.IntEnum):
    """Tiers in which an object can be, fastest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2

    def __str__(self) -> str:
        return self._name_.lower()


class HitPolicy(enum.StrEnum):
    """Rule that says which pages of a pool a prefix needs."""

    ALL_PAGES = "all_pages"
    """A prefix of p pages needs all pages [0, p)."""
    TRAILING_PAGES = "trailing_pages"
    """A prefix of p pages needs the last `trailing` pages of [0, p). For states, `trailing` is 1."""


class Outcome(enum.StrEnum):
    """Result for one object of a get or a set.

    A get answers HIT, MISS, CORRUPT, THROTTLED, ERROR, UNAVAILABLE or REFUSED. A set answers STORED, HIT (the
    object was there already), THROTTLED, ERROR, UNAVAILABLE or REFUSED. Only MISS and CORRUPT of a get say
    that the store does not have the object. If the outcome of a get is not HIT, the contents of the object's
    buffer are undefined, and the caller must not publish them.
    """

    HIT = "hit"
    STORED = "stored"
    MISS = "miss"
    CORRUPT = "corrupt"
    THROTTLED = "throttled"
    ERROR = "error"
    UNAVAILABLE = "unavailable"
    """The store cannot be reached, or did not answer in time. It may or may not have the object."""
    REFUSED = "refused"
    """The store answers, but does not serve this caller or this call. It may or may not have the object."""

    @property
    def reason(self) -> Reason:
        """Reason of a miss with this outcome; NONE for HIT and STORED."""
        return _REASONS[self]


class Reason(enum.StrEnum):
    """Reason for a miss."""

    NONE = "none"
    ABSENT = "absent"
    PARTIAL_POOLS = "partial_pools"
    """The tier had objects of the pool, but not everything that the restore needed."""
    CHECKSUM = "checksum"
    TIMEOUT = "timeout"
    IO_ERROR = "io_error"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    REFUSED = "refused"
    DISABLED = "disabled"
    """Nothing was asked, because there is no storage, or because the cache does not serve this prompt."""
    NOT_WORTH = "not_worth"
    """Nothing was asked or fetched, because too few tokens would be restored."""
    RANKS = "ranks"
    """Another rank of the group could not restore as much."""


_REASONS: Final = {
    Outcome.HIT: Reason.NONE,
    Outcome.STORED: Reason.NONE,
    Outcome.MISS: Reason.ABSENT,
    Outcome.CORRUPT: Reason.CHECKSUM,
    Outcome.THROTTLED: Reason.BUSY,
    Outcome.ERROR: Reason.IO_ERROR,
    Outcome.UNAVAILABLE: Reason.UNAVAILABLE,
    Outcome.REFUSED: Reason.REFUSED,
}


class Verb(enum.StrEnum):
    """Kind of call that a principal of a daemon may be allowed to make."""

    READ = "read"
    WRITE = "write"
    OBSERVE = "observe"
    """The principal may know the metrics and the status of the whole daemon."""
    ADMIN = "admin"


DIGEST_BYTES: Final = 64
"""Length of an object key's digest in bytes: layout digest and page key."""


class ObjectKey(NamedTuple):
    """Key of one object in a store.

    Objects that differ in layout, dtype or rank have different keys. Objects of all pools that end on the
    same page have the same last 32 bytes.
    """

    pool: PoolName
    digest: bytes
    """Layout digest (of pool, geometry and shard; 32 bytes), then page key (32 bytes)."""

    @property
    def layout(self) -> bytes:
        """Layout digest, 32 bytes."""
        return self.digest[:32]

    @property
    def page_key(self) -> bytes:
        """Chained digest of the page on which the object ends, 32 bytes."""
        return self.digest[32:]


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """Metadata that a store keeps beside an object's bytes."""

    namespace: bytes
    length: int
    """Bytes of the payload."""
    checksum: bytes
    """Checksum of the payload and the object key (see `storage.checksum`).

    In a set it may be empty: the store then computes the checksum while it writes the payload.
    """
    parent: bytes | None = None
    """Page key of the object's parent; None if the caller does not know it.

    The parent of a page is the page before it. The parent of a state is the page on which the state ends. So
    a state and its parent have the same page key. A state of a model that keeps no pages has no parent.
    """
    depth: int | None = None
    """Pages from the sequence's start to the object's end; None if the caller does not know it."""
    value: float | None = None
    """Work that keeping the object is expected to save, in FLOPs per byte and second, from 0 on.

    None: the caller does not know it. It is a hint for the store's eviction (`StorageBackend.advise`), and
    not a property of the object: a store that returns metadata gives the present value, or none.
    """
    worker: int = 0
    """Random number of 64 bits that tells callers apart that give values."""


@dataclass(frozen=True, slots=True)
class CacheTransferUnits:
    """Objects of one pool that move between two tiers, as two columns of locations, shape [objects].

    Object i goes from `sources[i]` to `destinations[i]`. The locations are columns so that hot paths need no
    loop over objects. An operation on several pools has one `CacheTransferUnits` per pool.
    """

    pool: PoolName
    sources: Locations
    destinations: Locations

    def __post_init__(self) -> None:
        assert self.sources.shape == self.destinations.shape, "a unit has one source and one destination"

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, slots=True)
class PoolTransfer:
    """One pool's part of a storage call. The call checks the values."""

    pool: PoolName
    keys: Sequence[bytes] = ()
    """Page keys in sequence order; empty for `batch_exists_v2`, which takes the keys as its own argument."""
    handles: Locations = field(default_factory=lambda: np.empty(0, np.int64))
    """Host objects to read or fill, one per key."""
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    trailing: int = 1
    """Number of last pages that a prefix needs under `TRAILING_PAGES`, from 1 to 2**31."""
    depths: Sequence[int] = ()
    """Pages from the sequence's start to the end of each object; empty if the caller does not know them."""
    parents: Sequence[bytes] = ()
    """Page key of each object's parent (b"" for a first page); empty if the caller does not know them."""
    values: Sequence[float | None] = ()
    """Value of each object (see `ObjectMeta.value`), or None; empty if the caller knows none."""


@dataclass(frozen=True, slots=True)
class PoolTransferResult:
    """Answer of `batch_exists_v2`, in pages from the sequence start.

    Example: the KV of pages [0, 4) is stored, and states are stored at depths 2, 3 and 6. Then `kv_run_pages`
    is 4, `extra_pool_hit_pages` is 3 for the states, `restorable_prefix_pages` is (2, 3), and `kv_hit_pages`
    is 3. Without a page pool and with the same states, of 8 pages, `kv_run_pages` is 8, and depth 6 is
    restorable as well.
    """

    kv_hit_pages: int
    """Deepest depth at which every pool can be restored; 0 if there is none."""
    extra_pool_hit_pages: Mapping[PoolName, int]
    """For each pool other than KV: the deepest depth within the KV run that this pool can restore."""
    restorable_prefix_pages: tuple[int, ...]
    """All depths at which every pool can be restored, ascending, not necessarily adjacent."""
    kv_run_pages: int
    """Number of leading pages whose KV is stored; without a page pool, the number of all pages."""
    reason: Reason = Reason.NONE
    """Why the store could not be asked; NONE if it was asked.

    If the store was not asked, no depth counts as restorable.
    """
    present: Mapping[PoolName, Mask] = field(default_factory=dict, compare=False)
    """Whether objects are stored: `present[pool][i]` is for the object of `pool` that ends with page i."""


@dataclass(frozen=True, slots=True)
class PoolPresence:
    """Presence of one pool's objects: `present[i]` is for the object that ends with page i."""

    hit_policy: HitPolicy
    present: Mask
    trailing: int = 1

    def restorable(self) -> Mask:
        """Return whether this pool restores each depth from 1 to `len(present)`.

        Entry p - 1 is for depth p.
        """
        if self.hit_policy is HitPolicy.ALL_PAGES:
            return np.logical_and.accumulate(self.present)
        # `count[k]` is the number of present pages in [0, k). With trailing = 2:
        #   present           yes  no   yes  yes
        #   depth p             1    2    3    4       needs the pages [max(0, p - 2), p)
        #   pages needed        1    2    2    2
        #   of these present    1    1    1    2       restorable: depths 1 and 4
        count = np.concatenate([[0], np.cumsum(self.present)])
        ends = np.arange(1, len(self.present) + 1)
        starts = np.maximum(0, ends - int(self.trailing))
        needed: Mask = count[ends] - count[starts] == ends - starts
        return needed


def check_trailing(trailing: Any, pool: object) -> None:
    """Raise InputError unless `trailing` is an integer from 1 to 2**31.

    `trailing` is the number of last pages of `pool` that a prefix needs.
    """
    if (
        isinstance(trailing, bool)
        or not isinstance(trailing, int | np.integer)
        or not 1 <= trailing <= MOST_TRAILING
    ):
        raise InputError(
            f"pool {pool}: trailing={trailing!r} is not possible; give how many last pages a prefix needs, 1"
            " to 2**31"
        )


def restorable_prefixes(
    presence: Mapping[PoolName, PoolPresence], anchor: PoolName | None = PoolName.KV
) -> PoolTransferResult:
    """Combine what every pool holds into the depths at which *all* of them can be restored.

    The *run* is the number of leading pages that the anchor has without a gap. The answer names a depth from
    1 to the run if every pool restores this depth under its own hit policy. Without an anchor (None), as for
    a model that keeps states alone, the run is the whole sequence. The caller passes `present` arrays of
    equal length, and marks the pages that it already has as present. Raises InputError for arrays of
    different lengths, a missing anchor, no pool, or a bad `trailing`.
    """
    if not presence:
        raise InputError("no pool was given, so nothing could be restored; name one pool at least")
    if anchor is not None and anchor not in presence:
        raise InputError(f"pool {anchor} is missing; its leading run bounds every depth")
    first = next(iter(presence)) if anchor is None else anchor
    for name, pool in presence.items():
        check_trailing(pool.trailing, name)
        if len(pool.present) != len(presence[first].present):
            raise InputError(
                f"pool {name} covers {len(pool.present)} pages and {first} {len(presence[first].present)};"
                " all cover the same"
            )
    run = len(presence[first].present)
    if anchor is not None:
        run = int(np.logical_and.accumulate(presence[anchor].present).sum())
    agreed = np.ones(run, np.bool_)
    extra: dict[PoolName, int] = {}
    for name, pool in presence.items():
        if name is anchor:
            continue
        allowed = pool.restorable()[:run]
        extra[name] = deepest(allowed)
        agreed &= allowed
    return PoolTransferResult(
        kv_hit_pages=deepest(agreed),
        extra_pool_hit_pages=extra,
        restorable_prefix_pages=tuple((np.flatnonzero(agreed) + 1).tolist()),
        kv_run_pages=run,
    )


def deepest(restorable: Mask) -> int:
    """Return the largest p for which `restorable[p - 1]` is True; 0 if there is none."""
    where = np.flatnonzero(restorable)
    return int(where[-1]) + 1 if len(where) else 0


_TOKEN: Final = np.dtype("<u8")


def as_tokens(tokens: Any) -> TokenArray:
    """Return token ids as a one-dimensional, contiguous, little-endian uint64 array.

    Copies them only if `tokens` is not such an array already.

    Raises TokenError for more than one dimension, and for items that are not integers from 0 to 2**64 - 1.
    """
    array = np.asarray(tokens) if isinstance(tokens, np.ndarray) else _array_of_ints(tokens)
    if array.dtype == _TOKEN and array.ndim == 1 and array.flags.c_contiguous:
        return array  # the usual case, and fast
    if array.ndim != 1:
        raise TokenError(
            f"token ids must be one-dimensional, not of shape {array.shape}; pass one sequence at a time"
        )
    if array.dtype.kind == "u":
        return np.ascontiguousarray(array, dtype="<u8")
    if array.dtype.kind != "i":
        raise TokenError(f"token ids must be integers, not {array.dtype}; convert them before the call")
    if array.size and int(array.min()) < 0:
        raise TokenError(f"token id {int(array.min())} is out of range; ids go from 0 to 2**64 - 1")
    return np.ascontiguousarray(array, dtype="<u8")


def _array_of_ints(tokens: Any) -> npt.NDArray[Any]:
    """Return `tokens` as an array, after checking the items of a list, tuple or range one by one.

    Each item is checked because NumPy turns a list that mixes small and huge integers into floats.
    """
    if not isinstance(tokens, list | tuple | range):
        return np.asarray(tokens)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TokenError(f"token ids must be integers, not {token!r}; convert them before the call")
        if not 0 <= token < 2**64:
            raise TokenError(f"token id {token} is out of range; ids go from 0 to 2**64 - 1")
    return np.array(tokens, dtype=np.uint64)


def full_pages(tokens: int, page_size: int) -> int:
    """Return how many whole pages `tokens` tokens fill."""
    return tokens // page_size


def reusable_pages(tokens: int, page_size: int) -> int:
    """Return the deepest depth, in pages, that a prompt of `tokens` tokens may restore.

    A restore leaves at least one token to compute, because the engine needs the logits of the last token.
    """
    return max(0, tokens - 1) // page_size
