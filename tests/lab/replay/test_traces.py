"""Traces from files: what is read from them, and that nothing malformed is replayed."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.lab.replay.requests import common, opened, peak_memory, same, starts_with
from tiercache.errors import InputError
from tiercache_lab.replay.sources import open_source
from tiercache_lab.replay.sources.streams import block_keys, expand_keys


def row(timestamp: float, length: int, ids: list[int], output: int = 3, **more: object) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids, **more}
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_bytes(
        b"\n".join(
            [
                row(1000, 1024, [0, 1]).encode(),
                b"   ",
                row(1000, 1030, [0, 1, 2], type="text").encode() + b"\r",
                row(1500.5, 600, [0, 3], output=0).encode(),
                row(61_000, 512, [2**64 - 1]).encode(),
                row(61_000, 1024, [0, 1]).encode(),
            ]
        )
    )
    return path


def test_a_trace_is_read(trace):
    source = opened(str(trace), seed=9)
    a, b, c, d, e = requests = list(source)
    assert (len(source), source.name, source.page_size, source.concurrency) == (5, "small", 512, 1)
    assert [r.arrival for r in requests] == [0, 0, 0.5005, 60, 60]
    assert [(r.session, r.round) for r in requests] == [(n, 0) for n in range(5)]
    assert [len(r.prompt) for r in requests] == [1024, 1030, 600, 512, 1024]
    assert [len(r.output) for r in requests] == [3, 3, 0, 3, 3]
    assert starts_with(b.prompt, a.prompt)
    assert 512 <= common(a.prompt, c.prompt) < 515
    assert common(a.prompt, d.prompt) < 3
    assert np.array_equal(a.prompt, e.prompt)
    assert not np.array_equal(a.output, e.output)
    assert all(same(x, y) for x, y in zip(source, open_source(str(trace), seed=8), strict=True))


def test_a_blocks_tokens_depend_on_its_id_alone():
    ids = np.array([7, 2**64 - 1, 7], np.uint64)
    whole = expand_keys(block_keys(ids), 512, 1536)
    assert np.array_equal(whole[:512], whole[1024:])
    assert np.array_equal(whole[512:700], expand_keys(block_keys(ids[1:]), 512, 188))
    assert not np.array_equal(whole, expand_keys(block_keys(ids, 1), 512, 1536))


def test_a_limit_reads_no_further(trace):
    trace.write_text(trace.read_text() + "\nnot JSON\n")
    assert len(open_source(str(trace), limit=5)) == 5
    with pytest.raises(InputError, match=r"small\.jsonl, line 7: not JSON: 'not JSON"):
        open_source(str(trace))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("\x00\x01", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"timestamp": ' + "1" * 5000 + "}", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"timestamp": 2000}', "no input_length and no output_length and no hash_ids"),
        (row(float("nan"), 10, [1]), "NaN is not a number"),
        (row(float("inf"), 10, [1]), "Infinity is not a number"),
        (row(2000, 10, [1]).replace("2000", "1e999"), "timestamp must be"),
        (row(2000, 10, [1]).replace("2000", '"2000"'), "timestamp must be.*not '2000'"),
        (row(-1, 10, [1]), "timestamp must be"),
        (row(999, 10, [1]), "timestamp 999 comes after 1000 in the file; sort the file"),
        (row(2000, 0, []), "input_length must be a whole number from 1 to 4194304, not 0"),
        (row(2000, 10.0, [1]), "input_length must be"),
        (row(2000, 10, [1], output=-1), "output_length must be"),
        (row(2000, 10, [1, 2]), "2 hash_ids for input_length 10, which takes 1 blocks"),
        (row(2000, 10, [2**64]), "hash_ids must be"),
        (row(2000, 10, [True]), "hash_ids must be"),
        (row(2000, 10, "1"), "hash_ids must be"),
        ('{"timestamp": "' + "x" * 300_000 + '"}', "longer than 262,144 bytes"),
    ],
)
def test_a_hostile_line_is_refused_with_its_number(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text(f"{row(1000, 10, [1])}\n\n{line}\n{row(3000, 10, [1])}\n")
    with pytest.raises(InputError, match=f"line 3: .*{message}") as raised:
        open_source(str(path))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(InputError, match="line 1: not JSON"):
        open_source(str(path))


def test_an_endless_line_takes_no_memory(tmp_path):
    path = tmp_path / "t.jsonl"
    path.touch()
    os.truncate(path, 2**30)
    with peak_memory() as peak, pytest.raises(InputError, match="line 1: longer than"):
        open_source(str(path))
    assert peak[0] < 4 * 2**20


def test_files_that_are_no_traces(tmp_path):
    empty, blank, packed = tmp_path / "empty.jsonl", tmp_path / "blank.jsonl", tmp_path / "t.jsonl.gz"
    empty.touch()
    blank.write_bytes(b"\n" * (2**21 + 1))
    packed.write_bytes(gzip.compress(row(0, 10, [1]).encode()))
    for path, message in [
        (tmp_path, "has no files whose names end in .json"),
        (empty, "has no requests"),
        (blank, "line 2097153: a trace has at most 2,097,152 lines"),
        (packed, "is compressed; unpack it"),
        (Path("missing.jsonl"), "neither a file nor a generator"),
    ]:
        with pytest.raises(InputError, match=message) as raised:
            open_source(str(path))
        assert path.name in str(raised.value)
