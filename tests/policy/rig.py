"""Tools of the policy conformance suite: hand-made columns, and a small index that ranks by a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.index.states import ONE, publish_state, reserve_state, span_of
from tests.integrity import owned
from tiercache.core import ABSENT, Locations, PoolName, Tier, TokenArray
from tiercache.index import Eviction, HybridIndex, Match, Pin, Span
from tiercache.policy import CheckpointKind, Costs, Ending, ModelProfile, Policy, Reuse
from tiercache.policy.base import Column, Ranks

# PAGE: tokens of a page. BYTES: bytes of an object. BLOCKS: host blocks of an object.
PAGE: Final = 2
KV, STATE = PoolName.KV, PoolName.MAMBA
BYTES: Final = {KV: 1000, STATE: 7000}
BLOCKS: Final = {KV: 1, STATE: 5}
HUGE: Final = 2**40
COSTS: Final = Costs(
    ModelProfile("m", kv_bytes_per_token=1, state_bytes=1, flops_per_token=10.0, flops_per_context_token=2.0)
)
"""Tokens [start, end) cost 10 (end - start) + end^2 - start^2 FLOPs."""


# -- columns


@dataclass(frozen=True)
class PlainUnits:
    """Units as plain arrays; see `Units`."""

    count: int
    now: int
    page_tokens: int
    kind: Column
    last_access: Column
    created: Column
    hits: Column
    depth: Column
    children: Column
    replay: Column
    nbytes: Column
    checkpoint: Column
    lineage: Column
    grown: Column
    ending: Column
    expected: Column
    digest: Column
    covered: Column

    def __len__(self) -> int:
        return self.count

    @property
    def columns(self) -> Mapping[str, Column]:
        """Every column, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def take(self, rows: npt.NDArray[np.int64], now: int | None = None) -> PlainUnits:
        """Return the units at `rows`, at this time or at a later time `now`."""
        taken = {name: column[rows] for name, column in self.columns.items()}
        return PlainUnits(len(rows), self.now if now is None else now, self.page_tokens, **taken)


def units(
    count: int | None = None, now: int = 0, page_tokens: int = 64, **columns: npt.ArrayLike
) -> PlainUnits:
    """Make `count` units; by default as many as the longest column has entries.

    A number applies to all units. Columns that are not given are 0, except for `kind`, `replay` and `nbytes`,
    which are 1.
    """
    given = {name: np.atleast_1d(np.asarray(column, np.int64)) for name, column in columns.items()}
    if count is None:
        count = max(map(len, given.values()), default=1)
    default: dict[str, npt.ArrayLike] = dict.fromkeys(
        set(PlainUnits.__annotations__) - {"count", "now", "page_tokens"}, 0
    )
    default |= dict.fromkeys(("kind", "replay", "nbytes"), 1)
    return PlainUnits(
        count,
        now,
        page_tokens,
        **{name: np.broadcast_to(a, count).copy() for name, a in (default | given).items()},
    )


def random_units(count: int, seed: int = 0, now: int = 10_000) -> PlainUnits:
    """Make `count` units with random values in every column."""
    draw = np.random.default_rng(seed).integers
    depth = draw(1, 2000, count)
    last_access = draw(0, now + 1, count)
    return units(
        count, now, kind=draw(1, 3, count), last_access=last_access, created=last_access // 2,
        hits=draw(0, 5, count), depth=depth, children=draw(0, 4, count),
        replay=np.minimum(depth, draw(1, 500, count)), nbytes=draw(1, 1 << 28, count),
        checkpoint=draw(0, len(CheckpointKind), count), lineage=draw(0, 6, count),
        grown=np.minimum(depth, draw(0, 500, count)), ending=draw(0, len(Ending), count),
        digest=draw(-(2**63), 2**63, count), covered=draw(0, 2, count),
    )  # fmt: skip


EXTREMES: Final[Mapping[str, PlainUnits]] = {
    "one": units(1), "zeros": units(7), "depth 0": units(3, replay=1, now=5),
    "old": units(last_access=[0, 1, HUGE - 1, HUGE], now=HUGE),
    "large": units(nbytes=[1, HUGE], depth=HUGE, replay=[1, HUGE]),
    "worn": units(hits=HUGE, children=[0, 1, 2, HUGE], lineage=HUGE, grown=HUGE),
    "every kind": units(checkpoint=list(CheckpointKind), kind=[1, 2, 1, 2, 1, 2], covered=[0, 1, 0, 1, 0, 1]),
    "digests": units(digest=[-(2**63), -1, 0, 1, 2**63 - 1]),
    "one token a page": units(5, page_tokens=1, depth=3, replay=2),
    "branches only": units(4, children=3, depth=[1, 2, 3, 4]), "many": random_units(5000),
}  # fmt: skip


