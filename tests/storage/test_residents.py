"""The tables that every store shares, beside plain models that are searched from end to end: pages, residents, the eviction order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tiercache.policy import Lru, Policy, UnitKind, Units
from tiercache.policy.base import Ranks
from tiercache.storage.eviction import EvictionOrder, StoredUnits
from tiercache.storage.pages import NONE, PAGE_KEY_BYTES, Pages, column_of
from tiercache.storage.residents import Loaded, Residents, Standing, Worth, parents_first
from tiercache.testing.objects import page_key

LAYOUTS = [page_key(("layout", n)) for n in range(4)]
KV, MORE_KV, STATE, MORE_STATE = range(4)
"""Layouts: the last two hang on their page."""
PLAIN, HYBRID = 0, 1
"""Namespaces: the prefixes of the second need states."""
MOST = 12
"""Pages of the machine: few, so that they meet."""
NAMES = {page_key(n): n for n in range(64)}


def digest(page: int, layout: int = KV) -> bytes:
    return LAYOUTS[layout] + page_key(page)


def page_of(residents: Residents, row: int) -> int:
    return NAMES[residents.digest(row)[-PAGE_KEY_BYTES:]]


def put(
    residents: Residents, page: int, above: int | None = None, *, layout: int = KV, length: int = 1, space: int = PLAIN, depth: int = 0
) -> int:
    """Take in an object, whatever may be said against it. Layouts of states hang on their page."""
    node = residents.hold(page_key(page))
    if layout >= STATE:
        above = page
    parent = None if above is None else residents.hold(page_key(above))
    row = residents.add(digest(page, layout), node, parent, residents.newest + 1, length, space, depth)
    for held in (node, parent):
        if held is not None:
            residents.release(held)
    return row


def remove(residents: Residents, row: int) -> None:
    residents.leave(row)
    residents.drop(row)


class Everything:
    """Takes until a number of objects went. See `Taker`."""

    def __init__(self, residents: Residents, number: int | None = None) -> None:
        self.residents = residents
        self.number = number
        self.gone: list[bytes] = []

    def take(self, rows: list[int]) -> None:
        for row in rows:
            self.gone.append(self.residents.digest(row))
            remove(self.residents, row)

    def enough(self) -> bool:
        return self.number is not None and len(self.gone) >= self.number

    def full(self) -> bool:
        return False


class Shallowest(Policy):
    """The page nearest the beginning first, whatever its age, and states in the middle of a path too."""

    name = "shallowest"

    def rank(self, units: Units) -> Ranks:
        return units.depth.astype(float) - (units.kind == UnitKind.STATE)


@dataclass
class Page:
    """A page of the model. `lengths`: by layout; `up`: the page that it follows."""

    lengths: dict[int, int] = field(default_factory=dict)
    up: int | None = None
    cut: bool = False
    space: int = PLAIN
    depth: int = 0
    used: int = 0
    number: int = 0
    served: bool = False
    holds: int = 0
    coming: int = 0
    pins: int = 0

    @property
    def kv(self) -> bool:
        return any(layout < STATE for layout in self.lengths)

    @property
    def states(self) -> bool:
        return any(layout >= STATE for layout in self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(self.lengths.values())


@dataclass
class Left:
    """An object that left, as it was."""

    name: int
    layout: int
    up: int | None
    length: int
    space: int
    depth: int
    used: int
    number: int


class Model:
    """What `Residents` should know, found out by looking at everything."""

    def __init__(self) -> None:
        self.pages: dict[int, Page] = {}
        self.hybrid: set[int] = set()
        self.clock = self.newest = 0

    def at(self, page: int) -> Page:
        return self.pages.setdefault(page, Page())

    def stored(self) -> dict[int, Page]:
        return {name: page for name, page in self.pages.items() if page.lengths}

    def followers(self, name: int) -> list[int]:
        return [other for other, page in self.pages.items() if page.up == name]

    def path(self, name: int | None) -> list[int]:
        """The page and all before it, as far as they are stored."""
        path: list[int] = []
        while name is not None and name in self.pages and name not in path:
            path.append(name)
            name = self.pages[name].up
        return path

    def is_live(self, name: int) -> bool:
        page = self.pages[name]
        own = page.states or (page.kv and page.space not in self.hybrid)
        return own or any(self.is_live(other) for other in self.followers(name))

    def is_broken(self, name: int) -> bool:
        return any(not (p := self.pages.get(above, Page())).kv or p.cut for above in self.path(name))

    def is_useless(self, name: int) -> bool:
        return not self.is_live(name) or self.is_broken(name)

    def is_young(self, name: int) -> bool:
        page = self.pages[name]
        return self.newest - page.number < len(self) // (16 if page.kv else 1)

    def is_due(self, name: int) -> bool:
        return self.is_useless(name) and (self.pages[name].served or not self.is_young(name))

    def is_leaf(self, name: int) -> bool:
        return bool(self.pages[name].lengths) and not self.followers(name) and not self.pages[name].holds

    def leaves(self) -> list[int]:
        """What may be given up as a whole."""
        return [name for name, page in self.pages.items() if self.is_leaf(name) and not page.pins]

    def is_strewn(self) -> bool:
        pages = self.pages.values()
        return 4 * sum(p.nbytes for p in pages if not p.served) > 3 * sum(p.nbytes for p in pages)

    def standing(self, name: int, above: int | None, depth: int, space: int, refused: bool) -> Standing:
        page, parent = self.at(name), self.at(name if above is None else above)
        if page.lengths and page.space != space:
            return Standing.IMPOSSIBLE
        if depth and page.depth and depth != page.depth:
            return Standing.IMPOSSIBLE
        if above == name and refused and not (page.kv or page.coming):
            return Standing.ABSENT_PARENT
        if above is None or above == name:
            return Standing.FINE
        if not (parent.kv or parent.coming) or parent.space != space:
            return Standing.ABSENT_PARENT
        other_depth = depth and parent.depth and depth != parent.depth + 1
        if other_depth or page.up not in (None, above) or name in self.path(above):
            return Standing.IMPOSSIBLE
        return Standing.FINE

    def add(self, name: int, layout: int, above: int | None, length: int, space: int, depth: int) -> None:
        page = self.at(name)
        if not page.kv:
            page.space = space
        page.depth = depth or page.depth
        self.newest += 1
        page.number = self.newest
        self.use(name)
        self.enter(name, layout, above, length)

    def enter(self, name: int, layout: int, above: int | None, length: int) -> None:
        page = self.at(name)
        if layout < STATE and above is not None and page.up is None:
            page.cut |= name in self.path(above)
            page.up = None if page.cut else above
            self.at(above)
        page.lengths[layout] = length
        if layout >= STATE:
            self.hybrid.add(page.space)
        self.settle()

    def leave(self, name: int, layout: int) -> Left:
        page = self.pages[name]
        left = Left(name, layout, page.up, page.lengths.pop(layout), page.space, page.depth, page.used, page.number)
        if not page.kv and layout < STATE:
            if page.up is not None:
                parent = self.pages[page.up]
                parent.used = max(parent.used, page.used)
            page.up, page.cut = None, False
        self.settle()
        return left

    def come_back(self, left: Left) -> None:
        page = self.at(left.name)
        if not page.kv:
            page.space = left.space
        page.depth = page.depth or left.depth
        page.used = max(page.used, left.used)
        page.number = max(page.number if page.lengths else 0, left.number)
        self.enter(left.name, left.layout, left.up, left.length)

    def use(self, name: int) -> None:
        self.clock += 1
        self.pages[name].used = self.clock

    def renew(self, name: int) -> None:
        self.use(name)
        if self.is_useless(name):
            self.pages[name].number, self.pages[name].served = self.newest, False

    def settle(self) -> None:
        """Forget pages that nothing needs, and note which can be restored."""
        for name, page in list(self.pages.items()):
            if not (page.lengths or page.holds or self.followers(name)):
                del self.pages[name]
        for name, page in self.pages.items():
            page.served |= bool(page.lengths) and not self.is_useless(name)

    def worth(self) -> Worth:
        restorable = dead = orphans = 0
        for name, page in self.stored().items():
            if self.is_broken(name):
                orphans += len(page.lengths)
            elif self.is_live(name):
                restorable += page.nbytes
            else:
                dead += page.nbytes
        return Worth(restorable, dead, orphans)

    def __len__(self) -> int:
        return sum(len(page.lengths) for page in self.pages.values())


@dataclass
class Claim:
    """An object that is being written by a call of the machine."""

    name: int
    layout: int
    above: int | None
    length: int
    space: int
    depth: int
    node: int
    parent: int | None


class ResidentsMachine(RuleBasedStateMachine):
    """What stores do with the tables, in any order: every unit that goes must be the one that the model would give up."""

    policy: Callable[[], Policy] = Lru

    def __init__(self) -> None:
        super().__init__()
        self.residents = Residents()
        self.chosen = type(self).policy()
        self.order = EvictionOrder(self.residents, self.chosen)
        self.model = Model()
        self.claims: list[Claim] = []
        self.left: list[tuple[int, bytes | None, Left]] = []
        self.footholds: set[int] = set()
        self.watched = True

    @initialize(needs_states=st.booleans(), watched=st.booleans())
    def begin(self, needs_states: bool, watched: bool) -> None:
        """Unless watched, the tables are not asked for anything between the steps, so that what they put off stays so."""
        self.watched = watched
        if needs_states:
            self.require_states(HYBRID)

    @rule(space=st.just(HYBRID))
    def require_states(self, space: int) -> None:
        self.residents.require_states(space)
        self.model.hybrid.add(space)
        self.model.settle()

    @rule(
        name=st.integers(0, MOST - 1),
        layout=st.integers(KV, MORE_STATE),
        above=st.none() | st.integers(0, MOST - 1),
        space=st.integers(PLAIN, HYBRID),
        depth=st.sampled_from(["right", "right", "unknown", "wrong"]),
        publish=st.booleans(),
    )
    def claim(self, name: int, layout: int, above: int | None, space: int, depth: str, publish: bool) -> None:
        if digest(name, layout) in self.busy() or self.residents.find(digest(name, layout)) >= 0:
            return
        above = name if layout >= STATE else above
        told = {"right": self.right_depth(name, above), "unknown": 0, "wrong": 7}[depth]
        claim = Claim(name, layout, above, 10 + name, space, told, self.hold(name), None if above is None else self.hold(above))
        refused = not publish
        found = self.residents.standing(claim.node, claim.parent, told, space, refused=refused)
        if above == name and layout < STATE:  # a page that follows itself would be a state to the tables
            self.let_go(claim)
            return
        assert found is self.model.standing(name, above, told, space, refused)
        if found is not Standing.FINE:
            self.let_go(claim)
            return
        if layout < STATE:
            self.residents.expect(claim.node, told, space)
            page = self.model.at(name)
            page.coming += 1
            page.space = page.space if page.kv else space
            page.depth = told or page.depth
        self.claims.append(claim)
        if publish:
            self.publish(len(self.claims) - 1, True)

    @precondition(lambda self: self.claims)
    @rule(which=st.integers(0, 5), works=st.booleans())
    def publish(self, which: int, works: bool) -> None:
        claim = self.claims.pop(which % len(self.claims))
        if claim.layout < STATE:
            self.residents.expected(claim.node)
            page = self.model.pages[claim.name]
            page.coming -= 1
            page.depth = page.depth if page.coming or page.lengths else 0
        if works:
            d = digest(claim.name, claim.layout)
            self.residents.add(d, claim.node, claim.parent, self.residents.newest + 1, claim.length, claim.space, claim.depth)
            self.model.add(claim.name, claim.layout, claim.above, claim.length, claim.space, claim.depth)
        self.let_go(claim)

    @rule(name=st.integers(0, MOST - 1), layout=st.integers(KV, MORE_STATE), way=st.sampled_from(["touch", "renew"]))
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
        assert parent == (page_key(name) if layout >= STATE else None if left.up is None else page_key(left.up))
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
        self.footholds = set()
        for start in {c.name for c in self.claims} | {c.above for c in self.claims if c.above is not None}:
            self.footholds.update([n for n in self.model.path(start) if self.model.pages[n].states][:1])
        taker = Watcher(self, count, promising)
        self.order.evict(taker, attached, promising=promising)
        if not taker.enough() and (promising or not self.model.is_strewn()):
            assert not self.model.leaves(), "whatever may go can be made to go"

    def hold(self, name: int) -> int:
        self.model.at(name).holds += 1
        return self.residents.hold(page_key(name))

    def let_go(self, claim: Claim) -> None:
        for name, node in ((claim.name, claim.node), (claim.above, claim.parent)):
            if name is not None and node is not None:
                self.residents.release(node)
                self.model.pages[name].holds -= 1
        self.model.settle()

    def busy(self) -> set[bytes]:
        return {digest(c.name, c.layout) for c in self.claims} | {digest(left.name, left.layout) for *_, left in self.left}

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
        residents.check_integrity()
        assert len(residents) == len(model)
        keys = [digest(name, layout) for name in range(MOST) for layout in range(4)]
        there = [layout in model.at(name).lengths for name in range(MOST) for layout in range(4)]
        model.settle()
        assert [row >= 0 for row in residents.find_many(keys)] == there == [residents.find(key) >= 0 for key in keys]
        assert residents.worth() == model.worth()
        assert residents.is_strewn == model.is_strewn()
        for name in model.stored():
            node = residents.pages.find(page_key(name))
            assert residents.is_useless(node) == model.is_useless(name)
            assert residents.is_due(node) == model.is_due(name)
            assert residents.is_leaf(node) == model.is_leaf(name)
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
        self.residents.check_integrity()
        self.order.evict(Watcher(self, None, True))
        self.residents.check_integrity()
        assert len(self.residents) == self.residents.payload == self.residents.unproven == 0, "with nothing held everything can go"
        assert list(self.residents.pages.nodes()) == []


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
        if layouts != set(model.pages[name].lengths) or not model.is_leaf(name):
            self.check_states_alone(name, layouts)
            self.next = None
        else:
            self.check_page(name)
            self.next = model.pages[name].up
        super().take(rows)
        for layout in layouts:
            model.leave(name, layout)

    def check_states_alone(self, name: int, layouts: set[int]) -> None:
        model = self.machine.model
        page = model.pages[name]
        assert not self.machine.chosen.steady
        assert layouts == {layout for layout in page.lengths if layout >= STATE}, "all states of a page, and nothing else"
        assert name not in self.machine.footholds, "somebody is writing behind it"
        assert not page.pins
        assert not page.holds
        self.check_first(name)

    def check_page(self, name: int) -> None:
        model = self.machine.model
        leaves = model.leaves()
        assert name in leaves, "nothing goes that is read, held or followed"
        if name == self.next and model.is_useless(name):
            return
        if not model.is_useless(name):
            self.check_first(name)
            if self.machine.chosen.steady:
                useful = [other for other in leaves if not model.is_useless(other)]
                assert name == min(useful, key=lambda other: model.pages[other].used), "the least recently used of what is of use"
        elif self.machine.watched and not model.is_due(name):
            assert not [other for other in leaves if model.is_due(other)], "what may yet be of use goes after what never will"
            spared = not self.promising and model.is_strewn()
            assert spared or not [other for other in leaves if not model.is_useless(other)], "and after what is of use"

    def check_first(self, name: int) -> None:
        """Something of use may go only when nothing is due, and not for what may never be."""
        model = self.machine.model
        if self.machine.watched:
            assert not [other for other in model.leaves() if model.is_due(other)], "what is dead goes before what can be restored"
            assert self.promising or not model.is_strewn()


@pytest.mark.parametrize("policy", [Lru, Shallowest])
def test_any_history_matches_a_plain_model(policy: type[Policy]) -> None:
    machine = type("M", (ResidentsMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(deadline=None, max_examples=50, stateful_step_count=40, suppress_health_check=list(HealthCheck))
    )


def test_thousands_of_leaves_go_in_order() -> None:
    """More than the front holds, so that the horizon moves several times."""
    residents = Residents()
    order = EvictionOrder(residents, Lru())
    rows = {}
    for n in range(5000):
        d = digest(n)
        node = residents.hold(d[-PAGE_KEY_BYTES:])
        rows[d] = residents.add(d, node, None, n + 1, 1, PLAIN)
        residents.release(node)
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
    order = EvictionOrder(residents, Lru())
    for space in (PLAIN, HYBRID):
        residents.require_states(HYBRID)
        for _ in range(4000):
            order.evict(Everything(residents, 1))  # nothing is there, but from now on there is an order
            remove(residents, put(residents, 0, space=space))
    assert len(order._live) + len(order._dead) + sum(map(len, order._coming)) < 3000
    assert residents.used == 1


def test_a_page_with_all_that_served_it_goes_at_once() -> None:
    residents = Residents()
    order = EvictionOrder(residents, Lru())
    for n in range(6):
        put(residents, n, n - 1 if n else None, space=HYBRID)
    for n in (2, 5):
        put(residents, n, layout=STATE, space=HYBRID)
    order.evict(taker := Everything(residents, 1))
    assert sorted(taker.gone) == sorted([digest(5, STATE), *map(digest, (5, 4, 3))])
    assert residents.worth() == Worth(4, 0, 0)


def test_kv_is_not_waited_for_longer_because_something_else_is() -> None:
    """A state without its KV may wait long. What came behind it and is dead by now goes before what can be restored."""
    residents = Residents()
    order = EvictionOrder(residents, Lru())
    for n in range(20):
        put(residents, n)
    put(residents, 30, layout=STATE, space=HYBRID)
    put(residents, 31, space=HYBRID)
    order.evict(taker := Everything(residents, 1))
    assert taker.gone == [digest(0)]
    for n in range(20, 23):
        put(residents, n)
    order.evict(taker := Everything(residents, 1))
    assert taker.gone == [digest(31)]


def test_an_object_that_comes_back_is_what_it_was() -> None:
    """Its page may lie elsewhere by then, where another namespace's was before."""
    residents = Residents()
    residents.require_states(HYBRID)
    row = put(residents, 0, space=HYBRID, depth=3)
    left = residents.leave(row)
    remove(residents, put(residents, 1, space=PLAIN))
    kept = put(residents, 2, space=PLAIN)
    residents.enter(row, *left)
    node = residents.pages.find(page_key(0))
    assert (residents.pages.space[node], residents.pages.depth[node], residents.pages.number[node]) == (HYBRID, 3, 1)
    assert residents.worth() == Worth(1, 1, 0)
    remove(residents, kept)
    residents.check_integrity()


