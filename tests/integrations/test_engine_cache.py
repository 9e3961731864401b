"""The cache behind vLLM's connector, without vLLM: blocks of several groups, saved and loaded elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from tests.storage.late import Late
from tests.waiting import until
from tiercache.controller import HybridCacheController
from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.integrations.vllm_connector.blocks import BlockPool, bytes_of
from tiercache.integrations.vllm_connector.cache import BlockSave, EngineCache
from tiercache.keys import Identity
from tiercache.pools import HostArena
from tiercache.storage.registry import open_backend

KV, MAMBA, PAGE, BLOCKS = PoolName.KV, PoolName.MAMBA, 4, 40
Tables = dict[PoolName, np.ndarray]
IDENTITY = Identity("m", "1", "float32", "float32", "float32", page_size=PAGE)


class Engine:
    """An engine that fills its blocks with bytes that follow from the tokens."""

    def __init__(self, url: str, *, hangs: bool = False) -> None:
        self.tensors = [torch.zeros(BLOCKS, 600 + 8 * n, dtype=torch.uint8) for n in range(4)]
        layers = [(n, f"layer {n}", tensor) for n, tensor in enumerate(self.tensors)]
        pools = {
            KV: BlockPool.over(KV, PAGE, [layers[0:1], layers[2:3]]),
            MAMBA: BlockPool.over(MAMBA, PAGE, [layers[1:2], layers[3:4]]),
        }
        self.go = Event()
        store = Late(open_backend(url), {"get"} if hangs else set(), partial(self.go.wait, 30))
        controller = HybridCacheController(IDENTITY, pools, HostArena(1 << 20, 4096), store)
        self.cache = EngineCache(controller, pools, patience=0.3 if hangs else 30)
        self.draw = random.Random(5)

    def blocks(self, count: int) -> Tables:
        """Take blocks for so many pages at random, other ones for each group."""
        taken = [[self.draw.sample(range(1, BLOCKS), count) for _ in "ab"] for _ in "ab"]
        return {KV: np.array(taken[0]), MAMBA: np.array(taken[1])}

    def rows(self, tables: Tables, tokens: list[int]) -> Iterator[tuple[torch.Tensor, bytes]]:
        """Yield each row of all pages and of the state at the end, and the bytes that belong there."""
        for page in range(len(tokens) // PAGE):
            for n, tensor in enumerate(self.tensors):
                if n % 2 == 0 or (page + 1) * PAGE == len(tokens):
                    seed = f"{n} {tokens[: (page + 1) * PAGE]}"
                    data = random.Random(seed).randbytes(tensor.shape[1])
                    yield tensor[tables[MAMBA if n % 2 else KV][n // 2, page]], data

    def compute(self, name: str, tokens: list[int]) -> None:
        tables = self.blocks(len(tokens) // PAGE)
        for row, data in self.rows(tables, tokens):
            row[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        states = {len(tokens): tables[MAMBA][:, -1:]}
        self.cache.save([BlockSave(name, np.array(tokens, np.uint64), b"", tables[KV], states)])
        self.clear()  # vLLM gives the blocks to others

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def find(self, name: str, tokens: list[int], begin: int = 0) -> int:
        until(lambda: self.answer(name, tokens, begin))
        return self.answer(name, tokens, begin)[0]

    def answer(self, name: str, tokens: list[int], begin: int) -> list[int]:
        said = self.cache.find(name, np.array(tokens, np.uint64), b"", begin)
        return [] if said is None else [said]

    def load(self, name: str, tokens: list[int], pages: int, tables: Tables) -> bool:
        self.cache.start(self.cache.claim(name, np.array(tokens, np.uint64), b"", pages, tables))
        over: list[tuple[set[str], set[str]]] = []
        until(lambda: over.append(self.cache.ended()) or over[-1][0] == {name})
        return not over[-1][1]


def test_what_is_saved_comes_back_in_other_blocks_from_host_and_store(tmp_path: Path) -> None:
    url, tokens = f"file://{tmp_path}/store?capacity=16MiB", list(range(100, 120))
    asked = [*tokens, 7]
    for life in range(2):
        engine = Engine(url)
        if life == 0:
            assert engine.find("a", asked) == 0
            engine.compute("a", tokens[:12])
            engine.compute("a", tokens)
        for way in ("host", "store"):
            assert engine.find(way, asked) == 5
            assert engine.answer("other", asked, 0) == [5], "a promise is none's alone"
            tables = engine.blocks(5)
            assert engine.load(way, asked, 5, tables)
            assert all(bytes(row.numpy()) == data for row, data in engine.rows(tables, tokens)), way
            # The first three pages are the engine's own: they are not written to, and hold nothing here.
            assert engine.find(f"{way} 2", asked, begin=3) == 5
            engine.clear()
            tables = engine.blocks(5)
            assert engine.load(f"{way} 2", asked, 2, tables)
            right = [bytes(row.numpy()) == data for row, data in engine.rows(tables, tokens)]
            assert right == [False] * 6 + [True] * 6
            until(engine.cache.reset)
        # Another depth than the promised one has no state, and block 0 is none: both loads fail.
        assert engine.find("short", asked) == 5
        assert not engine.load("short", asked, 4, engine.blocks(5))
        assert engine.find("short", asked) == 0, "it computes everything"
        assert engine.find("none", asked) == 5
        assert not engine.load("none", asked, 5, {p: t * (t > t[0, 0]) for p, t in engine.blocks(5).items()})
        engine.cache.close()


def test_a_load_under_way_is_waited_for_and_a_store_that_hangs_is_not(tmp_path: Path) -> None:
    url, tokens = f"file://{tmp_path}/store?capacity=16MiB", list(range(20))
    engine = Engine(url)
    engine.compute("a", tokens)
    assert engine.find("one", [*tokens, 1]) == 5
    load = engine.cache.claim("one", np.array([*tokens, 1], np.uint64), b"", 5, engine.blocks(5))
    assert engine.answer("two", [*tokens, 2], 0) == [], "the same pages are on their way"
    engine.cache.forget("one")
    engine.cache.start(load)
    until(lambda: engine.cache.ended()[0] == {"one"})
    assert engine.find("two", [*tokens, 2]) == 5
    engine.cache.close()
    engine = Engine(url, hangs=True)
    assert engine.find("three", [*tokens, 3]) == 0
    engine.go.set()
    engine.cache.close()


def test_blocks_that_are_not_contiguous_are_refused() -> None:
    split = torch.arange(240, dtype=torch.int16).view(8, 2, 5, 3).transpose(2, 3)
    assert bytes_of(split, 4, 100, "a").view(torch.int16)[1, :3].tolist() == [60, 61, 62]
    with pytest.raises(ConfigError, match="layer a, of which a block is not contiguous"):
        bytes_of(torch.zeros(8, 2, 6)[:, :, :3], 8, 24, "a")
