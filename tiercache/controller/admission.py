"""One request's hold on the cache: what it restores, the slots it computes into, the pins that keep both in place.

PENDING -- storage has answered --> PENDING (fetching) -- all landed --> READY(depth) -- a layer fails --> READY(shallower) or FAILED
    \\----------------- deadline or start(): with what is near ---------------/
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiercache.controller.accounting import Sources, count_restore
from tiercache.controller.lookup import Lookup
from tiercache.controller.operations import Fetch, Load, Piece, gather_pieces
from tiercache.controller.request_slots import RequestSlots
from tiercache.controller.state import ControllerState, InFlight
from tiercache.core import ABSENT, Locations, PoolName, Reason, Tier, pending, reusable_pages
from tiercache.errors import AdmissionError, PoolFullError
from tiercache.index import Match, Node, PageLocations, Span, StateLocation, checkpoint_depths

_MAX_FETCHES = 8
"""Rounds of fetching in one admission: each further round follows an object that turned out missing or corrupt."""


class Status(enum.StrEnum):
    """Where an admission stands."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Poll:
    """How an admission stands: restore `depth` tokens, compute the rest.

    FAILED is depth 0 after a restore that was planned; `reason` is what went wrong on the way, also when a shallower depth is READY.
    """

    status: Status
    depth: int
    reason: Reason


