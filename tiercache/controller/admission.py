"""Admission of one request: what it restores, the slots that it computes into, and the pins that keep both in place.

PENDING -- storage has answered --> PENDING (fetching) -- all landed --> READY(depth) -- a layer fails --> READY(shallower) or FAILED
    \\----------------- deadline or start(): with what is near ---------------/
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from tiercache.controller.accounting import Sources, count_restore
from tiercache.controller.lookup import Lookup
from tiercache.controller.operations import Load, Piece, gather_pieces
from tiercache.controller.prefetch import Prefetch, Step
from tiercache.controller.request_slots import RequestSlots
from tiercache.controller.state import ControllerState, Fence
from tiercache.core import ABSENT, Locations, Mask, PoolName, Reason, Tier, TokenArray, pending, reusable_pages
from tiercache.errors import AdmissionError, InputError
from tiercache.index import Inserted, Match, Node, Origin, PageLocations, PathLocations, Pin, Span, StateLocation
from tiercache.policy import CheckpointKind


class Status(enum.StrEnum):
    """State of an admission."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Poll:
    """Answer to a poll: the admission's status, and the `depth` in tokens that is restored; the engine computes the rest.

    FAILED means depth 0 although a restore was planned. `reason` says what went wrong on the way, also when a shallower depth is READY.
    """

    status: Status
    depth: int
    reason: Reason


