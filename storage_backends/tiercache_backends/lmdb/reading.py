"""Gets of the `lmdb` store: each object is copied from LMDB's map into the caller's buffers and verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from errno import EIO
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from tiercache.core import DIGEST_BYTES, ObjectKey, Outcome
from tiercache.storage.base import GetItem
from tiercache.storage.checksum import MacKey, checksum
from tiercache.storage.vectors import batches, usable
from tiercache_backends.lmdb.environment import DamagedError, Environment, ErrorCounters
from tiercache_backends.lmdb.records import Record, part_key, part_keys, piece_sizes, place_of, proof_of
from tiercache_backends.lmdb.transaction import Pending

_KEYS_PER_TRANSACTION: Final = 1024
"""Maximum number of keys looked up in one transaction.

Transactions are short, because LMDB reuses no given-up pages while a read transaction lasts.
"""
_OBJECTS_PER_TRANSACTION: Final = 64
"""Maximum number of objects read in one transaction."""
_SMALL_BYTES: Final = 64 << 10
"""Maximum length of an object that is read in one transaction with others, in bytes.

Nothing is gained with larger objects. No transaction reads more than 4 MiB in this way.
"""
_CACHED_BYTES: Final = 256 << 10
"""Number of bytes that are copied before they are checked. The processor's cache still holds all of them."""
_GIL_BYTES: Final = 32 << 10
"""Size of a copy in bytes below which the GIL is kept, because releasing the GIL costs more than the copy."""

Verify: TypeAlias = Callable[[Sequence[memoryview]], None]
"""A function that takes the next bytes of a payload, such as the checksum's `add`."""


class BatchResult(NamedTuple):
    """Results of a get for a batch of objects."""

    outcomes: list[Outcome]
    damaged: dict[bytes, int]
    """Numbers of the CORRUPT objects, by place; the caller removes these objects."""


class Reader:
    """Reader of objects, whose methods raise no OSError: failures are counted, and become outcomes or False.

    Thread safety: any thread may call; readers never wait.
    """

    def __init__(
        self, environment: Environment, mac_key: MacKey, pending: Pending, errors: ErrorCounters
    ) -> None:
        self._environment = environment
        self._mac_key = mac_key
        self._has_macs = mac_key.fingerprint is not None
        self._pending = pending
        self._errors = errors

    def present(self, places: Sequence[bytes]) -> list[bool]:
        """Return for each place whether an undamaged object is stored there; False if the look-up fails."""
        answers: list[bool] = []
        for start in range(0, len(places), _KEYS_PER_TRANSACTION):
            some = places[start : start + _KEYS_PER_TRANSACTION]
            try:
                answers += self._environment.read(partial(self._present, some))
            except OSError as error:
                self._errors.failed("a look-up", error)
                answers += [False] * len(some)
        return answers

    def fetch(self, items: Sequence[GetItem]) -> BatchResult:
        """Read objects into their buffers and verify them."""
        found = BatchResult([], {})
        for batch in batches(items, _size, _OBJECTS_PER_TRANSACTION, _OBJECTS_PER_TRANSACTION * _SMALL_BYTES):
            for item, outcome in zip(batch, self._fetch_together(batch), strict=True):
                found.outcomes.append(outcome or self._fetch_alone(item, found.damaged))
        return found

    def _fetch_together(self, items: Sequence[GetItem]) -> Sequence[Outcome | None]:
        """Read small objects in one transaction: HIT or MISS for each, or None.

        None: this item must be read alone, because something about it is unusual, or because something
        failed. Then its buffers may have been written to.
        """
        if len(items) > 1 and not self._pending.any_damaged():
            with suppress(OSError):  # `_fetch_alone` meets it too, and knows the object
                return self._environment.read(partial(self._read_together, items))
        return [None] * len(items)

    def _fetch_alone(self, item: GetItem, damaged: dict[bytes, int]) -> Outcome:
        """Read one object into its buffers and verify it; add a CORRUPT one to `damaged`."""
        if len(item.key.digest) != DIGEST_BYTES:
            return Outcome.MISS
        try:
            return self._environment.read(partial(self._fetch, item, damaged))
        except OSError as error:
            self._errors.failed("a get", error)
            return Outcome.ERROR

    def _present(self, places: Sequence[bytes], txn: Any) -> list[bool]:
        # A digest of another length may be no key of LMDB's at all.
        get, objects = txn.get, self._environment.objects
        if not self._pending.any_damaged():
            return [len(place) == DIGEST_BYTES and get(place, db=objects) is not None for place in places]
        found = [get(place, db=objects) if len(place) == DIGEST_BYTES else None for place in places]
        return [
            value is not None and not self._pending.is_damaged(place, proof_of(value)[0])
            for place, value in zip(places, found, strict=True)
        ]

    def _read_together(self, items: Sequence[GetItem], txn: Any) -> list[Outcome | None]:
        places = [place_of(item.key.digest) for item in items]
        if any(len(place) != DIGEST_BYTES for place in places):
            return [None] * len(items)
        with txn.cursor(self._environment.objects) as cursor:
            stored = cursor.getmulti(places)
        present: Iterable[int] = range(len(items))
        if len(stored) < len(items):
            there = {bytes(key) for key, _ in stored}
            present = [i for i, place in enumerate(places) if place in there]
        outcomes: list[Outcome | None] = [Outcome.MISS] * len(items)
        wanted: list[tuple[int, int, bytes, bytes]] = []  # index of the item, its pieces, checksum and MAC
        keys: list[bytes] = []  # keys of all pieces
        for i, (_, value) in zip(present, stored, strict=True):
            outcomes[i] = None
            number, length, proof, mac = proof_of(value)
            _, buffers, wanted_length = items[i]
            if length == wanted_length and len(buffers) == 1 and usable(buffers, length, writable=True):
                parts = len(piece_sizes(length, self._environment.page_bytes))
                wanted.append((i, parts, proof, mac))
                keys += part_keys(number, parts)
        with txn.cursor(self._environment.parts) as cursor:
            pieces = cursor.getmulti(keys)
        if len(pieces) < len(keys):  # some payload is stored in shorter pieces, or a piece is missing
            return outcomes
        at = 0
        for i, parts, proof, mac in wanted:
            key, buffers, length = items[i]
            if (
                _copy_small(pieces[at : at + parts], length, buffers[0])
                and checksum(key, buffers, length) == proof
                and (not self._has_macs or self._mac_key.mac(key, buffers, length) == mac)
            ):
                outcomes[i] = Outcome.HIT
            at += parts
        return outcomes

    def _fetch(self, item: GetItem, damaged: dict[bytes, int], txn: Any) -> Outcome:
        key, buffers, length = item
        place = place_of(key.digest)
        value = txn.get(place, db=self._environment.objects)
        if value is None:
            return Outcome.MISS
        record = Record.unpack(value)
        if self._pending.is_damaged(place, record.number):
            return Outcome.MISS
        with txn.cursor(self._environment.parts) as cursor:
            if record.length == length and usable(buffers, length, writable=True):
                # Check what is in the buffers, and not the map, because the caller will use the former.
                copier = _Copier(buffers, (verifier := self._mac_key.verifier(key, length)).add)
                whole = _walk(cursor, record.number, length, copier.put)
                copier.end()
                if whole and verifier.matches(record.checksums):
                    return Outcome.HIT
            # A mismatch has two possible causes: another process wrote to the caller's (shared) buffers
            # during the copy, or the stored bytes are damaged. Only damage is a reason to drop the object. So
            # check the bytes in the map, which no caller can change.
            if self._is_sound(cursor, key, record):
                return Outcome.ERROR
        damaged[place] = record.number
        return Outcome.CORRUPT

    def _is_sound(self, cursor: Any, key: ObjectKey, record: Record) -> bool:
        """Return whether the payload in the map has its checksums.

        Raises DamagedError where pieces are missing or too long: damage to a payload alone changes no length.
        """
        verifier = self._mac_key.verifier(key, record.length)
        if not _walk(cursor, record.number, record.length, lambda piece: verifier.add((piece,))):
            raise DamagedError(EIO, f"the {record.length} bytes of an object are not there")
        return verifier.matches(record.checksums)


