"""Basic types of tiercache and pure functions over them. Nothing here does I/O or holds a lock.

Vocabulary: `docs/glossary.md`. Depths are counted in pages from the start of the sequence unless a name says `tokens`.
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
"""Locations of a pool's objects in one tier: for each a device slot or a host handle (both >= 0), or `ABSENT`, or pending."""

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Flags, one per object."""

TokenArray: TypeAlias = npt.NDArray[np.uint64]
"""Token ids of one sequence, one-dimensional; see `as_tokens`."""

BLOCK_ALIGN: Final = 4096
"""Alignment in bytes, of which arena blocks, slab blocks and I/O buffers are multiples: the page size and the O_DIRECT alignment."""

MOST_TRAILING: Final = 2**31
"""Largest `trailing`, in pages: more than any sequence has."""

ABSENT: Final = -1
"""Location of an object that is not in this tier and that no transfer is bringing there."""


def pending(location: Locations) -> Locations:
    """Encode destinations that a transfer is still filling: reserved, not readable, and not to be filled twice.

    The encoding is its own inverse. It maps locations >= 0 to numbers below `ABSENT`.
    """
    return -2 - location


class PoolName(enum.StrEnum):
    """Name of a cache kind. Nothing outside this enum and a pool's geometry may name a kind."""

    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"


