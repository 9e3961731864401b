"""Verification around a store that does not check what it gives back, and a guard against tampering around any store.

Behind each payload lies a trailer of 32 bytes: the object's checksum, into which the key is mixed, then the MAC of the `Seal`, or zeros
where that has no key. The trailer is part of the object that the inner store sees, written and read by the same vectored call, so that no
payload is copied. It has one size in both cases: if a key is given later, or changed, the old objects are found corrupt, dropped and stored
anew.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Final

from tiercache.core import ObjectKey, Outcome
from tiercache.storage.base import GetItem, ScanEntry, ScanPage, SetItem, StorageBackend, Usage, checksum_of, storable
from tiercache.storage.checksum import CHECKSUM_BYTES, MAC_BYTES, Seal, Sealed
from tiercache.storage.vectors import take, usable
from tiercache.storage.wrappers.base import Wrapper, decide

TRAILER_BYTES: Final = CHECKSUM_BYTES + MAC_BYTES


class Verified(Wrapper):
    """Wrapper that checks each object of `inner` again on every get. CORRUPT objects are deleted, and counted in `usage().details`.

    With a `seal` that has a key, only the key's holders can make an object that passes: an attacker who writes to the medium can make a
    reader miss, but cannot make it read bytes that no holder stored under that object's key. Without a key the check finds accidents.

    The caller guarantees that all objects of `inner` were stored through a `Verified`. An object of `inner` is payload and trailer, and the
    checksum that `inner` is given covers both. The lengths of `scan`, `describe` and `usage` are those of the payloads. The checksum of
    `scan` and `describe` stays the inner store's, because neither reads an object: a caller that stores such an object elsewhere computes
    its checksum anew. A set costs one pass over the payload for the inner store's checksum, and one for the MAC if there is a key, even for
    an object that is stored already, so call `exists` first.

    Thread safety: as `Wrapper`; the one lock that is held across I/O is for second looks at objects that failed, and only they need it.
    """

    def __init__(self, inner: StorageBackend, seal: Seal | None = None) -> None:
        super().__init__(inner)
        self._seal: Final = seal or Seal()
        self._second_look: Final = Lock()
        self._counting: Final = Lock()
        self._corrupt = 0
        self._told_corrupt = 0

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._perform("get", self._get, items)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        return self._perform("set", self._set, items)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        page = super().scan(namespace, cursor)
        return page._replace(entries=[_without_trailer(entry) for entry in page.entries])

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        return [None if entry is None else _without_trailer(entry) for entry in super().describe(keys)]

    def usage(self) -> Usage:
        usage = super().usage()
        inner = usage.details.get("corrupt", self._told_corrupt)
        corrupt = self._corrupt + (inner if isinstance(inner, int) else 0)
        payload = usage.payload_bytes - usage.objects * TRAILER_BYTES
        return replace(usage, payload_bytes=payload, details={**usage.details, "corrupt": corrupt})

    def _get(self, items: Sequence[GetItem]) -> list[Outcome]:
        # Refused here, because the inner store's item has more room than the caller gave: that of a trailer.
        return decide(items, lambda item: None if usable(item.buffers, item.length, writable=True) else Outcome.ERROR, self._read)

    def _read(self, items: Sequence[GetItem]) -> list[Outcome]:
        answers, sound = self._fetch(items)
        self._count_told(items, answers)
        for i, item in enumerate(items):
            if answers[i] is Outcome.HIT and not sound[i]:
                answers[i] = self._look_again(item)
        return answers

    def _look_again(self, item: GetItem) -> Outcome:
        """Read an object that failed once more, and drop it if it still fails.

        Without the lock, one reader could drop it and a writer store it anew before a second reader drops it: an acknowledged object would
        be gone.
        """
        with self._second_look:
            [answer], [sound] = self._fetch([item])
            if answer is not Outcome.HIT or sound:
                return answer
            self._corrupt += 1
            self.inner.delete([item.key])
            return Outcome.CORRUPT

    def _count_told(self, items: Sequence[GetItem], answers: Sequence[Outcome]) -> None:
        """Count the corrupt objects that the inner store found itself: some stores report them in a batch's answers only."""
        told = {item.key.digest for item, answer in zip(items, answers, strict=True) if answer is Outcome.CORRUPT}
        if told:
            with self._counting:
                self._told_corrupt += len(told)

    def _fetch(self, items: Sequence[GetItem]) -> tuple[list[Outcome], list[bool]]:
        """Return what the inner store answers, and which of its hits are what was stored."""
        trailers = [bytearray(TRAILER_BYTES) for _ in items]
        wanted = [
            GetItem(item.key, [*take(item.buffers, 0, item.length), memoryview(trailer)], item.length + TRAILER_BYTES)
            for item, trailer in zip(items, trailers, strict=True)
        ]
        answers = self.inner.get(wanted)
        pairs = zip(items, trailers, answers, strict=True)
        return answers, [answer is Outcome.HIT and self._is_sound(item, bytes(trailer)) for item, trailer, answer in pairs]

    def _is_sound(self, item: GetItem, trailer: bytes) -> bool:
        proof = self._seal.proof(item.key, item.length)
        proof.add(take(item.buffers, 0, item.length))
        return proof.holds(Sealed(trailer[:CHECKSUM_BYTES], trailer[CHECKSUM_BYTES:]))

    def _set(self, items: Sequence[SetItem]) -> list[Outcome]:
        # Objects that are held already are sealed and passed on as well: the inner store must know the whole batch to evict none of it.
        return decide(items, lambda item: None if storable(item) else Outcome.ERROR, self._seal_and_set)

    def _seal_and_set(self, items: Sequence[SetItem]) -> list[Outcome]:
        return self.inner.set([self._sealed(item) for item in items])

    def _sealed(self, item: SetItem) -> SetItem:
        """Return the item with its trailer.

        The caller's checksum goes into the trailer unchecked: if it is wrong, the next get answers CORRUPT.
        """
        length = item.meta.length
        trailer = checksum_of(item) + self._seal.stamp(item.key, item.buffers, length)
        views = [*take(item.buffers, 0, length), memoryview(trailer)]
        whole = length + TRAILER_BYTES
        return SetItem(item.key, views, replace(item.meta, length=whole, checksum=b""))


def _without_trailer(entry: ScanEntry) -> ScanEntry:
    return entry._replace(meta=replace(entry.meta, length=entry.meta.length - TRAILER_BYTES))
