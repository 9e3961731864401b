"""The storage tiers of a replay: null stores, between which the decisions of a real chain move objects.

The order in which tiers are asked, the write policies, the filter of promotions, the watermark of write-back
and the budgets of writes are those of `tiercache_backends.chain`. Its threads, deadlines and examinations are
not: every copy that is decided is made before the call ends, so that a replay gives the same figures each
time. An object for which a tier has no budget is dropped, and no later comparison of the tiers finds it.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final, TypeVar, cast

from tiercache_backends.chain.batches import Offers, SetBatch, read_batch
from tiercache_backends.chain.figures import Figures
from tiercache_backends.chain.lineup import Lineup
from tiercache_backends.chain.movement import Digests, Job, Mover
from tiercache_backends.chain.settings import TierSettings, parse_tiers
from tiercache_backends.chain.tier import Tier
from tiercache_backends.chain.write_back import ColdestWatch

from tiercache.core import ObjectKey, Outcome
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.env import Env
from tiercache.storage.gate import CallGate
from tiercache.storage.tiers import PREFIX
from tiercache.storage.wrappers import Wrapper
from tiercache_lab.replay.base import Tiers
from tiercache_lab.replay.store import NullStore, ReplayClock

T = TypeVar("T")

_BATCH: Final = 64
"""Maximum number of objects of one copy, as in a real chain."""


def chain_settings(tiers: Tiers) -> list[TierSettings]:
    """Return the settings of the storage tiers in a chain.

    Raises ConfigError for a setting that is wrong, and for tiers that contradict each other.
    """
    if not tiers.storage:
        return []
    # The section is that of a bounded store in memory, so that the checks of a real chain apply.
    return parse_tiers(
        [
            {"type": "memory", "capacity": tier.nbytes, f"{PREFIX}name": tier.name}
            | {f"{PREFIX}{name}": value for name, value in tier.settings.items()}
            for tier in tiers.storage
        ]
    )


class NullChain(Wrapper):
    """Chain of null stores, the fastest first, which is never sick.

    It has the calls of a controller; those that no replay makes are calls of the first store.

    Thread safety: one thread.
    """

    def __init__(
        self, settings: Sequence[TierSettings], stores: Sequence[NullStore], clock: Callable[[], float]
    ) -> None:
        """Make a chain of `stores` with the `settings` of their tiers; `clock` returns seconds."""
        super().__init__(stores[0])
        env = ReplayClock(clock)
        self.stores: Final = tuple(stores)
        self._tiers: Final = [_NullTier(*pair, env) for pair in zip(settings, stores, strict=True)]
        self._movers: Final = {
            tier: _InlineMover(tier, self._tiers[:n]) for n, tier in enumerate(self._tiers)
        }
        self._offers: Final = Offers()
        # casts: the offers use of tiers and movers only what the null ones have.
        self._lineup: Final = Lineup(
            cast(Sequence[Tier], self._tiers), cast(Mapping[Tier, Mover], self._movers), CallGate("replay")
        )
        self._read = dict.fromkeys((tier.name for tier in self._tiers), 0)

    @property
    def read_bytes(self) -> int:
        """Bytes that were read of all tiers."""
        return sum(store.read_bytes for store in self.stores)

    def take_reads(self) -> Mapping[str, int]:
        """Return the bytes that were read of each tier since the last call of this method."""
        now = {tier.name: tier.store.read_bytes for tier in self._tiers}
        taken = {name: nbytes - self._read[name] for name, nbytes in now.items()}
        self._read = now
        return taken

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        found = [False] * len(keys)
        for store in self.stores:
            left = [i for i, there in enumerate(found) if not there]
            for i, there in zip(left, store.exists([keys[i] for i in left]), strict=True):
                found[i] = there
        return found

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        outcomes = read_batch(self._lineup, self._offers, items, set())
        self._move()
        return outcomes

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        outcomes = SetBatch(self._lineup, self._offers, items, set()).store()
        self._move()
        return outcomes

    def _move(self) -> None:
        """Make all copies that are due, until there are none."""
        while any(mover.move() for mover in self._movers.values()):
            pass

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        self._lineup.advise(keys, values, worker)


class _NullTier:
    """Tier as far as the decisions of a chain know it: a null store and its figures.

    Thread safety: one thread.
    """

    capabilities: Final = NullStore.capabilities
    is_readable: Final = True
    is_busy: Final = False
    leaving: Final = ""

    def __init__(self, settings: TierSettings, store: NullStore, env: Env) -> None:
        self.name: Final = settings.name
        self.settings: Final = settings
        self.store: Final = store
        self.figures: Final = Figures(env, settings.write_per_day)

    @property
    def is_writable(self) -> bool:
        """Whether the tier takes new objects."""
        return not self.settings.read_only and self.figures.has_budget()

    def call(self, operation: str, work: Callable[[NullStore], T]) -> T:
        """Make a call of the store."""
        return work(self.store)

    def withheld(self, items: Sequence[GetItem]) -> list[bool]:
        """Return that no call was given up, so that all buffers are free."""
        return [False] * len(items)

    def get(self, items: Sequence[GetItem], *, is_use: bool = True) -> list[Outcome]:
        """Read objects."""
        return self.store.get(items) if is_use else self.store.peek(items)

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return which objects the tier has."""
        return self.store.exists(keys)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int) -> None:
        """Pass on the values of objects."""
        self.store.advise(keys, values, worker)

    def set(self, items: Sequence[SetItem], deleted: Digests) -> list[Outcome]:
        """Store objects, and charge the budget for those that are new; nothing is deleted meanwhile."""
        outcomes = self.store.set(items)
        stored = zip(items, outcomes, strict=True)
        self.figures.note_written([item.meta.length for item, out in stored if out is Outcome.STORED])
        return outcomes


class _InlineMover:
    """Mover as far as the decisions of a chain know it, which copies to `target` when `move` is called.

    Thread safety: one thread.
    """

    def __init__(self, target: _NullTier, above: Sequence[_NullTier]) -> None:
        self._target = target
        self._above = cast(Sequence[Tier], above)
        self._write_back = ColdestWatch(cast(Tier, target))
        self._queue: OrderedDict[bytes, Job] = OrderedDict()

    def stage(self, item: GetItem) -> memoryview:
        """Return the payload of a promoted object, which has no bytes here."""
        return memoryview(b"")

    def offer(self, jobs: Iterable[Job], deleted: Digests) -> None:
        """Queue objects to be copied; nothing is deleted meanwhile."""
        for job in jobs:
            self._queue.setdefault(job.key.digest, job)

    def move(self) -> bool:
        """Copy what waits, and what the tier above will evict soon; return whether anything was copied."""
        if self._write_back.is_due(self._above):
            found = self._write_back.look(self._above)
            if found is not None:
                self.offer([Job(entry.key, found[0]) for entry in found[1]], set())
        waiting = list(self._queue.values())
        self._queue.clear()
        for begin in range(0, len(waiting), _BATCH):
            self._copy(waiting[begin : begin + _BATCH])
        return bool(waiting)

    def _copy(self, batch: Sequence[Job]) -> None:
        if not self._target.is_writable:
            self._target.figures.count_dropped(len(batch))
            return
        held = self._target.exists([job.key for job in batch])
        missing = [job for job, there in zip(batch, held, strict=True) if not there]
        for source, jobs in groupby(missing, key=lambda job: cast(_NullTier, job.source)):
            entries = source.store.describe([job.key for job in jobs])
            self._target.set(
                [SetItem(entry.key, [], entry.meta) for entry in entries if entry is not None], set()
            )
