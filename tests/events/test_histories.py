"""Random histories of stores: a subscriber that loses batches and heals by snapshots ends with the truth."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.events.rig import item
from tests.examples import example_count
from tiercache.core import PoolName
from tiercache.errors import StorageError
from tiercache.events import EventKind, KVEvent, Medium, Place
from tiercache.events.residency import ResidencyMap, Resident
from tiercache.storage.registry import open_backend
from tiercache.storage.store_events import StoreEvents, observed_tiers

chains, pages = st.integers(0, 5), st.integers(1, 6)


class Histories(RuleBasedStateMachine):
    """A store, its source of events, and a subscriber without sockets.

    A snapshot is applied part by part, and changes are collected in between, as the publisher does it.
    """

    @initialize(kind=st.sampled_from(["memory", "file", "chain"]))
    def begin(self, kind):
        self.directory = Path(tempfile.mkdtemp())
        self.kind = kind
        file = f"file://{self.directory}/a?capacity=4MiB"
        self.nbytes = 64 if kind == "memory" else 60_000
        self.store = open_backend(
            {
                "memory": "memory://?capacity=1KiB",
                "file": file,
                "chain": [f"memory://?capacity={60_000 * 12}", file + "&tier_name=disk"],
            }[kind]
        )
        self.source = StoreEvents(self.store, kind)
        self.map = ResidencyMap()
        self.snapshot: Iterator[Sequence[KVEvent]] | None = None
        self.after: list[Sequence[KVEvent]] = []
        self.number = 0

    @rule(chain=chains, count=pages, state=st.booleans())
    def put(self, chain, count, state):
        batch = [item(n, chain, nbytes=self.nbytes) for n in range(1, count + 1)]
        self.store.set(batch + [item(count, chain, PoolName.MAMBA, self.nbytes)] * state)

    @rule(chain=chains, number=pages, pool=st.sampled_from([PoolName.KV, PoolName.MAMBA]))
    def delete(self, chain, number, pool):
        self.store.delete([item(number, chain, pool, self.nbytes).key])

    @rule(lost=st.booleans())
    def publish(self, lost):
        events = self.source.collect()
        if self.snapshot is not None:
            self.after.append(events)
        elif lost and events:
            self.ask()
        else:
            self.map.apply(events)

    @rule()
    def ask(self):
        """Begin a snapshot, as a subscriber does that sees a gap."""
        if self.snapshot is None:
            self.map.apply([KVEvent(EventKind.CLEARED, None)])
            self.snapshot = self.source.snapshot()
            self.after = []

    @rule()
    def answer(self):
        if self.snapshot is not None:
            try:
                part = next(self.snapshot, None)
            except StorageError:  # a tier has left: the subscriber asks again
                self.snapshot = None
                self.ask()
                return
            if part is None:
                self.snapshot = None
                for events in self.after:
                    self.map.apply(events)
            else:
                self.map.apply(part)

    @rule(join=st.booleans())
    def change_tiers(self, join):
        if self.kind != "chain":
            return
        names = [tier.name for tier in self.store.tiers]
        if join and len(names) < 3:
            self.number += 1
            self.store.add_tier(f"memory://?capacity={60_000 * 8}&tier_name=more{self.number}", 0)
        elif len(names) > 1 and names[0] != "disk":
            self.store.remove_tier(names[0], keep_contents=False)

    def teardown(self):
        if not hasattr(self, "store"):
            return
        try:
            while self.snapshot is not None:
                self.answer()
            self.settle()
        finally:
            self.source.close()
            self.store.close()
            shutil.rmtree(self.directory)

    def settle(self):
        """Read to the end, and compare; copies between tiers may still be under way."""
        for _ in range(400):
            while events := self.source.collect():
                self.map.apply(events)
            truth = {}
            for tier in observed_tiers(self.store, self.kind):
                if entries := tier.residence.scan().entries:
                    named = {Resident(e.key.pool, e.key.layout, e.key.page_key) for e in entries}
                    truth[Place(Medium.STORAGE, tier.name)] = named
            if self.map.places() == truth:
                return
        raise AssertionError((self.map.places(), truth))


Histories.TestCase.settings = settings(
    max_examples=example_count(40),
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
test_histories = Histories.TestCase
