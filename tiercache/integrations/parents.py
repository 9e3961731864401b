"""Order of pages in their sequences, for engines that do not report this order with every write.

A page key covers the whole prefix of its page, so the page before a page is always the same. The order that
one call shows holds for all later calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from threading import Lock
from typing import Final

MOST_PAGES: Final = 1 << 17
"""Default number of the most recently named pages whose predecessors are remembered.

The record of this many pages takes about 25 MB. With 64 tokens a page, they have 8 million tokens.
"""


class PageOrder:
    """Record of which page comes before each page, as far as calls have shown.

    Queries and writes name pages in the order of one sequence, without gaps. The page before the first page
    of a call is known only if an earlier call named both. The record never guesses from the order of calls in
    time: a page with a wrong parent would be kept and evicted together with an unrelated page. If two calls
    show different predecessors of a page, the page gets no predecessor. A call that names a page twice is
    ignored.

    At least the `most` pages that were named last are remembered, and at most twice as many. The pages that
    were not named for the longest time are forgotten first.

    Thread safety: any thread may call.
    """

    def __init__(self, most: int = MOST_PAGES) -> None:
        self._most: Final = most
        self._lock: Final = Lock()
        self._young: dict[bytes, bytes | None] = {}
        self._old: dict[bytes, bytes | None] = {}

    def note(self, keys: Sequence[bytes]) -> None:
        """Record pages of one sequence, in order and without gaps."""
        if len(set(keys)) < len(keys):
            return
        with self._lock:
            # There are two generations. Entries are written to `young`. When `young` is full, it becomes
            # `old`, and the former `old` is dropped as a whole.
            young, old = self._young, self._old
            for parent, key in pairwise(keys):
                # `known` is the predecessor that earlier calls gave to `key`, else `parent`. If `parent`
                # differs from `known`, or if `key` is the predecessor of `parent`, the calls contradict each
                # other, and `key` gets no predecessor.
                known = young[key] if key in young else old.get(key, parent)
                before_parent = young[parent] if parent in young else old.get(parent)
                young[key] = parent if known == parent and before_parent != key else None
                if len(young) >= self._most:
                    self._old = old = young
                    self._young = young = {}

    def before(self, key: bytes) -> bytes | None:
        """Return the page before a page, or None.

        None has three possible meanings: the page is the first of a sequence, calls did not show the page
        before it, or calls contradicted each other.
        """
        with self._lock:
            return self._young[key] if key in self._young else self._old.get(key)

    def parents(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Record the pages of a call, and return the page before each of them."""
        self.note(keys)
        return [self.before(key) for key in keys]


class Once:
    """Flag for an action that must happen only once, such as a warning.

    Thread safety: any thread may call.
    """

    def __init__(self) -> None:
        self._left = Lock()

    def first(self) -> bool:
        """Return whether this is the first call."""
        return self._left.acquire(blocking=False)
