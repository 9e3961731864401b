"""Quotas and guarantees of three tenants beside a plain model, for every store that keeps shares."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import inf
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiercache_backends import memory
from tiercache_backends.file import records

from tests.examples import example_count, slow_after
from tests.storage.backends import FileHooks, MemoryHooks
from tiercache.core import ObjectKey
from tiercache.storage.base import SetItem
from tiercache.storage.shares import Footprint, Share, Shares
from tiercache.testing.conformance import BackendHooks
from tiercache.testing.conformance.hooks import HIT, STORED, THROTTLED
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import key, page_key, state_of, to_get, to_set

TENANTS = ("ash", "birch", "cedar")
OWNERS = ("", *TENANTS)
PLAIN, HYBRID = b"plain", b"hybrid"
SIZES = (100_000, 40_000, 4096, 180_000)
LENGTH = 6
"""Pages of a sequence."""
TINY, TINY_PAGES = 12, 256
"""Sequence whose pages are objects of one byte, each without a parent, and their number."""

Place = tuple[str, int, int, bool]
"""An object: owner, sequence, page, and whether it is the page's state."""


def namespace_of(owner: str, sequence: int) -> bytes:
    """Each owner has two namespaces; sequences of the second one need states."""
    return owner.encode() + b"/" + (HYBRID if sequence % 2 else PLAIN)


def owner_of(namespace: bytes) -> str:
    return namespace.partition(b"/")[0].decode()


@cache
def key_of(place: Place) -> ObjectKey:
    owner, sequence, page, is_state = place
    return (state_of if is_state else key)((owner, sequence, page))


def length_of(place: Place) -> int:
    owner, sequence, page, is_state = place
    if sequence == TINY:
        return 1
    return SIZES[(len(owner) + 3 * sequence + page + is_state) % len(SIZES)]


def item_of(place: Place, value: float | None = None) -> SetItem:
    owner, sequence, page, is_state = place
    parent = page_key((owner, sequence, page)) if is_state else None
    if page and not is_state and sequence != TINY:
        parent = page_key((owner, sequence, page - 1))
    return to_set(
        key_of(place), bytes(length_of(place)), namespace=namespace_of(owner, sequence), parent=parent,
        depth=None if sequence == TINY else page + 1, value=value, worker=1,
    )  # fmt: skip


def batch_of(owner: str, sequence: int, pages: int) -> list[Place]:
    """The first pages of a sequence, with the state of the last one if the sequence needs states."""
    places = [(owner, sequence, page, False) for page in range(pages)]
    return places + [(owner, sequence, pages - 1, True)] * (sequence % 2)


EVERYTHING = [
    (owner, sequence, page, is_state)
    for owner in OWNERS
    for sequence in range(12)
    for page in range(LENGTH)
    for is_state in (False, True)[: 1 + sequence % 2]
]
ALL_TINY = [(owner, TINY, page, False) for owner in OWNERS for page in range(TINY_PAGES)]


