"""Reads and writes of objects between buffers and slabs, through the page cache or past it.

Blocks that are in the page cache are read and overwritten in the cache, at memory speed. For other blocks:

- The first read of an object uses O_DIRECT on several threads, at the device's speed. This bypasses the cache
  and so evicts no cached pages.
- Later reads of the same object go through the cache, which then keeps it.
- Writes go through the cache or use O_DIRECT, whichever was faster in recent measurements.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from errno import EINVAL
from mmap import mmap
from threading import Lock
from typing import Final, TypeVar

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.env import Env, read_all, write_all
from tiercache_backends.file.runs import IoBatch, Run, runs_of, shares_of
from tiercache_backends.file.slabs import Slabs

_PAD: Final = memoryview(mmap(-1, BLOCK_ALIGN))
"""Destination of the bytes after the payload in an object's last block, if the buffers are too short."""
_SECTOR: Final = 512
"""Unit of O_DIRECT in bytes: the length of each buffer must be a multiple of it."""
_STEP_BYTES: Final = 64 << 20
"""Number of bytes of a large batch that are written before the faster way to write is chosen again."""
TRIAL_BYTES: Final = 8 << 20
"""Number of bytes of a batch that are written the slower way when that way is measured again."""
_MIN_MEASURED_BYTES: Final = 4 << 20
"""Smallest write, in bytes, whose speed is recorded. Fixed costs dominate the time of smaller writes."""
_TRY_EVERY: Final = 16
"""Number of choices after which the slower way is taken once, to measure it again."""
_MEMORY: Final = 0.5
"""Weight of the old speed in the mean of the old speed and a newly measured higher speed."""
_ZEROS: Final = memoryview(bytes(BLOCK_ALIGN))
"""Source of the bytes after the payload in an object's last block, if the buffers are too short."""


class WritePathSelector:
    """Choice between two ways to write blocks that are not in the page cache, by their measured speeds.

    - Through the cache, writes run at memory speed, and later reads find the bytes there. Writes become slow
      when the kernel has no free memory for the cache, or makes writers wait for the disk.
    - With O_DIRECT, writes bypass the cache and run at the speed of the device.

    Neither way is faster on all machines and at all times. So both are measured, and every 16th choice takes
    the slower one.

    Thread safety: any thread may call.
    """

    def __init__(self) -> None:
        self._mutex = Lock()
        self._rates: dict[bool, float] = {}
        """Speeds in bytes per second: with O_DIRECT under the key True, through the cache under False."""
        self._turns = 0
        """Number of choices made."""

    def choose(self) -> tuple[bool, int]:
        """Return the way for the next bytes, True for O_DIRECT, and how many bytes may go that way."""
        with self._mutex:
            self._turns += 1
            # At the start, measure the cache with the first batch, and O_DIRECT with the second.
            if len(self._rates) < 2:
                return (True, TRIAL_BYTES) if self._rates else (False, _STEP_BYTES)
            better = self._rates[True] > self._rates[False]
            return (better, _STEP_BYTES) if self._turns % _TRY_EVERY else (not better, TRIAL_BYTES)

    def record(self, direct: bool, nbytes: int, seconds: float) -> None:
        """Record the speed of a write; a write of less than 4 MiB is ignored."""
        if nbytes >= _MIN_MEASURED_BYTES and seconds > 0:
            with self._mutex:
                rate = nbytes / seconds
                before = self._rates.get(direct, rate)
                # A lower speed replaces the old speed, and a higher speed is averaged with the old speed.
                # While the cache is full of unwritten data, single writes may be fast although the way is
                # slow.
                self._rates[direct] = min(rate, _MEMORY * before + (1 - _MEMORY) * rate)


