"""`hvd` as the eviction policy of vLLM's own CPU tier: a `CachePolicy` of vLLM 0.32 and 0.33.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 34359738368, "eviction_policy": "hvd"}}'

vLLM knows the name by the entry point `vllm.general_plugins`; docs/policies.md has the way without it.

vLLM's unit is a *chunk*: some blocks of a group of layers, whose key stands for all tokens up to their end.
It stays until those that stand on it have gone. Where there are states, pages on which none stands go first:

    attention    p1 <- p2 <- p3 <- p4      a chunk stands on the one before it
    states                   s3    s4      a state, before which none of its group is stored, on that beside
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from tiercache.integrations.policy_table import PolicyTable
from tiercache.policy import LEARN_EVERY, CheckpointKind, Units
from tiercache.policy.order import Front

_OWN: Final = ("upper", "below", "idle", "busy", "last")
"""Columns beside those of `PolicyTable`: the row of the chunk on which it stands (its own for none), how many
stored ones stand on it, whether it is stored and unread, a request uses it, and made none behind it.
"""


class _Request:
    """A request of which vLLM names the keys bit by bit."""

    def __init__(self, number: int, columns: object) -> None:
        self.number, self.columns = number, columns  # the columns are others once the tier was emptied
        self.chains: dict[int, list[OffloadKey]] = {}  # keys by group, in the order of the tokens
        self.places: dict[OffloadKey, int] = {}  # of each key in its chain
        self.inherited: dict[int, dict[str, int]] = {}  # lineage and growth of what it makes, by group
        self.held: list[OffloadKey] = []  # keys of chunks that stay until it is finished


class HvdCachePolicy(CachePolicy):  # type: ignore[misc]  # vLLM has no types
    """Chunks of vLLM's CPU tier, the least worth of which go first. Thread safety: none, as vLLM's own."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        """Forget all chunks, and what was learned of them."""
        self._table, self._chunks = PolicyTable(*_OWN), dict[OffloadKey, ChunkStatus]()
        self._rows, self._at = self._table.rows, self._table.at

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return a stored chunk."""
        return self._chunks.get(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Count the hits of a request, if it is new."""
        self._last_told = self._request_of(req_context)

    on_store_miss = on_request_access = touch

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """Add a chunk of a request, or of the one that was told last: vLLM 0.32 does not name it."""
        request = self._last_told if req_context is None else self._request_of(req_context)
        group = get_offload_group_idx(key)
        chain, place = request.chains.get(group, [key]), request.places.get(key, 0)
        near = next((n for n in range(place, 0, -1) if chain[n - 1] in self._chunks), 0)
        above = chain[near - 1]
        if near < place or not place:  # it is a state, or the first page
            beside = (c[place] for c in request.chains.values() if c is not chain and place < len(c))
            above = next((other for other in beside if other in self._chunks), key)
        row, self._chunks[key] = self._table.add_unit(key), chunk
        made = {
            "last_access": self._table.now, "depth": place + 1, "replay": place - near + 1,
            "checkpoint": CheckpointKind.END * (near < place), "upper": self._rows[above],
            "made": request.number, "idle": chunk.is_ready, "busy": 1, "last": 1,
        }  # fmt: skip
        for name, value in (dict.fromkeys(self._at, 0) | request.inherited.get(group, {}) | made).items():
            self._at[name][row] = value
        request.held.append(key)
        self._count_above(row, 1)

    def on_request_finished(self, key_groups: Any, inserted: Any, reused: Any, context: ReqContext) -> None:
        """Let the chunks of the request go, and note where it ended: its session may go on there."""
        request = self._request_of(context)
        self._at["busy"][[self._rows[key] for key in request.held if key in self._rows]] = 0
        for chain in request.chains.values():
            self._at["ends"][[self._rows[key] for key in chain if key in self._chunks][-1:]] = 1

    def mark_evictable(self, key: OffloadKey) -> None:
        """Note that the chunk is stored, and not read."""
        self._at["idle"][self._rows[key]] = 1

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Note that the chunk is read."""
        self._at["idle"][self._rows[key]] = 0

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict `n` chunks that nobody uses and that are not `protected`, or none if there are fewer."""
        at, gone = self._at, list[tuple[OffloadKey, ChunkStatus]]()
        free = at["idle"] > 0
        free[[self._rows[key] for key in protected if key in self._chunks]] = False
        if np.count_nonzero(free) < n:
            return None
        front: Front[tuple[float, int, int, int]] = Front(steady=False, fewest=1)
        is_state = at["checkpoint"] > 0
        while len(gone) < n:
            if not len(front):  # rank all on which nothing stands, and take those that are worth least
                ends = np.flatnonzero(free & (at["below"] + at["busy"] == 0))
                rows = ends if len(ends) else np.flatnonzero(free)
                ranks = self._table.policy.rank(self._units(rows)) * (is_state[rows] | ~is_state.any())
                low = front.choose(ranks)
                columns = (ranks[low], at["last_access"][rows[low]], -at["depth"][rows[low]], rows[low])
                front.fill([*zip(*(column.tolist() for column in columns), strict=True)], self._table.now)
            (rank, used, depth, row), _ = front.pop()
            if free[row]:
                free[row], key, upper = False, OffloadKey(self._table.keys[row]), int(at["upper"][row])
                gone.append((key, self._chunks[key]))
                self.remove(key)
                if at["made"][upper] == at["made"][row] and not at["below"][upper] + at["busy"][upper]:
                    front.push((rank, used, depth + 1, upper))  # the rest of what the request made
        return gone

    def remove(self, key: OffloadKey) -> None:
        """Take a chunk out, and remember it."""
        del self._chunks[key]
        self._at["idle"][self._rows[key]] = 0
        self._count_above(self._rows[key], -1)
        self._table.drop(key)

    def _count_above(self, row: int, by: int) -> None:
        """Count a chunk that comes or goes at the one on which it stands."""
        at, upper = self._at, self._at["upper"][row]
        is_other = at["made"][upper] != at["made"][row]
        if upper != row:
            at["below"][upper] = max(0, at["below"][upper] + by)
            at["children"][upper] = max(0, at["children"][upper] + by * is_other)
            at["last"][upper] &= is_other or by < 0

    def _request_of(self, context: ReqContext) -> _Request:
        """Return what is known of a request, with the keys that vLLM has named since; a new one is a tick."""
        request = cast(_Request | None, context.get_state(_Request))
        is_new = request is None or request.columns is not self._at
        if request is None or is_new:
            self._table.now += 1
            request = _Request(self._table.now, self._at)
            context.set_state(request)
        ends: dict[OffloadKey, int] = context._offload_key_positions  # nothing public lists the keys
        for key in [*ends][len(request.places) :]:
            chain = request.chains.setdefault(get_offload_group_idx(key), [])
            self._table.page_tokens = self._table.page_tokens if chain else ends[key]
            request.places[key] = len(chain)
            chain.append(key)
        for group, chain in request.chains.items() if is_new else ():
            request.inherited[group] = self._find(request, chain)
        if is_new and self._table.now % LEARN_EVERY == 0:
            is_end = (self._at["below"] == 0) | (self._at["children"] > 0)
            live = [row for key in self._chunks if is_end[row := self._rows[key]]]
            lost = [row for key in self._table.gone if self._at["last"][row := self._rows[key]]]
            self._table.policy.learn(self._units(live), self._units(lost))
        return request

    def _find(self, request: _Request, chain: list[OffloadKey]) -> dict[str, int]:
        """Tell the policy of the hit, at the deepest stored chunk, and of a miss, at a deeper evicted one."""
        at, lineage, known = self._at, 0, 0
        for table in (self._chunks, self._table.gone):
            key = next((key for key in reversed(chain) if key in table), None)
            if key is None or request.places[key] < known:
                continue
            row, known = self._rows[key], request.places[key] + 1
            lineage = self._table.hit(row, evicted=table is self._table.gone)
            request.held.append(key)
            at["busy"][row] = table is self._chunks
        return {"lineage": lineage, "grown": len(chain) - known}

    def _units(self, rows: Any) -> Units:
        """Return rows as units. The bytes of a page go with a state that is the only one on it."""
        at = np.asarray(rows, np.int64)
        alone = (self._at["checkpoint"][at] > 0) & (self._at["below"][self._at["upper"][at]] < 2)
        return self._table.units(at, np.where(alone, self._at["replay"][at] + 1, 1))
