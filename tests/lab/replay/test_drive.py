"""One run: what is hit, from which tier, in how many bytes; no cap is overstepped at any moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.integrity import check_controller
from tiercache.core import PoolName, Tier, TokenArray, reusable_pages
from tiercache.errors import ConfigError
from tiercache.index import CheckpointRules
from tiercache.policy import ModelProfile, profile_named
from tiercache_lab.policies import MAIN, RIVALS
from tiercache_lab.replay.base import Request, StorageTier, Tiers
from tiercache_lab.replay.cache import Setup
from tiercache_lab.replay.drive import Run
from tiercache_lab.replay.machines import ReplayMachine
from tiercache_lab.replay.needs import Need, infinite, measure
from tiercache_lab.replay.sources import Workload, WorkloadSource, open_source

pytestmark = pytest.mark.slow

PAGE = 64
HYBRID = ModelProfile(
    "tiny", kv_bytes_per_token=64, state_bytes=40_000, flops_per_token=1e9, flops_per_context_token=1e4
)
"""A page is one block of 4 KiB, a state ten of them."""
ATTENTION = replace(HYBRID, name="attention", state_bytes=0)
ALONE = replace(HYBRID, name="alone", kv_bytes_per_token=0, flops_per_context_token=0.0)
"""A state takes ten blocks of 4 KiB, or one of its own size."""
BLOCK = 4096
STATE = 10 * BLOCK
CHATS = "multi-turn?conversations=10&rounds=5&live=5&user=64-400&answer=64-200"
"""50 requests; a cache without a limit would hold some 6 MB of them."""


@dataclass(frozen=True)
class Given(Workload):
    """A workload of the requests that it is given."""

    requests: Sequence[Request]

    def count(self, seed: int) -> int:
        return len(self.requests)

    def generate(self, seed: int) -> Iterator[Request]:
        return iter(self.requests)


def listed(requests: Sequence[Request], concurrency: int = 1) -> WorkloadSource:
    return WorkloadSource("listed", Given(requests), 0, len(requests), PAGE, concurrency)


def disk(nbytes: int) -> tuple[StorageTier, ...]:
    return (StorageTier("disk", nbytes),)


def text(topic: int, length: int) -> TokenArray:
    """The first tokens of a topic."""
    return np.random.default_rng(topic).integers(0, 1 << 17, length, dtype=np.uint64)


def ask(topic: int, length: int, *, at: float = 0.0, session: int | None = None, answer: int = 1) -> Request:
    return Request(text(topic, length), text(topic + 1000, answer), at, topic if session is None else session)


def ran(
    source: WorkloadSource,
    tiers: Tiers,
    policy: str = "lru",
    profile: ModelProfile = HYBRID,
    **changes: object,
) -> Run:
    """A run, whose books are recounted on the way and at the end."""
    run = Run(source, measure(source), Setup(policy, profile, tiers, **changes))  # type: ignore[arg-type]
    count = [0]

    def step() -> None:
        count[0] += 1
        if count[0] % 7 == 1:
            check_controller(run.controller)

    run.go(step)
    assert count[0] == run.tally.requests == len(source)
    check_controller(run.controller)
    return run


def depths(
    requests: Sequence[Request],
    tiers: Tiers | None = None,
    *,
    profile: ModelProfile = HYBRID,
    **changes: object,
) -> list[int]:
    """Restored tokens of each request, one after the other."""
    source, found = listed(requests), []
    need = measure(source)
    setup = Setup("lru", profile, tiers or infinite(source, need, profile, CheckpointRules()), **changes)
    run = Run(source, need, setup)
    before = [0.0]

    def step() -> None:
        whole = run.tally.token_hit_rate * sum(len(one.prompt) for one in requests[: run.tally.requests])
        found.append(round(whole - before[0]))
        before[0] = whole

    run.go(step)
    return found


def test_what_a_source_needs() -> None:
    steps = []
    requests = [ask(1, 100, answer=29), ask(2, 64), ask(3, 640, answer=65)]
    assert measure(listed(requests), lambda: steps.append(1)) == Need(
        requests=3, pages=3 + 2 + 12, longest=12
    )
    assert len(steps) == 3


def test_a_repeat_restores_all_but_its_last_page() -> None:
    assert depths([ask(1, 300), ask(1, 300), ask(1, 320), ask(1, 320), ask(2, 300)]) == [0, 256, 256, 256, 0]
    # Without states, pages alone decide: a hit ends before the last token.
    assert depths([ask(1, 300), ask(1, 300), ask(1, 320), ask(1, 321)], profile=ATTENTION) == [
        0, 256, 256, 320,
    ]  # fmt: skip


def test_a_conversation_goes_on_from_the_end_of_the_answer() -> None:
    said = text(7, 2000)
    rounds = [
        Request(said[:200], said[200:400], 0, 0, 0),
        Request(said[:500], said[500:700], 1, 0, 1),
        Request(said[:900], said[900:], 2, 0, 2),
    ]
    # The last token of an answer is never computed: 399 and 699 tokens have 6 and 10 full pages.
    assert depths(rounds) == [0, 384, 640]
    assert depths(rounds, checkpoints=CheckpointRules(request_end=False)) == [0, 192, 448]


def test_a_third_request_has_the_branch_that_the_second_left() -> None:
    system = text(5, 640)
    requests = [Request(np.concatenate([system, text(10 + n, 200)]), text(20 + n, 1), n, n) for n in range(4)]
    assert depths(requests) == [0, 0, 640, 640]
    assert depths(requests, checkpoints=CheckpointRules(branch=False)) == [0, 0, 0, 0]
    assert depths(requests, profile=ATTENTION) == [0, 640, 640, 640]


def test_states_at_intervals() -> None:
    requests = [ask(1, 1000), Request(np.concatenate([text(1, 600), text(2, 300)]), text(3, 1), 1, 1)]
    off = CheckpointRules(branch=False, prompt_end=False, request_end=False, ghost=False)
    assert depths(requests, checkpoints=off) == [0, 0]
    assert depths(requests, checkpoints=replace(off, every=256)) == [0, 512]
    assert depths(requests, checkpoints=replace(off, every=300)) == [0, 512], "whole pages of a step"
    assert depths(requests, checkpoints=replace(off, every=700)) == [0, 0]


def test_no_hit_without_room_and_no_peak_above_nothing() -> None:
    run = ran(listed([ask(1, 300)] * 3), Tiers(host_bytes=BLOCK - 1))
    assert run.tally.token_hit_rate == 0
    assert run.peak_bytes == 0
    run = ran(listed([ask(1, 300)] * 3), Tiers(host_bytes=0, device_bytes=2_000_000))
    assert run.tally.token_hit_rate == pytest.approx(512 / 900)
    assert run.uses()["host"].peak == run.uses()["host"].written_bytes == 0


ALL_THREE = Tiers(host_bytes=500_000, device_bytes=1_500_000, storage=disk(2_000_000), device_states=15)


@pytest.mark.parametrize(
    ("policy", "tiers"),
    [
        *((policy, ALL_THREE) for policy in (*MAIN, *RIVALS)),
        ("lru", Tiers(host_bytes=1_000_000)),
        ("hvd", Tiers(host_bytes=700_000, device_bytes=1_500_000)),
        ("marconi", Tiers(host_bytes=400_000, storage=disk(1_500_000))),
    ],
)
def test_no_tier_ever_holds_more_than_it_has(policy: str, tiers: Tiers) -> None:
    source = open_source(CHATS, seed=3)
    need = measure(source)
    run = Run(source, need, Setup(policy, HYBRID, tiers))
    seen = []

    def step() -> None:
        uses = run.uses()
        assert uses.keys() == {
            "host",
            *(["device"] if tiers.device_bytes else []),
            *(tier.name for tier in tiers.storage),
        }
        for name, use in uses.items():
            assert 0 <= use.peak <= use.capacity, name
        assert sum(use.capacity for use in uses.values()) == tiers.nbytes
        assert run.peak_bytes <= tiers.nbytes
        seen.append(run.peak_bytes)
        if len(seen) % 10 == 1:
            check_controller(run.controller)

    run.go(step)
    assert seen == sorted(seen)
    assert seen[-1] > 0.8 * tiers.nbytes, "the tiers were filled"
    assert sum(use.evicted for use in run.uses().values()) > 0
    assert 0 < run.tally.token_hit_rate < 0.9
    check_controller(run.controller)


@pytest.mark.parametrize("policy", ["lru", "marconi", "hvd"])
def test_bytes_and_tokens_add_up(policy: str) -> None:
    # A device that holds what runs and little else, a host that holds some of it, a disk for most.
    source = open_source(CHATS, seed=1)
    tiers = Tiers(host_bytes=1_000_000, device_bytes=640_000, storage=disk(4_000_000), device_states=9)
    run = ran(source, tiers, policy)
    uses, value = run.uses(), run.controller.metrics.value
    restored = {
        tier: sum(value("restored_bytes_total", str(tier), pool) for pool in (PoolName.KV, PoolName.MAMBA))
        for tier in Tier
    }
    assert all(restored[tier] > 0 for tier in Tier), "each tier gave something"
    assert all(use.tokens > 0 for use in uses.values())
    # What came from below went through the host, and what went to the device came out of it.
    assert uses["disk"].read_bytes == restored[Tier.STORAGE]
    assert (
        uses["host"].read_bytes
        == uses["device"].written_bytes
        == restored[Tier.HOST] + restored[Tier.STORAGE]
    )
    assert uses["host"].written_bytes > uses["disk"].read_bytes
    prompts = sum(len(request.prompt) for request in source)
    hit = sum(use.tokens for use in uses.values())
    assert hit == value("tokens_total", "restored") == pytest.approx(run.tally.token_hit_rate * prompts)
    assert value("tokens_total", "computed") == prompts - hit
    assert uses["disk"].written_bytes > uses["disk"].peak, "what was evicted was written before"


def test_the_time_to_the_first_token_is_prefill_and_loads() -> None:
    machine = ReplayMachine(flops=1e12, host_bandwidth=1e9, disk_bandwidth=1e8, cut_seconds=0.0)
    first, second = ask(1, 300), ask(1, 300)
    tiers = Tiers(host_bytes=10_000_000)
    alone = ran(listed([first]), tiers, machine=machine).tally.ttft_ms()[0]
    assert alone == pytest.approx(HYBRID.flops(0, 300) / 1e12 * 1e3)
    mean, late = ran(listed([first, second]), tiers, machine=machine).tally.ttft_ms()
    loaded = (4 * PAGE * 64 + HYBRID.state_bytes) / 1e9 + HYBRID.flops(256, 300) / 1e12
    assert 2 * mean - alone == pytest.approx(loaded * 1e3)
    assert loaded * 1e3 < mean < late <= alone
    # The prefill of the first request is cut at 256 tokens; the second one has restored them.
    cut = ran(listed([first, second]), tiers, machine=replace(machine, cut_seconds=0.5)).tally
    assert cut.cuts == 0.5
    assert cut.ttft_ms()[0] - mean == pytest.approx(250)
    # On the device nothing is loaded.
    mean = ran(listed([first, second]), Tiers(0, 10_000_000), machine=machine).tally.ttft_ms()[0]
    assert 2 * mean - alone == pytest.approx(HYBRID.flops(256, 300) / 1e12 * 1e3)


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_so_many_at_once_and_sessions_never_overlap(concurrency: int) -> None:
    conversations = [text(topic, 2000) for topic in range(4)]
    order = [0, 0, 1, 2, 0, 3, 1, 1, 2, 3, 3, 0]
    rounds = [order[:n].count(session) for n, session in enumerate(order)]
    requests = [
        Request(
            conversations[session][: 300 * (at + 1)],
            conversations[session][300 * (at + 1) : 300 * (at + 1) + 100],
            n,
            session,
            at,
        )
        for n, (session, at) in enumerate(zip(order, rounds, strict=True))
    ]
    source = listed(requests, concurrency=concurrency)
    run = Run(source, measure(source), Setup("lru", HYBRID, Tiers(10_000_000)))
    most, begun = 0, 0

    def step() -> None:
        nonlocal most, begun
        begun += 1
        # With one at a time a request has ended when the next is asked for.
        now = [one.request for one in run.running]
        assert len(now) <= concurrency
        assert len({request.session for request in now}) == len(now)
        assert concurrency == 1 or now[-1] is requests[begun - 1]
        most = max(most, len(now))
        check_controller(run.controller)

    run.go(step)
    assert most == (0 if concurrency == 1 else concurrency)
    assert run.running == []


@pytest.mark.parametrize("policy", ["lru", "lpc", "hvd"])
def test_a_model_without_states(policy: str) -> None:
    source = open_source(CHATS, seed=1)
    free = ran(source, infinite(source, measure(source), ATTENTION, CheckpointRules()), policy, ATTENTION)
    known = {int(request.session): 0 for request in source}
    hits = prompts = 0
    for request in source:
        hits += min(known[request.session], reusable_pages(len(request.prompt), PAGE)) * PAGE
        prompts += len(request.prompt)
        known[request.session] = (len(request.prompt) + len(request.output) - 1) // PAGE
    assert free.tally.token_hit_rate == pytest.approx(hits / prompts)
    less = ran(source, Tiers(free.peak_bytes // 4, storage=disk(free.peak_bytes // 4)), policy, ATTENTION)
    assert 0 < less.tally.token_hit_rate < free.tally.token_hit_rate
    assert less.uses()["host"].peak <= free.peak_bytes // 4


@pytest.mark.parametrize("policy", ["lru", "hvd"])
def test_a_model_of_states_alone(policy: str) -> None:
    """Whatever the sizes, nothing but states moves, and with room for all the hits are those of a hybrid."""
    source = open_source(CHATS)
    tight = Tiers(12 * STATE, 24 * STATE, disk(20 * STATE))
    run = ran(source, tight, policy, ALONE)
    # private: the controller is the run's own
    assert set(run.controller._context.pools) == {PoolName.MAMBA}
    assert 0 < run.tally.token_hit_rate < 1
    need = measure(source)
    rules = CheckpointRules()
    alone, hybrid = (
        ran(source, infinite(source, need, profile, rules), policy, profile) for profile in (ALONE, HYBRID)
    )
    assert alone.tally.token_hit_rate == hybrid.tally.token_hit_rate > run.tally.token_hit_rate
    with pytest.raises(ConfigError, match="neither KV nor states"):
        ran(source, tight, policy, replace(ALONE, state_bytes=0))


def test_a_cache_without_a_limit_never_evicts() -> None:
    source = open_source("agent?sessions=4&live=2&turns=4-6&context=9000&observation=100", seed=5)
    free = ran(source, infinite(source, measure(source), HYBRID, CheckpointRules()))
    assert sum(use.evicted for use in free.uses().values()) == 0
    every = CheckpointRules(every=128)
    more = ran(source, infinite(source, measure(source), HYBRID, every), checkpoints=every)
    assert sum(use.evicted for use in more.uses().values()) == 0
    assert more.peak_bytes > free.peak_bytes


def test_what_running_requests_hold_beside_the_tiers() -> None:
    """Their pages, the states at the ends of prompt and request, and the state that the engine advances."""
    one = listed([ask(1, 300, answer=100)])
    state, page = HYBRID.state_bytes, PAGE * HYBRID.kv_bytes_per_token
    assert ran(one, Tiers(600_000)).working_bytes == 7 * page + 3 * state
    assert ran(one, Tiers(600_000, 1_600_000)).working_bytes == state
    assert ran(one, Tiers(600_000), profile=ATTENTION).working_bytes == 7 * page
    # The second request holds also the state from which it was restored.
    again = listed([ask(1, 300, answer=100), ask(1, 600, answer=100)])
    assert ran(again, Tiers(900_000)).working_bytes == 11 * page + 4 * state
    # Two at once: the second one's prompt is there already when the first one ends.
    both = listed([ask(1, 300, answer=100), ask(2, 300, answer=100)], concurrency=2)
    assert ran(both, Tiers(900_000)).working_bytes == (7 + 5) * page + 5 * state


@pytest.mark.parametrize("policy", ["lru", "hvd"])
def test_a_prompt_larger_than_the_host_is_written_from_where_its_pages_are(policy: str) -> None:
    """A write that read pages on a host that they had to leave would fail, or store other bytes."""
    source = open_source("multi-turn?conversations=8&rounds=5&live=4&user=64-300&answer=64-200", limit=25)
    profile = profile_named("qwen3-8b")
    run = ran(source, Tiers(92_274_688, storage=disk(440_401_920)), policy, profile)
    assert run.uses()["disk"].written_bytes > run.uses()["host"].capacity


@pytest.mark.parametrize(
    ("tiers", "concurrency", "message"),
    [
        (
            Tiers(0, 100_000),
            1,
            (
                r"a device of 100000 bytes does not hold the requests that run at once \(12 pages and 8"
                r" states\); give it at least 1280000"
            ),
        ),
        (
            Tiers(0, 1_280_000, device_states=7),
            1,
            "7 state slots on the device are too few for the requests that run at once; use at least 8",
        ),
        (Tiers(0, 640_000, device_states=16), 1, r"give it at least 689152"),
        (Tiers(0, 1_280_000), 2, r"\(24 pages and 9 states\); give it at least 1440000"),
    ],
)
def test_a_device_that_is_too_small_is_refused_at_once(tiers: Tiers, concurrency: int, message: str) -> None:
    source = listed([ask(1, 600, answer=70), ask(2, 600)], concurrency=concurrency)
    with pytest.raises(ConfigError, match=message) as raised:
        Run(source, measure(source), Setup("lru", HYBRID, tiers))
    wanted = int(str(raised.value).removesuffix(" bytes").rpartition(" ")[2])
    enough = replace(tiers, device_states=wanted) if wanted < 100 else replace(tiers, device_bytes=wanted)
    ran(source, enough)


def test_tiers_far_beyond_need_take_no_memory() -> None:
    run = ran(listed([ask(1, 300)] * 2), Tiers(1 << 60, 1 << 60, disk(1 << 60)))
    assert run.tally.token_hit_rate == pytest.approx(256 / 600)
