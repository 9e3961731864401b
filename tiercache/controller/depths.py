"""Choice of the depth to restore: the deepest one, unless computing its last tokens is faster.

All depths are in pages. Thread safety: the owner's thread (the engine's thread, which calls the controller).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.core import ABSENT, leading
from tiercache.index import HybridIndex, Match


def near_runs(context: ControllerContext, match: Match, limit: int) -> tuple[int, int]:
    """Return the numbers of pages, from the start, that are on the device, and that are on device or host.

    At most `limit` pages are counted. They count even if there is no state that makes them restorable, and
    even if there are no page pools.
    """
    most = min(match.path_depth, limit)
    pages, _ = context.index.locations(match, most)
    known = np.ones(most, np.bool_)
    on_device = np.logical_and.reduce([known, *(at.device >= 0 for at in pages.values())])
    present = np.logical_and.reduce([known, *((at.device >= 0) | (at.host >= 0) for at in pages.values())])
    return leading(on_device), leading(present)


def deepest_on_device(index: HybridIndex, match: Match) -> int:
    """Return the deepest restorable depth of which every page and state is on the device."""
    near = index.node_at(match, match.near_depth)
    pages = index.locations(near, match.near_depth).pages
    run = min((leading(at.device >= 0) for at in pages.values()), default=match.near_depth)
    if not index.state_pools:
        return run
    for depth in sorted(match.restorable, reverse=True):
        if depth > run:
            continue
        states = index.locations(near, depth).states
        if all(state.device >= 0 for state in states.values()):
            return depth
    return 0


def near_depths(context: ControllerContext, match: Match, *, device_only: bool = False) -> int:
    """Return the set of depths that device and host can restore; bit d - 1 stands for depth d.

    With `device_only`, the host does not count.
    """
    index = context.index
    top = deepest_on_device(index, match) if device_only else match.near_depth
    if not index.state_pools:
        return (1 << top) - 1
    mask, near = 0, index.node_at(match, match.near_depth)
    for depth in match.restorable:
        states = index.locations(near, depth).states.values() if depth <= top else ()
        if states and all(one.device >= 0 or (one.host >= 0 and not device_only) for one in states):
            mask |= 1 << depth - 1
    return mask


def near_depth(context: ControllerContext, match: Match) -> int:
    """Return the near depth, or the deepest depth on the device if computing the rest is faster."""
    near, page = match.near_depth, context.page_size
    if not near or not context.options.load_or_recompute:
        return near
    depth = deepest_on_device(context.index, match)
    pages, states = context.index.locations(match, near)
    absent = {p: int(np.count_nonzero(at.device == ABSENT)) for p, at in pages.items()}
    absent |= {p: int(one.device == ABSENT) for p, one in states.items()}
    nbytes = sum(count * context.host[pool].geometry.nbytes for pool, count in absent.items())
    gains = context.speeds.gains(
        depth * page, np.array([near * page]), reads=np.zeros(1, np.int64), loads=np.array([nbytes])
    )
    return near if gains is None or gains[0] > 0 else depth


def best_depth(
    context: ControllerContext, match: Match, depths: Collection[int], limit: int, part: int
) -> int:
    """Return which of these depths, restored from storage, saves most time; 0 if the near depth does.

    All are deeper than the near depth of `match`. No depth is deeper than `limit`. `part` is the number of
    bytes that one thread reads at once.
    """
    deepest = max(depths, default=0)
    if not deepest or not context.options.load_or_recompute:
        return deepest
    near, page = match.near_depth, context.page_size
    on_device, on_host = near_runs(context, match, limit)
    sizes = {pool: context.host[pool].geometry.nbytes for pool in context.pools}
    per_page = sum(sizes[pool] for pool in context.index.page_pools)
    state = sum(sizes[pool] for pool in context.index.state_pools)
    at = np.array(sorted(depths, reverse=True))
    gains = context.speeds.gains(
        near * page,
        at * page,
        reads=np.maximum(at - on_host, 0) * per_page + state,
        loads=np.maximum(at - on_device, 0) * per_page + state,
        load_before=max(0, near - on_device) * per_page,
        part=part,
    )
    if gains is None:
        return deepest
    return int(at[gains.argmax()]) if gains.max() > 0 else 0