def reuse_of(given: PlainUnits, row: int = 0, *, evicted: bool = False) -> Reuse:
    """Return the reuse of one of the units, at the units' current time."""
    unit = {name: int(column[row]) for name, column in given.columns.items() if name in Reuse._fields}
    return Reuse(**unit, age=given.now - int(given.last_access[row]), evicted=evicted)


def hostile(policy: Policy) -> None:
    """Make every call that an owner can make, in no sensible order and with senseless values."""
    nothing = units(0)
    policy.learn(nothing, nothing)
    for given in EXTREMES.values():
        for row in range(min(10, len(given))):
            policy.reused(reuse_of(given, row, evicted=bool(row % 2)))
    policy.learn(nothing, random_units(50))
    policy.learn(random_units(50), nothing)
    for _ in range(1000):
        policy.reused(reuse_of(EXTREMES["old"], evicted=True))
    policy.learn(random_units(10, now=HUGE), random_units(10, now=HUGE))
    policy.learn(units(0, now=HUGE), units(0, now=HUGE))
    for digest in (0, 1, -1, 2**63 - 1, -(2**63), 7):
        policy.reused(reuse_of(units(digest=digest, now=5), evicted=True))


def ranked(policy: Policy, given: PlainUnits) -> Ranks:
    """Return the policy's ranks, after checking the properties that all ranks must have."""
    before = {name: column.copy() for name, column in given.columns.items()}
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        ranks = policy.rank(given)
    assert isinstance(ranks, np.ndarray)
    assert (ranks.dtype, ranks.shape) == (np.dtype(np.float64), (len(given),))
    assert (ranks > -np.inf).all(), "a rank is a number or infinite, never NaN"
    for name, column in given.columns.items():
        np.testing.assert_array_equal(column, before[name], f"the policy changed the column {name}")
    return ranks


# -- an index


def tokens_of(path: Sequence[int]) -> TokenArray:
    """Return the tokens of pages, each named by a number, followed by one more token."""
    return np.repeat(np.array([*path, 0], np.uint64), PAGE)[: len(path) * PAGE + 1]


SETUPS: Final = {"states": True, "stateless": False}
"""Whether an index has state pools, by the name of the kind of index."""


class Held(NamedTuple):
    """A pin and, by tier, the locations of the pages, and of the state at the end, that it holds."""

    pin: Pin
    pages: Mapping[Tier, Locations]
    state: Mapping[Tier, int]


