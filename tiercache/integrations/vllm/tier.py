"""The class that vLLM calls as its secondary tier, with a tiercache store behind it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Thread
from typing import Annotated, Any, ClassVar, Final

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingEvent, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiercache.errors import RefusedError, UnavailableError
from tiercache.integrations.announcements import Announcements, EvictionWatch
from tiercache.integrations.settings import StoreSettings
from tiercache.integrations.vllm.identity import Keys
from tiercache.integrations.vllm.jobs import Jobs, Told
from tiercache.settings import FLAG, one_of, read_section, whole
from tiercache.storage.base import StorageBackend

_log = logging.getLogger(__name__)

PLACE: Final = "secondary tier TierCacheTier"
"""Name of the settings in error messages."""

OWNER: Final = "tiercache"
"""`ownership` of KV events, by which subscribers tell tiers of one medium apart."""
_EVENTS_PER_STEP: Final = 4096
"""Maximum number of chunks of which one step of vLLM's scheduler is told."""

PATIENCE_S: Final = 5.0
"""Seconds that a lookup may take; after that the answer is MISS until the store has answered.

vLLM does not start a request while the answer is RETRY, so a longer wait would delay requests. `shutdown`
waits for the lookup thread for the same time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings(StoreSettings):
    """Settings of the tier; the docstring of the package describes those that other plug-ins lack."""

    queued_rows: Annotated[int | None, whole(1, 1 << 32, "rows")] = None
    locality: Annotated[str | None, one_of(*(each.value for each in Locality))] = None
    enable_kv_events: Annotated[bool, FLAG] = False


class TierCacheTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types
    """Store of tiercache below vLLM's primary tier.

    A lookup answers RETRY until a background thread has asked the store, then HIT or MISS. (The answer
    HIT_PENDING, for a row that is being filled, comes from vLLM's manager of tiers and not from this class.)

    Stored bytes are verified when they are read. Each row of a load gets the right bytes or fails; the key of
    a row that failed is a MISS from then on.

    Construction raises ConfigError for settings that are missing or wrong, and StorageError for a store that
    cannot be opened. Later failures are logged, and no method raises.

    Thread safety: vLLM makes all calls under the lock of its manager of tiers; `shutdown` is the last call.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: base.OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        chosen = read_section(_Settings, PLACE, settings)
        self.locality = chosen.locality and Locality(chosen.locality)
        max_rows = chosen.queued_rows or max(1, len(primary_kv_view) // 4)
        keys = Keys(offloading_spec.config, self.block_size_bytes, chosen)
        self._events = self._events_of(offloading_spec) if chosen.enable_kv_events else None
        parallel = offloading_spec.config.parallel
        with ExitStack() as undo:
            # Only the scheduler's process opens the store. Every data-parallel replica has a scheduler.
            self._store = chosen.open(str(parallel.data_parallel_index), parallel.data_parallel_size)
            undo.callback(self._store.close)
            self._store.register_namespace(keys.record)
            self._evictions = None if self._events is None else EvictionWatch(self._store, self._events)
            if self._evictions is not None:
                undo.callback(self._evictions.close)
            self._jobs = Jobs(self._store, keys, primary_kv_view, max_rows, self._events)
            undo.callback(self._jobs.close)
            self._lookups = _Lookups(self._store, keys, tier_type, self._events)
            undo.pop_all()
        self._closed = False

    def _events_of(self, spec: base.OffloadingSpec) -> Told:
        if spec.kv_events_config.enable_kv_cache_events:
            return Announcements()
        _log.warning(
            "tiercache: enable_kv_events has no effect, because vLLM publishes no KV events; set"
            " enable_kv_cache_events in --kv-events-config"
        )
        return None

    def on_new_request(self, req_context: ReqContext) -> base.RequestOffloadingContext:
        """Return the default context: all requests are treated alike."""
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the lookups of a request, and count its keys as used.

        Of hits in the tiers above, the store would not know: what is hottest would age there.
        """
        self._lookups.cleanup(req_context.req_id)
        # private: nothing public tells of a request's keys
        self._jobs.use(req_context._offload_key_positions)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT if a key is stored and MISS if not, or RETRY while the store has not answered."""
        if self._closed:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.MISS if self._lookups.overdue else LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        """Start to ask the store about the keys that were looked up in this step."""
        self._lookups.flush()

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to write rows to the store; `get_finished_jobs` returns the result later."""
        self._jobs.store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to fill rows from the store; `get_finished_jobs` returns the result later."""
        self._jobs.load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of the jobs that ended since the last call.

        Keys that a load could not fetch are misses from now on. Otherwise vLLM would find and load the same
        keys again and again.
        """
        results: list[JobResult] = []
        for ended in self._jobs.finished():
            if ended.job.is_promotion:
                self._lookups.mark_miss(ended.missing)
            results.append(ended.result)
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what was stored and removed since the last call, and vLLM was not yet told."""
        if self._events is None:
            return
        # `removal_expected`: vLLM keeps what it knows of a chunk until it is told of the removal.
        for keys, removed in zip(self._events.take(_EVENTS_PER_STEP), (True, False), strict=True):
            if keys:
                yield OffloadingEvent(keys, self.medium, removed, self.locality, OWNER, removal_expected=True)

    def drain_jobs(self) -> None:
        """Cancel the jobs that have not begun, and wait for the others.

        vLLM calls this when it resets its caches, and publishes that all blocks are cleared.
        """
        self._jobs.drain()
        if self._events is not None:
            self._events.forget()

    def shutdown(self) -> None:
        """Drain the jobs and close the store; a second call is harmless."""
        self._closed = True
        answered = self._lookups.end()
        self._jobs.close()
        if self._evictions is not None:
            self._evictions.close()
        if answered:
            self._store.close()
        else:
            # `close` of the store waits for the lookup that hangs, so call it on a thread of its own. The
            # engine need not wait, because a lookup uses no memory of the engine.
            _log.warning("the store has not answered a lookup; the store is closed after its answer")
            Thread(target=self._store.close, name="tiercache-close", daemon=True).start()


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # vLLM has no types
    """Lookups of stored objects, on the lookup thread of vLLM's base class.

    A key of another engine counts as not stored.

    Thread safety: as in the base class, the lookup thread calls `batch_lookup`, and vLLM makes all other
    calls under the lock of its manager of tiers.
    """

    def __init__(self, store: StorageBackend, keys: Keys, tier_type: str, events: Told = None) -> None:
        self._store = store
        self._keys = keys
        self._events: Final = events
        self._asked: float | None = None  # when the pending call of the store began (monotonic clock)
        super().__init__(tier_type)  # starts the lookup thread, so this comes last

    def end(self) -> bool:
        """Stop the lookup thread; return whether it has ended within `PATIENCE_S`."""
        self._lookup_queue.put(None)
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    @property
    def overdue(self) -> bool:
        """Whether the pending call of the store has taken longer than `PATIENCE_S`."""
        asked = self._asked
        return asked is not None and time.monotonic() - asked > PATIENCE_S

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        """Return for each key whether it is stored."""
        objects = [self._keys.of(key) for key in keys]
        asked = [known for known in objects if known is not None]
        age = self._events.age if self._events is not None else 0
        self._asked = time.monotonic()
        try:
            there = self._store.exists(asked)
        except (UnavailableError, RefusedError):  # the store has logged the failure
            return [False] * len(keys)
        finally:
            self._asked = None
        if self._events is not None:
            self._events.gone((one.digest for one, yes in zip(asked, there, strict=True) if not yes), age)
        found = iter(there)
        return [known is not None and next(found) for known in objects]
