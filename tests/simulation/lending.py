"""Simulated lives of engines that keep their slots and lend them to the cache, over one store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, Engine
from tests.controller.lending import LendingEngine, P, tokens_of
from tests.simulation.plan import Plan
from tests.simulation.process import DEADLINE, Fence
from tests.simulation.store import SimulatedStore, StoreFaults
from tests.simulation.world import CopyFaults, Flag, Threads, World, no_time
from tests.simulation.world import Engine as Copies
from tiercache.controller import ControllerOptions
from tiercache.core import Tier

STEPS = 40


def live_lending(seed: int) -> Counter[str]:
    """Run two engines over one store; return what happened. Raises AssertionError for a broken promise."""
    world, counts = World(seed), Counter[str]()
    plan = Plan.drawn(world.random)
    medium = MemoryBackend(plan.capacity)
    for n in range(2):
        lender = Lender(world, plan, medium, f"engine {n}", counts)
        world.spawn(lender.live, f"engine {n}", world.random.random())
    world.run()
    return counts


class Lender:
    """One engine, which checks after each step that no slot is lost and every byte is that of its tokens."""

    def __init__(
        self, world: World, plan: Plan, medium: MemoryBackend, name: str, counts: Counter[str]
    ) -> None:
        self._world, self._draw, self._counts = world, Random(world.random.random()), counts
        self._faults = CopyFaults(world, plan.copy_faults)
        self._store = SimulatedStore(world, medium, plan.faults)
        self._engine = LendingEngine(
            self._store,
            hybrid=plan.hybrid,
            blocks=plan.blocks,
            clock=world.clock,
            options=ControllerOptions(restore_deadline=DEADLINE, write_retries=1, piece_bytes=plan.piece),
            engine=lambda device, host: Copies(world, name, self._faults, device, host),
            threads=lambda kind, count: Threads(world, name, kind, count),
        )
        self._engine.cache.context.events.arrived = Flag(world)
        Engine.opened.remove(self._engine.controller)

    def live(self) -> None:
        """Take some steps, end, and give every slot back."""
        steps: list[Callable[[], None]] = [
            self.begin, self.begin, self.go_on, self.hand_over, self.end, self.make_room, self.wait,
        ]  # fmt: skip
        for _ in range(STEPS):
            self._draw.choice(steps)()
            self._engine.check()
            self._world.sleep(self._draw.expovariate(200))
        while self._engine.running:
            self._engine.end(self._engine.running[0])
        self._store.faults, self._faults.chance = StoreFaults(), 0.0
        under_way = self._engine.cache.context.in_flight
        while under_way.operations or under_way.stranded:
            self.wait()
        self._engine.controller.evict(Tier.DEVICE)
        self._engine.check()
        assert all(pool.available == pool.capacity for pool in self._engine.cache.pools.values())
        self._engine.controller.close(100.0)

    def begin(self) -> None:
        """Fetch what storage has of a prompt, mostly, and begin a request on what is there then."""
        prompt = [*tokens_of([self._draw.randrange(2) for _ in range(self._draw.randrange(1, 5))]), 9]
        if self._draw.random() < 0.7:
            with no_time(self._world, "prefetch"):
                ticket = self._engine.controller.prefetch(prompt)
            for _ in range(self._draw.choice((2, 20, 2000))):
                if not ticket.done:
                    self._world.sleep(0.01)
                    self._engine.controller.tick()
            ticket.cancel()
            self._counts["fetched"] += ticket.tokens > 0
        request = self._engine.begin(prompt, gives=self._draw.random() < 0.3)
        self._counts["restored"] += bool(request.tokens)
        rest = prompt[len(request.tokens) : -1]
        if len(self._engine.running) > 3 or (rest and not self._engine.compute(request, rest)):
            self._engine.end(request)

    def go_on(self) -> None:
        """Compute a page more for some request."""
        if self._engine.running:
            self._engine.compute(
                self._draw.choice(self._engine.running), tokens_of([self._draw.randrange(2)])
            )

    def hand_over(self) -> None:
        """Let the cache have what some request has computed, while the device may still write it."""
        if self._engine.running:
            fence = Fence(self._world, self._draw.expovariate(100)) if self._draw.random() < 0.5 else None
            self._engine.hand_over(self._draw.choice(self._engine.running), fence)
            self._counts["handed over"] += 1

    def end(self) -> None:
        """End some request."""
        if self._engine.running:
            self._engine.end(self._draw.choice(self._engine.running))

    def make_room(self) -> None:
        """Ask for slots."""
        with no_time(self._world, "make_room"):
            freed = self._engine.lent.make_room({KV: self._draw.randrange(P)})
        self._counts["evicted"] += bool(freed.get(KV) or freed.get(MAMBA))

    def wait(self) -> None:
        """Let the background go on."""
        self._world.sleep(self._draw.choice((0.001, 0.1, 10.0)))
        self._engine.controller.tick()
