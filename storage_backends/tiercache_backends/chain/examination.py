"""Examination of a store: a small object, the *canary*, and what the store has missed while it was out."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import RefusedError, StorageError, UnavailableError
from tiercache.keys import KEY_BYTES
from tiercache.storage.attached import AttachedMemory
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem, SharedMemory, StorageBackend
from tiercache.storage.shares import Shares

CANARY: Final = b"tiercache canary"
"""Namespace of canaries, and begin of their layout digest; an object of it is left by a process that died."""
_NBYTES: Final = 64


def answers(store: StorageBackend) -> None:
    """Ask a store for an object that no store has; raises StorageError if the store does not answer."""
    store.exists([_key()])


def takes_objects(store: StorageBackend) -> bool:
    """Store, read and delete a canary; return False if the store answers, but takes no new objects.

    Raises StorageError if the store does not answer, or returns other bytes than it was given.
    """
    key, payload, read = _key(), os.urandom(_NBYTES), bytearray(_NBYTES)
    [stored] = store.set([SetItem(key, [memoryview(payload)], ObjectMeta(CANARY, _NBYTES, b""))])
    if stored is not Outcome.STORED:
        answers(store)  # a store that cannot be reached says why
        if stored is Outcome.UNAVAILABLE:
            raise UnavailableError("it takes no objects, though it answers")
        return False
    [found] = store.get([GetItem(key, [memoryview(read)], _NBYTES)])
    store.delete([key])
    if found is not Outcome.HIT or read != payload:
        raise StorageError(f"it does not return what it has just stored ({found})")
    return True


def _key() -> ObjectKey:
    """Return a key that no other object and no other process has."""
    return ObjectKey(PoolName.KV, CANARY.ljust(KEY_BYTES, b"\0") + os.urandom(KEY_BYTES))


_log = logging.getLogger(__name__)

_MAX_DELETIONS: Final = 1 << 16
"""Maximum number of deletions that are remembered for a store that is left out."""


class Arrears(NamedTuple):
    """Part of a backlog of which one examination tells the store."""

    deletions: Sequence[ObjectKey]
    namespaces: Sequence[NamespaceRecord]
    memories: Sequence[AttachedMemory]
    shares: Shares | None
    version: int

    def tell(self, store: StorageBackend, tier: str, *, takes_writes: bool) -> None:
        """Tell the store of the tier named `tier`; raises StorageError if it fails."""
        if self.deletions:
            try:
                store.delete(self.deletions)
            except RefusedError as error:  # it would refuse them again
                _log.warning("tier %s keeps objects that were deleted while it was out: %s", tier, error)
        if takes_writes:
            for record in self.namespaces:
                store.register_namespace(record)
        for attached in self.memories:
            store.attach(attached.memory)
        if self.shares is not None:
            store.share(self.shares)


class Backlog:
    """Deletions, namespaces and memory of which a store must be told before it serves.

    Thread safety: guarded by the lock of its store.
    """

    def __init__(self) -> None:
        self._deletions: dict[bytes, ObjectKey] = {}
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        self._memories: dict[int, AttachedMemory] = {}
        self._shares: Shares | None = None
        self._version = 0
        """Number of changes of `_memories`, `_namespaces` and `_shares`."""
        self._told = 0
        """Version of which the store was told last."""

    @property
    def is_settled(self) -> bool:
        """Whether the store was told of everything."""
        return not self._deletions and self._told == self._version

    @property
    def deletions(self) -> int:
        """Number of deletions that wait."""
        return len(self._deletions)

    @property
    def memories(self) -> list[AttachedMemory]:
        """Memory that is attached."""
        return list(self._memories.values())

    def delete(self, keys: Iterable[ObjectKey]) -> bool:
        """Remember deletions; return False if there are too many, so that some are not remembered."""
        self._deletions.update((key.digest, key) for key in keys)
        fits = len(self._deletions) <= _MAX_DELETIONS
        while len(self._deletions) > _MAX_DELETIONS:
            self._deletions.popitem()
        return fits

    def register(self, record: NamespaceRecord) -> NamespaceRecord:
        """Remember a namespace; return its record with what was known of it before."""
        record = record.over(self._namespaces.get(record.namespace))
        if self._namespaces.get(record.namespace) != record:
            self._namespaces[record.namespace] = record
            self._version += 1
        return record

    def attach(self, memory: SharedMemory) -> None:
        """Remember memory."""
        self._memories[id(memory)] = AttachedMemory(memory, memory.address, memory.nbytes)
        self._version += 1

    def share(self, shares: Shares) -> Shares | None:
        """Remember shares; return those that were remembered before."""
        was, self._shares = self._shares, shares
        self._version += 1
        return was

    def take(self) -> Arrears:
        """Return what the store has to be told now."""
        return Arrears(
            list(self._deletions.values()),
            list(self._namespaces.values()),
            self.memories,
            self._shares,
            self._version,
        )

    def settle(self, told: Arrears) -> None:
        """Forget what the store was told."""
        for key in told.deletions:
            self._deletions.pop(key.digest, None)
        self._told = told.version

    def take_over(self, arrears: Arrears) -> None:
        """Add what another tier's store was not told, without its memory."""
        self._deletions.update((key.digest, key) for key in arrears.deletions)
        for record in arrears.namespaces:
            self._namespaces.setdefault(record.namespace, record)
