"""The class that LMCache calls as its L2 adapter, with a store of tiercache behind it."""

# ruff: noqa: D102 (LMCache's interface and the docstring of the package document these methods)

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock, local
from typing import Annotated, Any, Final

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import StorageError
from tiercache.integrations.announcements import Announcements, EvictionWatch
from tiercache.integrations.lmcache.identity import ChunkKeys, Layout, layout_of
from tiercache.integrations.lmcache.tasks import Tasks
from tiercache.integrations.settings import StoreSettings, profile_for
from tiercache.settings import read_section, whole
from tiercache.storage.base import GetItem, SetItem, StorageBackend, Usage

_log = logging.getLogger(__name__)

_PIECE, _KEYS = 8 << 20, 1 << 12
"""Bytes, or keys, of one call of the store, about; copies of so many stay in the processor's cache."""
_ENDLESS: Final = 1 << 60
"""Limit of lookups and loads, of which LMCache limits the number."""
_ELSEWHERE: Final = ("grpc:", "mooncake:", "s3:")
"""Stores that read and write in another process, or keep buffers of their own."""
_NEWS: Final = 4096
"""Most objects of which LMCache is told at once."""
_THERE: Final = frozenset({Outcome.STORED, Outcome.HIT})
_GONE: Final = frozenset({Outcome.MISS, Outcome.CORRUPT})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings(StoreSettings):
    """Settings of the adapter; the docstring of the package describes those that other plug-ins lack."""

    chunk_size: Annotated[int, whole(1, 1 << 20, "tokens")] = 256


