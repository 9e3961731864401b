"""Contract between tiercache and a store.

A backend (the implementation of a store) keeps opaque objects under `ObjectKey`s. It knows nothing of hit
policies, pools or engines: `HybridStorage` turns the calls of controllers into calls of a backend. A package
adds a backend by an entry point in the group `tiercache.storage_backends`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, cast

from tiercache.core import DIGEST_BYTES, ObjectKey, ObjectMeta, Outcome
from tiercache.errors import ConfigError
from tiercache.events.base import ChangeNote
from tiercache.keys import Identity, namespace_of
from tiercache.models.profile import ModelProfile
from tiercache.storage.checksum import CHECKSUM_BYTES, checksum
from tiercache.storage.env import Env
from tiercache.storage.history import History, TierHistory
from tiercache.storage.shares import OwnerUse, Shares
from tiercache.storage.values import is_value, is_worker
from tiercache.storage.vectors import usable

if TYPE_CHECKING:
    from tiercache.storage.tiers import ObservedTier, TierChange

NAMESPACE_BYTES: Final = 64
"""Maximum length of a namespace in bytes. `keys.namespace_of` returns 32 bytes."""
FLUSH_SECONDS: Final = 60.0
"""Seconds within which the flush of a store of several stores returns or raises, by default."""
FLOPS_FIELD: Final = "flops_per_token"
"""Field of a record's identity that is no part of it: FLOPs of a prefill per token, as a whole number.

Work that depends on the length of the context is left out. The field is absent if the writer does not know.
"""
SPEED_FIELD: Final = "prefill_flops_per_second"
"""Another such field: FLOPs per second of the writer's prefill, as measured, as a whole number."""


class GetItem(NamedTuple):
    """One object to read.

    `buffers` are writable, C-contiguous byte views, filled in order (scatter). Together they hold at least
    `length` bytes. The store may also overwrite all bytes of the buffers behind the payload:

        buffers    |    block    |    block    |
        bytes      | payload: `length` |~~~~~~~|     ~ may be overwritten
    """

    key: ObjectKey
    buffers: Sequence[memoryview]
    length: int


class SetItem(NamedTuple):
    """One object to write.

    The first `meta.length` bytes of `buffers`, in order (gather), are the payload. The store does not keep
    the buffers.

    `meta.parent` is the key of the page on which the object depends. The parent of a page is the page before
    it. An object that is attached to a page, such as a state, has that page as its parent, and has the same
    page key. An object without a parent, such as a first page, or a state of a model that keeps no pages,
    depends on nothing. No store evicts a page before the objects that depend on the page.
    """

    key: ObjectKey
    buffers: Sequence[memoryview]
    meta: ObjectMeta