class Rig:
    """An index that ranks by `policy`, and the calls that a controller makes on it.

    Evictions and pins are checked.

    Thread safety: one thread.
    """

    def __init__(self, policy: Policy, *, states: bool = True, seed: int = 0) -> None:
        self.index = HybridIndex(
            page_size=PAGE, namespace=bytes(32), page_pools=[KV], state_pools=[STATE] if states else [],
            policy=policy,
            object_bytes=BYTES, max_stored_pages=8, seed=seed,
        )  # fmt: skip
        self.has_states = states
        self.policy = policy
        self.held: list[Held] = []
        self._next = 0

    def fresh(self, count: int) -> Locations:
        """Return `count` slots or handles that were never used before."""
        self._next += count
        return np.arange(self._next - count, self._next)

    def match(self, path: Sequence[int]) -> Match:
        """Match the longest known prefix of `path`."""
        return self.index.match(tokens_of(path))

    def request(self, path: Sequence[int], depths: Sequence[int] | None = None) -> None:
        """Make one request: touch the known prefix, then insert all pages, and states at `depths`.

        The default for `depths` is the end of the path. The states get changing checkpoint kinds.
        """
        origin = self.index.touch(self.match(path), tokens_of(path))
        depths = [len(path)] if depths is None else [depth for depth in depths if depth <= len(path)]
        states = {depth: {STATE: int(self.fresh(1)[0])} for depth in depths} if self.index.state_pools else {}
        kinds = {depth: CheckpointKind(1 + (path[0] + depth) % 5) for depth in states}
        self.index.insert(
            tokens_of(path), {KV: self.fresh(len(path))}, states, checkpoints=kinds, origin=origin
        )

    def touch(self, path: Sequence[int]) -> None:
        """Make a request that inserts nothing."""
        self.index.touch(self.match(path), tokens_of(path))

    def copy(self, path: Sequence[int]) -> None:
        """Write the device's copy of the path through to the host: its next eviction is a demotion."""
        match = self.match(path)
        node, span = match.node, Span(match.node, 0, match.path_depth)
        pages, states = self.index.locations(node, span.end)
        with self.index.pinned(node, Tier.DEVICE, Tier.HOST):
            handles = np.where(pages[KV].device >= 0, self.fresh(len(span)), ABSENT)
            entered = self.index.residency.reserve(span, KV, Tier.HOST, handles)
            assert (self.index.residency.publish(span, KV, Tier.HOST, handles) == entered).all()
            if states and states[STATE].device >= 0:
                handle = int(self.fresh(1)[0])
                if reserve_state(self.index, node, STATE, Tier.HOST, handle):
                    assert publish_state(self.index, node, STATE, Tier.HOST, handle)

    def store(self, path: Sequence[int]) -> None:
        """Mark everything that is known of the path as stored."""
        match = self.match(path)
        with self.index.pinned(match):
            self.index.residency.mark_stored(
                Span(match.node, 0, match.path_depth), KV, np.ones(match.path_depth, np.bool_)
            )
            if self.index.state_pools and match.node.pages and match.node.end == match.path_depth:
                self.index.residency.mark_stored(span_of(match.node), STATE, ONE)

    def pin(self, path: Sequence[int], *tiers: Tier) -> None:
        """Pin the known prefix of the path in `tiers`, and remember its locations."""
        pin = self.index.pin(self.match(path), *tiers)
        pages, states = self.index.locations(pin.node, pin.node.end)
        self.held.append(
            Held(
                pin,
                {tier: (pages[KV].host if tier else pages[KV].device).copy() for tier in tiers},
                {tier: states[STATE].host if tier else states[STATE].device for tier in tiers if states},
            )
        )

    def unpin(self, which: int = 0) -> None:
        """Release the pin number `which`, modulo the number of pins held."""
        self.held.pop(which % len(self.held)).pin.release()

    def check_pins(self) -> None:
        """Check that everything pinned is still at its location."""
        for pin, was, state in self.held:
            pages, states = self.index.locations(pin.node, pin.node.end)
            for tier, before in was.items():
                now = pages[KV].host if tier else pages[KV].device
                assert (now[before >= 0] == before[before >= 0]).all(), f"a pinned page left the {tier}"
            for tier, at in state.items():
                assert at < 0 or at == (states[STATE].host if tier else states[STATE].device), "a pin is lost"

    def evict_device(self, pages: int, states: int = 0) -> Eviction:
        """Evict from the device, and check the result."""
        need = {KV: pages} | ({STATE: states} if self.has_states else {})
        answer = self._checked(Tier.DEVICE, lambda: self.index.evict_device(need))
        freed = {pool: len(answer.freed.get(pool, ())) for pool in self.index.pools}
        assert all(freed[pool] >= count for pool, count in need.items())
        assert pages or not freed[KV], "a need for states frees no page"
        return answer

    def evict_host(self, blocks: int) -> Eviction:
        """Evict `blocks` blocks from the host, and check the result."""
        answer = self._checked(Tier.HOST, lambda: self.index.evict_host(blocks, BLOCKS))
        assert sum(BLOCKS[pool] * len(at) for pool, at in answer.freed.items()) >= blocks
        return answer

    def host_blocks(self) -> int:
        """Return the number of blocks that an eviction could free on the host."""
        return sum(BLOCKS[pool] * count for pool, count in self.index.evictable(Tier.HOST).items())

    def left(self) -> list[int]:
        """Return every location in the device and host tiers."""
        return [
            at
            for tier in (Tier.DEVICE, Tier.HOST)
            for pool in self.index.pools
            for at in owned(self.index, tier, pool).tolist()
        ]

    def snapshot(self) -> Any:
        """Return the index's contents in a form that can be compared."""
        index = self.index
        where = [
            sorted(owned(index, tier, pool).tolist())
            for tier in (Tier.DEVICE, Tier.HOST)
            for pool in index.pools
        ]
        return where, [index.evictable(tier) for tier in Tier]

    def _checked(self, tier: Tier, evict: Callable[[], Eviction]) -> Eviction:
        pools = self.index.pools
        free, dead = self.index.evictable(tier), self._dead_weight(tier)
        before = {pool: set(owned(self.index, tier, pool).tolist()) for pool in pools}
        answer = evict()
        freed = {pool: answer.freed.get(pool, np.empty(0, np.int64)).tolist() for pool in pools}
        for pool, gone in freed.items():
            assert len(set(gone)) == len(gone)
            assert set(owned(self.index, tier, pool).tolist()) == before[pool] - set(gone)
            assert self.index.evictable(tier)[pool] == free[pool] - len(gone)
        assert answer.demoted + answer.lost == sum(map(len, freed.values()))
        self.check_pins()
        living = set().union(*freed.values()) - dead if tier is Tier.HOST else set(freed[KV]) - dead
        assert not living or dead <= set(freed[KV]), "dead weight goes first, whatever the policy says"
        return answer

    def _dead_weight(self, tier: Tier) -> set[int]:
        """Return the locations of the evictable pages that no state can use."""
        if not self.index.state_pools:
            return set()
        dead = [
            node.where[tier, 0] for node in self.index.nodes() if not node.is_alive and not node.pins[tier]
        ]
        return {at for row in dead for at in row.tolist() if at >= 0}
