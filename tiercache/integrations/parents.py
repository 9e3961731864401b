"""The order of pages in a sequence, for engines that do not tell it with every write.

A page key covers its whole prefix, so the page before a page never changes: what one call shows holds for all later calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from threading import Lock
from typing import Final

MOST_PAGES: Final = 1 << 17
"""Pages whose predecessor is remembered, about 25 MB; enough for prompts of 8 million tokens in pages of 64."""


class Successions:
    """A record of which page comes before a page, as far as calls have shown it.

    Queries and writes name pages in the order of one sequence, without gaps. The page before the first page of a call is known only if an
    earlier call showed it. It is never guessed from the order in time of calls, because a page with a wrong parent would be kept and
    evicted with that unrelated page. A page that was named after two different pages gets no predecessor, and a call that names a page
    twice is ignored.

    At least `most` pages are remembered and at most twice as many; those that were not named for the longest time are forgotten first.

    Thread safety: any thread.
    """

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most: Final = most
        self._lock: Final = Lock()
        self._young: dict[bytes, bytes | None] = {}
        self._old: dict[bytes, bytes | None] = {}

    def note(self, keys: Sequence[bytes]) -> None:
        """Note pages of one sequence, each directly after the one before it."""
        if len(set(keys)) < len(keys):
            return
        with self._lock:
            young, old = self._young, self._old
            for parent, key in pairwise(keys):
                # A cycle (`behind` is the key) or a second predecessor contradicts: then the page has none.
                known = young[key] if key in young else old.get(key, parent)
                behind = young[parent] if parent in young else old.get(parent)
                young[key] = parent if known == parent and behind != key else None
                if len(young) >= self._most:  # two generations: the older one is dropped as a whole
                    self._old = old = young
                    self._young = young = {}

    def before(self, key: bytes) -> bytes | None:
        """Return the page before this one; None if it is the first of a sequence, or if calls did not show it or contradict each other."""
        with self._lock:
            return self._young[key] if key in self._young else self._old.get(key)

    def parents(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Note the pages of a call and return the page before each."""
        self.note(keys)
        return [self.before(key) for key in keys]


class Once:
    """A flag for something that must happen only once, such as a warning.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._left = Lock()

    def first(self) -> bool:
        """Return whether this is the first call."""
        return self._left.acquire(blocking=False)
