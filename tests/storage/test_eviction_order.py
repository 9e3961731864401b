"""The eviction order of every store, beside a plain model."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.examples import example_count
from tests.storage.integrity import check_residents, nodes_of
from tests.storage.resident_model import (
    HYBRID,
    KV,
    LAYOUTS,
    MORE_STATE,
    MOST,
    PLAIN,
    STATE,
    Everything,
    Left,
    Model,
    digest,
    page_of,
    put,
    remove,
)
from tiercache.storage.eviction import EvictionOrder
from tiercache.storage.pages import PAGE_KEY_BYTES
from tiercache.storage.residents import Residents
from tiercache.storage.restorable import Admissibility, Worth
from tiercache.testing.objects import page_key


@dataclass
class Claim:
    """An object that is being written by a call of the machine."""

    name: int
    layout: int
    above: int | None
    length: int
    namespace_id: int
    depth: int
    node: int
    parent: int | None


class ResidentsMachine(RuleBasedStateMachine):
    """Random operations on a store's tables: each eviction takes the unit that the model would take."""

    def __init__(self) -> None:
        super().__init__()
        self.residents = Residents()
        self.order = EvictionOrder(self.residents)
        self.model = Model()
        self.claims: list[Claim] = []
        self.left: list[tuple[int, bytes | None, Left]] = []
        self.watched = True

    @initialize(needs_states=st.booleans(), watched=st.booleans())
    def begin(self, needs_states: bool, watched: bool) -> None:
        """Unless watched, nothing is asked of the tables between steps: what they put off stays so."""
        self.watched = watched
        if needs_states:
            self.require_states(HYBRID)

    @rule(namespace_id=st.just(HYBRID))
    def require_states(self, namespace_id: int) -> None:
        self.residents.pages.require_states(namespace_id)
        self.model.hybrid.add(namespace_id)
        self.model.settle()

    @rule(
        name=st.integers(0, MOST - 1),
        layout=st.integers(KV, MORE_STATE),
        above=st.none() | st.integers(0, MOST - 1),
        namespace_id=st.integers(PLAIN, HYBRID),
        depth=st.sampled_from(["right", "right", "unknown", "wrong"]),
        publish=st.booleans(),
    )
    def claim(
        self, name: int, layout: int, above: int | None, namespace_id: int, depth: str, publish: bool
    ) -> None:
        if digest(name, layout) in self.busy() or self.residents.find(digest(name, layout)) >= 0:
            return
        above = name if layout >= STATE else above
        told = {"right": self.right_depth(name, above), "unknown": 0, "wrong": 7}[depth]
        claim = Claim(
            name, layout, above, 10 + name, namespace_id, told, self.hold(name),
            None if above is None else self.hold(above),
        )  # fmt: skip
        refused = not publish
        found = self.residents.pages.admissibility(
            claim.node, claim.parent, told, namespace_id, refused=refused
        )
        if above == name and layout < STATE:  # a page that follows itself would be a state to the tables
            self.let_go(claim)
            return
        assert found is self.model.admissibility(name, above, told, namespace_id, refused)
        if found is not Admissibility.FINE:
            self.let_go(claim)
            return
        if layout < STATE:
            self.residents.pages.expect(claim.node, told, namespace_id)
            page = self.model.at(name)
            page.coming += 1
            page.namespace_id = page.namespace_id if page.kv else namespace_id
            page.depth = told or page.depth
        self.claims.append(claim)
        if publish:
            self.publish(len(self.claims) - 1, True)

    @precondition(lambda self: self.claims)
    @rule(which=st.integers(0, 5), works=st.booleans())
    def publish(self, which: int, works: bool) -> None:
        claim = self.claims.pop(which % len(self.claims))
        if claim.layout < STATE:
            self.residents.pages.expected_all([claim.node])
            page = self.model.pages[claim.name]
            page.coming -= 1
            page.depth = page.depth if page.coming or page.lengths else 0
        if works:
            d = digest(claim.name, claim.layout)
            self.residents.add(
                d, claim.node, claim.parent, self.residents.newest + 1, claim.length, claim.namespace_id,
                claim.depth,
            )  # fmt: skip
            self.model.add(
                claim.name, claim.layout, claim.above, claim.length, claim.namespace_id, claim.depth
            )
        self.let_go(claim)

    @rule(
        name=st.integers(0, MOST - 1),
        layout=st.integers(KV, MORE_STATE),
        way=st.sampled_from(["touch", "renew"]),
    )
    def use(self, name: int, layout: int, way: str) -> None:
        if (row := self.residents.find(digest(name, layout))) >= 0:
            getattr(self.residents, way)(row)
            (self.model.use if way == "touch" else self.model.renew)(name)

    @rule(name=st.integers(0, MOST - 1), layout=st.integers(KV, MORE_STATE), back=st.booleans())
    def take_out(self, name: int, layout: int, back: bool) -> None:
        """Delete an object in the middle or at the end. It may yet come back."""
        row = self.residents.find(digest(name, layout))
        if row < 0:
            return
        found, parent = self.residents.leave(row)
        left = self.model.leave(name, layout)
        assert found == digest(name, layout)
        assert parent == (
            page_key(name) if layout >= STATE else None if left.up is None else page_key(left.up)
        )
        if back:
            self.left.append((row, parent, left))
        else:
            self.residents.drop(row)

    @rule(name=st.integers(0, MOST - 1))
    def pin(self, name: int) -> None:
        if page := self.model.stored().get(name):
            page.pins = not page.pins
            for layout in page.lengths:
                self.residents.pins[self.residents.find(digest(name, layout))] = page.pins

    @rule(count=st.integers(1, 6), promising=st.booleans())
    def evict(self, count: int, promising: bool) -> None:
        attached = [c.node for c in self.claims] + [c.parent for c in self.claims if c.parent is not None]
        taker = Watcher(self, count, promising)
        self.order.evict(taker, attached, promising=promising)
        if not taker.enough() and (promising or not self.model.is_mostly_unproven()):
            assert not self.model.leaves(), "whatever may go can be made to go"

    def hold(self, name: int) -> int:
        self.model.at(name).holds += 1
        return self.residents.pages.hold(page_key(name))

    def let_go(self, claim: Claim) -> None:
        for name, node in ((claim.name, claim.node), (claim.above, claim.parent)):
            if name is not None and node is not None:
                self.residents.pages.release(node)
                self.model.pages[name].holds -= 1
        self.model.settle()

    def busy(self) -> set[bytes]:
        return {digest(c.name, c.layout) for c in self.claims} | {
            digest(left.name, left.layout) for *_, left in self.left
        }

    def right_depth(self, name: int, above: int | None) -> int:
        if above is None or above == name:
            return self.model.at(name).depth
        depth = self.model.at(above).depth
        return depth + 1 if depth else 0

    @precondition(lambda self: self.left)
    @rule(which=st.integers(0, 5), back=st.booleans())
    def come_back(self, which: int, back: bool) -> None:
        row, parent, left = self.left.pop(which % len(self.left))
        if back:
            self.residents.enter(row, digest(left.name, left.layout), parent)
            self.model.come_back(left)
        else:
            self.residents.drop(row)

    @invariant()
    def agrees(self) -> None:
        if not self.watched:
            return
        residents, model = self.residents, self.model
        check_residents(residents)
        assert len(residents) == len(model)
        keys = [digest(name, layout) for name in range(MOST) for layout in range(4)]
        there = [layout in model.at(name).lengths for name in range(MOST) for layout in range(4)]
        model.settle()
        assert (
            [row >= 0 for row in residents.find_many(keys)]
            == there
            == [residents.find(key) >= 0 for key in keys]
        )
        assert residents.pages.worth() == model.worth()
        assert residents.is_mostly_unproven == model.is_mostly_unproven()
        for name in model.stored():
            node = residents.pages.find(page_key(name))
            assert residents.pages.is_useless(node) == model.is_useless(name)
            assert residents.is_dead(node) == model.is_dead(name)
            assert residents.pages.is_leaf(node) == model.is_leaf(name)
            assert residents.pages.tick[node] == model.pages[name].used

    def teardown(self) -> None:
        while self.claims:
            self.publish(0, True)
        while self.left:
            self.come_back(0, True)
        for row in self.residents.residents().tolist():
            self.residents.pins[row] = 0
        for page in self.model.pages.values():
            page.pins = 0
        check_residents(self.residents)
        self.order.evict(Watcher(self, None, True))
        check_residents(self.residents)
        assert len(self.residents) == self.residents.payload == self.residents.pages.unproven_bytes == 0, (
            "with nothing held everything can go"
        )
        assert list(nodes_of(self.residents.pages)) == []


