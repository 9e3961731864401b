"""A simulated CUDA device that needs no hardware: memory of the CPU, streams as threads, and checks that are
stricter than a driver's.

    device = SimulatedDevice()
    pool_memory = device.adopt(array)                   this array is device memory from now on
    engine = CudaEngine(pools, hosts, device=device)
    stream = device.create_stream(urgent=False)
    device.run(stream, lambda: time.sleep(0.1))         a slow kernel
    event = device.event(stream)                        like a torch.cuda.Event that is recorded in the stream
    device.fail("copy_batch", at=2)                     the second call from now on is refused
    device.lose()                                       as after an illegal address: every later call fails
    driver = SimulatedDriver()                          several devices: SimulatedDevice(1, driver=driver)
    driver.contexts                                     {1}: the devices that a context was made on

Work in a stream runs later and at its own pace, as on a real device, so a caller that does not wait reads old
bytes. Each side of a copy must lie in device memory, or in one piece of page-locked memory. Misuse that a
driver would let pass, wait for or crash on raises SimulatedError here, and an error inside a stream loses the
device.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tests.transfer.simulated_memory import MemoryMap, MemoryPiece, SimulatedError
from tiercache.transfer.cuda import Card, CudaDevice, Method
from tiercache.transfer.cuda.device import DEFAULT_STREAMS, MAX_COPIES
from tiercache.transfer.descriptors import Descriptors

_CHUNK: Final = 32 << 10
_ROOM: Final = 1024
"""Pieces of work that may wait in a stream; a driver would block the caller of one more."""
_PATIENCE_S: Final = 60.0
"""Seconds that a stream or a thread waits for an event, before it takes the wait for a cycle."""


@dataclass
class _Event:
    # Numbers of recordings: `asked` were queued, and the newest one that a stream has run is `passed`. Equal:
    # the event has passed.
    asked: int = 0
    passed: int = 0


class SimulatedDriver:
    """Each thread's current device, by default 0, and the devices of the process with a context."""

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        """Devices that were current when a call was made, also calls meant for another device."""
        self._here = threading.local()

    @property
    def device(self) -> int:
        """The current device of the calling thread."""
        entered = self._entered()
        return entered[-1] if entered else 0

    @property
    def entered(self) -> bool:
        """Whether a device was made current on the calling thread."""
        return bool(self._entered())

    def push(self, ordinal: int) -> None:
        """Make a device the current one of the calling thread."""
        self._entered().append(ordinal)

    def pop(self) -> None:
        """Restore the device that was current before the latest `push` on the calling thread."""
        self._entered().pop()

    def _entered(self) -> list[int]:
        found: list[int] = self._here.__dict__.setdefault("entered", [])
        return found


class SimulatedEvent:
    """A recorded event with a handle, like `torch.cuda.Event`. Thread safety: any thread."""

    def __init__(self, device: SimulatedDevice, handle: int) -> None:
        self._device = device
        self.cuda_event = handle

    def query(self) -> bool:
        """Return whether the event has passed."""
        with self._device.current():
            return self._device.has_passed(self.cuda_event)

    def synchronize(self) -> None:
        """Block until the event has passed."""
        with self._device.current():
            self._device.synchronize_event(self.cuda_event)


