"""Conversations that fill a store, what of them is worth anything, and what a plain model would keep: the
parts of `restorable`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tiercache.core import PoolName
from tiercache.storage.base import ScanEntry
from tiercache.testing.objects import page_key


@dataclass(eq=False)
class Conversation:
    """A sequence of pages.

    `every`: a state at each multiple of so many pages. `ends`: one at the end of each turn.

    `hybrid` False: there are no states, and every page is worth something by itself. The first `shared` pages
    are those of every other conversation of the tenant that shares as many.
    """

    name: object
    tenant: int = 0
    every: int = 0
    ends: bool = True
    hybrid: bool = True
    shared: int = 0
    keys: list[bytes] = field(default_factory=list)

    def upto(self, pages: int) -> list[bytes]:
        """The keys of the first pages."""
        self.keys += [
            page_key((self.tenant, "shared" if depth < self.shared else self.name, depth))
            for depth in range(len(self.keys), pages)
        ]
        return self.keys[:pages]

    def states(self, first: int, last: int) -> list[int]:
        """The depths at which computing the pages from `first` to `last` gives a state."""
        depths = (
            set(range(first - first % self.every + self.every, last + 1, self.every)) if self.every else set()
        )
        if self.hybrid and self.ends:
            depths.add(last)
        return sorted(depths)


class Turn(NamedTuple):
    """A request: the conversation up to `last` pages, of which those from `first` on are new."""

    conversation: Conversation
    first: int
    last: int


def growing(conversation: Conversation, pages: int, step: int, start: int = 0) -> Iterator[Turn]:
    """Turns of `step` pages up to `pages`."""
    for first in range(start, pages, step):
        yield Turn(conversation, first, min(first + step, pages))


def in_turn(conversations: Iterable[Conversation], turns: int, pages: int) -> Iterator[Turn]:
    """All of them at once: the first turn of each, the second of each, ..."""
    conversations = list(conversations)
    for n in range(turns):
        for conversation in conversations:
            yield Turn(conversation, n * pages, (n + 1) * pages)


def clients(count: int, turns: int, seed: int) -> Iterator[Turn]:
    """Clients who come by Zipf's law, each with a conversation that begins anew after some 10 turns of 4 to
    60 pages.
    """
    random = Random(seed)
    weights = [1 / rank for rank in range(1, count + 1)]
    running: dict[int, tuple[Conversation, int, int]] = {}
    for n, client in enumerate(random.choices(range(count), weights, k=turns)):
        conversation, first, said = running.get(client, (Conversation((client, n)), 0, 0))
        last = first + random.randint(4, 60)
        yield Turn(conversation, first, last)
        running[client] = (conversation, last, said + 1)
        if said == 9:
            del running[client]


class Truth:
    """Parents and depths of pages as the conversations have them, whatever a store was told.

    Thread safety: one thread.
    """

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}
        self.depths: dict[bytes, int] = {}
        self.attention: set[bytes] = set()

    def learn(self, conversation: Conversation, first: int, last: int) -> None:
        """Take in a conversation's pages from one depth to another."""
        keys = conversation.upto(last)
        for depth in range(first, last):
            self.parents[keys[depth]] = keys[depth - 1] if depth else b""
            self.depths[keys[depth]] = depth
        if not conversation.hybrid:
            self.attention.update(keys[first:last])


class Held(NamedTuple):
    """Contents of a store: the keys of its pages, of its restorable pages, and of its states."""

    pages: set[bytes]
    restorable: set[bytes]
    states: set[bytes]

    @property
    def share(self) -> float:
        """The share of the stored pages that can be restored."""
        return len(self.restorable) / len(self.pages) if self.pages else 0.0


def held(entries: Iterable[ScanEntry], truth: Truth) -> Held:
    """Judge what a scan lists.

    A page can be restored if every page from the start of its sequence to it is stored, and a state is stored
    on it or on a later page that is reached in the same way; where there are no states, the first alone.
    """
    pages: set[bytes] = set()
    states: set[bytes] = set()
    for entry in entries:
        (pages if entry.key.pool is PoolName.KV else states).add(entry.key.page_key)
    reached: set[bytes] = set()
    for key in sorted(pages, key=truth.depths.__getitem__):
        parent = truth.parents[key]
        if not parent or parent in reached:
            reached.add(key)
    alive = reached & truth.attention
    for key in states & reached:
        while key and key not in alive:
            alive.add(key)
            key = truth.parents[key]
    return Held(pages, alive, states)


def mixed(*histories: Iterable[Turn]) -> Iterator[Turn]:
    """A turn of each at a time, until the last is over."""
    missing = object()
    walks = [iter(history) for history in histories]
    while True:
        turns = [turn for turn in (next(walk, missing) for walk in walks) if turn is not missing]
        if not turns:
            return
        yield from turns  # type: ignore[misc]
