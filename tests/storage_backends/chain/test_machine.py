"""Random lives of a chain whose tiers go away and come back, beside a plain model.

The model keeps, for each object, the versions that were stored since it was last deleted. Whatever a get
returns is one of them: a deleted version never comes back, by a late copy or with a tier that was away. While
all tiers are there and nothing is on its way, every object that was acknowledged is found.
"""

from __future__ import annotations

import time

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tiercache_backends.chain import TierChain
from tiercache_backends.chain.settings import Promotion, WritePolicy
from tiercache_backends.memory import MemoryBackend

from tests.examples import example_count
from tests.faulty import Outage
from tests.storage_backends.chain.hooks import QuickClock, tier_of
from tiercache.core import Outcome
from tiercache.errors import StorageError, UnavailableError
from tiercache.testing.objects import content, key, payload, to_get, to_set

NAMES = st.lists(st.integers(0, 7), min_size=1, max_size=4)
SIZE = 3000


class Lives(RuleBasedStateMachine):
    @initialize(
        tiers=st.integers(2, 3),
        write=st.sampled_from([WritePolicy.THROUGH, WritePolicy.THROUGH, WritePolicy.SELECTIVE]),
        promote=st.sampled_from(list(Promotion)),
    )
    def begin(self, tiers, write, promote):
        self.media = [MemoryBackend() for _ in range(tiers)]
        self.away = [Outage(medium) for medium in self.media]
        self.chain = TierChain(
            [
                tier_of(
                    lambda store=store: store, store.capabilities, QuickClock(), name=f"t{n}",
                    write=write, promote=promote,
                )
                for n, store in enumerate(self.away)
            ]
        )  # fmt: skip
        self.down = set()
        self.versions = {}
        self.next = 0

    @rule(names=NAMES)
    def set(self, names):
        items, made = [], []
        for name in names:
            self.next += 1
            made.append((name, payload((name, self.next), SIZE)))
            items.append(to_set(key(name), made[-1][1]))
        for (name, data), outcome in zip(made, self.chain.set(items), strict=True):
            if outcome is Outcome.STORED:
                self.versions.setdefault(name, []).append(data)
            elif outcome is Outcome.HIT:
                assert self.versions.get(name), "a deleted object is no hit"
            else:
                # A tier that went away during the call may have stored it, or not.
                assert outcome in (Outcome.UNAVAILABLE, Outcome.THROTTLED)

    @rule(names=NAMES)
    def get(self, names):
        self.read(names)

    def read(self, names):
        items = [to_get(key(name), SIZE) for name in names]
        outcomes = self.chain.get(items)
        for name, item, outcome in zip(names, items, outcomes, strict=True):
            assert outcome in (Outcome.HIT, Outcome.MISS, Outcome.UNAVAILABLE)
            if outcome is Outcome.HIT:
                assert content(item) in self.versions.get(name, []), "what is read was stored and not deleted"
        return outcomes

    @rule(names=NAMES)
    def delete(self, names):
        try:
            self.chain.delete([key(name) for name in names])
        except UnavailableError:
            return
        for name in names:
            self.versions.pop(name, None)

    @rule(n=st.integers(0, 2))
    def go_away(self, n):
        self.down.add(n % len(self.away))
        self.away[n % len(self.away)].begin()

    @rule(n=st.integers(0, 2))
    def come_back(self, n):
        self.away[n % len(self.away)].end()

    @rule(n=st.integers(0, 2), name=st.integers(0, 7))
    def evict(self, n, name):
        """A tier gives an object up by itself; another one may still have it."""
        holding = [medium for medium in self.media if self.holds(medium, name)]
        if len(holding) > 1:
            holding[n % len(holding)].delete([key(name)])

    def holds(self, medium, name):
        """Whether a medium has a version that was not deleted; a tier that is out may have older ones."""
        item = to_get(key(name), SIZE)
        return medium.get([item]) == [Outcome.HIT] and content(item) in self.versions.get(name, [])

    @rule()
    def flush(self):
        try:
            self.chain.flush()
        except StorageError:
            assert self.down, "a flush fails only if a tier was away since all were last there"

    @rule()
    def settle(self):
        for each in self.away:
            each.end()
        self.down.clear()
        end = time.monotonic() + 60
        while not self.is_quiet():
            assert time.monotonic() < end, [tier.why for tier in self.chain.tiers]
            time.sleep(0.005)
        known = sorted(self.versions)
        assert self.chain.exists([key(name) for name in known]) == [True] * len(known)
        assert self.read(known) == [Outcome.HIT] * len(known)
        found = [entry.key for entry in self.chain.scan_all()]
        assert set(found) == {key(name) for name in known}

    def is_quiet(self):
        """Flush, and return whether all tiers took part; calls from before may still end in failures."""
        try:
            self.chain.flush()
        except StorageError:
            return False
        return all(tier.health == "serving" for tier in self.chain.tiers)

    def teardown(self):
        if hasattr(self, "chain"):
            self.settle()
            self.chain.close()


# No shrinking: every step has threads behind it, and the failing run's own steps are printed and short.
Lives.TestCase.settings = settings(
    max_examples=example_count(150), stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck), print_blob=False, phases=[Phase.generate],
)  # fmt: skip
test_random_lives = Lives.TestCase
