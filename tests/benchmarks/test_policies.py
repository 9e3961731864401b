"""The campaign behind docs/policies.md."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.benchmarks import policies
from tests.benchmarks.policies import PARTS, SEEDS, commands, interval, tables


@pytest.mark.slow
def test_a_campaign_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    parts = {"5 %": ("--policy", "hvd,lru", "--capacity", "0.05"), "two tiers": ("--policy", "hvd")}
    monkeypatch.setattr(policies, "PARTS", parts)
    results = tmp_path / "results.jsonl"
    line = ["run", str(results), "--limit", "30", "--seeds", "1", "--sources", "sharegpt"]
    assert policies.main(line) == 0
    rows = [json.loads(row) for row in results.read_text().splitlines()]
    two = ["infinite", "hvd", "lru in every tier", "hvd in one pool", "clairvoyant"]
    assert [row["policy"] for row in rows] == ["infinite", "hvd", "lru", "clairvoyant", *two]
    sizes = {name: use["capacity"] for name, use in rows[5]["tiers"].items()}
    assert sizes == {"host": rows[0]["capacity_bytes"] // 20, "disk": rows[0]["capacity_bytes"] // 4}
    # A kill may leave half a line. It is cut off; the other rows of its command count as made.
    whole = results.read_text()
    results.write_text(whole + '{"half')
    assert policies.main([*line, "--trace", str(tmp_path / "missing.jsonl")]) == 1
    assert results.read_text() == whole
    assert "FAILED: 5 %" in capsys.readouterr().err
    assert policies.main(["tables", str(results)]) == 0
    assert f"| hvd | {rows[1]['flops_saved']:.3f} |" in capsys.readouterr().out


def test_the_order_of_the_campaign() -> None:
    found = list(commands(["agent", "trace.jsonl"], SEEDS))
    assert list(dict.fromkeys(one.part for one in found)) == list(PARTS)
    assert [(one.source, one.seed) for one in found[:3]] == [
        ("agent", 1000), ("trace.jsonl", 1000), ("agent", 1001),
    ]  # fmt: skip
    assert len(found) == len(PARTS) * (len(SEEDS) + 1), "the trace has no seeds"


def test_intervals_over_seeds() -> None:
    # By hand: standard deviation sqrt(2.5), divided by sqrt(5), times 2.776.
    half = 2.776 * math.sqrt(0.5)
    assert interval([0.01, 0.02, 0.03, 0.04, 0.05]) == f"+3.00 [{3 - half:+.2f}, {3 + half:+.2f}]"
    assert interval([0.3]) == "+30.00"


def row(policy: str, seed: int, saved: float, source: str = "agent", **changes: Any) -> dict[str, Any]:
    capacity = 1.0 if policy == "infinite" else 0.05
    return {
        "part": "5 %", "source": source, "seed": seed, "policy": policy, "capacity": capacity,
        "flops_saved": saved,
    } | changes  # fmt: skip


def test_leads_are_of_the_same_seeds() -> None:
    """The seeds differ much and the policies little: the differences show it, the means alone do not."""
    rows = [
        *(row("hvd", seed, 0.1 * seed + 0.010 + 0.0001 * seed) for seed in range(5)),
        *(row("lru", seed, 0.1 * seed) for seed in range(5)),
        *(row("lpc", seed, 0.1 * seed + 0.02) for seed in range(1, 4)),
        *(row("infinite", seed, 0.9) for seed in range(5)),
    ]
    [small, free] = tables(rows)
    assert "| lru | 0.200 | 0.200 | +1.02 [+1.00, +1.04] |" in small
    assert "| lpc | 0.220 | 0.220 | -0.98 [-1.00, -0.96] |" in small
    assert "| hvd | 0.210 | 0.210 |  |" in small
    assert "| infinite | 0.900 | 0.900 |  |" in free


def test_a_source_without_seeds_gives_every_seed_the_same_lead() -> None:
    rows = [
        *(row("hvd", seed, 0.5) for seed in (0, 1)), row("hvd", 0, 0.5, "trace.jsonl"),
        *(row("lru", seed, 0.4 + seed / 100) for seed in (0, 1)), row("lru", 0, 0.3, "trace.jsonl"),
    ]  # fmt: skip
    [only] = tables(rows)
    half = 12.706 * 0.25  # two seeds, half a point apart
    told = f"+14.75 [{14.75 - half:+.2f}, {14.75 + half:+.2f}]"
    assert f"| lru | 0.405 | 0.300 | 0.353 | {told} |" in only
