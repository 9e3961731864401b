"""Which page comes before which, for engines that do not say it with every write.

A page key covers its whole prefix, so a page has one page before it, for ever: what one call tells in passing is true for all later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from threading import Lock
from typing import Final

MOST_PAGES: Final = 1 << 17
"""Pages whose predecessor is remembered, about 25 MB: prompts of 8 million tokens in pages of 64."""


class Successions:
    """The page before a page, where a call told it.

    Calls name pages in the order of one sequence, each page right behind the one before: queries do, and so do writes. What comes before
    the first page of a call is known only if an earlier call said it, and is never guessed from the time at which calls come: a page that
    hangs on a stranger's is kept and given up with that stranger. A page that was told to follow two different ones follows none, and what
    names a page twice is no sequence.

    Bounded: `most` pages at least are remembered, twice as many at most, those that nobody named for the longest time go first.

    Thread safety: any thread.
    """

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most: Final = most
        self._lock: Final = Lock()
        self._young: dict[bytes, bytes | None] = {}
        self._old: dict[bytes, bytes | None] = {}

    def note(self, keys: Sequence[bytes]) -> None:
        """Pages of one sequence, each right behind the one before it."""
        if len(set(keys)) < len(keys):
            return
        with self._lock:
            young, old = self._young, self._old
            for parent, key in pairwise(keys):
                known = young[key] if key in young else old.get(key, parent)
                behind = young[parent] if parent in young else old.get(parent)
                young[key] = parent if known == parent and behind != key else None
                if len(young) >= self._most:
                    self._old = old = young
                    self._young = young = {}

    def before(self, key: bytes) -> bytes | None:
        """The page before this one; None if it is the first of a sequence, or nobody said."""
        with self._lock:
            return self._young[key] if key in self._young else self._old.get(key)

    def parents(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The page before each of the pages of a call, which count as told by it."""
        self.note(keys)
        return [self.before(key) for key in keys]


class Once:
    """Something to be said one time only. Thread safety: any thread."""

    def __init__(self) -> None:
        self._left = Lock()

    def first(self) -> bool:
        """Is this the first time?"""
        return self._left.acquire(blocking=False)
