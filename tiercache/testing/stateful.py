"""State machines that drive a store and a plain dict (the model) side by side, and compare them.

    run_state_machine_as_test(type("MyMachine", (BackendMachine,), {"suite": MyHooks}))

In `BackendMachine` the store has room for everything, so every answer is known beforehand. `EvictingMachine`
opens the store with the small capacity `hooks.small`, and checks that no page is evicted before the objects
that depend on the page. Both machines kill the process of a persistent store, and fill the disk if the hooks
can do that. The outcomes in `hooks.faults` are allowed as answers at any time. They leave the model
unchanged, except that CORRUPT removes the object.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.storage.base import SetItem, StorageBackend
from tiercache.testing.conformance import BackendHooks
from tiercache.testing.conformance.figures import StoreFollower
from tiercache.testing.objects import chain, content, key, page_key, payload, state_of, to_get, to_set

NAMES = st.integers(0, 11)
BATCHES = st.lists(NAMES, max_size=6)
SEQUENCES = st.integers(0, 4)
_REFUSALS: Final = {Outcome.ERROR, Outcome.THROTTLED}
"""Outcomes of a set that stored nothing."""


class Held(NamedTuple):
    """The model's record of a stored object."""

    data: bytes
    meta: ObjectMeta


def size_of(name: int) -> int:
    """Return the length in bytes of a name's object, from 1 to 70 001."""
    return (1, 100, 4096, 4097, 9000, 70_000)[name % 6] + name // 6


def key_of(name: int) -> ObjectKey:
    """Return the object key of a name: 0 to 8 are pages, 9 to 11 are the states of the pages 0 to 2."""
    return key(name) if name < 9 else state_of(name - 9)


def parent_of(name: int) -> bytes | None:
    """Return the parent of a name's object.

    Three pages form a sequence: 0 <- 1 <- 2, 3 <- 4 <- 5, 6 <- 7 <- 8. The parent of a state is its own page.
    """
    if name >= 9:
        return page_key(name - 9)
    return page_key(name - 1) if name % 3 else None


