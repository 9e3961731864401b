"""The way of parts through a pool: nothing that fails on it keeps memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiercache_backends.mooncake.header import HEADER_BYTES
from tiercache_backends.mooncake.library import MooncakeClient
from tiercache_backends.mooncake.link import Link, Patience
from tiercache_backends.mooncake.memory import Region
from tiercache_backends.mooncake.settings import read_settings
from tiercache_backends.mooncake.store import MooncakeBackend
from tiercache_backends.mooncake.traffic import Codes, Part, PartMover, PlacedItem

from tests.storage_backends.mooncake.rig import Pool
from tiercache.core import BLOCK_ALIGN, Outcome
from tiercache.storage.attached import FreeRanges
from tiercache.storage.base import GetItem
from tiercache.testing.objects import key, payload, to_get, to_set


def part(n: int) -> Part[GetItem]:
    item = to_get(key(n), 100)
    return Part([PlacedItem(n, item, f"tc1/traffic/{n}", 100, None, 0)], HEADER_BYTES + 100)


@pytest.mark.parametrize("where", ["parts", "prepare", "work", "finish"])
def test_an_exception_on_the_way_leaks_no_staging_memory(pool: Pool, where: str) -> None:
    def fails(step: str, at: int) -> Callable[[Part[GetItem]], None]:
        def check(part: Part[GetItem]) -> None:
            if where == step and part.placed[0].index == at:
                raise LookupError(step)

        return check

    making, preparing, working, ending = (
        fails("parts", 2), fails("prepare", 2), fails("work", 0), fails("finish", 0),
    )  # fmt: skip

    def made(n: int) -> Part[GetItem]:
        one = part(n)
        making(one)
        return one

    def work(client: MooncakeClient, part: Part[GetItem], region: Region) -> Codes:
        working(part)
        return client.exist(part.names)

    link = Link(read_settings(pool.section("traffic", staging="1MiB")))
    try:
        with pytest.raises(LookupError, match=where):
            PartMover(
                link, Patience(5.0), "test", work=work, prepare=lambda part, region: preparing(part),
                finish=lambda part, region, codes: ending(part), outcomes=[Outcome.MISS] * 4,
            ).move(map(made, range(4)))  # fmt: skip
        assert link.staging.free.nbytes == link.staging.nbytes
        assert link.ask(Patience(5.0), "test", lambda client: client.exist(["tc1/traffic/0"])) == [0]
    finally:
        link.close()


def test_staging_gives_every_byte_once() -> None:
    staging = FreeRanges(16 * BLOCK_ALIGN)
    taken = [staging.take(size) for size in (1, BLOCK_ALIGN, BLOCK_ALIGN + 1, 8 * BLOCK_ALIGN)]
    assert taken == [0, BLOCK_ALIGN, 2 * BLOCK_ALIGN, 4 * BLOCK_ALIGN]
    assert staging.take(5 * BLOCK_ALIGN) is None
    staging.give(BLOCK_ALIGN, BLOCK_ALIGN)
    staging.give(4 * BLOCK_ALIGN, 8 * BLOCK_ALIGN)
    assert staging.take(9 * BLOCK_ALIGN) == 4 * BLOCK_ALIGN
    staging.give(4 * BLOCK_ALIGN, 9 * BLOCK_ALIGN)
    staging.give(0, 1)
    staging.give(2 * BLOCK_ALIGN, BLOCK_ALIGN + 1)
    assert staging.take(16 * BLOCK_ALIGN) == 0


def test_an_object_that_is_too_long_for_the_staging_memory_is_an_error_of_its_own(pool: Pool) -> None:
    lengths = {key("long"): 2 << 20, key("short"): 100}
    with MooncakeBackend(read_settings(pool.section("long", staging="1MiB"))) as store:
        items = [to_set(name, payload(name, length)) for name, length in lengths.items()]
        assert store.set(items) == [Outcome.ERROR, Outcome.STORED]
        assert store.get([to_get(name, length) for name, length in lengths.items()]) == [
            Outcome.ERROR,
            Outcome.HIT,
        ]
