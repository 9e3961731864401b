"""Transfers between rows of vLLM's primary tier and a store, on threads of tiercache.

A row is a range of shared memory that holds one object. A job of vLLM is a list of rows to store or to load.
A load is also called a promotion.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from threading import Event
from typing import Final, NamedTuple, TypeAlias

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, TransferJob

from tiercache.core import ObjectKey, Outcome
from tiercache.integrations.announcements import Announcements
from tiercache.integrations.vllm.identity import Keys
from tiercache.storage.base import GetItem, SetItem, StorageBackend

_log = logging.getLogger(__name__)
Told: TypeAlias = Announcements[OffloadKey] | None
"""Chunks that vLLM's publisher is told of; None if it is not."""

_LOADERS: Final = 2
"""Number of threads for loads."""
_MAX_USED: Final = 1 << 16
"""Number of used keys, at most, of which the store has not been told."""
_QUIET_S: Final = 60.0
"""Minimum seconds between two log lines about the same kind of failure."""


class Ended(NamedTuple):
    """Job that has ended."""

    job: TransferJob
    result: JobResult
    """Result for vLLM."""
    missing: tuple[OffloadKey, ...] = ()
    """Keys whose rows were not transferred."""
    error: Exception | None = None
    """Exception that the transfer raised, because of a bug of tiercache or of the store."""


_Work = Callable[[TransferJob], Ended]


class _Part(NamedTuple):
    """One row of a job, with its offload key and its object key."""

    key: OffloadKey
    object: ObjectKey
    row: memoryview