def test_what_a_policy_sees() -> None:
    residents = Residents()
    for n in range(5):
        put(residents, n, n - 1 if n else None, space=HYBRID, depth=n + 1, length=10)
    put(residents, 1, layout=STATE, space=HYBRID, length=3)
    put(residents, 4, layout=STATE, space=HYBRID, length=3)
    residents.touch(residents.find(digest(1)))
    residents.hits[residents.find(digest(1))] = 2
    units = StoredUnits(residents, np.array([residents.pages.find(page_key(n)) for n in range(5)]), 16)
    assert (len(units), units.now, units.page_tokens) == (5, 8, 16)
    assert units.kind.tolist() == [UnitKind.STATE] * 4 + [UnitKind.LEAF]
    assert units.last_access.tolist() == [1, 8, 3, 4, 7]
    assert units.hits.tolist() == [0, 2, 0, 0, 0]
    assert units.depth.tolist() == [1, 2, 3, 4, 5]
    assert units.children.tolist() == [1, 1, 1, 1, 0]
    assert units.replay.tolist() == [1, 2, 1, 2, 3], "from the start, or from the state on page 1"
    assert units.nbytes.tolist() == [1, 3, 1, 1, 33], "a state alone, or the end of the path with all that served it"
    assert not units.covered.any()


