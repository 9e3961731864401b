"""Changes of a chain while many threads use it, and while its process is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiercache_backends.chain.settings import Promotion, WritePolicy

from tests.storage_backends.chain.hooks import add, listed, relist, remove, replace_tier
from tests.storage_backends.chain.test_live import has_all, names_of, opened, url, wait_for
from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import content, fetch, key, payload, put, to_get

DEADLINE = 10.0
"""Seconds that a tier may take for a call; a call of the chain may ask each tier twice."""
MOST_TIERS = 4
LENGTH = 9_000


class Storm:
    """A chain whose tiers change at random, while threads use it and check every answer.

    Each name belongs to one thread, which therefore knows whether the chain has the object. While a tier is
    opened again it is out, so that its objects may be missing.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.serial = 0
        self.chain = opened(self.fresh("memory"), self.fresh("file"))
        self.over = threading.Event()
        self.outages = 0
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
        began, before = time.monotonic(), self.outages
        try:
            work(*args)
        except (
            UnavailableError
        ) as error:  # every tier that has the objects is out, or a scan must begin again
            self.done[f"refused {work.__name__}"] += 1
            if work != self.scan and not self.may_be_out(before):
                self.faults.append(f"{work.__name__}: {error}")
        self.longest = max(self.longest, time.monotonic() - began)
        self.done[work.__name__] += 1

    def may_be_out(self, outages: int | None = None) -> bool:
        """Whether a tier is opened again, or was since there were `outages`; they are odd during one."""
        return bool(self.outages % 2) or (outages is not None and outages != self.outages)

    def set(self, name: object, alive: list[object]) -> None:
        if put(self.chain, key(name), payload(name, LENGTH)) in (Outcome.STORED, Outcome.HIT):
            alive.append(name)

    def get(self, rng: random.Random, alive: list[object]) -> None:
        names = rng.sample(alive, min(len(alive), 4))
        items = [to_get(key(name), LENGTH) for name in names]
        before = self.outages
        for name, item, outcome in zip(names, items, self.chain.get(items), strict=True):
            if outcome is Outcome.HIT:
                if content(item) != payload(name, LENGTH):
                    self.faults.append(f"wrong bytes of {name}")
            elif not self.may_be_out(before):
                self.faults.append(f"{name} is {outcome} of {[(t.name, t.health) for t in self.chain.tiers]}")

    def describe(self, rng: random.Random, alive: list[object]) -> None:
        names = rng.sample(alive, min(len(alive), 4))
        before = self.outages
        for name, entry in zip(names, self.chain.describe([key(name) for name in names]), strict=True):
            if entry is not None and (entry.key, entry.meta.length) != (key(name), LENGTH):
                self.faults.append(f"{name} is described as {entry}")
            if entry is None and not self.may_be_out(before):
                self.faults.append(f"{name} is not described")

    def delete(self, rng: random.Random, alive: list[object]) -> None:
        name = alive.pop(rng.randrange(len(alive)))
        self.chain.delete([key(name)])
        if self.chain.get([to_get(key(name), LENGTH)]) == [Outcome.HIT]:
            self.faults.append(f"{name} was deleted, and is there")

    def scan(self, alive: list[object]) -> None:
        before = self.outages
        found = {entry.key for entry in self.chain.scan_all()}
        missing = [name for name in alive if key(name) not in found]
        if missing and not self.may_be_out(before):
            self.faults.append(f"a scan of {len(found)} misses {len(missing)} of {len(alive)}: {missing[:3]}")

    # --- one change after another

    def changes(self) -> list[Callable[[], None]]:
        return [self.add, self.remove, self.replace, self.reopen, self.reorder, self.configure]

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

    def reopen(self) -> None:
        tier = self.random.choice(self.chain.tiers)
        if path := tier.settings.section.get("path"):
            self.outages += 1
            capacity = self.random.choice(["256MiB", "320MiB"])
            own = f"tier_name={tier.name}&tier_deadline={DEADLINE:g}s"
            replace_tier(self.chain, tier.name, f"{tier.kind}://{path}?capacity={capacity}&{own}")
            wait_for(lambda: all(tier.is_readable for tier in self.chain.tiers))
            self.outages += 1

    def reorder(self) -> None:
        urls = list(listed(self.chain).values())
        relist(self.chain, self.random.sample(urls, len(urls)))

    def configure(self) -> None:
        write = self.random.choice(["write_through", "write_through_selective"])
        promote = self.random.choice(["second", "always", "never"])
        tier = self.random.choice(self.chain.tiers)
        settings = replace(tier.settings, write={"": WritePolicy(write)}, promote=Promotion(promote))
        replace_tier(self.chain, tier.name, settings.url)


def threads_of_chains() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tiercache-")]


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 1), *(pytest.param(n, 8, marks=pytest.mark.slow) for n in range(2, 6))]
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


# --- a process that is killed
# ------------------------------------------------------------------------------------------------------------

REMOVES_A_TIER = """
import os, sys, threading
from tests.storage_backends.chain.test_live import opened
from tests.storage_backends.chain.test_storm import LENGTH
from tiercache.testing.objects import key, payload, to_set

def say(line):
    os.write(1, f"{line}\\n".encode())

def store(names):
    for n in range(0, len(names), 20):
        batch = names[n : n + 20]
        outcomes = chain.set([to_set(key(name), payload(name, LENGTH)) for name in batch])
        for name, outcome in zip(batch, outcomes):
            if str(outcome) in ("stored", "hit"):
                say(f"acknowledged {name}")

chain = opened(*sys.argv[1:])
store(range(400))
writer = threading.Thread(target=store, args=(range(400, 20_000),), daemon=True)
writer.start()
changed = chain.retier(sys.argv[2:])
while "only it has are left" not in chain.tiers[0].why and not changed.left.done():
    pass
say("copied")
changed.left.result()
say("removed")
writer.join()
"""


@pytest.mark.parametrize(
    ("until", "left"),
    [
        ("copied", "abc"),
        ("removed", "bc"),
        pytest.param("acknowledged 399", "abc", marks=pytest.mark.slow),
        pytest.param("acknowledged 439", "abc", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_during_a_removal_loses_nothing(tmp_path, until, left):
    own = {"write": "write_through_selective"}
    urls = [url(tmp_path / name, "256MiB", name=name, **({} if name == "a" else own)) for name in "abc"]
    # The present directory is the project's, as for all tests, so that the process finds this module.
    process = subprocess.Popen(
        [sys.executable, "-c", REMOVES_A_TIER, *urls], stdout=subprocess.PIPE, text=True
    )
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.strip() == until:
                process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    names = [
        int(line.split()[1]) for line in lines if line.startswith("acknowledged") and line.endswith("\n")
    ]
    assert len(names) >= 400
    found: set[int] = set()
    for name in left:
        with open_backend(f"file://{tmp_path / name}?capacity=256MiB") as store:
            for n in names:
                if (data := fetch(store, key(n), LENGTH)) is not Outcome.MISS:
                    assert data == payload(n, LENGTH)
                    found.add(n)
    assert found == set(names)