class _Stream:
    """A queue of work and the thread that runs it, in order. Thread safety: `put` from any thread."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._device = device
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        if self._work.qsize() >= _ROOM:
            raise SimulatedError(
                f"{_ROOM} pieces of work wait in a stream: a driver would hold this thread, and others"
                " with it"
            )
        self._work.put(work)

    def end(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if self._device.lost is None:
                    work()
            except Exception as error:  # noqa: BLE001  a device has no caller to raise to
                self._device.lose(error)
            del work


class SimulatedDevice(CudaDevice):
    """A CUDA device that is simulated on the CPU; see the module.

    `seed` seeds the random pauses, each up to `jitter` seconds, before every queued transfer, and the order
    within a batch. `seconds` gives the duration of a transfer from its method, its bytes and its number of
    copies. `unavailable` maps each method that the device lacks to the reason. `driver` is shared with other
    devices.

    Thread safety: as `CudaDevice`, and it is checked.
    """

    def __init__(
        self,
        ordinal: int = 0,
        *,
        seed: int = 0,
        jitter: float = 0.0,
        seconds: Callable[[Method, int, int], float] = lambda method, nbytes, count: 0.0,
        unavailable: dict[Method, str] | None = None,
        name: str = "Simulated",
        driver: SimulatedDriver | None = None,
    ) -> None:
        self.ordinal = ordinal
        self.card = Card(name, f"0000:{ordinal:02x}:00.0", 13000, 132)
        self.driver = driver or SimulatedDriver()
        self.unavailable = dict(unavailable or {})
        self.calls: Counter[str] = Counter()
        self.moved: Counter[Method] = Counter()
        self.lost: Exception | None = None
        # Each rule is [call, number of calls until it is refused, error].
        self._rules: list[list[Any]] = []
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Event] = {}
        self._changed = threading.Condition()
        self.memory = MemoryMap()
        self._random = random.Random(seed)
        self._jitter, self.seconds = jitter, seconds
        self._handles = count(1 << 40)
        self._defaults = set(DEFAULT_STREAMS)

    # Calls for tests.

    def adopt(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Treat an array of the caller's as device memory, and return it."""
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        self.memory.keep(owner.ctypes.data, MemoryPiece(owner.nbytes, "adopted"), owner)
        return array

    def adopt_at(self, address: int, nbytes: int) -> None:
        """Treat memory that the caller keeps alive as one allocation, even within something larger."""
        self.memory.keep(address, MemoryPiece(nbytes, "adopted"))

    def fail(self, call: str, *, at: int = 1, error: Exception | None = None) -> None:
        """Refuse the `at`-th `call` from now on; that call queues nothing."""
        self._rules.append([call, at, error or SimulatedError(f"{call} was refused")])

    def forgive(self) -> int:
        """Forget the refusals that were requested and have not happened yet; return how many there were."""
        forgotten, self._rules = len(self._rules), []
        return forgotten

    def lose(self, error: Exception | None = None) -> None:
        """Lose the device: work that is queued is dropped, and every later call fails."""
        with self._changed:
            self.lost = self.lost or error or SimulatedError("an illegal address was accessed")
            self._changed.notify_all()

    def run(self, stream: int, kernel: Callable[[], object]) -> None:
        """Queue a kernel in a stream."""
        self._stream(stream).put(kernel)

    def event(self, stream: int) -> SimulatedEvent:
        """Create an event, record it in `stream` now, and return it."""
        with self.current():
            handle = self.create_event()
            self.record(handle, stream)
        return SimulatedEvent(self, handle)

    @property
    def leftovers(self) -> dict[str, int]:
        """Streams, events and memory that were taken and not given back, by kind, without adopted memory."""
        kinds = self.memory.kinds()
        counts = {"streams": len(self._streams.keys() - self._defaults), "events": len(self._events)}
        return {name: count for name, count in {**counts, **kinds}.items() if count and name != "adopted"}

    # The contract.

    def activate(self) -> None:
        self.driver.push(self.ordinal)
        try:
            self._enter("activate")
        except BaseException:
            self.driver.pop()
            raise

    @contextmanager
    def current(self) -> Iterator[None]:
        self.driver.push(self.ordinal)
        try:
            yield
        finally:
            self.driver.pop()

    def create_stream(self, *, urgent: bool) -> int:
        self._enter("create_stream")
        handle = self._handle()
        self._streams[handle] = _Stream(self, f"simulated-stream-{'urgent' if urgent else 'patient'}")
        return handle

    def destroy_stream(self, stream: int) -> None:
        self._enter("destroy_stream")
        self._stream(stream).end()
        del self._streams[stream]

    def synchronize_stream(self, stream: int) -> None:
        self._enter("synchronize_stream")
        handle = self._handle()
        self._events[handle] = _Event()
        self._record(handle, stream)
        try:
            self._await(handle)
        finally:
            del self._events[handle]

    def create_event(self) -> int:
        self._enter("create_event")
        handle = self._handle()
        self._events[handle] = _Event()
        return handle

    def destroy_event(self, event: int) -> None:
        self._enter("destroy_event")
        if self._event(event).asked != self._event(event).passed:
            raise SimulatedError("an event was destroyed that work waits for")
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        self._enter("record")
        self._record(event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._enter("wait_event")
        known = self._event(event)
        # the recording it stands for at the call, as in CUDA; 0, and so no wait, if it was never recorded
        number = known.asked

        def wait() -> None:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: known.passed >= number or self.lost is not None, _PATIENCE_S
                ):
                    raise SimulatedError("a stream waited for an event for a minute")

        self._stream(stream).put(wait)

    def synchronize_event(self, event: int) -> None:
        self._enter("synchronize_event")
        self._await(event)

    def has_passed(self, event: int) -> bool:
        self._enter("has_passed")
        known = self._event(event)
        return known.passed >= known.asked

    def allocate(self, nbytes: int) -> int:
        self._enter("allocate")
        region = mmap.mmap(-1, nbytes)
        address = _address(region)
        self.memory.keep(address, MemoryPiece(nbytes, "device", region))
        return address

    def release(self, address: int) -> None:
        self._enter("release")
        self.memory.drop(address, "device")

    def allocate_host(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self._enter("allocate_host")
        array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8, nbytes)
        self.memory.keep(array.ctypes.data, MemoryPiece(nbytes, "page-locked"), array)
        return array

    def lock(self, address: int, nbytes: int) -> None:
        self._enter("lock")
        if address % mmap.PAGESIZE or nbytes % mmap.PAGESIZE:
            raise SimulatedError("only whole pages can be page-locked")
        if self.memory.overlaps(address, nbytes):
            raise SimulatedError("memory was page-locked twice")
        self.memory.keep(address, MemoryPiece(nbytes, "locked"))

    def unlock(self, address: int) -> None:
        self._enter("unlock")
        self.memory.drop(address, "locked")

    def copy(self, source: int, destination: int, nbytes: int, stream: int) -> None:
        self._enter("copy")
        self._queue(Method.MEMCPY, [(source, destination, nbytes)], stream)

    def copy_batch(self, copies: Descriptors, stream: int) -> None:
        self._enter("copy_batch")
        if stream in self._defaults:
            raise SimulatedError("a batch cannot be queued in a default stream")
        if not 1 <= len(copies) <= MAX_COPIES:
            raise SimulatedError(f"a batch of {len(copies)} copies crashes some drivers")
        batch = list(
            zip(copies.source.tolist(), copies.destination.tolist(), copies.length.tolist(), strict=True)
        )
        self._random.shuffle(batch)  # the copies of a batch run in no defined order
        self._queue(Method.BATCH, batch, stream)

    def copy_table(self, table: int, rows: int, chunks: int, blocks: int, stream: int) -> None:
        self._enter("copy_table")
        if min(rows, chunks, blocks) < 1:
            raise SimulatedError(
                f"a kernel of {blocks} blocks was launched over {rows} rows and {chunks} chunks"
            )
        self.memory.check(table, 32 * (rows + 1))

        def kernel() -> None:
            self.memory.check(table, 32 * (rows + 1))
            found = np.frombuffer(ctypes.string_at(table, 32 * (rows + 1)), np.uint64).reshape(-1, 4).tolist()
            if found[-1][3] - found[0][3] != chunks or any(
                below[3] - row[3] != -(-row[2] // _CHUNK) for row, below in pairwise(found)
            ):
                raise SimulatedError("the table of a kernel is not in order")
            self._move(Method.KERNEL, [(row[0], row[1], row[2]) for row in found[:-1]])

        self._stream(stream).put(kernel)

    def _queue(self, method: Method, copies: list[tuple[int, int, int]], stream: int) -> None:
        for source, destination, nbytes in copies:
            self.memory.check(source, nbytes)
            self.memory.check(destination, nbytes)
        self._stream(stream).put(lambda: self._move(method, copies))

    def _move(self, method: Method, copies: list[tuple[int, int, int]]) -> None:
        nbytes = sum(length for _, _, length in copies)
        if pause := self._random.random() * self._jitter + self.seconds(method, nbytes, len(copies)):
            time.sleep(pause)
        # Checked again: the memory must stay valid until the copy runs.
        for source, destination, length in copies:
            self.memory.check(source, length)
            self.memory.check(destination, length)
            ctypes.memmove(destination, source, length)
        self.moved[method] += nbytes

    def _record(self, event: int, stream: int) -> None:
        known = self._event(event)
        with self._changed:
            known.asked += 1
            number = known.asked

        def passed() -> None:
            with self._changed:
                known.passed = max(known.passed, number)
                self._changed.notify_all()

        self._stream(stream).put(passed)

    def _await(self, event: int) -> None:
        known = self._event(event)
        number = known.asked
        with self._changed:
            if not self._changed.wait_for(
                lambda: known.passed >= number or self.lost is not None, _PATIENCE_S
            ):
                raise SimulatedError("a thread waited for an event for a minute")
        if self.lost is not None:
            raise SimulatedError(f"the device is lost: {self.lost}")

    def _enter(self, call: str) -> None:
        self.calls[call] += 1
        # As in a driver, which uses the thread's current device even if another one was meant.
        self.driver.contexts.add(self.driver.device)
        if not self.driver.entered or self.driver.device != self.ordinal:
            raise SimulatedError(f"{call} was called on a thread whose device is not cuda:{self.ordinal}")
        if self.lost is not None:
            raise SimulatedError(f"the device is lost: {self.lost}")
        for rule in [rule for rule in self._rules if rule[0] == call]:
            rule[1] -= 1
            if not rule[1]:
                self._rules.remove(rule)
                raise rule[2]

    def _handle(self) -> int:
        return next(self._handles)

    def _stream(self, stream: int) -> _Stream:
        if stream in self._defaults and stream not in self._streams:
            self._streams[stream] = _Stream(self, "simulated-stream-default")
        if stream not in self._streams:
            raise SimulatedError(f"there is no stream {stream}")
        return self._streams[stream]

    def _event(self, event: int) -> _Event:
        if event not in self._events:
            raise SimulatedError(f"there is no event {event}")
        return self._events[event]


def _address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))
