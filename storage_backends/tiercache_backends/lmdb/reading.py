"""Gets of the `lmdb` store: one object at a time, from LMDB's map into the caller's buffers, verified on the way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from tiercache.core import Outcome
from tiercache.storage.base import DIGEST_BYTES, GetItem
from tiercache.storage.checksum import Seal, Sealed
from tiercache.storage.vectors import usable
from tiercache_backends.lmdb import payload
from tiercache_backends.lmdb.chores import Chores
from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.lmdb.records import Record, place_of
from tiercache_backends.lmdb.tally import Tally
from tiercache_backends.local.failures import DamagedError

_AT_ONCE: Final = 1024
"""Keys looked up in one transaction, at most: LMDB pages that are given up meanwhile cannot be reused before it ends."""


class Found(NamedTuple):
    """Result of a get. `number`: the number of the object that it met.

    Where the outcome is CORRUPT, that object is to be removed; None stands for one without a readable record.
    """

    outcome: Outcome
    number: int | None = None


class Reader:
    """Reader of objects. Its methods raise no OSError: failures are counted, and become outcomes or False.

    Thread safety: any thread may call; readers never wait.
    """

    def __init__(self, environment: Environment, seal: Seal, chores: Chores, tally: Tally) -> None:
        self._environment = environment
        self._seal = seal
        self._chores = chores
        self._tally = tally

    def present(self, places: Sequence[bytes]) -> list[bool]:
        """Return which objects are there and not known to be damaged; False for all that cannot be looked up."""
        answers: list[bool] = []
        for start in range(0, len(places), _AT_ONCE):
            some = places[start : start + _AT_ONCE]
            try:
                answers += self._look_up(some)
            except OSError as error:
                self._tally.failed("a look-up", error)
                answers += [False] * len(some)
        return answers

    def fetch(self, item: GetItem) -> Found:
        """Read one object into its buffers and verify it."""
        if len(item.key.digest) != DIGEST_BYTES:
            return Found(Outcome.MISS)
        met: list[int] = []
        try:
            return self._environment.read(partial(self._fetch, item, met))
        except DamagedError as error:
            self._tally.failed("a get", error)
            return Found(Outcome.CORRUPT, met[0]) if met else Found(Outcome.ERROR)
        except OSError as error:
            self._tally.failed("a get", error)
            return Found(Outcome.ERROR)

    def _look_up(self, places: Sequence[bytes]) -> list[bool]:
        """Return which objects are there; where damage is met, look up halves, so that only what cannot be read counts as absent."""
        try:
            return self._environment.read(partial(self._present, places))
        except DamagedError as error:
            if len(places) == 1:
                self._tally.failed("a look-up", error)
                return [False]
        middle = len(places) // 2
        return self._look_up(places[:middle]) + self._look_up(places[middle:])

    def _present(self, places: Sequence[bytes], txn: Any) -> list[bool]:
        get, objects = txn.get, self._environment.objects
        if not self._chores.any_spoiled():
            return [len(place) == DIGEST_BYTES and get(place, db=objects) is not None for place in places]
        found = ((place, Record.unpack(get(place, b"", db=objects)) if len(place) == DIGEST_BYTES else None) for place in places)
        return [record is not None and not self._chores.is_spoiled(place, record.number) for place, record in found]

    def _fetch(self, item: GetItem, met: list[int], txn: Any) -> Found:
        """Read and verify one object; append its number to `met` before its payload is read."""
        key, buffers, length = item
        place = place_of(key.digest)
        value = txn.get(place, db=self._environment.objects)
        if value is None:
            return Found(Outcome.MISS)
        record = Record.unpack(value)
        if record is None:
            return Found(Outcome.CORRUPT)
        if self._chores.is_spoiled(place, record.number):
            return Found(Outcome.MISS)
        if record.length != length or not usable(buffers, length, writable=True):
            return Found(Outcome.ERROR)
        met.append(record.number)
        proof = self._seal.proof(key, length)
        with txn.cursor(self._environment.parts) as cursor:
            whole = payload.read(cursor, record.number, length, buffers, proof.add)
            sealed = Sealed(record.checksum, record.mac)
            if whole and proof.holds(sealed):
                return Found(Outcome.HIT, record.number)
            # Another process may have written to the buffers meanwhile, which is no reason to drop a sound object: look at it in the map.
            again = self._seal.proof(key, length)
            sound = payload.look(cursor, record.number, length, again.add) and again.holds(sealed)
        return Found(Outcome.ERROR, record.number) if sound else Found(Outcome.CORRUPT, record.number)