class BackendMachine(RuleBasedStateMachine):
    """State machine that compares a store with a dict; the store has room for everything.

    The hooks that `suite` returns open the store.

    The rules are {set, get, exists, describe, delete, corrupt, find_out, follow, reopen, kill, fill_disk,
    free_disk}.

    Thread safety: Hypothesis calls one rule at a time.
    """

    suite: Callable[[], BackendHooks]
    bounded: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.hooks = type(self).suite()
        self.capacity = self.hooks.small if self.bounded else None
        self.directory = Path(tempfile.mkdtemp(prefix="tiercache-"))
        self.path = self.directory / "store"
        self.store: StorageBackend = self.hooks.open_store(self.path, self.capacity)
        self.model: dict[ObjectKey, Held] = {}
        self.corrupted: set[ObjectKey] = set()
        self.undead: dict[ObjectKey, Held] = {}
        """Corrupt objects that were dropped while the disk was full.

        The full disk may have kept the store from recording that these objects were dropped. They then exist
        again when the store is next opened.
        """
        self.full = False
        self.refused: set[bytes] = set()
        """Keys of pages that were THROTTLED when they came last: their states may be THROTTLED too."""
        self.version = 0
        """Number of the latest batch that was stored; batches with different numbers have different bytes."""
        self.told = StoreFollower(self.store)

    # --- operations
    # --------------------------------------------------------------------------------------------------------

    @rule(names=BATCHES)
    def set(self, names: list[int]) -> None:
        """Store a batch: new objects are stored, and objects that the store has already are hits."""
        self.version += 1
        self.put(
            [
                to_set(
                    key_of(n),
                    payload((n, self.version), size_of(n)),
                    pieces=1 + n % 3,
                    slack=n % 2 * 4096,
                    parent=parent_of(n),
                )
                for n in names
            ]
        )

    @rule(names=BATCHES)
    def get(self, names: list[int]) -> None:
        """Read a batch: hits return the bytes that were stored.

        A corrupted object is reported as CORRUPT, and is absent from the next batch on.
        """
        self.read([(key_of(n), size_of(n)) for n in names])

    @rule(names=BATCHES)
    def exists(self, names: list[int]) -> None:
        """Check existence; a corrupted object still exists until it is read."""
        keys = [key_of(n) for n in names]
        for k, there in zip(keys, self.store.exists(keys), strict=True):
            assert there == (k in self.model) or (not there and Outcome.MISS in self.hooks.faults)

    @rule(names=BATCHES)
    def describe(self, names: list[int]) -> None:
        """Describe a batch: the answers equal those of a scan.

        A corrupted object is described until it is read.
        """
        keys = [key_of(n) for n in names]
        for k, entry in zip(keys, self.store.describe(keys), strict=True):
            assert (entry is not None) == (k in self.model)
            if entry is not None:
                assert (entry.key, self.hooks.scanned(entry.meta)) == (
                    k,
                    self.hooks.scanned(self.model[k].meta),
                )

    @rule(names=BATCHES)
    def delete(self, names: list[int]) -> None:
        """Delete a batch: the first mention of a stored key returns True.

        If a full disk or a fault prevents the deletion, the object stays and the answer is False.
        """
        keys = [key_of(n) for n in names]
        for k, gone in zip(keys, self.store.delete(keys), strict=True):
            assert gone == (k in self.model) or (
                not gone and (self.full or Outcome.ERROR in self.hooks.faults)
            )
            if gone:
                del self.model[k]
                self.corrupted.discard(k)

    @precondition(lambda self: self.model.keys() - self.corrupted)
    @rule(data=st.data())
    def corrupt(self, data: Any) -> None:
        """Change a bit of a stored object without the store's knowledge."""
        k = data.draw(st.sampled_from(sorted(self.model.keys() - self.corrupted)))
        self.hooks.corrupt(self.store, k)
        self.corrupted.add(k)

    @precondition(lambda self: self.corrupted)
    @rule(data=st.data())
    def find_out(self, data: Any) -> None:
        """Read a corrupted object twice in one batch, with other objects in between."""
        k = data.draw(st.sampled_from(sorted(self.corrupted)))
        others = sorted(self.model)[:2]
        self.read([(each, self.model[each].meta.length) for each in (k, *others, k)])

    @rule()
    def replay_events(self) -> None:
        """Replay the store's events: they give exactly the objects that it has."""
        self.told.await_truth()

    # --- external events
    # --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.store.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        """Close the store and open it again."""
        self.told.await_truth()
        self.store.close()
        self.store = self.hooks.open_store(self.path, self.capacity)
        self.note_opening()

    @precondition(lambda self: self.store.capabilities.persistent)
    @rule()
    def kill(self) -> None:
        """Kill the store's process between two calls, and open the data that the process left."""
        self.store = self.hooks.kill(self.store, self.path, *([self.capacity] if self.bounded else []))
        self.note_opening()

    @precondition(lambda self: not self.full and self.hooks.has("fill_disk"))
    @rule()
    def fill_disk(self) -> None:
        """Fill the disk: no new object can be stored from now on, and no stored object is lost."""
        self.hooks.fill_disk(self.store)
        self.full = True

    @precondition(lambda self: self.full)
    @rule()
    def free_disk(self) -> None:
        """Free the disk, so that there is room again."""
        self.hooks.free_disk(self.store)
        self.full = False

    # --- invariants
    # --------------------------------------------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        """Check that the scan, the usage and the store's own counts agree with the dict."""
        scanned = [(entry.key, self.hooks.scanned(entry.meta)) for entry in self.store.scan_all()]
        assert len(scanned) == len(self.model), "a scan names every object once"
        assert dict(scanned) == {k: self.hooks.scanned(held.meta) for k, held in self.model.items()}
        usage = self.hooks.usage(self.store)
        assert (usage.objects, usage.payload_bytes) == (
            len(self.model),
            sum(len(held.data) for held in self.model.values()),
        )
        assert self.capacity is None or usage.used_bytes <= self.capacity
        self.hooks.check(self.store)

    def teardown(self) -> None:
        """Check that the events tell what the store has; close the store and remove its files."""
        try:
            self.told.await_truth()
        finally:
            self.store.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    # --- the model
    # --------------------------------------------------------------------------------------------------------

    def put(self, items: Sequence[SetItem]) -> None:
        """Store a batch, and compare the answers with the model."""
        before = dict(self.model)
        answers = self.store.set(items)
        for item, answer in zip(items, answers, strict=True):
            if answer is Outcome.STORED:
                assert self.bounded or item.key not in self.model
                # With faults, a page may fail to reach the store while its state does. A state may be stored
                # before its page, even if the ancestors of that page are not stored.
                alone = item.meta.parent == item.key.page_key and self.hooks.faults
                free = self.bounded or alone or not self.store.capabilities.ordered
                assert free or not self.is_cut_off(item, before, items)
                self.model[item.key] = Held(b"".join(item.buffers)[: item.meta.length], item.meta)
                self.corrupted.discard(item.key)
                self.undead.pop(item.key, None)
            elif answer is Outcome.HIT:
                assert item.key in self.model
            else:
                assert answer in self.hooks.faults & _REFUSALS or (
                    answer is Outcome.THROTTLED and self.may_throttle(item, items)
                )
        for item, answer in zip(items, answers, strict=True):
            if item.meta.parent != item.key.page_key:
                change = self.refused.add if answer is Outcome.THROTTLED else self.refused.discard
                change(item.key.page_key)
        self.give_up(before, items)

    def read(self, wanted: Sequence[tuple[ObjectKey, int]]) -> None:
        """Read a batch, and compare the answers with the model."""
        items = [to_get(k, size, pieces=1 + n % 4) for n, (k, size) in enumerate(wanted)]
        answers: dict[ObjectKey, list[Outcome]] = {}
        for item, answer in zip(items, self.store.get(items), strict=True):
            answers.setdefault(item.key, []).append(answer)
            if answer is Outcome.HIT:
                assert item.key not in self.corrupted
                assert content(item) == self.model[item.key].data
        for k, found in answers.items():
            self.judge(k, found)

    def judge(self, k: ObjectKey, answers: Sequence[Outcome]) -> None:
        """Check that these answers to the gets of one key in one batch are allowed.

        CORRUPT removes the object from the model.
        """
        faults = self.hooks.faults
        dropped = Outcome.CORRUPT in answers
        assert Outcome.STORED not in answers
        if k in self.corrupted:
            assert dropped or set(answers) <= faults
            expected = {Outcome.CORRUPT, Outcome.MISS}
        elif k in self.model:
            assert not dropped or Outcome.CORRUPT in faults
            expected = {Outcome.HIT, Outcome.MISS} if dropped else {Outcome.HIT}
        else:
            assert not dropped
            expected = {Outcome.MISS}
        assert set(answers) <= expected | faults
        if dropped:
            held = self.model.pop(k)
            if k in self.corrupted and self.full:
                self.undead[k] = held
            self.corrupted.discard(k)

    def note_opening(self) -> None:
        """Update the model after the store was opened again, on a disk that has room."""
        self.told = StoreFollower(self.store)
        self.full = False
        there = {entry.key for entry in self.store.scan_all()}
        back = {k: held for k, held in self.undead.items() if k in there}
        self.model |= back
        self.corrupted |= back.keys()
        self.undead = {}

    def may_throttle(self, item: SetItem, batch: Sequence[SetItem]) -> bool:
        """Return whether the store may have a reason to answer THROTTLED for this item of a batch."""
        waits = item.meta.parent == item.key.page_key and item.key.page_key in self.refused
        return self.full or waits or self.is_cut_off(item, self.model, batch)

    def is_cut_off(self, item: SetItem, stored: Mapping[ObjectKey, Held], batch: Sequence[SetItem]) -> bool:
        """Return whether the item has an ancestor that is neither stored nor part of the batch.

        For a state, only the pages before its own page count: a state may be stored before its own page.
        """
        pages = {k.page_key for k, held in stored.items() if held.meta.parent != k.page_key}
        coming = {
            other.key.page_key: other.meta.parent
            for other in batch
            if other.meta.parent != other.key.page_key
        }
        parent = item.meta.parent
        if parent == item.key.page_key:
            # A state may come before its page. If its page is in the batch, follow the parent of that page.
            parent = coming.get(parent) if parent not in pages else None
        while parent is not None and parent not in pages:
            if parent not in coming:
                return True
            parent = coming[parent]
        return False

    def give_up(self, before: Mapping[ObjectKey, Held], batch: Sequence[SetItem]) -> None:
        """Remove from the model the objects that a set has evicted. In this class no set evicts.

        `before` is the model before that set.
        """


