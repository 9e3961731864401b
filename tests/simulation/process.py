"""One simulated worker process: its controller, its requests, and what it checks.

What is restored is checked byte for byte, and no method of the engine's thread may let time pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random

import numpy as np

from tests.controller.harness import FIVE, P, prompt
from tests.controller.harness import Engine as Harness
from tests.controller.told import Told, places
from tests.integrity import no_pin_is_left
from tests.simulation.plan import Life
from tests.simulation.router import Router
from tests.simulation.store import SimulatedStore, StoreFaults
from tests.simulation.world import CopyFaults, Engine, Flag, Threads, World, no_time
from tiercache.controller import Admission, ControllerOptions, Parked, ParkedStatus
from tiercache.core import Tier, TokenArray
from tiercache.errors import AdmissionError, InputError, PoolFullError

DEADLINE = 5.0
"""Seconds for which an admission waits for storage."""
STEPS = 25
"""Steps of one process."""
STATES = 4
"""State slots of one request."""


class ProcessKilledError(Exception):
    """The process is killed here."""


class Open:
    """A request between its admission and its release; `done` is None before the restore.

    `expected` is the depth that the restore must reach, if that is known. `parked` are the tokens with which
    the request was parked, if it is one that goes on.
    """

    def __init__(
        self,
        admission: Admission,
        tokens: TokenArray,
        expected: int | None = None,
        parked: TokenArray | None = None,
    ) -> None:
        self.admission, self.tokens, self.expected, self.parked = admission, tokens, expected, parked
        self.done: int | None = None


class Fence:
    """Passed when virtual time says so."""

    def __init__(self, world: World, delay: float) -> None:
        self._world, self._at = world, world.now + delay

    def query(self) -> bool:
        """Return whether the time has come."""
        return self._world.now >= self._at

    def synchronize(self) -> None:
        """Let time pass until then."""
        while not self.query():
            self._world.sleep(0.01)


class Process:
    """A worker process: one controller and an engine whose model is a hash, on one greenlet."""

    def __init__(self, life: Life, name: str, draw: Random) -> None:
        self._life, self._world, self._draw, self._plan = life, life.world, draw, life.plan
        plan, world = life.plan, life.world
        self._faults = CopyFaults(world, plan.copy_faults)
        self._store = SimulatedStore(world, life.medium, plan.faults)
        self._engine = Harness(
            self._store,
            pages=plan.pages,
            states=plan.states,
            blocks=plan.blocks,
            hybrid=plan.hybrid,
            kv=plan.pools != "states",
            more=FIVE if plan.has_more else (),
            clock=world.clock,
            options=ControllerOptions(
                restore_deadline=DEADLINE, write_retries=1, pin_share=0.5, park_share=0.9,
                write=plan.write, write_chance=0.0, piece_bytes=plan.piece,
            ),
            engine=lambda device, host: Engine(world, name, self._faults, device, host),
            threads=lambda kind, count: Threads(world, name, kind, count),
        )  # fmt: skip
        self._engine.context.events.arrived = Flag(world)
        self._told = Told(self._engine.context)
        self._router = Router(world, draw, [self._told.source])
        world.spawn(self._follow, name)
        Harness.opened.remove(self._engine.controller)
        self._controller = self._engine.controller
        self._closed = False
        self._opened: list[Open] = []
        self._parked: list[tuple[Parked | bytes, TokenArray, TokenArray]] = []

    # -- the life

    def live(self) -> None:
        """Take some steps; raises ProcessKilledError at a kill."""
        rules: list[tuple[int, Callable[[], None]]] = [
            (8, self.serve), (5, self.open_one), (5, self.look), (2, self.start_early),
            (5, self.compute_some), (3, self.let_go), (4, self.park), (4, self.resume),
            (1, self.give_up_parked), (3, self.evict), (2, self.prefetch), (2, self.pin), (1, self.hint),
            (4, self.wait_a_while), (2, self.quiet),
        ]  # fmt: skip
        if not self._plan.calm:
            rules += [(1, self.lose_objects), (1, self.outage), (1, self.kill)]
        if self._plan.parks_often:
            rules += [(8, self.serve_and_park), (8, self.resume)]
        weights, steps = [weight for weight, _ in rules], [step for _, step in rules]
        for _ in range(STEPS):
            [step] = self._draw.choices(steps, weights)
            self._world.note(step.__name__)
            step()
            self._world.sleep(self._draw.expovariate(200))

    def end(self) -> None:
        """Give everything back, and check that nothing is left over."""
        for request in self._opened:
            self._release(request)
        self._opened.clear()
        self._parked.clear()
        # Faults are over, and so are pins. A flush also ends the checks of what storage has.
        self._store.faults, self._faults.chance = StoreFaults(), 0.0
        self._world.sleep(10_000.0)
        self.quiet()
        self._controller.flush(5.0)  # reports what was given up before
        for _ in range(20):
            # A lookup begins a check of what storage still has: it refuses the children of a lost page.
            self._controller.lookup(prompt(9))
            self._world.sleep(0.1)
        self.quiet()
        stored = self._controller.flush(5.0)
        assert stored or self._plan.capacity, "faults are over, and yet something did not reach storage"
        for tier in (Tier.DEVICE, Tier.HOST):
            self._controller.evict(tier)
        self._engine.check()
        used = {name: pool.capacity - pool.available for name, pool in self._engine.pools.items()}
        assert used == dict.fromkeys(used, 0), f"slots are left in use: {used}"
        assert self._engine.arena.available == self._engine.arena.blocks
        assert no_pin_is_left(self._engine.controller)
        closed = self._controller.close(100.0)
        assert closed, "close found something that hangs"
        self._closed = True
        for what, count in self._router.counts.items():
            self._life.count(f"router {what}", count)
        self._life.count("processes")

    def forget(self) -> None:
        """Let the memory of a killed process go."""
        self._engine.arena.close()

    # -- requests

    def serve(self) -> None:
        """Serve one request whole."""
        if request := self._admit():
            if self._go_on(request, len(request.tokens)) is not None:
                self._life.count("served")
            self._release(request)

    def open_one(self) -> None:
        """Admit a request that stays open, and mostly begin with it."""
        if len(self._opened) < 3 and (request := self._admit()):
            if self._draw.random() < 0.7 and self._go_on(request, self._draw.randint(1, 5) * P) is None:
                self._release(request)
            else:
                self._opened.append(request)

    def look(self) -> None:
        """Poll an open request."""
        if (request := self._one()) and request.done is None:
            with contextlib.suppress(*([] if request.parked is None else [PoolFullError])):
                self._poll(request.admission.poll)

    def start_early(self) -> None:
        """Start a request without waiting for storage."""
        if (request := self._one()) and request.done is None:
            request.expected = None
            with contextlib.suppress(PoolFullError):
                self._poll(request.admission.start)

    def compute_some(self) -> None:
        """Compute a part of an open request."""
        request = self._one()
        if request and self._go_on(request, self._draw.randint(1, 5) * P) is None:
            self._opened.remove(request)
            self._release(request)

    def let_go(self) -> None:
        """Release an open request, finished or not."""
        if request := self._one():
            self._opened.remove(request)
            self._release(request)

    # -- continuations

    def serve_and_park(self) -> None:
        """Compute a new request, and park it."""
        if len(self._opened) < 3 and (request := self._admit()):
            self._opened.append(request)
            if self._go_on(request, len(request.tokens)):
                self._park(request)

    def park(self) -> None:
        """Park an open request."""
        if request := self._one():
            self._park(request)

    def _park(self, request: Open) -> None:
        """Park a request in the middle of a page; sometimes in storage, for any process."""
        if not request.done or len(self._parked) > 3:
            return
        admission, tokens = request.admission, request.tokens[: request.done + self._draw.randrange(P)]
        try:
            live = self._engine.take_state(admission, tokens) if self._plan.hybrid else None
        except PoolFullError:
            return
        self._engine.compute_tail(admission, tokens)
        ttl, below = self._draw.choice((0.5, 3600.0, 3600.0)), self._draw.random() < 0.5
        try:
            with no_time(self._world, "park"):
                held = self._controller.park(
                    admission, tokens, live, ttl=ttl, below=below, fence=self._fence()
                )
        except (AdmissionError, PoolFullError):
            assert not admission.released
            return
        self._opened.remove(request)
        self._parked.append((held, tokens, request.tokens))
        self._life.count("parks")

    def resume(self) -> None:
        """Go on with a parked request of this process, or with a ticket that any process left."""
        if (not self._parked and not self._life.tickets) or len(self._opened) > 3:
            return
        if self._life.tickets and (not self._parked or self._draw.random() < 0.5):
            held, tokens, longer = self._life.tickets.pop(self._draw.randrange(len(self._life.tickets)))
        else:
            held, tokens, longer = self._parked.pop(self._draw.randrange(len(self._parked)))
            if held.status is ParkedStatus.STORED and self._draw.random() < 0.5:
                self._life.tickets.append((held.to_bytes(), tokens, longer))  # may be taken twice
                return
        try:
            with no_time(self._world, "resume"):
                admission = self._controller.resume(held, tokens=len(longer), states=3)
        except (PoolFullError, AdmissionError):
            return
        request = Open(admission, longer, parked=tokens)
        if self._draw.random() < 0.5:
            self._go_on(request, len(longer))
            self._release(request)
        else:
            self._opened.append(request)

    def give_up_parked(self) -> None:
        """Release a parked request."""
        if self._parked:
            with contextlib.suppress(AdmissionError):
                self._parked.pop(self._draw.randrange(len(self._parked)))[0].release()

    def _one(self) -> Open | None:
        return self._draw.choice(self._opened) if self._opened else None

    def _admit(self) -> Open | None:
        asked = prompt(*self._path(5)) + [7] * self._draw.randrange(P)
        tokens = np.array(asked + prompt(*self._path(2)), np.uint64)
        expected = self._known(tokens[: len(asked)]) if self._plan.calm else None
        with no_time(self._world, "lookup and admit"):
            lookup = self._controller.lookup(tokens[: len(asked)])
            try:
                need = {"tokens": len(tokens), "states": STATES if self._plan.hybrid else 0}
                return Open(self._controller.admit(lookup, **need), tokens, expected)
            except PoolFullError:
                context = self._engine.context
                assert self._opened or context.device_work.retired or context.in_flight.operations, (
                    "there is no room although nobody holds any"
                )
                self._life.count("no room")
                return None

    def _known(self, asked: TokenArray) -> int:
        """Return the depth that a calm restore must reach: the deepest known prefix with a state."""
        known = self._life.states if self._plan.hybrid else self._life.pages
        depths = range((len(asked) - 1) // P * P, 0, -P)
        return next((n for n in depths if tuple(asked[:n].tolist()) in known), 0)

    def _path(self, longest: int) -> list[int]:
        return [self._draw.randint(1, 2) for _ in range(self._draw.randint(1, longest))]

    def _poll(self, call: Callable[[], object]) -> None:
        with no_time(self._world, "poll"):
            call()

    def _go_on(self, request: Open, upto: int) -> int | None:
        """Restore if need be, compute up to `upto` and commit; None if there was no room to fall back."""
        admission, tokens = request.admission, request.tokens
        if request.done is None and not self._restore(request):
            return None
        assert request.done is not None
        fence = self._fence()
        for end in sorted({*admission.checkpoints, len(tokens), min(upto, len(tokens))}):
            if request.done < end <= upto:
                self._engine.compute(admission, tokens, request.done, end)
                states = {}
                if self._plan.hybrid and end % P == 0:
                    with contextlib.suppress(PoolFullError):  # a continuation has fewer
                        states = {end: self._engine.take_state(admission, tokens[:end])}
                with no_time(self._world, "commit"):
                    self._controller.commit(admission, tokens[:end], states, fence=fence)
                self._life.pages |= {tuple(tokens[:n].tolist()) for n in range(P, end + 1, P)}
                self._life.states |= {tuple(tokens[:n].tolist()) for n in states}
                request.done = end
        self._engine.verify(admission, tokens, request.done // P)
        return request.done

    def _restore(self, request: Open) -> bool:
        """Wait for what the cache has, check it byte for byte, and that the wait had an end."""
        began = self._world.now
        try:
            if request.parked is not None and request.admission.wait() and request.admission.resumed:
                self._engine.verify_resumed(request.admission, request.parked)
                request.done = len(request.parked) // P * P
                self._life.count("resumed")
                return True
            request.done = self._engine.restore(request.admission, request.tokens)
        except PoolFullError:
            return False
        # A layer that hangs takes 3 s at most, and a restore has 5; each may be met again after a fall-back.
        assert self._world.now - began < DEADLINE + 60, f"a restore took {self._world.now - began} s"
        known = tuple(request.tokens[: request.done].tolist())
        assert not known or known in (self._life.states if self._plan.hybrid else self._life.pages)
        if request.expected is not None:
            assert request.done >= request.expected, f"restored {request.done} of {request.expected} tokens"
        self._life.count("restored tokens", request.done)
        return True

    def _release(self, request: Open) -> None:
        with no_time(self._world, "release"):
            self._controller.release(request.admission, fence=self._fence())

    def _fence(self) -> Fence | None:
        return Fence(self._world, self._draw.expovariate(100)) if self._draw.random() < 0.5 else None

    # -- the future

    def prefetch(self) -> None:
        """Ask for a prefix ahead of its request."""
        with no_time(self._world, "prefetch"):
            ticket = self._controller.prefetch(prompt(*self._path(5)))
            if self._draw.random() < 0.3:
                ticket.cancel()

    def pin(self) -> None:
        """Pin a prefix, or end its pin."""
        path = prompt(*self._path(3))
        with no_time(self._world, "pin"), contextlib.suppress(InputError, AdmissionError):
            if self._draw.random() < 0.3:
                self._controller.unpin(path)
            else:
                self._controller.pin(path, self._draw.choice((0.001, 5.0, 3600.0)))

    def hint(self) -> None:
        """Say when a prefix will be continued."""
        with no_time(self._world, "hint"), contextlib.suppress(InputError):
            self._controller.hint(prompt(*self._path(3)), self._draw.choice((0.001, 1.0, 3600.0)))

    # -- the world

    def wait_a_while(self) -> None:
        """Let time pass between two calls."""
        self._world.sleep(seconds := self._draw.choice((0.001, 0.05, 1.0, 100.0)))
        for request in self._opened:
            request.expected = request.expected if seconds < 1 else None  # the deadline may have passed
        with no_time(self._world, "tick"):
            self._controller.tick()

    def evict(self) -> None:
        """Empty a tier of what nobody uses."""
        tier = self._draw.choice((Tier.DEVICE, Tier.HOST))
        if self._plan.calm:
            self.quiet()  # what has not reached the tiers below would be lost
        with no_time(self._world, "evict"):
            self._controller.evict(tier)

    def lose_objects(self) -> None:
        """Make holes in the store."""
        keys = sorted(entry.key for entry in self._life.medium.scan_all())
        self._life.medium.delete([key for key in keys if self._draw.random() < 0.2])

    def outage(self) -> None:
        """Take the store away from this process for a time."""
        self._store.away_until = self._world.now + self._draw.choice((0.5, 10.0, 100.0))
        self._life.count("outages")

    def kill(self) -> None:
        """Kill this process, in some lives."""
        if self._draw.random() < 0.3:
            raise ProcessKilledError

    def quiet(self) -> None:
        """Wait until everything has landed; everything in use has one owner then."""
        self._wait(self._under_way, "operations")
        if self._plan.calm:
            assert self._controller.flush(5.0), "nothing fails, and yet something did not reach storage"
        self._engine.check()
        self._check_pins()
        self._told.source.post(self._world.now, everything=True)
        known = self._router.places()
        assert known == places(self._told.chains()), "the router knows what lies on device and host"
        for request in self._opened:
            if request.done is not None:
                self._engine.verify(request.admission, request.tokens, request.done // P)

    def _check_pins(self) -> None:
        """Pins of prefixes cover at most half of the host's blocks, were all of their objects there."""
        context = self._engine.context
        # private: no public call says which nodes are pinned for a time
        held = self._controller._pins._by_key.values()
        ends = {pin.node for one in held for pin in (one.path, one.state) if pin is not None}
        nodes = {node for end in ends for node in end.path()}
        pages = sum(node.pages for node in nodes) * len(context.index.page_pools)
        unit, most = context.arena.block_bytes, context.arena.blocks // 2
        assert pages * unit <= self._engine.metrics.value("pinned_bytes") <= most * unit

    def _follow(self) -> None:
        """Publish, and let routers read, as the publisher's thread does."""
        while not self._closed:
            self._world.sleep(self._draw.choice((0.001, 0.1, 100.0)))
            self._router.step()
            self._life.router.step()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Tick while `condition` holds, which must not be forever."""
        end = self._world.now + 1000
        while condition() and self._world.now < end:
            self._world.sleep(0.5)
            self._controller.tick()
        assert not condition(), f"{what} did not end"

    def _under_way(self) -> bool:
        """Return whether anything is in flight but checks of what storage has, which follow each other."""
        context = self._engine.context
        operations = [*context.in_flight.operations.values(), *context.in_flight.stranded.values()]
        return any(one.kind != "check" for one in operations) or bool(context.device_work.retired)
