"""Which objects a commit sends down, and the operation that takes them there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tiercache.controller.operations import Piece, Write, gather_pieces
from tiercache.controller.state import ControllerState
from tiercache.core import ABSENT, Locations, PoolName, Tier
from tiercache.errors import PoolFullError
from tiercache.index import Node, PageLocations, Span


def write_through(state: ControllerState, node: Node, depth: int, state_depths: Iterable[int]) -> None:
    """Send pages [0, depth) on the path to `node`, and the states at `state_depths`, to host and storage, as far as they are not there.

    All of a commit's objects fit on the host or none are sent: a state without its pages is worth nothing. Skipped ones are counted and
    considered again by the next commit of their path. Never waits.
    """
    plan = _Plan(state)
    for pool, at in state.index.locations(node, depth).pages.items():
        plan.add_pages(pool, node, at)
    for end in state_depths:
        if 0 < end <= depth:
            plan.add_states(state.index.node_at(node, end), end)
    if not plan.copies and not plan.held:
        return
    nodes = {node, *(piece.span.node for piece in (*plan.copies, *plan.held))}
    device_pins, host_pins = ([state.index.pin(n, tier) for n in nodes] for tier in (Tier.DEVICE, Tier.HOST))
    try:
        handles = state.take_host(plan.counts())
    except PoolFullError:
        for pool, count in plan.counts().items():
            state.give_up(pool, "host_full", count)
        for pin in (*device_pins, *host_pins):
            pin.release()
        return
    keys: dict[int, bytes] = {}
    if state.storage is not None:
        first = max(0, min(piece.span.start for piece in (*plan.copies, *plan.held)) - 1)
        keys = dict(enumerate(state.index.page_keys(node, depth, first), first))
    Write(state, plan.placed(handles), plan.held, keys, device_pins=device_pins, host_pins=host_pins)


class _Plan:
    """What has to be copied to the host, and what the host holds that storage does not."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self.copies: list[Piece] = []
        self.held: list[Piece] = []

    def add_pages(self, pool: PoolName, node: Node, at: PageLocations) -> None:
        """Consider the pages of one pool on the path to `node`, from the start."""
        wanted = ~at.stored
        self.copies += gather_pieces(pool, node, 0, at.device, wanted & (at.device >= 0) & (at.host == ABSENT))
        if self._state.storage is not None and (held := wanted & (at.host >= 0)).any():
            idle = ~self._state.storing[pool][np.maximum(at.host, 0)]
            self.held += gather_pieces(pool, node, 0, at.host, held & idle)

    def add_states(self, node: Node, depth: int) -> None:
        """Consider the states at `depth`, which is where `node` ends; if it does not, there are none."""
        if node.end != depth:
            return
        for number, pool in enumerate(self._state.index.state_pools):
            device, host = node.state(Tier.DEVICE, number), node.state(Tier.HOST, number)
            if node.state(Tier.STORAGE, number) != ABSENT:
                continue
            if device >= 0 and host == ABSENT and not self._is_worth_loading(node, pool):
                self._state.metrics.increment("write_through_skipped_total", pool, "cheap_to_recompute")
            elif device >= 0 and host == ABSENT:
                self.copies.append(_state_piece(pool, node, device))
            elif host >= 0 and self._state.storage is not None and not self._state.storing[pool][host]:
                self.held.append(_state_piece(pool, node, host))

    def _is_worth_loading(self, node: Node, pool: PoolName) -> bool:
        """Would computing the state again, from the nearest one above, take longer than bringing it up?"""
        state = self._state
        load = state.options.load_flops_per_byte * state.host[pool].geometry.nbytes
        end = node.end * state.page_size
        return not load or state.profile.flops(end - node.replay * state.page_size, end) >= load

    def counts(self) -> dict[PoolName, int]:
        """Host objects needed, by pool."""
        counts: Counter[PoolName] = Counter()
        for piece in self.copies:
            counts[piece.pool] += len(piece.sources)
        return dict(counts)

    def placed(self, handles: dict[PoolName, Locations]) -> list[Piece]:
        """The copies with their destinations."""
        taken = dict.fromkeys(handles, 0)
        placed = []
        for piece in self.copies:
            start = taken[piece.pool]
            taken[piece.pool] += len(piece.sources)
            placed.append(replace(piece, destinations=handles[piece.pool][start : taken[piece.pool]]))
        return placed


def _state_piece(pool: PoolName, node: Node, location: int) -> Piece:
    at = np.array([location])
    return Piece(pool, Span(node, node.end - 1, node.end), at, at)
