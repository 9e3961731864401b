"""The `s3` backend: the store contract over packs of objects in a bucket, which several processes share."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from threading import Lock
from typing import Any, Final, Self

from tiercache.core import ObjectKey, Outcome
from tiercache.events.base import ChangeNote
from tiercache.storage.base import (
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    StorageBackend,
    StoreContext,
    Usage,
    first_of_each,
    storable,
)
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache.storage.records import MAX_RECORD_BYTES, identity_in, pack_record, unpack_record
from tiercache.storage.store_events import Following
from tiercache.storage.vectors import usable
from tiercache.storage.wrappers import decide, store_once
from tiercache_backends.s3.choices import CodecChoices
from tiercache_backends.s3.directory import BucketDirectory, Pack
from tiercache_backends.s3.failures import AbsentError, RequestError, ShortError
from tiercache_backends.s3.refreshing import BucketListing, Refresher
from tiercache_backends.s3.service import THREADS, BucketClient
from tiercache_backends.s3.settings import S3Settings, read_settings
from tiercache_backends.s3.transfer import PackReader, PackWriter, WantedObject

_log = logging.getLogger(__name__)
_FOLLOW_S: Final = 1.0
"""Minimum seconds from one look for what others have changed to the next, while the store is watched."""
_NAMESPACES: Final = "namespaces"
"""Folder of the records of namespaces."""


class S3Backend(StorageBackend):
    """Store in a bucket of an S3 service, under a prefix that any number of processes share.

    An object is UNAVAILABLE if the service does not answer within the deadline, REFUSED if it refuses the
    credentials, and THROTTLED if it asks to be asked less often.

    Lookups and sets answer from what this process knows of the bucket, which is refreshed behind them. What
    another process writes is found `refresh` seconds after a lookup that misses, or a bit later. What another
    process removes may be found for longer: for as long as the bytes are there, and until the next sweep in
    answers of `exists`. Two processes that store the same object at the same time both write it, and one copy
    is used. `scan`, and `delete` of an object that is not known, wait until what is in the bucket is known.

    Every call returns within its deadline. `settings` explains the section of the configuration.

    Thread safety: as the contract says. No lock is held during a request.
    """

    capabilities = Capabilities(persistent=True, shared=True, ordered=False)

    def __init__(self, settings: S3Settings, env: Env | None = None) -> None:
        """Open the store, and begin to read what is in the bucket, which opening waits for no longer than a
        deadline.

        Raises UnavailableError if the service does not answer, RefusedError if it refuses.
        """
        env = env or Env()
        self._settings: Final = settings
        self._gate = CallGate(f"the store at {settings}", os.getpid)
        self._service = BucketClient(settings)
        self._directory = BucketDirectory(settings.objects)
        listing = BucketListing(self._service, self._directory)
        self._refresher = Refresher(settings, self._service, listing, env.monotonic)
        self._choices = CodecChoices(settings.compression, THREADS)
        self._reader = PackReader(self._service, lambda name: self._directory.forget([name]))
        self._writer = PackWriter(self._service, self._directory, self._choices, settings.pack, env.time_ns)
        self._namespaces = Namespaces(self._service)
        self._following = Following("s3-changes", max(settings.refresh, _FOLLOW_S), self._follow)
        try:
            self._refresher.start()
        except RequestError:
            self._refresher.close()
            self._service.close()
            raise

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        return cls(read_settings(section), context.env)

    @classmethod
    def check_config(cls, section: Mapping[str, Any], context: StoreContext) -> None:
        read_settings(section)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            self._service.check()
            found = self._directory.present(keys)
            self._missed(found.count(False))
            return found

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            return self._get(items)

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            return decide(
                items,
                lambda item: None if storable(item) else Outcome.ERROR,
                lambda sound: store_once(sound, self._set),
            )

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            self._service.check()
            if not all(self._directory.present(keys)):
                self._refresher.sync()
            removal = self._directory.take_out([key.digest for key in keys])
            try:
                self._writer.remove(removal)
            except RequestError:
                self._directory.undo(removal, keep=True)
                raise
            self._directory.removed(removal)
            return first_of_each(keys, set(removal.objects))

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        with self._gate:
            self._service.check()
            if not cursor:
                self._refresher.sync()
            start = int(cursor) if cursor.isdigit() and len(cursor) < 20 else 0
            if cursor and not start:
                return ScanPage([], b"")
            entries, following = self._directory.scan(namespace, start)
            return ScanPage(entries, b"%d" % following if following else b"")

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate:
            self._service.check()
            places = self._directory.find(keys)
            self._missed(places.count(None))
            return [None if place is None else place.scan_entry() for place in places]

    def register_namespace(self, record: NamespaceRecord) -> None:
        with self._gate:
            self._namespaces.register(record)

    def namespaces(self) -> list[NamespaceRecord]:
        with self._gate:
            return self._namespaces.read()

    def usage(self) -> Usage:
        with self._gate:
            self._service.check()
            self._refresher.ask()
            objects, payload, used, figures = self._directory.figures()
            more: dict[str, str | int] = {
                **figures,
                "requests": self._service.requests,
                "unanswered": self._service.unanswered,
                "read_again": self._reader.read_again,
                "listed": int(self._refresher.is_complete),
                "missed_before_listed": self._refresher.early,
                **{f"compression_{pool}": found for pool, found in self._choices.report().items()},
            }
            return Usage(objects, payload, used, 0, more)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        with self._gate:
            pass  # nothing is evicted here

    def watch(self, note: ChangeNote | None) -> bool:
        with self._gate:
            self._directory.watch(note)
            self._following.start()
            return True

    def flush(self) -> None:
        with self._gate:
            pass  # the service acknowledges a put when it has stored it

    def close(self) -> None:
        if self._gate.close():
            self._following.close()
            self._refresher.close()
            self._service.close()

    def _follow(self) -> None:
        """Let the directory learn what others have written and removed; it tells of that."""
        self._refresher.ask()

    def _get(self, items: Sequence[GetItem]) -> list[Outcome]:
        try:
            self._service.check()
        except RequestError as error:
            return [error.outcome_of_get] * len(items)
        places = self._directory.find([item.key for item in items])
        failure = self._refresher.ask(places.count(None)) if None in places else None
        wanted, outcomes = [], dict[int, Outcome]()
        for i, (item, place) in enumerate(zip(items, places, strict=True)):
            if place is None:
                outcomes[i] = Outcome.MISS if failure is None else failure.outcome_of_get
            elif place.entry.meta.length != item.length or not usable(
                item.buffers, item.length, writable=True
            ):
                outcomes[i] = Outcome.ERROR
            else:
                wanted.append(WantedObject(i, item, place))
        outcomes |= self._reader.read(wanted)
        corrupt = {
            one.item.key.digest: one.place.pack for one in wanted if outcomes[one.index] is Outcome.CORRUPT
        }
        if corrupt:
            self._drop(corrupt)
        return [outcomes[i] for i in range(len(items))]

    def _missed(self, objects: int) -> None:
        """Cause a refresh if a call has missed objects; raise RequestError if the last one failed."""
        if objects and (failure := self._refresher.ask(objects)):
            raise failure

    def _drop(self, corrupt: Mapping[bytes, Pack]) -> None:
        """Remove damaged objects, here in any case, and from the bucket if it can be asked."""
        removal = self._directory.take_out(corrupt, only=corrupt)
        self._directory.count_corrupt(len(removal.objects))
        try:
            self._writer.remove(removal)
        except RequestError:
            self._directory.undo(removal, keep=False)
            return
        self._directory.removed(removal)

    def _set(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store well-formed items of different keys."""
        try:
            self._service.check()
            if not all(self._directory.present([item.key for item in items])):
                self._refresher.ask()
        except RequestError as error:
            return [error.outcome_of_set] * len(items)
        self._namespaces.write()
        return self._writer.write(self._directory.plan(items))


