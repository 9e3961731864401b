"""Admission of one request: its restore, the slots that it computes into, and its pins.

PENDING --(1)--> READY at a depth --(2)--> PENDING --(3)--> READY at a shallower depth, or FAILED

(1) Storage has answered and all fetches have landed, or the deadline has ended the wait, or `start` was
    called. The depth is frozen: it becomes the deepest depth that device and host can restore.
(2) A layer fails to load.
(3) The load of that layer has landed, so that no copy writes to its slots any more.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.depths import deepest_on_device, near_depth
from tiercache.controller.lookup import Lookup
from tiercache.controller.prefetch import Prefetch, Step
from tiercache.controller.request_slots import RequestSlots
from tiercache.controller.restore import DeviceRestore, Sources, count_restore
from tiercache.controller.waiting import Awaited, Poll, Status
from tiercache.core import ABSENT, Locations, PoolName, Reason, Tier, TokenArray, reusable_pages
from tiercache.errors import AdmissionError, InputError, PoolFullError
from tiercache.index import CheckpointPlan, Inserted, Match, Node, Origin, PathLocations, Pin
from tiercache.policy import Ending
from tiercache.transfer import Fence


class Admission(Awaited):
    """Slots and pins that one request holds, and the progress of its restore (see the module).

    `HybridCacheController.admit` makes an admission, and `HybridCacheController.release` ends it. A task of
    asyncio awaits it, or enters it with `async with` (see `Awaited`).
    """

    def __init__(
        self,
        context: ControllerContext,
        lookup: Lookup,
        tokens: int,
        states: int,
        deadline: float,
        shared: Node | None = None,
    ) -> None:
        """Reserve slots, and pin what the restore will read.

        With `shared`, a pinned node, the request goes on behind the pages up to its end, which are on the
        device or on their way there. Nothing else is restored then.
        """
        self.lookup = lookup
        self.status = Status.PENDING
        self.reason = Reason.NONE
        self.sources = Sources()
        self.released = False
        self._context = context
        self._deadline = deadline
        self._limit = reusable_pages(len(lookup.tokens), context.page_size)
        """Deepest depth, in pages, that a restore of this prompt may reach."""
        self.sequence = lookup.tokens
        """Longest known part of the sequence: the prompt or, if longer, the committed tokens."""
        self.committed = False
        """Whether there was a commit."""
        self.live_states: Mapping[PoolName, int] = {}
        """Slot by state pool of a live state that the request began with, as if from `take_states`.

        A resumed request has the one with which it was parked.
        """
        self._last_match = lookup.match
        self._depth = 0
        """Restored depth in pages."""
        self._pinned_depth = 0
        """Number of pages, from the start of the sequence, that `_pin` keeps on the device."""
        self._frozen = False
        self._settled = False
        """Whether the wait for storage is over."""
        self._leaves_host = False
        """Whether computing the tokens is faster than loading what the host has of them."""
        self._loaded_progress = (0, 0)
        """Progress of the prefetch at the last attempt to load ahead."""
        self._cut_short = False
        """Whether storage might have given more if the depth had been frozen later."""
        self._prefetch = Prefetch(context, lookup, self._limit)
        self.plan = CheckpointPlan({}, context.index.checkpoints.request_end)
        """Depths, in pages, at which this request should leave states."""
        self.origin = Origin()
        """The requests and the pages that this request continues."""
        match = self._match()
        near = self._node_ending(match, match.near_depth) if shared is None else shared
        located, restored = context.index.locations(near, near.end)
        resident = {p: int(np.count_nonzero(at.device >= 0)) for p, at in located.items()}
        states_at = [one.device for one in restored.values()]
        on_device = min(resident.values(), default=near.end) == near.end and min(states_at, default=0) >= 0
        if not on_device:  # what is on its way needs no slot either
            resident = {p: int(np.count_nonzero(at.device != ABSENT)) for p, at in located.items()}
        is_held = on_device or shared is not None
        self._pin = context.index.pin(near, *((Tier.DEVICE,) if is_held else (Tier.DEVICE, Tier.HOST)))
        try:
            # A state that is loaded from host or storage needs a slot. So one more slot than asked for is
            # reserved, unless the restore uses a state on the device and nothing deeper can be fetched, or
            # the prompt is shorter than a page.
            is_whole = is_held and match.near_depth == self._limit
            loads_state = shared is None and self._limit > 0 and not is_whole
            pages = -(-tokens // context.page_size)
            self.slots = RequestSlots(context, pages, resident, states, loads_state=loads_state)
        except BaseException:
            self._pin.release()
            raise
        self._restore = DeviceRestore(context, self.slots, self._limit)
        if shared is not None:
            self._begin_shared(shared)

    @property
    def pages(self) -> Mapping[PoolName, Locations]:
        """The slot table: per page pool, the device slot of every page of the request.

        Valid once the admission is no longer PENDING, and until the next commit.
        """
        return self.slots.table

    @property
    def depth(self) -> int:
        """Restored depth in tokens, as of the last poll."""
        return self._depth * self._context.page_size

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Depths in tokens, ascending, at which the engine should cut its prefill and hand over a state.

        All are beyond the restored depth.
        """
        return tuple(p * self._context.page_size for p in self.plan.depths)

    @property
    def keeps_end(self) -> bool:
        """Whether the engine should hand over a state at the end of the request too."""
        return self.plan.end

    @property
    def restored_states(self) -> Mapping[PoolName, int]:
        """Device slot of the restored state per state pool; empty at depth 0.

        The caller copies the state and never writes to its slot.
        """
        return self._restore.states

    def poll(self) -> Poll:
        """Advance the restore as far as possible without waiting, and return its status.

        After a layer has failed, the admission is PENDING until the load of that layer has landed. Then it is
        READY at a depth whose objects are all on the device, or FAILED. In this last step, `poll` raises
        PoolFullError if there are too few slots to compute the lost pages again. So does the end of a wait,
        if other requests use pages that this one has loaded for a depth that was not reached. The caller
        polls again when other requests have released slots, or releases this admission.
        """
        self.require_open()
        self._context.drain()
        ends = self._context.clock() >= self._deadline
        return self._proceed(freeze=ends, late=ends)

    def start(self) -> Poll:
        """Freeze the depth now, at the deepest depth that device and host can restore.

        Objects that are still on their way from storage land in the cache for later requests. The restore
        does not count as failed, because the caller chose not to wait.
        """
        self.require_open()
        self._context.drain()
        return self._proceed(freeze=True)

    def _pause(self) -> float:
        # Poll at least every 0.1 s: a store call that hangs posts no event, and polls watch its deadline.
        left = 0.1 if self._restore.has_loads or self._settled else self._deadline - self._context.clock()
        return max(0.0, min(0.1, left))

    @property
    def confirmed(self) -> bool:
        """Whether everything of the restore is on the device, as of the last poll.

        In a group of ranks, the leader says True when this holds for all ranks. Until then, a load may fail
        on one of them, and nothing that was computed may leave the engine.
        """
        return self.status is not Status.PENDING and self._restore.has_landed and not self._restore.has_failed

    @property
    def attempt(self) -> int:
        """Number of times that a load of this request has failed on some rank of a group."""
        return 0

    def follow(self, depth: int, attempt: int = 0) -> Poll:
        """Freeze the depth at the one that the leader's poll has returned, in its attempt, in tokens.

        For the ranks of a group other than the leader; `docs/ranks.md` has the rules. Raises RankError for a
        depth that this rank has not promised, TransferError if a load has failed since on some rank, and
        AdmissionError without a group.
        """
        raise AdmissionError(
            f"no leader can set a depth of {depth} tokens in attempt {attempt}, for there is a single rank"
        )

    def wait_layer(self, layer: int, *, stream: int | None = None) -> None:
        """Return once all of `layer` is in its device slots.

        `stream` is a device's handle of a stream (`torch.cuda.current_stream().cuda_stream`). With `stream`,
        the device waits instead of this thread: work queued in the stream after the call finds the layer in
        place.

        The wait includes device work of other requests that is still filling pages of the slot table. A
        commit may add such pages to the table, so call this method again after a commit.

        Raises TransferError if the layer cannot be loaded. The caller then drops the output of its forward
        pass, and polls again. Raises InputError for a layer that no pool has.
        """
        self.require_open()
        if not self._frozen:
            raise AdmissionError("this admission is still pending; poll until it is ready, or call start()")
        layers = self._context.layers
        if not 0 <= layer < layers:
            raise InputError(f"there is no layer {layer}; the pools have layers 0 to {layers - 1}")
        self._restore.wait_layer(layer, stream)

    def take_states(self) -> dict[PoolName, int]:
        """Take one slot of each state pool, which the caller fills and then hands to `commit`."""
        self.require_started()
        return self.slots.take_states()

    def extend(self, tokens: int, states: int = 0) -> None:
        """Extend the slot table to `tokens` tokens, and reserve `states` more state slots.

        Raises PoolFullError, with nothing changed, if the pools have too few slots.
        """
        self.require_started()
        if states < 0:
            raise InputError(f"{states} more states cannot be reserved; pass 0 or more")
        self.slots.extend(-(-tokens // self._context.page_size), states)

    def check_sequence(self, tokens: TokenArray) -> None:
        """Raise InputError unless `tokens` agree with the prompt and with all earlier commits.

        Earlier tokens cannot change any more, because the index owns their slots already.
        """
        shared = min(len(self.sequence), len(tokens))
        if not np.array_equal(self.sequence[:shared], tokens[:shared]):
            raise InputError(
                "the committed tokens do not begin as the admitted prompt and earlier commits do; commit the"
                " whole sequence from its start"
            )

    def shared_node(self, depth: int) -> Node:
        """Return the deepest pinned node within `depth` pages whose path is the index's; the root if none."""
        return self.held_node(depth) or self._context.index.node_at(self._pin.node, 0)

    def held_node(self, depth: int) -> Node | None:
        """Return the deepest pinned node within `depth` pages up to whose end all slots are the index's.

        Returns None if there is none.
        """
        first = self.slots.first_own(min(depth, self._pinned_depth))
        return next((node for node in self._pin.node.path() if node.end <= first), None)

    def on_committed(self, inserted: Inserted, tokens: TokenArray, fence: Fence | None) -> None:
        """Update the slots, the pin and the known sequence after a commit of `tokens` (whole pages).

        `inserted` is the index's answer. `HybridCacheController.commit` explains `fence`.
        """
        self.slots.apply_insert(inserted, fence)
        self._restore.note_fences(besides=fence)
        self.committed = True
        if len(tokens) > len(self.sequence):
            self.sequence = tokens.copy()
        # A shorter commit must not release deeper pages that are in the slot table.
        if inserted.depth >= self._pinned_depth:
            self._hold(inserted.node, inserted.depth, Tier.DEVICE, fence=fence)

    def note_ending(self, ending: Ending) -> None:
        """Tell the index how the request ended; nothing if it has committed nothing."""
        if self.committed:
            self._context.index.ended(self._pin.node, ending)

    def close(self, fence: Fence | None = None) -> None:
        """Once the device has passed `fence`, release the pins, and the slots that only this request uses.

        Operations in flight go on without the admission.
        """
        slots, pins = self.hand_over()
        self._context.device_work.retire(slots, fence, pins)

    def hand_over(self) -> tuple[dict[PoolName, Locations], list[Pin]]:
        """End the request, and return the slots and the pins that it leaves to the caller."""
        self.require_open()
        self.released = True
        self._prefetch.close()
        return self.slots.close(), [self._pin]

    def require_started(self) -> None:
        """Raise AdmissionError while PENDING, after a layer has failed, and after the release."""
        self.require_open()
        self._follow_loads()
        if self.status is Status.PENDING:
            what = "is still pending;"
            if self._restore.has_loads:
                what = "lost a layer of its restore; drop what was computed from it and"
            raise AdmissionError(f"this admission {what} poll until it is ready, or call start()")

    def _begin_shared(self, node: Node) -> None:
        """Make the slot table behind pages of the index, and wait for the loads that bring them."""
        located = self._context.index.locations(node, node.end)
        if any(one.device == ABSENT for one in located.states.values()):
            located = located._replace(states={})
        self._prefetch.close()
        self._settled = self._frozen = True
        self._depth = self._pinned_depth = node.end
        self._restore.begin(node, node.end, located, self.slots.build_slot_table(located))
        self._restore.note_fences()
        self.status = Status.READY

    def require_open(self) -> None:
        """Raise AdmissionError after the release."""
        if self.released:
            raise AdmissionError(
                "this admission was released already; release each admission once, as its last call"
            )

    def _match(self) -> Match:
        """Return the prompt's match in the index as the index is now."""
        if not self._context.index.is_current(self._last_match):
            self._last_match = self._context.index.match(self.lookup.tokens, self.lookup.extra)
        return self._last_match

    def _node_ending(self, match: Match, depth: int) -> Node:
        """Return the node that ends at `depth`. The caller pins this node at once.

        Without state pools, `depth` can lie inside an edge. The edge is then split there, so that this
        request does not pin the part behind `depth`. The parts merge again when the pin is released.
        """
        index, lookup = self._context.index, self.lookup
        node = index.node_at(match, depth)
        return node if node.end == depth else index.extend_path(lookup.tokens, depth, lookup.extra)

    def _hold(self, node: Node, depth: int, *tiers: Tier, fence: Fence | None = None) -> None:
        """Pin pages [0, depth) in `tiers`, of which the device is one, and release the earlier pin.

        `node` covers page `depth` - 1. The earlier pin is released once the device has passed `fence`. Until
        then, the device may be reading the state on the earlier path, which only the earlier pin protects.
        """
        if self._pin.node is not node or self._pin.tiers != {*tiers}:
            before, self._pin = self._pin, self._context.index.pin(node, *tiers)
            self._context.device_work.retire({}, fence, [before])
        self._pinned_depth = depth

    def _proceed(self, *, freeze: bool, late: bool = False) -> Poll:
        self._follow_loads()
        if self.status is Status.PENDING:
            if self._restore.has_loads:
                self._fall_back()
            elif self._settled:
                self._settle()
            else:
                self._advance(freeze, late)
        return Poll(self.status, self.depth, self.reason)

    def _follow_loads(self) -> None:
        """Make the admission PENDING if a load has failed; otherwise forget the loads once all landed."""
        if self._restore.has_failed:
            self.status = Status.PENDING
        elif self._restore.has_landed:
            self._restore.forget_loads()

    def _advance(self, freeze: bool, late: bool) -> None:
        waiting = self._prefetch.waiting
        if waiting and not freeze:
            self._load_ahead()
            return
        if not waiting:
            for reason in self._prefetch.collect_results():
                self._fail(reason)
        match = self._match()
        # Each round of the loop tries the deepest depth that storage could restore. A depth for which the
        # host has no room is not tried again, so the loop ends.
        while not freeze and (target := self._prefetch.target(match)):
            if self._fetch(target):
                return
            match = self._match()
        self._cut_short = waiting or (freeze and self._prefetch.target(match) > 0)
        # Record the first of these reasons that explains why the depth is not deeper.
        if self._cut_short and late:
            self._fail(Reason.TIMEOUT)
        elif self.reason is not Reason.NONE:
            pass
        elif self._context.reads.is_suspended and self._prefetch.worthwhile_depth(match):
            self._fail(Reason.UNAVAILABLE)
        elif self._prefetch.has_storage_lost_more(match.near_depth):
            self._fail(Reason.ABSENT)
        elif self._prefetch.is_gain_too_small(match):
            self.reason = Reason.NOT_WORTH
        # The prefetch ends before slots are allocated, because it pins a path. This path may have to be
        # evicted to make room for the slots.
        self._prefetch.close()
        self._settled = True
        self._settle()

    def _fetch(self, target: int) -> bool:
        """Fetch for a depth, and return whether the request waits for that; if not, there was no room."""
        step = self._prefetch.begin(target, to_device=True)
        self._load_ahead(everything=step is not Step.BEGUN)
        if step is not Step.NO_ROOM or self._restore.is_loading_ahead:
            return True
        if not self._let_host_evict():
            self._prefetch.give_up()
            self._fail(Reason.BUSY)
        return False

    def _settle(self) -> None:
        """Freeze the deepest depth that device and host can restore.

        Loads ahead may hold slots of a deeper depth, which was not reached. While they are under way, their
        slots cannot be evicted; if they are needed, the admission stays PENDING until the loads have landed.
        """
        match = self._match()
        is_held = self._pin.node.end == match.near_depth and Tier.HOST not in self._pin.tiers
        depth = match.near_depth if is_held else near_depth(self._context, match)
        self._leaves_host = depth < match.near_depth
        if self._leaves_host and self.reason is Reason.NONE:
            self.reason = Reason.NOT_WORTH
        try:
            self._freeze(match, depth)
        except PoolFullError:
            if not self._restore.is_loading_ahead:
                raise

    def _let_host_evict(self) -> bool:
        """Keep the near depth on the device only, if the device has its pages; return whether that is new.

        The state at the near depth may then be evicted from the host, before the deeper restore is certain.
        """
        node = self._pin.node
        pages, _ = self._context.index.locations(node, node.end)
        if Tier.HOST not in self._pin.tiers or not all((at.device >= 0).all() for at in pages.values()):
            return False
        self._hold(node, node.end, Tier.DEVICE)
        return True

    def _load_ahead(self, *, everything: bool = False) -> None:
        """Begin to load to the device what has landed on the host since the last call.

        Without `everything`, less than a piece is left for later.
        """
        path, progress = self._prefetch.path, self._prefetch.progress
        if path is not None and (everything or progress != self._loaded_progress):
            self._loaded_progress = progress
            self._restore.load_ahead(*path, least=1 if everything else self._context.options.piece_bytes)

    def _fail(self, reason: Reason) -> None:
        """Record why the restore falls short. Several failures in a row for one reason count once."""
        if reason is not self.reason:
            self.reason = reason
            self._context.metrics.increment("restore_failures_total", reason)

    def _freeze(self, match: Match, depth: int) -> None:
        """Settle on `depth`, make the slot table and start the loads.

        Raises PoolFullError for lack of slots; nothing has changed then, except that pages behind `depth` may
        be evicted.
        """
        node = self._node_ending(match, depth)
        # What is behind the depth is let go first, because its slots may be needed.
        if node is not self._pin.node:
            self._hold(node, depth, Tier.DEVICE, Tier.HOST)
        located = self._context.index.locations(node, depth)
        need = self.slots.build_slot_table(located)
        match = self._match()
        self._depth = depth
        self._restore.begin(node, depth, located, need)
        self._restore.note_fences()
        self.status = Status.FAILED if self.reason is not Reason.NONE and not depth else Status.READY
        self.plan = self._context.index.plan_checkpoints(match, self.lookup.tokens, depth)
        self.origin = self._context.index.touch(match, self.lookup.tokens)
        if self.origin.expected:
            self._context.metrics.increment("hints_total", "honoured")
        if not self._frozen:
            self._frozen = True
            self.slots.keep_states()
            self._count(match, located)
        self._hold(node, depth, Tier.DEVICE)

    def _count(self, match: Match, located: PathLocations) -> None:
        """Count the restore in the metrics: the tiers it read from, and why storage did not give more."""
        self.sources.count(located, self._depth, self._prefetch.fetched, self._restore.ahead)
        if self.lookup.query is not None or self._prefetch.rounds:
            outcome = "cut_short" if self._cut_short else "complete"
            self._context.metrics.increment("prefetches_total", "request", outcome)
        reasons = {Tier.HOST: Reason.NOT_WORTH} if self._leaves_host else {}
        if self.lookup.query is not None:
            # If both this restore and the query failed, the failure of the restore counts.
            why = self.reason if self.reason is not Reason.NONE else self.lookup.query.reason
            # The answer or the objects did not come in time.
            is_late = why is Reason.NONE and self._cut_short
            reasons[Tier.STORAGE] = Reason.TIMEOUT if is_late else why
        elif self.lookup.unasked is not Reason.NONE or self._prefetch.rounds:
            reasons[Tier.STORAGE] = self.lookup.unasked
        held, tokens = self._pools_held(match), len(self.lookup.tokens)
        count_restore(self._context, self.sources, held, reasons, tokens, self.depth)

    def _pools_held(self, match: Match) -> dict[Tier, frozenset[PoolName]]:
        """Return, for each tier, the pools with at least one object on this prompt's path in that tier.

        A miss is counted as partial for these pools, and as absent for the others.
        """
        if self._depth == self._limit:
            return {}
        located, _ = self._context.index.locations(match, min(match.path_depth, self._limit))
        held = {
            Tier.DEVICE: frozenset(p for p, at in located.items() if (at.device >= 0).any()),
            Tier.HOST: frozenset(p for p, at in located.items() if (at.host >= 0).any()),
        }
        result = self.lookup.query.result if self.lookup.query else None
        if result is not None and result.kv_run_pages:
            held[Tier.STORAGE] = frozenset(self._context.index.page_pools) | {
                p for p, d in result.extra_pool_hit_pages.items() if d
            }
        return held

    def _fall_back(self) -> None:
        """After a failed load, freeze the depth again, once no load writes to a slot any more."""
        if not self._restore.has_landed:
            return
        self._fail(Reason.IO_ERROR)
        match = self._match()
        self._freeze(match, deepest_on_device(self._context.index, match))
