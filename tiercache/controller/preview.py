"""Preview of a request: what the index knows of its prompt, without a lookup or an admission."""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.controller.context import ControllerContext
from tiercache.core import TokenArray, reusable_pages


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
