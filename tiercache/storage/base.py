"""The contract between tiercache and a store.

A backend keeps opaque objects under `ObjectKey`s. It knows nothing of hit policies, pools or engines: `HybridStorage` turns the v2 calls
into these. Backends are found by the entry-point group `tiercache.storage_backends`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, Self

from tiercache.core import ObjectKey, ObjectMeta, Outcome, Reason
from tiercache.storage.checksum import CHECKSUM_BYTES, checksum
from tiercache.storage.env import Env
from tiercache.storage.vectors import usable

DIGEST_BYTES: Final = 64
"""Bytes of an object key's digest: layout digest and page key."""

NAMESPACE_BYTES: Final = 64
"""Largest length of a namespace in bytes; `keys.namespace_of` gives 32."""


class GetItem(NamedTuple):
    """One object to read.

    `buffers` are writable, C-contiguous byte views, filled in order (scatter). Together they hold at least `length` bytes; the store may
    also overwrite the bytes behind the payload, up to their end.
    """

    key: ObjectKey
    buffers: Sequence[memoryview]
    length: int


class SetItem(NamedTuple):
    """One object to write: `buffers` in order (gather), of which the first `meta.length` bytes are the payload. The buffers are not kept.

    `meta.parent` is the page key on which the object depends: for a page the page before it, for an object that hangs on a page (a state)
    the key of that page, which is its own. A store that evicts never gives up a page before what depends on it.
    """

    key: ObjectKey
    buffers: Sequence[memoryview]
    meta: ObjectMeta


