"""Entries of the index that transfers make and settle: what is where, and what is on its way.

A destination is *reserved* (pending: not readable, not to be filled twice), then either *published* when its bytes are there or
*cancelled*. Publishing and cancelling name the location that was reserved, and leave alone every entry that has become something else. The
caller keeps the node pinned in the tiers that the transfer reads and writes.
"""

from __future__ import annotations

import numpy as np

from tiercache.core import ABSENT, Locations, Mask, PoolName, Tier, pending
from tiercache.errors import InputError
from tiercache.index.base import Span
from tiercache.index.forest import Forest
from tiercache.index.node import STORED, Node


class Ledger(Forest):
    """Index with entries that transfers change: by span and pool for pages, by node and pool for states.

    Thread safety: the index's thread only.
    """

    def reserve_pages(self, span: Span, pool: PoolName, tier: Tier, locations: Locations) -> Mask:
        """Enter `locations` (one per page of the span; ABSENT: none offered) as pending wherever the tier has nothing.

        Returns which were entered; the others remain the caller's.
        """
        places = pending(_offered(span, locations))
        return self._write(span, pool, _near(tier), np.full(len(span), ABSENT), places, locations >= 0, reserve=True)

    def publish_pages(self, span: Span, pool: PoolName, tier: Tier, locations: Locations) -> Mask:
        """Make entries present that are pending at exactly these locations: their bytes have arrived. Returns which became present."""
        return self._move(span, pool, tier, pending(_offered(span, locations)), locations, locations >= 0)

    def cancel_pages(self, span: Span, pool: PoolName, tier: Tier, locations: Locations) -> Mask:
        """Make entries absent that are pending at exactly these locations: their bytes will not come.

        Returns which became absent; their locations are the caller's again.
        """
        return self._move(span, pool, tier, pending(_offered(span, locations)), np.full(len(span), ABSENT), locations >= 0)

    def drop_pages(self, span: Span, pool: PoolName, tier: Tier, mask: Mask) -> Locations:
        """Take the present entries under `mask` out of a tier, as when a copy proved corrupt.

        Returns one location per page, now the caller's, or ABSENT where nothing was taken. Pins do not prevent it.
        """
        taken = self._read(span, pool, tier)
        taken[(taken < 0) | ~mask] = ABSENT
        self._move(span, pool, tier, taken, np.full(len(span), ABSENT), taken >= 0)
        return taken

    def mark_stored(self, span: Span, pool: PoolName, mask: Mask) -> None:
        """Record that the pages under `mask` are in the store."""
        everywhere = np.full(len(span), STORED)
        self._write(span, pool, Tier.STORAGE, np.full(len(span), ABSENT), everywhere, mask)
        self._forget_far()

    def forget_stored(self, span: Span, pool: PoolName, mask: Mask) -> None:
        """Record that the pages under `mask` turned out not to be in the store."""
        self._write(span, pool, Tier.STORAGE, np.full(len(span), STORED), np.full(len(span), ABSENT), mask)
        self._tidy(span.node)

    def reserve_state(self, node: Node, pool: PoolName, tier: Tier, location: int) -> bool:
        """Enter `location` as pending for the state at the node's end, if the tier has none; return whether it was entered."""
        return self._write_state(node, pool, _near(tier), ABSENT, _pending(location), reserve=True)

    def publish_state(self, node: Node, pool: PoolName, tier: Tier, location: int) -> bool:
        """Make the state present that is pending at exactly this location: its bytes have arrived. Returns whether it became present."""
        return self._move_state(node, pool, tier, _pending(location), location)

    def cancel_state(self, node: Node, pool: PoolName, tier: Tier, location: int) -> bool:
        """Make the state absent that is pending at exactly this location: its bytes will not come. Returns whether it became absent."""
        return self._move_state(node, pool, tier, _pending(location), ABSENT)

    def drop_state(self, node: Node, pool: PoolName, tier: Tier) -> int:
        """Take the state out of a tier; return its location, now the caller's, or ABSENT. Pins do not prevent it."""
        location = self._node(node).state(_near(tier), self._state_number(pool))
        if location < 0:
            return ABSENT
        self._move_state(node, pool, tier, location, ABSENT)
        return location

    def mark_state_stored(self, node: Node, pool: PoolName) -> None:
        """Record that the state at the node's end is in the store."""
        self._write_state(node, pool, Tier.STORAGE, ABSENT, STORED)
        self._forget_far()

    def forget_state_stored(self, node: Node, pool: PoolName) -> None:
        """Record that the state at the node's end turned out not to be in the store."""
        self._write_state(node, pool, Tier.STORAGE, STORED, ABSENT)

    def _move(self, span: Span, pool: PoolName, tier: Tier, old: Locations, new: Locations, mask: Mask) -> Mask:
        """Change device or host entries under `mask` from `old` to `new`, and remove nodes that this leaves without purpose."""
        done = self._write(span, pool, _near(tier), old, new, mask)
        self._tidy(span.node)
        self._forget_far()
        return done

    def _write(self, span: Span, pool: PoolName, tier: Tier, old: Locations, new: Locations, mask: Mask, *, reserve: bool = False) -> Mask:
        """Change entries under `mask` from `old` to `new`; return which were `old` and changed.

        With `reserve` they go from absent to pending, so that no object comes or goes and nothing needs to be settled.
        """
        row = self._page_number(pool)
        if mask.shape != (len(span),):
            raise InputError(f"a span of {len(span)} pages needs as many entries, not an array of shape {mask.shape}")
        done = np.zeros(len(span), np.bool_)
        for node, edge, part in self._pieces(span):
            now = node.where[tier, row, edge]
            done[part] = change = (now == old[part]) & mask[part]
            if change.any():
                now[change] = new[part][change]
                if reserve:
                    node.expect(pages=int(np.count_nonzero(change)))
                else:
                    self._settle(node)
        return done

    def _read(self, span: Span, pool: PoolName, tier: Tier) -> Locations:
        row = self._page_number(pool)
        out = np.empty(len(span), np.int64)
        for node, edge, part in self._pieces(span):
            out[part] = node.where[tier, row, edge]
        return out

    def _move_state(self, node: Node, pool: PoolName, tier: Tier, old: int, new: int) -> bool:
        done = self._write_state(node, pool, _near(tier), old, new)
        self._forget_far()
        return done

    def _write_state(self, node: Node, pool: PoolName, tier: Tier, old: int, new: int, *, reserve: bool = False) -> bool:
        number = self._state_number(pool)
        if not self._node(node).pages:
            raise InputError("a root carries no state; name the node that ends where the state does")
        if node.state(tier, number) != old:
            return False
        node.set_state(tier, number, new)
        if reserve:
            node.expect(states=1)
        else:
            self._settle_states(node)
            self._tidy(node)
        return True

    def _page_number(self, pool: PoolName) -> int:
        if pool not in self.page_pools:
            raise InputError(f"{pool} is not a page pool of this index; it has {', '.join(self.page_pools)}")
        return self._number[pool]

    def _state_number(self, pool: PoolName) -> int:
        if pool not in self.state_pools:
            raise InputError(f"{pool} is not a state pool of this index; it has {', '.join(self.state_pools) or 'none'}")
        return self._number[pool] - len(self.page_pools)


def _near(tier: Tier) -> Tier:
    if tier is Tier.STORAGE:
        raise InputError("storage has no locations; use mark_stored and forget_stored")
    return tier


def _offered(span: Span, locations: Locations) -> Locations:
    if locations.shape != (len(span),) or locations.dtype != np.int64 or bool((locations < ABSENT).any()):
        raise InputError(f"a span of {len(span)} pages needs as many int64 slots or handles (or ABSENT), not {locations!r}")
    return locations


def _pending(location: int) -> int:
    if location < 0:
        raise InputError(f"{location} is not a slot or a handle")
    return -2 - location