@st.composite
def batches(draw: st.DrawFn, most: int = 40) -> list[tuple[int, int, int | None]]:
    """Distinct objects as (page, layout, page before it), in any order and with any contradiction."""
    found = draw(st.lists(st.tuples(st.integers(0, 14), st.integers(KV, MORE_STATE), st.none() | st.integers(0, 18)), max_size=most))
    told = {(page, layout): page if layout >= STATE else above for page, layout, above in found}
    return [(page, layout, above) for (page, layout), above in told.items()]


def loaded(batch: Sequence[tuple[int, int, int | None]], spaces: Sequence[int], depths: Sequence[int]) -> Residents:
    """Residents that took in the batch at once; object n has number n + 1 and 10 + n bytes."""
    n = len(batch)
    words = np.zeros((0, 8), np.uint64) if not n else column_of([digest(page, layout) for page, layout, _ in batch], 64)
    parents = column_of([page_key(above) if above is not None else bytes(32) for *_, above in batch] or [b""], 32) if n else words[:, :4]
    known = np.array([i for i, (*_, above) in enumerate(batch) if above is not None], np.int64)
    residents = Residents()
    residents.load(Loaded(words, parents, known, np.arange(1, n + 1), np.arange(10, n + 10), np.array(depths), np.array(spaces, np.uint32)))
    return residents


