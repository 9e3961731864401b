"""Simulated lives of the ranks of one model: messages are lost, late, repeated and out of order.

The engines of all ranks make the same calls in lock step, as tensor-parallel workers do. All ranks begin each
request at one depth, what they restore is right byte for byte, and no wait outlasts the deadlines.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from queue import SimpleQueue
from random import Random

from greenlet import getcurrent, greenlet
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import KV, MAMBA, P, prompt
from tests.controller.ranks_rig import RankEngine, serve
from tests.simulation.store import SimulatedStore, StoreFaults
from tests.simulation.world import CopyFaults, Engine, Flag, Threads, World
from tiercache.controller import ControllerOptions
from tiercache.core import Tier
from tiercache.keys import Shard

DEADLINE = 5.0
"""Seconds for which an admission waits, for storage and for the other ranks."""
REQUESTS = 12
STEP = 0.004
"""Seconds that a step of the engines takes."""


@dataclass
class Mail:
    """Messages under way; `loses` and `repeats` are chances, `delay` is a mean in seconds."""

    world: World
    loses: float
    repeats: float
    delay: float
    groups: list[Group] = field(default_factory=list)
    joining: SimpleQueue[tuple[int, bytes] | None] | None = None
    """Messages while the ranks are being made, on threads; a thread delivers them at once."""
    cut: set[int] = field(default_factory=set)
    """Ranks to and from which every message is lost."""

    def send(self, sender: int, to: int, message: bytes) -> None:
        """Let a message arrive later, twice or never."""
        if self.joining is not None:
            self.joining.put((to, message))
            return
        world = self.world
        for _ in range(1 + world.chance(self.repeats)):
            if not world.chance(self.loses) and not {sender, to} & self.cut:
                delay = world.random.expovariate(1 / self.delay)
                world.spawn(lambda: self.groups[to].deliver(message), f"mail {to}", delay)


class Group:
    """Channel of one rank. Thread safety: as `RankGroup`."""

    def __init__(self, mail: Mail, rank: int, size: int) -> None:
        self._mail, self.rank, self.size = mail, rank, size
        self.deliver: Callable[[bytes], None] = lambda _: None

    def open(self, deliver: Callable[[bytes], None]) -> None:
        """Take messages from now on."""
        self.deliver = deliver

    def send(self, to: int, message: bytes) -> None:
        """Send by mail."""
        self._mail.send(self.rank, to, message)

    def close(self) -> None:
        """Do nothing."""


class Word:
    """Broadcast of the leader's engine, for which all others wait."""

    def __init__(self, world: World, size: int) -> None:
        self._world, self._size = world, size
        self._waiting: list[tuple[greenlet, int]] = []
        self._said: tuple[object, ...] = ()
        self._heard = self._said

    def __call__(self, rank: int, *values: object) -> tuple[object, ...]:
        """Return what the leader says, once all ranks are here."""
        if rank == 0:
            self._said = values
        if len(self._waiting) + 1 < self._size:
            self._waiting.append((getcurrent(), self._world.turn))
            self._world.pause()
        else:
            self._heard, waiting, self._waiting = self._said, self._waiting, []
            for one, turn in waiting:
                self._world.wake(one, turn, STEP)
            self._world.sleep(STEP)
        return self._heard


def live_in_ranks(seed: int) -> dict[str, int]:
    """Run the life of `seed`; raise AssertionError, or whatever broke, if a promise was not kept."""
    world = World(seed)
    before = random.getstate()
    random.seed(seed)
    try:
        return _Crew(world, world.random).run()
    finally:
        random.setstate(before)


