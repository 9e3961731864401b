"""Arrival times from files of BurstGPT and Azure, and generators whose sessions start at these times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.lab.replay.requests import opened
from tests.lab.replay.test_drive import CHATS
from tiercache.errors import ConfigError, InputError
from tiercache_lab.replay.sources import open_source, times
from tiercache_lab.replay.sources.times import read_times

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
NEWER = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


@pytest.mark.parametrize(
    ("lines", "times"),
    [
        ([BURST, "5,ChatGPT,472,18,490,Conversation log", "45,GPT-4,1,0,1,x", "45,a,1,1,2,x"], [0, 40, 40]),
        ([NEWER, "19440110.0,1722ac82,43,GPT-4,906,446,1352,x", "19440161.5,d5,2,x,3,2,5,x"], [0, 51.5]),
        ([AZURE, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:18:04.2500000,3180,8"], [0, 60.27004]),
        ([AZURE, "2024-05-12 00:00:00+00:00,1,1", "2024-05-12 00:00:10.5+00:00,1,1"], [0, 10.5]),
        ([AZURE, "2024-05-12T00:00:00+02:00,1,1", "2024-05-11T23:00:00Z,1,1"], [0, 3600]),
        (['"Timestamp","Model","Request tokens"', '"1.5","a,b",3', "", '"2"," x ""y""",3'], [0, 0.5]),
        (["request TOKENS,timestamp", "4,7", "4, 9 "], [0, 2]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_times_are_read(tmp_path: Path, lines: list[str], times: list[float], end: str, mark: str) -> None:
    path = write(tmp_path / "times.csv", mark + lines[0], *lines[1:], end=end)
    assert read_times(path, len(times)) == pytest.approx(times, abs=1e-6)
    assert read_times(path, 1).tolist() == [0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "begins with ''; give a file of BurstGPT"),
        (["a,b", "1,2"], "begins with 'a,b'; give a file of BurstGPT"),
        (["Timestamp,Model", "1,2"], "give a file of BurstGPT"),
        (["t,ContextTokens", "1,2"], "give a file of BurstGPT"),
        ([BURST, "nan,a,1,1,2,x"], "line 2: the Timestamp must be a number of seconds from 0 to 1e.12, not"),
        ([BURST, "inf,a,1,1,2,x"], "not 'inf'"),
        ([BURST, "-1,a,1,1,2,x"], "not '-1'"),
        ([BURST, "1e5,a,1,1,2,x"], "not '1e5'"),
        ([BURST, "9999999999999,a"], "from 0 to"),
        ([BURST, f"{'9' * 5000},a"], "from 0 to"),
        ([BURST, "\u0661,a,1"], "the Timestamp must be"),
        ([BURST, ",a,1,1,2,x"], "not ''"),
        ([BURST, "5,a", "4.5,a"], "line 3: '4.5' comes before the time of the line above; sort the file"),
        ([AZURE, "2023-11-16,1,2"], "line 2: the TIMESTAMP must be a date and time, such as"),
        ([AZURE, "2023-13-16 18:17:03,1,2"], "must be a date and time"),
        ([AZURE, "2023-11-16 25:17:03,1,2"], "must be a date and time"),
        ([AZURE, "2023-11-16 18:17:03+99:00,1,2"], "must be a date and time"),
        ([AZURE, "12,1,2"], "must be a date and time"),
        (["Model,Request tokens,Timestamp", "a,1"], "line 2: 2 fields; the time is in field 3"),
        ([BURST, '5,"a'], "not CSV"),
        ([BURST, '5,"a"b'], "not CSV"),
        ([BURST, "x" * 20_000], "line 2: longer than 16,384 bytes"),
        ([BURST, "5,a"], "has 1 requests, and the source needs 2 times, one for each session"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_in_one_sentence(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    path = write(tmp_path / "times.csv", *lines)
    with pytest.raises(InputError, match=message) as raised:
        read_times(path, 2)
    assert "times.csv" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    for content, message in (
        (b"\x1f\x8b\x08", "is compressed; unpack it"),
        (b"Timestamp,Request tokens\n5,\xff\n", "line 2: not UTF-8"),
        (b'Timestamp,Request tokens\n1,"' + b"x\n" * 80_000, "not CSV"),
        (b"\0\0\0\0", "give a file of BurstGPT|not CSV"),
    ):
        (tmp_path / "times.csv").write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_times(tmp_path / "times.csv", 5)
    with pytest.raises(InputError, match="cannot be read: No such file or directory; give a CSV file"):
        read_times(tmp_path / "nowhere.csv", 1)
    with pytest.raises(InputError, match="cannot be read"):
        read_times(tmp_path, 1)


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "times.csv", BURST, "1,a", "2,a", "what comes here is not looked at", "0")
    assert read_times(path, 2).tolist() == [0, 1]


def burst(path: Path, times: list[float]) -> Path:
    return write(path, BURST, *(f"{time},ChatGPT,1,1,2,API log" for time in times))


def test_requests_come_at_the_times_of_the_file(tmp_path: Path) -> None:
    times = [0.0, 0.0, 0.5, 100.0, 100.25]
    path = burst(tmp_path / "burst.csv", [time + 7 for time in times])
    source = open_source("sharegpt?chats=5&continued=0", seed=3, arrivals=path)
    plain = opened("sharegpt?chats=5&continued=0", seed=3)
    assert [request.arrival for request in source] == times
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(source, plain, strict=True))
    assert source.about == "Requests come at the times of burst.csv."
    assert [r.arrival for r in source] == [r.arrival for r in source], "every iteration is the same"
    with pytest.raises(InputError, match="needs 6 times"):
        open_source("sharegpt?chats=6&continued=0", arrivals=path)
    assert len(open_source("sharegpt?chats=6&continued=0", limit=5, arrivals=path)) == 5


def test_sessions_start_at_the_times_of_the_file_and_keep_their_pauses(tmp_path: Path) -> None:
    times = [float(n * n) for n in range(10)]
    source = open_source(CHATS, seed=2, arrivals=burst(tmp_path / "burst.csv", times))
    assert source.about == "Sessions start at the times of burst.csv."
    plain = list(opened(CHATS, seed=2))
    order = list(dict.fromkeys(request.session for request in plain))
    found = list(source)
    assert [request.arrival for request in found] == sorted(request.arrival for request in found)
    assert sorted(request.session for request in found) == sorted(request.session for request in plain)
    for session in order:
        old, new = ([r for r in all_ if r.session == session] for all_ in (plain, found))
        assert new[0].arrival == times[order.index(session)]
        assert [r.round for r in new] == [r.round for r in old]
        assert np.diff([r.arrival for r in new]) == pytest.approx(np.diff([r.arrival for r in old]))
        assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(new, old, strict=True))


