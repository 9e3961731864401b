"""One tier of a chain: the calls of its store, what came of them, and the check of its settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import InputError, RefusedError, StorageError, UnavailableError
from tiercache.storage.attached import withheld
from tiercache.storage.base import (
    Capabilities,
    GetItem,
    ScanEntry,
    ScanPage,
    SetItem,
    StorageBackend,
    TierReport,
    Usage,
)
from tiercache.storage.env import Env
from tiercache.storage.guard import MIN_BYTES_PER_SECOND, BytesInFlight, Guard, NoThreadError, PendingCall
from tiercache.storage.registry import check_backend
from tiercache.storage.shares import OwnerUse
from tiercache_backends.chain.health import KEY_BYTES, MonitoredStore
from tiercache_backends.chain.lending import LentGets, LentSets, PrivateMemory
from tiercache_backends.chain.settings import CANARY, TierSettings, check_together

_log = logging.getLogger(__name__)

T = TypeVar("T")

_FLUSH_DEADLINES: Final = 3
"""Number of deadlines that a flush may take, because much may have to be written."""


class Tier(MonitoredStore):
    """Tier of a chain: the calls of its store, with figures, and with buffers that a late call cannot harm.

    The caller guarantees that items are well formed (`storable`, `usable`).

    Thread safety: any thread.
    """

    def __init__(
        self,
        settings: TierSettings,
        open_store: Callable[[], StorageBackend],
        capabilities: Capabilities,
        env: Env,
    ) -> None:
        super().__init__(settings, open_store, capabilities, env)
        self._private: Final = PrivateMemory()
        self._in_flight: Final = BytesInFlight(settings.in_flight)
        self._acknowledged = 0
        """Number of objects that callers have stored here and, if the tier is persistent, copies too."""
        self._flushed = 0
        """Number of those objects that were flushed."""
        self.owners: Mapping[str, OwnerUse] = {}
        """Bytes of each owner at the last `report`; empty while the tier is out or keeps no shares."""

    def withheld(self, items: Sequence[GetItem]) -> list[bool]:
        """Return for each item whether a call that was given up may still write to its buffers."""
        return withheld(items, self._memories)

    @property
    def is_busy(self) -> bool:
        """Whether so many bytes are under way that gets and sets are THROTTLED."""
        return self._in_flight.is_full

    def get(self, items: Sequence[GetItem], *, is_use: bool = True, owned: bool = False) -> list[Outcome]:
        """Read objects; THROTTLED for all if the tier is busy, UNAVAILABLE if it is out or does not answer.

        If the get is no use of the objects, it is a peek. `owned`: it is for a copy of the chain's own, and
        waits while the tier is busy. The caller does not use the buffers again if that is UNAVAILABLE.
        """
        nbytes = sum(item.length for item in items)
        if not self._in_flight.enter(nbytes, self.settings.deadline if owned else 0.0):
            return [Outcome.UNAVAILABLE if owned else Outcome.THROTTLED] * len(items)
        with self._in_flight.undone(nbytes):
            loan = None if owned else LentGets(items, self._memories, self._private)
        lent = items if loan is None else loan.items
        try:
            call = self._begin(
                "get" if is_use else "peek",
                lambda store: _each((store.get if is_use else store.peek)(lent), items),
                nbytes,
                None if loan is None else loan.give_up,
                self._leave(nbytes),
            )
            outcomes = self._end(call)
        except StorageError:
            return [Outcome.UNAVAILABLE] * len(items)
        if loan is not None:
            loan.collect(outcomes)
        self._judge(outcomes)
        if is_use:
            hits = zip(items, outcomes, strict=True)
            self.figures.note_read([item.length for item, out in hits if out is Outcome.HIT])
        return outcomes

    def set(
        self, items: Sequence[SetItem], deleted: AbstractSet[bytes], *, owned: bool = False
    ) -> list[Outcome]:
        """Store objects; UNAVAILABLE for all if the tier is out or does not answer, THROTTLED if it is busy.

        `deleted`: digests that were deleted since the operation of this set began, also during this call.
        `owned`: the set is a copy of the chain's own, and its buffers do not change after the call. It waits
        while the tier is busy.

        A set that is given up may store its objects later. Until it has returned, the tier stays out:

            1. set: object 5 hangs, and is given up; the tier is out
            2. delete: the tier is out, so the deletion of object 5 waits for it
            3. the set returns, and has stored object 5
            4. examination: makes the deletions that wait, before the tier serves again
        """
        nbytes = sum(item.meta.length for item in items)
        if not self._in_flight.enter(nbytes, self.settings.deadline if owned else 0.0):
            return [Outcome.UNAVAILABLE if owned else Outcome.THROTTLED] * len(items)
        with self._in_flight.undone(nbytes):
            loan = None if owned else LentSets(items, self._memories, self._private)
        lent = items if loan is None else loan.items

        def give_up() -> Callable[[], None]:
            end = None if loan is None else loan.give_up()
            with self._lock:
                self._hung_sets += 1
                self._deletions.update(
                    (item.key.digest, item.key) for item in items if item.key.digest in deleted
                )

            def ended() -> None:
                if end is not None:
                    end()
                with self._lock:
                    self._hung_sets -= 1

            return ended

        try:
            call = self._begin(
                "set", lambda store: _each(store.set(lent), items), nbytes, give_up, self._leave(nbytes)
            )
            outcomes = self._end(call)
        except StorageError:
            return [Outcome.UNAVAILABLE] * len(items)
        if loan is not None:
            loan.end()
        self._judge(outcomes)
        stored = [
            item.meta.length for item, out in zip(items, outcomes, strict=True) if out is Outcome.STORED
        ]
        self.figures.note_written(stored)
        if not owned or self.capabilities.persistent:
            with self._lock:
                self._acknowledged += len(stored)
        return outcomes

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return which objects the tier has; raises StorageError if it cannot be asked."""
        if not keys:
            return []
        return self.call("exists", lambda store: _each(store.exists(keys), keys), len(keys) * KEY_BYTES)

    def lacking(self, entries: Sequence[ScanEntry]) -> list[ScanEntry]:
        """Return those of the objects that the tier lacks; raises StorageError if it cannot be asked."""
        held = self.exists([entry.key for entry in entries])
        return [entry for entry, there in zip(entries, held, strict=True) if not there]

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        """Return the entries of objects in the tier; raises StorageError if it cannot be asked."""
        if not keys:
            return []
        found = self.call("describe", lambda store: _each(store.describe(keys), keys), len(keys) * KEY_BYTES)
        return [
            None if entry is None or entry.meta.namespace == CANARY else entry._replace(tier=self.name)
            for entry in found
        ]

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        """Return a part of the objects, without canaries; raises StorageError if it cannot be asked."""
        page = self.call("scan", lambda store: store.scan(namespace, cursor))
        return page._replace(entries=[entry for entry in page.entries if entry.meta.namespace != CANARY])

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int) -> None:
        """Pass on the values of objects; nothing happens if the tier does not answer."""
        given, said = list(keys), list(values)  # a call that is given up may still use its arguments
        with suppress(StorageError):
            self.call("advise", lambda store: store.advise(given, said, worker), len(given) * KEY_BYTES)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Remove objects, now or when the tier is back; return which were there and are removed now.

        Raises RefusedError if the tier is read-only and has one of them, UnavailableError if it is read-only
        and out, or if too many deletions wait for the tier.
        """
        if self.settings.read_only:
            return self._keep(keys)
        while True:
            try:
                call = self._begin(
                    "delete", lambda store: _each(store.delete(keys), keys), len(keys) * KEY_BYTES
                )
            except UnavailableError:
                if self.note_deletions(keys):
                    return [False] * len(keys)
                continue  # it has just come back
            try:
                gone = self._end(call)
                if not self._takes_writes and self.is_readable:
                    self._keep(keys)
            except (RefusedError, NoThreadError):
                raise
            except StorageError as error:
                self.note_deletions(keys, f"a deletion failed: {error}")
                return [False] * len(keys)
            return gone

    def _keep(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Answer a deletion where nothing is deleted; raises RefusedError if an object is there."""
        if held := sum(self.exists(keys)):
            raise RefusedError(
                f"tier {self.name!r} is read-only and has {held} of these objects; delete them with the"
                " process that writes it"
            )
        return [False] * len(keys)

    def begin_flush(self, nbytes: int = 0) -> Callable[[], None]:
        """Begin to flush the store; the function that is returned waits for the end.

        `nbytes`: bytes that were stored lately, for which it gets more time. Both raise StorageError.
        """
        acknowledged = self._acknowledged
        seconds = _FLUSH_DEADLINES * self.settings.deadline + nbytes / MIN_BYTES_PER_SECOND
        call = self._begin("flush", lambda store: store.flush(), seconds=seconds)

        def end() -> None:
            self._end(call)
            self._flushed = max(self._flushed, acknowledged)

        return end

    @property
    def unflushed(self) -> int:
        """Number of objects stored here since the last flush; in memory, copies do not count."""
        return self._acknowledged - self._flushed

    def report(self, waiting: int) -> TierReport:
        """Return contents and figures of the tier; no contents while it is out."""
        usage = Usage(0, 0, 0, 0)
        with suppress(StorageError):
            usage = self.call("usage", lambda store: store.usage())
        self.owners = usage.owners
        return TierReport(
            name=self.name,
            kind=self.kind,
            health=str(self.health),
            why=self.why,
            objects=usage.objects,
            payload_bytes=usage.payload_bytes,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            waiting=waiting,
            lost_calls=self._guard.lost,
            details=dict(usage.details),
            **self.figures.counters(),
        )

    def _leave(self, nbytes: int) -> Callable[[], None]:
        return partial(self._in_flight.leave, nbytes)

    def _judge(self, outcomes: Sequence[Outcome]) -> None:
        """Tell the breaker what a get or set was like.

        Errors alone may be the caller's fault, so they only make the tier due for an examination. Otherwise
        one tenant's wrong lengths could take the tier from all others.
        """
        if not outcomes:
            return
        kinds = set(outcomes)
        if kinds <= {Outcome.UNAVAILABLE, Outcome.REFUSED}:
            self._guard.failed(f"it answers {min(kinds)}")
            return
        self._guard.succeeded()
        if kinds == {Outcome.ERROR}:
            self.suspect()


