"""Ends of copies that every rank applies at the same place of its work, so that their indices stay alike.

An engine whose ranks decide alike, each by itself, asks a cache on each rank. The caches answer alike if they
begin alike, are called alike, and nothing else changes them. What else does is the end of a copy, which comes
at another moment on each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tiercache.errors import TransferError

Ends: TypeAlias = npt.NDArray[np.int8]
Landing = Callable[[TransferError | None], None]
_ENDED, _FAILED = 2, 1


class AgreedLandings:
    """Ends of copies that wait until all ranks have them.

    Thread safety: any thread may `hold`; the rest is for the owner's thread.
    """

    def __init__(self, least: Callable[[Ends], Ends]) -> None:
        """`least` returns the least that any rank gives, element by element; all ranks call it at once."""
        self._least = least
        self._lock = threading.Lock()
        self._held: dict[int, tuple[Landing, TransferError | None]] = {}
        self._post: Callable[[Callable[[], None]], None] | None = None

    def hold(self, operation: object, land: Landing, error: TransferError | None) -> None:
        """Keep the end of a copy until `apply`."""
        with self._lock:
            if self._post is None:
                self._held[id(operation)] = land, error
                return
        self._post(partial(land, error))

    def apply(self, operations: Mapping[int, object]) -> None:
        """Apply the ends of those operations under way, by `id`, that have ended on all ranks.

        Each rank calls this at the same place of its work, with the same operations in the same order. What
        has failed on one rank has failed.
        """
        if not operations:
            return
        with self._lock:
            held = {name: self._held.get(name) for name in operations}
        mine = [0 if end is None else _ENDED if end[1] is None else _FAILED for end in held.values()]
        least = self._least(np.array(mine, np.int8)).tolist()
        for (name, end), common in zip(held.items(), least, strict=True):
            if common and end is not None:
                land, error = end
                with self._lock:
                    del self._held[name]
                if common == _FAILED and error is None:
                    error = TransferError("this copy has failed on another rank")
                land(error)

    def dissolve(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Apply all further ends without the other ranks, by `post`, because this rank closes its cache."""
        with self._lock:
            self._post, held = post, list(self._held.values())
            self._held.clear()
        for land, error in held:
            post(partial(land, error))