class _Crew:
    """All ranks of one model, and what they serve."""

    def __init__(self, world: World, draw: Random) -> None:
        self.world, self.draw = world, draw
        self.calm = calm = draw.random() < 0.25
        some = lambda p: 0.0 if calm or draw.random() < 0.4 else p * draw.random()  # noqa: E731
        self.size = draw.choice((2, 2, 3, 4))
        self.mail = Mail(world, some(0.3), some(0.3), draw.choice((0.0002, 0.002, 0.002 if calm else 0.2)))
        self.mail.groups += [Group(self.mail, rank, self.size) for rank in range(self.size)]
        self.medium = MemoryBackend()
        self.word = Word(world, self.size)
        self.faults = [
            StoreFaults(some(0.3), some(0.5), some(0.1), some(0.1), draw.choice((0.0002, 0.002, 0.02)))
            for _ in range(self.size)
        ]
        self.copies = [CopyFaults(world, some(0.1)) for _ in range(self.size)]
        self.sharded = draw.random() < 0.5
        self.blocks = 900 if calm else draw.choice((40, 80, 200))
        self.engines = self._joined()
        for engine in self.engines:
            engine.context.events.arrived = Flag(world)
            wake = engine.context.events.arrived.set
            engine.controller._session.wake = wake  # private: it was given the flag of real threads
            RankEngine.opened.remove(engine.controller)
        self.depths: list[list[int]] = [[] for _ in range(self.size)]
        self.served: set[tuple[int, ...]] = set()
        """Prompts that were served; each left a state at its last whole page."""
        self.plan = [self._drawn() for _ in range(REQUESTS)]
        self.counts = {"served": 0, "restored tokens": 0, "again": 0}

    def _joined(self) -> list[RankEngine]:
        """Make all ranks at once, on real threads: none is complete before all have greeted each other."""
        post = self.mail.joining = SimpleQueue()
        with ThreadPoolExecutor(self.size + 1) as threads:
            threads.submit(lambda: [self.mail.groups[to].deliver(text) for to, text in iter(post.get, None)])
            engines = list(threads.map(self._make, range(self.size)))
            post.put(None)
        self.mail.joining = None
        return engines

    def _make(self, rank: int) -> RankEngine:
        part = Shard(rank, self.size)
        world = self.world
        return RankEngine(
            SimulatedStore(world, self.medium, self.faults[rank]), pages=60, states=30,
            blocks=self.blocks, clock=world.clock,
            options=ControllerOptions(restore_deadline=DEADLINE, join_deadline=30.0, write_retries=1),
            engine=lambda device, host: Engine(world, f"rank {rank}", self.copies[rank], device, host),
            threads=lambda kind, count: Threads(world, f"rank {rank}", kind, count),
            ranks=self.mail.groups[rank], shard={MAMBA: part} | ({KV: part} if self.sharded else {}),
        )  # fmt: skip

    def _drawn(self) -> tuple[list[int], list[int], Tier | None, int, list[int]]:
        """Draw a prompt, an answer, a tier to empty before it, on whom, and who cannot be heard meanwhile."""
        draw = self.draw
        path = [draw.randint(1, 2) for _ in range(draw.randint(1, 5))]
        tier = draw.choice((None, Tier.DEVICE, Tier.HOST))
        cut = [draw.randrange(self.size)] if not self.calm and draw.random() < 0.1 else []
        answer = prompt(*[draw.randint(1, 2) for _ in range(draw.randint(1, 2))])
        return [*prompt(*path), 7], answer, tier, draw.randrange(self.size + 1), cut

    def run(self) -> dict[str, int]:
        """Run all ranks to their ends."""
        for rank in range(self.size):
            self.world.spawn(lambda rank=rank: self._live(rank), f"rank {rank}")
        self.world.run()
        assert all(len(depths) == REQUESTS for depths in self.depths), "a rank waits for ever"
        assert all(depths == self.depths[0] for depths in self.depths), self.depths
        self.counts["restored tokens"] = sum(depth for one in self.depths[0] for depth in one)
        self.counts["again"] = sum(len(one) - 1 for one in self.depths[0])
        return self.counts

    def _live(self, rank: int) -> None:
        engine, world = self.engines[rank], self.world
        for asked, answer, tier, who, cut in self.plan:
            self.word(rank)
            if rank == 0:
                self.mail.cut = {*cut}
            if tier is not None and who in (rank, self.size):
                if self.calm:
                    self._settle(rank)
                engine.controller.evict(tier)
            began = world.now
            depths = serve(engine, rank, self.word, asked, answer)
            # Each attempt waits for storage and for the other ranks, and a layer that hangs takes 3 s.
            assert world.now - began < (len(depths) + 1) * (2 * DEADLINE + 10), f"{world.now - began} s"
            self.depths[rank].append(depths)
            if rank == 0:
                self.counts["served"] += 1
                whole = (len(asked) - 1) // P * P
                assert not self.calm or tuple(asked) not in self.served or depths == [whole], (
                    f"restored {depths} of {whole} tokens, and nothing failed"
                )
                self.served.add(tuple(asked))
        self._settle(rank)
        self._end(rank)

    def _settle(self, rank: int) -> None:
        context = self.engines[rank].context
        end = self.world.now + 1000
        while any(one.kind != "check" for one in context.in_flight.operations.values()):
            assert self.world.now < end, "an operation did not end"
            self.world.sleep(0.05)
            self.engines[rank].controller.tick()

    def _end(self, rank: int) -> None:
        """Nothing is left over."""
        engine = self.engines[rank]
        for each in fields(StoreFaults):  # the rest goes well
            setattr(self.faults[rank], each.name, each.default)
        self.world.sleep(1000.0)
        self._settle(rank)
        engine.controller.flush(5.0)
        self._settle(rank)
        for tier in (Tier.DEVICE, Tier.HOST):
            engine.controller.evict(tier)
        engine.check()
        assert all(pool.available == pool.capacity for pool in engine.pools.values())
        assert engine.arena.available == engine.arena.blocks
        closed = engine.controller.close(100.0)
        assert closed, "close found something that hangs"
