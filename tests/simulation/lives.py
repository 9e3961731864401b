"""Simulated lives: some worker processes over one store, each of which may be killed and come back."""

from __future__ import annotations

import random
from random import Random

from tiercache_backends.memory import MemoryBackend

from tests.simulation.plan import Life, Plan
from tests.simulation.process import Process, ProcessKilledError
from tests.simulation.router import Router
from tests.simulation.world import World
from tiercache.events import Medium, Place
from tiercache.storage.store_events import StoreEvents


def live(seed: int) -> Life:
    """Run the life of `seed`; raise AssertionError, or whatever broke, if a promise was not kept."""
    world = World(seed)
    plan = Plan.drawn(world.random)
    plan.parks_often = seed % 3 == 0
    plan.has_more = plan.parks_often and plan.pools == "both"
    medium = MemoryBackend(plan.capacity)
    router = Router(world, Random(seed), [StoreEvents(medium, "medium")])
    life = Life(seed, plan, world, medium, router)
    world.note(plan)
    before = random.getstate()
    random.seed(seed)  # the breakers of store calls draw their pauses from it
    try:
        for n in range(plan.processes):
            _spawn(life, f"process {n}", Random(world.random.random()))
        world.run()
    finally:
        random.setstate(before)
    known = router.places().get(Place(Medium.STORAGE, "medium"), set())
    assert {found.layout + found.key for found in known} == {entry.key.digest for entry in medium.scan_all()}
    return life


def _spawn(life: Life, name: str, draw: Random, turn: int = 0) -> None:
    def run() -> None:
        process = Process(life, name, draw)
        try:
            process.live()
        except ProcessKilledError:
            life.count("kills")
            life.world.kill(name)
            process.forget()
        else:
            process.end()
        if turn < 2 and draw.random() < 0.6:
            _spawn(life, name, draw, turn + 1)

    life.world.spawn(run, name, draw.random())
