"""Pins of prefixes and hints at continuations."""

import numpy as np
import pytest

from tests.controller.harness import Engine, P, all_is_free, prompt
from tests.controller.test_prefetch import Clock
from tests.integrity import no_pin_is_left
from tiercache.controller import ControllerOptions
from tiercache.core import Tier
from tiercache.errors import AdmissionError, ClosedError, InputError
from tiercache.storage.registry import open_backend

FIRST = [*prompt(1, 2, 3), 5]
OTHER = [*prompt(7, 8, 9), 5]


def engine_with(clock=None, *, blocks=64, share=0.5, policy="hvd", hybrid=True, storage=False, **sizes):
    return Engine(
        open_backend("memory://") if storage else None, blocks=blocks, clock=clock, hybrid=hybrid,
        options=ControllerOptions(pin_share=share, policy=policy), **{"pages": 60, "states": 30} | sizes,
    )  # fmt: skip


def served(engine, *conversations):
    for tokens in conversations:
        engine.keep(tokens)


def on_host(engine, tokens):
    """Depth in tokens that the host alone can restore."""
    engine.controller.evict(Tier.DEVICE)
    return engine.controller.lookup(np.array(tokens)).near_tokens


def press(engine, count=24):
    """Fill the host with other conversations."""
    for n in range(count):
        served(engine, [*prompt(100 + n, 200 + n, 300 + n), 5])


@pytest.mark.parametrize("pools", [{}, {"hybrid": False}, {"kv": False}], ids=["both", "pages", "states"])
@pytest.mark.parametrize("policy", ["lru", "hvd"])
def test_a_pinned_prefix_stays_on_the_host_under_pressure(pools, policy):
    engine = engine_with(**pools, policy=policy)
    served(engine, FIRST, OTHER)
    assert engine.controller.pin(FIRST, 60) == 3 * P
    press(engine)
    assert on_host(engine, FIRST) == 3 * P
    assert on_host(engine, OTHER) == 0
    engine.check()
    engine.controller.evict(Tier.HOST)
    assert on_host(engine, FIRST) == 3 * P, "nor is it evicted by hand"
    assert engine.controller.unpin(FIRST)
    assert not engine.controller.unpin(FIRST)
    press(engine)
    assert on_host(engine, FIRST) == 0
    all_is_free(engine)


def test_a_pin_ends_by_the_clock_and_a_second_pin_renews_it():
    clock = Clock()
    engine = engine_with(clock)
    served(engine, FIRST)
    engine.controller.pin(FIRST, 10)
    clock.now += 9
    engine.controller.pin(FIRST, 10)
    clock.now += 9
    engine.controller.tick()
    assert engine.metrics.value("pinned_bytes") > 0
    clock.now += 1
    engine.controller.tick()
    assert engine.metrics.value("pinned_bytes") == 0
    assert not engine.controller.unpin(FIRST), "it has expired"
    counts = {o: engine.metrics.value("pins_total", o) for o in ("taken", "renewed", "expired", "released")}
    assert counts == {"taken": 1, "renewed": 1, "expired": 1, "released": 0}
    engine.controller.pin(FIRST, 100)
    engine.controller.pin(FIRST, 1)  # it may end earlier too
    clock.now += 2
    engine.controller.tick()
    assert engine.metrics.value("pins_total", "expired") == 2
    all_is_free(engine)


def test_a_pin_protects_what_arrives_later():
    """Only the first page is known at first; the deeper pages and their state come with later requests."""
    engine = engine_with()
    served(engine, [*prompt(1), 5])
    assert engine.controller.pin(FIRST, 60) == 3 * P
    served(engine, FIRST)
    press(engine)
    assert on_host(engine, FIRST) == 3 * P
    engine.check()
    engine.controller.unpin(FIRST)
    all_is_free(engine)


def test_the_state_of_a_pin_is_the_deepest_on_its_path():
    """The pinned prefix ends at a page without a state; its state is that of the page before."""
    engine = engine_with()
    served(engine, [*prompt(1, 2), 5])
    engine.controller.pin([*prompt(1, 2), *prompt(50)], 60)
    press(engine)
    assert on_host(engine, [*prompt(1, 2), 5]) == 2 * P
    engine.check()
    assert engine.controller.close()


def test_pins_beyond_the_share_are_refused_whole():
    engine = engine_with(blocks=64, share=0.25)  # 16 blocks; FIRST takes 3 and those of one state
    served(engine, FIRST, OTHER)
    engine.controller.pin(FIRST, 60)
    kept = engine.metrics.value("pinned_bytes")
    with pytest.raises(AdmissionError, match=r"may keep \d+; unpin others, or raise pin_share"):
        engine.controller.pin([*FIRST[: 3 * P], *prompt(*range(20, 60))], 60)
    engine.check()
    assert engine.metrics.value("pinned_bytes") == kept
    assert engine.metrics.value("pins_total", "refused") == 1
    none = engine_with(share=0.0)
    served(none, FIRST)
    with pytest.raises(AdmissionError, match="may keep 0"):
        none.controller.pin(FIRST, 60)
    all_is_free(none)


