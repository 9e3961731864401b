"""Changes of the tiers under a controller: the engine goes on, and what has left is not believed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import Engine, prompt
from tests.controller.test_beliefs import believed
from tiercache.controller import ControllerOptions
from tiercache.core import Tier
from tiercache.errors import ConfigError, RefusedError
from tiercache.storage.registry import open_backend

ALONE = "tier_write=write_through_selective&tier_promote=never"


def url(path, name, *more):
    return "&".join([f"file://{path / name}?capacity=64MiB", f"tier_name={name}", *more])


def change(engine, name, /, *arguments, **named):
    return engine.controller.change_tiers(lambda tiers: getattr(tiers, name)(*arguments, **named))


def ask_again(engine):
    """Let the engine's thread apply events until nothing is on its way."""
    engine.controller.tick()  # applies what a change has posted
    end = time.monotonic() + 60
    while engine.controller.tick(0.05):
        assert time.monotonic() < end, "the checks do not end"


@pytest.mark.parametrize("checks", [4, 512])
def test_what_left_with_a_tier_is_not_believed_and_is_stored_again(tmp_path, checks):
    """With pauses between the checks, a tick without a check under way would end the wait."""
    engine = Engine(
        open_backend([url(tmp_path, "a"), url(tmp_path, "b", ALONE)]),
        pages=64,
        states=40,
        blocks=256,
        options=ControllerOptions(belief_checks=checks),
    )
    prompts = [[*prompt(n, n + 50, n + 100), 5] for n in range(15)]
    for tokens in prompts:
        engine.serve(tokens)
    assert engine.settle()
    ask_again(engine)
    assert believed(engine) == (45, 15)
    change(engine, "remove_tier", "a", keep_contents=False).result(60)
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
    engine = Engine(open_backend([url(tmp_path, "a"), url(tmp_path, "b", ALONE)]))
    tokens = [*prompt(1, 2, 3), 5]
    engine.serve(tokens)
    assert engine.settle()
    told = []
    change(engine, "remove_tier", "a", progress=told.append).result(60)
    assert told[-1].copied_objects == 4
    ask_again(engine)
    assert believed(engine) == (3, 1)
    engine.controller.evict(Tier.DEVICE)
    engine.controller.evict(Tier.HOST)
    assert engine.serve(tokens) == 12
    change(engine, "add_tier", url(tmp_path, "c"), 0).result(60)
    change(engine, "reorder", ["b", "c"]).result(60)
    change(engine, "change_tier", "c", capacity="128MiB", promote="never").result(60)
    change(engine, "replace_tier", "c", url(tmp_path, "d")).result(60)
    assert engine.settle()
    engine.check()


def test_the_engine_does_not_wait_for_a_change(tmp_path):
    engine = Engine(open_backend([url(tmp_path, "a"), url(tmp_path, "b", ALONE)]))
    engine.serve([*prompt(1, 2, 3), 5])
    assert engine.settle()
    reached, opened = threading.Event(), threading.Event()

    def hold(_):
        reached.set()
        opened.wait(60)

    began = change(engine, "remove_tier", "a", progress=hold)
    assert reached.wait(60)
    assert engine.serve([*prompt(4, 5), 5]) == 0
    assert engine.serve([*prompt(1, 2, 3), 5]) == 12
    assert not began.done()
    assert not began.cancel()
    with pytest.raises(RefusedError, match="'a' is being removed"):
        change(engine, "reorder", ["b", "a"]).result(60)
    opened.set()
    assert began.result(60) is None
    assert engine.settle()


def test_bad_input_is_raised_by_the_future(tmp_path):
    engine = Engine(open_backend([url(tmp_path, "a")]))
    for began, sentence in (
        (change(engine, "remove_tier", "a"), "'a' is the last of the chain"),
        (change(engine, "add_tier", 7), "7 is no tier"),
        (change(engine, "add_tier", url(tmp_path, "a")), "two tiers are named 'a'"),
        (change(engine, "change_tier", "a", name="b"), "name of tier 'a' cannot change"),
    ):
        with pytest.raises((ConfigError, RefusedError), match=f"{sentence}|another|is being"):
            began.result(60)
    for storage, sentence in (
        (None, "was made without storage and cannot get one"),
        (MemoryBackend(1 << 20), "a MemoryBackend has no tiers that could change; open the store as a list"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            change(Engine(storage), "remove_tier", "a").result(60)


def test_a_close_ends_a_change(tmp_path):
    engine = Engine(open_backend([url(tmp_path, "a"), url(tmp_path, "b", ALONE)]))
    rng = np.random.default_rng(1)
    for _ in range(3):
        engine.serve([*prompt(*rng.integers(1, 50, 3).tolist()), 5])
    assert engine.settle()
    reached = threading.Event()
    began = change(engine, "remove_tier", "a", progress=lambda _: reached.set())
    assert reached.wait(60)
    assert engine.controller.close(60)
    assert began.exception(60) is None or "closed" in str(began.exception())
