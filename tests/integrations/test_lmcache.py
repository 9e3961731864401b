"""Parts of LMCache's adapter that need no LMCache: keys of objects, and tasks that always end."""

from __future__ import annotations

from threading import Event
from typing import NamedTuple

import pytest

from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import InputError, UnavailableError
from tiercache.integrations.lmcache.identity import ChunkKeys, layout_of
from tiercache.integrations.lmcache.tasks import Tasks
from tiercache.integrations.settings import StoreSettings
from tiercache.settings import read_section


class Key(NamedTuple):
    """The part of LMCache's `ObjectKey` that the adapter uses."""

    chunk_hash: bytes = bytes(32)
    model_name: str = "model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


KEY, LAYOUT = Key(), layout_of([(2, 4, 64)], ["torch.bfloat16"])


def keys(tenant="", revision="1", chunk=64, release="0.5.6"):
    given = {"storage": "memory://", "revision": revision, "tenant": tenant}
    return ChunkKeys(read_section(StoreSettings, "test", given), chunk, release)


def test_a_key_covers_everything_that_is_told():
    changes = [
        {}, {"chunk_hash": b"a" * 32}, {"model_name": "b"}, {"kv_rank": 1}, {"object_group_id": 1},
        {"cache_salt": "a"},
    ]  # fmt: skip
    of = [keys().object_of(KEY._replace(**change), LAYOUT) for change in changes]
    others = [((2, 4, 64), "torch.float16"), ((4, 2, 64), "torch.bfloat16")]
    of += [keys().object_of(KEY, layout_of([shape], [dtype])) for shape, dtype in others]
    settings = [{"tenant": "a"}, {"revision": "2"}, {"chunk": 32}, {"release": "1"}]
    of += [keys(**one).object_of(KEY, LAYOUT) for one in settings]
    assert len({key.digest for key in of}) == len(of) == 12
    assert keys().object_of(Key(), LAYOUT) == of[0]
    assert not any(b"model" in key.digest for key in of)
    with pytest.raises(InputError, match="start LMCache with --hash-algorithm blake3"):
        keys().object_of(KEY._replace(chunk_hash=bytes(8)), LAYOUT)


def test_salts_are_tenants_with_namespaces_of_their_own():
    given = [("", ""), ("", "a"), ("a", ""), ("a", "a"), ("a/a", "")]
    records = [keys(tenant).record("model", salt) for tenant, salt in given]
    assert [record.identity["tenant"] for record in records] == ["", "a", "a", "a/a", "a/a"]
    assert len({record.namespace for record in records}) == len(records)
    assert keys().meta(KEY._replace(cache_salt="a"), 5).namespace == records[1].namespace


def test_a_lookup_tells_which_chunk_comes_after_which():
    known, chunks = keys(), [Key(bytes([n]) * 32) for n in range(3)]
    others = [key._replace(kv_rank=1) for key in chunks]
    assert known.meta(chunks[1], 9).parent is None
    known.note_order(chunks + others)
    for row in (chunks, others):
        metas = [known.meta(one, 9) for one in row]
        pages = [known.object_of(one, LAYOUT).page_key for one in row]
        assert [meta.parent for meta in metas] == [None, *pages[:2]]
        assert [meta.depth for meta in metas] == [1, 2, 3]


def test_a_deletion_is_in_all_layouts_that_were_seen():
    known = keys()
    assert known.in_all_layouts(KEY) == []
    seen = [known.object_of(KEY, layout) for layout in (LAYOUT, layout_of([(9,)], ["torch.uint8"]))]
    known.object_of(KEY._replace(kv_rank=1), LAYOUT)
    assert known.in_all_layouts(KEY) == seen


HIT, LOST, BUSY = Outcome.HIT, Outcome.UNAVAILABLE, Outcome.THROTTLED


class Ending:
    """Tasks of pieces of 10 bytes on one thread, of which 40 may wait."""

    def __init__(self, work):
        self.work, self.signals, self.calls = work, [], []
        self.tasks = Tasks("test", 1, 10, 40, lambda: self.signals.append(1))

    def submit(self, *sizes):
        return self.tasks.submit(self.call, sizes)

    def call(self, start, stop):
        self.calls.append((start, stop))
        return self.work(start, stop)

    def outcomes(self, number):
        found = []
        until(lambda: found.append(self.tasks.fetch(number)) or found[-1])
        assert self.tasks.fetch(number) is None, "a result is fetched once"
        return found[-1].outcomes


def test_a_task_is_done_in_pieces_and_ends_once():
    ending = Ending(lambda start, stop: [HIT, Outcome.MISS][: stop - start])
    assert ending.outcomes(ending.submit(5, 5, 20, 1)) == [HIT, Outcome.MISS, HIT, HIT]
    assert ending.calls == [(0, 2), (2, 3), (3, 4)]
    assert ending.outcomes(ending.submit()) == []
    assert (len(ending.signals), ending.tasks.waiting) == (2, 0)
    numbers = [ending.submit(1), ending.submit(2)]
    until(lambda: len(ending.signals) == 4)
    assert {number: task.sizes for number, task in ending.tasks.fetch_all().items()} == dict(
        zip(numbers, [(1,), (2,)], strict=True)
    )
    ending.tasks.close()


@pytest.mark.parametrize("error", [UnavailableError("out"), ValueError("a bug"), None])
def test_what_follows_a_failed_piece_is_not_asked_of_the_store(error):
    def work(start, stop):
        if start and error:
            raise error
        return [LOST if start else HIT]

    ending = Ending(work)
    assert ending.outcomes(ending.submit(10, 10, 10)) == [HIT, LOST, LOST]
    assert len(ending.calls) == 2
    assert ending.outcomes(ending.submit(10)) == [HIT]
    ending.tasks.close()


def test_a_store_that_hangs_makes_nobody_wait_and_no_queue_grow():
    go = Event()
    ending = Ending(lambda start, stop: [HIT] * go.wait(60))
    slow, queued = ending.submit(10), ending.submit(30)
    until(lambda: ending.calls)
    assert ending.outcomes(ending.submit(1)) == [BUSY]
    ending.tasks._closed = True  # private: as `close` begins, which then waits for the call
    go.set()
    assert (ending.outcomes(slow), ending.outcomes(queued)) == ([HIT], [LOST])
    assert ending.outcomes(ending.submit(1)) == [BUSY]
    ending.tasks.close()