class Watcher(Everything):
    """Checks each page that goes against the model, as it was just before."""

    def __init__(self, machine: ResidentsMachine, number: int | None, promising: bool) -> None:
        super().__init__(machine.residents, number)
        self.machine = machine
        self.promising = promising
        self.next: int | None = None
        """The page before what went last, where that was a unit."""

    def take(self, rows: list[int]) -> None:
        model = self.machine.model
        [name] = {page_of(self.residents, row) for row in rows}
        layouts = {LAYOUTS.index(self.residents.digest(row)[:-PAGE_KEY_BYTES]) for row in rows}
        assert layouts == set(model.pages[name].lengths), "without values a page goes with its states"
        self.check_page(name)
        self.next = model.pages[name].up
        super().take(rows)
        for layout in layouts:
            model.leave(name, layout)

    def check_page(self, name: int) -> None:
        model = self.machine.model
        leaves = model.leaves()
        assert name in leaves, "nothing goes that is read, held or followed"
        if name == self.next and model.is_useless(name):
            return
        if not model.is_useless(name):
            self.check_first(name)
            useful = [other for other in leaves if not model.is_useless(other)]
            assert name == min(useful, key=lambda other: model.pages[other].used), "the least recently used"
        elif self.machine.watched and not model.is_dead(name):
            assert not [other for other in leaves if model.is_dead(other)], "what never will be of use"
            spared = not self.promising and model.is_mostly_unproven()
            assert spared or not [other for other in leaves if not model.is_useless(other)], "useless first"

    def check_first(self, name: int) -> None:
        """Something of use may go only when nothing is due, and not for what may never be."""
        model = self.machine.model
        if self.machine.watched:
            assert not [other for other in model.leaves() if model.is_dead(other)], "the dead go first"
            assert self.promising or not model.is_mostly_unproven()


