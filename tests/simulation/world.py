"""Virtual time, threads that take turns in it, and a transfer engine that copies in it."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random

from blake3 import blake3
from greenlet import GreenletExit, getcurrent, greenlet
from tiercache_kernels.reference import copy_segments

from tiercache.errors import TransferError
from tiercache.threads import IoThreads
from tiercache.transfer import LayerTicket
from tiercache.transfer.copy import Job, LaneEngine, Sides


class World:
    """A virtual clock, and what will happen by it.

    One greenlet runs at a time. A greenlet that waits hands over to the world, which goes on to the next
    event; of events at one time, the first that was asked for. Nothing else moves the clock.

    Thread safety: one thread.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, int, greenlet]] = []
        self._count = itertools.count()
        self._history = blake3()
        self._groups: dict[str, dict[greenlet, None]] = {}
        self._group_of: dict[greenlet, str] = {}
        self._turns: dict[greenlet, int] = {}

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now

    def spawn(self, run: Callable[[], object], group: str, delay: float = 0.0) -> None:
        """Run `run` as a greenlet of `group` after `delay` seconds."""
        made = greenlet(run)
        self._groups.setdefault(group, {})[made] = None
        self._group_of[made] = group
        self._turns[made] = 0
        self.wake(made, 0, delay)

    @property
    def turn(self) -> int:
        """Number of the next wait of the greenlet that asks, by which `wake` names the wait."""
        return self._turns[getcurrent()]

    def wake(self, one: greenlet, turn: int, delay: float = 0.0) -> None:
        """Let `one` go on from its wait number `turn` after `delay` seconds, unless it goes on before."""
        heapq.heappush(self._events, (self.now + delay, next(self._count), turn, one))

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass for the greenlet that calls."""
        self.wake(getcurrent(), self.turn, seconds)
        self.pause()

    def pause(self) -> None:
        """Give way until something wakes the greenlet that calls."""
        getcurrent().parent.switch()

    def run(self) -> None:
        """Run until nothing is left to happen."""
        while self._events:
            at, _, turn, one = heapq.heappop(self._events)
            self.now = max(self.now, at)
            if one.dead or self._turns.get(one) != turn:
                continue
            self._turns[one] += 1
            one.parent = getcurrent()
            one.switch()
            if one.dead and (group := self._group_of.pop(one, None)):
                del self._groups[group][one]
                del self._turns[one]

    def kill(self, group: str) -> None:
        """End all greenlets of `group` where they are, as a kill ends the threads of a process."""
        for one in self._groups.pop(group, {}):
            del self._group_of[one], self._turns[one]
            if one is not (me := getcurrent()):
                one.parent = me  # where it goes when it ends
                one.throw(GreenletExit)

    def note(self, *what: object) -> None:
        """Add a line to the history, whose digest tells whether two histories are one."""
        self._history.update(f"{self.now!r} {what!r}\n".encode())

    @property
    def digest(self) -> str:
        """Digest of the history so far."""
        return self._history.hexdigest(16)

    def chance(self, p: float) -> bool:
        """Return True with probability `p`."""
        return self.random.random() < p


class Flag(threading.Event):
    """An event whose wait lets virtual time pass. Only greenlets of the world wait for it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._waiting: list[tuple[greenlet, int]] = []

    def set(self) -> None:
        """Set the flag, and wake who waits."""
        super().set()
        for one, turn in self._waiting:
            self._world.wake(one, turn)
        self._waiting.clear()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, for at most `timeout` seconds of virtual time."""
        if not self.is_set() and timeout != 0:
            me, turn = getcurrent(), self._world.turn
            self._waiting.append((me, turn))
            if timeout is not None:
                self._world.wake(me, turn, timeout)
            self._world.pause()
            if (me, turn) in self._waiting:
                self._waiting.remove((me, turn))
        return self.is_set()


class Threads(IoThreads):
    """A few greenlets in place of threads. Each job begins after a drawn time."""

    def __init__(self, world: World, group: str, name: str, threads: int) -> None:
        self._world, self._group, self._name, self._count = world, group, name, threads
        self._queued: deque[Callable[[], None]] = deque()
        self._running: list[_Running] = []

    def submit(self, job: Callable[[], None]) -> None:
        """Queue `job`."""
        self._queued.append(job)
        self._begin()

    def replace(self, thread: int) -> None:
        """Replace the greenlet whose job has run longest; all have the number of the one thread."""
        next(one for one in self._running if not one.replaced).replaced = True
        self._begin()

    def close(self, timeout: float) -> bool:
        """Let at most `timeout` seconds pass until no job is left; return whether none is."""
        end = self._world.now + timeout
        while (self._running or self._queued) and self._world.now < end:
            self._world.sleep(0.01)
        return not self._running and not self._queued

    def _begin(self) -> None:
        while self._queued and sum(not one.replaced for one in self._running) < self._count:
            one = _Running(self._queued.popleft())
            self._running.append(one)
            self._world.spawn(
                lambda one=one: self._work(one), self._group, self._world.random.expovariate(5000)
            )

    def _work(self, one: _Running) -> None:
        one.job()
        self._running.remove(one)
        self._begin()


class _Running:
    def __init__(self, job: Callable[[], None]) -> None:
        self.job, self.replaced = job, False


class CopyFaults:
    """Faults of copies: each layer fails with `chance`, and a tenth of these hang instead."""

    def __init__(self, world: World, chance: float) -> None:
        self._world = world
        self.chance = chance

    def meet(self) -> None:
        """Let a layer's time pass; raise OSError if it fails."""
        self._world.sleep(self._world.random.expovariate(2000))
        if self._world.chance(self.chance):
            if self._world.chance(0.1):
                self._world.sleep(self._world.random.uniform(0.1, 3.0))
            else:
                raise OSError("a layer fails")


