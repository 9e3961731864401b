"""Bytes that an object takes in a store: its payload, rounded up as the medium does, a record, and memory.

Capacities of memory, quotas and guarantees count these bytes, because payload bytes alone bound nothing: an
object of one byte takes a block of 4 KiB in `file`, and a row of the tables of objects and pages in every
store.

    payload     |-- unit --|-- unit --|-- unit --|      whole units; `margin` bytes of each hold no payload
    beside it   |-- record on the medium --|-- Python objects --|-- rows of the tables --|      `fixed`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeVar

INDEX_BYTES: Final = 512
"""Memory of an object in the tables of objects and pages and in the eviction order.

Measured in full stores, with values and queues: at most 491 bytes (`tests/storage/test_tiny_objects.py`).
Some 150 more if each object has a layout of its own; what else is counted for an object covers these.
"""

Lengths = TypeVar("Lengths", int, Any)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that an object takes in one kind of store; by default its payload alone."""

    fixed: int = 0
    """Bytes of an object without payload."""
    unit: int = 1
    """Bytes in which the medium is given out."""
    margin: int = 0
    """Bytes of a unit that hold no payload."""

    def of(self, length: Lengths) -> Lengths:
        """Return what an object with a payload of `length` bytes takes; an array gives an array."""
        held = self.unit - self.margin
        return self.fixed + (length + (held - 1)) // held * self.unit
