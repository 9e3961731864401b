"""Transfers between rows of the primary tier and a store, on threads of tiercache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event
from typing import Final, NamedTuple

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, TransferJob

from tiercache.core import ObjectKey, Outcome
from tiercache.integrations.vllm.identity import Keys
from tiercache.storage.base import GetItem, SetItem, StorageBackend

_log = logging.getLogger(__name__)

_LOADERS: Final = 2
"""Threads for loads."""
_QUIET_S: Final = 60.0
"""Seconds at least between two log lines about the same kind of failure."""


class Ended(NamedTuple):
    """A job that has ended: the result for vLLM, and the keys whose rows were not transferred.

    `error` is an exception that the transfer raised: a bug of tiercache or of the store.
    """

    job: TransferJob
    result: JobResult
    missing: tuple[OffloadKey, ...] = ()
    error: Exception | None = None


class _Part(NamedTuple):
    """One row of a job, with its key and its object."""

    key: OffloadKey
    object: ObjectKey
    row: memoryview


@dataclass(frozen=True, slots=True)
class _Pending:
    """A job whose end has not been fetched yet."""

    job: TransferJob
    future: Future[None] | None
    """The future of the transfer; None if no thread took the job."""

    @property
    def pinned(self) -> int:
        """Number of rows of the primary tier that this job, if it is a store, keeps from being evicted."""
        return 0 if self.job.is_promotion or self.future is None else len(self.job.keys)


class Jobs:
    """Runs load and store jobs, each job as one batch of the store.

    Store jobs have a thread of their own, so that they never delay loads. Rows are read and written in place. Every job that is given ends
    exactly once, even if it fails, and nothing is raised. A store job with which more than `queued_rows` rows would wait or be written
    fails at once, unless no other store job is pending: vLLM cannot evict these rows until it has the result, and a slow disk must not
    block the primary tier.

    Thread safety: one call at a time, from any thread; the manager's lock ensures that.
    """

    def __init__(self, store: StorageBackend, keys: Keys, rows: memoryview, queued_rows: int) -> None:
        self._store = store
        self._keys = keys
        self._rows: Final = rows.shape[0] if rows.shape else 0
        self._bytes: Final = rows.cast("B")  # views of two dimensions cannot be sliced
        self._queued_rows: Final = queued_rows
        self._loaders: Final = _started(_LOADERS, "tiercache-load")
        self._storer: Final = _started(1, "tiercache-store")
        self._pending: dict[JobId, _Pending] = {}
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._pinned = 0
        self._refusals = _Seldom("the store is too slow: %d stores were refused so far, of rows that stay in the primary tier alone")
        self._failures = _Seldom("%d stores failed so far, in part at least; what is missing is computed again")
        self._surprises = _Seldom("%d transfers raised so far")

    def load(self, job: TransferJob) -> None:
        """Start to fill the job's rows from the store."""
        self._begin(job, self._loaders, self._load)

    def store(self, job: TransferJob) -> None:
        """Start to write the job's rows to the store, or fail the job if too many rows are pending."""
        if self._pinned and self._pinned + len(job.keys) > self._queued_rows:
            self._refusals.note()
            self._give_up(job)
        else:
            self._begin(job, self._storer, self._save)

    def finished(self) -> Iterator[Ended]:
        """Yield the jobs that ended since the last call."""
        while True:
            try:
                ended = self._ended.get_nowait()
            except Empty:
                return
            pending = self._pending.pop(ended.result.job_id)
            self._pinned -= pending.pinned
            if ended.error is not None:
                self._surprises.note(ended.error)
            elif pending.pinned and not ended.result.success:
                self._failures.note()
            yield ended

    def drain(self) -> None:
        """Cancel the jobs that wait and wait for those that run; after that every job has ended and none touches a row."""
        running = []
        for pending in list(self._pending.values()):
            if pending.future is None or pending.future.cancelled():
                continue
            if pending.future.cancel():
                self._ended.put(_failed(pending.job))
            else:
                running.append(pending.future)
        wait(running)

    def close(self) -> None:
        """Drain, then end the threads and release the rows; later jobs fail. A second call does nothing."""
        self.drain()
        self._loaders.shutdown()
        self._storer.shutdown()
        self._bytes.release()

    def _begin(self, job: TransferJob, pool: ThreadPoolExecutor, work: Callable[[TransferJob], Ended]) -> None:
        try:
            future = pool.submit(self._run, job, work)
        except RuntimeError:  # the pool is shut down
            self._give_up(job)
            return
        self._pending[job.job_id] = pending = _Pending(job, future)
        self._pinned += pending.pinned

    def _give_up(self, job: TransferJob) -> None:
        self._pending[job.job_id] = _Pending(job, None)
        self._ended.put(_failed(job))

    def _run(self, job: TransferJob, work: Callable[[TransferJob], Ended]) -> None:
        try:
            ended = work(job)
        except Exception as error:  # noqa: BLE001  logged where it is fetched; a result that never comes would pin rows for ever
            ended = _failed(job, error)
        self._ended.put(ended)  # before the future is done, so that a thread that waited for the future finds the result

    def _load(self, job: TransferJob) -> Ended:
        with ExitStack() as views:
            parts = self._parts(job, views)
            started = time.monotonic()
            outcomes = self._store.get([GetItem(part.object, [part.row], self._keys.row_bytes) for part in parts])
        loaded = {part.key for part, outcome in zip(parts, outcomes, strict=True) if outcome is Outcome.HIT}
        return self._over(job, started, loaded)

    def _save(self, job: TransferJob) -> Ended:
        with ExitStack() as views:
            parts = self._parts(job, views)
            started = time.monotonic()
            metas = self._keys.metas([part.key for part in parts], [part.object for part in parts], _ends(job))
            outcomes = self._store.set([SetItem(part.object, [part.row], meta) for part, meta in zip(parts, metas, strict=True)])
        kept = {part.key for part, outcome in zip(parts, outcomes, strict=True) if outcome in (Outcome.STORED, Outcome.HIT)}
        return self._over(job, started, kept)

    def _parts(self, job: TransferJob, views: ExitStack) -> list[_Part]:
        """Return the valid parts of a job: keys of this engine, with a row that exists. Their memory is released when `views` ends.

        Raises ValueError if the job does not have exactly one row for each key, or names a row twice.
        """
        size, chunks = self._keys.row_bytes, job.chunk_ids.tolist()
        if len(chunks) != len(job.keys) or len(set(chunks)) != len(chunks):
            raise ValueError(f"job {job.job_id} has {len(job.keys)} keys for rows {chunks}")
        parts: list[_Part] = []
        for key, chunk in zip(job.keys, chunks, strict=True):
            known = self._keys.of(key)
            if known is not None and 0 <= chunk < self._rows:
                row = views.enter_context(self._bytes[chunk * size : (chunk + 1) * size])
                parts.append(_Part(key, known, row))
        return parts

    def _over(self, job: TransferJob, started: float, done: Set[OffloadKey]) -> Ended:
        """Return the end of a job that transferred the rows of the keys `done`; `started` is in `time.monotonic` seconds."""
        missing = tuple(key for key in job.keys if key not in done)
        seconds, nbytes = time.monotonic() - started, len(done) * self._keys.row_bytes
        kept = tuple(done) if missing and job.is_promotion else None
        return Ended(job, JobResult(job.job_id, not missing, kept or None, seconds, nbytes), missing)


