"""Which objects a commit sends down, and the operation that takes them there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tiercache.controller.operations import Piece, Write, gather_pieces
from tiercache.controller.state import ControllerState, Fence
from tiercache.core import ABSENT, Locations, PoolName, Tier, TokenArray
from tiercache.errors import PoolFullError
from tiercache.index import Node


def write_through(
    state: ControllerState, node: Node, depth: int, state_depths: Iterable[int], tokens: TokenArray, extra: bytes, fence: Fence | None
) -> None:
    """Send pages [0, depth) on the path to `node`, and the states at `state_depths`, to host and storage, as far as they are not there.

    All of a commit's objects fit on the host or none are sent: a state without its pages is worth nothing. Skipped ones are counted and
    considered again by the next commit of their path. Never waits.
    """
    plan = _Plan(state)
    located, _ = state.index.locations(node, depth)
    for pool, at in located.items():
        plan.add(pool, node, 0, at.device, at.host, at.stored)
    owners = [state.index.extend_path(tokens, end, extra) for end in sorted(state_depths)]
    for owner in owners:
        for pool, one in state.index.locations(owner, owner.end)[1].items():
            plan.add(pool, owner, owner.end - 1, np.array([one.device]), np.array([one.host]), np.array([one.stored]))
    if not plan.copies and not plan.held:
        return
    device_pins, host_pins = ([state.index.pin(n, tier) for n in (node, *owners)] for tier in (Tier.DEVICE, Tier.HOST))
    try:
        handles = state.take_host(plan.counts())
    except PoolFullError:
        for pool, count in plan.counts().items():
            state.metrics.increment("write_through_skipped_total", pool, "host_full", by=count)
        for pin in (*device_pins, *host_pins):
            pin.release()
        return
    keys = state.index.page_keys(node, depth) if state.storage is not None else []
    Write(state, plan.placed(handles), plan.held, keys, device_pins=device_pins, host_pins=host_pins, fence=fence)


class _Plan:
    """What has to be copied to the host, and what the host holds that storage does not."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self.copies: list[Piece] = []
        self.held: list[Piece] = []

    def add(self, pool: PoolName, node: Node, start: int, device: Locations, host: Locations, stored: npt.NDArray[np.bool_]) -> None:
        """Consider neighbouring objects of one pool, the first of which is on page `start`."""
        missing = (device >= 0) & (host == ABSENT) & ~stored
        self.copies += gather_pieces(pool, node, start, device, missing)
        if self._state.storage is None:
            return
        idle = ~self._state.storing[pool][np.maximum(host, 0)]
        self.held += gather_pieces(pool, node, start, host, (host >= 0) & ~stored & idle)

    def counts(self) -> dict[PoolName, int]:
        """Host objects needed, by pool."""
        counts: dict[PoolName, int] = {}
        for piece in self.copies:
            counts[piece.pool] = counts.get(piece.pool, 0) + len(piece.sources)
        return counts

    def placed(self, handles: dict[PoolName, Locations]) -> list[Piece]:
        """The copies with their destinations."""
        taken = dict.fromkeys(handles, 0)
        placed = []
        for piece in self.copies:
            start = taken[piece.pool]
            taken[piece.pool] += len(piece.sources)
            placed.append(replace(piece, destinations=handles[piece.pool][start : taken[piece.pool]]))
        return placed
