"""Queues of an eviction order, one lane for each owner of a store; a store without shares has one lane."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from tiercache.policy import Policy
from tiercache.policy.order import Front
from tiercache.storage.shares import Owners, Writer

_FRONT: Final = 1024
"""Minimum number of units that a pass over the columns puts into the queue of live pages (see `Front`)."""


class Lane:
    """Queues of the pages of one owner; a page that can be evicted waits in one of them.

    Thread safety: none of its own; the eviction order uses it.
    """

    def __init__(self, owner: int, policy: Policy) -> None:
        self.owner: Final = owner
        """Number of the owner."""
        self.live: Final[Front[tuple[float, int]]] = Front(policy, _FRONT)
        """Live pages, by rank; an entry is a rank and a node."""
        self.dead: Final[list[tuple[int, int]]] = []
        """Heap of dead pages; an entry is the page's `tick` (see `PageTable`) and its node."""
        self.waiting: Final[tuple[list[tuple[int, int]], ...]] = [], []
        """Heaps of waiting pages, by kind: states that wait for KV, and KV that waits for a state.

        An entry has the page's `number` (see `PageTable`) and the page's node.
        """
        self.barren_at = (-1, -1)
        """The clock, and `taken`, when a pass found no live page for this lane."""
        self.taken = 0
        """Number of live units that were evicted."""

    def __len__(self) -> int:
        return len(self.live) + len(self.dead) + len(self.waiting[0]) + len(self.waiting[1])

    def is_barren(self, owners: Owners, clock: int) -> bool:
        """Return whether a pass over the columns would find no live page that is not in the queue.

        Without this, each eviction would make a pass for every owner of which nothing can be evicted.
        """
        exact = self.live.steady and self.live.horizon == inf
        return exact or not owners.used[self.owner] or self.barren_at == (clock, self.taken)


def lanes_for(lanes: Sequence[Lane], owners: Owners, writer: Writer | None) -> Sequence[Lane]:
    """Return the lanes whose pages may be evicted for these writes (None: for no owner's in particular)."""
    if not owners.active:
        return lanes
    if writer is not None and writer.for_quota:
        return (lanes[writer.owner],)
    mine = None if writer is None else writer.owner
    # This runs for each unit, so it asks no methods.
    used, guarantees = owners.used, owners.guarantees
    return [lane for lane in lanes if used[lane.owner] > guarantees[lane.owner] or lane.owner == mine]


def first_dead(lanes: Sequence[Lane]) -> Lane | None:
    """Return the lane with the dead page that was used least recently; None if there is no dead page."""
    found = None
    for lane in lanes:
        if lane.dead and (found is None or lane.dead[0] < found.dead[0]):
            found = lane
    return found


def first_live(lanes: Sequence[Lane]) -> Lane | None:
    """Return the lane with the live unit of the lowest rank; None if there is no live unit."""
    found = None
    for lane in lanes:
        if lane.live and (found is None or lane.live.lowest < found.live.lowest):
            found = lane
    return found


def turns(
    lanes: Sequence[Lane], owners: Owners, writer: Writer | None, highest: float
) -> Sequence[tuple[Sequence[Lane], float]]:
    """Return these lanes in the order in which their live and waiting pages are taken, each with a limit.

    The limit is the highest rank that is taken.

    Usually all are one group, up to the rank `highest` of the new objects. New objects within the guarantee
    of their owner are stored at the expense of those who have more than theirs, whatever these are worth:
    values of two tenants need not be comparable, and a tenant that just replaced its own objects would never
    get what it is guaranteed.
    """
    if writer is None or writer.for_quota or not owners.active or not owners.is_entitled(writer):
        return ((lanes, highest),)
    others = [lane for lane in lanes if lane.owner != writer.owner]
    own = [lane for lane in lanes if lane.owner == writer.owner]
    return ((others, inf), (own, highest))
