"""Changes of a chain while many threads use it."""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiercache_backends.chain.settings import Promotion, WritePolicy

from tests.storage_backends.chain.hooks import add, listed, relist, remove, replace_tier, section
from tests.storage_backends.chain.test_live import has_all, names_of, opened
from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.testing.objects import content, key, payload, put, to_get

DEADLINE = 10.0
"""Seconds that a tier may take for a call; a call of the chain may ask each tier twice."""
MOST_TIERS = 4
LENGTH = 9_000


class Storm:
    """A chain whose tiers change at random, while threads with names of their own check every answer."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.serial = 0
        self.chain = opened(self.fresh("memory"), self.fresh("file"))
        self.over = threading.Event()
        self.faults: list[str] = []
        self.longest = 0.0
        self.done: Counter[str] = Counter()
        self.alive: list[list[object]] = [[] for _ in range(8)]

    def fresh(self, kind: str) -> str:
        """The URL of a tier in a directory that has not been used yet."""
        self.serial += 1
        place = {"memory": ""}.get(kind, f"{self.path}/{self.serial}")
        write = self.random.choice(["write_through", "write_through_selective"])
        promote = self.random.choice(["second", "always", "never"])
        own = (
            f"tier_name=t{self.serial}&tier_deadline={DEADLINE:g}s&tier_write={write}&tier_promote={promote}"
        )
        return f"{kind}://{place}?capacity=256MiB&{own}"

    def run(self, rounds: int) -> None:
        threads = [threading.Thread(target=self.guard, args=(self.use, n)) for n in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(rounds):
            for change in self.random.sample(self.changes(), len(self.changes())):
                self.guard(change)
        self.over.set()
        for thread in threads:
            thread.join()

    def guard(self, work, *args) -> None:
        try:
            work(*args)
        except Exception:  # noqa: BLE001
            self.faults.append(traceback.format_exc())

    # --- one user

    def use(self, n: int) -> None:
        rng, alive, serial = random.Random(n), self.alive[n], 0
        while not self.over.is_set() and not self.faults:
            self.call(rng.choice([self.get, self.get, self.get, self.describe]), rng, alive)
            if rng.random() < 0.6:
                serial += 1
                self.call(self.set, (n, serial), alive)
            if len(alive) > 150 or (alive and rng.random() < 0.1):
                self.call(self.delete, rng, alive)
            if rng.random() < 0.02:
                self.call(self.scan, list(alive))

    def call(self, work, *args) -> None:
        began = time.monotonic()
        try:
            work(*args)
        except (
            UnavailableError
        ) as error:  # every tier that has the objects is out, or a scan must begin again
            self.done[f"refused {work.__name__}"] += 1
            if work != self.scan:
                self.faults.append(f"{work.__name__}: {error}")
        self.longest = max(self.longest, time.monotonic() - began)
        self.done[work.__name__] += 1

    def set(self, name: object, alive: list[object]) -> None:
        if put(self.chain, key(name), payload(name, LENGTH)) in (Outcome.STORED, Outcome.HIT):
            alive.append(name)

    def get(self, rng: random.Random, alive: list[object]) -> None:
        names = rng.sample(alive, min(len(alive), 4))
        items = [to_get(key(name), LENGTH) for name in names]
        for name, item, outcome in zip(names, items, self.chain.get(items), strict=True):
            if outcome is Outcome.HIT:
                if content(item) != payload(name, LENGTH):
                    self.faults.append(f"wrong bytes of {name}")
            else:
                self.faults.append(f"{name} is {outcome} of {[(t.name, t.health) for t in self.chain.tiers]}")

    def describe(self, rng: random.Random, alive: list[object]) -> None:
        names = rng.sample(alive, min(len(alive), 4))
        for name, entry in zip(names, self.chain.describe([key(name) for name in names]), strict=True):
            if entry is not None and (entry.key, entry.meta.length) != (key(name), LENGTH):
                self.faults.append(f"{name} is described as {entry}")
            if entry is None:
                self.faults.append(f"{name} is not described")

    def delete(self, rng: random.Random, alive: list[object]) -> None:
        name = alive.pop(rng.randrange(len(alive)))
        self.chain.delete([key(name)])
        if self.chain.get([to_get(key(name), LENGTH)]) == [Outcome.HIT]:
            self.faults.append(f"{name} was deleted, and is there")

    def scan(self, alive: list[object]) -> None:
        found = {entry.key for entry in self.chain.scan_all()}
        missing = [name for name in alive if key(name) not in found]
        if missing:
            self.faults.append(f"a scan of {len(found)} misses {len(missing)} of {len(alive)}: {missing[:3]}")

    # --- one change after another

    def changes(self) -> list[Callable[[], None]]:
        return [self.add, self.remove, self.replace, self.reorder, self.configure]

    def names(self) -> list[str]:
        return names_of(self.chain)

    def kind(self) -> str:
        return self.random.choice(["memory", "file", "file", "lmdb"])

    def add(self) -> None:
        if len(self.names()) < MOST_TIERS:
            add(self.chain, self.fresh(self.kind()), self.random.randrange(len(self.names()) + 1))

    def remove(self) -> None:
        if len(self.names()) > 1:
            remove(self.chain, self.random.choice(self.names()))

    def replace(self) -> None:
        replace_tier(self.chain, self.random.choice(self.names()), self.fresh(self.kind()))

    def reorder(self) -> None:
        urls = list(listed(self.chain).values())
        relist(self.chain, self.random.sample(urls, len(urls)))

    def configure(self) -> None:
        write = self.random.choice(["write_through", "write_through_selective"])
        promote = self.random.choice(["second", "always", "never"])
        tier = self.random.choice(self.chain.tiers)
        settings = replace(tier.settings, write={"": WritePolicy(write)}, promote=Promotion(promote))
        replace_tier(self.chain, tier.name, section(settings))


def threads_of_chains() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tiercache-")]


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 1), *(pytest.param(n, 8, marks=pytest.mark.slow) for n in (2, 3))]
)
@pytest.mark.timeout(240)
def test_tiers_change_while_threads_use_the_chain(tmp_path, seed, rounds):
    files, threads = len(os.listdir("/proc/self/fd")), threads_of_chains()
    storm = Storm(tmp_path, seed)
    try:
        storm.run(rounds)
        assert storm.faults == []
        assert all(storm.done[work] for work in ("get", "set", "describe", "delete", "scan"))
        for alive in storm.alive:
            assert has_all(storm.chain, alive, LENGTH)
        assert storm.longest < 2 * DEADLINE * MOST_TIERS
    finally:
        storm.chain.close()

    assert set(threads_of_chains()) <= set(threads)
    assert len(os.listdir("/proc/self/fd")) <= files