class SharesMachine(RuleBasedStateMachine):
    """Sets, reads, deletions, changes of the shares and restarts, beside a dict of what is stored.

    The model does not know what a store evicts, but after each set what it may have evicted, and when it must
    have.
    """

    suite: ClassVar[type[BackendHooks]]
    persistent: ClassVar[bool]
    capacity: ClassVar[int]
    safe: ClassVar[int]
    """Bytes that fit whatever the sizes of the objects are."""
    footprint: ClassVar[Footprint]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.hooks = self.suite()
        self.limits: Mapping[str, Share] = {name: Share() for name in TENANTS}
        self.store = self.hooks.open_store(self.folder / "s", self.capacity)
        self.share()
        self.there: set[Place] = set()

    def teardown(self) -> None:
        self.hooks.check(self.store)
        self.store.close()
        shutil.rmtree(self.folder)

    def share(self) -> None:
        self.store.share(Shares(owner_of, self.limits))

    # --- rules

    @rule(sets=st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(0, 11)), min_size=5, max_size=30))
    def set_many(self, sets: Sequence[tuple[str, int]]) -> None:
        for owner, sequence in sets:
            self.set(owner, sequence, LENGTH, None)

    @rule(
        owner=st.sampled_from(OWNERS), sequence=st.integers(0, 11), pages=st.integers(1, LENGTH),
        value=st.sampled_from([None, None, 1.0, 100.0]),
    )  # fmt: skip
    def set(self, owner: str, sequence: int, pages: int, value: float | None) -> None:
        self.put(owner, batch_of(owner, sequence, pages), value)

    @rule(owner=st.sampled_from(OWNERS), first=st.integers(0, 3), count=st.integers(1, 4))
    def flood(self, owner: str, first: int, count: int) -> None:
        """Store up to 256 objects of one byte, in batches."""
        for part in range(first, min(first + count, 4)):
            self.put(owner, [(owner, TINY, 64 * part + page, False) for page in range(64)], None)

    def put(self, owner: str, places: Sequence[Place], value: float | None) -> None:
        before = self.there
        used = self.used(owner)
        fresh = [place for place in places if place not in before]
        answers = dict(zip(places, self.store.set([item_of(p, value) for p in places]), strict=True))
        self.look()
        assert set(answers.values()) <= {STORED, HIT, THROTTLED}
        assert {place for place in places if answers[place] is not THROTTLED} <= self.there
        lost = before - self.there
        for other in OWNERS:
            if other != owner:
                self.check_loss(other, [place for place in lost if place[0] == other])
        share = self.limits.get(owner, Share())
        wanted, total = self.taken(fresh), self.taken(before)
        if used + wanted <= share.guarantee:
            assert THROTTLED not in answers.values(), "a tenant can store what it is guaranteed"
        if total + wanted <= self.safe:
            assert not [place for place in lost if place[0] != owner], "a quota is no reason to evict others"
        refused = [place for place in fresh if answers[place] is THROTTLED and self.could_follow(place)]
        if refused and value is None and not self.has_values:
            room = inf if share.quota is None else share.quota - self.used(owner)
            assert self.taken(refused[:1]) > room or all(
                self.used(other) <= self.limits.get(other, Share()).guarantee
                for other in OWNERS
                if other != owner
            ), "a set is throttled only for a quota, or if all others are protected"
        self.has_values = self.has_values or value is not None

    has_values = False

    def could_follow(self, place: Place) -> bool:
        owner, sequence, page, is_state = place
        starts = sequence == TINY or (not page and not is_state)
        return starts or (owner, sequence, page - (not is_state), False) in self.there

    @rule(places=st.lists(st.sampled_from(EVERYTHING), max_size=8))
    def get(self, places: Sequence[Place]) -> None:
        answers = self.store.get([to_get(key_of(place), length_of(place)) for place in places])
        assert [answer is HIT for answer in answers] == [place in self.there for place in places]

    @rule(places=st.lists(st.sampled_from(EVERYTHING), min_size=1, max_size=4, unique=True))
    def delete(self, places: Sequence[Place]) -> None:
        answers = self.store.delete([key_of(place) for place in places])
        assert answers == [place in self.there for place in places]
        self.there = self.there - set(places)

    @rule(
        quotas=st.lists(st.sampled_from([None, None, 0, 300_000, 900_000]), min_size=3, max_size=3),
        guarantees=st.lists(st.sampled_from([0, 200_000, 450_000, 600_000]), min_size=3, max_size=3),
    )
    def change(self, quotas: Sequence[int | None], guarantees: Sequence[int]) -> None:
        before = self.there
        self.limits = {
            name: Share(quota, guarantee if quota is None else min(quota, guarantee))
            for name, quota, guarantee in zip(TENANTS, quotas, guarantees, strict=True)
        }
        beyond = {
            name for name, share in self.limits.items()
            if share.quota is not None and self.used(name) > share.quota
        }  # fmt: skip
        self.share()
        self.look()
        assert {place[0] for place in before - self.there} <= beyond, "only what is beyond its quota shrinks"

    @precondition(lambda self: self.persistent)
    @rule(kill=st.booleans())
    def reopen(self, kill: bool) -> None:
        if kill:
            self.store = self.hooks.kill(self.store, self.folder / "s", self.capacity)
        else:
            self.store.close()
            self.store = self.hooks.open_store(self.folder / "s", self.capacity)
        self.share()
        self.has_values = True  # the order of eviction has changed, and what was evicted before is forgotten

    @rule(seed=st.integers(0, 1000), idle=st.sampled_from(OWNERS))
    def several_at_once(self, seed: int, idle: str) -> None:
        """All owners but one write at once; at no instant has any more than its quota."""
        before, done = self.there, Event()

        def write(owner: str) -> None:
            random = Random(f"{seed}{owner}")
            for _ in range(3):
                batch = batch_of(owner, random.randrange(12), random.randint(1, LENGTH))
                self.store.set([item_of(place) for place in batch])

        def work() -> None:
            try:
                run_all(*(lambda owner=owner: write(owner) for owner in OWNERS if owner != idle))
            finally:
                done.set()

        def watch() -> None:
            while not done.is_set():
                for name, use in self.store.usage().owners.items():
                    quota = self.limits.get(name, Share()).quota
                    assert quota is None or use.used_bytes <= quota, f"{name} has {use}"

        run_all(work, watch)
        self.look()
        self.check_loss(idle, [place for place in before - self.there if place[0] == idle])

    # --- what must hold

    def look(self) -> None:
        found = self.store.exists([key_of(place) for place in EVERYTHING + ALL_TINY])
        self.there = {place for place, there in zip(EVERYTHING + ALL_TINY, found, strict=True) if there}

    def taken(self, places: Iterable[Place]) -> int:
        return sum(self.footprint.of(length_of(place)) for place in places)

    def used(self, owner: str) -> int:
        return self.taken(place for place in self.there if place[0] == owner)

    def check_loss(self, owner: str, lost: Sequence[Place]) -> None:
        """Each of these objects was evicted while the owner had more than its guarantee."""
        if lost:
            last = max(self.taken([place]) for place in lost)
            assert self.used(owner) + last > self.limits.get(owner, Share()).guarantee, (
                f"{owner} lost {lost} to others, which it was guaranteed"
            )

    @invariant()
    def the_store_agrees_with_the_model(self) -> None:
        usage = self.store.usage()
        assert {name: use.used_bytes for name, use in usage.owners.items()} == {
            owner: self.used(owner) for owner in OWNERS
        }
        assert usage.payload_bytes == sum(map(length_of, self.there))
        for name, share in self.limits.items():
            use = usage.owners[name]
            assert (use.quota_bytes, use.guarantee_bytes) == (share.quota, share.guarantee)
            assert share.quota is None or use.used_bytes <= share.quota


