"""Gets of the `lmdb` store: each object is copied from LMDB's map into the caller's buffers and verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from errno import EIO
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from tiercache.core import DIGEST_BYTES, ObjectKey, Outcome
from tiercache.storage.base import GetItem
from tiercache.storage.checksum import MacKey, checksum
from tiercache.storage.vectors import batches, usable
from tiercache_backends.lmdb.environment import DamagedError, Environment, ErrorCounters
from tiercache_backends.lmdb.records import Record, cut, part_key, piece_sizes, proof_of
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

    def present(self, digests: Sequence[bytes]) -> list[bool]:
        """Return for each digest whether an undamaged object is stored; False if the look-up fails."""
        answers: list[bool] = []
        for start in range(0, len(digests), _KEYS_PER_TRANSACTION):
            some = digests[start : start + _KEYS_PER_TRANSACTION]
            try:
                answers += self._environment.read(partial(self._present, some))
            except OSError as error:
                self._errors.failed("a look-up", error)
                answers += [False] * len(some)
        return answers

    def fetch(self, items: Sequence[GetItem], damaged: dict[bytes, int]) -> list[Outcome]:
        """Read objects into their buffers and verify them; add numbers of CORRUPT ones to `damaged`."""
        outcomes: list[Outcome] = []
        for batch in batches(items, _size, _OBJECTS_PER_TRANSACTION, _OBJECTS_PER_TRANSACTION * _SMALL_BYTES):
            try:
                outcomes += self._environment.read(partial(self._read, batch, damaged))
            except OSError as error:
                outcomes += [self._errors.failed("a get", error)] * len(batch)
        return outcomes

    def _present(self, digests: Sequence[bytes], txn: Any) -> list[bool]:
        # A digest of another length may be no key of LMDB's at all.
        get, db, pending = txn.get, self._environment.objects, self._pending
        found = [get(digest, db=db) if len(digest) == DIGEST_BYTES else None for digest in digests]
        if not pending.damaged:
            return [value is not None for value in found]
        return [
            value is not None and not pending.is_damaged(digest, proof_of(value)[0])
            for digest, value in zip(digests, found, strict=True)
        ]

    def _read(self, items: Sequence[GetItem], damaged: dict[bytes, int], txn: Any) -> list[Outcome]:
        """Read objects in one transaction into their buffers; add those that are CORRUPT to `damaged`."""
        together = len(items) > 1 and not self._pending.damaged
        found = self._read_together(items, txn) if together else [None] * len(items)
        return [
            outcome or self._read_alone(item, damaged, txn)
            for item, outcome in zip(items, found, strict=True)
        ]

    def _read_together(self, items: Sequence[GetItem], txn: Any) -> list[Outcome | None]:
        """Read small objects with few calls of LMDB: HIT or MISS for each, or None.

        None: this item must be read alone, because something about it is unusual; its buffers may have been
        written to.
        """
        digests = [item.key.digest for item in items]
        if any(len(digest) != DIGEST_BYTES for digest in digests):
            return [None] * len(items)
        with txn.cursor(self._environment.objects) as cursor:
            stored = cursor.getmulti(digests)
        present: Iterable[int] = range(len(items))
        if len(stored) < len(items):
            there = {bytes(key) for key, _ in stored}
            present = [i for i, digest in enumerate(digests) if digest in there]
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
                keys += [part_key(number, part) for part in range(parts)]
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

    def _read_alone(self, item: GetItem, damaged: dict[bytes, int], txn: Any) -> Outcome:
        key, buffers, length = item
        digest = key.digest
        value = txn.get(digest, db=self._environment.objects) if len(digest) == DIGEST_BYTES else None
        if value is None:
            return Outcome.MISS
        record = Record.unpack(value)
        if self._pending.is_damaged(digest, record.number):
            return Outcome.MISS
        with txn.cursor(self._environment.parts) as cursor:
            if record.length == length and usable(buffers, length, writable=True):
                # Check what is in the buffers, and not the map, because the caller will use the former.
                verifier = self._mac_key.verifier(key, length)
                pieces = _pieces(cursor, record.number, length)
                if pieces is not None:
                    _copy(pieces, buffers, verifier.add)
                    if verifier.matches(record.checksums):
                        return Outcome.HIT
            # A mismatch has two possible causes: another process wrote to the caller's (shared) buffers
            # during the copy, or the stored bytes are damaged. Only damage is a reason to drop the object. So
            # check the bytes in the map, which no caller can change.
            if self._is_sound(cursor, key, record):
                return Outcome.ERROR
        damaged[digest] = record.number
        return Outcome.CORRUPT

    def _is_sound(self, cursor: Any, key: ObjectKey, record: Record) -> bool:
        """Return whether the payload in the map has its checksums.

        Raises DamagedError where pieces are missing or too long: damage to a payload alone changes no length.
        """
        verifier = self._mac_key.verifier(key, record.length)
        pieces = _pieces(cursor, record.number, record.length)
        if pieces is None:
            raise DamagedError(EIO, f"the {record.length} bytes of an object are not there")
        verifier.add(pieces)
        return verifier.matches(record.checksums)


def _pieces(cursor: Any, number: int, length: int) -> list[memoryview] | None:
    """Return the pieces of a payload; None where a piece is missing or too long."""
    pieces: list[memoryview] = []
    if cursor.set_range(part_key(number, 0)):
        for part, (key, piece) in enumerate(cursor.iternext()):
            length -= piece.nbytes
            if length < 0 or key != part_key(number, part):
                break
            pieces.append(piece)
            if not length:
                return pieces
    return None


def _copy(pieces: Sequence[memoryview], buffers: Sequence[memoryview], verify: Verify) -> None:
    """Copy pieces into buffers, and pass what was copied to `verify` while it is cached."""
    copied: list[memoryview] = []
    nbytes = 0
    for piece, targets in zip(pieces, cut(buffers, map(len, pieces)), strict=False):
        source, at = np.frombuffer(piece, np.uint8), 0
        for target in targets:
            # numpy releases the GIL while it copies; an assignment of views does not.
            np.copyto(np.frombuffer(target, np.uint8), source[at : at + target.nbytes])
            at += target.nbytes
        copied += targets
        nbytes += at
        if nbytes >= _CACHED_BYTES:
            verify(copied)
            copied, nbytes = [], 0
    verify(copied)


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