class Engine(LaneEngine):
    """A transfer engine that really copies, layer by layer, in virtual time, on one thread."""

    def __init__(self, world: World, group: str, faults: CopyFaults, device, host) -> None:
        super().__init__(Sides(device, host))
        self._world = world
        self._stores, self._loads = (_Lane(world, group, faults) for _ in range(2))

    def _layer_ticket(self, layers: Iterable[int]) -> LayerTicket:
        return _Ticket(self._world, layers)


class _Lane:
    def __init__(self, world: World, group: str, faults: CopyFaults) -> None:
        self._world, self._group, self._faults = world, group, faults
        self._jobs: deque[Job] = deque()
        self._busy = False

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        if not self._busy:
            self._busy = True
            self._world.spawn(self._serve, self._group, self._world.random.expovariate(5000))

    def stop(self) -> None:
        pass

    def join(self, deadline: float) -> None:
        assert not self._jobs, "the engine was closed before its work was over"

    def _serve(self) -> None:
        while self._jobs:
            self._run(self._jobs.popleft())
        self._busy = False

    def _run(self, job: Job) -> None:
        try:
            while not all(fence.query() for fence in job.after):
                self._world.sleep(0.01)
            copies = job.descriptors()
            for layer, rows in copies.by_layer():
                self._faults.meet()
                moved = copies[rows]
                copy_segments(moved.source, moved.destination, moved.length)
                if isinstance(job.ticket, LayerTicket):
                    job.ticket.finish_layer(layer)
        except OSError as error:
            job.finish(TransferError(str(error)))
        else:
            job.finish(None)


class _Ticket(LayerTicket):
    def __init__(self, world: World, layers: Iterable[int]) -> None:
        super().__init__(layers)
        self._world = world

    def wait(self, timeout: float | None = None) -> bool:
        while not super().wait(0.0):
            self._world.sleep(0.0005)
        return True

    def wait_layer(self, layer: int, timeout: float | None = None, *, stream: int | None = None) -> bool:
        while not super().wait_layer(layer, 0.0, stream=stream):
            self._world.sleep(0.0005)
        return True


@contextmanager
def no_time(world: World, what: str) -> Iterator[None]:
    """Assert that the block lets no virtual time pass: whatever it calls waits for nothing."""
    before = world.now
    yield
    assert world.now == before, f"{what} waited for {world.now - before} s"