class Admission:
    """See the module. Made by `HybridCacheController.admit`; ends with `release`.

    Thread rule: the owner's thread.
    """

    def __init__(self, state: ControllerState, lookup: Lookup, tokens: int, states: int, deadline: float) -> None:
        self.lookup = lookup
        self.status = Status.PENDING
        self.reason = Reason.NONE
        self.sources = Sources()
        self.released = False
        self._state = state
        self._deadline = deadline
        self._limit = reusable_pages(len(lookup.tokens), state.page_size)
        self._depth = 0
        self._missing: set[tuple[PoolName, int]] = set()
        self._fetched: dict[PoolName, npt.NDArray[np.bool_]] = {p: np.zeros(self._limit, np.bool_) for p in state.pools}
        self._fetching: set[InFlight] = set()
        self._fetches = 0
        self._loads: set[InFlight] = set()
        self._checkpoints: tuple[int, ...] = ()
        self._restored_states: dict[PoolName, int] = {}
        match = state.index.match(lookup.tokens, lookup.extra)
        near = state.index.node_at(match, match.near_depth) if state.index.state_pools else match.node
        self._pin = state.index.pin(near, Tier.DEVICE, Tier.HOST)
        located, _ = state.index.locations(match, match.near_depth)
        resident = {p: int((at.device != ABSENT).sum()) for p, at in located.items()}
        try:
            # One state slot more than asked for: the restored state may have to come up from below.
            self.slots = RequestSlots(state, -(-tokens // state.page_size), resident, states + 1)
        except PoolFullError:
            self._pin.release()
            raise

    @property
    def pages(self) -> Mapping[PoolName, Locations]:
        """The slot table: per page pool, the device slot of every page of the request. Valid once no longer PENDING, until the next
        commit.
        """
        return self.slots.table

    @property
    def depth(self) -> int:
        """Tokens restored, as of the last poll."""
        return self._depth * self._state.page_size

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Depths in tokens beyond the restored one at which the engine should cut its prefill, ascending, and hand over a state."""
        return tuple(p * self._state.page_size for p in self._checkpoints)

    @property
    def restored_states(self) -> Mapping[PoolName, int]:
        """Per state pool, the device slot of the restored state, to be forked and never written; empty at depth 0."""
        return self._restored_states

    def poll(self) -> Poll:
        """Go on as far as possible without waiting, and say how it stands."""
        self._require_open()
        self._state.drain()
        if self.status is Status.PENDING:
            self._advance(freeze=self._state.clock() >= self._deadline)
        elif any(isinstance(o, Load) and o.ticket.error for o in self._loads):
            self._fall_back()
        return Poll(self.status, self.depth, self.reason)

    def start(self) -> Poll:
        """Freeze the depth at what is near now. What is still on its way from storage lands in the cache for the next request."""
        self._require_open()
        self._state.drain()
        if self.status is Status.PENDING:
            self._advance(freeze=True)
        return self.poll()

    def wait(self) -> Poll:
        """Poll until no longer PENDING, which is at the deadline at the latest. For callers with nothing else to do."""
        while (poll := self.poll()).status is Status.PENDING:
            self._state.arrived.wait(max(0.0, min(0.1, self._deadline - self._state.clock())))
        return poll

    def wait_layer(self, layer: int) -> None:
        """Return once all of `layer` is in its device slots; TransferError if it cannot be: drop the step's output and poll again."""
        self._require_open()
        for load in self._loads:
            assert isinstance(load, Load)
            load.ticket.wait_layer(layer)

    def take_states(self) -> dict[PoolName, int]:
        """A private slot of each state pool, to fill and then hand to `commit`."""
        self._require_open()
        return self.slots.take_states()

    def extend(self, tokens: int, states: int = 0) -> None:
        """Cover `tokens` tokens and hold `states` more state slots; PoolFullError and no change if the pools cannot give them."""
        self.require_started()
        self.slots.extend(-(-tokens // self._state.page_size), states)

    def repin(self, node: Node) -> None:
        """Hold the path to `node`, which a commit has just put the request's pages on, instead of the one restored from."""
        pin = self._state.index.pin(node, Tier.DEVICE)
        self._pin.release()
        self._pin = pin

    def close(self) -> None:
        """Undo: unpin, give every private slot back. Operations in flight land by themselves."""
        self._require_open()
        self.released = True
        self._pin.release()
        self.slots.free()

    def require_started(self) -> None:
        """AdmissionError while PENDING or after the release."""
        self._require_open()
        if self.status is Status.PENDING:
            raise AdmissionError("this admission is still pending; poll until it is ready, or call start()")

    def _require_open(self) -> None:
        if self.released:
            raise AdmissionError("this admission was released already; each is released once, as the last thing")

    def _advance(self, *, freeze: bool) -> None:
        query = self.lookup.query
        if not freeze:
            if query is not None and not query.done:
                return
            if not all(o.done for o in self._fetching):
                return
            self._harvest()
            if self._fetch_next():
                return
        elif (query is not None and not query.done) or not all(o.done for o in self._fetching) or self._target():
            self._fail(Reason.TIMEOUT)
        self._freeze()

    def _harvest(self) -> None:
        for fetch in self._fetching:
            assert isinstance(fetch, Fetch)
            self._missing.update(fetch.failed)
            for reason in fetch.reasons:
                self._fail(reason)
        self._fetching = set()

    def _fail(self, reason: Reason) -> None:
        self.reason = reason
        self._state.metrics.increment("restore_failures_total", reason)

    def _fetch_next(self) -> bool:
        """Begin to fetch what the deepest depth still possible lacks on the host; False if there is nothing deeper than what is near."""
        state, lookup = self._state, self.lookup
        target = self._target()
        if not target or self._fetches == _MAX_FETCHES or state.storage is None:
            return False
        self._fetches += 1
        node = state.index.extend_path(lookup.tokens, target, lookup.extra)
        pin = state.index.pin(node, Tier.DEVICE, Tier.HOST)
        try:
            self._fetching = self._begin_fetch(node, target)
        except PoolFullError:
            self._fail(Reason.BUSY)
            return False
        finally:
            pin.release()
            state.index.prune(node)
        return True

    def _target(self) -> int:
        """The deepest depth, in pages, that storage could still give beyond what is near; 0 if there is none."""
        match = self._state.index.match(self.lookup.tokens, self.lookup.extra)
        known = set(match.restorable) | {match.depth}
        if self.lookup.query is not None and self.lookup.query.result is not None:
            known.update(self.lookup.query.result.restorable_prefix_pages)
        return max((d for d in known if match.near_depth < d <= self._limit and self._possible(d)), default=0)

    def _possible(self, depth: int) -> bool:
        """Was everything that `depth` needs there when we last tried to fetch it?"""
        pages = self._state.index.page_pools
        return not any(d <= depth if pool in pages else d == depth for pool, d in self._missing)

    def _begin_fetch(self, node: Node, depth: int) -> set[InFlight]:
        state = self._state
        located, states = state.index.locations(node, depth)
        absent = {p: (at.device < 0) & (at.host == ABSENT) for p, at in located.items()}
        waiting = set()
        for pool, at in located.items():
            coming = (at.device < 0) & (at.host < ABSENT)
            waiting |= state.claimants(Tier.HOST, pool, pending(at.host[coming]))
            self._fetched[pool][:depth] |= absent[pool] | coming
        for pool, one in states.items():
            if one.device < 0 and one.host < ABSENT:
                waiting |= state.claimants(Tier.HOST, pool, pending(np.array([one.host])))
            absent[pool] = np.array([one.device < 0 and one.host == ABSENT])
            self._fetched[pool][depth - 1] |= one.device < 0 and one.host < 0
        handles = state.take_host({p: int(mask.sum()) for p, mask in absent.items()})
        pieces: list[Piece] = []
        for pool, mask in absent.items():
            start = depth - 1 if pool in states else 0
            pieces += gather_pieces(pool, node, start, np.zeros(len(mask), np.int64), mask, handles[pool])
        if pieces:
            keys = state.index.page_keys(node, depth)
            waiting.add(Fetch(state, pieces, keys, [state.index.pin(node, Tier.DEVICE, Tier.HOST)]))
        return {o for o in waiting if isinstance(o, Fetch)}

    def _freeze(self, *, device_only: bool = False) -> None:
        """Settle on the deepest depth that is near, make the slot table and start the loads."""
        state, lookup = self._state, self.lookup
        match = state.index.match(lookup.tokens, lookup.extra)
        depth = self._deepest_on_device(match) if device_only else match.near_depth
        node = state.index.extend_path(lookup.tokens, depth, lookup.extra) if depth and state.index.state_pools else match.node
        pin = state.index.pin(node, Tier.DEVICE, Tier.HOST)
        self._pin.release()
        self._pin = pin
        located, states = state.index.locations(node, depth)
        need = self.slots.lay_out(located)
        self._loads = {o for p, at in located.items() for o in state.claimants(Tier.DEVICE, p, pending(at.device[at.device < ABSENT]))}
        pieces: list[Piece] = []
        for pool, mask in need.items():
            pieces += gather_pieces(pool, node, 0, located[pool].host, mask, self.slots.table[pool][:depth][mask])
        self._restored_states = {}
        for pool, one in states.items() if depth else ():
            self._restored_states[pool] = self._place_state(pool, one, node, depth, pieces)
        if pieces:
            self._loads.add(Load(state, pieces, [state.index.pin(node, Tier.DEVICE, Tier.HOST)]))
        self._depth = depth
        first = self.status is Status.PENDING
        self.status = Status.FAILED if self.reason is not Reason.NONE and not depth else Status.READY
        self._checkpoints = (
            checkpoint_depths(depth, match.path_depth, len(lookup.tokens), state.page_size) if state.index.state_pools else ()
        )
        state.index.touch(match)
        if first:
            self._count(match, located, states)

    def _count(self, match: Match, located: Mapping[PoolName, PageLocations], states: Mapping[PoolName, StateLocation]) -> None:
        depth = self._depth
        for pool, at in located.items():
            above = at.device != ABSENT
            below = ~above & self._fetched[pool][:depth]
            self.sources.add(Tier.DEVICE, pool, above.sum())
            self.sources.add(Tier.STORAGE, pool, below.sum())
            self.sources.add(Tier.HOST, pool, depth - above.sum() - below.sum())
        for pool, one in states.items() if depth else ():
            fetched = Tier.STORAGE if self._fetched[pool][depth - 1] else Tier.HOST
            self.sources.add(Tier.DEVICE if one.device != ABSENT else fetched, pool, 1)
        asked: Reason | None = self.lookup.unasked
        if self.lookup.query is not None:
            asked = self.reason if self.reason is not Reason.NONE else self.lookup.query.reason
        elif asked is Reason.NONE and not self._fetches:
            asked = None
        count_restore(self._state, self.sources, self._held(match), asked, len(self.lookup.tokens), self.depth)

    def _held(self, match: Match) -> dict[Tier, frozenset[PoolName]]:
        """Which page pools each tier holds something of on this prompt's path; the rest of the answer to "why was it a miss"."""
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
        """The device slot of the restored state, which a load may still be filling."""
        if at.device >= 0:
            return at.device
        if at.device < ABSENT:
            slots = pending(np.array([at.device]))
            self._loads |= self._state.claimants(Tier.DEVICE, pool, slots)
            return int(slots[0])
        slot = self.slots.give_state(pool)
        pieces.append(Piece(pool, Span(node, depth - 1, depth), np.array([at.host]), np.array([slot])))
        return slot

    def _fall_back(self) -> None:
        """A load failed: fold once more over what is verified on the device."""
        if not all(o.done for o in self._loads):
            return  # the failing load has not landed yet, its slots are still being written
        self._fail(Reason.IO_ERROR)
        self._freeze(device_only=True)

    def _deepest_on_device(self, match: Match) -> int:
        for depth in sorted({*match.restorable, match.near_depth}, reverse=True):
            if depth > match.near_depth:
                continue
            node = self._state.index.extend_path(self.lookup.tokens, depth, self.lookup.extra) if depth else match.node
            pages, states = self._state.index.locations(node, depth)
            if all((at.device >= 0).all() for at in pages.values()) and all(one.device >= 0 for one in states.values()):
                return depth
        return 0