def seen(residents: Residents) -> list[tuple[object, ...]]:
    """All that is known of each object, whatever its row."""
    pages, facts = residents.pages, []
    for row in residents.residents().tolist():
        node = residents.page[row]
        up = None if pages.up[node] < 0 else pages.key(pages.up[node])
        columns = [column[node] for column in (pages.kv, pages.states, pages.live, pages.depth, pages.tick, pages.number, pages.nbytes)]
        place = (pages.space[node], residents.is_leaf(node), residents.is_useless(node))
        facts.append(
            (residents.digest(row), residents.number[row], residents.length[row], bool(residents.hangs[row]), up, *columns, *place)
        )
    return sorted(facts)


@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data())
def test_loading_all_at_once_is_adding_one_by_one(batch: list[tuple[int, int, int | None]], data: st.DataObject) -> None:
    """The objects are a forest: every page follows one with a smaller number, of its own namespace."""
    batch = [(page, layout, above if layout >= STATE or above is None or above < page else None) for page, layout, above in batch]
    spaces = [page % 2 if data.draw(st.booleans(), "mixed") else PLAIN for page in range(15)]
    depths = [data.draw(st.sampled_from([0, page + 1]), "depth") for page, *_ in batch]
    at_once, one_by_one = loaded(batch, [spaces[page] for page, *_ in batch], depths), Residents()
    for i, ((page, layout, above), depth) in enumerate(zip(batch, depths, strict=True)):
        put(one_by_one, page, above, layout=layout, length=10 + i, space=spaces[page], depth=depth)
    for residents in (at_once, one_by_one):
        residents.check_integrity()
    assert seen(at_once) == seen(one_by_one)
    assert at_once.worth() == one_by_one.worth()
    keys = [digest(page, layout) for page, layout, _ in batch]
    assert all(at_once.find(d) == row >= 0 for d, row in zip(keys, at_once.find_many(keys), strict=True))
    for d in keys:
        remove(at_once, at_once.find(d))
        at_once.check_integrity()
    assert len(at_once) == at_once.payload == 0


