"""`hvd` as the eviction policy of KVCR 0.1: `KVCachePolicy`s that engines take by their qualified names.

KVCR asks for a block's score when the block may go, and keeps it until the block is used again, while the
value of a block falls with its age. So a score is a time: when the block will be worth as little as those
that are evicted now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from kvcr.policy import G3LRUPolicy, LRUPolicy
from kvcr.types import BlockMeta, CacheTier

from tiercache.integrations.policy_table import PolicyTable
from tiercache.policy import LEARN_EVERY
from tiercache.policy.base import Column, Ranks

_TICK: Final = 0.01  # seconds
_AGES: Final = 0.75 * 2.0 ** np.arange(1, 22)
"""Ages in ticks at which values are compared: the middles of the buckets of `hvd`."""


class HvdPolicy(LRUPolicy):  # type: ignore[misc]  # KVCR has no types
    """Scores of the blocks of all tiers; what is evicted is dropped. Thread safety: none, as KVCR's own.

    A block is worth as much as the best sequence that it was aligned in; others go by KVCR's own LRU.
    """

    def __init__(self) -> None:
        self._table: Final = PolicyTable()
        self._until: Final[dict[bytes, float]] = {}
        """Times up to which the blocks of sequences are worth more than the level."""
        self._values: Final[dict[tuple[int, ...], Ranks]] = {}
        """Lowest value of a class of blocks up to each of `_AGES`, until the policy learns anew."""
        self._level = math.inf
        """Mean value, when they were evicted, of about as many blocks as are stored; infinite before."""
        self._sequences = 0

    def eviction_score(self, meta: BlockMeta, source: CacheTier) -> float:
        """Return the time at which the block is worth no more than what is evicted now."""
        least: float = super().eviction_score(meta, source)
        until = self._until.get(bytes(meta.block_key), least)
        return float(max(least, until - max(meta.position, 0) * math.ulp(until)))

    def on_remove(self, meta: BlockMeta) -> None:
        """Take a block out, and remember it."""
        key, table = bytes(meta.block_key), self._table
        if self._until.pop(key, None) is not None:
            row = table.rows[key]
            value = float(np.interp(table.now - table.at["last_access"][row], _AGES, self._values_of(row)))
            was = self._level if math.isfinite(self._level) else value
            self._level = was + (value - was) / max(LEARN_EVERY, len(self._until))
            table.drop(key)

    def on_align_sequence(self, blocks: Sequence[BlockMeta], use_current_time: bool) -> None:
        """Count a hit at the deepest block that was in a sequence before, and rank all blocks anew."""
        table, keys = self._table, [bytes(block.block_key) for block in blocks]
        table.now = max([table.now, *(int((block.last_access or 0.0) / _TICK) for block in blocks)])
        self._sequences += 1
        if self._sequences % LEARN_EVERY == 0:
            is_end = (table.at["ends"] > 0) | (table.at["children"] > 0)
            ends = [[n for key in of if is_end[n := table.rows[key]]] for of in (self._until, table.gone)]
            table.policy.learn(*map(table.units, ends))
            self._values.clear()
        stored, evicted = ([n for n, key in enumerate(keys) if key in of] for of in (self._until, table.gone))
        rows = np.array([table.add_unit(key) for key in keys], np.int64)
        at, lineage, known = table.at, 0, 0
        for found in (stored, evicted):
            if found and found[-1] >= known:
                row, known = int(rows[found[-1]]), found[-1] + 1
                lineage = table.hit(row, evicted=found is evicted)
                if found is stored:
                    at["children"][row] += known < len(rows)
                    self._keep(rows[:known])
        made = {"made": self._sequences, "last_access": table.now, "lineage": lineage, "replay": 1}
        for name, value in (made | dict.fromkeys(("hits", "children", "ends"), 0)).items():
            at[name][np.delete(rows, stored)] = value
        at["depth"][rows], at["ends"][rows[-1]] = np.arange(len(rows)) + 1, 1
        self._keep(rows)

    def _keep(self, rows: Column) -> None:
        """Keep blocks at least as long as the last of them is worth it."""
        stays = float(np.interp(-self._level, -self._values_of(int(rows[-1])), _AGES, left=0.0))
        until = (self._table.now + stays) * _TICK
        for row in rows.tolist():
            key = self._table.keys[row]
            self._until[key] = max(self._until.get(key, until), until)

    def _values_of(self, row: int) -> Ranks:
        found = (*(int(self._table.at[name][row]).bit_length() for name in ("hits", "lineage", "children")),)
        if found not in self._values:
            units = self._table.units([row] * len(_AGES))
            units.last_access = units.now - _AGES.astype(np.int64)  # type: ignore[misc]
            self._values[found] = np.minimum.accumulate(self._table.policy.rank(units))
        return self._values[found]


class G3HvdPolicy(HvdPolicy, G3LRUPolicy):  # type: ignore[misc]
    """The same, where blocks that are evicted from memory move to the tier G3."""