class Admission:
    """Hold of one request on the cache, as the module describes. Made by `HybridCacheController.admit`; ended by its `release`.

    Thread safety: the owner's thread.
    """

    def __init__(self, state: ControllerState, lookup: Lookup, tokens: int, states: int, deadline: float) -> None:
        self.lookup = lookup
        self.status = Status.PENDING
        self.reason = Reason.NONE
        self.sources = Sources()
        self.released = False
        self._state = state
        self._deadline = deadline
        self._states = states
        self._limit = reusable_pages(len(lookup.tokens), state.page_size)
        self.sequence = lookup.tokens
        """Longest known part of the sequence: the prompt, or the tokens committed so far."""
        self.committed = False
        self._known = lookup.match
        self._depth = 0
        self._covered = 0
        self._frozen = False
        self._cut_short = False
        """Whether more could have come from storage when the depth was frozen."""
        self._prefetch = Prefetch(state, lookup, self._limit)
        self._loads: set[Load] = set()
        self._behind: list[Fence] = []
        """Fences of other requests, behind which slots of the table or the restored state are still being filled."""
        self._ordered: set[int | None] = set()
        """Streams (None: this thread) that already wait for the fences in `_behind`."""
        self.checkpoint_kinds: Mapping[int, CheckpointKind] = {}
        """Depths in pages at which this prefill should leave states, each with the reason."""
        self.origin = Origin()
        """The requests and the pages that this request continues."""
        self._restored_states: dict[PoolName, int] = {}
        match = self._match()
        near = self._node_ending(match, match.near_depth)
        located, restored = state.index.locations(near, match.near_depth)
        resident = {p: int(np.count_nonzero(at.device != ABSENT)) for p, at in located.items()}
        on_device = all((at.device >= 0).all() for at in located.values()) and all(one.device >= 0 for one in restored.values())
        self._pin = state.index.pin(near, *((Tier.DEVICE,) if on_device else (Tier.DEVICE, Tier.HOST)))
        try:
            # One more state slot than asked for, where the restored state may have to be loaded from the host or storage.
            spare = states if on_device and match.near_depth == self._limit else states + 1
            self.slots = RequestSlots(state, -(-tokens // state.page_size), resident, spare)
        except BaseException:
            self._pin.release()
            raise

    @property
    def pins(self) -> list[Pin]:
        """Pins that the request holds in the index."""
        return [self._pin] if self._prefetch.pin is None else [self._pin, self._prefetch.pin]

    @property
    def pages(self) -> Mapping[PoolName, Locations]:
        """The slot table: per page pool, the device slot of every page of the request.

        Valid from when the admission is no longer PENDING until the next commit.
        """
        return self.slots.table

    @property
    def depth(self) -> int:
        """Tokens restored, as of the last poll."""
        return self._depth * self._state.page_size

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Depths in tokens beyond the restored one at which the engine should cut its prefill, ascending, and hand over a state."""
        return tuple(p * self._state.page_size for p in self.checkpoint_kinds)

    @property
    def keeps_end(self) -> bool:
        """Whether the engine should also hand over a state at the end of the request."""
        return self._state.options.checkpoints.request_end

    @property
    def restored_states(self) -> Mapping[PoolName, int]:
        """Device slot of the restored state per state pool; empty at depth 0. The caller copies the state and never writes to its slot."""
        return self._restored_states

    def poll(self) -> Poll:
        """Advance the restore as far as possible without waiting, and return its status.

        After a layer has failed the admission is PENDING until that load has landed, then READY with what is left, or FAILED. Raises
        PoolFullError, with nothing changed, if there are then too few slots to recompute in: poll again when other requests have released
        theirs, or release this one.
        """
        self._require_open()
        self._state.drain()
        late = self._state.clock() >= self._deadline
        return self._go_on(freeze=late, late=late)

    def start(self) -> Poll:
        """Freeze the depth at what is near now. Objects still on their way from storage land in the cache for later requests.

        This does not count as a failed restore: the caller chose not to wait.
        """
        self._require_open()
        self._state.drain()
        return self._go_on(freeze=True)

    def wait(self) -> Poll:
        """Poll until no longer PENDING and return the last poll. For callers with nothing else to do.

        The deadline ends the wait for storage; after a layer has failed, the wait lasts until its load has landed.
        """
        while (poll := self.poll()).status is Status.PENDING:
            left = 0.1 if self._loads else self._deadline - self._state.clock()
            self._state.arrived.wait(max(0.0, min(0.1, left)))
        return poll

    def wait_layer(self, layer: int, *, stream: int | None = None) -> None:
        """Return once all of `layer` is in its device slots.

        With the handle of a device's `stream` (`torch.cuda.current_stream().cuda_stream`), return once work queued there from now on will
        find the layer in place: the device waits instead of this thread. Both also cover pages that another request committed with a fence
        which the device has not passed yet; call it again after a commit, whose table may name such pages. Raises TransferError if the
        layer cannot be loaded: drop the step's output and poll again. Raises InputError for a layer that no pool has.
        """
        self._require_open()
        if not self._frozen:
            raise AdmissionError("this admission is still pending; poll until it is ready, or call start()")
        if not 0 <= layer < self._state.layers:
            raise InputError(f"there is no layer {layer}; the pools have layers 0 to {self._state.layers - 1}")
        if self._behind and stream not in self._ordered:
            self._state.engine.order(self._behind, stream=stream)
            self._ordered.add(stream)
        for load in self._loads:
            load.ticket.wait_layer(layer, stream=stream)

    def take_states(self) -> dict[PoolName, int]:
        """Take a private slot of each state pool, to fill and then hand to `commit`."""
        self.require_started()
        return self.slots.take_states()

    def extend(self, tokens: int, states: int = 0) -> None:
        """Cover `tokens` tokens and hold `states` more state slots; raise PoolFullError, with no change, if the pools cannot give them."""
        self.require_started()
        if states < 0:
            raise InputError(f"{states} more states cannot be reserved; pass 0 or more")
        self.slots.extend(-(-tokens // self._state.page_size), states)

    def check_sequence(self, tokens: TokenArray) -> None:
        """Raise InputError unless `tokens` agree with the prompt and with all earlier commits, whose slots the index owns already."""
        shared = min(len(self.sequence), len(tokens))
        if not np.array_equal(self.sequence[:shared], tokens[:shared]):
            raise InputError(
                "the committed tokens do not begin as the admitted prompt and earlier commits do; commit the whole sequence from its start"
            )

    def follow(self, inserted: Inserted, tokens: TokenArray, fence: Fence | None) -> None:
        """Use the slots and hold the path of `inserted`, the index's answer to a commit of the full pages `tokens`."""
        self.slots.settle(inserted, fence)
        self._look_behind(besides=fence)
        self.committed = True
        if len(tokens) > len(self.sequence):
            self.sequence = tokens.copy()
        if inserted.depth >= self._covered:  # a shorter commit must not release deeper pages that are in the slot table
            self._hold(inserted.node, inserted.depth, fence)

    def close(self, fence: Fence | None = None) -> None:
        """Release the path and every private slot once the device has passed `fence`. Operations in flight land by themselves."""
        self._require_open()
        self.released = True
        self._prefetch.close()
        self._state.retire(self.slots.close(), fence, [self._pin])

    def require_started(self) -> None:
        """Raise AdmissionError while PENDING, after a layer has failed, and after the release."""
        self._require_open()
        self._follow_loads()
        if self.status is Status.PENDING:
            what = "lost a layer of its restore; drop what was computed from it and" if self._loads else "is still pending;"
            raise AdmissionError(f"this admission {what} poll until it is ready, or call start()")

    def _require_open(self) -> None:
        if self.released:
            raise AdmissionError("this admission was released already; each is released once, as the last thing")

    def _match(self) -> Match:
        if not self._state.index.is_current(self._known):
            self._known = self._state.index.match(self.lookup.tokens, self.lookup.extra)
        return self._known

    def _node_ending(self, match: Match, depth: int) -> Node:
        """Return the node that ends at `depth`; the caller pins it at once.

        Without state pools, `depth` can lie inside an edge. The edge is then cut there, so that its rest is not held by this request; it
        merges again when the pin is released.
        """
        node = self._state.index.node_at(match, depth)
        return node if node.end == depth else self._state.index.extend_path(self.lookup.tokens, depth, self.lookup.extra)

    def _hold(self, node: Node, depth: int, fence: Fence | None = None) -> None:
        """Hold pages [0, depth) on the device instead of what was held before; `node` covers the last of them.

        The earlier pin is released once `fence` has passed: until then the device may be reading the state there, which nothing else holds.
        """
        if self._pin.node is not node or Tier.HOST in self._pin.tiers:
            before, self._pin = self._pin, self._state.index.pin(node, Tier.DEVICE)
            self._state.retire({}, fence, [before])
        self._covered = depth

    def _go_on(self, *, freeze: bool, late: bool = False) -> Poll:
        self._follow_loads()
        if self.status is Status.PENDING:
            if self._loads:
                self._fall_back()
            else:
                self._advance(freeze, late)
        return Poll(self.status, self.depth, self.reason)

    def _follow_loads(self) -> None:
        """Make the admission PENDING if a load has failed; forget the loads once all have landed."""
        if any(load.ticket.error for load in self._loads):
            self.status = Status.PENDING
        elif all(load.done for load in self._loads):
            self._loads.clear()

    def _advance(self, freeze: bool, late: bool) -> None:
        waiting = self._prefetch.waiting
        if waiting and not freeze:
            return
        if not waiting:
            for reason in self._prefetch.harvest():
                self._fail(reason)
        match = self._match()
        while not freeze and (target := self._prefetch.target(match)):
            if self._prefetch.begin(target) is not Step.NO_ROOM:
                return
            self._fail(Reason.BUSY)
            match = self._match()
        self._cut_short = waiting or (freeze and self._prefetch.target(match) > 0)
        if self._cut_short and late:
            self._fail(Reason.TIMEOUT)
        elif self.reason is Reason.NONE and self._state.reads.is_away and self._prefetch.hoped(match):
            self._fail(Reason.UNAVAILABLE)
        elif self.reason is Reason.NONE and self._prefetch.was_promised(match.near_depth):
            self._fail(Reason.ABSENT)
        elif self.reason is Reason.NONE and self._prefetch.is_too_little(match):
            self.reason = Reason.NOT_WORTH
        self._prefetch.close()  # before slots are allocated: the path that it pins may have to be evicted
        match = self._match()
        self._freeze(match, match.near_depth)

    def _fail(self, reason: Reason) -> None:
        """Note why the restore is cut short. A reason that is met several times in a row is counted once."""
        if reason is not self.reason:
            self.reason = reason
            self._state.metrics.increment("restore_failures_total", reason)

    def _freeze(self, match: Match, depth: int) -> None:
        """Settle on `depth`, make the slot table and start the loads. Raises PoolFullError, with nothing changed, for lack of slots."""
        node = self._node_ending(match, depth)
        # The pin is needed because making room may evict this node, and releasing the pin held so far may merge it into another.
        with nullcontext() if node is self._pin.node else self._state.index.pinned(node, Tier.DEVICE):
            located = self._state.index.locations(node, depth)
            need = self.slots.lay_out(located.pages)
            self._depth = depth
            self._load(node, located, need)
            self._look_behind()
            self.status = Status.FAILED if self.reason is not Reason.NONE and not depth else Status.READY
            self.checkpoint_kinds = self._state.index.plan_checkpoints(match, self.lookup.tokens, depth)
            self.origin = self._state.index.touch(match, self.lookup.tokens)
            if not self._frozen:
                self._frozen = True
                self.slots.keep_states(self._states)
                self._count(match, *located)
            self._hold(node, depth)

    def _look_behind(self, besides: Fence | None = None) -> None:
        """Note the fences of other requests whose device work has yet to fill slots of the table or the restored state."""
        states = ((pool, np.array([slot])) for pool, slot in self._restored_states.items())
        fences = self._state.fences([*self.slots.table.items(), *states])
        self._behind = [fence for fence in fences if fence is not besides]
        self._ordered.clear()

    def _load(self, node: Node, located: PathLocations, need: Mapping[PoolName, Mask]) -> None:
        """Start the load of the pages in `need` and of the state, and join the loads that other requests have started."""
        state, depth, pieces = self._state, self._depth, list[Piece]()
        self._loads = {load for pool, at in located.pages.items() for load in self._filling(pool, at.device)}
        for pool, mask in need.items():
            pieces += gather_pieces(pool, node, 0, located.pages[pool].host, mask, self.slots.table[pool][:depth][mask])
        self._restored_states = {p: self._place_state(p, one, node, depth, pieces) for p, one in located.states.items()} if depth else {}
        if pieces:
            self._loads.add(Load(state, pieces, [state.index.pin(node, Tier.DEVICE, Tier.HOST)], self.slots.take_back))

    def _filling(self, pool: PoolName, device: Locations) -> Iterator[Load]:
        """Yield the loads of other requests that are filling some of these slots."""
        coming = device[device < ABSENT]
        if len(coming):
            for operation in self._state.claimants(Tier.DEVICE, pool, pending(coming)):
                assert isinstance(operation, Load), "only loads fill device slots"
                yield operation

    def _count(self, match: Match, located: Mapping[PoolName, PageLocations], states: Mapping[PoolName, StateLocation]) -> None:
        depth = self._depth
        for pool, at in located.items():
            there = at.device != ABSENT
            above = int(np.count_nonzero(there))
            below = int(np.count_nonzero(self._prefetch.fetched[pool][:depth] & ~there)) if self._prefetch.rounds else 0
            self.sources.add(Tier.DEVICE, pool, above)
            self.sources.add(Tier.STORAGE, pool, below)
            self.sources.add(Tier.HOST, pool, depth - above - below)
        for pool, one in states.items() if depth else ():
            fetched = Tier.STORAGE if self._prefetch.fetched[pool][depth - 1] else Tier.HOST
            self.sources.add(Tier.DEVICE if one.device != ABSENT else fetched, pool, 1)
        asked: Reason | None = self.lookup.unasked
        if self.lookup.query is not None:
            asked = self.reason if self.reason is not Reason.NONE else self.lookup.query.reason
            if asked is Reason.NONE and self._cut_short:
                asked = Reason.TIMEOUT  # whether it was there is not known
        elif asked is Reason.NONE and not self._prefetch.rounds:
            asked = None
        count_restore(self._state, self.sources, self._held(match), asked, len(self.lookup.tokens), self.depth)

    def _held(self, match: Match) -> dict[Tier, frozenset[PoolName]]:
        """Return the pools of which each tier holds something on this prompt's path, to tell a partial miss from an absent one."""
        if self._depth == self._limit:
            return {}
        located, _ = self._state.index.locations(match, min(match.path_depth, self._limit))
        held = {
            Tier.DEVICE: frozenset(p for p, at in located.items() if (at.device >= 0).any()),
            Tier.HOST: frozenset(p for p, at in located.items() if (at.host >= 0).any()),
        }
        result = self.lookup.query.result if self.lookup.query else None
        if result is not None and result.kv_run_pages:
            held[Tier.STORAGE] = frozenset(self._state.index.page_pools) | {p for p, d in result.extra_pool_hit_pages.items() if d}
        return held

    def _place_state(self, pool: PoolName, at: StateLocation, node: Node, depth: int, pieces: list[Piece]) -> int:
        """Return the device slot of the restored state, which a load may still be filling; append a piece to load if there is none."""
        if at.device >= 0:
            return at.device
        if at.device < ABSENT:
            slots = np.array([at.device])
            self._loads.update(self._filling(pool, slots))
            return int(pending(slots)[0])
        slot = self.slots.give_state(pool)
        pieces.append(Piece(pool, Span(node, depth - 1, depth), np.array([at.host]), np.array([slot])))
        return slot

    def _fall_back(self) -> None:
        """After a failed load, freeze again at what is on the device, as soon as no load writes to a slot any more."""
        if not all(load.done for load in self._loads):
            return
        self._fail(Reason.IO_ERROR)
        match = self._match()
        self._freeze(match, self._deepest_on_device(match))

    def _deepest_on_device(self, match: Match) -> int:
        index = self._state.index
        near = index.node_at(match, match.near_depth)
        run = min(_leading(at.device >= 0) for at in index.locations(near, match.near_depth).pages.values())
        if not index.state_pools:
            return run
        fit = (d for d in match.restorable if d <= run and all(s.device >= 0 for s in index.locations(near, d).states.values()))
        return max(fit, default=0)


def _leading(flags: Mask) -> int:
    """Return how many of `flags` are set before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())
