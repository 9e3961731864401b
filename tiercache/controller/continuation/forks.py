"""Forks: several continuations of one prompt, which share its pages."""

from __future__ import annotations

from collections.abc import Mapping

from tiercache.controller.admission import Admission
from tiercache.controller.context import ControllerContext
from tiercache.controller.prefetch import Lookup
from tiercache.core import CacheTransferUnits, PoolName
from tiercache.errors import InputError, SlotError


def fork_admission(
    context: ControllerContext,
    source: Admission,
    *,
    tokens: int | None,
    states: int,
    written: int,
    live: Mapping[PoolName, int] | None,
    stream: int,
) -> Admission:
    """Return an admission that goes on where `source` is; `HybridCacheController.fork` explains it."""
    source.require_started()
    page, sequence = context.page_size, source.sequence
    tokens = len(sequence) if tokens is None else tokens
    covered = source.slots.pages * page
    if tokens < len(sequence):
        raise InputError(
            f"a fork for {tokens} tokens cannot hold the {len(sequence)} tokens of its source; ask for at"
            " least that many"
        )
    if not 0 <= written <= min(tokens, covered):
        raise InputError(
            f"{written} written tokens cannot be copied; the source has slots for {covered}, and the fork"
            f" asks for {tokens}"
        )
    if states < (live is not None):
        raise InputError(f"{states} states cannot be reserved; pass 0 or more, and 1 or more with `live`")
    if live is not None:
        source.slots.check_states([live])
        if not live:
            raise SlotError("there is no state pool, so that no live state can be copied; leave `live` out")
    node, match = source.shared_node(source.slots.pages), context.index.match(sequence, source.lookup.extra)
    lookup = Lookup(sequence, source.lookup.extra, match, node.end * page)
    fork = Admission(context, lookup, tokens, states, context.clock(), context.options.prefetch, shared=node)
    try:
        if source.pages and written > node.end * page:
            here = slice(node.end, -(-written // page))
            context.engine.fork(
                [
                    CacheTransferUnits(p, table[here], fork.pages[p][here])
                    for p, table in source.pages.items()
                ],
                stream=stream,
            )
        if live is not None:
            fork.live_states = fork.slots.copy_states(live, stream)
    except BaseException:
        fork.close()
        raise
    return fork
