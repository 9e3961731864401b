"""Generators of requests: what is shared with what, that it comes again, and how they are named."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice, pairwise

import numpy as np
import pytest

from tests.examples import slow_after
from tests.lab.replay.requests import common, opened, peak_memory, same, starts_with
from tiercache.core import TokenArray, reusable_pages
from tiercache.errors import ConfigError
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources import SOURCES, Span, open_source
from tiercache_lab.replay.sources.streams import VOCABULARY, tokens

REUSE = {
    "shared-prefix": (0.89, 0.94),
    "shared-prefix-zipf": (0.81, 0.89),
    "multi-turn": (0.86, 0.89),
    "multi-turn-stripped": (0.82, 0.85),
    "agent": (0.94, 0.96),
    "agent-collapse": (0.53, 0.61),
    "sharegpt": (0.04, 0.09),
    "mixed": (0.90, 0.94),
    "seed-20457": (517 / 576, 517 / 576),
    # The first request of each of the 50 groups finds nothing, the others 160 of 164 pages.
    "seed-11214": (450 * 160 / (500 * 164), 450 * 160 / (500 * 164)),
}
"""Prompt tokens that an infinite cache has, as a fraction."""


class InfiniteCache:
    """Every page that was ever computed, by a hash of all tokens up to its end."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: set[int] = set()
        self.weights = np.random.default_rng(1).integers(0, 2**63, page_size, dtype=np.uint64) | np.uint64(1)

    def hit(self, request: Request) -> int:
        """Tokens of the prompt that are there; then prompt and output are, but for the very last token."""
        computed = np.concatenate([request.prompt, request.output[:-1]])
        count = len(computed) // self.page_size
        pages = computed[: count * self.page_size].reshape(count, self.page_size) @ self.weights
        prefixes = np.cumsum(pages * (2 * np.arange(count, dtype=np.uint64) + np.uint64(1))).tolist()
        found = 0
        while found < reusable_pages(len(request.prompt), self.page_size) and prefixes[found] in self.pages:
            found += 1
        self.pages.update(prefixes[found:])
        return found * self.page_size


def sessions(requests: Iterable[Request]) -> dict[int, list[Request]]:
    grouped: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        grouped[request.session].append(request)
    return grouped


# --- all sources


@pytest.mark.parametrize("name", slow_after(5, SOURCES))
def test_a_source_keeps_the_contract_and_shares_what_it_is_made_for(name):
    source = opened(name)
    cache = InfiniteCache(source.page_size)
    hits = total = count = 0
    last = 0.0
    rounds: Counter[int] = Counter()
    for request in source:
        assert request.prompt.dtype == request.output.dtype == np.uint64
        assert request.prompt.ndim == request.output.ndim == 1
        assert len(request.prompt) > 0
        assert int(request.prompt.max()) < VOCABULARY
        assert request.arrival >= last
        assert request.round == rounds[request.session]
        rounds[request.session] += 1
        last = request.arrival
        count += 1
        hits += cache.hit(request)
        total += len(request.prompt)
    assert count == len(source)
    assert source.name == name
    low, high = REUSE[name]
    assert low <= hits / total <= high
    assert (source.page_size, source.concurrency) == (64, {"seed-20457": 10, "seed-11214": 5}.get(name, 1))


@pytest.mark.parametrize("name", SOURCES)
def test_it_comes_again_token_by_token_and_another_seed_is_another_trace(name):
    source = open_source(name, seed=3, limit=150)
    first = list(source)
    # Two iterators at once, so that none lives off the other's state.
    for one, two, three in zip(first, source, open_source(name, seed=3), strict=False):
        assert same(one, two)
        assert same(one, three)
    others = list(open_source(name, seed=4, limit=150))
    assert not any(np.array_equal(a.prompt, b.prompt) for a, b in zip(first, others, strict=False))


