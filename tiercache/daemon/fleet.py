"""`Fleet`: what the workers that a daemon follows hold, and how deep each of them can restore a prompt.

Each object has a bit for each place that holds it, so that one AND goes over all workers:

    bit = plane * ranks + rank        plane 0: device   1: host   2, 3, ...: tiers below

The places of a rank add up: what the host has and the device lacks is restored from the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from threading import Event, Lock, Thread
from typing import Final, TypeAlias

from tiercache.config.models import EventsSettings, ScoreSettings
from tiercache.core import PoolName, TokenArray
from tiercache.errors import ClosedError, StorageError
from tiercache.events.base import EventKind, EventSource, KVEvent, Medium, ObjectGroup, Place
from tiercache.events.encoding import decode_batch, encode_batch, namespace_label
from tiercache.events.subscriber import BatchOrigin, EventSubscriber
from tiercache.keys import KEY_BYTES, page_keys

_log = logging.getLogger(__name__)

STORE: Final = "store"
"""Name under which a shared store tells its events."""
MAX_PAGES: Final = 1 << 14
"""Number of pages of a prompt that are looked at."""
_AT_ONCE: Final = 64
"""Number of pages whose keys are made together; none are made behind the deepest that anyone has."""
_PLANES, _GROUPS, _FOLDED, _LONGEST_PAGE = 16, 1 << 10, 1 << 16, 1 << 16
"""At most: places of a rank, layouts and namespaces, combinations of places, tokens of a page."""
_STATES: Final = frozenset({PoolName.MAMBA, PoolName.SWA})
"""Pools of which a prefix needs the object at its end, as controllers keep them."""
_TURN_S: Final = 0.5
_IDLE_S: Final = 10.0
"""Seconds of silence after which a rank is asked what was missed; with many ranks, each costs the daemon."""
_CLOSE_S: Final = 5.0

_Layout: TypeAlias = tuple[dict[bytes, int], int]
"""Places of the objects of a layout, and the ranks that do not need it."""


class Fleet:
    """Objects of all ranks of the workers of `score`, and of a store from which some of them restore.

    The ranks are followed from `start` on. What is in doubt counts as absent: after a gap that cannot be
    healed, all that a rank has is asked anew. A rank needs the layouts that it has told of; of other pools,
    all layouts.

    Thread safety: any thread. `score` takes no lock, and may see a part of a batch of events.
    """

    def __init__(self, score: ScoreSettings) -> None:
        workers = score.workers
        names = [f"{name}/{n}" for name, each in workers.items() for n in range(len(each))]
        self._addresses: Final = dict(zip(names, chain(*workers.values()), strict=True))
        self._count: Final = len(names) + 1  # the store is the last
        self._ranks: Final = {name: 1 << number for number, name in enumerate([*names, STORE])}
        self._all: Final = (1 << len(names)) - 1
        self._workers: Final = {
            name: sum(self._ranks[f"{name}/{n}"] for n in range(len(each))) for name, each in workers.items()
        }
        self._sharing: Final = sum(self._workers[name] for name in workers.keys() - set(score.apart))
        self._firsts: Final = {  # a worker's first rank stands for it
            (ranks & -ranks) << level * self._count: (name, medium, ranks << level * self._count)
            for name, ranks in self._workers.items()
            for level, medium in enumerate(Medium)
        }
        self._limit: Final = score.objects
        self._lock: Final = Lock()
        self._bits: Final[dict[tuple[str, Place], int]] = {}
        self._held: Final[dict[tuple[PoolName, bytes], dict[bytes, int]]] = {}
        """By pool and layout."""
        self._told: Final[dict[bytes, dict[tuple[PoolName, bytes], int]]] = {}
        """Ranks that have told of each layout, by the label of its namespace."""
        self._sizes: Final[dict[bytes, int]] = {}
        self._ranks_at: Final = lru_cache(_FOLDED)(self._fold)
        self.objects = 0
        """Number of objects that are known."""
        self._wake, self._closing = Event(), Event()
        self._threads: list[Thread] = []

    def apply(self, rank: str, events: Iterable[KVEvent]) -> None:
        """Apply events of a rank, or of the store, in their order; namespaces are their labels."""
        with self._lock:
            for event in events:
                if event.group is None or event.place is None:
                    self._clear(rank, event.place)
                elif event.kind is EventKind.REMOVED:
                    held = self._held.get((event.group.pool, event.group.layout), {})
                    self._remove(held, event.keys, self._bit(rank, event.place))
                else:
                    self._store(rank, event.group, event.keys, self._bit(rank, event.place))

    def _bit(self, rank: str, place: Place) -> int:
        """Return the bit of a place; 0 for one too many."""
        if (rank, place) not in self._bits:
            below = sum(name == rank and other.medium is Medium.STORAGE for name, other in self._bits)
            plane = 2 + below if place.medium is Medium.STORAGE else [*Medium].index(place.medium)
            if plane >= _PLANES:
                return 0
            self._bits[rank, place] = self._ranks[rank] << plane * self._count
        return self._bits[rank, place]

    def _store(self, rank: str, group: ObjectGroup, keys: Sequence[bytes], bit: int) -> None:
        layout, told = (group.pool, group.layout), self._told.get(group.namespace, {})
        for known, one in (self._held, layout), (self._told, group.namespace), (told, layout):
            if not bit or (one not in known and len(known) >= _GROUPS):
                return
        others = any(ranks & ~self._ranks[rank] for ranks in told.values())
        if 0 < group.page_size <= _LONGEST_PAGE and not (others and group.namespace in self._sizes):
            self._sizes[group.namespace] = group.page_size
        held = self._held.setdefault(layout, {})
        told = self._told.setdefault(group.namespace, told)
        told[layout] = told.get(layout, 0) | self._ranks[rank]
        for key in keys:
            before = held.get(key, 0)
            if before or (self.objects < self._limit and len(key) == KEY_BYTES):
                self.objects += not before
                held[key] = before | bit

    def _remove(self, held: dict[bytes, int], keys: Iterable[bytes], bits: int) -> None:
        for key in keys:
            before = held.get(key, 0)
            if left := before & ~bits:
                held[key] = left
            elif before:
                del held[key]
                self.objects -= 1

    def _clear(self, rank: str, place: Place | None) -> None:
        bits = sum(bit for (name, at), bit in self._bits.items() if name == rank and place in (None, at))
        for held in self._held.values() if bits else ():
            self._remove(held, [key for key, places in held.items() if places & bits], bits)
        for told in self._told.values() if place is None else ():
            for layout in told:
                told[layout] &= ~self._ranks[rank]

    def score(self, namespace: bytes, prompt: TokenArray | list[bytes]) -> dict[str, dict[Medium, int]]:
        """Return how many tokens of a prompt each worker can restore from its device, from its host, and from
        any tier; what lies in a place before counts as well.

        `prompt` are tokens, of which an engine computes the last one, or keys of pages.
        """
        label = bytes.fromhex(namespace_label(namespace))
        size = self._sizes.get(label, 0)
        keys = iter(prompt) if isinstance(prompt, list) else _keys(namespace, prompt[:-1], size)
        pages, states = self._needed(label)
        alive, ranks_at = self._levels(self._all), self._ranks_at
        depths: dict[int, int] = {}
        """Deepest depth at which just these ranks can restore the prompt."""
        for depth, key in enumerate(islice(keys, MAX_PAGES if size else 0), 1):
            for held, others in pages:
                alive &= ranks_at(held.get(key, 0)) | others
            if not alive:
                break
            here = alive
            for held, others in states:
                here &= ranks_at(held.get(key, 0)) | others
            depths[here] = depth
        found = {name: dict.fromkeys(Medium, 0) for name in self._workers}
        left = sum(self._firsts)
        for ranks, depth in sorted(depths.items(), key=lambda one: -one[1]):
            new = ranks & left
            while new:
                bit = new & -new
                new ^= bit
                name, medium, needed = self._firsts[bit]
                if ranks & needed == needed:
                    found[name][medium] = depth * size
                    left ^= bit
        return found

    def _needed(self, label: bytes) -> tuple[list[_Layout], list[_Layout]]:
        """Return the pages and the states of a namespace."""
        told = dict(self._told.get(label, {}))
        whose = dict.fromkeys(PoolName, 0)
        for (pool, _), ranks in told.items():
            whose[pool] |= ranks & self._all
        found: tuple[list[_Layout], list[_Layout]] = ([], [])
        for layout, ranks in told.items():
            others = self._levels(whose[layout[0]] & ~ranks)
            found[layout[0] in _STATES].append((self._held[layout], others))
        return found

    def _levels(self, ranks: int) -> int:
        return ranks | ranks << self._count | ranks << 2 * self._count

    def _fold(self, places: int) -> int:
        """Return the ranks at some places: in the first plane on the device, in the second on the host or
        before, in the third anywhere.
        """
        count, ranks = self._count, (1 << self._count) - 1
        device = places & ranks
        host = device | places >> count & ranks
        anywhere, below = host, places >> 2 * count
        while below:
            anywhere |= below & ranks
            below >>= count
        if anywhere > self._all:  # the store has it
            anywhere |= self._sharing
        return device | host << count | anywhere << 2 * count

    def start(self, source: EventSource) -> None:
        """Follow; `source` tells of the store, and is closed here.

        Raises MissingExtraError without pyzmq, and StorageError for an address that is not possible.
        """
        for rank in self._addresses.values():
            EventSubscriber(rank.endpoint, rank.replay).close()
        source.follow(self._wake.set)
        follows = {STORE: partial(self._look, source)}
        follows |= {name: partial(self._read, name, rank) for name, rank in self._addresses.items()}
        for one in follows.items():
            self._threads.append(Thread(target=self._run, args=one, name="tiercache-fleet", daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """End. Threads that wait for an answer, of the store or of a rank, end after it."""
        self._closing.set()
        self._wake.set()
        self._threads[0].join(_CLOSE_S)

    def _run(self, name: str, follow: Callable[[], None]) -> None:
        while not self._closing.is_set():
            try:
                follow()
            except (StorageError, ClosedError) as error:
                _log.debug("%s is not followed now: %s", name, error)
            except Exception:  # noqa: BLE001  the thread must not end
                _log.exception("the KV events of %s could not be followed; trying again", name)
            self.apply(name, [KVEvent(EventKind.CLEARED, None)])
            self._closing.wait(_TURN_S)

    def _read(self, name: str, rank: EventsSettings) -> None:
        """Read the events of a rank until there is a doubt."""
        subscriber = EventSubscriber(rank.endpoint, rank.replay, rank.topic, idle=_IDLE_S)
        try:
            while not self._closing.is_set():
                for batch in subscriber.read(_TURN_S):
                    if batch.origin is BatchOrigin.LOST or subscriber.malformed:
                        return
                    self.apply(name, batch.events)
        finally:
            subscriber.close()

    def _look(self, source: EventSource) -> None:
        """Take what the store has, and then its changes."""
        there = source.snapshot()
        while not self._closing.is_set():
            if events := next(there, ()) or source.collect():
                self.apply(STORE, decode_batch(encode_batch(0.0, events))[1])
            else:
                self._wake.wait(_TURN_S)
                self._wake.clear()
        source.close()


def _keys(namespace: bytes, tokens: TokenArray, page_size: int) -> Iterator[bytes]:
    """Yield the keys of the whole pages of `tokens`."""
    step, keys = _AT_ONCE * page_size, [b""]
    for start in range(0, len(tokens) // page_size * page_size, step):
        keys = page_keys(namespace, tokens[start : start + step], page_size, keys[-1])
        yield from keys