class Namespaces:
    """Records of namespaces in the bucket, each of which is an object that is written again at every change.

        namespaces/<namespace in hex>.plain     the latest identity
        namespaces/<namespace in hex>.states    the same, of writers who know that there are states

    Two names, so that a writer without states never takes back what another writer knows.

    Thread safety: any thread may call.
    """

    def __init__(self, service: BucketClient) -> None:
        self._service = service
        self._lock = Lock()  # guards the fields
        self._told: dict[bytes, NamespaceRecord] = {}
        """Records that were registered through this process."""
        self._written: dict[bytes, NamespaceRecord] = {}

    def register(self, record: NamespaceRecord) -> None:
        """Keep a record, and write it now or, if the service cannot be asked, with a later call."""
        with self._lock:
            self._told[record.namespace] = record.over(self._told.get(record.namespace))
        self.write()

    def write(self) -> None:
        """Write the records that have not been written yet, if the service can be asked."""
        with self._lock:
            due = [record for name, record in self._told.items() if self._written.get(name) != record]
        for record in due:
            name = f"{_NAMESPACES}/{record.namespace.hex()}.{'states' if record.states else 'plain'}"
            data = pack_record(dict(record.identity))
            try:
                self._service.overwrite(name, data)
            except RequestError as error:
                _log.debug("a namespace will be registered later: %s", error)
                return
            with self._lock:
                self._written[record.namespace] = record

    def read(self) -> list[NamespaceRecord]:
        """Return the record of every namespace. Raises RequestError."""
        self.write()
        found: dict[bytes, NamespaceRecord] = {}
        # In the order in which they were written, so that the latest identity is kept.
        listed = chain.from_iterable(self._service.pages(_NAMESPACES))
        for entry in sorted(listed, key=lambda entry: (entry.modified, entry.name)):
            hexes, _, kind = entry.name.rpartition(".")
            try:
                data = self._service.contents(
                    f"{_NAMESPACES}/{entry.name}", min(entry.size, MAX_RECORD_BYTES)
                )
                identity = identity_in(unpack_record(data))
                record = NamespaceRecord(bytes.fromhex(hexes), identity, states=kind == "states")
            except (ValueError, AbsentError, ShortError):
                continue  # not of ours, or replaced meanwhile
            found[record.namespace] = record.over(found.get(record.namespace))
        return list(found.values())