class Jobs:
    """Executor of load and store jobs.

    One job is one batched call of the store. Store jobs have a thread of their own, so that they never delay
    loads. Rows are read and written in place.
    Every job ends exactly once, even if it fails, and no method raises.

    vLLM cannot evict the rows of a store job until it has the job's result, and a slow disk must not block
    the primary tier. Therefore at most `queued_rows` rows may be pending in store jobs. A store job beyond
    this limit fails at once, unless no other store job is pending.

    `events` is told what is found in the store, and what is not.

    Thread safety: one call at a time, from any thread. vLLM makes all calls under a lock of its own.
    """

    def __init__(
        self, store: StorageBackend, keys: Keys, rows: memoryview, queued_rows: int, events: Told = None
    ) -> None:
        self._store = store
        self._keys = keys
        self._events: Final = events
        self._rows: Final = rows.shape[0] if rows.shape else 0
        self._bytes: Final = rows.cast("B")  # Python cannot slice a memoryview of two dimensions
        self._queued_rows: Final = queued_rows
        self._loaders: Final = _started(_LOADERS, "tiercache-load")
        self._storer: Final = _started(1, "tiercache-store")
        self._running: dict[JobId, tuple[TransferJob, Future[None]]] = {}
        """Jobs that were begun and whose results vLLM has not fetched yet."""
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._pinned = 0
        self._used: deque[OffloadKey] = deque(maxlen=_MAX_USED)
        """Keys that requests have used, the latest last."""
        self._telling: Future[None] | None = None
        self._refusals = _Seldom(
            "the store is too slow: %d store jobs were refused so far; their rows are in the primary tier"
            " alone"
        )
        self._failures = _Seldom(
            "%d store jobs failed since the start, at least in part; the missing rows will be recomputed"
        )
        self._surprises = _Seldom("%d transfers raised exceptions since the start")

    def load(self, job: TransferJob) -> None:
        """Start to fill the job's rows from the store."""
        self._begin(job, self._loaders, self._load)

    def store(self, job: TransferJob) -> None:
        """Start to write the job's rows to the store; if too many rows are pending, fail the job."""
        if self._pinned and self._pinned + len(job.keys) > self._queued_rows:
            self._refusals.note()
            self._ended.put(_failed(job))
        else:
            self._begin(job, self._storer, self._save)

    def use(self, keys: Iterable[OffloadKey]) -> None:
        """Tell the store in the background that these objects are used."""
        self._used.extend(keys)
        if self._used and (self._telling is None or self._telling.done()):
            with suppress(RuntimeError):  # the pool is shut down
                self._telling = self._storer.submit(self._tell)

    def _tell(self) -> None:
        keys = dict.fromkeys(self._used.popleft() for _ in range(len(self._used)))
        objects = [known for known in map(self._keys.of, keys) if known is not None]
        self._store.advise(objects, ())

    def finished(self) -> Iterator[Ended]:
        """Yield the jobs that ended since the last call."""
        while True:
            try:
                ended = self._ended.get_nowait()
            except Empty:
                return
            pinned = 0 if self._running.pop(ended.job.job_id, None) is None else _pinned(ended.job)
            self._pinned -= pinned
            if ended.error is not None:
                self._surprises.note(ended.error)
            elif pinned and not ended.result.success:
                self._failures.note()
            yield ended

    def drain(self) -> None:
        """Cancel the jobs that have not begun, and wait for the others.

        When this returns, every job has ended, and no thread uses a row.
        """
        running = []
        for job, future in list(self._running.values()):
            if future.cancelled():
                continue
            if future.cancel():
                self._ended.put(_failed(job))
            else:
                running.append(future)
        wait(running)

    def close(self) -> None:
        """Drain, then end the threads and release the rows; later jobs fail. A second call does nothing."""
        self.drain()
        self._loaders.shutdown()
        self._storer.shutdown()
        self._bytes.release()

    def _begin(self, job: TransferJob, pool: ThreadPoolExecutor, work: _Work) -> None:
        try:
            future = pool.submit(self._run, job, work)
        except RuntimeError:  # the pool is shut down
            self._ended.put(_failed(job))
            return
        self._running[job.job_id] = job, future
        self._pinned += _pinned(job)

    def _run(self, job: TransferJob, work: _Work) -> None:
        try:
            ended = work(job)
        except Exception as error:  # noqa: BLE001
            # Return a result in any case: without a result, vLLM would keep the rows for ever. `finished`
            # logs the exception.
            ended = _failed(job, error)
        # Put the result in the queue here, before the future is done. A thread that waits for the future
        # (`drain`) can rely on finding the result afterwards.
        self._ended.put(ended)

    def _load(self, job: TransferJob) -> Ended:
        with ExitStack() as views:
            parts = self._parts(job, views)
            started = time.monotonic()
            age, nbytes = self._events.age if self._events is not None else 0, self._keys.row_bytes
            outcomes = self._store.get([GetItem(part.object, [part.row], nbytes) for part in parts])
        if self._events is not None:
            gone = (Outcome.MISS, Outcome.CORRUPT)
            self._events.gone(
                (p.object.digest for p, outcome in zip(parts, outcomes, strict=True) if outcome in gone), age
            )
        return self._over(job, started, parts, outcomes)

    def _save(self, job: TransferJob) -> Ended:
        with ExitStack() as views:
            parts = self._parts(job, views)
            started = time.monotonic()
            keys, objects = [part.key for part in parts], [part.object for part in parts]
            described = zip(parts, self._keys.metas(keys, objects, _ends(job)), strict=True)
            outcomes = self._store.set([SetItem(one.object, [one.row], meta) for one, meta in described])
        return self._over(job, started, parts, outcomes)

    def _parts(self, job: TransferJob, views: ExitStack) -> list[_Part]:
        """Return the parts of a job whose key belongs to this engine and whose row exists.

        `views`: a stack that releases the views of the rows when it is closed. Raises ValueError if the job
        does not have exactly one row for each key, or names a row twice.
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

    def _over(
        self, job: TransferJob, started: float, parts: Sequence[_Part], outcomes: Sequence[Outcome]
    ) -> Ended:
        """Return the result of a job.

        `started`: when the transfer began, in seconds of the monotonic clock. `outcomes`: of the `parts`.
        """
        stored = [p for p, o in zip(parts, outcomes, strict=True) if o in (Outcome.STORED, Outcome.HIT)]
        if self._events is not None:
            self._events.stored((part.object, part.key) for part in stored)
        done = {part.key for part in stored}
        missing = tuple(key for key in job.keys if key not in done)
        seconds, nbytes = time.monotonic() - started, len(done) * self._keys.row_bytes
        kept = tuple(done) if missing and job.is_promotion else None
        return Ended(job, JobResult(job.job_id, not missing, kept or None, seconds, nbytes), missing)


def _ends(job: TransferJob) -> dict[OffloadKey, int]:
    """Return the number of tokens up to the end of each chunk of the request, by offload key.

    Chunks of earlier jobs are included if this version of vLLM shows them.
    """
    told = getattr(job.req_context, "_offload_key_positions", None)
    if isinstance(told, dict):
        return told.copy()  # the scheduler's thread adds entries meanwhile, but a copy is one atomic step
    ends = {key: job.req_context.get_offload_key_position(key) for key in job.keys}
    return {key: end for key, end in ends.items() if end is not None}


def _started(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads that have all been started.

    A pool that starts threads later has a flaw: `submit` queues the work and then starts a thread. If the
    thread cannot be started, `submit` raises, but another thread may still do the work.
    """
    pool, go = ThreadPoolExecutor(threads, name), Event()
    # All earlier threads wait for `go`. So no submission finds an idle thread, and each starts a new one.
    for _ in range(threads):
        pool.submit(go.wait)
    go.set()
    return pool


def _pinned(job: TransferJob) -> int:
    """Return the number of rows that vLLM cannot evict because this job stores them; 0 for a load."""
    return 0 if job.is_promotion else len(job.keys)


def _failed(job: TransferJob, error: Exception | None = None) -> Ended:
    return Ended(job, JobResult(job.job_id, False), tuple(job.keys), error)


class _Seldom:
    """Warning about repeated events and their number, logged at most once in `_QUIET_S` seconds.

    Thread safety: one call at a time.
    """

    def __init__(self, message: str) -> None:
        self._message, self._count, self._next = message, 0, 0.0

    def note(self, error: Exception | None = None) -> None:
        """Count one more event, and log the warning unless it was logged less than `_QUIET_S` ago."""
        self._count += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _QUIET_S
            _log.warning(self._message, self._count, exc_info=error)
