"""The tier itself: vLLM's calls, answered by a store of tiercache's."""

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
"""How errors call the settings."""

PATIENCE_S: Final = 5.0
"""A store that needs longer to say what it has is taken to have nothing until it does: vLLM holds a request back while it is told RETRY."""


class TierCacheTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM has no types
    """A store of tiercache's below vLLM's primary tier.

    A lookup answers RETRY until a thread of ours has asked the store, then HIT or MISS; HIT_PENDING is the manager's word for a row that is
    being filled. What was stored is checked when it is read: a load brings the right bytes or fails, row by row, and what failed is a MISS
    from then on. Raises ConfigError for settings that are missing or wrong, StorageError for a store that cannot be opened, and nothing
    after that: trouble is logged.

    Thread safety: as every tier, all calls under the manager's lock; `shutdown` last.
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
        """Nothing is special about any request."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what it asked."""
        self._lookups.cleanup(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """What is known of a key by now."""
        if self._closed:
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.MISS if self._lookups.overdue else LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the store about the keys of this step."""
        self._lookups.flush()

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Keep rows, later."""
        self._jobs.store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Fill rows, later."""
        self._jobs.load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended; what a load did not bring is a miss from now on, or vLLM would ask for it again and again."""
        results: list[JobResult] = []
        for ended in self._jobs.finished():
            if ended.job.is_promotion:
                self._lookups.mark_miss(ended.missing)
            results.append(ended.result)
        return results

    def drain_jobs(self) -> None:
        """Cancel what waits, wait for what runs."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """As `drain_jobs`, and close the store. Twice is harmless."""
        self._closed = True
        answered = self._lookups.end()
        self._jobs.close()
        if answered:
            self._store.close()
        else:
            # A lookup touches no memory of the engine's, so one that hangs need not hold the engine up; the store waits for it.
            _log.warning("the store does not answer a lookup; it is closed when it does")
            Thread(target=self._store.close, name="tiercache-close", daemon=True).start()


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # vLLM has no types
    """Asks the store which objects it has, on vLLM's thread for that; keys that are not ours are not there.

    Thread safety: as its base, which keeps `batch_lookup` on that thread and the rest under the manager's lock.
    """

    def __init__(self, store: StorageBackend, keys: Keys, tier_type: str) -> None:
        self._store = store
        self._keys = keys
        self._asked: float | None = None
        super().__init__(tier_type)  # starts the thread

    def end(self) -> bool:
        """Ask nothing more. Did the thread end in time?"""
        self._lookup_queue.put(None)
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    @property
    def overdue(self) -> bool:
        """Does the store take longer to answer than a request should wait?"""
        asked = self._asked
        return asked is not None and time.monotonic() - asked > PATIENCE_S

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        """Which of them are stored."""
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
