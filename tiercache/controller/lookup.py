"""Look-up of a prompt: its match in the index, and the query of storage about what is not near."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from tiercache.controller.context import ControllerContext
from tiercache.controller.depths import near_runs
from tiercache.controller.ranks.landings import Codes, answer_codes
from tiercache.controller.store_calls import StoreCall
from tiercache.core import (
    ABSENT,
    PoolName,
    PoolPresence,
    PoolTransfer,
    PoolTransferResult,
    Reason,
    Tier,
    TokenArray,
    as_tokens,
    full_pages,
    restorable_prefixes,
    reusable_pages,
)
from tiercache.errors import TokenError
from tiercache.index import Match, Node, Span
from tiercache.keys import KEY_BYTES, page_keys

_MAX_QUERIES: Final = 64
"""Maximum number of queries in flight. At the maximum, a lookup does not ask storage."""


@dataclass(frozen=True, slots=True)
class Preview:
    """Knowledge of the index about a prompt; depths are in tokens.

    A request restores less if something is evicted or lost before, or if it is not worth restoring; it
    restores more if storage has more than the index knows of.
    """

    restored: int
    """Deepest depth that objects in any tier restore; 0 for none."""
    checkpoints: tuple[int, ...]
    """Depths, ascending, at which the prefill from `restored` on should leave states."""


def preview(context: ControllerContext, tokens: TokenArray, extra: bytes) -> Preview:
    """Return what the index knows of `tokens`; storage is not asked, and nothing changes."""
    page_size = context.page_size
    match = context.index.match(tokens, extra, limit=reusable_pages(len(tokens), page_size))
    depths = context.index.plan_checkpoints(match, tokens, match.depth).depths
    return Preview(match.depth * page_size, tuple(depth * page_size for depth in depths))


class StorageQuery:
    """Query about the pages of one prompt: one `batch_exists_v2` on a background thread."""

    kind = "query"

    def __init__(self, context: ControllerContext, tokens: TokenArray, extra: bytes, near_pages: int) -> None:
        self.done = False
        """Whether the query has ended; `result` and `reason` are valid only then."""
        self.result: PoolTransferResult | None = None
        """Answer of storage; None if the call failed."""
        self.reason = Reason.NONE
        """Reason why the call failed, or why storage could not answer."""
        self._context = context
        self._tokens = tokens
        self._extra = extra
        self._near_pages = near_pages
        """Number of pages, from the start, that are not asked for because they are near."""
        assert context.storage is not None
        probe = partial(context.storage.probe, context.pools[0], bytes(KEY_BYTES), read=False)
        context.in_flight.begin(self)
        codes = self._codes(full_pages(len(tokens), context.page_size))
        call = StoreCall(self._background_query, self._land, self._lose, probe=probe, codes=codes)
        context.queries.submit(call)

    def _background_query(self) -> tuple[PoolTransferResult | None, Reason]:
        context = self._context
        keys = page_keys(context.namespace, self._tokens, context.page_size, extra=self._extra)
        shapes = [(pool, context.host[pool].geometry) for pool in context.pools]
        transfers = [PoolTransfer(p, hit_policy=g.hit_policy, trailing=g.trailing) for p, g in shapes]
        result = context.call_storage(
            lambda storage: storage.batch_exists_v2(keys, transfers, self._near_pages), None, "asking storage"
        )
        return result, Reason.IO_ERROR if result is None else result.reason

    def _codes(self, pages: int) -> Codes:
        context, codes = self._context, answer_codes(dict.fromkeys(self._context.pools, pages))

        def unpack(found: Sequence[int]) -> tuple[PoolTransferResult | None, Reason]:
            if (answer := codes.unpack(found)) is None:
                return None, Reason.IO_ERROR
            present = {pool: np.array(there, np.bool_) for pool, there in answer[0].items()}
            policies = {pool: context.host[pool].geometry.hit_policy for pool in present}
            presence = {pool: PoolPresence(policies[pool], there) for pool, there in present.items()}
            result = restorable_prefixes(presence, PoolName.KV if context.index.page_pools else None)
            return replace(result, present=present, reason=answer[1]), answer[1]

        return Codes(codes.size, lambda got: codes.pack(got[0] and (got[0].present, got[1])), unpack)

    def _land(self, answer: tuple[PoolTransferResult | None, Reason]) -> bool:
        (self.result, self.reason), self.done = answer, True
        if self.result is not None and self.reason is Reason.NONE:
            forget_missing(self._context, self._tokens, self._extra, self.result)
        self._context.in_flight.end(self)
        return self.result is not None

    def _lose(self, reason: Reason, begun: bool) -> None:
        self._land((None, reason))


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prompt, and what was known about it when it was looked up."""

    tokens: TokenArray
    extra: bytes
    """Bytes that the keys cover besides the tokens (see `keys.sequence_extra`)."""
    match: Match
    """Match of the prompt in the index."""
    near_tokens: int
    """Number of tokens that can be restored from device and host."""
    query: StorageQuery | None = None
    """Query of storage about the prompt; None if storage was not asked."""
    unasked: Reason = Reason.NONE
    """Reason why storage was not asked; NONE if storage was asked, or if device and host have everything."""


