"""Examination of a store with a small object, the *canary*."""

from __future__ import annotations

import os
from typing import Final

from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import StorageError, UnavailableError
from tiercache.keys import KEY_BYTES
from tiercache.storage.base import GetItem, SetItem, StorageBackend

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