class Tier(enum.IntEnum):
    """Tiers in which an object can be, fastest first."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2

    def __str__(self) -> str:
        return self.name.lower()


class HitPolicy(enum.StrEnum):
    """Rule that says which pages of a pool a prefix needs."""

    ALL_PAGES = "all_pages"
    """Prefix p needs pages [0, p)."""
    TRAILING_PAGES = "trailing_pages"
    """Prefix p needs the last `trailing` pages of [0, p); a state has `trailing=1`."""


class Outcome(enum.StrEnum):
    """Result for one object of a get or a set.

    A get answers HIT, MISS, CORRUPT, THROTTLED or ERROR; a set answers STORED, HIT (the object was there already), THROTTLED or ERROR.
    After a get that is not HIT the buffer's contents are undefined and are never published.
    """

    HIT = "hit"
    STORED = "stored"
    MISS = "miss"
    CORRUPT = "corrupt"
    THROTTLED = "throttled"
    ERROR = "error"


class Reason(enum.StrEnum):
    """Reason for a miss."""

    NONE = "none"
    ABSENT = "absent"
    EVICTED = "evicted"
    PARTIAL_POOLS = "partial_pools"
    IDENTITY = "identity"
    CHECKSUM = "checksum"
    TIMEOUT = "timeout"
    IO_ERROR = "io_error"
    BUSY = "busy"
    QUOTA = "quota"
    UNAVAILABLE = "unavailable"
    REFUSED = "refused"
    DISABLED = "disabled"
    NOT_WORTH = "not_worth"


class Verb(enum.StrEnum):
    """Kind of call that a principal of a daemon may be allowed to make."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class ObjectKey(NamedTuple):
    """Key of one object in a store.

    `digest` is the layout digest (pool, geometry fingerprint, shard; 32 bytes) followed by the page key (32 bytes): another layout, dtype
    or rank is another object, and the objects of all pools that belong to one page share its tail.
    """

    pool: PoolName
    digest: bytes

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
    """Metadata that a store keeps beside an object's bytes.

    `length` is the payload's, in bytes. `checksum` covers the payload and the object key (see `storage.checksum`); in a set it may be
    empty, and the store then computes it in the pass in which it writes. `parent` (page key) and `depth` (pages up to the object's end) are
    None where the caller does not know them. The parent is the page key that the object depends on: that of the page before for a page, and
    for a state that of the page on which it ends, which is its own.
    """

    namespace: bytes
    length: int
    checksum: bytes
    parent: bytes | None = None
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class CacheTransferUnits:
    """Objects of one pool that move between two tiers, as columns: unit i goes from `sources[i]` to `destinations[i]`.

    A mixed operation is a sequence of these, one per pool. They are columns, not one object per unit, so that no hot path loops over pages.
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
    """One pool's part of a storage call.

    `keys` are page keys in sequence order; in `batch_exists_v2` they are empty, and the call's own keys are meant. `handles` are the host
    objects to read or fill, one per key. `depths` (pages up to each object's end) and `parents` (page keys, empty for a first page) are
    passed on to the store where they are known. `trailing` is 1 to 2**31. The call that it is part of checks all of it.
    """

    pool: PoolName
    keys: Sequence[bytes] = ()
    handles: Locations = field(default_factory=lambda: np.empty(0, np.int64))
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    trailing: int = 1
    depths: Sequence[int] = ()
    parents: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class StorageExtra:
    """Further argument of a storage call: the page keys before this call's, from the sequence start."""

    prefix_keys: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class PoolTransferResult:
    """Answer of `batch_exists_v2`, in pages from the sequence start.

    `restorable_prefix_pages` are all depths at which every pool can be restored, ascending and sparse; `kv_hit_pages` is their maximum, or
    0. `kv_run_pages` is the length of the stored KV run; `extra_pool_hit_pages[X]` is the deepest depth within that run that pool X alone
    allows. `reason` is NONE, or says why the store could not be asked: then nothing is restorable, although the store may hold everything.
    `present[X][i]` says whether the object of pool X that ends with page i of the sequence was there.
    """

    kv_hit_pages: int
    extra_pool_hit_pages: Mapping[PoolName, int]
    restorable_prefix_pages: tuple[int, ...]
    kv_run_pages: int
    reason: Reason = Reason.NONE
    present: Mapping[PoolName, Mask] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class PoolPresence:
    """Objects of one pool that exist: `present[i]` is for the object that ends with page i of the sequence."""

    hit_policy: HitPolicy
    present: Mask
    trailing: int = 1

    def restorable(self) -> Mask:
        """Return `out[p - 1]`: whether this pool restores prefix p, for p = 1 .. len(present)."""
        if self.hit_policy is HitPolicy.ALL_PAGES:
            return np.logical_and.accumulate(self.present)
        count = np.concatenate([[0], np.cumsum(self.present)])
        ends = np.arange(1, len(self.present) + 1)
        starts = np.maximum(0, ends - int(self.trailing))
        needed: Mask = count[ends] - count[starts] == ends - starts
        return needed


def check_trailing(trailing: Any, pool: object) -> None:
    """Raise InputError unless `trailing`, the last pages of a pool that a prefix needs, is an integer from 1 to 2**31."""
    if isinstance(trailing, bool) or not isinstance(trailing, int | np.integer) or not 1 <= trailing <= MOST_TRAILING:
        raise InputError(f"pool {pool}: trailing={trailing!r} is not possible; give how many last pages a prefix needs, 1 to 2**31")


def restorable_prefixes(presence: Mapping[PoolName, PoolPresence], anchor: PoolName = PoolName.KV) -> PoolTransferResult:
    """Combine what every pool holds into the depths at which *all* of them can be restored.

    With K the length of the anchor's leading run, the answer is every p in 1 .. K that each pool restores under its own hit policy. All
    `present` arrays have the same length; the caller counts pages that it already has as present. Raises InputError.
    """
    if anchor not in presence:
        raise InputError(f"pool {anchor} is missing; its leading run bounds every depth")
    for name, pool in presence.items():
        check_trailing(pool.trailing, name)
        if len(pool.present) != len(presence[anchor].present):
            raise InputError(
                f"pool {name} covers {len(pool.present)} pages and {anchor} {len(presence[anchor].present)}; all cover the same"
            )
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
    """Return the largest p with `restorable[p - 1]`, or 0."""
    where = np.flatnonzero(restorable)
    return int(where[-1]) + 1 if len(where) else 0


def as_tokens(tokens: Any) -> TokenArray:
    """Return token ids as a one-dimensional, contiguous, little-endian uint64 array; copy only where necessary.

    Raises TokenError for anything but integers from 0 to 2**64 - 1.
    """
    array = np.asarray(tokens) if isinstance(tokens, np.ndarray) else _array_of_ints(tokens)
    if array.ndim != 1:
        raise TokenError(f"token ids must be one-dimensional, not of shape {array.shape}; pass one sequence at a time")
    if array.dtype.kind == "u":
        return np.ascontiguousarray(array, dtype="<u8")
    if array.dtype.kind != "i":
        raise TokenError(f"token ids must be integers, not {array.dtype}; convert them before the call")
    if array.size and int(array.min()) < 0:
        raise TokenError(f"token id {int(array.min())} is out of range; ids go from 0 to 2**64 - 1")
    return np.ascontiguousarray(array, dtype="<u8")


def _array_of_ints(tokens: Any) -> npt.NDArray[Any]:
    """Return `tokens` as an array, after checking the items of a list, tuple or range one by one.

    NumPy would turn a list that mixes small and huge integers into floats.
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
    """Return the deepest depth, in pages, that a prompt of `tokens` tokens may restore: at least one token is left to compute."""
    return max(0, tokens - 1) // page_size