def look_up(
    context: ControllerContext, tokens: TokenArray, extra: bytes, *, limit: int | None = None
) -> Lookup:
    """Match a prompt in the index, and ask storage in the background about pages that are not near.

    `limit`, in pages, is the deepest depth of interest. By default, at least one token is left to compute.
    """
    limit = reusable_pages(len(tokens), context.page_size) if limit is None else limit
    match = context.index.match(tokens, extra, limit=limit)
    near_tokens = match.near_depth * context.page_size
    if match.near_depth >= limit:
        return Lookup(tokens, extra, match, near_tokens)
    if context.storage is None:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.DISABLED)
    if context.queries.is_suspended:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.UNAVAILABLE)
    if context.in_flight.count("query") >= _MAX_QUERIES:
        return Lookup(tokens, extra, match, near_tokens, unasked=Reason.BUSY)
    _, near_pages = near_runs(context, match, limit)
    query = StorageQuery(context, tokens[: limit * context.page_size], extra, near_pages)
    return Lookup(tokens, extra, match, near_tokens, query)


def own_tokens(tokens: Any) -> TokenArray:
    """Return the tokens of a prompt as an array that nobody else writes to; TokenError if there are none."""
    prompt = as_tokens(tokens)
    if not len(prompt):
        raise TokenError("the prompt is empty; pass at least one token")
    # The engine may reuse its token buffer while the request goes on.
    return prompt.copy() if prompt is tokens or prompt.base is not None else prompt


def forget_missing(
    context: ControllerContext, tokens: TokenArray, extra: bytes, result: PoolTransferResult
) -> None:
    """Drop the notes of stored objects on this prompt's path that storage has just reported missing.

    An object that was stored after the query began loses its note too. The next commit then offers this
    object again, and the store finds that it is stored already.
    """
    index = context.index
    match = index.match(tokens, extra)
    path = list(index.node_at(match, match.path_depth).path())
    with ExitStack() as pins:
        for node in path:  # without a pin, a node that loses all its objects would be removed
            pins.enter_context(index.pinned(node))
        for node in path:
            _drop_notes(context, node, match.path_depth, result)


def _drop_notes(context: ControllerContext, node: Node, depth: int, result: PoolTransferResult) -> None:
    """Drop notes of objects on one edge, where `result` says that storage does not have the object.

    The objects are the edge's pages within the first `depth` pages of the path, and the state at its end.
    """
    # The answer may end inside this edge. Notes behind the end of the answer stay:
    #   path       0 ......... start ............... node.end
    #   present    |===========|=======|
    #   here                   |=======|
    index, start = context.index, node.end - node.pages
    for pool, present in result.present.items():
        here = present[start : min(node.end, depth)]
        if pool in index.state_pools:
            believed = node.state(Tier.STORAGE, index.state_pools.index(pool)) != ABSENT
            lost = int(believed and node.pages > 0 and len(here) == node.pages and not here[-1])
            if lost:
                index.forget_stored(Span(node, node.end - 1, node.end), pool, np.ones(1, np.bool_))
        else:
            gone = node.where[Tier.STORAGE, index.page_pools.index(pool)] >= 0
            gone[: len(here)] &= ~here
            gone[len(here) :] = False
            lost = int(np.count_nonzero(gone))
            if lost:
                index.forget_stored(Span(node, start, node.end), pool, gone)
        if lost:
            context.metrics.increment("forgotten_objects_total", pool, by=lost)
