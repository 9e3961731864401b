"""Random histories of stores: subscribers end with the truth, also those that heal by snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from tiercache_backends.memory import FOOTPRINT

from tests.events.rig import item
from tests.examples import slow_after
from tests.storage_backends.chain.hooks import add, remove
from tiercache.core import PoolName
from tiercache.errors import StorageError
from tiercache.events import EventKind, KVEvent, Medium, Place
from tiercache.events.base import ResidencyMap, Resident
from tiercache.storage.registry import open_backend
from tiercache.storage.store_events import StoreEvents, observed_tiers

STEPS = 60


class History:
    """A store, its events, and two subscribers, of which `map` loses batches and reads snapshots by parts."""

    def __init__(self, kind: str, seed: int, directory: Path) -> None:
        self.kind, self.draw, self.directory = kind, Random(seed), directory
        self.nbytes = 64 if kind == "memory" else 60_000
        self.store = open_backend(
            {
                "memory": f"memory://?capacity={32 * FOOTPRINT.of(64)}",
                "file": self.file("a").partition("&")[0],
                "chain": [f"memory://?capacity={60_000 * 12}&tier_name=ram", self.file("a")],
            }[kind]
        )
        self.source = StoreEvents(self.store, kind)
        self.map, self.live = ResidencyMap(), ResidencyMap()
        self.snapshot: Iterator[Sequence[KVEvent]] | None = None
        self.after: list[Sequence[KVEvent]] = []

    def file(self, name: str) -> str:
        return f"file://{self.directory}/{name}?capacity=4MiB&tier_name={name}"

    def run(self) -> None:
        rules = [self.put] * 5 + [self.delete, self.publish, self.publish, self.ask, self.answer]
        rules += [self.change_tiers] if self.kind == "chain" else []
        try:
            for _ in range(STEPS):
                self.draw.choice(rules)()
            for _ in range(1000):
                self.answer()
                if self.snapshot is None:
                    break
            self.settle()
        finally:
            self.source.close()
            self.store.close()

    def put(self) -> None:
        """Store a sequence in one batch, perhaps with a state, or only its state."""
        chain, count, state = self.draw.randrange(6), self.draw.randint(1, 16), self.draw.random() < 0.3
        batch = [item(n, chain, nbytes=self.nbytes) for n in range(1, count + 1)]
        self.store.set(batch + [item(count, chain, PoolName.MAMBA, self.nbytes)] * state)

    def delete(self) -> None:
        pool = self.draw.choice([PoolName.KV, PoolName.MAMBA])
        self.store.delete([item(self.draw.randint(1, 16), self.draw.randrange(6), pool, self.nbytes).key])

    def publish(self) -> None:
        events = self.collect()
        if self.snapshot is not None:
            self.after.append(events)
        elif events and self.draw.random() < 0.3:
            self.ask()
        else:
            self.map.apply(events)

    def ask(self) -> None:
        """Begin a snapshot, as a subscriber does that sees a gap."""
        if self.snapshot is None:
            self.map.apply([KVEvent(EventKind.CLEARED, None)])
            self.snapshot = self.source.snapshot()
            self.after = []

    def answer(self) -> None:
        if self.snapshot is not None:
            try:
                part = next(self.snapshot, None)
            except StorageError:  # a tier has left, which the publisher sees; the subscriber asks again
                self.snapshot = None
                self.collect()
                self.ask()
                return
            if part is None:
                self.snapshot = None
                for events in self.after:
                    self.map.apply(events)
            else:
                self.map.apply(part)

    def change_tiers(self) -> None:
        """Let a tier join, with what it had when it left, or leave."""
        name = self.draw.choice("abc")
        if name not in [tier.name for tier in self.store.tiers]:
            add(self.store, self.file(name), 0)
        else:
            remove(self.store, name, drop=True)

    def settle(self) -> None:
        """Read to the end, and compare; copies between tiers may still be under way."""
        for _ in range(400):
            while events := self.collect():
                self.map.apply(events)
            truth = {}
            for tier in observed_tiers(self.store, self.kind):
                if entries := tier.residence.scan().entries:
                    named = {Resident(e.key.pool, e.key.layout, e.key.page_key) for e in entries}
                    truth[Place(Medium.STORAGE, tier.name)] = named
            if self.map.places() == self.live.places() == truth:
                return
        raise AssertionError((self.map.places(), self.live.places(), truth))

    def collect(self) -> Sequence[KVEvent]:
        events = self.source.collect()
        self.live.apply(events)
        return events


@pytest.mark.parametrize(
    ("kind", "seeds"),
    slow_after(
        3,
        [
            ("memory", range(12)), ("file", range(6)), ("chain", range(4)),
            ("memory", range(12, 50)), ("file", range(6, 18)), ("chain", range(4, 14)),
        ],
    ),
)  # fmt: skip
def test_histories(kind, seeds, tmp_path):
    for seed in seeds:
        (directory := tmp_path / str(seed)).mkdir()
        History(kind, seed, directory).run()
