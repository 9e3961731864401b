"""What a bounded store holds in memory about its objects, and which one it gives up next.

**Suffix first**: a page is useless without all pages before it, so an inner page never goes before its stored descendants. An object
depends on the page that `ObjectMeta.parent` names: a page on the page before it, an object that hangs on a page (a state) on its own page.
Among the objects that nothing depends on, the least recently used goes first. Where no parents are known this is plain recency.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from operator import attrgetter
from typing import Generic, TypeVar

LAYOUT_BYTES = 32


class Resident:
    """One stored object, as far as eviction is concerned. `digest` is the object key's, `parent` the page key it depends on, or empty.

    Thread rule: belongs to its `Residents`.
    """

    __slots__ = ("digest", "parent", "queued", "tick")

    def __init__(self, digest: bytes, parent: bytes | None) -> None:
        self.digest = digest
        self.parent = parent or b""
        self.tick = 0
        self.queued = False


R = TypeVar("R", bound=Resident)


class Residents(Generic[R]):
    """The objects of a store by digest, with their recency and their dependents.

    The heap holds candidates, lazily: an entry whose tick is old, whose object is gone or which gained a dependent is put right when it
    comes up. `add`, `pop` and `touch` stay cheap that way, and only an eviction pays.

    Thread rule: none of its own; the store calls it under its mutex.
    """

    def __init__(self) -> None:
        self._items: dict[bytes, R] = {}
        self._dependents: Counter[bytes] = Counter()
        self._layouts: set[bytes] = set()
        self._heap: list[tuple[int, R]] = []
        self._clock = count(1)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._items

    def __iter__(self) -> Iterator[R]:
        return iter(self._items.values())

    def get(self, digest: bytes) -> R | None:
        """The object with this digest."""
        return self._items.get(digest)

    def load(self, items: Iterable[R]) -> None:
        """Take in many objects at once, least recently used first; the digests must be new."""
        for item in items:
            item.tick = next(self._clock)
            self._items[item.digest] = item
        self._layouts.update({digest[:LAYOUT_BYTES] for digest in self._items})
        self._dependents.update([item.parent for item in self._items.values() if item.parent])
        self._rebuild()

    def add(self, item: R) -> None:
        """Take in an object whose digest is new. A fresh one counts as just used; one that was popped keeps its recency."""
        self._items[item.digest] = item
        self._layouts.add(item.digest[:LAYOUT_BYTES])
        item.tick = item.tick or next(self._clock)
        self.hold(item.parent)
        self._offer(item)

    def pop(self, item: R) -> None:
        """Give up an object that is here."""
        del self._items[item.digest]
        self.release(item.parent)

    def touch(self, item: R) -> None:
        """The object was used just now."""
        item.tick = next(self._clock)

    def hold(self, parent: bytes) -> None:
        """Something depends on the page `parent`: an object that is here, or one that is just being written."""
        if parent:
            self._dependents[parent] += 1

    def release(self, parent: bytes) -> None:
        """Undo one `hold`."""
        if not parent:
            return
        self._dependents[parent] -= 1
        if not self._dependents[parent]:
            del self._dependents[parent]
            for layout in self._layouts:
                item = self._items.get(layout + parent)
                if item is not None:
                    self._offer(item)

    def orphans(self) -> int:
        """Objects whose page is known and not stored under any layout. Slow, and so on a snapshot: it needs no mutex."""
        layouts = tuple(self._layouts)

        def lost(item: R) -> bool:
            places = (layout + item.parent for layout in layouts)
            return bool(item.parent) and not any(place in self._items for place in places if place != item.digest)

        return sum(map(lost, list(self._items.values())))

    def victims(self, enough: Callable[[R], bool], spare: Callable[[R], bool]) -> list[R]:
        """Pop objects in eviction order until `enough` says so of one that was popped, or none is left; those that `spare` names stay."""
        taken: list[R] = []
        spared: list[R] = []
        while self._heap:
            tick, item = heapq.heappop(self._heap)
            item.queued = False
            if self._items.get(item.digest) is not item or not self._is_leaf(item):
                continue
            if item.tick != tick:
                self._offer(item)
            elif spare(item):
                spared.append(item)
            else:
                self.pop(item)
                taken.append(item)
                if enough(item):
                    break
        for item in spared:
            self._offer(item)
        return taken

    def _is_leaf(self, item: R) -> bool:
        page = item.digest[LAYOUT_BYTES:]
        return item.parent == page or page not in self._dependents

    def _offer(self, item: R) -> None:
        if not item.queued and self._is_leaf(item):
            item.queued = True
            heapq.heappush(self._heap, (item.tick, item))
            # Objects that are deleted leave their entry behind; without this a store that only ever deletes would grow for ever.
            if len(self._heap) > 2 * len(self._items) + 1024:
                self._rebuild()

    def _rebuild(self) -> None:
        for _, item in self._heap:
            item.queued = False
        leaves = [item for item in self._items.values() if self._is_leaf(item)]
        leaves.sort(key=attrgetter("tick"))  # a sorted list is a heap
        for item in leaves:
            item.queued = True
        self._heap = [(item.tick, item) for item in leaves]
