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
"""Of an object key's digest: layout digest and page key."""

NAMESPACE_BYTES: Final = 64
"""At most; `keys.namespace_of` gives 32."""


class GetItem(NamedTuple):
    """One object to read.

    `buffers` are writable, C-contiguous byte views, filled in order (scatter). Together they hold at least `length` bytes; the store
    may also overwrite what lies behind the payload, up to their end.
    """

    key: ObjectKey
    buffers: Sequence[memoryview]
    length: int


class SetItem(NamedTuple):
    """One object to write: `buffers` in order (gather), of which the first `meta.length` bytes are the payload. They are not kept.

    `meta.parent` is the page key on which the object depends: for a page the page before it, for an object that hangs on a page (a state)
    the key of that page, which is its own. A store that evicts never gives up a page before what depends on it.
    """

    key: ObjectKey
    buffers: Sequence[memoryview]
    meta: ObjectMeta


def storable(item: SetItem) -> bool:
    """Is an item to write well formed? A store answers ERROR where it is not."""
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
    """The checksum of a well-formed item to write: the caller's, or where that is empty the one of its bytes."""
    return item.meta.checksum or checksum(item.key, item.buffers, item.meta.length)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; a conformance test runs when its capability is there."""

    persistent: bool = False
    """Acknowledged objects are there after the process ends in any way and the store is opened again."""
    shared: bool = False
    """Several processes may open it at once."""
    bounded: bool = False
    """It keeps a capacity by evicting."""


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """What a store remembers about a namespace so that people can name what they see: the identity without its salt."""

    namespace: bytes
    identity: Mapping[str, str | int]
    states: bool = False
    """A prefix of it needs recurrent states: KV without a state at or below it is worth nothing."""

    def over(self, known: NamespaceRecord | None) -> NamespaceRecord:
        """What is remembered once this is registered and `known` was before: that there are states is never taken back."""
        return replace(self, states=True) if known is not None and known.states else self


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds. `capacity_bytes` 0 means without a cap; `used_bytes` counts everything towards the cap, overheads included."""

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
    """A part of a scan; pass `cursor` to the next call. An empty cursor ends the scan."""

    entries: Sequence[ScanEntry]
    cursor: bytes


class SharedMemory(Protocol):
    """Memory in which the buffers of items may lie: one memfd that another process can map (`pools.HostArena` is one).

    Thread safety: any thread may use it, until its owner closes it.
    """

    @property
    def fd(self) -> int:
        """The memfd: sealed against resizing, not against further seals, every page of it present."""

    @property
    def address(self) -> int:
        """Where this process has its first byte mapped."""

    @property
    def nbytes(self) -> int:
        """Bytes from there on."""

    def embargo(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Do not hand out the blocks under these (offset, length) ranges again, freed or not, until the callable that comes back is called.

        For a store that gave up waiting for another process which may still write there.
        """


@dataclass(frozen=True, slots=True)
class StoreContext:
    """What a store is handed besides its own section: the outside world."""

    env: Env


class StorageBackend(ABC):
    """A store of opaque objects.

    The caller guarantees: buffers stay valid and, for a set, unchanged until the call returns; nobody reads a get's buffers before it
    returns. Batches may be empty, may hold duplicates and have no size limit.

    The implementation must:
    - answer item by item, in input order; one bad item never fails the batch, and nothing but `ClosedError` (use after close) is raised,
      except by `flush`, which raises StorageError where it cannot keep its promise, and by `scan`, `describe`, `namespaces` and `usage` of
      a store that cannot be asked (see `outage`), which raise it too, for an empty answer would be a lie;
    - tell objects apart by the digest of their key alone (it covers the pool);
    - return HIT from a get only if exactly the bytes that were stored under this key, `length` of them, are in the buffers: it checks the
      checksum of `ObjectMeta` first. A mismatch is CORRUPT: the object is dropped, so that the next set of that key stores it anew. The
      buffers may be shared with somebody who writes to them, so a store that reads into them looks a second time, in memory of its own,
      before it drops anything; ERROR if the object is sound;
    - leave the buffers of an item alone that it refuses before reading (a wrong length or a read-only buffer is ERROR, absent is MISS);
    - store no object that is not what the checksum of its set says, or find that out at its first get: ERROR then, or CORRUPT;
    - answer HIT to a set of a key that it holds, without rewriting it; an object is visible to others only whole, and only after its set is
      acknowledged to be STORED;
    - keep its cap at every instant; a store that is full and cannot evict answers THROTTLED and loses nothing it holds;
    - hold no lock of its own across I/O where another call could need it.

    Thread safety: every method may be called from any number of threads at once; `close` waits for calls that are inside.
    """

    capabilities: Capabilities
    """Of a store its class's, of a wrapper those of the store inside."""

    @classmethod
    @abstractmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        """Open a store from its section of the configuration; raises ConfigError for a bad setting, StorageError if it cannot."""

    @classmethod  # noqa: B027  a store of others may leave it to `from_config`
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        """Raise ConfigError for a section that `from_config` would refuse for what it says. Opens and makes nothing."""

    @abstractmethod
    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which of `keys` could be read now. A hint: a later get may still miss."""

    @abstractmethod
    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Read and verify each object: HIT, MISS, CORRUPT, THROTTLED or ERROR."""

    @abstractmethod
    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store each object: STORED, HIT, THROTTLED or ERROR."""

    @abstractmethod
    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Remove objects; True where one was there and is gone now."""

    @abstractmethod
    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        """A page of the stored objects, of one namespace or all. Objects that come or go during a scan may be seen or not; others are."""

    @abstractmethod
    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        """What a scan would say of each of these objects; None where there is none. Does not count as a use."""

    @abstractmethod
    def register_namespace(self, record: NamespaceRecord) -> None:
        """Remember whose objects a namespace's are. Repeating it is harmless.

        The latest identity counts; `states` stays once a record of the namespace had it (`NamespaceRecord.over`), for writers of one
        namespace register their pools one after the other, and some of them know of fewer.
        """

    @abstractmethod
    def namespaces(self) -> list[NamespaceRecord]:
        """Every remembered namespace."""

    @abstractmethod
    def usage(self) -> Usage:
        """What the store holds now."""

    @abstractmethod
    def flush(self) -> None:
        """Return once everything acknowledged so far would survive a power cut, as far as the medium can promise it."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Twice is harmless; other methods then raise ClosedError."""

    def outage(self) -> Reason:
        """Why the store answers nothing at present, for the reason of a miss: NONE where it answers. Its latest call decides."""
        return Reason.NONE

    def attach(self, memory: SharedMemory) -> None:  # noqa: B027  most stores have no use for it
        """Buffers of later items may lie in `memory`: a store that is another process may let it move payloads there itself.

        Harmless twice, and for every other store. The memory stays open until `close` of the store returns.
        """

    def scan_all(self, namespace: bytes | None = None) -> Iterator[ScanEntry]:
        """Every entry of a scan, page by page."""
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