@pytest.mark.parametrize("name", SOURCES)
def test_a_limit_takes_the_first(name):
    few = open_source(name, limit=20)
    assert len(few) == 20
    assert all(same(a, b) for a, b in zip(few, islice(open_source(name), 20), strict=True))
    assert len(open_source(name, limit=10**9)) == len(open_source(name))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_handed_out_cannot_be_written(name):
    request = next(iter(open_source(name)))
    with pytest.raises(ValueError, match="read-only"):
        request.prompt[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        request.output[0] = 1


@pytest.mark.parametrize(
    "spec", ["agent", "agent-collapse", "multi-turn", "shared-prefix?groups=1024&prompts=1024"]
)
def test_prompts_are_made_when_asked_for(spec):
    """The limit is far below what the requests that pass take together."""
    source = open_source(spec, limit=400)
    with peak_memory() as peak:
        nbytes = sum(request.prompt.nbytes for request in source)
    plan = 24 * 2**20 if "?" in spec else 0  # three columns of a million requests
    assert peak[0] - plan < min(nbytes, 6 * 2**20)


def test_a_stream_is_splitmix64_and_its_beginnings_are_those_of_longer_ones():
    assert int(tokens(0, 1)[0]) == 0xE220A8397B1DCDAF % VOCABULARY
    assert starts_with(tokens(5, 1000), tokens(5, 10))
    assert common(tokens(5, 100), tokens(6, 100)) == 0
    assert len(np.unique(tokens(7, 1000))) > 980


# --- generators


@pytest.mark.parametrize("seed", [0, 1])
def test_shared_prefix(seed):
    source = open_source("shared-prefix?groups=8&prompts=6&system=700-900&question=64-100", seed=seed)
    requests = list(source)
    groups = defaultdict(list)
    for request in requests:
        groups[request.prompt[:700].tobytes()].append(request)
    assert sorted(map(len, groups.values())) == [6] * 8
    for members in groups.values():
        shared = {common(a.prompt, b.prompt) for a, b in pairwise(members)}
        assert len(shared) == 1
        assert 700 <= shared.pop() <= 900
        assert all(64 <= len(r.output) <= 512 for r in members)
    starts = [r.prompt[0] for r in requests]
    assert sum(a == b for a, b in pairwise(starts)) < len(requests) / 2, "groups are interleaved"
    assert len({r.session for r in requests}) == len(requests)


def test_zipf_draws_the_first_group_most_often():
    drawn = Counter(request.prompt[:1024].tobytes() for request in open_source("shared-prefix-zipf"))
    counts = [count for _, count in drawn.most_common()]
    assert sum(counts) == 2000
    assert 0.13 < counts[0] / 2000 < 0.21  # 1 / (1 + 1/2 + ... + 1/200) = 0.170
    assert 1.5 < counts[0] / counts[1] < 2.7
    assert len(counts) < 200


def test_a_conversation_continues_prompt_and_answer():
    source = open_source("multi-turn?conversations=60&live=20", seed=2)
    requests = list(source)
    talks = sessions(requests)
    assert len(talks) == 60
    for talk in talks.values():
        assert [r.round for r in talk] == list(range(12))
        for a, b in pairwise(talk):
            assert starts_with(b.prompt, a.prompt, a.output)
            assert 64 <= len(b.prompt) - len(a.prompt) - len(a.output) <= 2048
    spans = [(talk[0].arrival, talk[-1].arrival) for talk in talks.values()]
    assert max(sum(begin <= r.arrival <= end for begin, end in spans) for r in requests) == 20
    distances = {b - a for talk in (positions(requests, n) for n in range(20)) for a, b in pairwise(talk)}
    assert len(distances) > 20, "who speaks next is not a matter of turns"


def positions(requests: list[Request], session: int) -> list[int]:
    return [n for n, r in enumerate(requests) if r.session == session]


def test_stripped_thinking_leaves_the_prompt_end_as_the_only_place_to_resume():
    plain = sessions(open_source("multi-turn?conversations=10", seed=2))
    for number, talk in sessions(open_source("multi-turn-stripped?conversations=10", seed=2)).items():
        for a, b in pairwise(talk):
            assert common(b.prompt, np.concatenate([a.prompt, a.output])) - len(a.prompt) < 3
            answer = plain[number][a.round].output
            assert starts_with(b.prompt, a.prompt, answer)
            assert starts_with(a.output[::-1], answer[::-1])
            assert 128 <= len(a.output) - len(answer) <= 1024


def test_agents_grow_up_to_their_context():
    source = open_source("agent?sessions=30", seed=5)
    runs = sessions(source)
    assert len(runs) == 30
    kinds = {run[0].prompt[:3000].tobytes() for run in runs.values()}
    assert 1 < len(kinds) <= 3
    for run in runs.values():
        assert 1 <= len(run) <= 50
        for a, b in pairwise(run):
            assert starts_with(b.prompt, a.prompt, a.output)
        assert all(50 <= len(r.output) <= 300 for r in run)
    longest = [len(run[-1].prompt) + len(run[-1].output) for run in runs.values()]
    assert 40_000 < max(longest) <= 49_152
    assert all(len(run) >= 12 for run, length in zip(runs.values(), longest, strict=True) if length < 40_000)


def test_collapsed_observations_make_a_prompt_leave_its_predecessor_five_turns_back():
    whole = sessions(open_source("agent?sessions=6", seed=1))
    for number, run in sessions(open_source("agent-collapse?sessions=6", seed=1)).items():
        full = whole[number]
        for a, b in pairwise(run):
            if b.round <= 5:
                assert starts_with(b.prompt, a.prompt, a.output)
            elif b.round - 5 < len(full):
                # The oldest observation that the predecessor had comes after the action of that turn.
                gone = run[b.round - 6]
                observed = len(full[gone.round + 1].prompt) - len(full[gone.round].prompt) - len(gone.output)
                left = common(a.prompt, b.prompt)
                assert 0 <= left - position(a.prompt, gone.output) - len(gone.output) < 3
                assert len(b.prompt) - len(a.prompt) - len(a.output) <= 8192 + 16 - observed
        assert max(len(r.prompt) for r in run) < 49_152


def position(whole: TokenArray, part: TokenArray) -> int:
    """Return where the first eight tokens of `part` occur last in `whole`."""
    windows = np.lib.stride_tricks.sliding_window_view(whole, 8)
    return int(np.flatnonzero((windows == part[:8]).all(axis=1))[-1])


def test_few_short_chats_go_on():
    talks = sessions(open_source("sharegpt"))
    going_on = [(a, b) for talk in talks.values() for a, b in pairwise(talk)]
    assert 0.02 < len(going_on) / 4000 < 0.04
    assert all(starts_with(b.prompt, a.prompt, a.output) for a, b in going_on)
    assert 150 < np.median([len(r.prompt) for talk in talks.values() for r in talk]) < 250


def test_the_mix_has_all_four_at_all_times():
    source = open_source("mixed")
    requests = list(source)
    assert 2700 <= len(requests) <= 3200
    early = Counter(r.session % 4 for r in requests[:500])
    assert sorted(early) == [0, 1, 2, 3]
    assert min(early.values()) > 50
    parts = [[r for r in requests if r.session % 4 == n] for n in range(4)]
    assert (len(parts[0]), len(parts[1]), len(parts[3])) == (640, 720, 900)
    assert max(r.round for r in parts[1]) == 11
    assert np.median([len(r.prompt) for r in parts[2]]) > 8000


# --- specs


def test_parameters_are_read_and_named_in_order():
    source = opened("shared-prefix?rate=0.5&prompts=16&groups=32&question=100")
    assert (len(source), source.name) == (512, "shared-prefix?groups=32&prompts=16&question=100&rate=0.5")
    assert source.workload.question == Span(100, 100)
    assert len(open_source(source.name)) == 512
    assert list(islice(source, 400))[-1].arrival == pytest.approx(800, rel=0.2)
    assert opened("agent?").name == "agent"


def test_help_has_all_there_is():
    for name, kind in SOURCES.items():
        assert kind.summary
        assert bool(kind.options) != (name == "mixed" or name.startswith("seed-"))
        for option in kind.options:
            assert option.about
            ends = option.default if isinstance(option.default, Span) else (option.default,)
            assert all(option.low <= end <= option.high for end in ends)
            assert len(opened(f"{name}?{option.name}={option.default}")) == len(opened(name))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "'nothing' is neither a file nor a generator.*shared-prefix, .*seed-11214"),
        ("a/trace.jsonl", "neither a file nor"),
        ("n" * 100_000, "'nnn.*neither a file nor"),
        ("agent?session=1", "agent has no parameter 'session'; it has sessions, live, turns"),
        ("agent?sessions", "'sessions' is not a parameter; write agent.name=value"),
        ("agent?sessions=1&", "'' is not a parameter"),
        ("agent?sessions=1&sessions=2", "'sessions' is given twice"),
        ("agent?sessions=0", r"agent: sessions must be a whole number from 1 to 16384 \(sessions\), not '0'"),
        ("agent?sessions=1.5", "sessions must be"),
        ("agent?sessions=१", "sessions must be"),
        ("agent?sessions=" + "9" * 10_000, "sessions must be"),
        ("agent?turns=50-12", "turns must be a number or a range such as 12-50, within 1 to 256"),
        ("agent?turns=0-4", "turns must be"),
        ("agent?pause=nan", "pause must be a number from 0.001 to"),
        ("agent?pause=0", "pause must be"),
        ("agent?context=2000", "agent: context=2000 has no room for a first turn"),
        (
            "shared-prefix?groups=65536&prompts=65536",
            "shared-prefix: the parameters make 4,294,967,296 requests.*at most 1,048,576",
        ),
        ("multi-turn?rounds=4096", "prompts of 10,485,760 tokens.*at most 4,194,304"),
        ("seed-20457?clients=5", "seed-20457 has no parameters"),
    ],
)
def test_a_malformed_spec_is_refused_in_one_sentence(spec, message):
    with pytest.raises(ConfigError, match=message) as raised:
        open_source(spec)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
