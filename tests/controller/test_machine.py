"""Random lives of many requests, on real pools, threads and stores, with faults: whatever is restored is
byte-exact, and nothing is lost.

The model is a set: the prefixes that were ever committed, and those of them that came with a state. A restore
may be shallower than what the model knows (things are evicted, deleted, corrupted), but never anything else.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tiercache_backends.memory import MemoryBackend
from tiercache_kernels.reference import copy_segments

from tests.controller.harness import FIVE, Engine, P, prompt
from tests.examples import example_count
from tiercache.controller import WRITE_BACK, WRITE_THROUGH, ControllerOptions, ParkedStatus, Status
from tiercache.core import Outcome, Tier
from tiercache.errors import AdmissionError, InputError, PoolFullError
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.transfer import CopyEngine

GETS = [Outcome.MISS, Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR, "raise"]
SETS = [Outcome.THROTTLED, Outcome.ERROR, "raise"]


class Flaky(StorageBackend):
    """A store whose next calls fail as it was told; what a get does not return it scribbles over.

    Its medium outlives a `close`.

    Thread safety: as the contract says; the plans are lists, whose pops are atomic.
    """

    capabilities = MemoryBackend.capabilities

    def __init__(self, inner):
        self.inner = inner
        self.gets, self.sets = [], []

    @classmethod
    def from_config(cls, section, context):
        raise NotImplementedError

    def get(self, items):
        outcomes = self.inner.get(items)
        if not (fault := self._next(self.gets)):
            return outcomes
        for item in items:
            for buffer in item.buffers:
                buffer[:] = b"\xee" * len(buffer)
        if fault in (Outcome.MISS, Outcome.CORRUPT):
            self.inner.delete([item.key for item in items])
        return [fault] * len(items)

    def set(self, items):
        fault = self._next(self.sets)
        return [fault] * len(items) if fault else self.inner.set(items)

    @staticmethod
    def _next(plan):
        try:
            fault = plan.pop()
        except IndexError:
            return None
        if fault == "raise":
            raise RuntimeError("this store breaks its contract")
        return fault

    def exists(self, keys):
        return self.inner.exists(keys)

    def delete(self, keys):
        return self.inner.delete(keys)

    def scan(self, namespace=None, cursor=b""):
        return self.inner.scan(namespace, cursor)

    def describe(self, keys):
        return self.inner.describe(keys)

    def register_namespace(self, record):
        self.inner.register_namespace(record)

    def namespaces(self):
        return self.inner.namespaces()

    def usage(self):
        return self.inner.usage()

    def flush(self):
        self.inner.flush()

    def close(self):
        pass


class Fence:
    """Passed when the test says so, or the engine's thread waits for it."""

    def __init__(self):
        self._passed = threading.Event()
        self.query = self._passed.is_set
        self.open = self._passed.set
        self._owner = threading.current_thread()

    def synchronize(self):
        if threading.current_thread() is self._owner:
            self.open()
        assert self._passed.wait(30)


class Open:
    """A request between its admission and its release.

    `done`: tokens computed and committed; None before the restore.
    """

    def __init__(self, admission, tokens, parked=None):
        self.admission, self.tokens, self.done = admission, tokens, None
        self.parked = parked
        """The tokens with which the request was parked; None unless it is being resumed."""