def storable(item: SetItem) -> bool:
    """Return whether an item to write is well formed. A store answers ERROR if it is not."""
    meta = item.meta
    return (
        len(item.key.digest) == DIGEST_BYTES
        and len(meta.checksum) in (0, CHECKSUM_BYTES)
        and 0 < len(meta.namespace) <= NAMESPACE_BYTES
        and (meta.parent is None or len(meta.parent) == DIGEST_BYTES // 2)
        and (meta.depth is None or 0 <= meta.depth < 2**32)
        and usable(item.buffers, meta.length, writable=False)
    )


def checksum_of(item: SetItem) -> bytes:
    """Return the checksum of a well-formed item to write: the caller's, or if that is empty the one computed from its bytes."""
    return item.meta.checksum or checksum(item.key, item.buffers, item.meta.length)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a backend; a conformance test runs if the backend has its capability."""

    persistent: bool = False
    """Whether acknowledged objects are there after the process ends in any way and the store is opened again."""
    shared: bool = False
    """Whether several processes may open it at once."""
    bounded: bool = False
    """Whether it keeps within a capacity by evicting."""


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """Record of a namespace in a store, so that its objects can be named for people: the identity without its salt."""

    namespace: bytes
    identity: Mapping[str, str | int]
    states: bool = False
    """Whether a prefix in it needs recurrent states: KV without a state at or below it is then worth nothing."""

    def over(self, known: NamespaceRecord | None) -> NamespaceRecord:
        """Return the record to remember when this one is registered over `known`: this one, but `states` stays set once it was."""
        return replace(self, states=True) if known is not None and known.states else self


@dataclass(frozen=True, slots=True)
class Usage:
    """Contents of a store. `capacity_bytes` 0 means without a cap; `used_bytes` counts everything towards the cap, overheads included."""

    objects: int
    payload_bytes: int
    used_bytes: int
    capacity_bytes: int
    details: Mapping[str, str | int] = field(default_factory=dict)


class ScanEntry(NamedTuple):
    """One stored object as `scan` and `describe` report it. `stored_at`: seconds since 1970; None where the store keeps no time."""

    key: ObjectKey
    meta: ObjectMeta
    stored_at: float | None = None


class ScanPage(NamedTuple):
    """Part of a scan; pass `cursor` to the next call. An empty cursor ends the scan."""

    entries: Sequence[ScanEntry]
    cursor: bytes


class SharedMemory(Protocol):
    """Memory in which the buffers of items may lie: one memfd that another process can map (`pools.HostArena` is one).

    Thread safety: any thread may use it, until its owner closes it.
    """

    @property
    def fd(self) -> int:
        """The memfd: sealed against resizing but not against further seals, with every page of it present."""

    @property
    def address(self) -> int:
        """Address at which this process has the first byte mapped."""

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped from `address` on."""

    def embargo(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Withhold the blocks under these (offset, length) ranges, freed or not; return the callable that ends this.

        It is called for a store that gave up waiting for another process which may still write there.
        """


@dataclass(frozen=True, slots=True)
class StoreContext:
    """The outside world that a store is handed besides its own section."""

    env: Env


class StorageBackend(ABC):
    """A store of opaque objects.

    The caller guarantees: buffers stay valid and, for a set, unchanged until the call returns; no thread reads a get's buffers before it
    returns. Batches may be empty, may hold duplicates and have no size limit.

    The implementation must:
    - answer item by item, in input order; one bad item never fails the batch, and nothing but `ClosedError` (use after close) is raised,
      except by `flush`, which raises StorageError where it cannot keep its promise, and by `scan`, `describe`, `namespaces` and `usage` of
      a store that is out of reach (see `outage`), which raise it too, because an empty answer would be wrong;
    - tell objects apart by the digest of their key alone (it covers the pool);
    - return HIT from a get only if exactly the bytes that were stored under this key, `length` of them, are in the buffers: it checks the
      checksum of `ObjectMeta` first. A mismatch is CORRUPT: the object is dropped, so that the next set of that key stores it anew. Another
      thread or process may write to the buffers, so a store that reads into them reads the object a second time, into memory of its own,
      before it drops it; the outcome is ERROR if the object is sound;
    - leave the buffers of an item alone that it refuses before reading (a wrong length or a read-only buffer is ERROR, absent is MISS);
    - store no object that does not match the checksum of its set (ERROR), or find that out at its first get (CORRUPT);
    - answer HIT to a set of a key that it holds, without rewriting it; an object is visible to other calls only whole, and only after its
      set is acknowledged to be STORED;
    - keep its cap at every instant; a store that is full and cannot evict answers THROTTLED and loses nothing it holds;
    - hold no lock of its own across I/O where another call could need it.

    Thread safety: every method may be called from any number of threads at once; `close` waits for calls that are inside.
    """

    capabilities: Capabilities
    """Capabilities of the class for a store, and of the store inside for a wrapper."""

    @classmethod
    @abstractmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        """Open a store from its section of the configuration; raise ConfigError for a bad setting, StorageError if it cannot be opened."""

    @classmethod  # noqa: B027  a third party's store may leave it to `from_config`
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        """Raise ConfigError for a section whose settings `from_config` would refuse. Opens and makes nothing."""

    @abstractmethod
    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return which of `keys` could be read now. This is a hint: a later get may still miss."""

    @abstractmethod
    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Read and verify each object: HIT, MISS, CORRUPT, THROTTLED or ERROR."""

    @abstractmethod
    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store each object: STORED, HIT, THROTTLED or ERROR."""

    @abstractmethod
    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Remove objects; return True for each that was there and is gone now."""

    @abstractmethod
    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        """Return a part of the stored objects, of one namespace or all.

        An object that comes or goes during a scan may be reported or not; every other object is reported.
        """

    @abstractmethod
    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        """Return what a scan would report of each of these objects, None where there is none. Does not count as a use."""

    @abstractmethod
    def register_namespace(self, record: NamespaceRecord) -> None:
        """Remember the identity of a namespace. Repeating it is harmless.

        The latest identity counts; `states` stays set once a record of the namespace had it (`NamespaceRecord.over`), because writers of
        one namespace register their pools one after the other, and some of them know of fewer pools.
        """

    @abstractmethod
    def namespaces(self) -> list[NamespaceRecord]:
        """Return every remembered namespace."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return what the store holds now."""

    @abstractmethod
    def flush(self) -> None:
        """Return once everything acknowledged so far would survive a power cut, as far as the medium can promise it."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. A second call is harmless; other methods then raise ClosedError."""

    def outage(self) -> Reason:
        """Return why the store answers nothing at present, for the reason of a miss; NONE where it answers. Its latest call decides."""
        return Reason.NONE

    def attach(self, memory: SharedMemory) -> None:  # noqa: B027  most stores have no use for it
        """Tell the store that buffers of later items may lie in `memory`.

        A store that is another process may let that process move payloads there itself. Attaching twice is harmless, and so is attaching to
        a store that has no use for it. The memory stays open until `close` of the store returns.
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