def _ends(job: TransferJob) -> dict[OffloadKey, int]:
    """Return the tokens up to the end of each key of the request, including keys of earlier jobs where this vLLM shows them."""
    told = getattr(job.req_context, "_offload_key_positions", None)
    if isinstance(told, dict):
        return told.copy()  # one atomic step, because the scheduler's thread adds to it
    ends = {key: job.req_context.get_offload_key_position(key) for key in job.keys}
    return {key: end for key, end in ends.items() if end is not None}


def _started(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads are all started.

    If a thread could not be started later, `submit` would raise and the work would be done nevertheless.
    """
    pool, go = ThreadPoolExecutor(threads, name), Event()
    for _ in range(threads):
        pool.submit(go.wait)
    go.set()
    return pool


def _failed(job: TransferJob, error: Exception | None = None) -> Ended:
    return Ended(job, JobResult(job.job_id, False), tuple(job.keys), error)


class _Seldom:
    """A warning for many events: it is logged at most every `_QUIET_S` seconds and gives the number of events so far.

    Thread safety: one call at a time.
    """

    def __init__(self, message: str) -> None:
        self._message, self._count, self._next = message, 0, 0.0

    def note(self, error: Exception | None = None) -> None:
        """Count one more event, and log the warning if it is due."""
        self._count += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _QUIET_S
            _log.warning(self._message, self._count, exc_info=error)
