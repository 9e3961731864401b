"""Recorded sessions of agents: what is read from them, how they run side by side, and what is refused."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab.replay.requests import common, opened, same, starts_with
from tiercache.errors import ConfigError, InputError
from tiercache.policy import Ending
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources import open_source

BLOCK = 64


def turn(t: float, length: int, ids: list[int], output: int = 10, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": length, "out": output, "hash_ids": ids, "think_time": 1.0, **more}


def session(requests: list[Any], **more: Any) -> dict[str, Any]:
    own = {"block_size": BLOCK, "hash_id_scope": "local", "tool_tokens": 100, "system_tokens": 30}
    return {"id": "x", "requests": requests, **own, **more}


def write(folder: Path, **sessions: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, one in sessions.items():
        (folder / f"{name}.json").write_text(json.dumps(one))
    return folder


GROWING = [turn(0, 200, [1, 2, 3]), turn(5, 300, [1, 2, 3, 4]), turn(9.5, 400, [1, 2, 3, 4, 5, 6])]


def by_session(folder: Path, query: str = "", seed: int = 0) -> dict[int, list[Request]]:
    found = defaultdict(list)
    for request in opened(f"{folder}{query}", seed=seed):
        found[request.session].append(request)
    return dict(found)


def test_a_session_is_read(tmp_path):
    source = opened(str(write(tmp_path, a=session(GROWING)) / "a.json"))
    a, b, c = requests = list(source)
    assert (len(source), source.name, source.page_size, source.concurrency) == (3, "a", 64, 1)
    assert [len(r.prompt) for r in requests] == [200, 300, 400]
    assert [len(r.output) for r in requests] == [10, 10, 10]
    assert [(r.session, r.round) for r in requests] == [(0, 0), (0, 1), (0, 2)]
    assert np.diff([r.arrival for r in requests]) == pytest.approx([5, 4.5])
    # The next prompt repeats the whole prompt, the partial block at its end and the output.
    assert starts_with(b.prompt, a.prompt, a.output)
    assert starts_with(c.prompt, b.prompt, b.output)


def test_an_output_is_known_as_far_as_the_blocks_of_the_next_prompt_reach(tmp_path):
    long = [turn(0, 128, [1, 2], output=200), turn(1, 330, [1, 2, 3, 4, 5]), turn(2, 330, [1, 2, 3, 4, 5])]
    a, b, c = opened(str(write(tmp_path, a=session(long)) / "a.json"))
    assert common(np.concatenate([a.prompt, a.output]), b.prompt) in range(320, 324)
    assert common(b.prompt, c.prompt) in range(320, 324)


@pytest.mark.parametrize(
    ("second", "alike"),
    [
        (turn(1, 300, [1, 9, 3, 4]), 64),  # another second block
        (turn(1, 205, [1, 2, 3]), 192),  # too short to hold the output
    ],
)
def test_a_next_prompt_that_dropped_the_output_does_not_give_it(tmp_path, second, alike):
    a, b = opened(str(write(tmp_path, a=session([GROWING[0], second])) / "a.json"))
    assert alike <= common(np.concatenate([a.prompt, a.output]), b.prompt) < alike + 3


def test_an_id_of_the_partial_block_may_follow(tmp_path):
    a, b = opened(
        str(write(tmp_path, a=session([turn(0, 200, [1, 2, 3, 7]), turn(1, 200, [1, 2, 3, 7])])) / "a.json")
    )
    assert np.array_equal(a.prompt, b.prompt)


def test_ids_are_those_of_their_file_and_the_opening_is_that_of_all(tmp_path):
    write(tmp_path, a=session(GROWING), b=session(GROWING), c=session([turn(0, 200, [8, 9, 3])]))
    (a, *_), (b, *_), (c, *_) = by_session(tmp_path).values()
    assert all(128 <= common(x.prompt, y.prompt) < 131 for x, y in [(a, b), (b, c), (a, c)])
    (a, *_), (b, *_), (c, *_) = by_session(tmp_path, "?shared=0").values()
    assert all(common(x.prompt, y.prompt) < 3 for x, y in [(a, b), (b, c), (a, c)])


def test_the_most_frequent_opening_is_the_shared_one(tmp_path):
    other = turn(0, 200, [50, 51, 52])
    write(tmp_path, a=session([other, *GROWING]), b=session(GROWING))
    (odd, a, *_), (b, *_) = sorted(by_session(tmp_path).values(), key=len, reverse=True)
    assert common(odd.prompt, b.prompt) < 3
    assert 128 <= common(a.prompt, b.prompt) < 131


def test_a_sub_agent_is_a_session_of_its_own_in_its_parents_ids(tmp_path):
    inner = [turn(0, 192, [20, 21, 1]), turn(2, 192, [1, 2, 3])]
    sub = {"t": 3.0, "type": "subagent", "subagent_type": "E", "tool_tokens": 64, "requests": inner}
    write(tmp_path, a=session([*GROWING[:1], sub, *GROWING[1:]]), b=session([sub]))
    parent, child, alone = sorted(by_session(tmp_path).values(), key=lambda rs: (len(rs) != 3, rs[0].session))
    assert [len(parent), len(child), len(alone)] == [3, 2, 2]
    assert child[0].arrival - parent[0].arrival == pytest.approx(3)
    assert child[1].arrival - parent[0].arrival == pytest.approx(5)
    assert 192 <= common(child[1].prompt, parent[1].prompt) < 195
    assert 64 <= common(child[0].prompt, alone[0].prompt) < 67  # sub-agents of one kind share their opening


def test_sessions_run_side_by_side_up_to_a_number(tmp_path):
    write(tmp_path, **{f"s{i}": session([turn(0, 64, [1]), turn(100, 64, [2])]) for i in range(12)})
    for live in (1, 3, 12):
        spans = [
            (rs[0].arrival, rs[-1].arrival) for rs in by_session(tmp_path, f"?live={live}&gap=1").values()
        ]
        most = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
        assert most == live
        assert all(end - begin == pytest.approx(100) for begin, end in spans)


def test_how_an_answer_stopped_is_read(tmp_path):
    stops = ["tool_use", "end_turn", "max_tokens", None, 7, ["tool_use"]]
    write(tmp_path, a=session([turn(n, 64, [n], stop=stop) for n, stop in enumerate(stops)]))
    read = [request.ending for request in opened(f"{tmp_path}/a.json")]
    assert read == [Ending.CALL, Ending.TURN, *[Ending.UNKNOWN] * 4]


def test_a_part_of_the_sessions_can_be_kept_aside(tmp_path):
    write(tmp_path, **{f"s{n:02}": session([turn(0, 64 * (n + 1), list(range(n + 1)))]) for n in range(8)})

    def lengths(query: str) -> list[int]:
        return sorted(len(request.prompt) // 64 - 1 for request in opened(f"{tmp_path}{query}"))

    assert [lengths(f"?folds=3&fold={n}") for n in range(3)] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert lengths("?folds=3&fold=2&rest=1") == [0, 1, 3, 4, 6, 7]
    assert lengths("") == list(range(8))
    for query, message in (
        ("fold=1", "below folds"),
        ("rest=1", "folds=2"),
        ("folds=9&fold=8", "fewer folds"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(f"{tmp_path}?{query}")


def test_the_seed_decides_order_and_times_and_nothing_else(tmp_path):
    write(tmp_path, a=session(GROWING), b=session(GROWING[:2]), c=session(GROWING[:1]))
    first, again, other = (list(open_source(str(tmp_path), seed=seed)) for seed in (1, 1, 2))
    assert all(same(x, y) for x, y in zip(first, again, strict=True))
    assert [r.arrival for r in first] != [r.arrival for r in other]
    assert [r.arrival for r in first] == sorted(r.arrival for r in first)
    prompts = [{r.prompt.tobytes() for r in one} for one in (first, other)]
    assert prompts[0] == prompts[1]
    assert [len(r.prompt) for r in open_source(str(tmp_path), seed=1, limit=2)] == [
        len(r.prompt) for r in first[:2]
    ]


def test_parameters_are_named_and_explained(tmp_path):
    write(tmp_path / "runs", a=session(GROWING))
    source = opened(f"{tmp_path / 'runs'}?page=128&live=2")
    assert (source.name, source.page_size) == ("runs?live=2&page=128", 128)
    assert "at most 2 at once" in source.about
    assert "shared=1" in source.about
    for query, message in [
        ("?page=100", "page=100 is no multiple of 64"),
        ("?shared=2", "shared must be a whole number from 0 to 1"),
        ("?live=0", "live must be"),
        ("?gap=0", "gap must be"),
        ("?nonsense=1", "no parameter 'nonsense'; it has live, gap, shared, page"),
        ("?live", "'live' is not a parameter"),
    ]:
        with pytest.raises(ConfigError, match=message):
            open_source(f"{tmp_path / 'runs'}{query}")


def hostile() -> list[tuple[str, str]]:
    def one(**fields: Any) -> str:
        return json.dumps(session([GROWING[0] | fields]))

    def without(*names: str) -> str:
        return json.dumps(session([{k: v for k, v in GROWING[0].items() if k not in names}]))

    nested: Any = turn(0, 64, [1])
    for _ in range(9):
        nested = {"t": 0, "type": "subagent", "requests": [nested]}
    return [
        ("", "not JSON"), ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object with block_size and requests"),
        (json.dumps(session(GROWING, block_size=16)), "block_size must be 64, not 16"),
        (json.dumps(session(GROWING, hash_id_scope="global")), "hash_id_scope must be 'local'"),
        (json.dumps(session(GROWING, tool_tokens=-1)), "tool_tokens must be a whole number"),
        (json.dumps(session([])), "requests must be a list of at least one request"),
        (json.dumps(session([5])), "request 1: 5 is not a JSON object"), (without("t"), "request 1: no t;"),
        (one(t=-1), "request 1: t must be a number of seconds"),
        (one(t=0).replace('"t": 0', '"t": 1e999'), "request 1: t must be"),
        (one(t=0).replace('"t": 0', '"t": NaN'), "NaN is not a number"),
        (json.dumps(session([GROWING[1], GROWING[0]])), "request 2: t 0 comes after 5"),
        (one(**{"in": 0}), "in must be a whole number from 1"), (one(out=-1), "out must be"),
        (one(hash_ids=[1, 2]), "2 hash_ids for in 200, which has 3 whole blocks"),
        (one(hash_ids=[1, 2, "3"]), "hash_ids must be a list of integers"),
        (one(hash_ids=[1, 2, True]), "hash_ids must be"), (one(hash_ids=[1, 2, 2**32]), "hash_ids must be"),
        (one(type="subagent"), "request 1: no requests;"),
        (one(type="subagent", requests=[]), "request 1, requests must be a list"),
        (one(type="subagent", requests=[turn(-1, 64, [1])]), "request 1, request 1: t must be"),
        (json.dumps(session([nested])), "more than 8 sub-agents"),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), hostile())
def test_a_hostile_file_is_refused_with_its_name(tmp_path, text, message):
    write(tmp_path, a=session(GROWING))
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(InputError, match=rf"b\.json: .*{message}") as raised:
        open_source(str(tmp_path))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_file_that_is_too_long_is_refused_unread(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match=r"a\.json: longer than 67,108,864 bytes"):
        open_source(str(tmp_path))


def test_the_time_of_recorded_answers_can_be_left_out_of_the_pauses(tmp_path):
    requests = [turn(0, 200, [1, 2, 3], api_time=3), turn(5, 300, [1, 2, 3, 4], api_time=60.0)]
    requests += [turn(9.5, 400, [1, 2, 3, 4, 5, 6], api_time=None), turn(12.0, 400, [1, 2, 3, 4, 5, 6])]
    path = str(write(tmp_path, a=session(requests)) / "a.json")
    plain, closed = opened(path), open_source(path, closed=True)
    assert np.diff([r.arrival for r in plain]) == pytest.approx([5, 4.5, 2.5])
    assert np.diff([r.arrival for r in closed]) == pytest.approx([2, 0, 2.5])
    assert next(iter(plain)).arrival == next(iter(closed)).arrival
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(plain, closed, strict=True))
    for wrong in (-1, "3", float("nan")):
        requests[0]["api_time"] = wrong
        with pytest.raises(InputError, match=r"api_time|NaN is not a number"):
            open_source(str(write(tmp_path, a=session(requests)) / "a.json"))
