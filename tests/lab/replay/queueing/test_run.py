"""Runs with a queue: what overlapping requests find in the cache, and when their first tokens come."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.integrity import check_controller
from tests.lab.replay.test_drive import CHATS, HYBRID, ask, disk, listed, ran, text
from tiercache.errors import ConfigError
from tiercache.index import CheckpointRules
from tiercache_lab.replay.base import Request, Tiers
from tiercache_lab.replay.cache import Setup
from tiercache_lab.replay.machines import ReplayMachine, Speed
from tiercache_lab.replay.needs import infinite, measure
from tiercache_lab.replay.queueing import server
from tiercache_lab.replay.queueing.run import QueuedRun, Queueing
from tiercache_lab.replay.sources import WorkloadSource, open_source

pytestmark = pytest.mark.slow

PLAIN = ReplayMachine(flops=1e12, host_bandwidth=1e6, disk_bandwidth=1e5, cut_seconds=0.0)


def queued(
    source: WorkloadSource,
    machine: ReplayMachine = PLAIN,
    tiers: Tiers | None = None,
    queueing: Queueing | None = None,
    policy: str = "lru",
) -> QueuedRun:
    need = measure(source)
    tiers = tiers or infinite(source, need, HYBRID, CheckpointRules())
    steps = []
    run = QueuedRun(source, need, Setup(policy, HYBRID, tiers, machine=machine), queueing or Queueing())
    run.go(lambda: steps.append(check_controller(run.controller)))
    assert len(steps) == run.tally.requests == len(source)
    assert run.running == []
    return run


def seconds(start: int, end: int) -> float:
    return HYBRID.flops(start, end) / 1e12


@pytest.mark.parametrize("policy", ["lru", "hvd"])
def test_one_place_hits_what_one_after_the_other_hits(policy: str) -> None:
    source = open_source(CHATS, seed=1)
    tiers = Tiers(1_000_000, storage=disk(2_000_000))
    alone = ran(source, tiers, policy)
    run = queued(
        source, replace(PLAIN, flops=1e15, host_bandwidth=1e12, disk_bandwidth=1e12), tiers, policy=policy
    )
    assert run.tally.token_hit_rate == pytest.approx(alone.tally.token_hit_rate, abs=0.02)
    free = queued(source)
    assert (
        free.tally.token_hit_rate
        == ran(source, infinite(source, measure(source), HYBRID, CheckpointRules())).tally.token_hit_rate
    )


def test_a_request_finds_nothing_of_one_whose_prefill_has_not_ended() -> None:
    """A prefill of 300 tokens takes 0.3 s, and the answer a second."""
    first, again = ask(1, 300, session=1), ask(1, 300, at=0.2, session=2)
    machine = replace(PLAIN, batch=2, decode_seconds=0.1)
    first = replace(first, output=text(9, 11))
    early = queued(listed([first, again]), machine)
    assert early.tally.token_hit_rate == 0
    # Once its prefill has ended, its prompt is found, though its answer is still being decoded.
    late = queued(listed([first, replace(again, arrival=0.5)]), machine)
    assert late.tally.token_hit_rate == 256 / 600
    assert late.serving().wait_ms_mean == 0
    # With one place the second request begins when the first has ended.
    one = queued(listed([first, again]), replace(machine, batch=1))
    assert one.tally.token_hit_rate == 256 / 600
    assert one.serving().wait_ms_mean == pytest.approx(1e3 * (seconds(0, 300) + 1.0 - 0.2) / 2)


def test_the_first_token_comes_after_the_wait_the_loads_and_the_prefill() -> None:
    source = listed([ask(1, 300, session=1), ask(1, 300, at=10.0, session=2)])
    loaded = 4 * 64 * 64 + HYBRID.state_bytes
    run = queued(source, replace(PLAIN, host_latency=0.25, request_seconds=0.5, pass_seconds=0.125))
    alone = 0.5 + 0.125 * 2 + seconds(0, 300)  # cut at the last whole page
    hit = 0.25 + loaded / 1e6 + 0.5 + 0.125 + seconds(256, 300)
    assert run.tally.ttft_ms()[0] == pytest.approx((alone + hit) / 2 * 1e3)
    assert run.tally.ttft_ms_p50 == pytest.approx((alone + hit) / 2 * 1e3)
    assert run.serving().load_ms_mean == pytest.approx((0.25 + loaded / 1e6) / 2 * 1e3)
    busy = run.serving().busy
    assert busy["engine"] == pytest.approx((alone + hit - 0.25 - loaded / 1e6) / (10 + hit))
    assert busy["host"] == pytest.approx(loaded / 1e6 / (10 + hit))


def test_storage_has_the_speed_of_its_tier() -> None:
    source = listed([ask(1, 300, session=1), ask(1, 300, at=10.0, session=2)])
    tiers = Tiers(30 * 4096, storage=(replace(disk(10_000_000)[0], name="far"), *disk(10_000_000)))
    times = {}
    source = listed([*list(source)[:1], ask(2, 600, at=5.0), *list(source)[1:]])
    for name, machine in {
        "default": PLAIN,
        "own": replace(PLAIN, tiers={"far": Speed(1e9, 0.0), "disk": Speed(1.0, 100.0)}),
        "late": replace(PLAIN, tiers={"far": Speed(1e5, 2.0)}),
    }.items():
        run = queued(source, machine, tiers)
        assert run.uses()["far"].tokens == 256
        times[name] = run.serving().load_ms_mean
    assert times["own"] < times["default"] / 100
    assert times["late"] == pytest.approx(times["default"] + 2e3 / 3)
    given = replace(tiers, storage=(replace(tiers.storage[0], bandwidth=1e9), tiers.storage[1]))
    assert queued(source, PLAIN, given).serving().load_ms_mean == pytest.approx(times["own"])


def test_a_rate_scales_the_arrivals() -> None:
    requests = [ask(topic, 100, at=2.0 * topic) for topic in range(1, 11)]
    plain = queued(listed(requests))
    assert plain.serving().arrived_per_second == pytest.approx(0.5)
    fast = queued(listed(requests), queueing=Queueing(rate=30.0))
    assert fast.serving().arrived_per_second == pytest.approx(30)
    assert fast.serving().wait_ms_mean > plain.serving().wait_ms_mean == 0
    with pytest.raises(ConfigError, match="all at once"):
        queued(listed([ask(1, 100)]), queueing=Queueing(rate=5.0))


def test_the_same_run_has_the_same_figures() -> None:
    def facts() -> tuple[object, ...]:
        source = open_source(CHATS, seed=4)
        run = queued(source, replace(PLAIN, batch=3), Tiers(600_000, storage=disk(900_000)), policy="hvd")
        return run.serving(), run.uses(), run.tally.ttft_ms()

    assert facts() == facts()


def test_requests_that_pile_up_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_TOKENS", 2000)
    requests = [ask(topic, 300, at=0.01 * topic) for topic in range(50)]
    with pytest.raises(ConfigError, match="come faster than this machine serves them; use a lower --rate"):
        queued(listed(requests))
    queued(listed([replace(one, arrival=one.arrival * 100) for one in requests]))


def test_places_need_a_device_that_holds_them() -> None:
    requests = [Request(text(n, 600), text(n + 100, 70), 0.0, n) for n in range(4)]
    tiers = Tiers(1_000_000, 1_280_000)
    with pytest.raises(ConfigError, match="does not hold the requests that run at once"):
        queued(listed(requests), replace(PLAIN, batch=4), tiers)
    assert queued(listed(requests), replace(PLAIN, batch=1), tiers).tally.requests == 4
    assert np.isfinite(queued(listed(requests), replace(PLAIN, batch=4)).serving().wait_ms_mean)
