"""Machines: the times that they give, and the files that describe them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.lab.replay.test_drive import ATTENTION, HYBRID
from tiercache.errors import ConfigError
from tiercache_lab.replay.machines import MACHINES, ReplayMachine, Speed, machine_named


def test_a_prefill_is_cut_at_checkpoints_and_by_the_chunk() -> None:
    machine = ReplayMachine(flops=1e12, cut_seconds=0.5, chunk=100)
    seconds = machine.prefill(HYBRID, 64, 320, (64, 128, 320, 500))
    edges = [64, 128, 228, 320]
    passes = [HYBRID.flops(a, b) / 1e12 for a, b in pairwise(edges)]
    assert seconds == pytest.approx([passes[0] + 0.5, passes[1], passes[2] + 0.5])
    more = replace(machine, pass_seconds=0.25, request_seconds=2.0).prefill(HYBRID, 64, 320, (64, 128, 320))
    assert more == pytest.approx([seconds[0] + 2.25, seconds[1] + 0.25, seconds[2] + 0.25])
    assert replace(machine, chunk=None, cut_seconds=0.0).prefill(HYBRID, 0, 320, ()) == pytest.approx(
        [HYBRID.flops(0, 320) / 1e12]
    )


def test_a_step_of_decoding_reads_the_weights_once() -> None:
    machine = ReplayMachine(decode_seconds=0.01, decode_seconds_per_request=0.001, memory_bandwidth=1e12)
    assert machine.step(ATTENTION, 0) == 0
    assert machine.step(ATTENTION, 1) == pytest.approx(0.01 + 0.001 + 0.001)
    assert machine.step(ATTENTION, 5) == pytest.approx(0.01 + 0.001 + 0.005)


def test_speeds_of_storage() -> None:
    machine = ReplayMachine(disk_bandwidth=5.0, disk_latency=1.0, tiers={"far": Speed(2.0, 3.0)})
    assert machine.storage("near", None) == Speed(5.0, 1.0)
    assert machine.storage("near", 7.0) == Speed(7.0, 1.0)
    assert machine.storage("far", None) == Speed(2.0, 3.0)
    assert machine.storage("far", 7.0) == Speed(7.0, 3.0)


@pytest.mark.parametrize("name", MACHINES)
def test_what_comes_with_tiercache_can_be_read(name: str) -> None:
    machine = machine_named(name)
    assert machine.batch > 1
    assert machine.flops > 1e14
    assert 0 < machine.step(HYBRID, machine.batch) < 0.1


def test_a_file_with_everything(tmp_path: Path) -> None:
    machine = ReplayMachine(
        3e11, 1e9, 2e8, 0.001, 0.0001, 0.002, {"a.b": Speed(5.0, 0.0), "c": Speed(7.0, 0.5)}, 0.003, 0.0,
        512, 3, 0.01, 0.002, 1e10,
    )  # fmt: skip
    path = tmp_path / "machine.toml"
    path.write_text("""
about = "all of it"
[prefill]
flops = 3e11
cut_seconds = 0.001
request_seconds = 0.003
chunk = 512
[decode]
seconds = 0.01
seconds_per_request = 0.002
memory_bandwidth = "10GB"
[serving]
batch = 3
[host]
bandwidth = "1GB/s"
latency = 0.0001
[storage]
bandwidth = 200_000_000
latency = 0.002
[tier."a.b"]
bandwidth = 5
[tier.c]
bandwidth = 7
latency = 0.5
""")
    assert machine_named(str(path)) == machine
    path.write_text("")
    assert machine_named(str(path)) == ReplayMachine()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flops = 1", "'flops' is not known; use about, prefill"),
        ("prefill = 3", r"prefill must be a table, \[prefill\], not 3"),
        ("[prefill]\nflop = 1", r"\[prefill\] has no setting 'flop'; it has flops, pass_seconds"),
        ("[prefill]\nflops = 0", r"\[prefill\] flops: .* greater than 0, not 0"),
        ("[prefill]\nflops = nan", "less than or equal to 1000000000000000000000, not nan"),
        ("[prefill]\nflops = inf", "less than or equal to 1000000000000000000000, not inf"),
        ("[prefill]\nflops = true", "a valid number, not True"),
        ("[prefill]\nflops = '1e12'", "a valid number, not '1e12'"),
        (f"[prefill]\nflops = 1{'0' * 400}", "a valid number"),
        ("[prefill]\npass_seconds = -0.1", "greater than or equal to 0, not -0.1"),
        ("[prefill]\nchunk = 1.5", "a valid integer, not 1.5"),
        ("[serving]\nbatch = 0", r"\[serving\] batch: .*, not 0"),
        ("[host]\nbandwidth = '0GB'", r"\[host\] bandwidth: .* greater than 0"),
        ("[host]\nbandwidth = 'fast'", "'fast' is not a size"),
        ("[tier.far]\nlatency = 1", r"tier\.far\.bandwidth: Field required"),
        ("[tier]\nfar = 1", r"tier\.far: .*, not 1"),
        ("tier = 1", "tier: .*, not 1"),
        ("[tier.far]\nbandwith = 1", r"tier\.far\.bandwi"),
        ("[prefill", "not TOML"),
        ("\0", "not TOML"),
        ("x = " + "[" * 5000, "not TOML"),
        ("#" * 70_000, "larger than 65536 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        machine_named(str(path))
    assert "machine.toml" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"about = '\xff'")
    for path in ("nowhere", str(tmp_path), "/dev/zero", "a\0b", "x" * 5000):
        with pytest.raises(ConfigError, match=r"no machine and no file|cannot be read"):
            machine_named(path)
    with pytest.raises(ConfigError, match="not TOML"):
        machine_named(str(tmp_path / "latin.toml"))
