"""Gets of the `lmdb` store: each object is copied from LMDB's map into the caller's buffers and verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from errno import EIO
from functools import partial
from typing import Any, Final, NamedTuple

from tiercache.core import DIGEST_BYTES, Outcome
from tiercache.storage.base import GetItem
from tiercache.storage.checksum import Checksums, MacKey, checksum
from tiercache.storage.vectors import batches, usable
from tiercache_backends.lmdb import payload
from tiercache_backends.lmdb.environment import Environment, ErrorCounters
from tiercache_backends.lmdb.maintenance import Maintenance
from tiercache_backends.lmdb.records import Record, place_of, proof_of
from tiercache_backends.local.failures import DamagedError

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


class ReadResult(NamedTuple):
    """Result of a get for one object."""

    outcome: Outcome
    number: int | None = None
    """Number of the object that was read; None if it has no readable record."""


class BatchResult(NamedTuple):
    """Results of a get for a batch of objects."""

    outcomes: list[Outcome]
    damaged: dict[bytes, int | None]
    """Numbers of the CORRUPT objects, by place; None if an object has no readable record.

    The caller removes these objects.
    """


class Reader:
    """Reader of objects, whose methods raise no OSError: failures are counted, and become outcomes or False.

    Thread safety: any thread may call; readers never wait.
    """

    def __init__(
        self, environment: Environment, mac_key: MacKey, maintenance: Maintenance, errors: ErrorCounters
    ) -> None:
        self._environment = environment
        self._mac_key = mac_key
        self._has_macs = mac_key.fingerprint is not None
        self._maintenance = maintenance
        self._errors = errors

    def present(self, places: Sequence[bytes]) -> list[bool]:
        """Return for each place whether an undamaged object is stored there; False if the look-up fails."""
        answers: list[bool] = []
        for start in range(0, len(places), _KEYS_PER_TRANSACTION):
            some = places[start : start + _KEYS_PER_TRANSACTION]
            try:
                answers += self._look_up(some)
            except OSError as error:
                self._errors.failed("a look-up", error)
                answers += [False] * len(some)
        return answers

    def fetch(self, items: Sequence[GetItem]) -> BatchResult:
        """Read objects into their buffers and verify them."""
        found = BatchResult([], {})
        for batch in batches(items, _size, _OBJECTS_PER_TRANSACTION, _OBJECTS_PER_TRANSACTION * _SMALL_BYTES):
            for item, outcome in zip(batch, self._fetch_together(batch), strict=True):
                if outcome is None:
                    outcome, number = self._fetch_alone(item)
                    if outcome is Outcome.CORRUPT:
                        found.damaged[place_of(item.key.digest)] = number
                found.outcomes.append(outcome)
        return found

    def _fetch_together(self, items: Sequence[GetItem]) -> Sequence[Outcome | None]:
        """Read small objects in one transaction: HIT or MISS for each, or None.

        None: this item must be read alone, because something about it is unusual, or because something
        failed. Then its buffers may have been written to.
        """
        if len(items) > 1 and not self._maintenance.any_damaged():
            try:
                return self._environment.read(partial(self._read_together, items))
            except OSError:
                pass  # `_fetch_alone` meets the same failure, and tells which objects it concerns
        return [None] * len(items)

    def _fetch_alone(self, item: GetItem) -> ReadResult:
        """Read one object into its buffers and verify it."""
        if len(item.key.digest) != DIGEST_BYTES:
            return ReadResult(Outcome.MISS)
        met: list[int] = []
        try:
            return self._environment.read(partial(self._fetch, item, met))
        except DamagedError as error:
            self._errors.failed("a get", error)
            # With a number in `met`, the damage is in the object's payload; otherwise it may be anywhere.
            return ReadResult(Outcome.CORRUPT, met[0]) if met else ReadResult(Outcome.ERROR)
        except OSError as error:
            self._errors.failed("a get", error)
            return ReadResult(Outcome.ERROR)

    def _look_up(self, places: Sequence[bytes]) -> list[bool]:
        """Return which objects are stored; if the look-up meets damage, look up each half by itself.

        In the end only objects that cannot be read count as absent.
        """
        try:
            return self._environment.read(partial(self._present, places))
        except DamagedError as error:
            if len(places) == 1:
                self._errors.failed("a look-up", error)
                return [False]
        middle = len(places) // 2
        return self._look_up(places[:middle]) + self._look_up(places[middle:])

    def _present(self, places: Sequence[bytes], txn: Any) -> list[bool]:
        # In `objects` a key of another length than a place holds a count of dependents (records.py).
        get, objects = txn.get, self._environment.objects
        if not self._maintenance.any_damaged():
            return [len(place) == DIGEST_BYTES and get(place, db=objects) is not None for place in places]
        answers: list[bool] = []
        for place in places:
            record = Record.unpack(get(place, b"", db=objects)) if len(place) == DIGEST_BYTES else None
            answers.append(record is not None and not self._maintenance.is_damaged(place, record.number))
        return answers

    def _read_together(self, items: Sequence[GetItem], txn: Any) -> list[Outcome | None]:
        places = [place_of(item.key.digest) for item in items]
        # In `objects` a key of another length than a place holds a count of dependents (records.py).
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
                parts = len(payload.piece_sizes(length, self._environment.page_bytes))
                wanted.append((i, parts, proof, mac))
                keys += payload.part_keys(number, parts)
        with txn.cursor(self._environment.parts) as cursor:
            pieces = cursor.getmulti(keys)
        if len(pieces) < len(keys):  # some payload is stored in shorter pieces, or a piece is missing
            return outcomes
        at = 0
        for i, parts, proof, mac in wanted:
            key, buffers, length = items[i]
            if (
                payload.copy_whole(pieces[at : at + parts], length, buffers[0])
                and checksum(key, buffers, length) == proof
                and (not self._has_macs or self._mac_key.mac(key, buffers, length) == mac)
            ):
                outcomes[i] = Outcome.HIT
            at += parts
        return outcomes

    def _fetch(self, item: GetItem, met: list[int], txn: Any) -> ReadResult:
        """Read and verify one object; append its number to `met` before its payload is read."""
        key, buffers, length = item
        place = place_of(key.digest)
        value = txn.get(place, db=self._environment.objects)
        if value is None:
            return ReadResult(Outcome.MISS)
        record = Record.unpack(value)
        if record is None:
            self._environment.note_damage()
            return ReadResult(Outcome.CORRUPT)
        if self._maintenance.is_damaged(place, record.number):
            return ReadResult(Outcome.MISS)
        met.append(record.number)
        verifier = self._mac_key.verifier(key, length)
        with txn.cursor(self._environment.parts) as cursor:
            if record.length != length or not usable(buffers, length, writable=True):
                _check_whole(cursor, record)
                return ReadResult(Outcome.ERROR)
            whole = payload.read(cursor, record.number, length, buffers, verifier.add)
            checksums = Checksums(record.checksum, record.mac)
            if whole and verifier.matches(checksums):
                return ReadResult(Outcome.HIT, record.number)
            # A mismatch has two possible causes: another process wrote to the caller's (shared) buffers
            # during the copy, or the stored bytes are damaged. Only damage is a reason to drop the object. So
            # check the bytes in the map, which no caller can change.
            _check_whole(cursor, record)
            again = self._mac_key.verifier(key, length)
            sound = payload.verify_in_map(cursor, record.number, length, again.add) and again.matches(
                checksums
            )
        return (
            ReadResult(Outcome.ERROR, record.number) if sound else ReadResult(Outcome.CORRUPT, record.number)
        )


def _check_whole(cursor: Any, record: Record) -> None:
    """Raise DamagedError unless the pieces of a payload have its length.

    Without that, the record or LMDB's trees are damaged. Damage to the payload alone costs the object alone.
    """
    if (found := payload.stored_bytes(cursor, record.number)) != record.length:
        raise DamagedError(EIO, f"{found} bytes are found of an object of {record.length}")


def _size(item: GetItem) -> int:
    """Return the size in bytes with which an item counts in a batch: a large item fills a batch alone."""
    return item.length if item.length <= _SMALL_BYTES else _OBJECTS_PER_TRANSACTION * _SMALL_BYTES