class _L1:
    """LMCache's L1 as memory of which late calls keep their parts.

    A load that is given up keeps its objects, of which LMCache frees none while they are invalid, until it
    returns. A set that is given up keeps nothing: by its checksum, what it reads late is known as damaged.

    Thread safety: any thread.
    """

    fd: Final = -1
    """There is no memfd, and no store in another process is told of L1."""

    def __init__(self, desc: Any) -> None:
        self.address: Final[int] = 0 if desc is None else desc.ptr
        self.nbytes: Final[int] = 0 if desc is None else desc.size
        self._lent: Final = local()
        self._withheld: Final = dict[object, Sequence[tuple[int, int]]]()

    @contextmanager
    def lent(self, objects: Sequence[Any]) -> Iterator[None]:
        """Lend objects to the load of this thread."""
        self._lent.objects = objects
        try:
            yield
        finally:
            self._lent.objects = ()

    def quarantine(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Keep what is lent to this thread's load from LMCache until the returned function is called."""
        call, objects = object(), getattr(self._lent, "objects", ())
        for one in objects:
            one.invalidate()
        self._withheld[call] = ranges if objects else ()

        def end() -> None:
            del self._withheld[call]
            for one in objects:
                one.valid = True
                if (owner := one.parent()) is not None:
                    owner.free(one)

        return end

    def is_quarantined(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether a late call may still write into one of these ranges."""
        held = [one for some in list(self._withheld.values()) for one in some]
        return any(at < start + size and start < at + length for at, length in ranges for start, size in held)


class TierCacheL2(L2AdapterInterface):  # type: ignore[misc]  # LMCache has no types that mypy finds
    """Store of tiercache below LMCache's L1. The docstring of the package is the contract.

    Construction raises ConfigError for settings that are missing or wrong, and StorageError for a store that
    cannot be opened. Later failures are logged.

    Thread safety: any thread; `close` is the last call.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        chosen = read_section(_Settings, "adapter_params of TierCacheL2", params)
        profile_for(chosen.profile, "")  # a profile that there is not is refused now, not at the first store
        self._keys: Final = ChunkKeys(chosen, chosen.chunk_size, lmcache.__version__)
        self._register: Final = lru_cache(1 << 12)(
            lambda model, salt: self._store.register_namespace(self._keys.record(model, salt))
        )
        self._objects: Final = Announcements[tuple[Any, int]]()
        self._objects.wake = self._tell
        self._telling: Final = Lock()
        self._l1: Final = _L1(l1_memory_desc)
        with ExitStack() as undo:
            self._store: Final[StorageBackend] = chosen.open("0", 1, chained=True)
            undo.callback(self._store.close)
            if self._l1.nbytes and not any(url.lower().startswith(_ELSEWHERE) for url in chosen.storage):
                self._store.attach(self._l1)
            self._usage, self._answers = self._store.usage(), True
            self._evictions: Final = EvictionWatch(self._store, self._objects)
            undo.pop_all()
        self._signals: Final = [create_event_notifier() for _ in range(3)]
        stored, found, loaded = (signal.notify for signal in self._signals)
        queued = self._l1.nbytes // 4 or _ENDLESS
        self._stores: Final = Tasks("store", 2, _PIECE, queued, stored)
        self._lookups: Final = Tasks("look up", 1, _KEYS, _ENDLESS, found)
        self._loads: Final = Tasks("load", 2, _PIECE, _ENDLESS, loaded)

    def get_store_event_fd(self) -> int:
        return int(self._signals[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._signals[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._signals[2].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        sizes = [one.get_size() for one in objects]
        return self._stores.submit(partial(self._set, keys, objects), sizes)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return {
            number: L2StoreResult(
                set(task.outcomes) <= _THERE, sum(task.sizes[n] for n in task.numbers(Outcome.STORED))
            )
            for number, task in self._stores.fetch_all().items()
        }

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        layouts = {
            group: layout_of(layout.shapes, layout.dtypes) for group, layout in group_layout_descs.items()
        }
        return self._lookups.submit(partial(self._find, keys, layouts), [1] * len(keys))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return _bitmap(self._lookups, task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: no object is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._loads.submit(partial(self._get, keys, objects), [one.get_size() for one in objects])

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return _bitmap(self._loads, task_id)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects, in all layouts that this server has seen; a failure is logged."""
        objects, age = [one for key in keys for one in self._keys.in_all_layouts(key)], self._objects.age
        try:
            self._store.delete(objects)
        except StorageError as error:
            _log.warning("tiercache: %d objects could not be deleted: %s", len(objects), error)
        else:
            self._objects.gone((one.digest for one in objects), age)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Return what this server has stored or loaded since its start, and the store still has.

        Raises ValueError for a page size below 1.
        """
        if page_size < 1:
            raise ValueError(f"{page_size} keys are no page")
        rows: dict[str, KeyEntry] = {}
        for key, nbytes in self._objects.told():
            named = key.to_encoded_object_key()
            text = "@".join(map(str, vars(named).values()))
            if model_name in (None, named.model_name) and text > (cursor or ""):
                rows[text] = KeyEntry(named, nbytes)
        page = sorted(rows)[:page_size]
        return KeyListPage(tuple(map(rows.get, page)), page[-1] if len(rows) > len(page) else None)

    def get_usage(self) -> AdapterUsage:
        """Return the size of the whole store, and how much this server knows of each salt."""
        found = self._figures()
        known = super().get_usage()
        return replace(known, total_bytes_used=found.used_bytes, total_capacity_bytes=found.capacity_bytes)

    def report_status(self) -> dict[str, Any]:
        found = self._figures()
        health = {tier.name: tier.health for tier in found.tiers}
        return {
            "is_healthy": self._answers and "out" not in health.values(),
            "type": type(self).__name__,
            "tiers": health,
            "objects": found.objects,
            "waiting_bytes": self._stores.waiting,
        }

    def close(self) -> None:
        for tasks in (self._lookups, self._loads, self._stores):
            tasks.close()
        self._evictions.close()
        self._store.close()
        for signal in self._signals:
            signal.close()

    def _set(self, keys: Sequence[Any], objects: Sequence[Any], start: int, stop: int) -> list[Outcome]:
        part, age, items = self._buffers(keys[start:stop], objects[start:stop]), self._objects.age, []
        for key, known, view in part:
            self._register(key.model_name, key.cache_salt)
            items.append(SetItem(known, [view], self._keys.meta(key, view.nbytes)))
        return self._noted(part, self._store.set(items), age)

    def _get(self, keys: Sequence[Any], objects: Sequence[Any], start: int, stop: int) -> list[Outcome]:
        part, age = self._buffers(keys[start:stop], objects[start:stop]), self._objects.age
        with self._l1.lent(objects[start:stop]):
            outcomes = self._store.get([GetItem(known, [view], view.nbytes) for _, known, view in part])
        if hits := [key for (key, *_), out in zip(part, outcomes, strict=True) if out is Outcome.HIT]:
            self._notify_keys_accessed(hits)
        return self._noted(part, outcomes, age)

    def _find(
        self, keys: Sequence[Any], layouts: Mapping[int, Layout], start: int, stop: int
    ) -> list[Outcome]:
        if not start:
            self._keys.note_order(keys)
        objects = [self._keys.object_of(key, layouts[key.object_group_id]) for key in keys[start:stop]]
        age = self._objects.age
        there = self._store.exists(objects)
        self._objects.gone((one.digest for one, yes in zip(objects, there, strict=True) if not yes), age)
        return [Outcome.HIT if yes else Outcome.MISS for yes in there]

    def _buffers(
        self, keys: Sequence[Any], objects: Sequence[Any]
    ) -> list[tuple[Any, ObjectKey, memoryview]]:
        found = []
        for key, one in zip(keys, objects, strict=True):
            meta = one.metadata
            layout = layout_of(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])
            found.append((key, self._keys.object_of(key, layout), memoryview(one.byte_array).cast("B")))
        return found

    def _noted(
        self, part: Sequence[tuple[Any, ObjectKey, memoryview]], outcomes: list[Outcome], age: int
    ) -> list[Outcome]:
        """Note what the store has and what it lacks; return the outcomes."""
        pairs = list(zip(part, outcomes, strict=True))
        self._objects.stored(
            (known, (key, view.nbytes)) for (key, known, view), out in pairs if out in _THERE
        )
        self._objects.gone((known.digest for (_, known, _), out in pairs if out in _GONE), age)
        return outcomes

    def _figures(self) -> Usage:
        """Return contents and size of the store, or those of before while it does not answer."""
        try:
            self._usage, self._answers = self._store.usage(), True
        except StorageError:
            self._answers = False
        return self._usage

    def _tell(self) -> None:
        """Tell LMCache what has come to the store and gone from it."""
        with self._telling:  # in order
            while any(news := self._objects.take(_NEWS)):
                if news.removed:
                    self._notify_keys_deleted(*map(list, zip(*news.removed, strict=True)))
                if news.stored:
                    self._notify_keys_stored(*map(list, zip(*news.stored, strict=True)))


def _bitmap(tasks: Tasks, task_id: int) -> Bitmap | None:
    task = tasks.fetch(task_id)
    if task is None:
        return None
    bitmap = Bitmap(len(task.sizes))
    bitmap.batched_set(task.numbers(Outcome.HIT))
    return bitmap
