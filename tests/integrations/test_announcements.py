"""Announcements of a store: never too much, never twice, and in the end all that is there."""

from __future__ import annotations

import random

from tiercache.core import ObjectKey, PoolName
from tiercache.integrations.announcements import Announcements


def test_what_is_told_is_bounded() -> None:
    """The router knows what is there, as far as the limit allows, and no table grows."""

    for seed in range(200):
        chance = random.Random(seed)
        told, router = Announcements[str](limit=4), set[str]()
        for _ in range(200):
            name = f"object {chance.randrange(9)}"
            key = ObjectKey(PoolName.KV, name.encode())
            match chance.randrange(5):
                case 0 | 1:
                    told.stored([(key, name)])
                case 2:
                    told.gone([key.digest], told.age - chance.randrange(2))
                case 3:
                    told.back([key.digest])
                case 4:
                    limit = chance.choice((1, 2, 99))
                    removed, stored = told.take(limit)
                    assert len(removed) + len(stored) <= limit
                    assert router >= set(removed)
                    router -= set(removed)
                    assert not router & set(stored)
                    router |= set(stored)
            assert len(router) <= 4
            assert set(told.told()) == router
            assert len(told.known()) <= 4
        while any(news := told.take(1)):
            router = (router - set(news.removed)) | set(news.stored)
        assert {name.encode() for name in router} == set(told.known())


def test_only_what_went_lately_comes_back() -> None:
    told = Announcements[str]()
    keys = [ObjectKey(PoolName.KV, bytes([i])) for i in range(3)]
    told.stored([(keys[0], "a"), (keys[1], "b")])
    assert told.take(9) == ([], ["a", "b"])
    told.gone([keys[0].digest], told.age)
    assert told.take(9) == (["a"], [])
    told.back([each.digest for each in keys])
    assert told.take(9) == ([], ["a"])
    told.gone([keys[1].digest], told.age)
    told.forget()
    told.back([each.digest for each in keys])
    assert told.take(9) == ([], [])


def test_an_answer_from_before_an_object_was_stored_does_not_count() -> None:
    told = Announcements[str]()
    key = ObjectKey(PoolName.KV, b"x")
    asked = told.age
    told.stored([(key, "x")])
    told.gone([key.digest], asked)
    assert told.take(9) == ([], ["x"])
    told.gone([key.digest], told.age)
    assert told.take(9) == (["x"], [])
