"""The judge of `restorable` on cases made by hand, its model, and one row."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.benchmarks import restorable
from tests.benchmarks.conversations import Conversation, Truth, clients, growing, held
from tiercache.core import ObjectMeta, PoolName
from tiercache.storage.base import ScanEntry
from tiercache.testing.objects import NAMESPACE, key


def stored(conversation: Conversation, pages: Iterable[int], states: Iterable[int] = ()) -> list[ScanEntry]:
    """Return scan entries for pages and states at these depths, without parents or depths."""
    meta = ObjectMeta(NAMESPACE, 1, bytes(16))
    made = []
    for pool, depths in ((PoolName.KV, pages), (PoolName.MAMBA, states)):
        made += [
            ScanEntry(key("any", pool)._replace(digest=bytes(32) + conversation.keys[d - 1]), meta)
            for d in depths
        ]
    return made


@pytest.mark.parametrize(
    ("pages", "states", "restorable_pages"),
    [
        ([1, 2, 3, 4, 5, 6], [6], 6),
        ([1, 2, 3, 4, 5, 6], [4], 4),
        ([1, 2, 3, 4, 5, 6], [2, 4], 4),
        ([1, 2, 3, 4, 5, 6], [], 0),
        ([2, 3, 4, 5, 6], [6], 0),
        ([1, 2, 4, 5, 6], [6], 0),
        ([1, 2, 4, 5, 6], [2, 6], 2),
        ([1, 2, 3], [4], 0),
        ([1], [1], 1),
        ([], [3], 0),
    ],
)
def test_a_page_counts_with_all_before_it_and_a_state_on_it_or_behind(
    pages, states, restorable_pages
) -> None:
    conversation, truth = Conversation("c"), Truth()
    truth.learn(conversation, 0, 3)
    truth.learn(conversation, 3, 6)
    found = held(reversed(stored(conversation, pages, states)), truth)
    assert (len(found.restorable), len(found.pages)) == (restorable_pages, len(pages))


def test_without_states_a_page_counts_with_all_before_it() -> None:
    conversation, truth = Conversation("c", hybrid=False), Truth()
    truth.learn(conversation, 0, 6)
    found = held(stored(conversation, [1, 2, 3, 5, 6]), truth)
    assert (len(found.restorable), found.share) == (3, 0.6)


def test_a_state_of_one_branch_makes_the_shared_pages_count_and_not_the_other_branch() -> None:
    one, other, truth = Conversation("a", shared=2), Conversation("b", shared=2), Truth()
    for conversation in (one, other):
        truth.learn(conversation, 0, 4)
    found = held(stored(one, [1, 2, 3, 4]) + stored(other, [3, 4], [4]), truth)
    assert found.restorable == set(other.keys)


def test_tenants_do_not_meet() -> None:
    assert not set(Conversation("a").upto(3)) & set(Conversation("a", tenant=1).upto(3))


def test_states_come_at_multiples_and_ends() -> None:
    assert Conversation("c", every=4, ends=False).states(4, 13) == [8, 12]
    assert Conversation("c", every=4).states(3, 13) == [4, 8, 12, 13]
    assert Conversation("c", ends=False).states(0, 9) == []
    assert Conversation("c", hybrid=False).states(0, 9) == []


def test_histories_go_on_where_they_were() -> None:
    ends: dict[Conversation, int] = {}
    for turn in clients(20, 200, seed=1):
        assert turn.first == ends.get(turn.conversation, 0) < turn.last
        ends[turn.conversation] = turn.last
    assert [t.last for t in growing(Conversation("c"), 10, 4)] == [4, 8, 10]


def test_a_row(tmp_path: Path) -> None:
    small = restorable.Plan("small", lambda _: restorable.rounds(2, 5, 8, hybrid=False), asks=False)
    row = restorable.measure("memory", small, 64 * 640, 640, 640, tmp_path)
    assert (row["row"], row["store"], row["errors"], row["evicted"] > 0) == ("small", "memory", 0, True)
    assert row["share"] <= row["share_mean"] <= 1
    assert not list(tmp_path.iterdir())


def test_what_is_below_its_target_is_named() -> None:
    good = {"share": 0.9, "target": 0.9, "loses_at": 0.9}
    assert restorable.missed(good) == []
    assert restorable.missed(good | {"share": 0.89}) == ["share"]
    for loses_at in (0.8, None):
        assert restorable.missed(good | {"loses_at": loses_at}) == ["loses_at"]
