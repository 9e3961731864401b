"""The cache behind vLLM's connector, without vLLM: blocks of several groups, saved and loaded elsewhere."""

from __future__ import annotations

import logging
import pickle
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.controller.harness import Fence
from tests.storage.late import Late
from tests.waiting import until
from tiercache.controller import ControllerOptions, HybridCacheController
from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.integrations.vllm_connector.blocks import BlockPool, Reach, WindowPool, bytes_of
from tiercache.integrations.vllm_connector.cache import BlockLoad, BlockSave, EngineCache
from tiercache.integrations.vllm_connector.promises import Promises
from tiercache.keys import Identity
from tiercache.pools import HostArena
from tiercache.storage.registry import open_backend

KV, MAMBA, PAGE, BLOCKS = PoolName.KV, PoolName.MAMBA, 4, 40
Tables = dict[PoolName, np.ndarray]
IDENTITY = Identity("m", "1", "float32", "float32", "float32", page_size=PAGE)


class Engine:
    """An engine that fills its blocks with bytes that follow from the tokens; two groups have states."""

    WINDOWS: ClassVar[Sequence[Reach]] = ()

    def __init__(self, url: str, *, hangs: str = "", policy: str = "hvd", width: int = 600) -> None:
        """`hangs`: call of the store that waits until `go` is set, and sets `is_asked` before."""
        self.tensors = [torch.zeros(BLOCKS, width + 8 * n, dtype=torch.uint8) for n in range(4)]
        layers = [(n, f"layer {n}", tensor) for n, tensor in enumerate(self.tensors)]
        others = [layers[1:2], layers[3:4]]
        windows = WindowPool.over_windows(PAGE, others, self.WINDOWS) if self.WINDOWS else None
        other = windows or BlockPool.over(MAMBA, PAGE, others)
        self.kind = other.name
        pools = {KV: BlockPool.over(KV, PAGE, [layers[0:1], layers[2:3]]), self.kind: other}
        self.go, self.is_asked = Event(), Event()
        store = Late(open_backend(url), {hangs}, lambda: self.is_asked.set() or self.go.wait(30))
        self.is_broken = False
        arena, options = HostArena(width * 1747, 4096), ControllerOptions(policy=policy)
        self.controller = HybridCacheController(
            IDENTITY, pools, arena, store, options=options, clock=self.clock
        )
        self.cache = EngineCache(self.controller, pools, patience=0.3 if hangs else 30)
        self.promises = Promises(PAGE, 1, self.cache)
        self.draw = random.Random(5)

    def clock(self) -> float:
        if self.is_broken:
            raise OSError("no clock")
        return time.monotonic()

    def claim(self, name: str, tokens: list[int], pages: int) -> BlockLoad:
        return self.promises.claim(name, pages, self.blocks(len(tokens) // PAGE))

    def count(self, metric: str) -> float:
        return self.controller.metrics.total(metric)

    def blocks(self, count: int, known: int | None = None) -> Tables:
        """Take blocks for pages at random, other ones a group, but for what no window behind `known` sees."""
        kv, other = (np.array([self.draw.sample(range(1, BLOCKS), count) for _ in "ab"]) for _ in "ab")
        for row, reach in zip(other, self.WINDOWS, strict=False):
            row[: (reach.first(PAGE * (count if known is None else known)) + reach.cut) // PAGE] = 0
        return {KV: kv, self.kind: other}

    def rows(self, tables: Tables, tokens: list[int]) -> Iterator[tuple[int, torch.Tensor, bytes]]:
        """Yield the page, the row, and the bytes that belong there, of all that is in the tables."""
        for page in range(len(tokens) // PAGE):
            for n, tensor in enumerate(self.tensors):
                block = tables[self.kind if n % 2 else KV][n // 2, page]
                if block and (n % 2 == 0 or self.WINDOWS or (page + 1) * PAGE == len(tokens)):
                    seed = f"{n} {tokens[: (page + 1) * PAGE]}"
                    yield page, tensor[block], random.Random(seed).randbytes(tensor.shape[1])

    def compute(self, name: str, tokens: list[int], known: int = 0) -> None:
        tables = self.blocks(len(tokens) // PAGE, known)
        for _, row, data in self.rows(tables, tokens):
            row[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        states = {} if self.WINDOWS else {len(tokens): tables[MAMBA][:, -1:]}
        save = BlockSave(name, 0, np.array(tokens, np.uint64), b"", tables[KV], states)
        self.cache.save([save._replace(windows=tables[self.kind])])
        self.clear()  # vLLM gives the blocks to others

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def find(self, name: str, tokens: list[int], begin: int = 0) -> int:
        until(lambda: self.answer(name, tokens, begin))
        return self.answer(name, tokens, begin)[0]

    def answer(self, name: str, tokens: list[int], begin: int) -> list[int]:
        said = self.promises.find(name, np.array(tokens, np.uint64), b"", begin)
        return [] if said is None else [said]

    def load(self, name: str, tokens: list[int], pages: int, tables: Tables) -> bool:
        self.cache.load(self.promises.claim(name, pages, tables))
        return self.wait({name})

    def wait(self, names: set[str]) -> bool:
        """Wait for the end of these loads; return whether all have brought what was promised."""
        done, bad = set[str](), set[str]()

        def ended() -> bool:
            for found, more in zip((done, bad), self.cache.ended(), strict=True):
                found |= more
            return done == names

        until(ended)
        self.promises.note_ended(done)
        assert not any(tensor[0].any() for tensor in self.tensors), "block 0 is nobody's"
        return not bad


class Windowed(Engine):
    WINDOWS = (Reach(6), Reach(13))
    """Tokens that see themselves and 5, or 12, before: parts of two, and of three pages."""


class Halved(Engine):
    """First halves of pages, of which a window of two tokens sees none."""

    WINDOWS = (Reach(6, cut=2), Reach(3, cut=2))


class Chunked(Engine):
    WINDOWS = (Reach(20, is_chunk=True), Reach(6))
    """Tokens that see their own chunk of five pages, of which the first sees nothing before it."""


@pytest.mark.parametrize("kind", [Engine, Windowed, Halved, Chunked])
def test_what_is_saved_comes_back_in_other_blocks_from_host_and_store(kind, tmp_path):
    url, tokens = f"file://{tmp_path}/store?capacity=16MiB", list(range(100, 120))
    asked = [*tokens, 7]
    for life in range(2):
        engine = kind(url)
        if life == 0:
            assert engine.find("a", asked) == 0
            engine.compute("a", tokens[:12])
            engine.compute("a", tokens)
        for way in ("host", "store"):
            assert engine.find(way, asked) == 5
            assert engine.answer("other", asked, 0) == [5], "a promise is none's alone"
            tables = engine.blocks(5)
            assert engine.load(way, asked, 5, tables)
            assert all(bytes(row.numpy()) == data for _, row, data in engine.rows(tables, tokens)), way
            # The first three pages are the engine's own: they are not written to, and hold nothing here.
            assert engine.find(f"{way} 2", asked, begin=3) == 5
            engine.clear()
            tables = engine.blocks(5)
            assert engine.load(f"{way} 2", asked, 2, tables)
            for page, row, data in engine.rows(tables, tokens):
                assert (bytes(row.numpy()) == data) == (page >= 3), page
            until(engine.cache.reset)
        # Another depth than the promised one has no state, and block 0 is none: both loads fail.
        assert engine.find("short", asked) == 5
        assert not engine.load("short", asked, 4, engine.blocks(5))
        assert engine.find("short", asked) == 0, "it computes everything"
        assert engine.find("none", asked) == 5
        assert not engine.load("none", asked, 5, {p: t * (t > t[0, 0]) for p, t in engine.blocks(5).items()})
        engine.cache.close()


def test_windows_are_taken_where_others_may_begin_and_now_and_then_of_an_answer() -> None:
    engine, tokens = Windowed("memory://?capacity=16MiB"), list(range(80))
    assert engine.find("one", tokens[:49]) == 0
    engine.compute("one", tokens[:48])
    assert engine.find("part", tokens[:25]) == 0, "a window is at the prompt's end alone"
    other = [*tokens[:24], *range(300, 325)]
    assert engine.find("two", other) == 0
    engine.compute("two", other[:48])
    assert engine.find("three", [*tokens[:24], *range(400, 405)]) == 6, "two prompts have had these pages"
    for pages in range(13, 20):
        engine.compute("one", tokens[: PAGE * pages], known=pages - 1)
    assert engine.find("again", tokens) == 18, "12, 15 and 18 have no window in common"
    tables = engine.blocks(18)
    assert engine.load("again", tokens, 18, tables)
    rows = list(engine.rows(tables, tokens[:72]))
    assert all(bytes(row.numpy()) == data for _, row, data in rows)
    assert len(rows) == 18 * 2 + 2 + 3
    assert engine.find("gone", tokens) == 18
    tables[PoolName.SWA][1, 15] = 0
    assert not engine.load("gone", tokens, 18, tables), "a page of a window has no block"
    engine.cache.close()


def test_a_load_under_way_is_waited_for_and_a_store_that_hangs_is_not(tmp_path: Path) -> None:
    url, tokens = f"file://{tmp_path}/store?capacity=16MiB", list(range(20))
    engine = Engine(url)
    engine.compute("a", tokens)
    assert engine.find("one", [*tokens, 1]) == 5
    load = engine.claim("one", tokens, 5)
    assert engine.answer("two", [*tokens, 2], 0) == [], "the same pages are on their way"
    engine.cache.load(load)
    engine.promises.forget("one")
    assert engine.wait({"one"})
    assert engine.find("two", [*tokens, 2]) == 5
    engine.cache.close()
    engine = Engine(url, hangs="get")
    assert engine.find("three", [*tokens, 3]) == 0
    engine.go.set()
    engine.cache.close()


def test_only_what_is_on_its_way_is_waited_for_and_a_save_waits_for_no_load() -> None:
    engine, begin = Engine("memory://?capacity=16MiB"), list(range(8))
    ones, twos, threes = ([*begin, *range(n, n + 12)] for n in (100, 200, 300))
    for tokens in (ones, twos):
        engine.compute(str(tokens), tokens)
    fence = Fence()
    assert engine.find("one", [*ones, 1], begin=2) == 5
    engine.cache.load(engine.claim("one", ones, 3), lambda: fence)
    # The engine has the common pages itself; who lacks them, or goes on with those of the load, has to wait.
    assert engine.answer("two", [*twos, 1], begin=2) == [5]
    assert engine.answer("two again", [*twos, 1], begin=0) == engine.answer("1", [*ones, 1], begin=2) == []
    engine.cache.load(engine.claim("two", twos, 3))
    saving = Thread(target=engine.compute, args=("three", threes), daemon=True)
    saving.start()
    saving.join(30)
    assert not saving.is_alive()
    fence.open()
    assert engine.wait({"one", "two"})
    # What was never promised is a load that fails.
    engine.cache.load(engine.claim("nobody", ones, 3))
    assert not engine.wait({"nobody"})
    assert engine.find("late", [*ones, 1]) == 5  # and then the device fails
    with pytest.raises(ZeroDivisionError):
        engine.cache.load(engine.claim("late", ones, 5), lambda: 1 // 0)
    assert not engine.wait({"late"})
    assert engine.find("late", [*ones, 1]) == 0, "it computes everything"
    last = BlockSave("late", 0, np.array(ones, np.uint64), b"", np.zeros((2, 5), int), {}, is_last=True)
    with pytest.raises(ZeroDivisionError):
        engine.cache.save([last], lambda: 1 // 0)
    assert engine.find("late", [*ones, 1]) == 5, "the request is over"
    engine.cache.close()


def test_a_request_in_the_queue_is_searched_for_and_a_failure_does_not_end_the_background(tmp_path, caplog):
    url, tokens = f"file://{tmp_path}/store?capacity=16MiB", list(range(20))
    engine = Engine(url, hangs="set")
    engine.compute("a", tokens)
    assert engine.is_asked.wait(30)
    engine.is_broken = True
    until(lambda: "could not be noted" in caplog.text)
    engine.is_broken = False
    engine.go.set()
    until(lambda: engine.count("storage_sets_total") == 6)
    engine.cache.close()
    engine = Engine(url)
    engine.cache.expect("a", np.array([*tokens, 1], np.uint64), b"")
    until(lambda: engine.count("prefetches_total"))
    assert engine.answer("a", [*tokens, 1], 0) == [5]
    engine.cache.close()


def test_what_requests_got_and_missed_is_counted_once(tmp_path: Path) -> None:
    url, tokens = f"file://{tmp_path}/store?capacity=16MiB", list(range(20))
    asked = [*tokens, 7]
    engine = Engine(url)

    def counts(name: str, **where: str) -> float:
        return engine.controller.metrics.total(name, **where)

    def refuse(name: str, tokens: list[int], begin: int) -> None:
        for _ in "ab":  # vLLM says it again when a load has ended
            engine.find(name, tokens, begin)
            engine.promises.decline(name)

    refuse("a", asked, 0)
    engine.compute("a", tokens)
    assert counts("lookups_total", result="miss", reason="absent") == 6
    assert engine.find("b", asked, begin=2) == 5
    assert engine.load("b", asked, 3, engine.blocks(5))
    refuse("b", asked, 5)
    assert counts("tokens_total", how="restored") == 20
    assert counts("tokens_total", how="computed") == 21 + 1
    page, state = 600 + 616, 608 + 624
    assert counts("restored_bytes_total", tier="host") == 3 * page + state
    assert counts("restored_bytes_total", tier="device") == 2 * page
    # Pages without a state at their end are of no use.
    refuse("c", [*tokens[:16], 0, 0], 0)
    assert counts("lookups_total", pool="kv", result="miss", reason="partial_pools") == 2
    until(lambda: counts("written_bytes_total", tier="storage") == 5 * page + state)
    until(engine.cache.reset)
    assert engine.find("d", asked) == 5
    assert engine.load("d", asked, 5, engine.blocks(5))
    assert counts("restored_bytes_total", tier="storage") == 5 * page + state
    assert engine.find("e", asked) == 5
    assert not engine.load("e", asked, 4, engine.blocks(5))
    assert counts("restore_failures_total") == 1
    first = engine.cache.counted()
    assert first["tokens_total|restored"] == 40
    assert first["storage_hangs_total|fetch"] == 0
    assert engine.cache.counted() == {}, "a second has not passed"
    engine.cache.close()
    engine = Engine(url, hangs="get")
    refuse("late", asked, 0)
    assert counts("lookups_total", tier="storage", pool="kv", reason="timeout") == 1
    engine.go.set()
    engine.cache.close()


def test_what_is_pinned_stays_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine, tokens = Engine("memory://?capacity=16MiB"), np.arange(21, dtype=np.uint64)
    engine.compute("a", list(range(20)))
    engine.cache.keep(tokens + 50, 20, b"", None, 9.0)
    assert "nothing of these" in caplog.text
    engine.cache.keep(tokens, 20, b"", 60.0, 9.0)
    for fetched in (0, 6):
        until(engine.cache.reset)
        assert engine.find(str(fetched), tokens.tolist()) == 5
        engine.cache.forget(str(fetched))
        assert engine.count("storage_gets_total") == fetched
        engine.cache.keep(tokens, 20, b"", 0.0, None)
    assert [engine.count(name) for name in ("pins_total", "hints_total")] == [2, 2]
    engine.cache.close()


@pytest.mark.parametrize(("policy", "begin"), [("lru", 5), ("hvd", 0)])
def test_the_prefix_that_is_only_hit_above_stays_in_a_full_store(policy, begin, tmp_path):
    """The engine (5 pages) or the host has it; the store has room for a third of what is written."""
    hot, url = list(range(20)), f"file://{tmp_path}/store?capacity=4MiB"
    others = [[1000 * n + i for i in range(20)] for n in range(1, 121)]
    engine = Engine(url, policy=policy, width=8000)
    engine.compute("hot", hot)
    for n, other in enumerate(others, 1):
        assert engine.find(f"hot {n}", [*hot, 900], begin) == 5
        engine.cache.forget(f"hot {n}")
        assert engine.find(f"{n}", [*other, 1]) == 0
        engine.compute(f"{n}", other)
        engine.cache.forget(f"{n}")
        until(lambda n=n: engine.cache.ended() and engine.count("storage_sets_total") > 6 * n)
    engine.cache.close()
    engine = Engine(url, policy=policy, width=8000)
    assert sum(engine.find(f"{n}", [*other, 1]) == 5 for n, other in enumerate(others)) < 60
    assert engine.find("hot", [*hot, 1]) == engine.find("last", [*others[-1], 1]) == 5
    engine.cache.close()


def test_what_the_model_computes_faster_than_it_is_loaded_is_computed(tmp_path: Path) -> None:
    tokens = list(range(20))
    engine = Engine(f"file://{tmp_path}/store?capacity=16MiB")
    engine.compute("a", tokens)
    engine.cache.note_pass([(0, 5), (0, 15)], 10.0)
    # private: loads of a test have too few bytes to be measured
    engine.cache._controller._context.speeds._loads.add(1 << 20, 1.0)
    for name, own in (("slow model", 0), ("slow again", 3)):  # what the engine has itself saves nothing
        assert engine.find(name, [*tokens, 1], own) == 5
        assert engine.load(name, tokens, 5 - own, engine.blocks(5))
    assert engine.count("prefill_seconds_total") == pytest.approx(10 + 4, abs=0.01)
    assert engine.count("restore_seconds_total") == pytest.approx((7 * 1216 + 2 * 1232) / (1 << 20), abs=1e-5)
    engine.cache.note_pass([(0, 4096)], 0.1)
    engine.cache.note_pass([(20, 22)], 10.0)  # takes as long as any pass
    assert engine.find("fast model", [*tokens, 2]) == 0
    assert engine.find("fast model", [*tokens, 2], begin=3) == 3
    engine.cache.close()


@pytest.mark.parametrize(("speed", "begin", "depth"), [(4300, 3, 5), (3300, 3, 3), (3300, 0, 5)])
def test_pages_that_the_engine_has_are_no_part_of_a_load_nor_of_what_it_saves(speed, begin, depth):
    engine, tokens = Engine("memory://?capacity=16MiB"), list(range(20))
    engine.compute("a", tokens)
    engine.cache.note_pass([(12, 20)], 1.0)  # the last two of five pages
    # private: as above; a page has 1216 bytes, and the state 1232
    engine.cache._controller._context.speeds._loads.add(speed, 1.0)
    assert engine.find("b", [*tokens, 1], begin) == depth
    engine.cache.close()


def test_a_hit_that_only_the_store_has_is_noted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, tokens, depths = f"file://{tmp_path}/store?capacity=16MiB", list(range(20)), list[int]()
    engine = Engine(url)
    engine.compute("a", tokens)
    engine.cache.close()
    engine = Engine(url)  # has evicted nothing that it could miss
    monkeypatch.setattr(
        engine.controller.lent.index.policy, "reused", lambda reuse: depths.append(reuse.depth)
    )
    for noted in (1, 2):
        for _ in "ab":
            assert engine.find(f"request {noted}", [*tokens, 1]) == 5
        assert depths == [5] * noted
    engine.cache.close()


def test_blocks_that_are_not_contiguous_are_refused() -> None:
    split = torch.arange(240, dtype=torch.int16).view(8, 2, 5, 3).transpose(2, 3)
    assert bytes_of(split, 4, 100, "a").view(torch.int16)[1, :3].tolist() == [60, 61, 62]
    with pytest.raises(ConfigError, match="layer a, of which a block is not contiguous"):
        bytes_of(torch.zeros(8, 2, 6)[:, :, :3], 8, 24, "a")


class Ranks:
    """Two ranks with blocks, hosts and stores of their own, and the scheduler of both."""

    def __init__(self, folder: Path, *, hangs: str = "") -> None:
        urls = [f"file://{folder}/{rank}?capacity=16MiB" for rank in "ab"]
        self.engines = [Engine(urls[0]), Engine(urls[1], hangs=hangs)]
        self.promises = Promises(PAGE, 2, None)

    def step(self) -> None:
        """Let the workers do what they have been told, as vLLM's processes would, and hear their answers."""
        calls = pickle.loads(pickle.dumps(self.promises.take_calls()))
        for engine in self.engines:
            for call in calls:
                call(engine.cache)
        for engine in self.engines:
            self.promises.note_answers(engine.cache.answers())

    def find(self, name: str, tokens: list[int], begin: int = 0) -> int:
        found: list[int] = []

        def answered() -> bool:
            depth = self.promises.find(name, np.array(tokens, np.uint64), b"", begin)
            found.extend([] if depth is None else [depth])
            self.step()
            return bool(found)

        until(answered)
        return found[0]

    def load(self, name: str, pages: int, ways: tuple[Tables, Tables]) -> list[bool]:
        promised = self.promises.claim(name, pages, {})
        for engine, tables in zip(self.engines, ways, strict=True):
            engine.cache.load(promised._replace(tables=tables))
        return [engine.wait({name}) for engine in self.engines]

    def close(self) -> None:
        for engine in self.engines:
            engine.cache.close()


def test_ranks_promise_what_all_of_them_have(tmp_path: Path) -> None:
    ranks, tokens = Ranks(tmp_path), list(range(24))
    one, two = ranks.engines
    asked = [*tokens, 7]
    assert ranks.find("first", asked) == 0
    for depth in (2, 4, 6):
        one.compute("first", tokens[: depth * PAGE])
    for depth in (2, 3, 5):
        two.compute("first", tokens[: depth * PAGE])
    # The answers are 6 and 5, then 4 and 3; 2 is the deepest state that both have.
    assert ranks.find("both", asked) == 2
    tables = one.blocks(2), two.blocks(2)
    assert ranks.load("both", 2, tables) == [True, True]
    for engine, given in zip(ranks.engines, tables, strict=True):
        assert all(bytes(row.numpy()) == data for _, row, data in engine.rows(given, tokens[: 2 * PAGE]))
    ranks.promises.note_ended({"both"})
    # Behind what the engine has itself, they have no depth in common.
    assert ranks.find("behind", asked, begin=2) == 2
    # If the load of one fails, the request computes everything, also where the other could have begun.
    assert ranks.find("half", asked) == 2
    assert ranks.load("half", 2, (one.blocks(2), {})) == [True, False]
    assert ranks.find("half", asked) == 0
    ranks.close()


def test_an_answer_of_one_rank_alone_promises_nothing(tmp_path: Path) -> None:
    ranks, tokens = Ranks(tmp_path), list(range(20))
    for engine in ranks.engines:
        engine.compute("a", tokens)
    ranks.close()
    ranks = Ranks(tmp_path, hangs="get")
    asked, other = np.array([*tokens, 1], np.uint64), np.array([*tokens, 2], np.uint64)
    for request, prompt in (("late", asked), ("gone", other)):
        assert ranks.promises.find(request, prompt, b"", 0) is None
    ranks.step()
    ranks.promises.forget("gone")
    ranks.step()
    assert ranks.find("late", asked.tolist()) == 0, "the second rank has waited long enough"
    assert [engine.cache.answers() for engine in ranks.engines] == [[], []], "nobody asks for the other"
    # An answer to what was asked before the engine had pages itself does not count.
    assert [ranks.promises.find("moved", asked, b"", begin) for begin in (0, 2)] == [None, None]
    before = next(call.keywords["ask"].number for call in ranks.promises.take_calls())
    ranks.promises.note_answers([("moved", before, 5)] * 2)
    assert ranks.promises.find("moved", asked, b"", 2) is None
    ranks.engines[1].go.set()
    assert ranks.promises.reset()
    ranks.step()
    assert ranks.find("store", asked.tolist()) == 5
    ranks.close()


def test_pages_are_told_once_and_taken_again_if_the_host_has_lost_them() -> None:
    engine, tokens = Engine("memory://?capacity=16MiB"), list(range(40))
    tables = engine.blocks(10)
    for _, row, data in engine.rows(tables, tokens):
        row[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def save(begin: int, end: int) -> None:
        """Save the pages [begin, end), and the state at `end`, whose block has the bytes of the last one."""
        part = np.array(tokens[begin * PAGE : end * PAGE], np.uint64)
        states = {end * PAGE: tables[MAMBA][:, -1:]}
        engine.cache.save([BlockSave("a", begin, part, b"", tables[KV][:, begin:end], states)])

    save(2, 4)
    assert engine.find("early", tokens) == 0, "the pages before were never told"
    save(0, 4)
    save(6, 8)
    gap = [*tokens[: 4 * PAGE], *tokens[6 * PAGE : 8 * PAGE], 1]
    assert engine.find("gap", gap) == 4, "what was told between has been lost"
    whole = BlockSave("c", 0, np.array(tokens, np.uint64) + 99, b"", tables[KV], {})
    bad = whole._replace(request="bad", tokens=whole.tokens + 99, pages=tables[KV][[0, 1, 0]])
    with pytest.raises(ValueError, match="broadcast"):
        engine.cache.save([whole, bad])
    assert not engine.controller.lent.is_saving, "vLLM gives the blocks to others"
    until(engine.cache.reset)
    save(4, 10)
    engine.clear()
    assert engine.find("b", [*tokens, 1]) == 10
    again = engine.blocks(10)
    assert engine.load("b", [*tokens, 1], 10, again)
    assert all(bytes(row.numpy()) == data for _, row, data in engine.rows(again, tokens))
    engine.cache.close()
