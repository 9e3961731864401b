"""Parts of LMCache's adapter that need no LMCache: keys of objects, and tasks that always end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Event

import pytest

from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import InputError, UnavailableError
from tiercache.integrations.lmcache.identity import ChunkKeys, layout_of
from tiercache.integrations.lmcache.tasks import Task, Tasks
from tiercache.integrations.settings import StoreSettings
from tiercache.settings import read_section


@dataclass(frozen=True)
class Key:
    """The part of LMCache's `ObjectKey` that the adapter uses."""

    chunk_hash: bytes = bytes(32)
    model_name: str = "model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


KEY, LAYOUT = Key(), layout_of([(2, 4, 64)], ["torch.bfloat16"])


def keys(tenant: str = "", revision: str = "1", chunk: int = 64, release: str = "0.5.6") -> ChunkKeys:
    given = {"storage": "memory://", "revision": revision, "tenant": tenant}
    return ChunkKeys(read_section(StoreSettings, "test", given), chunk, release)


def test_a_key_covers_everything_that_is_told() -> None:
    of = [
        *(
            keys().object_of(key, LAYOUT)
            for key in (
                KEY, replace(KEY, chunk_hash=b"a" * 32), replace(KEY, model_name="other"),
                replace(KEY, kv_rank=1), replace(KEY, object_group_id=1), replace(KEY, cache_salt="a"),
            )
        ),
        keys().object_of(KEY, layout_of([(2, 4, 64)], ["torch.float16"])),
        keys().object_of(KEY, layout_of([(4, 2, 64)], ["torch.bfloat16"])),
        *(
            one.object_of(KEY, LAYOUT)
            for one in (keys(tenant="a"), keys(revision="2"), keys(chunk=32), keys(release="1"))
        ),
    ]  # fmt: skip
    assert len({key.digest for key in of}) == len(of) == 12
    assert keys().object_of(Key(), LAYOUT) == of[0]
    assert not any(b"model" in key.digest for key in of)
    with pytest.raises(InputError, match="start LMCache with --hash-algorithm blake3"):
        keys().object_of(replace(KEY, chunk_hash=bytes(8)), LAYOUT)


def test_salts_are_tenants_with_namespaces_of_their_own() -> None:
    records = [
        keys().record("model", ""), keys().record("model", "a"), keys(tenant="a").record("model", ""),
        keys(tenant="a").record("model", "a"), keys(tenant="a/a").record("model", ""),
    ]  # fmt: skip
    assert [record.identity["tenant"] for record in records] == ["", "a", "a", "a/a", "a/a"]
    assert len({record.namespace for record in records}) == len(records)
    assert keys().meta(replace(KEY, cache_salt="a"), 5).namespace == records[1].namespace


def test_a_lookup_tells_which_chunk_comes_after_which() -> None:
    known, chunks = keys(), [Key(bytes([n]) * 32) for n in range(3)]
    ranks = [*chunks, *(replace(key, kv_rank=1) for key in chunks)]
    assert known.meta(chunks[1], 9).parent is None
    known.note_order(ranks)
    for key in (chunks, ranks[3:]):
        metas = [known.meta(one, 9) for one in key]
        pages = [known.object_of(one, LAYOUT).page_key for one in key]
        assert [meta.parent for meta in metas] == [None, *pages[:2]]
        assert [meta.depth for meta in metas] == [1, 2, 3]


def test_a_deletion_is_in_all_layouts_that_were_seen() -> None:
    known, other = keys(), layout_of([(9,)], ["torch.uint8"])
    assert known.in_all_layouts(KEY) == []
    seen = [known.object_of(KEY, LAYOUT), known.object_of(KEY, other)]
    known.object_of(replace(KEY, kv_rank=1), LAYOUT)
    assert known.in_all_layouts(KEY) == seen


HIT, LOST, BUSY = Outcome.HIT, Outcome.UNAVAILABLE, Outcome.THROTTLED


class Ending:
    """Tasks of pieces of 10 bytes on one thread, of which 40 may wait."""

    def __init__(self, work: Callable[[int, int], Sequence[Outcome]]) -> None:
        self.work, self.signals, self.calls = work, 0, list[tuple[int, int]]()
        self.tasks = Tasks("test", 1, 10, 40, self.signal)

    def signal(self) -> None:
        self.signals += 1

    def submit(self, *sizes: int) -> int:
        return self.tasks.submit(self.call, sizes)

    def call(self, start: int, stop: int) -> Sequence[Outcome]:
        self.calls.append((start, stop))
        return self.work(start, stop)

    def outcomes(self, number: int) -> list[Outcome]:
        found: list[Task | None] = []
        until(lambda: found.append(self.tasks.fetch(number)) or found[-1])
        assert self.tasks.fetch(number) is None, "a result is fetched once"
        assert found[-1] is not None
        return found[-1].outcomes


def test_a_task_is_done_in_pieces_and_ends_once() -> None:
    ending = Ending(lambda start, stop: [HIT, Outcome.MISS][: stop - start])
    assert ending.outcomes(ending.submit(5, 5, 20, 1)) == [HIT, Outcome.MISS, HIT, HIT]
    assert ending.calls == [(0, 2), (2, 3), (3, 4)]
    assert ending.outcomes(ending.submit()) == []
    assert (ending.signals, ending.tasks.waiting) == (2, 0)
    first, second = ending.submit(1), ending.submit(2)
    until(lambda: ending.signals == 4)
    assert {number: ended.sizes for number, ended in ending.tasks.fetch_all().items()} == {
        first: (1,), second: (2,),
    }  # fmt: skip
    ending.tasks.close()


@pytest.mark.parametrize("error", [UnavailableError("out"), ValueError("a bug"), None])
def test_what_follows_a_failed_piece_is_not_asked_of_the_store(error: Exception | None) -> None:
    def work(start: int, stop: int) -> Sequence[Outcome]:
        if start and error:
            raise error
        return [LOST if start else HIT]

    ending = Ending(work)
    assert ending.outcomes(ending.submit(10, 10, 10)) == [HIT, LOST, LOST]
    assert len(ending.calls) == 2
    assert ending.outcomes(ending.submit(10)) == [HIT]
    ending.tasks.close()


def test_a_store_that_hangs_makes_nobody_wait_and_no_queue_grow() -> None:
    go = Event()
    ending = Ending(lambda start, stop: [HIT] * go.wait(60))
    slow, queued, refused = ending.submit(50), None, ending.submit(1)
    assert ending.outcomes(refused) == [BUSY]
    go.set()
    assert ending.outcomes(slow) == [HIT]
    go.clear()
    slow, queued = ending.submit(10), ending.submit(30)
    until(lambda: len(ending.calls) == 2)
    assert ending.outcomes(ending.submit(1)) == [BUSY]
    ending.tasks._closed = True  # private: as `close` begins, which then waits for the call
    go.set()
    assert (ending.outcomes(slow), ending.outcomes(queued)) == ([HIT], [LOST])
    assert ending.outcomes(ending.submit(1)) == [BUSY]
    ending.tasks.close()
