"""The campaign behind docs/policies.md: what it runs, how it goes on, and its statistics."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.policies import matrix, tables
from tests.benchmarks.policies.__main__ import main
from tests.benchmarks.policies.intervals import of_seeds, of_windows
from tests.benchmarks.policies.matrix import Size, Traffic
from tests.benchmarks.policies.rows import Rows

ROOT = Path(__file__).parents[2]
SMALL = (
    "--limit", "30", "--seeds", "0", "--policies", "hvd,lru", "--processes", "1", "--sources", "sharegpt",
)  # fmt: skip


COMMANDS = {
    "tests.benchmarks.hosts": (),
    "tests.benchmarks.policies": ("run", "tables"),
    "tests.benchmarks.restorable": (),
    "tests.benchmarks.restore": (),
    "tests.campaign": (),
    "tests.fuzz.guided": (),
}
"""Commands with help, and their parts; that of tests.benchmarks.sglang needs SGLang."""


@pytest.mark.parametrize("part", ["run", "tables"])
def test_the_help_of_a_campaign_is_there(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([part, "--help"])
    assert left.value.code == 0
    assert "results" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("module", COMMANDS)
def test_the_help_of_every_command_is_there(module: str) -> None:
    for part in ("", *COMMANDS[module]):
        line = [sys.executable, "-W", "ignore", "-m", module, *filter(None, [part]), "--help"]
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stderr, "usage: " in done.stdout) == (0, "", True)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_campaign_goes_on_where_it_stopped_and_each_row_has_its_command(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    first = ["run", str(results), *SMALL, "--phases", "5 %", "--policies", "hvd"]
    assert main(first) == 0
    made = rows_of(results)
    assert [row["policy"] for row in made] == ["infinite", "hvd", "clairvoyant"]
    # A kill may leave half a line. It is cut off, and its run is made again; the others are not.
    results.write_text(results.read_text()[:-20])
    assert main(["run", str(results), *SMALL, "--phases", "5 %,two tiers"]) == 0
    then = rows_of(results)
    assert then[:2] == made[:2]
    added = [(row["phase"], row["policy"], row["size"]) for row in then[2:]]
    tiers = [("hvd", "host 5 % + disk 25 %"), ("lru", "host 5 % + disk 25 %"), ("hvd", "30 %")]
    assert added == [
        ("5 %", "lru", "5 %"), ("5 %", "clairvoyant", "5 %"), *(("two tiers", *one) for one in tiers),
    ]  # fmt: skip
    assert main(["run", str(results), *SMALL, "--phases", "5 %,two tiers"]) == 0
    assert rows_of(results) == then
    # Any row's command, run on its own, gives its figures: here of one in bytes.
    told = then[-2]
    assert "--host-bytes" in told["command"]
    alone = subprocess.run(
        [sys.executable, "-m", "tiercache.cli", *shlex.split(told["command"])[1:], "-o", "jsonl"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    again = json.loads(alone.stdout.splitlines()[-1])
    same = ("flops_saved", "token_hit_rate", "capacity_bytes", "working_bytes", "requests", "tiers")
    assert {name: again[name] for name in same} == {name: told[name] for name in same}
    page = tables.page(list(Rows(results)))
    for title in ("## Measured over", "### Footprints", "### At 5%", "### Two tiers", "### Commands"):
        assert title in page
    tiers = page.partition("### Two tiers")[2]
    for one, label in zip(then[-3:], ("hvd", "lru", "hvd in one pool of 30 %"), strict=True):
        assert f"| {label} | {one['flops_saved']:.3f} |" in tiers


def row_of(policy: str, seed: int, saved: float, checkpoints: str = "") -> dict[str, Any]:
    """Return a row at 5 % of one source."""
    return {
        "phase": "checkpoints" if checkpoints else "5 %", "traffic": "sharegpt", "seed": seed,
        "policy": policy, "size": "5 %", "checkpoints": checkpoints, "profile": "qwen3-next-80b-a3b",
        "capacity_bytes": 2**30, "working_bytes": 0, "requests": 10, "flops_saved": saved, "code": "c",
        "command": "tiercache replay sharegpt",
    }  # fmt: skip


def test_tables_compare_with_rivals_only_and_mix_no_checkpoints() -> None:
    rows = [
        row_of(policy, seed, saved + seed / 100, checkpoints)
        for seed in (0, 1)
        for policy, saved, checkpoints in (
            ("infinite", 0.9, ""), ("hvd", 0.5, ""), ("lru", 0.3, ""), ("arc", 0.4, ""),
            ("clairvoyant", 0.85, ""),
            ("hvd", 0.2, "every:2048"),
        )
    ]  # fmt: skip
    page = tables.page(rows)
    small, _, rest = page.partition("### Checkpoints compared")
    assert "| sharegpt | arc | +10.00 [+10.00, +10.00] | 36 % |" in small, "not a policy that knows the end"
    assert "| clairvoyant | 0.855 |  |  |" in small, "a bound has a mean and no lead"
    assert "| every:2048 | 0.205 |" in rest


@pytest.mark.slow
def test_what_cannot_be_run_is_said_and_the_rest_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    assert main(["run", str(results), *SMALL, "--phases", "two tiers"]) == 1
    assert "run the phase 5 % first" in capsys.readouterr().err
    assert [row["size"] for row in rows_of(results)] == ["5 %", "30 %"], "what needs no bytes is run"
    missing = ["--trace", str(tmp_path / "missing.jsonl"), "--sources", "sharegpt,conversation trace"]
    assert main(["run", str(results), *SMALL, "--phases", "5 %", "--policies", "lru", *missing]) == 1
    assert "FAILED: 5 %, conversation trace, seed 0" in capsys.readouterr().err
    assert {row["traffic"] for row in rows_of(results)} == {"sharegpt"}


def test_the_order_of_the_campaign() -> None:
    sources = matrix.traffics("trace.jsonl", "sessions/")
    assert len(sources) == 11
    found = list(matrix.blocks(sources, matrix.SEEDS, ("hvd", "lru")))
    phases = list(dict.fromkeys(block.phase for block in found))
    assert phases == list(matrix.PHASES)
    first = [block for block in found if block.phase == "5 %"]
    assert [block.seed for block in first[:12]] == [1000] * 11 + [1001]
    assert len(first) == 10 * 5 + 1, "the trace has no seeds"
    keys = [
        (run.command(10**12), run.policy)
        for block in found
        for run in block.runs()
        if run.policy != "infinite"
    ]
    assert len(keys) == len(set(keys))
    assert all("trace.jsonl" in key or "/" not in key.replace("agentic/", "") for key, _ in keys)


def test_commands_name_no_path_of_this_machine() -> None:
    trace = Traffic("conversation trace", "trace.jsonl", "/data/secret/trace.jsonl", seeded=False)
    block = next(matrix.blocks([trace], (7,), ("hvd",), (), 50))
    free, run, *_ = block.runs()
    assert run.command() == (
        "tiercache replay trace.jsonl --seed 7 --limit 50 --policy hvd --capacity 0.05 --index-only"
        " --no-bounds"
    )
    assert free.command() == run.command().replace("hvd", "lru")
    assert block.arguments(["hvd"], 0, bounds=True) == [
        "/data/secret/trace.jsonl", "--seed", "7", "--limit", "50", "--policy", "hvd", "--capacity", "0.05",
        "--index-only", "--samples",
    ]  # fmt: skip
    assert Size(0.05, 0.25).options(1000) == ["--host-bytes", "50", "--disk-bytes", "250"]


def test_intervals_over_seeds() -> None:
    found = of_seeds([1.0, 2.0, 3.0, 4.0, 5.0])
    # By hand: standard deviation sqrt(2.5), divided by sqrt(5), times 2.776.
    assert (found.mean, found.high - 3) == (3.0, pytest.approx(2.776 * math.sqrt(0.5)))
    assert found.excludes_zero
    assert not of_seeds([-1.0, 1.5, 2.0]).excludes_zero
    one = of_seeds([0.3])
    assert (one.mean, one.is_known, one.excludes_zero) == (0.3, False, False)
    with pytest.raises(ValueError, match="11 seeds"):
        of_seeds([0.0] * 11)


def test_intervals_hold_what_they_promise() -> None:
    """The true mean is inside in some 95 of 100 draws; blocks are needed where neighbours are alike."""
    chance = np.random.default_rng(5)
    inside = [of_seeds(chance.normal(2, 1, 5).tolist()) for _ in range(400)]
    assert 0.92 < np.mean([one.low < 2 < one.high for one in inside]) < 0.98
    covered = {1: 0, 10: 0}
    for _ in range(40):
        noise = np.zeros(100)
        for i, step in enumerate(chance.normal(0, 1, 100)):
            noise[i] = 0.7 * noise[i - 1] + step if i else step
        for block in covered:
            found = of_windows([1.0] * 100, (2 + noise).tolist(), block)
            covered[block] += found.low < 2 < found.high
    assert covered[1] < 32 < covered[10]


def test_windows_are_weighed() -> None:
    found = of_windows([1.0, 3.0], [0.0, 0.4], 1)
    assert found.mean == pytest.approx(0.3)
    assert (found.low, found.high) == (0.0, pytest.approx(0.4))
    assert of_windows([2.0], [0.5]).mean == 0.5


def row(policy: str, seed: int, saved: float, traffic: str = "agent", **changes: Any) -> dict[str, Any]:
    return {
        "format": 1, "code": "abc", "phase": "5 %", "traffic": traffic, "seed": seed, "policy": policy,
        "size": "5 %", "checkpoints": "", "profile": "qwen3-next-80b-a3b", "command": f"c {policy} {seed}",
        "flops_saved": saved, "capacity_bytes": 10 << 30, "working_bytes": 1 << 30, "requests": 10,
        "seconds": 1.0,
    } | changes  # fmt: skip


def test_leads_are_of_the_same_seeds() -> None:
    """The seeds differ much and the policies little: the differences show it, the means alone do not."""
    rows = [
        *(row("hvd", seed, 0.1 * seed + 0.010 + 0.0001 * seed) for seed in range(5)),
        *(row("lru", seed, 0.1 * seed) for seed in range(5)),
        *(row("gdsf", seed, 0.1 * seed + 0.02) for seed in range(1, 4)),
        *(row("clairvoyant", seed, 0.1 * seed + 0.05) for seed in range(5)),
    ]
    found = tables.setting(rows, lambda _: True)
    lead = found.lead("agent", "lru")
    assert lead is not None
    assert lead.mean == pytest.approx(0.0102)
    assert lead.excludes_zero
    assert lead.high - lead.low < 0.001
    behind = found.lead("agent", "gdsf")
    assert behind is not None
    assert behind.high < 0
    assert found.lead("agent", "arc") is None
    text = tables.page([*rows, *(row("infinite", seed, 0.9) for seed in range(5))])
    assert "| agent | gdsf | -0.98 [-1.00, -0.96] | 20 % |" in text
    assert "| lru | 0.200 | +1.02 [+1.00, +1.04] | 1 / 0 / 0 |" in text


def test_the_trace_has_its_interval_from_windows() -> None:
    windows = [[1.0, 0.5 + 0.01 * (i % 3)] for i in range(100)]
    less = [[1.0, value - 0.1] for _, value in windows]
    rows = [
        row("hvd", 1000, 0.51, "conversation trace", windows=windows),
        row("lru", 1000, 0.41, "conversation trace", windows=less),
        *(row("hvd", seed, 0.5) for seed in (1000, 1001)),
        *(row("lru", seed, 0.4 + seed / 1e5) for seed in (1000, 1001)),
    ]
    found = tables.setting(rows, lambda _: True)
    lead = found.lead("conversation trace", "lru")
    assert lead is not None
    assert (lead.low, lead.high) == (pytest.approx(0.1), pytest.approx(0.1))
    both = found.lead_on_mean("lru")
    assert both is not None
    assert both.mean == pytest.approx((0.1 + 0.089995) / 2)
    assert both.is_known


def test_the_page_has_a_place_for_the_tables() -> None:
    text = (ROOT / "docs" / "policies.md").read_text()
    once = tables.written(text, "made")
    assert tables.written(once, "made") == once
    assert tables.written(once, "more").count("more") == 1 + text.count("more")
    with pytest.raises(SystemExit, match="must have these two lines"):
        tables.written("nothing", "made")
