"""Moves objects between buffers and slabs: which calls, through which door, on which threads.

Objects that lie side by side move in one vectored call. What is in the page cache is read and overwritten there, at memory speed, on the
caller's thread; what is not goes past it with O_DIRECT on several threads, at the device's speed and without pushing others out. An object
that is read for the second time is let into the page cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from errno import EINVAL
from mmap import mmap
from operator import attrgetter
from threading import Lock
from typing import Final, NamedTuple, TypeVar

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.checksum import Proof
from tiercache.storage.env import Env
from tiercache.storage.vectors import IOV_MAX, read_all, take, total, write_all
from tiercache_backends.file.slabs import Slabs
from tiercache_backends.file.space import Extent

T = TypeVar("T")

_CACHED_BYTES: Final = 256 << 10
"""Of one read from the page cache: a checksum over bytes that are still in the processor's cache costs less."""
_DEVICE_BYTES: Final = 1 << 20
"""Of one call past the page cache: large enough for a device's full speed, small enough that eight of them share an object."""
_SHARE_BYTES: Final = 4 << 20
_CACHE_THREADS: Final = 2
"""For the page cache: one copies while the other computes checksums. More would take cores from those who compute tokens."""
_PAD: Final = memoryview(mmap(-1, BLOCK_ALIGN))
"""Takes in what lies between a payload's end and its block's end, where the caller's buffers do not. Nobody reads it."""
_SECTOR: Final = 512
_ZEROS: Final = memoryview(bytes(BLOCK_ALIGN))


