"""Tenants that value their objects: none gains by high values, and none loses by other units."""

from __future__ import annotations

from math import inf, nan

import pytest
from tiercache_backends.memory import FOOTPRINT, MemoryBackend

from tests.examples import slow_after
from tests.storage.backends import AgingEnv, MemoryHooks, wrapped
from tiercache.core import Outcome
from tiercache.daemon.tenants.fairness import ValueScale
from tiercache.daemon.tenants.store import NameCipher, TenantStore
from tiercache.storage.base import StorageBackend
from tiercache.testing.objects import NAMESPACE, OTHER_NAMESPACE, key, payload, to_set

SIZE = 1000
ROOM = 100
"""Objects for which the store has room."""

TestOneScale = pytest.mark.slow(
    wrapped(MemoryHooks, lambda store: TenantStore(store, scale=ValueScale()), obeys_values=False)
)


def tenants() -> tuple[MemoryBackend, StorageBackend, StorageBackend]:
    """A small store, and its views for two tenants."""
    store = MemoryBackend(FOOTPRINT.of(SIZE) * ROOM, AgingEnv())
    red, blue = (
        TenantStore(store, rename=NameCipher(name.encode() * 20), tenant=name, scale=ValueScale())
        for name in ("red", "blue")
    )
    return store, red, blue


def put(view: StorageBackend, name: object, value: float) -> Outcome:
    return view.set([to_set(key(name), payload(name, SIZE), value=value)])[0]


def there(view: StorageBackend, names: list[object]) -> int:
    return sum(view.exists([key(name) for name in names]))


@pytest.mark.parametrize("value", slow_after(1, [1e300, 1.0, 1e-300]))
def test_who_gives_one_value_to_everything_takes_no_more_than_the_worse_half(value: float) -> None:
    _, red, blue = tenants()
    mine = [("mine", n) for n in range(ROOM)]
    for n, name in enumerate(mine):
        assert put(red, name, 2.0 ** (n % 10)) is Outcome.STORED
    for n in range(20 * ROOM):
        put(blue, ("flood", n), value)
        if n % 100 == 0:
            blue.advise([key(("flood", i)) for i in range(n)], [value] * n)
    better = [name for n, name in enumerate(mine) if n % 10 >= 6]
    assert there(red, list(better)) == len(better), "what is worth more than the mean stays"
    assert there(blue, [("flood", n) for n in range(20 * ROOM)]) > 0, "the flooding tenant has room too"


def test_a_tenant_that_measures_in_other_units_competes_on_equal_terms() -> None:
    _, red, blue = tenants()
    for n in range(4 * ROOM):
        for view, unit in ((red, 1e-12), (blue, 1e12)):
            put(view, (n, unit), unit * 2.0 ** (n % 7))
    counts = [there(v, [(n, unit) for n in range(4 * ROOM)]) for v, unit in ((red, 1e-12), (blue, 1e12))]
    assert sum(counts) == ROOM
    assert min(counts) > ROOM // 4


def test_values_of_objects_that_do_not_exist_do_not_move_the_mean() -> None:
    store, red, blue = tenants()
    for n in range(10):
        put(red, n, 1.0)
        put(blue, n, 1.0)
    blue.advise([key(("ghost", n)) for n in range(5000)], [1e-200] * 5000)
    blue.advise([key(n) for n in range(5)], [2.0] * 5)
    values = sorted(e.meta.value for e in store.scan_all() if e.meta.value is not None)
    assert len(values) == 20
    assert values[-1] < 2.01


def test_a_value_is_bounded_both_ways() -> None:
    store, red, _ = tenants()
    for n in range(20):
        put(red, n, 1.0)
    red.advise([key(1), key(2), key(3)], [1e300, 0.0, 1e-300])
    values = [e.meta.value or 0.0 for e in store.scan_all()]
    assert max(values) <= 2.0**8 * 1.001
    assert min(values) >= 2.0**-8 * 0.999


def test_bad_values_through_a_scale() -> None:
    _, red, _ = tenants()
    for value in (nan, inf, -1.0):
        assert put(red, value, value) is Outcome.ERROR
    assert put(red, "good", 1.0) is Outcome.STORED
    red.advise([key("good")], [nan])


def test_nobody_values_what_is_not_theirs() -> None:
    store = MemoryBackend(0, AgingEnv())
    for name, namespace in (("a", NAMESPACE), ("b", OTHER_NAMESPACE)):
        store.set([to_set(key(name), payload(name, SIZE), namespace=namespace, value=4.0)])
    view = TenantStore(store, named=frozenset({NAMESPACE}))
    view.advise([key("b"), key("a"), key("unknown")], [0.0, 16.0, 1.0])
    values = [entry and round(entry.meta.value or 0.0, 2) for entry in store.describe([key("a"), key("b")])]
    assert values == [16.0, 4.0]


def test_nobody_uses_what_is_not_theirs() -> None:
    store, red, blue = tenants()
    for n in range(ROOM):
        red.set([to_set(key(n), payload(n, SIZE))])
    hidden = [entry.key for entry in store.scan_all()]
    for stranger in (blue, TenantStore(store, named=frozenset({OTHER_NAMESPACE}))):
        stranger.advise([*map(key, range(10)), *hidden], [])
    red.advise([*map(key, range(10, 20))], [])
    for n in range(ROOM, ROOM + 10):
        red.set([to_set(key(n), payload(n, SIZE))])
    assert (there(red, [*range(10)]), there(red, [*range(10, 20)])) == (0, 10)