def _each(answers: Sequence[T], asked: Sequence[Any]) -> list[T]:
    """Return the answers of a call; raises ValueError, a breach of the contract, if their number is wrong."""
    if len(answers) != len(asked):
        raise ValueError(f"{len(answers)} answers came for {len(asked)} objects")
    return list(answers)


def check_stores(tiers: Sequence[TierSettings], env: Env) -> list[TierSettings]:
    """Return the settings of the tiers with the places at which their stores are when links are followed.

    All stores are checked at the same time, each for at most the deadline of its tier. One that is sick keeps
    its settings as they are. Raises ConfigError for a setting that a store refuses and for two tiers at one
    place, and StorageError for a directory that a store refuses.
    """
    guard = Guard("tiers", len(tiers), max((tier.deadline for tier in tiers), default=0.0))
    try:
        checks = [
            guard.begin(f"a check of {tier.name!r}", partial(_check, tier, env), seconds=tier.deadline)
            for tier in tiers
        ]
        # The mistakes are raised when all checks are over, so that none of their threads is left behind.
        answers = [_answer(tier, check) for tier, check in zip(tiers, checks, strict=True)]
    finally:
        guard.close()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    found = [answer for answer in answers if isinstance(answer, TierSettings)]
    check_together(found)
    return found


def _check(tier: TierSettings, env: Env) -> TierSettings:
    check_backend(tier.section, env=env)
    return replace(tier, place=env.realpath(tier.place)) if tier.place.startswith("/") else tier


def _answer(tier: TierSettings, check: PendingCall[TierSettings]) -> TierSettings | Exception:
    """Return what a check has found: settings, or the mistake to be raised."""
    try:
        return check.result()
    except OSError as error:
        # A StorageError is an OSError too: what a store says of its directory is no failure of the disk.
        if isinstance(error, StorageError) and not isinstance(error, UnavailableError):
            return _named(tier, error)
        _log.warning("tier %s cannot be checked: %s", tier.name, error)
        return tier
    except InputError as error:
        return _named(tier, error)


def _named(tier: TierSettings, error: Exception) -> Exception:
    error.args = (f"tier {tier.name!r}: {error}",)
    return error
