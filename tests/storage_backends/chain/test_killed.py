"""Chains over real stores whose process is killed at a random moment, and what their tiers hold afterwards.

The process says on its standard output what holds from that moment on. The stores are then opened alone and
as a chain: every object that was acknowledged and not deleted is there with its bytes, what was deleted is
gone, and each store is whole and within its capacity.

More lives: `python -m pytest -m stress tests/storage_backends/chain/test_killed.py`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tiercache_backends.chain import TierChain

from tests.campaign.stores import check_integrity
from tests.storage_backends.chain.hooks import add, chain_of, is_ahead, remove, replace_tier, store_of
from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.storage import open_backend
from tiercache.testing.objects import content, fetch, key, payload, to_get, to_set

SIZE = 9_000
BATCH = 10
SMALL = "8MiB"
LARGE = "64MiB"


def url(path: str, name: str, capacity: str = LARGE, **own: str) -> str:
    """The URL of a tier; names that begin with "l" are of LMDB."""
    kind = "lmdb" if name.startswith("l") else "file"
    own.setdefault("deadline", "60s")  # a slow machine is no hung tier
    settings = "".join(f"&tier_{setting}={value}" for setting, value in own.items())
    return f"{kind}://{path}/{name}?capacity={capacity}&tier_name={name}{settings}"


class Life:
    """The life of the process that is killed: it stores objects, and changes a chain meanwhile."""

    def __init__(self, path: str, first: int, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.names = iter(range(first, 10**9))
        self.alive: list[int] = []

    def say(self, line: str) -> None:
        os.write(1, f"{line}\n".encode())

    def open(self, *urls: str) -> TierChain:
        self.chain = chain_of(open_backend(list(urls)))
        self.tiers(*(tier.name for tier in self.chain.tiers))
        return self.chain

    def tiers(self, *names: str) -> None:
        """Say which directories have all objects together, until this is said again."""
        self.say(f"tiers {' '.join(names)}")

    def store(self) -> None:
        names = [next(self.names) for _ in range(BATCH)]
        outcomes = self.chain.set([to_set(key(n), payload(n, SIZE)) for n in names])
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome is Outcome.STORED:
                self.say(f"stored {name}")
                self.alive.append(name)

    def read(self) -> None:
        names = self.random.sample(self.alive, min(BATCH, len(self.alive)))
        items = [to_get(key(n), SIZE) for n in names]
        for name, item, outcome in zip(names, items, self.chain.get(items), strict=True):
            if outcome is Outcome.HIT and content(item) != payload(name, SIZE):
                self.say(f"wrong bytes of {name}")

    def delete(self) -> None:
        name = self.alive.pop(self.random.randrange(len(self.alive)))
        self.say(f"deleting {name}")
        self.chain.delete([key(name)])
        self.say(f"deleted {name}")

    def store_on(self) -> None:
        """Store and read for ever, on a thread of its own."""

        def work() -> None:
            while True:
                self.store()
                try:
                    self.read()
                except UnavailableError:
                    time.sleep(0.01)

        threading.Thread(target=work, daemon=True).start()

    # --- what it does meanwhile

    def write_back(self) -> None:
        chain = self.open(url(self.path, "a", SMALL), url(self.path, "l", write="write_back"))
        while True:
            self.store()
            self.delete()
            while not is_ahead(*map(store_of, chain.tiers)):
                time.sleep(0.001)

    def promotion(self) -> None:
        chain = self.open(url(self.path, "a", SMALL), url(self.path, "l", promote="always"))
        while True:
            self.store()
            self.delete()
            chain.flush()
            self.read()

    def removal(self) -> None:
        own = {"write": "write_through_selective"}
        chain = self.open(*(url(self.path, name, **own) for name in ("a", "l", "c")))
        self.store_on()
        while True:
            name = self.random.choice([tier.name for tier in chain.tiers])
            remove(chain, name)
            self.tiers(*(tier.name for tier in chain.tiers))
            time.sleep(0.05)
            self.tiers("a", "l", "c")
            add(chain, url(self.path, name, **own), self.random.randrange(3))

    def replacement(self) -> None:
        own = {"write": "write_through_selective"}
        chain = self.open(url(self.path, "a"), url(self.path, "l", **own))
        self.store_on()
        for n in range(10**6):
            first, other = chain.tiers
            kind = "al"[n % 2]
            self.tiers(first.name, other.name, f"{kind}{n}")
            replace_tier(chain, first.name, url(self.path, f"{kind}{n}"))
            self.tiers(*(tier.name for tier in chain.tiers))


def live(path: str, scenario: str, first: str, seed: str) -> None:
    """Do one of the things above until the process is killed."""
    work: Callable[[], None] = getattr(Life(path, int(first), int(seed)), scenario)
    work()


class Account:
    """The books of what killed processes have said; `rng` chooses after how many lines one is killed."""

    def __init__(self, path: Path, scenario: str, rng: random.Random) -> None:
        self.path = path
        self.scenario = scenario
        self.random = rng
        self.stored: set[int] = set()
        self.unknown: set[int] = set()
        self.deleted: set[int] = set()
        self.tiers: list[str] = []

    def kill_one(self) -> None:
        """Start a process, kill it, and look at its stores."""
        first = max([0, *self.stored | self.unknown | self.deleted]) + 10_000
        code = "import sys; from tests.storage_backends.chain.test_killed import live; live(*sys.argv[1:])"
        command = [sys.executable, "-c", code, self.path, self.scenario, str(first), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                self.listen(process, self.random.randrange(10, 1500))
            finally:
                process.kill()
        self.look()

    def listen(self, process: subprocess.Popen[str], lines: int) -> None:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            if number == lines:
                process.send_signal(signal.SIGKILL)  # what it has said until then is still read
            if line.endswith("\n"):
                what, _, rest = line.strip().partition(" ")
                self.note(what, rest)
        assert process.wait() == -signal.SIGKILL

    def note(self, what: str, rest: str) -> None:
        if what == "tiers":
            self.tiers = rest.split()
        elif what == "stored":
            self.stored.add(int(rest))
        elif what == "deleting":
            self.stored.discard(int(rest))
            self.unknown.add(int(rest))
        elif what == "deleted":
            self.unknown.discard(int(rest))
            self.deleted.add(int(rest))
        else:
            pytest.fail(f"{what} {rest}")

    def look(self) -> None:
        """Look at the stores, each alone, and then at all as a chain."""
        found: set[int] = set()
        for store in self.each():
            items = {n: to_get(key(n), SIZE) for n in [*self.stored, *self.deleted]}
            for (n, item), outcome in zip(items.items(), store.get(list(items.values())), strict=True):
                assert outcome in (Outcome.HIT, Outcome.MISS), f"{n} is {outcome}"
                if outcome is Outcome.HIT:
                    assert content(item) == payload(n, SIZE)
                    found.add(n)
            usage = store.usage()
            assert usage.used_bytes <= usage.capacity_bytes
            check_integrity(store)
        assert not self.stored - found, f"{len(self.stored - found)} of {len(self.stored)} are lost"
        assert not self.deleted & found, "what was deleted is back"
        kept = "kept&access=write"
        with open_backend([url(str(self.path), name, kept) for name in self.made()]) as chain:
            assert all(fetch(chain, key(n), SIZE) == payload(n, SIZE) for n in list(self.stored)[-50:])
            listed = [entry.key for entry in chain.scan_all()]
            assert len(listed) == len(set(listed))
            assert {key(n) for n in self.stored} <= set(listed)
            assert not {key(n) for n in self.deleted} & set(listed)
            assert len(listed) <= len(self.stored | self.unknown) + len(self.kept(listed))

    def kept(self, listed: Sequence[object]) -> list[object]:
        """Objects whose set was not acknowledged before the kill; a batch at most, of each process."""
        known = {key(n) for n in self.stored | self.unknown}
        more = [k for k in listed if k not in known]
        assert len(more) <= 2 * BATCH * 10
        return more

    def made(self) -> list[str]:
        """The tiers that were said and made; it may have been killed between. Their capacity comes last."""
        whole = [at.parent.name for at in self.path.glob("*/state") if "capacity" in at.read_text()]
        return [name for name in self.tiers if name in whole]

    def each(self) -> Iterator:
        for name in self.made():
            with open_backend(url(str(self.path), name, "kept").partition("&")[0]) as store:
                yield store


SCENARIOS = ["write_back", "promotion", "removal", "replacement"]


@pytest.mark.parametrize(
    "scenario",
    [
        "write_back",
        "replacement",
        pytest.param("promotion", marks=pytest.mark.slow),
        pytest.param("removal", marks=pytest.mark.slow),
    ],
)
def test_a_chain_whose_process_is_killed_loses_nothing(tmp_path, scenario):
    Account(tmp_path, scenario, random.Random(scenario)).kill_one()


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_chain_whose_process_is_killed_again_and_again_loses_nothing(tmp_path, scenario, seed):
    account = Account(tmp_path, scenario, random.Random(f"{scenario} {seed}"))
    for _ in range(4 if scenario in ("write_back", "promotion") else 1):
        account.kill_one()
