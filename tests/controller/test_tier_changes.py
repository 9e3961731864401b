"""Changes of the tiers under a controller: the engine goes on, and what has left is not believed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import Engine, prompt
from tests.controller.test_beliefs import believed
from tests.storage_backends.chain.test_live import Held
from tiercache.controller import ControllerOptions
from tiercache.core import Tier
from tiercache.errors import ConfigError, RefusedError
from tiercache.storage.registry import open_backend

ALONE = "tier_write=write_through_selective&tier_promote=never"


def url(path, name, *more):
    return "&".join([f"file://{path / name}?capacity=64MiB", f"tier_name={name}", *more])


def ask_again(engine):
    """Let the engine's thread apply events until nothing is on its way."""
    engine.controller.tick()  # applies what a change has posted
    end = time.monotonic() + 60
    while engine.controller.tick(0.05):
        assert time.monotonic() < end, "the checks do not end"


@pytest.mark.parametrize("checks", [4, 512])
def test_what_left_with_a_tier_is_not_believed_and_is_stored_again(tmp_path, checks):
    """With pauses between the checks, a tick without a check under way would end the wait."""
    a, b = url(tmp_path, "a"), url(tmp_path, "b", ALONE)
    engine = Engine(
        open_backend([a, b]), pages=64, states=40, blocks=256, options=ControllerOptions(belief_checks=checks)
    )
    prompts = [[*prompt(n, n + 50, n + 100), 5] for n in range(15)]
    for tokens in prompts:
        engine.serve(tokens)
    assert engine.settle()
    ask_again(engine)
    assert believed(engine) == (45, 15)
    engine.controller.retier([b], drop=["a"]).result(60)
    ask_again(engine)
    assert believed(engine) == (0, 0)
    for tokens in prompts:
        assert engine.serve(tokens)
    assert engine.settle()
    assert believed(engine) == (45, 15)
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)
    assert all(engine.serve(tokens) == 12 for tokens in prompts)
    engine.check()


def test_contents_that_were_kept_are_believed_on(tmp_path):
    a, b, c = url(tmp_path, "a"), url(tmp_path, "b", ALONE), url(tmp_path, "c")
    engine = Engine(open_backend([a, b]))
    tokens = [*prompt(1, 2, 3), 5]
    engine.serve(tokens)
    assert engine.settle()
    engine.controller.retier([b]).result(60)
    ask_again(engine)
    assert believed(engine) == (3, 1)
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)
    assert engine.serve(tokens) == 12
    for tiers in ([c, b], [b, c], [b, c.replace("64", "128")], [b, url(tmp_path, "d")]):
        engine.controller.retier(tiers).result(60)
    assert engine.settle()
    engine.check()


def test_the_engine_does_not_wait_for_a_change(tmp_path, monkeypatch):
    a, b = url(tmp_path, "a"), url(tmp_path, "b", ALONE)
    engine = Engine(open_backend([a, b]))
    engine.serve([*prompt(1, 2, 3), 5])
    assert engine.settle()
    held = Held(monkeypatch)
    began = engine.controller.retier([b])
    assert held.reached.wait(60)
    assert engine.serve([*prompt(4, 5), 5]) == 0
    assert engine.serve([*prompt(1, 2, 3), 5]) == 12
    assert not began.done()
    assert not began.cancel()
    # Another list gives the first up.
    assert engine.controller.retier([a, b]).result(60) is None
    with pytest.raises(RefusedError, match="was given another list"):
        began.result(60)
    held.opened.set()
    assert engine.settle()


def test_bad_input_is_raised_by_the_future(tmp_path):
    engine = Engine(open_backend([url(tmp_path, "a")]))
    for tiers, sentence in (
        ([], "a chain of tiers is a list of storage URLs"),
        ([url(tmp_path, "a"), 7], "7 is no tier"),
        ([url(tmp_path, "a")] * 2, "two tiers are named 'a'"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            engine.controller.retier(tiers).result(60)
    for storage, sentence in (
        (None, "was made without storage and cannot get one"),
        (MemoryBackend(1 << 20), "a MemoryBackend has no tiers that could change; open the store as a list"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Engine(storage).controller.retier([url(tmp_path, "a")]).result(60)


def test_a_close_ends_a_change(tmp_path, monkeypatch):
    a, b = url(tmp_path, "a"), url(tmp_path, "b", ALONE)
    engine = Engine(open_backend([a, b]))
    rng = np.random.default_rng(1)
    for _ in range(3):
        engine.serve([*prompt(*rng.integers(1, 50, 3).tolist()), 5])
    assert engine.settle()
    held = Held(monkeypatch)
    began = engine.controller.retier([b])
    assert held.reached.wait(60)
    assert engine.controller.close(60)
    assert "the chain was closed before" in str(began.exception(60))