class IoEngine:
    """Reader and writer of objects. A failure is recorded with the object that it concerns.

    A run is a range of blocks that one call moves. A share is a list of runs for one thread (see `runs.py`).

    Thread safety: any thread may call; batches are moved in parallel.
    """

    def __init__(self, env: Env, slabs: Slabs, threads: int, *, direct: bool) -> None:
        self._env = env
        self._slabs = slabs
        self._direct = direct
        self._threads = ThreadPool(threads, "tiercache-file")
        self._write_path = WritePathSelector()

    def write(self, batch: IoBatch) -> None:
        """Write payloads in whole blocks, and compute their checksums first.

        In an object's last block, the bytes after the payload come from the buffers too. If the buffers do
        not reach the end of the block, these bytes are zeros.
        """
        uncached: list[list[Run]] = []

        def write(share: list[Run]) -> None:
            # Overwrite blocks in the page cache there. To bypass the cache, the kernel would first have to
            # write the cached blocks back.
            if all(map(self._cached, share)):
                self._write_cached(share)
            else:
                uncached.append(share)

        self._threads.map(write, shares_of(runs_of(batch, _ZEROS, self._slabs.slab_blocks)), MEMORY_THREADS)
        if uncached:
            self._write_uncached(uncached)
        batch.finish()

    def read(self, batch: IoBatch) -> None:
        """Fill the buffers with payloads and compute their checksums.

        Bytes of the buffers after the payload may be overwritten.
        """
        cold: list[Run] = []

        def read(runs: list[Run]) -> None:
            for run in runs:
                if self._cached(run):
                    self._read(run, direct=False)
                    batch.verify(run.pieces)
                else:
                    batch.postpone(run)
                    cold.append(run)

        self._threads.map(read, shares_of(runs_of(batch, _PAD, self._slabs.slab_blocks)), MEMORY_THREADS)
        if cold:
            self._threads.map(self._read_cold, cold, self._threads.threads)
        batch.finish()

    def close(self) -> None:
        """End the threads; call it while no other call is running."""
        self._threads.close()

    def _write_uncached(self, shares: Sequence[list[Run]]) -> None:
        """Write blocks that are not in the page cache, by the way that was faster in recent measurements.

        A large batch is written in steps, because a way can become slow during the batch.
        """
        waiting = deque(shares)
        while waiting:
            direct, nbytes = self._write_path.choose()
            self._write_one_way(_taken(waiting, nbytes), direct)

    def _write_one_way(self, shares: Sequence[list[Run]], direct: bool) -> None:
        started = self._env.monotonic()
        if direct:
            # Parallel calls write the runs of an object in any order. So first verify the objects that take
            # several runs, in payload order.
            self._threads.map(self._verify_pieces, shares, MEMORY_THREADS)
            runs = [run for share in shares for run in share]
            self._threads.map(self._write_direct, runs, self._threads.threads)
        else:
            self._threads.map(self._write_cached, shares, MEMORY_THREADS)
        self._write_path.record(direct, sum(map(_nbytes, shares)), self._env.monotonic() - started)

    def _write_cached(self, share: list[Run]) -> None:
        for run in share:
            run.batch.verify(run.pieces)
            self._write(run, direct=False)

    def _verify_pieces(self, share: list[Run]) -> None:
        """Verify the payload of every object that takes several runs."""
        for run in share:
            if not run.is_whole:
                run.batch.verify(run.pieces)

    def _write_direct(self, run: Run) -> None:
        if run.is_whole:
            run.batch.verify(run.pieces)
        self._write(run, direct=not self._cached(run))

    def _write(self, run: Run, *, direct: bool) -> None:
        try:
            self._call(write_all, run, direct=direct)
        except OSError as error:
            # Try the objects of the run one by one, so that a bad block fails only its own object.
            if len(run.pieces) > 1:
                for single in run.split(_ZEROS):
                    self._write(single, direct=direct)
            else:
                run.batch.errors[run.owners[0]] = error

    def _read_cold(self, run: Run) -> None:
        reused = run.batch.reused
        self._read(run, direct=not any(reused[i] for i in run.owners))
        run.batch.arrived(run)

    def _read(self, run: Run, *, direct: bool) -> None:
        failure: OSError | None = None
        try:
            if self._call(read_all, run, direct=direct) == run.blocks * BLOCK_ALIGN:
                return
        except OSError as error:
            failure = error
        # Try the objects of the run one by one, so that a bad block or a cut file fails only one object.
        if len(run.pieces) > 1:
            for single in run.split(_PAD):
                self._read(single, direct=direct)
        elif failure is not None:
            run.batch.errors[run.owners[0]] = failure
        else:
            run.batch.short.add(run.owners[0])

    def _call(
        self, call: Callable[[Env, int, Sequence[memoryview], int], int], run: Run, *, direct: bool
    ) -> int:
        """Move a run, with `direct` past the page cache where its buffers are aligned; return the bytes."""
        slab, offset = self._slabs.at(run.start)
        if direct and slab.direct is not None and not any(view.nbytes % _SECTOR for view in run.views):
            try:
                return call(self._env, slab.direct, run.views, offset)
            except OSError as error:
                # EINVAL: the file system needs another alignment of the buffers' addresses or lengths.
                if error.errno != EINVAL:
                    raise
        return call(self._env, slab.fd, run.views, offset)

    def _cached(self, run: Run) -> bool:
        """Return whether the blocks of a run are in the page cache; True if the kernel cannot tell.

        If the store does not use O_DIRECT, every run counts as cached, because there is no other way.
        """
        if not self._direct:
            return True
        slab, offset = self._slabs.at(run.start)
        try:
            return self._env.cached(slab.fd, offset, run.blocks * BLOCK_ALIGN)
        except OSError:
            return True


def _taken(waiting: deque[list[Run]], max_bytes: int) -> list[list[Run]]:
    """Remove and return shares until they have `max_bytes` bytes together or none is left."""
    taken: list[list[Run]] = []
    left = max_bytes
    while waiting and left > 0:
        taken.append(waiting.popleft())
        left -= _nbytes(taken[-1])
    return taken


def _nbytes(share: Sequence[Run]) -> int:
    return sum(run.blocks for run in share) * BLOCK_ALIGN


T = TypeVar("T")

MEMORY_THREADS: Final = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
"""Number of threads for bytes in memory: some copy while others compute checksums.

The engine keeps half of the cores. Where all are busy, a thread that starts late finds the work done.
"""


class ThreadPool:
    """Pool of up to `threads` threads, shared by all calls of a store.

    A thread starts when it is first needed.

    Thread safety: any thread may call `map`; `close` only when no call is in progress.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self.threads: Final = threads

    def map(self, task: Callable[[T], None], shares: Iterable[T], threads: int) -> None:
        """Run `task` on each share of work, on this thread and at most `threads` - 1 others.

        A task handles its own failures.
        """
        waiting = deque(shares)
        if len(waiting) < 2:
            for share in waiting:
                task(share)
            return

        def work() -> None:
            while waiting:
                try:
                    share = waiting.popleft()
                except IndexError:  # another thread has taken the last share since the test
                    return
                task(share)

        helpers: list[Future[None]] = []
        # RuntimeError: no further thread can be started. This thread and the helpers that did start then do
        # all the work. A helper that starts late finds `waiting` empty.
        with suppress(RuntimeError):
            helpers += (self._executor.submit(work) for _ in range(min(threads, len(waiting)) - 1))
        try:
            work()
        finally:
            # Cancel the helpers that have not begun, and do not wait for them: they may be queued behind
            # another call whose threads hang in a disk access. Wait for all other helpers, even after a
            # failure, because they use the caller's buffers.
            waiting.clear()
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)
        for helper in begun:
            helper.result()

    def close(self) -> None:
        """Wait until the threads have finished their work, and end them."""
        self._executor.shutdown()