@settings(max_examples=80, deadline=None)
@given(batch=batches(), at_once=st.booleans(), data=st.data())
def test_circles_and_contradictions_are_harmless(batch: list[tuple[int, int, int | None]], at_once: bool, data: st.DataObject) -> None:
    spaces = data.draw(st.lists(st.integers(PLAIN, HYBRID), min_size=len(batch), max_size=len(batch)))
    depths = data.draw(st.lists(st.integers(0, 9), min_size=len(batch), max_size=len(batch)))
    residents = loaded(batch, spaces, depths) if at_once else Residents()
    for (page, layout, above), space, depth in zip(batch, spaces, depths, strict=True):
        if not at_once:
            put(residents, page, above, layout=layout, space=space, depth=depth)
    residents.check_integrity()
    worth = residents.worth()
    assert worth.restorable_bytes + worth.dead_bytes <= residents.payload
    for page, layout, _ in batch[:: data.draw(st.integers(1, 4))]:
        remove(residents, residents.find(digest(page, layout)))
    residents.check_integrity()
    order = EvictionOrder(residents, Lru())
    while residents:
        before = len(residents)
        order.evict(Everything(residents, 1))
        assert len(residents) < before, "everything can be given up"
        residents.check_integrity()
    assert list(residents.pages.nodes()) == []


