"""Pins, which keep a prefix for a time, and hints, which raise its rank until it is continued."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from tiercache.controller.context import ControllerContext
from tiercache.core import Tier, TokenArray, full_pages
from tiercache.errors import AdmissionError, InputError
from tiercache.index import Match, Node, Pin
from tiercache.keys import page_keys

MAX_TTL: Final = 7 * 86_400.0
"""Maximum time to live of a pin, in seconds."""
MAX_EXPECTED_IN: Final = 3_600.0
"""Maximum number of seconds in which a hint may expect a continuation."""
_MAX_PINS: Final = 1024
"""Maximum number of pinned prefixes."""
_FOLLOWED: Final = 8
"""Number of pins whose state is looked for again whenever operations have landed."""
_WINDOW: Final = 60.0
"""Seconds over which the rate of ticks is averaged."""


@dataclass(eq=False, slots=True)
class _Pinned:
    """One pinned prefix."""

    path: Pin
    """Pin of the pages, and of the state at their end."""
    state: Pin | None
    """Pin of the deepest complete state on the path, if this is not the state at its end."""
    expires: float
    """Clock time in seconds at which the pin ends."""

    def release(self) -> None:
        if self.state is not None:
            self.state.release()
        self.path.release()


class PrefixPins:
    """Pins of prefixes, each for a time.

    A pin keeps on the host what the host has of the prefix, or gets later: all pages, and the deepest
    complete state. It brings nothing there, and does not hold device slots. The pages of all pinned prefixes,
    counted once, and one state of each pool for every pin take at most `pin_share` of the host. Pages that
    the host does not have yet count too.
    """

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._by_key: dict[bytes, _Pinned] = {}
        """Pinned prefixes by their last page key."""
        self._turn: deque[bytes] = deque()
        """The same keys, in the order in which `follow` looks at them."""
        self._next = math.inf
        """Earliest clock time in seconds at which a pin ends."""
        cost = context.allocator.blocks_of
        self._page_blocks = sum(cost(pool, 1) for pool in context.index.page_pools)
        self._state_blocks = sum(cost(pool, 1) for pool in context.index.state_pools)
        self._most = int(context.arena.blocks * context.options.pin_share)

    def pin(self, tokens: TokenArray, ttl: float, extra: bytes) -> int:
        """Pin the whole pages of `tokens` for `ttl` seconds; return how many tokens they are.

        A prefix that is pinned already gets the new time. Raises InputError for a prefix of which the index
        knows nothing, and AdmissionError, with nothing changed, for a pin beyond the share.
        """
        context = self._context
        ttl = checked_seconds("ttl", ttl, MAX_TTL)
        key = self._key(tokens, extra)
        self.expire()
        held, outcome = self._by_key.get(key), "renewed"
        if held is None:
            held, outcome = self._begin(tokens, extra), "taken"
            self._by_key[key] = held
            self._turn.append(key)
        held.expires = context.clock() + ttl
        self._next = min(self._next, held.expires)
        self._follow(held)
        self._count(outcome)
        return full_pages(len(tokens), context.page_size) * context.page_size

    def unpin(self, tokens: TokenArray, extra: bytes) -> bool:
        """End the pin of the whole pages of `tokens`; return whether there was one."""
        key = self._key(tokens, extra)
        self.expire()
        if key not in self._by_key:
            return False
        self._end([key], "released")
        return True

    def expire(self) -> None:
        """End the pins whose time is over."""
        if self._next == math.inf or (now := self._context.clock()) < self._next:
            return
        self._end([key for key, held in self._by_key.items() if held.expires <= now], "expired")
        self._next = min((held.expires for held in self._by_key.values()), default=math.inf)

    def follow(self) -> None:
        """Move the hold on states to the deepest complete state that each path has now, a few pins at a time.

        A commit or a fetch may have brought a deeper state than the one that is held.
        """
        for _ in range(min(_FOLLOWED, len(self._turn))):
            self._follow(self._by_key[self._turn[0]])
            self._turn.rotate(-1)

    def close(self) -> None:
        """End all pins."""
        self._end(list(self._by_key), "released")

    def _key(self, tokens: TokenArray, extra: bytes) -> bytes:
        page = self._context.page_size
        if not (pages := full_pages(len(tokens), page)):
            raise InputError(f"{len(tokens)} tokens fill no page; a pin takes {page} tokens or more")
        return page_keys(self._context.namespace, tokens[: pages * page], page, extra=extra)[-1]

    def _begin(self, tokens: TokenArray, extra: bytes) -> _Pinned:
        index = self._context.index
        pages = full_pages(len(tokens), self._context.page_size)
        if not index.match(tokens, extra, limit=pages).path_depth:
            count = len(tokens)
            raise InputError(f"the cache knows nothing of these {count} tokens; serve or prefetch them first")
        if len(self._by_key) >= _MAX_PINS:
            self._count("refused")
            raise AdmissionError(
                f"{_MAX_PINS} prefixes are pinned already; unpin some, or wait until they expire"
            )
        held = _Pinned(index.pin(index.extend_path(tokens, pages, extra), Tier.HOST), None, math.inf)
        blocks = self._blocks([*self._by_key.values(), held])
        unit = self._context.arena.block_bytes
        if blocks > self._most:
            held.release()  # removes the nodes that were made for this pin
            self._count("refused")
            raise AdmissionError(
                f"with this prefix, pins would keep {blocks * unit} bytes of the host, and may keep"
                f" {self._most * unit}; unpin others, or raise pin_share"
            )
        self._context.metrics.set("pinned_bytes", to=blocks * unit)
        return held

    def _blocks(self, pinned: Iterable[_Pinned]) -> int:
        """Return the host blocks of all pages on these paths, and of one state of each pool for every pin."""
        seen: set[Node] = set()
        states = pages = 0
        for held in pinned:
            states += 1
            for node in held.path.node.path():
                if node in seen:
                    break
                seen.add(node)
                pages += node.pages
        return pages * self._page_blocks + states * self._state_blocks

    def _follow(self, held: _Pinned) -> None:
        end = held.path.node
        deepest = next((node for node in end.path() if node.is_complete), end)
        if deepest is (end if held.state is None else held.state.node):
            return
        # The new pin is taken before the old one is released, as for every pin that moves.
        before, held.state = held.state, None
        if deepest is not end:
            held.state = self._context.index.pin(deepest, Tier.HOST)
        if before is not None:
            before.release()

    def _end(self, keys: Iterable[bytes], outcome: str) -> None:
        for key in keys:
            self._by_key.pop(key).release()
            self._turn.remove(key)
            self._count(outcome)
        blocks = self._blocks(self._by_key.values())
        self._context.metrics.set("pinned_bytes", to=blocks * self._context.arena.block_bytes)

    def _count(self, outcome: str) -> None:
        self._context.metrics.increment("pins_total", outcome)


class Hints:
    """Hints that a prefix will be continued, which raise its rank in the eviction order until then.

    Policies count time in ticks of the index. The rate of ticks per second is measured here. A hint takes no
    memory: the index notes one tick at the node at which the continuation would be restored.
    """

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._since, self._first = context.clock(), context.index.now
        """Clock time and tick at which the present window of the measurement began."""
        self._seconds = self._ticks = 0.0
        """Length and ticks of the window before, at most `_WINDOW` seconds."""

    def hint(self, tokens: TokenArray, expected_in: float, extra: bytes) -> int:
        """Expect a continuation of `tokens` in `expected_in` seconds; return how many it would restore.

        Raises InputError for a prefix of which nothing can be restored.
        """
        index, page = self._context.index, self._context.page_size
        expected_in = checked_seconds("expected_in", expected_in, MAX_EXPECTED_IN)
        match: Match = index.match(tokens, extra, limit=full_pages(len(tokens), page))
        if not match.depth:
            self._context.metrics.increment("hints_total", "unknown")
            raise InputError(
                f"nothing of these {len(tokens)} tokens can be restored, so a hint has no effect; hint at a"
                " prefix that was served before"
            )
        index.expect(match, max(1, round(expected_in * self._rate())))
        self._context.metrics.increment("hints_total", "taken")
        return match.depth * page

    def _rate(self) -> float:
        """Return the ticks per second, averaged over this window and the one before."""
        now, tick = self._context.clock(), self._context.index.now
        seconds, ticks = now - self._since, float(tick - self._first)
        rate = (self._ticks + ticks) / max(self._seconds + seconds, 1e-3)
        if seconds >= _WINDOW:
            self._since, self._first = now, tick
            self._seconds, self._ticks = _WINDOW, ticks / seconds * _WINDOW
        return rate


def checked_seconds(name: str, value: Any, most: float) -> float:
    """Return a number of seconds above 0 and up to `most`; InputError for anything else."""
    try:
        seconds = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0.0 < seconds <= most:
        raise InputError(f"{name}={value!r} is not possible; use a number of seconds above 0, up to {most:g}")
    return seconds
