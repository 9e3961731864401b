"""Choice of the depth to restore: the deepest one, unless computing its last tokens is faster.

The speeds are measured while the worker serves. All depths are in pages.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tiercache.core import ABSENT, Locations, Tier, leading
from tiercache.index import HybridIndex, Match
from tiercache.policy import ModelProfile

if TYPE_CHECKING:
    from tiercache.controller.context import ControllerContext

HALF_LIFE_S: Final = 60.0
"""Seconds after which a measurement counts half."""
ENOUGH_S: Final = 0.02
"""Seconds that measurements must have taken together before a speed is known."""
MOST_S: Final = 10 * ENOUGH_S
"""Maximum number of seconds that measurements count for.

After a time in which nothing was measured, for example because nothing was worth a load, a speed is unknown
again: at the latest after log2(10) half-lives, 200 s.
"""
LEAST_BYTES: Final = 1 << 20
"""Smallest transfer that is measured. Smaller ones measure the call and not the bytes."""
LEAST_PREFILL_S: Final = 0.01
"""Shortest prefill that is measured, in seconds."""


class Speed:
    """Decayed mean of an amount (bytes or FLOPs) per second.

    Thread safety: any thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._amount = self._seconds = self._times = self._at = 0.0

    def add(self, amount: float, seconds: float, times: float = 1.0) -> None:
        """Add the measurement of `amount` in `seconds`, of `times` measurements.

        A measurement without a duration, or without a finite amount, says nothing.
        """
        if not (seconds > 0.0 and 0.0 < amount < math.inf):
            return
        with self._lock:
            self._decay()
            self._amount += amount
            self._seconds += seconds
            self._times += times
            self._scale(min(1.0, MOST_S / self._seconds))

    def pace(self, least: float = 0.0) -> float | None:
        """Return the seconds that one byte or FLOP takes; None while the speed is unknown.

        `least`: seconds of each measurement that do not depend on the amount.
        """
        with self._lock:
            self._decay()
            own = max(0.0, self._seconds - least * self._times)
            return own / self._amount if self._seconds >= ENOUGH_S else None

    def _scale(self, factor: float) -> None:
        self._amount *= factor
        self._seconds *= factor
        self._times *= factor

    def _decay(self) -> None:
        now = self._clock()
        self._scale(0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S))
        self._at = now


class Speeds:
    """Speeds of the reads from storage, of the loads to the device, and of the prefill.

    Thread safety: any thread.
    """

    def __init__(self, profile: ModelProfile, readers: int, clock: Callable[[], float]) -> None:
        """Begin with unknown speeds. `readers` is the number of threads that read from storage."""
        self._profile = profile
        self._readers = readers
        self._clock = clock
        self._reads, self._loads, self._prefills, self._passes = (Speed(clock) for _ in range(4))
        self._last_load_end = -math.inf

    def note_read(self, nbytes: int, seconds: float) -> None:
        """Record that one thread has read `nbytes` from storage in `seconds`."""
        if nbytes >= LEAST_BYTES:
            self._reads.add(nbytes, seconds)

    def note_load(self, nbytes: int, begun: float) -> None:
        """Record that a load of `nbytes`, begun at clock time `begun`, is over now.

        With 0 bytes, the load is not measured.
        """
        # Loads are served one after the other, so a load that was begun early has waited for the one before.
        now = self._clock()
        if nbytes >= LEAST_BYTES:
            self._loads.add(nbytes, now - max(begun, self._last_load_end))
        self._last_load_end = now

    def note_prefill(self, start: int, end: int, seconds: float, passes: float = 1.0) -> None:
        """Record that the device has computed tokens [start, end) in `seconds`, a part of so many passes."""
        if seconds >= LEAST_PREFILL_S:
            self._prefills.add(self._profile.flops(start, end), seconds, passes)

    def note_least_pass(self, seconds: float) -> None:
        """Record how long a pass that computes hardly anything has taken."""
        self._passes.add(1, seconds)

    def _prefill_pace(self) -> float | None:
        # What a pass takes in any case is not saved by a restore.
        return self._prefills.pace(self._passes.pace() or 0.0)

    @property
    def prefill_flops_per_second(self) -> int | None:
        """FLOPs per second of the prefill; None while they are not known."""
        pace = self._prefill_pace()
        return None if not pace else round(1 / pace)

    def gains(
        self,
        start: int,
        ends: Locations,
        reads: Locations,
        loads: Locations,
        load_before: int = 0,
        part: int = 0,
        wave: int = 1 << 62,
    ) -> npt.NDArray[np.float64] | None:
        """Return the seconds that restores of `ends` tokens save over a restore of `start` tokens.

        Each of the longer restores reads `reads` bytes from storage and loads `loads` bytes to the device,
        both at the same time; the shorter one loads `load_before` bytes. `ends`, `reads`, `loads` and the
        result have shape [restores]. A gain is negative if computing the tokens behind `start` is faster. The
        result is None while the speed of the prefill, or of both legs that are needed, is unknown.

        One thread reads up to `part` bytes at once, so only larger reads are shared among the threads. They
        read up to `wave` bytes before the next begin.
        """
        prefill, read, load = self._prefill_pace(), self._reads.pace(), self._loads.pace()
        if prefill is None or (read is None and load is None and loads.any()):
            return None
        read, load = read or 0.0, load or 0.0
        whole, rest = np.divmod(reads, wave)
        of_wave, of_rest = (np.maximum(n / self._readers, np.minimum(n, part)) for n in (wave, rest))
        longest = whole * of_wave + of_rest
        restore = np.maximum(longest * read, loads * load)
        saved = self._profile.flops(start, ends) * prefill
        gained: npt.NDArray[np.float64] = saved + load_before * load - restore
        return gained


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
    if not match.on_host:
        return match.near_depth
    depth = run = 0
    for node in reversed(list(index.node_at(match, match.near_depth).path())):
        if not node.has_pages(Tier.DEVICE):
            run += leading((node.where[Tier.DEVICE] >= 0).all(axis=0))
            break
        run = node.end
        if node.has_state(Tier.DEVICE):
            depth = run
    return depth if index.state_pools else min(run, match.near_depth)


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


def near_depth(context: ControllerContext, match: Match, held: int | None = None) -> int:
    """Return the near depth, or the deepest depth on the device if computing the rest is faster.

    `held` is the latter, where the engine has pages of its own of which the index does not know.
    """
    near, page = match.near_depth, context.page_size
    if not near or not context.options.load_or_recompute:
        return near
    depth = deepest_on_device(context.index, match) if held is None else held
    pages, states = context.index.locations(match, near)
    absent = {p: int(np.count_nonzero(at.device[depth:] == ABSENT)) for p, at in pages.items()}
    absent |= {p: int(one.device == ABSENT) for p, one in states.items()}
    nbytes = sum(count * context.host[pool].geometry.nbytes for pool, count in absent.items())
    gains = context.speeds.gains(
        depth * page, np.array([near * page]), reads=np.zeros(1, np.int64), loads=np.array([nbytes])
    )
    return near if gains is None or gains[0] > 0 else depth


def best_depth(
    context: ControllerContext, match: Match, depths: Collection[int], limit: int, part: int, wave: int
) -> int:
    """Return which of these depths, restored from storage, saves most time; 0 if the near depth does.

    All are deeper than the near depth of `match`. No depth is deeper than `limit`. `part` and
    `wave` are the numbers of bytes that one thread, and all of them, read at once.
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
        wave=wave,
    )
    if gains is None:
        return deepest
    return int(at[gains.argmax()]) if gains.max() > 0 else 0
