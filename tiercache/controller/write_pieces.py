"""Pieces in which a commit goes from device to host and on to storage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tiercache.core import PoolName

if TYPE_CHECKING:
    from tiercache.controller.context import ControllerContext
    from tiercache.controller.operations import PageRun

_FIRST_BYTES: Final = 8 << 20
"""Size in bytes of the first piece of a commit, or `piece_bytes` of the options if that is less."""
_MAX_BYTES: Final = 32 << 20
"""Size in bytes up to which pieces grow."""


class Chain:
    """Page keys of one commit, and the pages that storage refused. All writes of a commit share one chain.

    Thread safety: the owner's thread (the engine's thread, which calls the controller) adds `keys`. Write
    threads update `refused`, and so does the owner's thread when a write hangs. If several writes of a chain
    run at the same time, a state may be offered before a page that it needs.
    """

    def __init__(self, keys: dict[int, bytes], *, stays_on_host: bool = False) -> None:
        self.keys = keys
        """Page keys by page number."""
        self.stays_on_host = stays_on_host
        """Whether a later flush finds on the host what storage does not take now, and offers it again."""
        self.values: dict[PoolName, dict[bytes, float]] = {}
        """Values of the objects (see `Values`), by pool and page key."""
        self.refused: set[int] = set()
        """Numbers of the pages that storage was offered and has not confirmed as stored."""
        self.piece_bytes = 0
        """Number of bytes of the next piece; 0 before the first."""


@dataclass(eq=False, slots=True)
class Piece:
    """Objects of one write that move together."""

    copied: list[PageRun] = field(default_factory=list)
    """Runs to copy from device to host."""
    stored: list[PageRun] = field(default_factory=list)
    """Runs to write to storage, once all are on the host."""
    is_on_host: bool = False
    """Whether all of the piece is on the host."""


def cut_pieces(
    context: ControllerContext, chain: Chain, copied: Iterable[PageRun], held: Iterable[PageRun]
) -> list[Piece]:
    """Return the pieces of one write, in the order of the path. There is one at least.

    `held` are runs that are on the host already. The first piece of a commit has `_FIRST_BYTES`, so that
    storage begins early. Each further piece is twice as large, up to `_MAX_BYTES`, because a
    piece costs a call of the transfer engine, and one of the store if that waits for it.
    """
    chain.piece_bytes = chain.piece_bytes or min(_FIRST_BYTES, context.options.piece_bytes)
    # A state comes after the page on which it ends.
    order = sorted(
        [*((run, True) for run in copied), *((run, False) for run in held)],
        key=lambda one: (one[0].span.start, one[0].pool in context.index.state_pools),
    )
    pieces, left = [Piece()], chain.piece_bytes
    for run, is_copied in order:
        each, at = context.host[run.pool].geometry.nbytes, 0
        while at < len(run.destinations):
            if left <= 0:
                pieces.append(Piece())
                chain.piece_bytes = left = max(chain.piece_bytes, min(2 * chain.piece_bytes, _MAX_BYTES))
            part = run.part(at, at - -left // each)
            pieces[-1].stored.append(part)
            if is_copied:
                pieces[-1].copied.append(part)
            at += len(part.destinations)
            left -= len(part.destinations) * each
    return pieces


def count_objects(pieces: Iterable[Piece]) -> int:
    """Return the number of objects that these pieces write to storage."""
    return sum(len(run.destinations) for piece in pieces for run in piece.stored)
