"""Values of units for a store: what they are, which are reported, and how soon."""

import numpy as np
import pytest

from tests.index.harness import KV, MAMBA, Harness
from tests.index.model import PAGE
from tests.index.states import ONE, span_of
from tiercache.index import appraisal
from tiercache.models.profile import profile_named
from tiercache.policy import POLICIES, Costs, policy_named

BYTES = {KV: 1000, MAMBA: 7000}


def harness(policy="hvd", **options):
    costs = Costs(profile_named("qwen3-next-80b-a3b"))
    return Harness(MAMBA, policy=policy_named(policy, costs), object_bytes=BYTES, **options)


def lose(one, path):
    """Evict a path from the device, and forget that it is stored."""
    one.index.evict_device({KV: len(path), MAMBA: 1})
    span = one.span(path)
    with one.index.pinned(span.node):
        one.index.forget_stored(span_of(span.node), MAMBA, ONE)
        one.index.forget_stored(span, KV, np.ones(len(path), np.bool_))


def reported(one):
    return {value.node.end for value in one.index.appraiser.changed(1.0)}


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "clairvoyant"])
def test_values_are_finite_and_not_negative(policy):
    one = harness(policy)
    for n in range(20):
        path = tuple(range(10 * n, 10 * n + 1 + n % 5))
        one.insert(path, len(path))
        one.store(path, state=True)
        if n % 3:
            one.index.touch(one.match(path))
    values = one.index.appraiser.of([node for node in one.index.nodes() if node.parent is not None], 1.0)
    assert len(values) == 20
    assert all(0 <= value.page <= value.state < np.inf for value in values)


def test_a_state_alone_is_worth_its_unit_by_fewer_bytes():
    one = harness()
    one.insert((1, 2, 3), 3)
    [value] = one.index.appraiser.of([one.match((1, 2, 3)).node], 1.0)
    assert value.state * BYTES[MAMBA] == pytest.approx(value.page * (3 * BYTES[KV] + BYTES[MAMBA]))


def test_what_is_copied_elsewhere_is_worth_what_the_store_would_lose():
    """On the host a unit that storage has is cheap to lose. In storage it is not."""
    one = harness()
    one.insert((1, 2, 3), 3)
    [before] = one.index.appraiser.of([one.match((1, 2, 3)).node], 1.0)
    one.copy_to_host((1, 2, 3))
    one.store((1, 2, 3), state=True)
    [after] = one.index.appraiser.of([one.match((1, 2, 3)).node], 1.0)
    assert after == before


def test_only_what_is_stored_is_reported():
    one = harness()
    one.insert((1, 2), 2)
    one.insert((3, 4, 5), 3)
    one.store((3, 4, 5), state=True)
    assert reported(one) == {3}


def test_a_value_is_reported_again_when_it_has_changed():
    one = harness("lru")
    one.insert((1, 2, 3), 3)
    one.store((1, 2, 3), state=True)
    assert reported(one) == {3}
    assert reported(one) == set()
    for n in range(20, 60):  # it grows older, and nothing else happens to it
        one.insert((n,), 1)
    [old] = [value for value in one.index.appraiser.changed(1.0) if value.node.end == 3]
    one.index.touch(one.match((1, 2, 3)))
    [used] = [value for value in one.index.appraiser.changed(1.0) if value.node.end == 3]
    assert used.page > old.page


def test_a_node_in_a_reused_row_is_reported():
    one = harness("lru")
    one.insert((1, 2, 3), 3)
    one.store((1, 2, 3), state=True)
    assert reported(one) == {3}
    node = one.match((1, 2, 3)).node
    row = node.row
    lose(one, (1, 2, 3))
    assert node.is_removed
    one.insert((7, 8), 2)
    one.store((7, 8), state=True)
    assert reported(one) == {2}
    assert one.match((7, 8)).node.row == row


def test_every_node_comes_up_in_a_round(monkeypatch):
    monkeypatch.setattr(appraisal, "_SLICE", 16)  # private: a round in few nodes
    one = harness("lru")
    for n in range(40):
        one.insert((n,), 1)
        one.store((n,), state=True)
    assert len(one.index.appraiser.changed(1.0)) == 40
    one.index._columns.now += 2 * 40  # private: as if other requests had come
    seen = set()
    for _ in range(3):
        found = one.index.appraiser.changed(1.0)
        assert len(found) <= 16
        seen |= {id(value.node) for value in found}
    assert len(seen) == 40


def test_without_states():
    one = Harness(policy=policy_named("hvd", Costs(profile_named("llama-3.1-8b"))), object_bytes=BYTES)
    one.insert((1, 2, 3))
    one.store((1, 2, 3))
    [value] = one.index.appraiser.changed(1.0)
    assert value.page > 0
    assert value.state == 0


def test_a_unit_that_a_store_gave_up_is_remembered():
    """A miss of it later counts for the policy as a miss of an evicted unit, and plans a checkpoint."""
    one = harness()
    path = (1, 2, 3)
    one.insert(path, 3)
    one.store(path, state=True)
    lose(one, path)
    assert one.index._ghosts.has_units  # private: what the index remembers
    told = []
    one.index.policy.reused = told.append
    tokens = np.repeat(np.array(path, np.uint64), PAGE)
    one.index.touch(one.match(path), np.append(tokens, np.uint64(9)))
    assert [reuse.evicted for reuse in told] == [True]