@pytest.mark.hypothesis
def test_any_history_matches_a_plain_model() -> None:
    run_state_machine_as_test(
        ResidentsMachine,
        settings=settings(
            deadline=None,
            max_examples=example_count(50),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_thousands_of_leaves_go_in_order() -> None:
    """More than the front holds, so that the horizon moves several times."""
    residents = Residents()
    order = EvictionOrder(residents)
    rows = {}
    for n in range(5000):
        d = digest(n)
        node = residents.pages.hold(d[-PAGE_KEY_BYTES:])
        rows[d] = residents.add(d, node, None, n + 1, 1, PLAIN)
        residents.pages.release(node)
    shuffled = list(rows)
    Random(1).shuffle(shuffled)
    for d in shuffled:
        residents.touch(rows[d])
    gone: list[bytes] = []
    while residents:
        taker = Everything(residents, 700)
        order.evict(taker)
        gone += taker.gone
    assert gone == shuffled


def test_deleting_for_ever_does_not_grow() -> None:
    residents = Residents()
    order = EvictionOrder(residents)
    for namespace_id in (PLAIN, HYBRID):
        residents.pages.require_states(HYBRID)
        for _ in range(4000):
            order.evict(Everything(residents, 1))  # nothing is there, but from now on there is an order
            remove(residents, put(residents, 0, namespace_id=namespace_id))
    # private: entries that no longer count cost memory and show nowhere else
    assert len(order) < 3000
    assert residents.used == 1


def test_a_page_with_all_that_served_it_goes_at_once() -> None:
    residents = Residents()
    order = EvictionOrder(residents)
    for n in range(6):
        put(residents, n, n - 1 if n else None, namespace_id=HYBRID)
    for n in (2, 5):
        put(residents, n, layout=STATE, namespace_id=HYBRID)
    order.evict(taker := Everything(residents, 1))
    assert sorted(taker.gone) == sorted([digest(5, STATE), *map(digest, (5, 4, 3))])
    assert residents.pages.worth() == Worth(4, 0, 0)


def test_kv_is_not_waited_for_longer_because_something_else_is() -> None:
    """Dead objects that came behind a state that waits for its KV go before what can be restored."""
    residents = Residents()
    order = EvictionOrder(residents)
    for n in range(20):
        put(residents, n)
    put(residents, 30, layout=STATE, namespace_id=HYBRID)
    put(residents, 31, namespace_id=HYBRID)
    order.evict(taker := Everything(residents, 1))
    assert taker.gone == [digest(0)]
    for n in range(20, 23):
        put(residents, n)
    order.evict(taker := Everything(residents, 1))
    assert taker.gone == [digest(31)]