STORES: dict[str, Any] = {
    "file": (FileHooks, True, 5 << 20, 2 << 20, records.FOOTPRINT, 20),
    "memory": (MemoryHooks, False, 2 << 20, 2 << 20, memory.FOOTPRINT, 20),
}


@pytest.mark.parametrize("store", slow_after(1, STORES))
def test_three_tenants_beside_a_model(store: str) -> None:
    suite, persistent, capacity, safe, footprint, examples = STORES[store]
    members = {
        "suite": suite, "persistent": persistent, "capacity": capacity, "safe": safe, "footprint": footprint,
    }  # fmt: skip
    run_state_machine_as_test(
        type("Machine", (SharesMachine,), members),
        settings=settings(
            max_examples=example_count(examples), stateful_step_count=30, deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_bytes_are_counted_anew_after_a_damaged_catalog(tmp_path: Path) -> None:
    suite, _, capacity, _, footprint, _ = STORES["file"]
    hooks = suite()
    limits = {name: Share(quota=900_000) for name in TENANTS}
    with hooks.open_store(tmp_path / "s", capacity) as opened:
        opened.share(Shares(owner_of, limits))
        for owner in OWNERS:
            for sequence in (0, 2, 4):
                opened.set([item_of(place) for place in batch_of(owner, sequence, 3)])
    with open(tmp_path / "s" / "catalog" / "000001.log", "r+b") as file:
        file.write(b"\xff" * 1024)
    with hooks.open_store(tmp_path / "s", capacity) as opened:
        opened.share(Shares(owner_of, limits))
        found = dict.fromkeys(OWNERS, 0)
        for entry in opened.scan_all():
            found[owner_of(entry.meta.namespace)] += footprint.of(entry.meta.length)
        assert {name: use.used_bytes for name, use in opened.usage().owners.items()} == found
        assert sum(found.values()) > 0
        assert opened.set([item_of(place) for place in batch_of("ash", 6, 3)]).count(STORED) > 0
        assert opened.usage().owners["ash"].used_bytes <= 900_000
        hooks.check(opened)
