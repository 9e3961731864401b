"""State machines that drive a store and a plain dict side by side.

    run_state_machine_as_test(type("MyMachine", (BackendMachine,), {"suite": MyHooks}))

`BackendMachine` has room for everything, so that every answer is known beforehand; `EvictingMachine` has the smallest capacity of its
hooks, and knows what may be gone. Both fill the disk and kill the process where the hooks can, and take an answer of `hooks.faults` for
what it is: allowed, and without effect.
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
from tiercache.testing.objects import chain, content, key, page_key, payload, state_of, to_get, to_set

NAMES = st.integers(0, 11)
BATCHES = st.lists(NAMES, max_size=6)
SEQUENCES = st.integers(0, 4)
_REFUSALS: Final = {Outcome.ERROR, Outcome.THROTTLED}


class Held(NamedTuple):
    """What the model knows of a stored object."""

    data: bytes
    meta: ObjectMeta


def size_of(name: int) -> int:
    """Every name has its own length."""
    return (1, 100, 4096, 4097, 9000, 70_000)[name % 6] + name // 6


def key_of(name: int) -> ObjectKey:
    """Names from 9 on are states of the first pages."""
    return key(name) if name < 9 else state_of(name - 9)


def parent_of(name: int) -> bytes | None:
    """Pages come in sequences of three."""
    if name >= 9:
        return page_key(name - 9)
    return page_key(name - 1) if name % 3 else None


class BackendMachine(RuleBasedStateMachine):
    """{set, get, exists, describe, delete, corrupt, reopen, kill, fill the disk} against a dict. `suite` opens a store with room for
    everything.

    Thread safety: hypothesis runs one at a time.
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
        """Corrupt objects that were dropped while the disk was full. The medium may still name them when the store is opened again."""
        self.full = False
        self.version = 0

    # --- what a process does -----------------------------------------------------------------------------------------------------------

    @rule(names=BATCHES)
    def set(self, names: list[int]) -> None:
        """New objects are stored, known ones are hits."""
        self.version += 1
        self.put(
            [
                to_set(key_of(n), payload((n, self.version), size_of(n)), pieces=1 + n % 3, slack=n % 2 * 4096, parent=parent_of(n))
                for n in names
            ]
        )

    @rule(names=BATCHES)
    def get(self, names: list[int]) -> None:
        """What comes back is what was stored; a corrupted object is reported once and is gone."""
        self.read([(key_of(n), size_of(n)) for n in names])

    @rule(names=BATCHES)
    def exists(self, names: list[int]) -> None:
        """A corrupted object is still believed to be there."""
        keys = [key_of(n) for n in names]
        for k, there in zip(keys, self.store.exists(keys), strict=True):
            assert there == (k in self.model) or (not there and Outcome.MISS in self.hooks.faults)

    @rule(names=BATCHES)
    def describe(self, names: list[int]) -> None:
        """What is said of each object is what a scan would say; a corrupted one is still believed in."""
        keys = [key_of(n) for n in names]
        for k, entry in zip(keys, self.store.describe(keys), strict=True):
            assert (entry is not None) == (k in self.model)
            if entry is not None:
                assert (entry.key, self.hooks.scanned(entry.meta)) == (k, self.hooks.scanned(self.model[k].meta))

    @rule(names=BATCHES)
    def delete(self, names: list[int]) -> None:
        """The first mention of a stored key says True; a store that cannot forget it now says False and keeps it."""
        keys = [key_of(n) for n in names]
        for k, gone in zip(keys, self.store.delete(keys), strict=True):
            assert gone == (k in self.model) or (not gone and (self.full or Outcome.ERROR in self.hooks.faults))
            if gone:
                del self.model[k]
                self.corrupted.discard(k)

    @precondition(lambda self: self.model.keys() - self.corrupted)
    @rule(data=st.data())
    def corrupt(self, data: Any) -> None:
        """A bit changes behind the store's back."""
        k = data.draw(st.sampled_from(sorted(self.model.keys() - self.corrupted)))
        self.hooks.corrupt(self.store, k)
        self.corrupted.add(k)

    @precondition(lambda self: self.corrupted)
    @rule(data=st.data())
    def find_out(self, data: Any) -> None:
        """Somebody reads a corrupted object, among others."""
        k = data.draw(st.sampled_from(sorted(self.corrupted)))
        others = sorted(self.model)[:2]
        self.read([(each, self.model[each].meta.length) for each in (k, *others, k)])

    # --- what happens to it ------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.store.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        """Close, and open again."""
        self.store.close()
        self.store = self.hooks.open_store(self.path, self.capacity)
        self.begin()

    @precondition(lambda self: self.store.capabilities.persistent)
    @rule()
    def kill(self) -> None:
        """The process dies between two calls; another one opens what it left."""
        self.store = self.hooks.kill(self.store, self.path, *([self.capacity] if self.bounded else []))
        self.begin()

    @precondition(lambda self: not self.full and self.hooks.has("fill_disk"))
    @rule()
    def fill_disk(self) -> None:
        """From now on nothing new can be stored; nothing that is stored is lost."""
        self.hooks.fill_disk(self.store)
        self.full = True

    @precondition(lambda self: self.full)
    @rule()
    def free_disk(self) -> None:
        """There is room again."""
        self.hooks.free_disk(self.store)
        self.full = False

    # --- what must hold afterwards -----------------------------------------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        """Scan, usage and the store's own books agree with the dict."""
        scanned = [(entry.key, self.hooks.scanned(entry.meta)) for entry in self.store.scan_all()]
        assert len(scanned) == len(self.model), "a scan names every object once"
        assert dict(scanned) == {k: self.hooks.scanned(held.meta) for k, held in self.model.items()}
        usage = self.store.usage()
        assert (usage.objects, usage.payload_bytes) == (len(self.model), sum(len(held.data) for held in self.model.values()))
        assert self.capacity is None or usage.used_bytes <= self.capacity
        self.hooks.check(self.store)

    def teardown(self) -> None:
        """Close the store and remove its files."""
        self.store.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- the model ---------------------------------------------------------------------------------------------------------------------

    def put(self, items: Sequence[SetItem]) -> None:
        """Store a batch, and compare the answers with the model."""
        before = dict(self.model)
        for item, answer in zip(items, self.store.set(items), strict=True):
            if answer is Outcome.STORED:
                assert self.bounded or item.key not in self.model
                # With faults its page may not have come as far as the store, which cannot tell then that it was to come.
                alone = item.meta.parent == item.key.page_key and self.hooks.faults
                assert self.bounded or alone or not self.is_cut_off(item, before, items)
                self.model[item.key] = Held(b"".join(item.buffers)[: item.meta.length], item.meta)
                self.corrupted.discard(item.key)
                self.undead.pop(item.key, None)
            elif answer is Outcome.HIT:
                assert item.key in self.model
            else:
                assert answer in self.hooks.faults & _REFUSALS or (answer is Outcome.THROTTLED and self.may_throttle(item, items))
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
        """Could the gets of one key in one batch be answered like this? A CORRUPT drops the object."""
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

    def begin(self) -> None:
        """The store was opened anew, on a disk that has room."""
        self.full = False
        there = {entry.key for entry in self.store.scan_all()}
        back = {k: held for k, held in self.undead.items() if k in there}
        self.model |= back
        self.corrupted |= back.keys()
        self.undead = {}

    def may_throttle(self, item: SetItem, batch: Sequence[SetItem]) -> bool:
        """Has the store a reason not to take this item of a batch?"""
        return self.full or self.is_cut_off(item, self.model, batch)

    def is_cut_off(self, item: SetItem, stored: Mapping[ObjectKey, Held], batch: Sequence[SetItem]) -> bool:
        """Is a page to be stored behind one that neither is there nor comes along?"""
        pages = {k.page_key for k, held in stored.items() if held.meta.parent != k.page_key}
        coming = {other.key.page_key: other.meta.parent for other in batch if other.meta.parent != other.key.page_key}
        parent = item.meta.parent
        if parent == item.key.page_key:
            parent = coming.get(parent) if parent not in pages else None  # what hangs on a page that comes along needs it
        while parent is not None and parent not in pages:
            if parent not in coming:
                return True
            parent = coming[parent]
        return False

    def give_up(self, before: Mapping[ObjectKey, Held], batch: Sequence[SetItem]) -> None:
        """Take out of the model what a set may have cost: nothing. `before` is the model before that set."""