class _Copier:
    """Copier of pieces into buffers, in order, which passes them to `verify` while they are cached.

    Thread safety: one thread uses it.
    """

    def __init__(self, buffers: Sequence[memoryview], verify: Verify) -> None:
        self._buffers = iter(buffers)
        self._target = np.empty(0, np.uint8)
        self._verify = verify
        self._filled = self._verified = 0

    def put(self, piece: memoryview) -> None:
        """Copy the next piece."""
        #   the present buffer   | verified | filled, in the processor's cache |      |
        #                        0      _verified                           _filled
        source = np.frombuffer(piece, np.uint8)
        while len(source):
            if self._filled == len(self._target):
                self.end()
                self._target = np.frombuffer(next(self._buffers), np.uint8)
                self._filled = self._verified = 0
            start, self._filled = self._filled, min(self._filled + len(source), len(self._target))
            # numpy releases the GIL while it copies; an assignment of views does not.
            np.copyto(self._target[start : self._filled], source[: self._filled - start])
            source = source[self._filled - start :]
        if self._filled - self._verified >= _CACHED_BYTES:
            self.end()

    def end(self) -> None:
        """Pass the bytes that were filled since the last call to `verify`."""
        if self._filled > self._verified:
            self._verify((self._target[self._verified : self._filled].data,))
            self._verified = self._filled


def _walk(cursor: Any, number: int, length: int, use: Callable[[memoryview], None]) -> bool:
    """Pass the pieces of a payload to `use`; return False where a piece is missing or too long."""
    if not cursor.set_range(part_key(number, 0)):
        return False
    for part, (key, piece) in enumerate(cursor.iternext()):
        length -= piece.nbytes
        if length < 0 or key != part_key(number, part):
            return False
        use(piece)
        if not length:
            return True
    return False


def _copy_small(pieces: Sequence[tuple[memoryview, memoryview]], length: int, buffer: memoryview) -> bool:
    """Copy the pieces of a small payload, (key, bytes) each, into one buffer; verify nothing.

    Returns False, and may have copied some of the pieces, unless they have `length` bytes together.
    """
    at = 0
    for _, piece in pieces:
        end = at + len(piece)
        if end > length:
            return False
        if end - at < _GIL_BYTES:
            buffer[at:end] = piece
        else:
            np.copyto(np.frombuffer(buffer[at:end], np.uint8), np.frombuffer(piece, np.uint8))
        at = end
    return at == length


def _size(item: GetItem) -> int:
    """Return the size in bytes with which an item counts in a batch: a large item fills a batch alone."""
    return item.length if item.length <= _SMALL_BYTES else _OBJECTS_PER_TRANSACTION * _SMALL_BYTES
