"""Tests of the stores that evict by `EvictionOrder`: the objects that are kept can be restored.

Objects that no restore could use are refused, or evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tiercache.core import Outcome
from tiercache.storage.base import NamespaceRecord, SetItem, StorageBackend, TierReport, Usage
from tiercache.testing.conformance.hooks import ERROR, HIT, STORED, THROTTLED, BackendHooks
from tiercache.testing.objects import NAMESPACE, OTHER_NAMESPACE, chain, key, payload, state_of, to_set

PAGE = 20_000
"""Bytes of a page."""
HALF = PAGE // 2
STATE = 30_000
"""Bytes of a state."""
EVERY = 5
"""Number of pages that each turn of a conversation adds. The turn also adds a state on the last page."""


class OwnHooks(BackendHooks):
    """Hooks that only the stores of this repository need."""

    obeys_values: bool = False
    """Whether the store evicts by the values that callers give."""

    def media(self, store: StorageBackend) -> Sequence[Usage | TierReport]:
        """Return the usage of each medium of a store. Default: the store's own usage."""
        return [store.usage()]

    def pass_time(self, store: StorageBackend, seconds: float) -> None:
        """Advance the monotonic clock of the store."""


class Restorable(OwnHooks):
    """A theme beside those of the conformance suite, for stores whose `usage` has the bytes by their use."""

    def test_a_conversation_larger_than_the_store_keeps_its_beginning(self, bounded: StorageBackend) -> None:
        turns = 2 * self.small // _nbytes(1)
        last = _converse(bounded, "long", turns)
        assert THROTTLED in last
        depth = _restorable(bounded, "long", turns)
        assert depth * PAGE > self.third
        assert self._restorable_share(bounded) >= 0.9
        assert set(bounded.set(_turn("long", turns))) == {THROTTLED}, "useless without the pages before"
        assert _restorable(bounded, "long", turns) == depth

    def test_another_conversation_takes_over_from_its_end(self, bounded: StorageBackend) -> None:
        turns = 2 * self.small // _nbytes(1)
        _converse(bounded, "first", turns)
        depth = _restorable(bounded, "first", turns)
        assert set(_converse(bounded, "second", 6)) == {STORED}
        assert _restorable(bounded, "second", 6) == 6 * EVERY
        assert 0 < _restorable(bounded, "first", turns) < depth
        assert self._restorable_share(bounded) >= 0.9

    @pytest.mark.parametrize("states_first", [True, False])
    def test_states_may_come_before_their_pages_or_after(self, bounded, states_first):
        bounded.register_namespace(NamespaceRecord(NAMESPACE, {}, states=True))
        for name in range(2 * self.small // _nbytes(2)):
            for turn in range(2):
                *pages, state = _turn(name, turn)
                for call in ([state], pages) if states_first else (pages, [state]):
                    assert set(bounded.set(call)) == {STORED}
        assert self._restorable_share(bounded) >= 0.9

    @pytest.mark.parametrize("state_first", [False, True])
    def test_a_state_whose_pages_were_refused_is_refused(self, bounded, state_first):
        """The state comes in a call of its own, as engines send it, and its page did not fit."""
        bounded.register_namespace(NamespaceRecord(NAMESPACE, {}, states=True))
        _converse(bounded, "kept", 3)
        *pages, state = _turn("long", 0, every=2 * self.small // PAGE)
        if state_first:
            assert bounded.set([state]) == [STORED]
        for first in range(0, len(pages), 16):
            answers = bounded.set(pages[first : first + 16])
        assert answers[-1] is THROTTLED
        assert bounded.set([state]) in ([THROTTLED], [HIT] if state_first else [THROTTLED])
        assert set(_converse(bounded, "next", 2)) == {STORED}
        assert self._worth(bounded)[2] == 0, "no orphan is kept"
        *pages, state = _turn("next", 2)
        assert set(bounded.set([state])) | set(bounded.set(pages)) == {STORED}
        assert bounded.set([to_set(state.key, payload(state.key, STATE), parent=state.meta.parent)]) == [HIT]

    def test_a_conversation_without_states_does_not_push_out_the_others(self, bounded):
        _converse(bounded, "kept", self.small // 2 // _nbytes(1))
        for n, (k, parent) in enumerate(chain("endless", 3 * self.small // PAGE)):
            bounded.set([to_set(k, payload(k, PAGE), parent=parent, depth=n + 1)])
        assert _restorable(bounded, "kept", self.small // 2 // _nbytes(1)) >= EVERY
        assert self._restorable_share(bounded) >= 1 / 8
        assert set(_converse(bounded, "next", 3)) == {STORED}
        assert _restorable(bounded, "next", 3) == 3 * EVERY

    def test_states_of_one_namespace_say_nothing_of_another(self, bounded: StorageBackend) -> None:
        plain = [
            to_set(k, payload(k, PAGE), parent=parent, namespace=OTHER_NAMESPACE)
            for k, parent in chain("plain", 20)
        ]
        assert set(bounded.set(plain)) == {STORED}
        for name in range(5):
            _converse(bounded, name, 1)
        assert self._worth(bounded) == (20 * PAGE + 5 * _nbytes(1), 0, 0)
        for name in range(5, 2 * self.small // _nbytes(1)):
            _converse(bounded, name, 1)
            bounded.set(plain)
        assert all(bounded.exists([item.key for item in plain])), "they were used all the time"

    def test_states_without_pages_are_of_use_alone(self, bounded: StorageBackend) -> None:
        bounded.register_namespace(NamespaceRecord(NAMESPACE, {}, states=True))
        alone = [_state_alone(("kept", n), depth=n + 1) for n in range(5)]
        assert set(bounded.set(alone)) == {STORED}
        assert self._worth(bounded) == (5 * STATE, 0, 0)
        for name in range(2 * self.small // _nbytes(1)):
            _converse(bounded, name, 1)
            other = _state_alone(name, depth=7)
            assert bounded.set([other]) == [STORED]
            if name % 4 == 0:
                bounded.set(alone)
        assert self._restorable_share(bounded) == 1
        assert all(bounded.exists([item.key for item in alone])), "they were used all the time"
        for name in range(2 * self.small // STATE):
            assert bounded.set([_state_alone(("more", name), depth=name + 1)]) == [STORED]
        assert self._restorable_share(bounded) == 1

    def test_a_page_behind_one_that_is_not_stored_waits_for_it(self, bounded: StorageBackend) -> None:
        first, second, third = [to_set(k, payload(k, PAGE), parent=parent) for k, parent in chain("s", 3)]
        assert bounded.set([third]) == bounded.set([second]) == [THROTTLED]
        assert bounded.set([second, third]) == [THROTTLED] * 2
        assert self.usage(bounded).objects == 0
        assert bounded.set([first]) == [STORED]
        assert bounded.set([third]) == [THROTTLED]
        assert bounded.set([second]) == bounded.set([third]) == [STORED]
        bounded.delete([second.key])
        fourth = to_set(key("t"), payload("t", PAGE), parent=second.key.page_key)
        assert bounded.set([fourth]) == [THROTTLED]
        other = to_set(key("u"), payload("u", PAGE), parent=first.key.page_key, namespace=OTHER_NAMESPACE)
        assert bounded.set([other]) == [THROTTLED], "a page of another namespace is no parent"

    def test_a_batch_may_come_in_any_order(self, bounded: StorageBackend) -> None:
        items = [*_turn("s", 0, every=40), *_turn("t", 0)]
        assert bounded.set(items[::-1]) == [STORED] * len(items)
        assert self._worth(bounded) == (45 * PAGE + 2 * STATE, 0, 0)
        assert bounded.set(items[::-1]) == [Outcome.HIT] * len(items)

    def test_a_page_that_does_not_fit_takes_what_follows_it_along(self, bounded: StorageBackend) -> None:
        (a, _), (b, above_b), (c, above_c), (d, above_d) = chain("s", 4)
        items = [
            to_set(a, payload(a, PAGE)),
            to_set(b, bytes(self.small + 1), parent=above_b),
            to_set(c, payload(c, PAGE), parent=above_c),
            to_set(d, payload(d, PAGE), parent=above_d),
            to_set(key("x"), payload("x", PAGE)),
        ]
        assert bounded.set(items) == [STORED, THROTTLED, THROTTLED, THROTTLED, STORED]
        assert self._worth(bounded) == (2 * PAGE, 0, 0)

    def test_pages_that_follow_each_other_in_a_circle_are_refused(self, bounded, tmp_path):
        """Pages that form a circle never make the store drop or refuse objects of another namespace."""
        others = [to_set(key(n), payload(n, PAGE), namespace=OTHER_NAMESPACE) for n in range(30)]
        assert set(bounded.set(others)) == {STORED}
        for size in (2, 3, 8, 39):
            assert STORED not in bounded.set(_circle(("c", size), size))
        for name in range(10):
            items = [to_set(k, payload(k, 2000), parent=parent) for k, parent in chain(("d", name), 3)]
            assert set(bounded.set(items)) == {STORED}
            bounded.delete([items[0].key])
            assert bounded.set([_behind(items[0], items[2])]) == [ERROR], "it would be its own ancestor"
            assert bounded.set([_behind(items[1], items[2])]) == [Outcome.HIT], "a stored object stays"
        assert all(bounded.exists([item.key for item in others]))
        if bounded.capabilities.persistent:
            path = tmp_path / "store"
            with self.kill(bounded, path, self.small) as again:
                assert all(again.exists([item.key for item in others]))
                _go_on(again, others, self.small)
                self.check(again)
        else:
            _go_on(bounded, others, self.small)

    def _restorable_share(self, store: StorageBackend) -> float:
        """Return the fraction of a medium's payload that a restore can use; the smallest of all media."""
        return min(int(one.details["restorable_bytes"]) / one.payload_bytes for one in self.media(store))

    def _worth(self, store: StorageBackend) -> tuple[int, int, int]:
        """Return restorable and dead bytes, in halves of a page because wrappers add some, and orphans."""
        details = self.usage(store).details
        restorable, dead, orphans = (
            int(details[name]) for name in ("restorable_bytes", "dead_bytes", "orphans")
        )
        return restorable // HALF * HALF, dead // HALF * HALF, orphans


def _turn(name: object, turn: int, every: int = EVERY) -> list[SetItem]:
    """Return the objects of turn number `turn` of a conversation: pages, and the state of the last page."""
    pages = list(enumerate(chain(name, (turn + 1) * every), 1))[turn * every :]
    items = [to_set(k, payload(k, PAGE), parent=parent, depth=depth) for depth, (k, parent) in pages]
    state = state_of((name, pages[-1][0] - 1))
    return [*items, to_set(state, payload(state, STATE), parent=state.page_key, depth=pages[-1][0])]


def _state_alone(name: object, depth: int) -> SetItem:
    """Return a state of a model that has no pages."""
    state = state_of(("alone", name))
    return to_set(state, payload(state, STATE), namespace=OTHER_NAMESPACE, depth=depth)


def _converse(store: StorageBackend, name: object, turns: int) -> list[Outcome]:
    """Store a conversation turn by turn, and return the answers to the last turn."""
    for turn in range(turns):
        answers = store.set(_turn(name, turn))
    return answers


def _nbytes(turns: int) -> int:
    return turns * (EVERY * PAGE + STATE)


def _restorable(store: StorageBackend, name: object, turns: int) -> int:
    """Return the most leading pages of a conversation that a restore, which ends at a state, can use."""
    pages = store.exists([k for k, _ in chain(name, turns * EVERY)])
    run = pages.index(False) if False in pages else len(pages)
    depths = range(EVERY, run + 1, EVERY)
    states = store.exists([state_of((name, depth - 1)) for depth in depths])
    return max((depth for depth, there in zip(depths, states, strict=True) if there), default=0)


def _circle(name: object, size: int) -> list[SetItem]:
    """Return pages that form a circle: each names the next one as its parent."""
    keys = [key((name, n)) for n in range(size)]
    return [to_set(k, payload(k, 2000), parent=keys[(n + 1) % size].page_key) for n, k in enumerate(keys)]


def _behind(item: SetItem, other: SetItem) -> SetItem:
    """Return an item for the same object with another page as its parent."""
    return to_set(item.key, payload(item.key, item.meta.length), parent=other.key.page_key)


def _go_on(store: StorageBackend, items: Sequence[SetItem], capacity: int) -> None:
    """Check that a store takes twice its `capacity` of new objects, and keeps `items` in use."""
    for n in range(2 * capacity // PAGE):
        assert store.set([to_set(key(("on", n)), payload(n, PAGE), namespace=OTHER_NAMESPACE)]) == [STORED]
        if n % 4 == 0:
            store.set(items)
    assert all(store.exists([item.key for item in items]))
