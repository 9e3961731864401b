"""Memory of a simulated device: which pieces there are, and in which of them an address lies."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

# Above every address: sorts behind all ends of pieces that begin at the same address.
_BEYOND: Final = 1 << 64


class SimulatedError(RuntimeError):
    """An error that a driver reports, or that it should report."""


@dataclass(frozen=True, slots=True)
class MemoryPiece:
    """One allocation of `nbytes` bytes; `keeper` keeps it alive."""

    nbytes: int
    # One of "adopted", "device", "page-locked" (allocated here) and "locked" (the caller's).
    kind: str
    keeper: Any = None


class MemoryMap:
    """Pieces of memory that a simulated device may use, by address, for any thread."""

    def __init__(self) -> None:
        self._pieces: dict[int, MemoryPiece] = {}
        self._mapping = threading.Lock()
        # Filled by finalizers, which run on any thread and at any time, even within a loop over `_pieces`;
        # emptied under `_mapping`.
        self._dead: deque[tuple[int, str]] = deque()
        self._ends: list[tuple[int, int]] | None = None
        """Begin and end of every piece, sorted; None if out of date."""

    def keep(self, address: int, piece: MemoryPiece, owner: Any = None) -> None:
        """Add a piece, until it is dropped or `owner` is gone."""
        with self._table() as table:
            table[address] = piece
        if owner is not None:
            weakref.finalize(owner, self._dead.append, (address, piece.kind))

    def drop(self, address: int, kind: str) -> None:
        """Remove a piece; raise SimulatedError if there is none of this kind."""
        with self._table() as table:
            if address not in table or table[address].kind != kind:
                raise SimulatedError(f"there is no {kind} memory at {address:#x} to give back")
            del table[address]

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Whether a range has bytes in common with a piece."""
        with self._table() as table:
            return any(
                start < address + nbytes and address < start + piece.nbytes for start, piece in table.items()
            )

    def pieces(self, kind: str) -> list[tuple[int, int]]:
        """Return begin and end of every piece of a kind,."""
        with self._table() as table:
            return [(start, start + piece.nbytes) for start, piece in table.items() if piece.kind == kind]

    def kinds(self) -> Counter[str]:
        """Return the number of pieces by kind."""
        with self._table() as table:
            return Counter(piece.kind for piece in table.values())

    def check(self, address: int, nbytes: int) -> None:
        """Raise SimulatedError unless a range lies in one piece."""
        with self._mapping:
            if self._dead or self._ends is None:
                self._bury()
                self._ends = sorted((start, start + piece.nbytes) for start, piece in self._pieces.items())
            at = bisect_right(self._ends, (address, _BEYOND)) - 1
            start, end = self._ends[at] if at >= 0 else (0, 0)
        if nbytes < 1 or not start <= address < address + nbytes <= end:
            raise SimulatedError(
                f"{nbytes} bytes at {address:#x} are not within one piece of device or page-locked memory"
            )

    @contextmanager
    def _table(self) -> Iterator[dict[int, MemoryPiece]]:
        """Hold the table of all current memory, by address, for one thread at a time."""
        with self._mapping:
            self._bury()
            self._ends = None  # the caller may change the table
            yield self._pieces

    def _bury(self) -> None:
        while self._dead:
            address, kind = self._dead.popleft()
            if address in self._pieces and self._pieces[address].kind == kind:
                del self._pieces[address]
