"""The eviction order by values, beside a plain model that computes every rank anew."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log2

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.examples import example_count
from tests.storage.integrity import check_residents
from tests.storage.resident_model import HYBRID, KV, PLAIN, STATE, Everything, digest, page_of, put, remove
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.residents import Residents
from tiercache.storage.values import HALF_LIFE, usable_hints
from tiercache.testing.objects import page_key

PAGES = 14
NUMBERS = {digest(n): n for n in range(5000)}


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Hint:
    rank: float
    worker: int | None
    """None for a rank that came from a later page."""


@dataclass
class Page:
    """A page of the model: a tree in which page n follows page `up`, all with KV."""

    up: int | None
    used: int
    when: float
    state: bool = False
    kv_hint: Hint | None = None
    state_hint: Hint | None = None
    children: set[int] = field(default_factory=set)


class ValuesMachine(RuleBasedStateMachine):
    """Random hints, uses and evictions: each takes the unit that the model ranks lowest. No state goes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.residents = Residents(clock=self.clock)
        self.order = EvictionOrder(self.residents)
        self.pages: dict[int, Page] = {}
        self.ticks = 0
        self.hinted = False
        self.logarithms: list[float] = []

    @initialize(count=st.integers(2, PAGES), seed=st.randoms(use_true_random=False))
    def fill(self, count: int, seed: object) -> None:
        for _ in range(count):
            self.store(len(self.pages), None if seed.random() < 0.3 else 10**6)  # type: ignore[attr-defined]

    @rule(name=st.integers(0, PAGES - 1), above=st.none() | st.integers(0, PAGES - 1))
    def store(self, name: int, above: int | None) -> None:
        if name in self.pages:
            return
        above = None if above is None or not self.pages else sorted(self.pages)[above % len(self.pages)]
        put(self.residents, name, above)
        self.pages[name] = Page(above, 0, 0.0)
        if above is not None:
            self.pages[above].children.add(name)
        self.count_use(name)

    @rule(name=st.integers(0, PAGES - 1))
    def store_state(self, name: int) -> None:
        if name in self.pages and not self.pages[name].state:
            put(self.residents, name, layout=STATE)
            self.pages[name].state = True
            self.count_use(name)

    @rule(name=st.integers(0, PAGES - 1))
    def use(self, name: int) -> None:
        if name in self.pages:
            self.residents.touch(self.residents.find(digest(name)))
            self.count_use(name)

    @rule(seconds=st.sampled_from([0.0, 5.0, 600.0, 3600.0, 40_000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(
        hints=st.lists(
            st.tuples(
                st.integers(0, PAGES - 1),
                st.sampled_from([KV, STATE]),
                st.sampled_from([0.0, 5e-324, 1e-3, 0.3, 1.0, 7.0, 1e3, 1e9, 1e308]),
            ),
            min_size=1,
            unique_by=lambda hint: hint[:2],
        ),
        worker=st.integers(0, 2),
    )
    def advise(self, hints: list[tuple[int, int, float]], worker: int) -> None:
        known = [
            hint for hint in hints if hint[0] in self.pages and (hint[1] == KV or self.pages[hint[0]].state)
        ]
        self.residents.advise(
            [digest(name, layout) for name, layout, _ in hints], [value for *_, value in hints], worker
        )
        if known and not self.hinted:
            self.hinted = True
            for page in self.pages.values():
                page.when = self.clock.now  # all earlier uses count as made just now
        for name, layout, value in known:
            page, rank = self.pages[name], self.rank_of(value)
            old = page.kv_hint if layout == KV else page.state_hint
            if old is None or old.worker == worker or rank > old.rank:
                new = Hint(rank, worker)
                if layout == KV:
                    page.kv_hint = new
                else:
                    page.state_hint = new

    @precondition(lambda self: self.hinted and self.pages)
    @rule(count=st.integers(1, 4), value=st.none() | st.sampled_from([0.0, 0.5, 5.0, 1e3, 1e6]))
    def evict(self, count: int, value: float | None) -> None:
        taker = Watcher(self, count)
        highest = inf if value is None else self.rank_of(value)
        self.order.evict(taker, rank=None if value is None else self.residents.rank(value))
        if taker.enough() or not self.pages:
            assert not self.order.not_worth
        else:
            assert self.order.not_worth
            assert self.lowest() > highest - 1e-6
        assert all(rank <= highest + 1e-6 for rank in taker.ranks)

    @precondition(lambda self: self.pages)
    @rule(which=st.integers(0, PAGES - 1))
    def remove_leaf(self, which: int) -> None:
        leaves = sorted(name for name, page in self.pages.items() if not page.children)
        name = leaves[which % len(leaves)]
        rows = self.residents.rows_of(self.residents.pages.find(page_key(name)))
        for row in rows:
            remove(self.residents, row)
        self.lose(name)

    def count_use(self, name: int) -> None:
        self.ticks += 1
        self.pages[name].used, self.pages[name].when = self.ticks, self.clock.now

    def rank_of(self, value: float) -> float:
        return (log2(value) if value else -2048.0) + self.clock.now / HALF_LIFE

    def rank(self, name: int) -> float:
        """The rank of a page as a whole."""
        page = self.pages[name]
        hint = page.kv_hint or page.state_hint
        return hint.rank if hint else self.by_use(page)

    def by_use(self, page: Page) -> float:
        # private: the mean is checked by a test of its own; here it only has to be the same for all pages
        mean = self.residents.pages.values._adopted
        return mean + page.when / HALF_LIFE + page.used * 1e-12

    def units(self) -> dict[tuple[int, bool], float]:
        """Ranks of what can be evicted now: leaves, and states alone."""
        useful = {name: page for name, page in self.pages.items() if not self.is_useless(name)}
        found = {(name, False): self.rank(name) for name, page in useful.items() if not page.children}
        for name, page in useful.items():
            if page.children and page.state and page.state_hint:
                found[name, True] = page.state_hint.rank
        return found

    def is_useless(self, name: int) -> bool:
        return self.residents.pages.is_useless(self.residents.pages.find(page_key(name)))

    def lowest(self) -> float:
        return min(self.units().values())

    def lose(self, name: int) -> None:
        page = self.pages[name]
        if page.up is not None:
            above = self.pages[page.up]
            above.children.discard(name)
            hinted = page.kv_hint or page.state_hint or above.kv_hint
            if hinted and self.rank(name) > self.rank(page.up):
                above.kv_hint = Hint(self.rank(name), above.kv_hint.worker if above.kv_hint else None)
            above.used, above.when = max(above.used, page.used), max(above.when, page.when)
        del self.pages[name]

    def teardown(self) -> None:
        check_residents(self.residents)
        self.order.evict(Everything(self.residents))
        assert len(self.residents) == 0
        check_residents(self.residents)


class Watcher(Everything):
    """Checks each unit against the model, as it was just before."""

    def __init__(self, machine: ValuesMachine, number: int) -> None:
        super().__init__(machine.residents, number)
        self.machine = machine
        self.ranks: list[float] = []

    def take(self, rows: list[int]) -> None:
        machine = self.machine
        [name] = {page_of(self.residents, row) for row in rows}
        alone = bool(machine.pages[name].children)
        if not machine.is_useless(name):
            units = machine.units()
            rank = units[name, alone]
            self.ranks.append(rank)
            # Uses within the same second differ by less than the clock can tell.
            assert rank <= min(units.values()) + 1e-6, "the lowest rank goes first"
        super().take(rows)
        if alone:
            machine.pages[name].state, machine.pages[name].state_hint = False, None
        else:
            machine.lose(name)


@pytest.mark.hypothesis
def test_any_history_matches_a_plain_model() -> None:
    run_state_machine_as_test(
        ValuesMachine,
        settings=settings(
            deadline=None,
            max_examples=example_count(60),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


def filled(count: int) -> tuple[Residents, EvictionOrder, Clock]:
    clock = Clock()
    residents = Residents(clock=clock)
    for n in range(count):
        put(residents, n)
    return residents, EvictionOrder(residents), clock


def evicted(residents: Residents, order: EvictionOrder, count: int) -> list[int]:
    taker = Everything(residents, count)
    order.evict(taker)
    return [NUMBERS[d] for d in taker.gone]


def test_before_the_first_hint_nothing_is_kept() -> None:
    residents, order, _ = filled(50)
    before = residents.memory_bytes()
    assert evicted(residents, order, 10) == list(range(10))
    residents.advise([digest(999)], [1.0], 0)
    assert not residents.pages.hinted, "an unknown object makes no difference"
    assert residents.memory_bytes() == before
    residents.advise([digest(20)], [1.0], 0)
    assert residents.memory_bytes() > before


def test_the_first_values_rank_anew_what_was_queued_by_its_last_use() -> None:
    residents, order, _ = filled(5000)
    assert evicted(residents, order, 1) == [0]
    residents.advise([digest(n) for n in range(5000)], [1.0 / (1 + n) for n in range(5000)], 1)
    assert evicted(residents, order, 40) == list(range(4999, 4959, -1))


def test_thousands_of_values_that_change_are_obeyed_in_order() -> None:
    """More than the front holds, and more than are noted one by one."""
    count = 5000
    residents, order, _ = filled(count)
    digests = [digest(n) for n in range(count)]
    values = np.random.default_rng(1).permutation(count) + 1.0
    residents.advise(digests, values, 7)  # type: ignore[arg-type]
    assert evicted(residents, order, 1000) == np.argsort(values)[:1000].tolist()
    values = count + 1.0 - values
    residents.advise(digests, values, 7)  # type: ignore[arg-type]
    left = [n for n in np.argsort(values).tolist() if values[n] <= count - 1000]
    found = []
    while residents:
        found += evicted(residents, order, 700)
    assert found == left


def test_changing_values_for_ever_does_not_grow() -> None:
    residents, order, _ = filled(100)
    for n in range(200):
        residents.advise([digest(i) for i in range(50)], [2.0 ** -(n + i) for i in range(50)], 1)
        put(residents, 1000 + n)
        evicted(residents, order, 1)
    assert len(order) <= 3 * len(residents) + 1024


def test_the_mean_follows_the_hints_and_bounds_each() -> None:
    residents, _, _ = filled(2000)
    values = residents.pages.values
    residents.advise([digest(0)], [16.0], 0)
    assert values.mean == 4.0
    residents.advise([digest(1), digest(2), digest(3)], [0.0, 4.0, 0.0], 0)
    assert values.mean == 3.0, "a value of 0 says nothing of the others"
    for _ in range(10):
        residents.advise([digest(n) for n in range(2000)], [1024.0] * 2000, 0)
    assert abs(values.mean - 10) < 0.01
    residents.advise([digest(0)], [1e308], 0)
    assert values.mean < 10 + 64 / 1024


def test_objects_without_a_hint_stay_in_the_order_of_use_across_hours_and_many_samples() -> None:
    residents, order, clock = filled(300)
    residents.advise([digest(0)], [1e9], 0)
    for n in range(10_000):
        clock.now += 2.0
        residents.touch(residents.find(digest(1 + n % 299)))
    expected = [1 + n % 299 for n in range(10_000 - 299, 10_000)]
    assert evicted(residents, order, 300) == [0, *expected], "the only hint is the mean, and has aged"


def test_an_object_that_comes_back_has_its_hint() -> None:
    residents, order, _ = filled(3)
    residents.advise([digest(n) for n in range(3)], [1.0, 100.0, 10.0], 5)
    row = residents.find(digest(1))
    left = residents.leave(row)
    residents.enter(row, *left)
    assert evicted(residents, order, 3) == [0, 2, 1]


def test_a_node_that_is_used_again_has_no_hint_of_the_page_before() -> None:
    residents, _, _ = filled(2)
    residents.advise([digest(0)], [1e9], 5)
    remove(residents, residents.find(digest(0)))
    row = put(residents, 7)
    assert not residents.pages.rank[residents.page[row]]
    state = put(residents, 7, layout=STATE, namespace_id=PLAIN)
    residents.advise([digest(7, STATE)], [1e9], 5)
    remove(residents, state)
    assert not residents.pages.state_rank[residents.page[row]]


def test_a_page_gets_the_rank_of_the_state_behind_it() -> None:
    residents, order, _ = filled(1)
    put(residents, 1, 0)
    for page in (0, 1):
        put(residents, page, layout=STATE)
    residents.advise([digest(1, STATE), digest(0)], [16.0, 2.0**-40], 5)
    order.evict(taker := Everything(residents, 1))
    assert set(taker.gone) == {digest(1), digest(1, STATE)}
    put(residents, 2)
    put(residents, 2, layout=STATE)
    residents.advise([digest(2)], [1.0], 5)
    order.evict(taker := Everything(residents, 1))
    assert set(taker.gone) == {digest(2), digest(2, STATE)}


def test_the_state_that_a_write_needs_stays_whatever_its_value() -> None:
    clock = Clock()
    residents = Residents(clock=clock)
    order = EvictionOrder(residents)
    for n in range(4):
        put(residents, n, n - 1 if n else None, namespace_id=HYBRID)
    for n in (1, 3):
        put(residents, n, layout=STATE, namespace_id=HYBRID)
    residents.advise([digest(1, STATE)], [0.0], 0)
    residents.advise([*(digest(n) for n in range(4)), digest(3, STATE)], [5.0] * 5, 0)
    node = residents.pages.find(page_key(2))
    order.evict(taker := Everything(residents, 1), [node])
    assert digest(3, STATE) in taker.gone
    assert digest(1, STATE) not in taker.gone


def test_hints_that_are_possible() -> None:
    values, which = usable_hints([1.0, -1.0, float("nan"), 0.0, inf, 3.0], 5, 6)
    assert (values.tolist(), which.tolist()) == ([1.0, 0.0, 3.0], [0, 3, 5])
    assert usable_hints([1.0, 2.0, 3.0], 5, 2)[1].tolist() == [0, 1]
    assert usable_hints([1.0], -1, 1)[1].tolist() == []