class EvictingMachine(BackendMachine):
    """The same with a small capacity, sequences with states, and crowds that push them out: what is gone must have been nobody's page.

    Thread safety: as `BackendMachine`.
    """

    bounded = True

    @property
    def unit(self) -> int:
        """Bytes of a page; the store holds some forty."""
        return self.hooks.small // 40

    @rule(sequence=SEQUENCES, depth=st.integers(1, 8), state=st.booleans(), skip=st.integers(0, 2))
    def extend(self, sequence: int, depth: int, state: bool, skip: int) -> None:
        """A sequence's pages from `skip` on, and perhaps the state at the end, which is larger."""
        self.version += 1
        pages = chain(("sequence", sequence), depth)
        items = [to_set(k, payload((k, self.version), self.unit), parent=parent, depth=n + 1) for n, (k, parent) in enumerate(pages)]
        if state:
            hanging = state_of((("sequence", sequence), depth - 1))
            items.append(to_set(hanging, payload((hanging, self.version), 2 * self.unit), parent=hanging.page_key, depth=depth))
        self.put(items[skip:])

    @rule(count=st.integers(1, 12), at_once=st.booleans())
    def evict(self, count: int, at_once: bool) -> None:
        """Objects that nothing hangs on come in, together or one by one, and something else has to go."""
        self.version += 1
        names = [("crowd", self.version, n) for n in range(count)]
        items = [to_set(key(name), payload(name, 2 * self.unit)) for name in names]
        for batch in [items] if at_once else [[item] for item in items]:
            self.put(batch)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def revisit(self, data: Any) -> None:
        """Any stored objects are read, and are recent then."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=6))
        self.read([(k, self.model[k].meta.length) for k in chosen])

    def may_throttle(self, item: SetItem, batch: Sequence[SetItem]) -> bool:
        """All that is stored may be what the item hangs on or came with; else something could have gone for it."""
        crowded = sum(other.meta.length for other in batch) > self.hooks.small // 4
        return self.full or crowded or item.meta.parent is not None or bool(self.undead)

    def give_up(self, before: Mapping[ObjectKey, Held], batch: Sequence[SetItem]) -> None:
        """What was evicted leaves the model; nothing that stays may have hung on it all the while."""
        there = {entry.key for entry in self.store.scan_all()}
        lost = {k for k in self.model if k not in there}
        # In a batch of several, an early item may cost the page of a late one, which was not stored yet.
        witnesses = there & (before.keys() if len(batch) > 1 else self.model.keys())
        pages = {self.model[k].meta.parent for k in witnesses} - {None}
        for k in lost:
            if self.model[k].meta.parent != k.page_key:
                assert k.page_key not in pages, "a page never goes before what depends on it"
            del self.model[k]
        self.corrupted -= lost
