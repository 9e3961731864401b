"""Device side of a restore: loads into device slots, and counts of the restored objects."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.operations import Load, PageRun, gather_runs
from tiercache.controller.request_slots import RequestSlots
from tiercache.core import ABSENT, Locations, Mask, PoolName, Reason, Tier, pending
from tiercache.index import Node, PathLocations, Span, StateLocation
from tiercache.metrics import HIT, MISS
from tiercache.transfer import Fence


class DeviceRestore:
    """Loads and fences that one admission waits for. Requests that need the same objects share a load."""

    def __init__(self, context: ControllerContext, slots: RequestSlots, limit: int) -> None:
        """Prepare a restore of up to `limit` pages into `slots`."""
        self.states: dict[PoolName, int] = {}
        """Device slot of the restored state, by state pool; empty at depth 0."""
        self._context = context
        self._slots = slots
        self._limit = limit
        self._loads: set[Load] = set()
        self._loads_ahead: list[tuple[Load, dict[PoolName, Mask]]] = []
        """Loads of `load_ahead`, each with a mask of its pages by pool. A state counts as its last page."""
        self._fences: list[Fence] = []
        """Fences of other requests whose device work may still be filling slots that this request reads."""
        self._ordered_streams: set[int | None] = set()
        """Streams (None: this thread) that already wait for the fences in `_fences`."""

    @property
    def has_loads(self) -> bool:
        """Whether a load is under way, or has failed."""
        return bool(self._loads)

    @property
    def has_failed(self) -> bool:
        """Whether a load has failed."""
        return any(load.ticket.error for load in self._loads)

    @property
    def has_landed(self) -> bool:
        """Whether all loads are over, so that none writes to a slot any more."""
        return all(load.done for load in self._loads)

    def forget_loads(self) -> None:
        """Forget the loads. Call this when all have landed."""
        self._loads.clear()

    @property
    def ahead(self) -> dict[PoolName, Mask]:
        """Mask of the pages, by pool, that `load_ahead` loads or has loaded, without those that failed.

        A state counts as its last page. A pool of which nothing was loaded ahead has no mask.
        """
        masks: dict[PoolName, Mask] = {}
        for load, loaded in self._loads_ahead:
            if not load.ticket.error:
                for pool, mask in loaded.items():
                    masks.setdefault(pool, np.zeros(self._limit, np.bool_))[: len(mask)] |= mask
        return masks

    @property
    def is_loading_ahead(self) -> bool:
        """Whether a load of `load_ahead` is under way."""
        return not all(load.done for load, _ in self._loads_ahead)

    # A restore from storage overlaps its legs. Each piece that has landed on the host is loaded as its own
    # transfer, while later pieces are read:
    #   storage -> host     | state   | p0-p9   | p10-p19 | p20-p29 |
    #   host -> device                | state   | p0-p9   | p10-p19 | p20-p29 |
    #   READY                                                       ^ the rest is loaded layer by layer
    # Every object is verified before it is on the host, and a page on the device is of use to nobody without
    # a state at a depth that is whole, so an object may be published on the device before the others arrive.

    def load_ahead(self, node: Node, depth: int, least: int) -> None:
        """Begin to load what the host has of pages [0, depth) of the path to `node` and of its state.

        Less than `least` bytes are left for later. After a load has failed, nothing is loaded ahead any more.
        """
        context = self._context
        if any(load.ticket.error for load, _ in self._loads_ahead):
            return
        located = context.index.locations(node, depth)
        wanted = {pool: (at.device == ABSENT) & (at.host >= 0) for pool, at in located.pages.items()}
        for pool, mask in wanted.items():
            mask &= np.cumsum(mask) <= self._slots.unused(pool)
        states = {
            pool: one
            for pool, one in located.states.items()
            if one.device == ABSENT and one.host >= 0 and self._slots.unused(pool)
        }
        objects = {pool: int(np.count_nonzero(mask)) for pool, mask in wanted.items()}
        objects |= dict.fromkeys(states, 1)
        nbytes = sum(count * context.host[pool].geometry.nbytes for pool, count in objects.items())
        if nbytes < least:
            return
        runs = list[PageRun]()
        for pool, mask in wanted.items():
            slots = self._slots.give_pages(pool, objects[pool])
            runs += gather_runs(pool, node, 0, located.pages[pool].host, mask, slots)
        for pool, one in states.items():
            self._place_state(pool, one, node, runs)
            wanted[pool] = np.arange(depth) == depth - 1
        self._loads_ahead.append((self._load(node, runs), wanted))

    def begin(self, node: Node, depth: int, located: PathLocations, need: Mapping[PoolName, Mask]) -> None:
        """Load the pages in `need` and the state at `depth`, and join the loads of other requests."""
        runs = list[PageRun]()
        # If another request is loading a page, this request only waits for that load.
        filled = (filling(self._context, pool, at.device) for pool, at in located.pages.items())
        self._loads = {*chain.from_iterable(filled)}
        for pool, mask in need.items():
            slots = self._slots.table[pool][:depth][mask]
            runs += gather_runs(pool, node, 0, located.pages[pool].host, mask, slots)
        self.states = {}
        if depth:
            self.states = {p: self._place_state(p, one, node, runs) for p, one in located.states.items()}
        if runs:
            self._loads.add(self._load(node, runs))

    def note_fences(self, besides: Fence | None = None) -> None:
        """Record the fences of other requests whose device work may still be filling slots of this request.

        `besides` is the request's own fence, which is left out.
        """
        states = ((pool, np.array([slot])) for pool, slot in self.states.items())
        fences = self._context.device_work.fences(chain(self._slots.table.items(), states))
        self._fences = [fence for fence in fences if fence is not besides]
        self._ordered_streams.clear()

    def wait_layer(self, layer: int, stream: int | None) -> None:
        """Block until all of `layer` is in its device slots, or make `stream` wait for the layer.

        Raises TransferError if the layer cannot be loaded.
        """
        if self._fences and stream not in self._ordered_streams:
            self._context.engine.order(self._fences, stream=stream)
            self._ordered_streams.add(stream)
        for load in self._loads:
            load.ticket.wait_layer(layer, stream=stream)

    def _load(self, node: Node, runs: Sequence[PageRun]) -> Load:
        pin = self._context.index.pin(node, Tier.DEVICE, Tier.HOST)
        return Load(self._context, runs, [pin], self._slots.take_back)

    def _place_state(self, pool: PoolName, at: StateLocation, node: Node, runs: list[PageRun]) -> int:
        """Return the device slot of the state at the end of `node`. A load may still be filling this slot.

        If the state has no device slot, take a spare slot, and append to `runs` a run that loads the state
        into that slot.
        """
        if at.device >= 0:
            return at.device
        if at.device < ABSENT:  # pending: another request is loading the state
            slots = np.array([at.device])
            self._loads.update(filling(self._context, pool, slots))
            return int(pending(slots)[0])
        slot = self._slots.give_state(pool)
        last_page = Span(node, node.end - 1, node.end)
        runs.append(PageRun(pool, last_page, np.array([at.host]), np.array([slot])))
        return slot


def filling(context: ControllerContext, pool: PoolName, device: Locations) -> Iterator[Load]:
    """Yield the loads that are filling those of these slots that are pending."""
    being_filled = device[device < ABSENT]
    if len(being_filled):
        for operation in context.in_flight.claimants(Tier.DEVICE, pool, pending(being_filled)):
            assert isinstance(operation, Load), "only loads fill device slots"
            yield operation


@dataclass
class Sources:
    """Numbers of restored objects, by the tier that they came from and by pool."""

    objects: dict[tuple[Tier, PoolName], int] = field(default_factory=dict)

    def add(self, tier: Tier, pool: PoolName, count: int) -> None:
        """Add `count` objects of `pool` from `tier`."""
        self.objects[tier, pool] = self.objects.get((tier, pool), 0) + int(count)

    def count(
        self,
        located: PathLocations,
        depth: int,
        fetched: Mapping[PoolName, Mask],
        ahead: Mapping[PoolName, Mask],
    ) -> None:
        """Add the objects of a restore of `depth` pages.

        `fetched` marks the pages that came from storage, by pool, and `ahead` those that this restore itself
        has brought to the device by now. A state is marked at its last page.
        """
        for pool, at in located.pages.items():
            there = at.device != ABSENT
            if pool in ahead:
                there &= ~ahead[pool][:depth]
            device = int(np.count_nonzero(there))
            storage = int(np.count_nonzero(fetched[pool][:depth] & ~there))
            self.add(Tier.DEVICE, pool, device)
            self.add(Tier.STORAGE, pool, storage)
            self.add(Tier.HOST, pool, depth - device - storage)
        for pool, one in located.states.items() if depth else ():
            below = Tier.STORAGE if fetched[pool][depth - 1] else Tier.HOST
            there_before = one.device != ABSENT and not (pool in ahead and ahead[pool][depth - 1])
            self.add(Tier.DEVICE if there_before else below, pool, 1)

    def slowest(self) -> Tier | None:
        """Return the slowest tier from which an object came; None if nothing was restored."""
        return max((tier for (tier, _), n in self.objects.items() if n), default=None)


def count_restore(
    context: ControllerContext,
    sources: Sources,
    held: Mapping[Tier, frozenset[PoolName]],
    reasons: Mapping[Tier, Reason],
    tokens: int,
    restored: int,
    begin: int = 0,
) -> None:
    """Count one restore of `restored` out of `tokens` prompt tokens in the metrics.

    The first `begin` tokens cost no time in any case, because the engine has them itself.

    Only tiers that were consulted are counted. The device is always consulted. The host is consulted unless
    the device had everything.

    `held` has, for each tier, the pools with at least one object of this prompt in that tier. A miss in such
    a pool has the reason PARTIAL_POOLS, and a miss in another pool has the reason ABSENT.

    `reasons` says for a tier why it gave nothing or less, and is then the reason of all misses of that tier.
    Storage is not in `reasons` if it was not consulted because there was nothing to ask for; its reason is
    NONE if it answered.
    """
    metrics = context.metrics
    # The host was consulted unless the device had all pages that a prompt may restore. These are the whole
    # pages of the first `tokens` - 1 tokens, because at least one token is computed.
    most = (tokens - 1) // context.page_size * context.page_size
    moved = dict.fromkeys(Tier, 0)
    below_device = restored < most or sources.slowest() is not Tier.DEVICE
    for tier in Tier:
        if (tier is Tier.STORAGE and tier not in reasons) or (tier is Tier.HOST and not below_device):
            continue
        name, why = str(tier), reasons.get(tier, Reason.NONE)
        for pool in context.pools:
            count = sources.objects.get((tier, pool), 0)
            if count:
                result, reason = HIT, Reason.NONE
                nbytes = count * context.host[pool].geometry.nbytes
                moved[tier] += nbytes
                metrics.increment("restored_objects_total", name, pool, by=count)
                metrics.increment("restored_bytes_total", name, pool, by=nbytes)
                metrics.set("tier_last_read_seconds", name, to=time.time())
            elif why is not Reason.NONE:
                result, reason = MISS, why
            else:
                is_held = pool in held.get(tier, frozenset())
                result, reason = MISS, Reason.PARTIAL_POOLS if is_held else Reason.ABSENT
            metrics.increment("lookups_total", name, pool, result, reason)
    metrics.increment("tokens_total", "restored", by=restored)
    metrics.increment("tokens_total", "computed", by=tokens - restored)
    # Of two restores of the same tokens, the first needs no transfer.
    reads = np.array([0, moved[Tier.STORAGE]])
    loads, ends = np.add(reads, [0, moved[Tier.HOST]]), np.array([restored, restored])
    gains = context.speeds.gains(begin, ends, reads, loads) if restored > begin else None
    if gains is not None:
        metrics.increment("prefill_seconds_total", by=float(gains[0]))
        metrics.increment("restore_seconds_total", by=float(gains[0] - gains[1]))
