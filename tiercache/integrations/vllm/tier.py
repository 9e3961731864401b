"""The tier class that vLLM calls; a tiercache store answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack
from threading import Thread
from typing import Any, ClassVar, Final

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiercache.errors import ConfigError
from tiercache.integrations.settings import settings_of
from tiercache.integrations.vllm.identity import Keys
from tiercache.integrations.vllm.jobs import Jobs
from tiercache.storage.base import StorageBackend

_log = logging.getLogger(__name__)

PLACE: Final = "secondary tier TierCacheTier"
"""Name of the settings in error messages."""

PATIENCE_S: Final = 5.0
"""Seconds after which a store that has not answered a lookup is taken to hold nothing, until it answers.

Longer waits would delay requests: vLLM holds a request back while it is told RETRY. `shutdown` waits as long for the lookup thread.
"""


class TierCacheTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types
    """A tiercache store below vLLM's primary tier.

    A lookup answers RETRY until a background thread has asked the store, then HIT or MISS; HIT_PENDING comes from the manager, for a row
    that is being filled. Stored bytes are checked when they are read: each row of a load gets the right bytes or fails, and a key that
    failed is a MISS from then on. Construction raises ConfigError for settings that are missing or wrong and StorageError for a store that
    cannot be opened; later failures are logged, and nothing is raised.

    Thread safety: vLLM makes all calls under the manager's lock, as for every tier; `shutdown` comes last.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        locality: str | None = None,
        queued_rows: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        chosen = settings_of(PLACE, settings)
        self.locality = _locality(locality)
        most = _queued_rows(queued_rows, len(primary_kv_view))
        keys = Keys(offloading_spec.config, self.block_size_bytes, chosen)
        parallel = offloading_spec.config.parallel
        with ExitStack() as undo:
            # The scheduler's process opens the store, and every data-parallel replica has a scheduler.
            self._store = chosen.open(str(parallel.data_parallel_index), parallel.data_parallel_size)
            undo.callback(self._store.close)
            self._store.register_namespace(keys.record)
            self._jobs = Jobs(self._store, keys, primary_kv_view, most)
            undo.callback(self._jobs.close)
            self._lookups = _Lookups(self._store, keys, tier_type)
            undo.pop_all()
        self._closed = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return the default context: all requests are treated alike."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the lookups of a request."""
        self._lookups.cleanup(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a key is stored, as far as is known by now."""
        if self._closed:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.MISS if self._lookups.overdue else LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Start to ask the store about the keys that were looked up in this step."""
        self._lookups.flush()

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to write rows to the store; `get_finished_jobs` gives the result."""
        self._jobs.store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to fill rows from the store; `get_finished_jobs` gives the result."""
        self._jobs.load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of the jobs that ended.

        Keys that a load did not bring are misses from now on; otherwise vLLM would ask for them again and again.
        """
        results: list[JobResult] = []
        for ended in self._jobs.finished():
            if ended.job.is_promotion:
                self._lookups.mark_miss(ended.missing)
            results.append(ended.result)
        return results

    def drain_jobs(self) -> None:
        """Cancel the jobs that wait and wait for those that run."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """Drain the jobs and close the store; a second call is harmless."""
        self._closed = True
        answered = self._lookups.end()
        self._jobs.close()
        if answered:
            self._store.close()
        else:
            # A lookup touches no memory of the engine, so a hanging one must not delay the engine; closing the store waits for it.
            _log.warning("the store does not answer a lookup; it is closed when it does")
            Thread(target=self._store.close, name="tiercache-close", daemon=True).start()


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # vLLM has no types
    """Asks the store which objects it has, on the lookup thread of vLLM's base class; keys of other engines are never there.

    Thread safety: as in the base class, `batch_lookup` runs on that thread and everything else under the manager's lock.
    """

    def __init__(self, store: StorageBackend, keys: Keys, tier_type: str) -> None:
        self._store = store
        self._keys = keys
        self._asked: float | None = None  # `time.monotonic` when the pending call of the store began
        super().__init__(tier_type)  # starts the thread

    def end(self) -> bool:
        """Stop the lookup thread; return whether it ended within `PATIENCE_S`."""
        self._lookup_queue.put(None)
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    @property
    def overdue(self) -> bool:
        """Whether the store takes longer to answer than a request should wait."""
        asked = self._asked
        return asked is not None and time.monotonic() - asked > PATIENCE_S

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        """Return for each key whether it is stored."""
        objects = [self._keys.of(key) for key in keys]
        self._asked = time.monotonic()
        try:
            found = iter(self._store.exists([known for known in objects if known is not None]))
        finally:
            self._asked = None
        return [known is not None and next(found) for known in objects]


def _locality(given: str | None) -> Locality | None:
    try:
        return None if given is None else Locality(given)
    except ValueError:
        raise ConfigError(f"{PLACE}: locality {given!r} is unknown; it is {' or '.join(each.value for each in Locality)}") from None


def _queued_rows(given: int | None, rows: int) -> int:
    if given is None:
        return max(1, rows // 4)
    if type(given) is not int or given < 1:
        raise ConfigError(f"{PLACE}: queued_rows {given!r} is not possible; give a number of rows, 1 or more")
    return given