def test_shared_pages_count_once():
    engine = engine_with(blocks=80, share=0.9, hybrid=False)
    served(engine, FIRST, [*prompt(1, 2, 4), 5])
    engine.controller.pin(FIRST, 60)
    one = engine.metrics.value("pinned_bytes")
    engine.controller.pin([*prompt(1, 2, 4), 5], 60)
    assert engine.metrics.value("pinned_bytes") == one / 3 * 4
    engine.controller.pin(prompt(1, 2), 60)
    assert engine.metrics.value("pinned_bytes") == one / 3 * 4
    assert engine.controller.close(), "pinned"


def test_a_pin_without_room_for_anything_else_leaves_requests_alive():
    engine = engine_with(blocks=16, share=0.99, storage=True)
    served(engine, [*prompt(1, 2, 3, 4, 5, 6), 5])
    engine.controller.pin(prompt(1, 2, 3, 4, 5, 6), 60)
    press(engine, 6)
    assert on_host(engine, [*prompt(1, 2, 3, 4, 5, 6), 5]) == 6 * P
    engine.controller.unpin(prompt(1, 2, 3, 4, 5, 6))
    press(engine, 2)
    all_is_free(engine)


def test_close_with_pins_and_calls_after_it():
    engine = engine_with()
    served(engine, FIRST)
    engine.controller.pin(FIRST, 60)
    engine.controller.hint(FIRST, 5)
    assert engine.controller.close()
    assert no_pin_is_left(engine.controller)
    for call in (lambda: engine.controller.pin(FIRST, 1), lambda: engine.controller.hint(FIRST, 1)):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9, "5", None, True, 1 << 5000, 1j])
def test_impossible_times(seconds):
    engine = engine_with()
    served(engine, FIRST)
    for call, name in ((engine.controller.pin, "ttl"), (engine.controller.hint, "expected_in")):
        with pytest.raises(InputError, match=f"{name}=.* is not possible; use a number of seconds above 0"):
            call(FIRST, seconds)
    all_is_free(engine)


def test_unknown_prefixes():
    engine = engine_with()
    served(engine, FIRST)
    with pytest.raises(InputError, match="knows nothing of these 8 tokens; serve or prefetch them first"):
        engine.controller.pin(prompt(8, 9), 5)
    with pytest.raises(InputError, match="knows nothing"):
        engine.controller.pin(FIRST, 5, b"adapter")
    with pytest.raises(InputError, match="3 tokens fill no page; a pin takes 4"):
        engine.controller.pin([1, 2, 3], 5)
    for tokens in (prompt(8, 9), [1], []):
        with pytest.raises(InputError, match="can be restored, so a hint has no effect"):
            engine.controller.hint(tokens, 5)
    assert not engine.controller.unpin(prompt(8, 9))
    assert engine.metrics.value("hints_total", "unknown") == 3
    all_is_free(engine)


@pytest.mark.parametrize("policy", ["hvd", "lru", "marconi"])
def test_a_hint_saves_a_prefix_from_the_eviction_that_would_have_taken_it(policy):
    """Without a hint, the oldest of equal conversations goes first."""
    kept = {}
    for hinted in (True, False):
        clock = Clock()
        engine = engine_with(clock, blocks=48, policy=policy)
        press(engine, 10)  # policies that learn or count from evictions have seen some
        served(engine, FIRST)
        for n in range(3):
            served(engine, [*prompt(400 + n, 500 + n, 600 + n), 5])
            clock.now += 1.0
        if hinted:
            assert engine.controller.hint(FIRST, 1.5) == 3 * P
        for n in range(3, 10):
            served(engine, [*prompt(400 + n, 500 + n, 600 + n), 5])
            clock.now += 0.1
        kept[hinted] = on_host(engine, FIRST)
        engine.check()
        assert engine.controller.close()
    assert kept == {True: 3 * P, False: 0}


def test_a_hint_is_honoured_once():
    engine = engine_with()
    served(engine, FIRST)
    engine.controller.hint(FIRST, 5)
    engine.controller.hint(FIRST, 6)
    assert engine.metrics.value("hints_total", "honoured") == 0
    served(engine, [*FIRST[: 3 * P], *prompt(4), 5], [*FIRST[: 3 * P], *prompt(6), 5])
    assert engine.metrics.value("hints_total", "honoured") == 1
    assert engine.metrics.value("hints_total", "taken") == 2
    all_is_free(engine)


def test_many_hints_take_no_memory():
    clock = Clock()
    engine = engine_with(clock)
    served(engine, FIRST)
    nodes = sum(1 for _ in engine.context.index.nodes())
    for n in range(2000):
        engine.controller.hint(FIRST, 3600.0 - n)
        clock.now -= n % 7  # a clock that runs backwards
    assert sum(1 for _ in engine.context.index.nodes()) == nodes
    engine.check()
    press(engine, 6)
    all_is_free(engine)