def test_a_long_circle_is_cut_and_what_hangs_on_it_is_an_orphan() -> None:
    batch: list[tuple[int, int, int | None]] = [(n, KV, (n + 1) % 40) for n in range(40)] + [(50, KV, 3), (51, KV, None)]
    residents = loaded(batch, [PLAIN] * 42, [0] * 42)
    residents.check_integrity()
    assert residents.worth().orphans == 41
    EvictionOrder(residents, Lru()).evict(taker := Everything(residents, 41))
    assert digest(51) not in taker.gone


@settings(max_examples=150, deadline=None)
@given(links=st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 12)), max_size=20))
def test_parents_come_first_in_a_batch(links: list[tuple[int, int | None]]) -> None:
    batch = [(page_key(page), None if parent is None else page_key(parent)) for page, parent in links]
    order = list(parents_first(batch))
    assert sorted(order) == list(range(len(batch)))
    place = {item: at for at, item in enumerate(order)}
    follows = {i: _needed(links, i) for i in range(len(links))}
    late = [i for i, above in follows.items() if above is not None and place[above] > place[i]]
    circles = {min(circle) for i in follows if (circle := _circle(follows, i))}
    assert len(late) == len(circles), "of each circle one comes before what it follows, and nothing else does"
    assert all(_circle(follows, i) for i in late)
    if not any(above is not None and above > i for i, above in follows.items()):
        assert order == list(range(len(links))), "what is in order stays so"