def test_too_many_requests_that_wait_for_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(CHATS, arrivals=burst(tmp_path / "burst.csv", [1e6 * n for n in range(10)]))
    assert len(list(source)) == 50
    monkeypatch.setattr(times, "_MAX_TOKENS", 2000)  # private: the real limit is a GiB
    with pytest.raises(ConfigError, match="replay fewer sessions at once, or fewer in all"):
        list(source)


def test_what_has_times_of_its_own_keeps_them(tmp_path: Path) -> None:
    path = burst(tmp_path / "burst.csv", [0.0])
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(ConfigError, match=r"trace.jsonl has times of its own; other arrivals"):
        open_source(str(trace), arrivals=path)
    with pytest.raises(ConfigError, match="seed-20457 repeats a published benchmark"):
        open_source("seed-20457", arrivals=path)


def test_pages_of_generators_and_traces(tmp_path: Path) -> None:
    assert open_source(CHATS).page_size == 64
    assert open_source(CHATS, page=16).page_size == 16
    assert open_source(CHATS, page=400).page_size == 400
    for wrong in (0, 8, 24, -64, 8192):
        with pytest.raises(ConfigError, match="a page has a multiple of 16 tokens up to 4096"):
            open_source(CHATS, page=wrong)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n')
    assert [open_source(str(trace), page=page).page_size for page in (None, 64, 512, 1024)] == [
        512,
        64,
        512,
        1024,
    ]
    with pytest.raises(ConfigError, match="trace has blocks of 512 tokens; use a page that divides them"):
        open_source(str(trace), page=192)
    with pytest.raises(ConfigError, match="seed-11214 repeats a published benchmark, so its pages"):
        open_source("seed-11214", page=64)
    (tmp_path / "sessions").mkdir()
    with pytest.raises(ConfigError, match=r"sessions\?page=128"):
        open_source(str(tmp_path / "sessions"), page=128)