@dataclass(slots=True)
class Movement:
    """One object on its way. `error` and `short` say how a call ended; where all went well the proof has seen all of the payload.

    Thread rule: a movement belongs to one thread at a time; `left` and `pending` are guarded by its Mover's lock.
    """

    extents: tuple[Extent, ...]
    buffers: Sequence[memoryview]
    length: int
    proof: Proof | None = None
    reused: bool = False
    error: OSError | None = None
    short: bool = False
    left: int = 0
    pending: list[list[memoryview]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Did a call not do all that it should?"""
        return self.short or self.error is not None


class Part(NamedTuple):
    """What one object contributes to a run: the buffers that move, whole blocks of them, and what of those is payload."""

    movement: Movement
    payload: list[memoryview]
    views: list[memoryview]


@dataclass(slots=True)
class Run:
    """Adjacent blocks that one call moves.

    Thread rule: one thread at a time.
    """

    start: int
    blocks: int
    parts: list[Part]
    views: list[memoryview]

    @property
    def is_whole(self) -> bool:
        """Does it hold all of every object that it has a part of?"""
        return all(total(part.payload) == part.movement.length for part in self.parts)

    def apart(self) -> list[Run]:
        """A run for each part, so that a bad block hurts one object only."""
        runs, start = [], self.start
        for part in self.parts:
            runs.append(Run(start, total(part.views) // BLOCK_ALIGN, [part], part.views))
            start += runs[-1].blocks
        return runs


class Mover:
    """Reads and writes objects.

    Thread rule: any thread; movements of different objects run in parallel.
    """

    def __init__(self, env: Env, slabs: Slabs, threads: int, *, direct: bool) -> None:
        self._env = env
        self._slabs = slabs
        self._direct = direct
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "tiercache-file")
        self._mutex = Lock()

    def write(self, movements: Sequence[Movement]) -> None:
        """Write whole blocks: the payload, and behind it what the buffers hold there, else zeros. The proofs see it on its way."""
        device: list[Run] = []

        def write(runs: list[Run]) -> None:
            for run in runs:
                direct = not self._cached(run)
                # What a run holds whole is shown by the thread that writes it; of what is cut up the pieces are shown in their order.
                if not (direct and run.is_whole):
                    self._show(run)
                if direct:
                    device.append(run)
                else:
                    self._write(run, direct=False)

        self._spread(write, _shares(self._runs(movements, _DEVICE_BYTES, _ZEROS)), _CACHE_THREADS)
        self._spread(self._write_device, device, self._threads)

    def read(self, movements: Sequence[Movement]) -> None:
        """Fill the buffers up to the payload's length, and perhaps what they hold behind it, and show the payload to the proofs."""
        cold: list[Run] = []

        def read(runs: list[Run]) -> None:
            for run in runs:
                if self._cached(run):
                    self._read(run, direct=False)
                    self._show(run)
                    continue
                for movement, payload, _ in run.parts:
                    movement.left += 1
                    movement.pending.append(payload)
                cold.append(run)

        self._spread(read, _shares(self._runs(movements, _CACHED_BYTES, _PAD)), _CACHE_THREADS)
        # Two threads may have found them out of order.
        cold.sort(key=attrgetter("start"))
        self._spread(self._read_cold, _joined(cold, self._slabs.slab_blocks), self._threads)

    def close(self) -> None:
        """End the threads. Call it when nobody is inside."""
        self._pool.shutdown()

    def _runs(self, movements: Sequence[Movement], limit: int, filler: memoryview) -> Iterable[Run]:
        """Cut objects into parts of at most `limit` bytes, and join those of neighbours up to that size."""
        run = Run(0, 0, [], [])
        most = limit // BLOCK_ALIGN
        for movement in movements:
            done = 0
            for start, count in movement.extents:
                end = start + count
                while start < end:
                    room = most - run.blocks
                    adjacent = run.blocks and run.start + run.blocks == start and start % self._slabs.slab_blocks
                    if not adjacent or room < min(end - start, most) or len(run.views) + len(movement.buffers) >= IOV_MAX:
                        if run.blocks:
                            yield run
                        run, room = Run(start, 0, [], []), most
                    step = min(end - start, room)
                    part = _part(movement, done, step * BLOCK_ALIGN, filler)
                    run.parts.append(part)
                    run.views += part.views
                    run.blocks += step
                    done += step * BLOCK_ALIGN
                    start += step
        if run.blocks:
            yield run

    def _write_device(self, run: Run) -> None:
        if run.is_whole:
            self._show(run)
        self._write(run, direct=True)

    def _write(self, run: Run, *, direct: bool) -> None:
        slab, offset = self._slabs.slab(run), self._slabs.offset(run)
        try:
            if not direct or slab.direct is None or not self._straight(write_all, run, slab.direct, offset):
                write_all(self._env, slab.fd, run.views, offset)
        except OSError as error:
            if len(run.parts) > 1:
                for single in run.apart():
                    self._write(single, direct=direct)
            else:
                run.parts[0].movement.error = error

    def _read_cold(self, run: Run) -> None:
        self._read(run, direct=not any(part.movement.reused for part in run.parts))
        for movement, _, _ in run.parts:
            with self._mutex:
                movement.left -= 1
                last = not movement.left
            if last and not movement.failed and movement.proof is not None:
                for views in movement.pending:
                    movement.proof.add(views)

    def _read(self, run: Run, *, direct: bool) -> None:
        slab, offset = self._slabs.slab(run), self._slabs.offset(run)
        try:
            found = self._straight(read_all, run, slab.direct, offset) if direct and slab.direct is not None else None
            if found is None:
                found = read_all(self._env, slab.fd, run.views, offset)
        except OSError as error:
            if len(run.parts) > 1:
                for single in run.apart():
                    self._read(single, direct=direct)
            else:
                run.parts[0].movement.error = error
            return
        if found < run.blocks * BLOCK_ALIGN:
            for part in run.parts:
                part.movement.short = True

    def _straight(self, call: Callable[[Env, int, Sequence[memoryview], int], int], run: Run, fd: int, offset: int) -> int | None:
        """Make a call past the page cache: its answer, or None where the caller's buffers do not lie as the device needs them."""
        if any(view.nbytes % _SECTOR for view in run.views):
            return None
        try:
            return call(self._env, fd, run.views, offset)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            return None

    def _show(self, run: Run) -> None:
        """Let the proofs see the payload: now, or when what comes before it has been read."""
        for movement, payload, _ in run.parts:
            if movement.pending:
                movement.pending.append(payload)
            elif movement.proof is not None and not movement.failed:
                movement.proof.add(payload)

    def _cached(self, run: Run) -> bool:
        """Are these blocks in the page cache? Where that cannot be asked, everything goes through it."""
        if not self._direct:
            return True
        try:
            return self._env.cached(self._slabs.slab(run).fd, self._slabs.offset(run), run.blocks * BLOCK_ALIGN)
        except OSError:
            return True

    def _spread(self, task: Callable[[T], None], shares: Iterable[T], threads: int) -> None:
        """Do a task for each share, on this thread and others that help. It reports its failures through the movements."""
        waiting = deque(shares)

        def work() -> None:
            while waiting:
                try:
                    share = waiting.popleft()
                except IndexError:
                    return
                task(share)

        helpers = [self._pool.submit(work) for _ in range(min(threads, len(waiting)) - 1)]
        work()
        for helper in helpers:
            # One that never began is not waited for: threads that hang in another call's disk must not hold this one up.
            if not helper.cancel():
                helper.result()


def _shares(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs in shares that are worth a thread's while, each with whole objects only: the proof of an object sees its bytes in order."""
    shares: list[list[Run]] = []
    blocks = _SHARE_BYTES // BLOCK_ALIGN
    held = blocks
    last: Movement | None = None
    for run in runs:
        if held >= blocks and run.parts[0].movement is not last:
            shares.append([])
            held = 0
        shares[-1].append(run)
        held += run.blocks
        last = run.parts[-1].movement
    return shares


def _part(movement: Movement, start: int, size: int, filler: memoryview) -> Part:
    """Bytes [start, start + size) of an object's blocks."""
    buffers, length, end = movement.buffers, movement.length, start + size
    if end <= length:
        views = take(buffers, start, end)
        return Part(movement, views, views)
    payload = take(buffers, start, length)
    whole = total(buffers) >= end
    return Part(movement, payload, take(buffers, start, end) if whole else [*payload, filler[: end - length]])


def _joined(runs: Sequence[Run], slab_blocks: int) -> list[Run]:
    """The same, with neighbours joined into calls that suit a device."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.start + last.blocks == run.start
            and run.start % slab_blocks
            and (last.blocks + run.blocks) * BLOCK_ALIGN <= _DEVICE_BYTES
            and len(last.views) + len(run.views) <= IOV_MAX
        ):
            joined[-1] = Run(last.start, last.blocks + run.blocks, last.parts + run.parts, last.views + run.views)
        else:
            joined.append(run)
    return joined
