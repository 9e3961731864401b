"""Movement of objects between buffers and slabs: through the page cache or past it, and on which threads.

Blocks in the page cache are read and overwritten there, at memory speed. Other blocks are read past it with O_DIRECT on several threads, at
the device's speed and without evicting cached pages, unless their object was read before; they are written whichever way is faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from errno import EINVAL
from itertools import zip_longest
from mmap import mmap
from threading import Lock
from typing import Final

from tiercache.core import BLOCK_ALIGN
from tiercache.storage.env import Env
from tiercache.storage.vectors import read_all, write_all
from tiercache_backends.file.pace import TRIAL_BYTES, Pace
from tiercache_backends.file.runs import Movement, Run, runs_of, shares_of
from tiercache_backends.file.slabs import Slabs
from tiercache_backends.local.crew import MEMORY_THREADS, Crew

_PAD: Final = memoryview(mmap(-1, BLOCK_ALIGN))
"""Target for the bytes between a payload's end and its block's end, where the caller's buffers end before; its contents are not used."""
_SECTOR: Final = 512
_STEP_BYTES: Final = 64 << 20
_ZEROS: Final = memoryview(bytes(BLOCK_ALIGN))


class Mover:
    """Reader and writer of objects. A failure is recorded in the movement that it concerns.

    Thread safety: any thread may call; movements of different objects run in parallel.
    """

    def __init__(self, env: Env, slabs: Slabs, threads: int, *, direct: bool) -> None:
        self._env = env
        self._slabs = slabs
        self._direct = direct
        self._crew = Crew(threads, "tiercache-file")
        self._mutex = Lock()
        self._pace = Pace()

    def write(self, movements: Sequence[Movement]) -> None:
        """Write whole blocks: the payload, then what the buffers hold behind it, else zeros. The proofs see the payload on its way."""
        uncached: list[list[Run]] = []

        def write(share: list[Run]) -> None:
            if all(map(self._cached, share)):
                self._write_cached(share)
            else:
                uncached.append(share)

        self._crew.spread(write, self._by_turns(shares_of(runs_of(movements, _ZEROS, self._slabs.slab_blocks))), MEMORY_THREADS)
        if uncached:
            self._write_uncached(uncached)

    def read(self, movements: Sequence[Movement]) -> None:
        """Fill the buffers with the payload, perhaps overwriting what they hold behind it, and show the payload to the proofs."""
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

        self._crew.spread(read, shares_of(runs_of(movements, _PAD, self._slabs.slab_blocks)), MEMORY_THREADS)
        self._crew.spread(self._read_cold, cold, self._crew.threads)

    def close(self) -> None:
        """End the threads; call it while no other call is running."""
        self._crew.close()

    def _write_uncached(self, shares: Sequence[list[Run]]) -> None:
        """Write blocks that are not in the page cache, through it or past it, whichever has been faster lately.

        A batch is written in steps, because a way that is fast at first can become slow in the middle of a large batch.
        """
        waiting = deque(self._by_turns(shares))
        while waiting:
            first, rest = self._pace.chooses_direct()
            if first != rest:
                self._write_one_way(_taken(waiting, TRIAL_BYTES), first)
            self._write_one_way(_taken(waiting, _STEP_BYTES), rest)

    def _write_one_way(self, shares: Sequence[list[Run]], direct: bool) -> None:
        if not shares:
            return
        started = self._env.monotonic()
        if direct:
            # Many calls at once write the pieces of an object in any order, so its proof sees them beforehand, in their order.
            self._crew.spread(self._show_pieces, shares, MEMORY_THREADS)
            runs = [run for share in shares for run in share]
            self._crew.spread(self._write_past, runs, self._crew.threads)
        else:
            self._crew.spread(self._write_cached, shares, MEMORY_THREADS)
        self._pace.note(direct, sum(map(_nbytes, shares)), self._env.monotonic() - started)

    def _by_turns(self, shares: Sequence[list[Run]]) -> list[list[Run]]:
        """Return the shares with their slabs taking turns.

        Two threads that take the next shares then write to two files; each file admits one writer at a time.
        """
        lanes: dict[int, list[list[Run]]] = {}
        for share in shares:
            lanes.setdefault(share[0].start // self._slabs.slab_blocks, []).append(share)
        return [share for turn in zip_longest(*lanes.values()) for share in turn if share is not None]

    def _write_cached(self, share: list[Run]) -> None:
        for run in share:
            self._show(run)
            self._write(run, direct=False)

    def _show_pieces(self, share: list[Run]) -> None:
        for run in share:
            if not run.is_whole:
                self._show(run)

    def _write_past(self, run: Run) -> None:
        if run.is_whole:
            self._show(run)
        self._write(run, direct=not self._cached(run))

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
        """Make a call past the page cache and return its result; None where the buffers are not aligned as the device needs them."""
        if any(view.nbytes % _SECTOR for view in run.views):
            return None
        try:
            return call(self._env, fd, run.views, offset)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            return None

    def _show(self, run: Run) -> None:
        """Let the proofs see the payload: now, or once the earlier parts of the object have been read."""
        for movement, payload, _ in run.parts:
            if movement.pending:
                movement.pending.append(payload)
            elif movement.proof is not None and not movement.failed:
                movement.proof.add(payload)

    def _cached(self, run: Run) -> bool:
        """Return whether these blocks are in the page cache; True where that cannot be asked, so that everything goes through it."""
        if not self._direct:
            return True
        try:
            return self._env.cached(self._slabs.slab(run).fd, self._slabs.offset(run), run.blocks * BLOCK_ALIGN)
        except OSError:
            return True


def _taken(waiting: deque[list[Run]], most: int) -> list[list[Run]]:
    """Remove and return the shares up to the one that reaches `most` bytes."""
    taken: list[list[Run]] = []
    left = most
    while waiting and left > 0:
        taken.append(waiting.popleft())
        left -= _nbytes(taken[-1])
    return taken


def _nbytes(share: Sequence[Run]) -> int:
    return sum(run.blocks for run in share) * BLOCK_ALIGN
