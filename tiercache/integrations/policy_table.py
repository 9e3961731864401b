"""`PolicyTable`: what `hvd` knows of the units of a tier that an engine owns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np

from tiercache.policy import Costs, ModelProfile, Reuse, Units, policy_named
from tiercache.policy.base import Column

_OF_UNITS: Final = ("last_access", "hits", "depth", "children", "replay", "checkpoint", "lineage", "grown")


class _Units(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.depth)


class PolicyTable:
    """Columns of the units that are stored, and of at most as many that were evicted. Thread safety: none.

    `at` has those of `Units`, the request that made a unit, whether one ended there, and what `own` names.
    """

    def __init__(self, *own: str) -> None:
        profile = ModelProfile("tokens", 1, 1, flops_per_token=1.0, flops_per_context_token=0.0)
        self.policy: Final = policy_named("hvd", Costs(profile))
        self.now, self.page_tokens = 0, 1
        self.rows: Final[dict[bytes, int]] = {}  # of stored and of evicted units
        self.gone: Final[dict[bytes, None]] = {}  # evicted units, in the order in which they went
        self.keys: Final[list[bytes]] = []  # of each row
        self.at: Final = {name: np.zeros(0, np.int64) for name in (*_OF_UNITS, "made", "ends", *own)}
        self._free: Final[list[int]] = []

    def add_unit(self, key: bytes) -> int:
        """Return the row of a unit that is stored from now on, with what is remembered of it, or zeros."""
        if key not in self.rows:
            if not self._free:
                more = len(self.keys) + 64
                self._free.extend(range(len(self.keys), len(self.keys) + more))
                self.keys.extend([b""] * more)
                for name, column in self.at.items():
                    self.at[name] = np.append(column, np.zeros(more, np.int64))
            row = self.rows[key] = self._free.pop()
            self.keys[row] = key
            for column in self.at.values():
                column[row] = 0
        self.gone.pop(key, None)
        return self.rows[key]

    def drop(self, key: bytes) -> None:
        """Remember a unit as evicted, and forget the one that went first if there are too many."""
        self.gone[key] = None
        if 2 * len(self.gone) > len(self.rows):
            first = next(iter(self.gone))
            del self.gone[first]
            self._free.append(self.rows.pop(first))

    def hit(self, row: int, *, evicted: bool) -> int:
        """Count a hit, or a miss of an evicted unit; return the lineage of what a request makes behind it.

        The hit counts for all that was made and hit with the unit before it.
        """
        at = self.at
        if age := self.now - int(at["last_access"][row]):
            told = {name: int(at[name][row]) for name in _OF_UNITS if name in Reuse._fields}
            self.policy.reused(Reuse(**told, ending=0, digest=0, age=age, evicted=evicted))
            run = at["depth"] <= at["depth"][row]
            for name in ("made", "hits", "checkpoint", "last_access"):
                run &= at[name] == at[name][row]
            at["hits"][run], at["last_access"][run] = at["hits"][row] + 1, self.now
        return int(at["lineage"][row]) + 1 if at["ends"][row] else 0

    def units(self, rows: Any, nbytes: Column | None = None) -> Units:
        """Return rows as units, of one byte each if nothing else is said."""
        at = np.asarray(rows, np.int64)
        told, zero = {name: self.at[name][at] for name in _OF_UNITS}, np.zeros(len(at), np.int64)
        told |= dict.fromkeys(("created", "ending", "expected", "digest", "covered"), zero)
        told |= {"kind": zero + 1, "nbytes": zero + 1 if nbytes is None else nbytes}
        return cast(Units, _Units(now=self.now, page_tokens=self.page_tokens, **told))