class EvictingMachine(BackendMachine):
    """State machine with a small capacity; its rules store sequences, and objects that evict sequences.

    A page may be evicted only when no stored object depends on the page.
    """

    bounded = True

    @property
    def unit(self) -> int:
        """Bytes of a page of a sequence: one fortieth of the capacity."""
        return self.hooks.small // 40

    @rule(sequence=SEQUENCES, depth=st.integers(1, 8), state=st.booleans(), skip=st.integers(0, 2))
    def extend(self, sequence: int, depth: int, state: bool, skip: int) -> None:
        """Store the objects of a sequence in one batch, without the first `skip` of them.

        The objects are the first `depth` pages in order and, with `state`, the state of the last of these
        pages. A state is twice as large as a page.
        """
        self.version += 1
        pages = chain(("sequence", sequence), depth)
        items = [
            to_set(k, payload((k, self.version), self.unit), parent=parent, depth=n + 1)
            for n, (k, parent) in enumerate(pages)
        ]
        if state:
            state_key = state_of((("sequence", sequence), depth - 1))
            items.append(
                to_set(
                    state_key,
                    payload((state_key, self.version), 2 * self.unit),
                    parent=state_key.page_key,
                    depth=depth,
                )
            )
        self.put(items[skip:])

    @rule(count=st.integers(1, 12), at_once=st.booleans())
    def evict(self, count: int, at_once: bool) -> None:
        """Store objects without parents, together or one by one, so that other objects are evicted."""
        self.version += 1
        names = [("crowd", self.version, n) for n in range(count)]
        items = [to_set(key(name), payload(name, 2 * self.unit)) for name in names]
        for batch in [items] if at_once else [[item] for item in items]:
            self.put(batch)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def revisit(self, data: Any) -> None:
        """Read some stored objects, which makes them recently used."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=6))
        self.read([(k, self.model[k].meta.length) for k in chosen])

    def may_throttle(self, item: SetItem, batch: Sequence[SetItem]) -> bool:
        """Return whether the answer for the item may be THROTTLED.

        A store evicts neither objects of the item's batch nor pages on which the item depends. If the store
        holds nothing else, it cannot make room for the item.
        """
        crowded = sum(other.meta.length for other in batch) > self.hooks.small // 4
        return self.full or crowded or item.meta.parent is not None or bool(self.undead)

    def give_up(self, before: Mapping[ObjectKey, Held], batch: Sequence[SetItem]) -> None:
        """Remove evicted objects from the model.

        An evicted page may not be the parent of an object that was stored before the set and is stored now.
        """
        there = {entry.key for entry in self.store.scan_all()}
        lost = {k for k in self.model if k not in there}
        # An object that this set stored counts only if it was alone in its batch:
        #   1. page p is stored, and no stored object depends on it
        #   2. a batch of x and a state of p is set; x may evict p
        #   3. the state of p is stored, and now depends on a page that is gone
        counted = there & (before.keys() if len(batch) > 1 else self.model.keys())
        pages = {self.model[k].meta.parent for k in counted} - {None}
        for k in lost:
            if self.model[k].meta.parent != k.page_key:
                assert k.page_key not in pages, "a page never goes before what depends on it"
            del self.model[k]
        self.corrupted -= lost