def _needed(links: Sequence[tuple[int, int | None]], item: int) -> int | None:
    """The first item of a batch that is the page which this one follows or hangs on."""
    pages = [i for i, (page, parent) in enumerate(links) if page == links[item][1] and parent != page]
    return min(pages, default=None)


def _circle(follows: dict[int, int | None], start: int) -> set[int]:
    """The circle on which an item lies; empty if it lies on none."""
    found: set[int] = set()
    at: int | None = start
    while at is not None and at not in found:
        found.add(at)
        at = follows[at]
    return found if at == start else set()


def test_pages_whose_keys_begin_alike_are_told_apart() -> None:
    alike = [bytes(8) + page_key(n)[8:] for n in range(50)]
    words = column_of(alike, PAGE_KEY_BYTES)
    pages = Pages()
    nodes = pages.load(words)
    assert len(set(nodes.tolist())) == 50
    assert pages.find_many(words).tolist() == nodes.tolist() == [pages.find(key) for key in alike]
    assert pages.find(bytes(32)) == NONE


@pytest.mark.parametrize("words", [(0, 1, 1, 1), (1, 1, 1, 0), (0, 0, 1, 0)])
@pytest.mark.parametrize("at_once", [True, False])
def test_nobody_can_choose_page_keys_that_lie_in_one_bucket(words: tuple[int, ...], at_once: bool) -> None:
    keys = np.random.default_rng(1).integers(0, 2**62, (3000, 4)).astype(np.uint64) * np.array(words, np.uint64)
    pages = Pages()
    if at_once:
        pages.load(keys)
    for key in keys:
        node = pages.obtain(key.tobytes())
        pages.holds[node] += 1
    lengths = []
    for node in pages._bucket_column.tolist():
        lengths.append(0)
        while node >= 0:
            lengths[-1] += 1
            node = pages.chain[node]
    assert sum(lengths) == 3000
    assert max(lengths) < 30