class Lives(RuleBasedStateMachine):
    @initialize(
        pools=st.sampled_from(["pages", "both", "states", "five"]),
        blocks=st.sampled_from([3, 12, 80, 80]),
        file=st.sampled_from([True, False, False]),
        write=st.sampled_from([WRITE_THROUGH, WRITE_BACK]),
        piece=st.sampled_from([1, 8 << 20]),
    )
    def begin(self, pools, blocks, file, write, piece):
        self.hybrid, self.kv = pools != "pages", pools != "states"
        self.more = FIVE if pools == "five" else ()
        self.blocks, self.write, self.piece = blocks, write, piece
        self.directory = tempfile.mkdtemp() if file else None
        self.medium = None if file else MemoryBackend()
        self.failing_copies = []
        self.pages, self.states = set(), set()
        self.opened, self.fences, self.parked = [], [], []
        self.now = 0.0
        self.start()

    def start(self):
        inner = (
            open_backend(f"file://{self.directory}/store?capacity=8MiB") if self.directory else self.medium
        )
        self.store = Flaky(inner)
        self.engine = Engine(
            self.store,
            pages=20,
            states=14,
            blocks=self.blocks,
            hybrid=self.hybrid,
            kv=self.kv,
            more=self.more,
            clock=lambda: time.monotonic() + self.now,
            options=ControllerOptions(
                restore_deadline=20.0,
                write_retries=1,
                pin_share=0.5,
                park_share=0.9,
                write=self.write,
                write_chance=0.0,
                piece_bytes=self.piece,
            ),
            engine=lambda d, h: CopyEngine(d, h, copier=self.copy),
            told=True,
        )
        self.controller = self.engine.controller

    def copy(self, *columns):
        if self.failing_copies and self.failing_copies.pop():
            raise OSError("a layer fails")
        copy_segments(*columns)

    # -- requests
    # ------------------------------------------------------------------------------------------------------

    paths = st.lists(st.integers(1, 2), min_size=1, max_size=5)
    tails = st.integers(0, P - 1)

    def admit(self, path, tail, answer=()):
        asked = prompt(*path) + [7] * tail
        tokens = np.array(asked + prompt(*answer), np.uint64)
        available = {name: pool.available for name, pool in self.engine.pools.items()}
        lookup = self.controller.lookup(tokens[: len(asked)])
        try:
            admission = self.controller.admit(lookup, tokens=len(tokens), states=4 if self.hybrid else 0)
        except PoolFullError:
            assert self.opened or self.fences or self.engine.context.in_flight.operations, (
                "there is room when nobody holds any"
            )
            assert all(pool.available >= available[name] for name, pool in self.engine.pools.items())
            return None
        return Open(admission, tokens)

    @rule(path=paths, tail=tails, answer=st.lists(st.integers(1, 2), max_size=2), fenced=st.booleans())
    def serve(self, path, tail, answer, fenced):
        if request := self.admit(path, tail, answer):
            self.go_on(request, len(request.tokens), fenced)
            self.release(request, fenced)

    # Whether a request is open depends on when threads were through, so that it is no precondition: what is
    # drawn must not depend on it.

    @rule(path=paths, tail=tails)
    def keep_open(self, path, tail):
        if len(self.opened) < 3 and (request := self.admit(path, tail)):
            self.opened.append(request)

    @rule(which=st.integers(0, 2))
    def look(self, which):
        if (request := self.one(which)) and request.done is None:
            with contextlib.suppress(*([] if request.parked is None else [PoolFullError])):
                request.admission.poll()

    @rule(which=st.integers(0, 2))
    def start_early(self, which):
        request = self.one(which)
        if not request or request.done is not None:
            return
        if request.parked is not None:
            with contextlib.suppress(PoolFullError):
                request.admission.start()
            return
        # private: a request that waits for storage and one whose load has failed are both PENDING
        if request.admission.poll().status is Status.PENDING and not request.admission._restore.has_loads:
            assert request.admission.start().status is not Status.PENDING

    @rule(which=st.integers(0, 2), pages=st.integers(1, 5), fenced=st.booleans())
    def compute_some(self, which, pages, fenced):
        request = self.one(which)
        if request and self.go_on(request, pages * P, fenced) is None:
            self.opened.remove(request)
            self.release(request, fenced)

    @rule(which=st.integers(0, 2), fenced=st.booleans())
    def let_go(self, which, fenced):
        if request := self.one(which):
            self.opened.remove(request)
            self.release(request, fenced)

    @rule(which=st.integers(0, 2), pages=st.integers(0, 2))
    def fork(self, which, pages):
        """Another continuation, with a longer answer, goes on beside its source."""
        request = self.one(which)
        if not request or request.done is None or len(self.opened) > 3:
            return
        tokens = np.array([*request.tokens.tolist(), *prompt(*[3] * pages)], np.uint64)
        try:
            admission = self.controller.fork(
                request.admission, tokens=len(tokens), states=2 if self.hybrid else 0
            )
        except PoolFullError:
            self.engine.check()
            return
        self.opened.append(Open(admission, tokens))
        self.opened[-1].done = admission.depth
        self.engine.verify(admission, tokens, admission.depth // P)

    @rule(which=st.integers(0, 2), tail=tails, below=st.booleans(), fenced=st.booleans())
    def park(self, which, tail, below, fenced):
        request = self.one(which)
        if request and request.done and len(self.parked) < 4:
            self.retract(request, tail, 3600.0, below, fenced)

    @rule(
        path=paths,
        tail=tails,
        ttl=st.sampled_from([0.5, *[3600.0] * 5]),
        below=st.booleans(),
        fenced=st.booleans(),
    )
    def serve_and_park(self, path, tail, ttl, below, fenced):
        if len(self.opened) < 3 and len(self.parked) < 4 and (request := self.admit(path, tail)):
            self.opened.append(request)
            if self.go_on(request, len(path) * P, fenced):
                self.retract(request, tail, ttl, below, fenced)

    def retract(self, request, tail, ttl, below, fenced):
        admission, tokens = request.admission, request.tokens[: request.done + tail]
        try:
            live = self.engine.take_state(admission, tokens) if self.hybrid else None
        except PoolFullError:
            return
        self.engine.compute_tail(admission, tokens)
        fence = self.fence() if fenced else None
        try:
            held = self.controller.park(admission, tokens, live, ttl=ttl, below=below, fence=fence)
        except (AdmissionError, PoolFullError):
            self.engine.check()
            assert not admission.released
            return
        self.opened.remove(request)
        self.parked.append((held, tokens, request.tokens))
        self.engine.check()

    @rule(which=st.integers(0, 2), ticket=st.booleans(), at_once=st.sampled_from([True, True, False]))
    def resume(self, which, ticket, at_once):
        """Resume by the object or, if it is in storage, by its bytes."""
        if not self.parked or len(self.opened) > 3:
            return
        held, tokens, longer = self.parked[which % len(self.parked)]
        if ticket and not isinstance(held, bytes) and held.status is ParkedStatus.STORED:
            held = held.to_bytes()
        try:
            admission = self.controller.resume(held, tokens=len(longer), states=3)
        except PoolFullError:
            self.engine.check()
            return
        except AdmissionError:
            self.parked.pop(which % len(self.parked))
            return
        self.parked.pop(which % len(self.parked))
        request = Open(admission, longer, tokens)
        self.engine.check()
        if at_once:
            self.go_on(request, len(longer), fenced=False)
            self.release(request, fenced=False)
        else:
            self.opened.append(request)

    @rule(which=st.integers(0, 2))
    def give_up(self, which):
        if self.parked and not isinstance(held := self.parked.pop(which % len(self.parked))[0], bytes):
            with contextlib.suppress(AdmissionError):
                held.release()
            self.engine.check()

    def one(self, which):
        """One of the open requests, if there is any."""
        return self.opened[which % len(self.opened)] if self.opened else None

    def go_on(self, request, upto, fenced):
        """Restore if that is still to be done, compute up to `upto` tokens and commit; None if there was no
        room to fall back.
        """
        admission, tokens = request.admission, request.tokens
        if request.done is None:
            try:
                if request.parked is not None and admission.wait() and admission.resumed:
                    self.engine.verify_resumed(admission, request.parked)
                    request.done = len(request.parked) // P * P
                    return self.go_on(request, upto, fenced)
                request.done = self.engine.restore(admission, tokens)
            except PoolFullError:
                return None
            known = tuple(tokens[: request.done].tolist())
            assert not known or known in (self.states if self.hybrid else self.pages)
        fence = self.fence() if fenced else None
        for end in sorted({*admission.checkpoints, len(tokens), min(upto, len(tokens))}):
            if request.done < end <= upto:
                self.engine.compute(admission, tokens, request.done, end)
                states = (
                    {end: self.engine.take_state(admission, tokens[:end])}
                    if self.hybrid and end % P == 0
                    else {}
                )
                self.controller.commit(admission, tokens[:end], states, fence=fence)
                self.pages |= {tuple(tokens[:n].tolist()) for n in range(P, end + 1, P)}
                self.states |= {tuple(tokens[:n].tolist()) for n in states}
                request.done = end
        self.engine.verify(admission, tokens, request.done // P)
        return request.done

    def release(self, request, fenced):
        self.controller.release(request.admission, fence=self.fence() if fenced else None)

    def fence(self):
        self.fences.append(Fence())
        return self.fences[-1]

    # -- the future
    # ----------------------------------------------------------------------------------------------------

    @rule(path=paths, tail=tails, cancel=st.booleans())
    def prefetch(self, path, tail, cancel):
        ticket = self.controller.prefetch(prompt(*path) + [7] * tail)
        if cancel:
            ticket.cancel()
        assert ticket.tokens <= len(path) * P

    @rule(path=paths, ttl=st.sampled_from([0.001, 5.0, 3600.0]))
    def pin(self, path, ttl):
        before = self.engine.metrics.value("pinned_bytes")
        try:
            assert self.controller.pin(prompt(*path), ttl) == len(path) * P
        except InputError:
            assert not self.controller.unpin(prompt(*path))
        except AdmissionError:
            assert self.engine.metrics.value("pinned_bytes") <= before
        self.share_is_respected()

    @rule(path=paths)
    def unpin(self, path):
        self.controller.unpin(prompt(*path))

    @rule(path=paths, expected_in=st.sampled_from([0.001, 1.0, 3600.0]))
    def hint(self, path, expected_in):
        with contextlib.suppress(InputError):
            assert self.controller.hint(prompt(*path), expected_in) <= len(path) * P

    @rule(seconds=st.sampled_from([0.01, 1.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.controller.tick()

    def share_is_respected(self):
        """The pins of prefixes cover at most half of the host's blocks, were all of their objects there."""
        context = self.engine.context
        # private: no public call says which nodes are pinned for a time
        ends = {pin.node for pin in self.controller._pins.pins}
        pages = sum(node.pages for node in {node for end in ends for node in end.path()}) * self.kv
        assert pages <= context.arena.blocks // 2
        unit = context.arena.block_bytes
        assert pages * unit <= self.engine.metrics.value("pinned_bytes") <= context.arena.blocks // 2 * unit

    # -- the world
    # -----------------------------------------------------------------------------------------------------

    @rule(tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def evict(self, tier):
        self.controller.evict(tier)

    @rule(number=st.integers(0, 30))
    def delete(self, number):
        keys = sorted(entry.key for entry in self.store.scan_all())
        if keys:
            self.store.delete([keys[number % len(keys)]])

    @rule(faults=st.lists(st.sampled_from([None, *GETS]), min_size=1, max_size=3))
    def fail_gets(self, faults):
        self.store.gets = faults

    @rule(faults=st.lists(st.sampled_from([None, *SETS]), min_size=1, max_size=2))
    def fail_sets(self, faults):
        self.store.sets = faults

    @rule(layers=st.lists(st.booleans(), min_size=1, max_size=5))
    def fail_copies(self, layers):
        self.failing_copies[:] = layers

    @rule()
    def tick(self):
        self.controller.tick(0.001)

    @rule()
    def quiet(self):
        """Everything lands; with requests open, everything is accounted for.

        Enough failed sets in a row suspend calls of the store. A flush does not wait for writes that are
        suspended; the trials that end a suspension go on with each tick.
        """
        for fence in self.fences:
            fence.open()
        self.fences.clear()
        self.controller.flush(20)
        self.share_is_respected()
        end = time.monotonic() + 100
        in_flight = self.engine.context.in_flight
        # A write that is under way while a test passes time has hung, as far as the clock can tell.
        while (in_flight.operations or in_flight.stranded) and time.monotonic() < end:
            self.controller.tick(0.1)
        assert not in_flight.operations
        assert not in_flight.stranded
        self.engine.check()
        for request in self.opened:
            if request.done is not None:
                self.engine.verify(request.admission, request.tokens, request.done // P)

    @rule()
    def restart(self):
        self.quiet()
        self.opened.clear()
        self.parked = [
            (held if isinstance(held, bytes) else held.to_bytes(), *rest)
            for held, *rest in self.parked
            if isinstance(held, bytes) or held.status is ParkedStatus.STORED
        ]
        self.shut_down()
        self.start()

    def shut_down(self):
        assert self.controller.close()
        if self.directory:
            self.store.inner.close()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        try:
            for request in self.opened:
                self.controller.release(request.admission)
            self.opened.clear()
            self.now += 10_000.0
            self.quiet()
            self.controller.evict(Tier.DEVICE)
            self.controller.evict(Tier.HOST)
            self.engine.check()
            assert {name: pool.allocator.used for name, pool in self.engine.pools.items()} == dict.fromkeys(
                self.engine.pools, 0
            )
            assert self.engine.arena.available == self.engine.arena.blocks
            assert self.engine.context.index.holds_only([])
        finally:
            self.shut_down()
            if self.directory:
                shutil.rmtree(self.directory)


# No shrinking: every step has threads behind it, and the failing run's own steps are printed and short.
Lives.TestCase.settings = settings(
    max_examples=example_count(60),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    phases=[Phase.generate],
)
test_random_lives = Lives.TestCase
