"""The queue against the reference worker: the same tokens are restored; the measured machine is usable."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.ttft import compare
from tiercache.cli.app import main
from tiercache.policy import profile_named
from tiercache_lab.replay.machines import machine_named


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_what_the_worker_restores_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    served, run, measured = compare(rounds=1, repeats=1, context=512)
    assert run.restored == list(served.restored)
    assert sum(run.restored) > 10_000
    assert {"device", "host", "disk"} <= {name for name, use in run.uses().items() if use.tokens}
    assert all(0 < predicted < 60 for predicted in run.ttft)
    with capsys.disabled():
        print(f" predicted / measured: {sum(run.ttft) / sum(measured):.2f}", end="")


@pytest.mark.slow
def test_a_worker_is_measured_for_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["tiercache", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        return out

    place = tmp_path / "measured"
    said = call("bench", "worker", place, "--context", 512, "--repeat", 1)
    assert said.split() == [str(place / "machine.toml"), str(place / "config.json")]
    machine, profile = machine_named(str(place / "machine.toml")), profile_named(str(place / "config.json"))
    assert machine.batch == 1
    assert [tokens for tokens, _ in machine.curve] == [1, 16, 64, 128, 192, 256, 512]
    assert machine.decode_seconds_per_request > 0
    # Transformers keeps four inputs of each convolution, of which three are needed.
    assert (profile.kv_bytes_per_token, profile.state_bytes) == (3072, 663_552 - 9 * 512 * 4)
    options = ("--machine", place / "machine.toml", "--profile", place / "config.json", "--slo-ttft", "10s")
    source = "multi-turn?conversations=2&rounds=2&live=2&user=64-200"
    rows = call("replay", source, *options, "--policy", "lru", "--no-bounds", "-o", "jsonl").splitlines()
    assert json.loads(rows[-1])["serving"]["busy"]["engine"] > 0
