"""Lookup of a prompt: what the index knows of it, and the query that asks storage about the rest."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import numpy as np

from tiercache.controller.beliefs import heal
from tiercache.controller.state import ControllerState
from tiercache.controller.store_calls import StoreCall
from tiercache.core import PoolTransfer, PoolTransferResult, Reason, StorageExtra, TokenArray
from tiercache.index import Match
from tiercache.keys import KEY_BYTES, page_keys

_log = logging.getLogger(__name__)


class StorageQuery:
    """One `batch_exists_v2` on a background thread.

    Once `done` is set, `result` holds the answer, or None if the call failed. `reason` says why it failed, and also names an outage that it
    met.

    Thread safety: made and read on the owner's thread; the call runs on another.
    """

    kind = "query"
    pins = ()

    def __init__(self, state: ControllerState, tokens: TokenArray, extra: bytes, near_pages: int) -> None:
        self.done = False
        self.result: PoolTransferResult | None = None
        self.reason = Reason.NONE
        self._state = state
        self._tokens = tokens
        self._extra = extra
        self._near_pages = near_pages
        assert state.storage is not None
        probe = partial(state.storage.probe, state.index.page_pools[0], bytes(KEY_BYTES), read=False)
        state.begin(self)
        state.queries.submit(StoreCall(self._run, landed=self._land, lost=self._lose, late=lambda _: None, probe=probe))

    def _run(self) -> tuple[PoolTransferResult | None, Reason]:
        state = self._state
        assert state.storage is not None
        try:
            keys = page_keys(state.namespace, self._tokens, state.page_size, extra=self._extra)
            transfers = [
                PoolTransfer(p, hit_policy=g.hit_policy, trailing=g.trailing) for p, g in ((p, state.host[p].geometry) for p in state.pools)
            ]
            near = keys[: self._near_pages]
            result = state.storage.batch_exists_v2(keys[self._near_pages :], transfers, StorageExtra(near))
            return result, result.reason
        except Exception:  # noqa: BLE001  a store that breaks its contract costs this query, never the thread; counted as an io_error miss
            _log.exception("asking storage failed")
            return None, Reason.IO_ERROR

    def _land(self, answer: tuple[PoolTransferResult | None, Reason]) -> bool:
        (self.result, self.reason), self.done = answer, True
        if self.result is not None and self.reason is Reason.NONE:
            heal(self._state, self._tokens, self._extra, self.result)
        self._state.end(self)
        return self.result is not None

    def _lose(self, reason: Reason, begun: bool) -> None:
        self._land((None, reason))


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prompt and what was known of it at the time.

    `query` is None where storage was not asked; `unasked` then says why, and is NONE if there was nothing to ask for.
    """

    tokens: TokenArray
    extra: bytes
    match: Match
    near_tokens: int
    query: StorageQuery | None = None
    unasked: Reason = Reason.NONE


def look_up(state: ControllerState, tokens: TokenArray, extra: bytes) -> Lookup:
    """Match a prompt in the index, and ask storage in the background about the pages beyond those that are near."""
    match = state.index.match(tokens, extra)
    near_tokens = match.near_depth * state.page_size
    limit = (len(tokens) - 1) // state.page_size
    if match.near_depth >= limit:
        return Lookup(tokens, extra, match, near_tokens)
    if state.storage is None:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.DISABLED)
    if (limit - match.near_depth) * state.page_size < state.options.min_fetch_tokens:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.NOT_WORTH)
    if state.queries.is_away:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.UNAVAILABLE)
    if state.in_flight("query") >= state.options.max_queries:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.BUSY)
    query = StorageQuery(state, tokens[: limit * state.page_size], extra, _near_run(state, match, limit))
    return Lookup(tokens, extra, match, near_tokens, query)


def _near_run(state: ControllerState, match: Match, limit: int) -> int:
    """Return how many leading pages device or host hold, whether or not a state makes them restorable."""
    pages, _ = state.index.locations(match, min(match.path_depth, limit))
    present = np.ones(min(match.path_depth, limit), np.bool_)
    for at in pages.values():
        present &= (at.device >= 0) | (at.host >= 0)
    return int(np.logical_and.accumulate(present).sum())