def storable(item: SetItem) -> bool:
    """Return whether an item to write is well formed. A store answers ERROR to any other item."""
    meta = item.meta
    return (
        len(item.key.digest) == DIGEST_BYTES
        and len(meta.checksum) in (0, CHECKSUM_BYTES)
        and 0 < len(meta.namespace) <= NAMESPACE_BYTES
        and (meta.parent is None or len(meta.parent) == DIGEST_BYTES // 2)
        and (meta.depth is None or 0 <= meta.depth < 2**32)
        and (meta.value is None or is_value(meta.value))
        and is_worker(meta.worker)
        and usable(item.buffers, meta.length, writable=False)
    )


def checksum_of(item: SetItem) -> bytes:
    """Return the checksum of a well-formed item to write.

    If the caller gave no checksum, the checksum is computed from the bytes.
    """
    return item.meta.checksum or checksum(item.key, item.buffers, item.meta.length)


def meta_of(item: SetItem) -> ObjectMeta:
    """Return the metadata of a well-formed item to write, with its checksum."""
    return replace(item.meta, checksum=checksum_of(item))


def no_shares(what: str, shares: Shares) -> str:
    """Return the sentence that refuses shares which a store cannot keep; `what` is its type."""
    named = next(name for name, share in shares.limits.items() if share != type(share)())
    return (
        f"tenant {named} has a quota or a guarantee, which a store of type {what} cannot keep; use a store or"
        " a tier of type memory or file, or remove them"
    )


def first_of_each(keys: Sequence[ObjectKey], gone: set[bytes]) -> list[bool]:
    """Return the answers of a `delete` that has removed the objects with these digests.

    The first of several equal keys deletes the object, and the others find nothing. `gone` is used up.
    """
    answers = []
    for key in keys:
        answers.append(key.digest in gone)
        gone.discard(key.digest)
    return answers


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a store; the conformance suite has tests for each."""

    persistent: bool = False
    """Whether acknowledged objects survive the end of the process.

    They are there when the store is next opened, even if the process was killed.
    """
    shared: bool = False
    """Whether several processes may open the store at once."""
    bounded: bool = False
    """Whether the store evicts objects to stay within a capacity."""
    ordered: bool = True
    """Whether a full store evicts objects in the order of the contract: pages after what depends on them.

    Otherwise a service behind the store evicts by rules of its own, and any object may go at any time.
    """
    listed: bool = True
    """Whether the store can list and count its objects.

    Otherwise `scan` raises UnlistedError, and the counts of `usage` are 0.
    """
    shares: bool = False
    """Whether the store keeps quotas and guarantees of owners; see `StorageBackend.share`."""

    @classmethod
    def common(cls, several: Iterable[Capabilities]) -> Capabilities:
        """Return the capabilities that all of several stores have."""
        found = list(several)
        return cls(**{one.name: all(getattr(able, one.name) for able in found) for one in fields(cls)})


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """Record that names a namespace for people."""

    namespace: bytes
    identity: Mapping[str, str | int]
    """Fields of the namespace's `keys.Identity`, without the secret salt."""
    states: bool = False
    """Whether prefixes in this namespace need recurrent states besides pages.

    If so, KV is useless without a state on its page or on a later page. False where there are states alone.
    """

    @classmethod
    def priced(
        cls, identity: Identity, profile: ModelProfile | None, *, states: bool = False
    ) -> NamespaceRecord:
        """Return the record of an identity, with the FLOPs of its model if they are known."""
        flops = {} if profile is None else {FLOPS_FIELD: round(profile.flops_per_token)}
        return cls(namespace_of(identity), identity.public_record() | flops, states)

    @property
    def is_possible(self) -> bool:
        """Whether there can be objects in this namespace; no store need keep another record."""
        return 0 < len(self.namespace) <= NAMESPACE_BYTES

    def over(self, known: NamespaceRecord | None) -> NamespaceRecord:
        """Return the record to keep when this one is registered after `known`.

        The result equals this record, but `states` is set if it is set in either record, and a known
        FLOPS_FIELD or SPEED_FIELD stays if this writer does not know it.
        """
        if known is None:
            return self
        costs = {name: known.identity[name] for name in (FLOPS_FIELD, SPEED_FIELD) if name in known.identity}
        return replace(self, states=self.states or known.states, identity={**costs, **self.identity})


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """Contents of one tier of a chain, and the tier's figures since the chain was opened."""

    name: str
    kind: str
    """Storage type of the tier."""
    health: str
    """`serving`, `read-only` (takes no new objects), or `out` (does not answer, or answers wrongly)."""
    why: str = ""
    """Reason why the tier is not serving."""
    objects: int = 0
    payload_bytes: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    read_objects: int = 0
    read_bytes: int = 0
    written_objects: int = 0
    written_bytes: int = 0
    waiting: int = 0
    """Number of objects that wait to be copied to this tier."""
    dropped: int = 0
    """Number of objects that should have been copied here, and were not."""
    lost_calls: int = 0
    """Number of calls that were given up after their deadline."""
    last_read: float | None = None
    """Time of the last read that found an object here, in seconds since 1970; None before the first."""
    details: Mapping[str, str | int] = field(default_factory=dict)
    """Further figures of the tier's store."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Contents and size of a store."""

    objects: int
    payload_bytes: int
    used_bytes: int
    """All bytes that count towards the capacity, overheads included."""
    capacity_bytes: int
    """Limit of `used_bytes`; 0 means no limit."""
    details: Mapping[str, str | int] = field(default_factory=dict)
    tiers: Sequence[TierReport] = ()
    """Tiers of a chain, in their order; empty for other stores.

    The figures above are then sums over all tiers. An object counts once for each tier that has a copy.
    """
    owners: Mapping[str, OwnerUse] = field(default_factory=dict)
    """Bytes of each owner, after `StorageBackend.share`; in a chain, sums over the tiers that keep shares."""


class ScanEntry(NamedTuple):
    """One stored object as `scan` and `describe` report it."""

    key: ObjectKey
    meta: ObjectMeta
    stored_at: float | None = None
    """Seconds since 1970; None if the store does not keep the time."""
    tier: str = ""
    """Name of the first tier of a chain that holds the object; empty for other stores."""


class ScanPage(NamedTuple):
    """Part of a scan; pass `cursor` to the next call. An empty cursor ends the scan."""

    entries: Sequence[ScanEntry]
    cursor: bytes


class SharedMemory(Protocol):
    """Memory that may hold the buffers of items: one memfd, which another process can map.

    A `pools.HostArena` is such memory.

    Thread safety: any thread may use the memory until its owner closes it.
    """

    @property
    def fd(self) -> int:
        """The memfd. Every page of it is present; its size is sealed, and more seals can be added."""

    @property
    def address(self) -> int:
        """Address at which this process has the first byte mapped."""

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped from `address` on."""

    def quarantine(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Withhold the blocks under these ranges until the returned callable is called.

        A range is an offset and a length in bytes. The owner of the blocks may free them earlier, but none is
        allocated again before the callable is called.

        A store calls this when it gives up waiting for another process that may still write to the blocks.
        """

    def is_quarantined(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether a block under these ranges is under quarantine now."""


@dataclass(frozen=True, slots=True)
class StoreContext:
    """Access to the disk and the clock, which a store gets besides its section of the configuration."""

    env: Env


class StorageBackend(ABC):
    """A store of opaque objects.

    The caller guarantees: buffers stay valid until the call returns. Until then, the buffers of a set also
    stay unchanged, and no thread reads the buffers of a get. Batches may be empty, may hold duplicates and
    have no size limit.

    A caller that has called `attach` also guarantees, after a call that was given up (UNAVAILABLE):
    - the buffers of a get are free again when their quarantine has ended. Until then, and whenever the caller
      reads them without a HIT, they may hold anything;
    - the buffers of a set are free at once.

    The implementation must:
    - answer item by item, in input order. One bad item never fails the batch;
    - raise only `ClosedError` (use after close), `UnlistedError` from a scan if the store is not `listed`,
      and the errors of the next two points;
    - answer UNAVAILABLE or REFUSED for each item of a get or set if the store cannot be asked, that is, if it
      is out of reach or refuses the caller. `exists`, `delete`, `scan`, `describe`,
      `namespaces` and `usage` then raise UnavailableError, RefusedError or another StorageError, because an
      empty answer would be wrong;
    - raise StorageError from `flush` if the store cannot keep the promise of `flush`;
    - tell objects apart by the digest of their key alone (the digest covers the pool);
    - return HIT from a get only if the buffers hold exactly the `length` bytes that were stored under this
      key. The store verifies the bytes by the checksum of `ObjectMeta` first. If the bytes do not match, the
      store answers CORRUPT and drops the object, so that the next set of the key stores the object again;
    - read the object a second time before it drops the object, if the first read went into the caller's
      buffers. Another thread or process may have written to these buffers, so the second read goes into
      memory of the store. If the bytes of the second read match, the object stays and the outcome is ERROR;
    - leave the buffers of an item unchanged if the answer needs no read. Such answers are ERROR for a wrong
      length or a read-only buffer, and MISS for an absent object;
    - refuse to store an object that does not match the checksum of its set (ERROR), or answer CORRUPT to the
      first get of the object;
    - if it gives up a set while something may still read the buffers, have computed the checksum before it
      lent them (`meta_of`), and keep that one with the object: bytes that are read late are then CORRUPT;
    - answer no HIT into buffers to which a call that was given up may still write (`attached.withheld`);
    - answer HIT to a set of a key that the store has, without writing the object again. An object is visible
      to other calls only as a whole, and only after its set is acknowledged as STORED;
    - keep within its capacity at every instant. A store that is full and cannot evict answers THROTTLED and
      keeps all of its objects. It may answer THROTTLED as well if the object's `value` is lower than that of
      everything that would have to be evicted for it, or if there are too many namespaces for a new one;
    - hold no lock during I/O if another call may need that lock.

    Thread safety: every method may be called from any number of threads at once; `close` waits for calls that
    are under way.

    Store an object, and read it into memory of one's own:

        >>> from tiercache.core import ObjectMeta, PoolName
        >>> from tiercache.keys import object_key
        >>> from tiercache.storage import GetItem, SetItem, open_backend
        >>> key = object_key(PoolName.KV, layout=bytes(32), page_key=b"p" * 32)
        >>> meta = ObjectMeta(namespace=b"a model", length=5, checksum=b"")
        >>> buffer = bytearray(5)
        >>> with open_backend("memory://") as store:
        ...     store.set([SetItem(key, [memoryview(b"hello")], meta)])
        ...     store.get([GetItem(key, [memoryview(buffer)], length=5)])
        [<Outcome.STORED: 'stored'>]
        [<Outcome.HIT: 'hit'>]
        >>> bytes(buffer)
        b'hello'
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Capabilities of this store, which may depend on its settings and on the service behind it.

        They can be read at any time, without I/O, and may change while the store is open. A class whose
        stores are all alike has them as a class attribute.
        """

    @classmethod
    def capabilities_of(cls, section: Mapping[str, Any]) -> Capabilities:
        """Return what a store of this section is capable of, as far as its settings tell; nothing is opened.

        Raises ConfigError for a bad setting. Default: what the class has.
        """
        return cast(Capabilities, cls.capabilities)

    @classmethod
    @abstractmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        """Open a store from its section of the configuration.

        Raises ConfigError for a bad setting, StorageError if the store cannot be opened.
        """

    @classmethod  # noqa: B027  a third party's store may leave it to `from_config`
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        """Raise ConfigError if `from_config` would refuse a setting of this section.

        This opens and creates nothing. Raises UnavailableError if the store's place cannot be looked at.
        """

    @classmethod
    def check_shares(cls, section: Mapping[str, Any], shares: Shares) -> None:
        """Raise ConfigError if a store of this section cannot keep these shares, as far as settings tell.

        Default: a store keeps none.
        """
        if shares.is_limiting:
            raise ConfigError(no_shares(cls.__name__.removesuffix("Backend").lower(), shares))

    @abstractmethod
    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return for each key whether its object could be read now; a later get may still miss.

        Raises StorageError if the store cannot be asked.
        """

    @abstractmethod
    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Read and verify each object: HIT, MISS, CORRUPT, THROTTLED, ERROR, UNAVAILABLE or REFUSED."""

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Read objects like `get`, but without a use of the objects where the store can do so.

        For copies to other stores, and for verification: neither shows that the object is needed. Default:
        `get`.
        """
        return self.get(items)

    @abstractmethod
    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store each object: STORED, HIT, THROTTLED, ERROR, UNAVAILABLE or REFUSED."""

    @abstractmethod
    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Remove objects; return True for each object that was stored and is removed.

        Raises StorageError if the store cannot be asked; even then some of the objects may be removed.
        """

    @abstractmethod
    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        """Return one part of the stored objects of a namespace (None: of all namespaces).

        A scan reports every object, but may omit objects that are stored or removed while it runs. `cursor`
        may be any bytes, because clients of a daemon send it; a scan of bytes that are no cursor may return
        anything that is stored, or nothing.
        """

    @abstractmethod
    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        """Return the scan entry of each of these objects, or None for an object that is not stored.

        This does not count as a use of the objects.
        """

    @abstractmethod
    def register_namespace(self, record: NamespaceRecord) -> None:
        """Store the identity of a namespace. A second call with the same record is harmless.

        The latest identity replaces earlier identities. `states` stays set once it was set in any record of
        the namespace (`NamespaceRecord.over`), because some writers may have no pool of states. A store that
        has no room for more records keeps those that it has.
        """

    @abstractmethod
    def namespaces(self) -> list[NamespaceRecord]:
        """Return the record of every registered namespace."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return the present contents and size of the store."""

    def coldest(self, nbytes: int) -> Sequence[ScanEntry] | None:
        """Return the objects that the store would evict next, about `nbytes` bytes, in the order of eviction.

        Returns None if the store cannot say (the default).

        Another store accepts copies of the objects in the order of the answer: each object comes after the
        pages on which it depends, even if these pages will stay for long. The bytes of such pages do not
        count in `nbytes`. Objects that no restore can use are left out. A store may return fewer objects, to
        keep the answer short.

        The answer is a hint, and does not count as a use of the objects. Some of these objects may be gone
        already.

        Raises StorageError if the store cannot be asked.
        """
        return None

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:  # noqa: B027
        """Tell the store how much work each of these objects is expected to save from now on.

        The values are as in `ObjectMeta.value`. A store evicts the objects of the lowest values first, after
        those that no restore can use. A value loses half of its weight in an hour. A later value of the same
        `worker` replaces the earlier one; of the values of several workers, the largest aged one counts.

        Without any values, each object counts as used now, as by a `get`: a caller that has the bytes already
        says so. With values, the call is no use of the objects.

        Unknown objects and impossible values are ignored. The call is a hint: a store that is out of reach or
        refuses the caller ignores it too. Default: all is ignored.
        """

    @abstractmethod
    def flush(self) -> None:
        """Block until everything acknowledged before this call would survive a power cut.

        A store of several stores flushes each that keeps a copy of every object by its settings. If one of
        them cannot be flushed, or lacks objects, it raises StorageError with their number, within
        FLUSH_SECONDS unless its settings allow more.

        The medium is trusted: data that the medium reports as stored counts as stored.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. After that other methods raise ClosedError; a second `close` is harmless."""

    def watch(self, note: ChangeNote | None) -> bool:
        """Call `note` for objects that come and go from now on; None: no more. Return whether it is called.

        `note(digests, stored)` is called in the order of the changes, also for evictions and for changes that
        other processes make, possibly while a lock of the store is held: it does not wait and does not call
        the store. Changes of other processes may be told late. A store that cannot tell of every object that
        goes returns False (the default). A later call replaces an earlier one.
        """
        return False

    def history(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
        """Return which tiers have the objects `keys`, and the remembered removals of objects of `pages`.

        `pages` are page keys. Removals are found in all layouts, also in those of which nothing is left. The
        call is no use of the objects. Default: presence only. Raises StorageError if the store cannot be
        asked.
        """
        return History([TierHistory("", [entry is not None for entry in self.describe(keys)])])

    def share(self, shares: Shares) -> None:
        """Keep these quotas and guarantees from now on, instead of those of an earlier call.

        The implementation must, for all objects, also those that it had before the call:
        - never let an owner have more than its quota, at any instant, what is being written counted. A set
          beyond it first evicts the owner's own objects, in the usual order; if that is not enough, what does
          not fit is THROTTLED;
        - not evict an object for the sets of other owners while its owner has no more than its guarantee. A
          set that finds nothing else to evict is THROTTLED;
        - let an owner that stays within its guarantee store at the expense of those that have more than
          theirs.

        An owner that has more than its new quota loses its coldest objects before this call returns. What
        calls under way are using goes when they have ended, at the latest with the owner's next set.

        Raises ConfigError, with nothing changed, if the store cannot keep these shares. Default: a store
        keeps none.
        """
        self.check_shares({}, shares)

    def retier(
        self,
        tiers: Sequence[str | Mapping[str, Any]],
        drop: Collection[str] = (),
        shares: Shares | None = None,
    ) -> TierChange:
        """Change to another list of tiers, the fastest first; return when it holds.

        A tier is a URL or a section of a configuration, with the settings of a tier under their `PREFIX`. One
        at the place of a present tier is that tier, perhaps with other settings; without a place, the name
        decides. If all can be done, then in this order:

        1. new tiers are opened and examined;
        2. settings change; `write`, `write_after`, `promote`, `read_only` and `write_per_day` at once, for
           others the tier is closed and opened again, and what only it has is a miss meanwhile;
        3. `shares` are kept from now on, if they are given; see `StorageBackend.share`;
        4. the tiers are exchanged for those of the list in one step, without those that are named in `drop`;
        5. tiers that are not in the list leave: what only they have is copied to the others, in the
           background, and again if it fails. `usage().tiers` shows how much is left. Their files stay.

        Another list may come at any time: a tier that is leaving stays if it is in that list.

        Raises ConfigError for a list that is not possible, and StorageError for a store that fails; then
        nothing has changed. Calls go on meanwhile, each with the tiers that it began with. Default: a store
        has no tiers.
        """
        raise ConfigError(
            f"a {type(self).__name__} has no tiers that could change; open the store as a list of one URL,"
            " which makes a chain of one tier"
        )

    def observed_tiers(self) -> Sequence[ObservedTier] | None:
        """Return the tiers that answer now; None for a store without tiers (the default)."""
        return None

    def attach(self, memory: SharedMemory) -> None:  # noqa: B027  most stores have no use for it
        """Tell the store that buffers of later items may lie in `memory`.

        A store in another process may then move payloads to and from `memory` directly. A second call with
        the same memory is harmless, and other stores ignore the call. The caller keeps the memory open until
        `close` of the store returns.
        """

    def scan_all(self, namespace: bytes | None = None) -> Iterator[ScanEntry]:
        """Yield every entry of a scan, page by page."""
        cursor = b""
        while True:
            page = self.scan(namespace, cursor)
            yield from page.entries
            cursor = page.cursor
            if not cursor:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
