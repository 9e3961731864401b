"""`tiercache replay --plan`: the knee of curves made by hand, the answer as a user sees it, and mistakes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.store.test_samples import call
from tiercache.policy import profile_named
from tiercache_lab.replay.plan import Curve, Search, SizePlan, disk_of, host_of, rounded, sentences
from tiercache_lab.replay.sources import open_source
from tiercache_lab.replay.study import Question

GIB = 1 << 30
SMALL = "multi-turn?conversations=5&rounds=3&live=3&user=64-300&answer=64-200"


def step(size: float) -> float:
    """Nothing below 8 GiB, and everything above."""
    return 0.8 if size >= 8 * GIB else 0.0


def bend(size: float) -> float:
    """A straight rise to 0.6 at 10 GiB, and a slow one to 0.7 at 100 GiB."""
    return 0.06 * size / GIB if size <= 10 * GIB else 0.6 + (size / GIB - 10) / 900


def line(size: float) -> float:
    return 0.007 * size / GIB


def flat(size: float) -> float:
    return 0.5


def test_the_knee_of_a_bend_is_the_bend() -> None:
    sizes = [GIB * n for n in (1, 2, 5, 8, 10, 13, 20, 50, 100)]
    curve = Curve({size: bend(size) for size in sizes})
    assert curve.knee() == 10 * GIB
    assert curve.enough(0.9) == 50 * GIB
    assert curve.enough(1.0) == 100 * GIB
    # Between 10 and 20 GiB the savings rise by a ninetieth of a point per GiB.
    assert curve.doubling(10 * GIB) == pytest.approx(10 / 900)


def test_a_straight_line_has_no_knee_and_a_step_has_its_edge() -> None:
    sizes = [GIB * n for n in (1, 2, 4, 7, 8, 16, 50, 100)]
    assert Curve({size: line(size) for size in sizes}).knee() is None
    assert Curve({size: step(size) for size in sizes}).knee() == 8 * GIB
    assert Curve({size: flat(size) for size in sizes}).knee() == GIB
    assert Curve(dict.fromkeys(sizes, 0.0)).knee() is None
    assert Curve({GIB: 0.4}).knee() is None


def test_between_sizes_savings_follow_the_logarithm() -> None:
    curve = Curve({4: 0.2, 16: 0.4})
    assert [curve.at(size) for size in (0, 2, 4, 8, 16, 99)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])


rates = st.floats(0, 1)
curves = st.dictionaries(st.integers(1, 1 << 44), rates, min_size=1, max_size=12).map(Curve)


@given(curves, st.floats(0, 1 << 45), st.floats(1, 8))
def test_more_bytes_never_save_less(curve: Curve, size: float, factor: float) -> None:
    """Noise makes measured savings fall here and there; what is told of them never does."""
    assert 0 <= curve.at(size) <= curve.at(size * factor) + 1e-9
    assert curve.at(curve.sizes[-1]) == pytest.approx(curve.top)
    assert curve.doubling(max(size, 1)) >= -1e-9


@given(curves)
def test_a_knee_is_measured_and_beats_every_other_size(curve: Curve) -> None:
    knee = curve.knee()
    if knee is None:
        return
    assert knee in curve.measured

    def above(size: int) -> float:
        return curve.at(size) / curve.top - size / curve.sizes[-1]

    assert above(knee) >= 0.05 - 1e-9
    assert all(above(size) <= above(knee) + 1e-9 for size in curve.sizes)


@given(curves, rates)
def test_enough_is_the_smallest_that_suffices(curve: Curve, share: float) -> None:
    size = curve.enough(share)
    assert curve.at(size) >= share * curve.top - 1e-9
    smaller = [one for one in curve.sizes if one < size]
    assert not smaller or curve.at(smaller[-1]) < share * curve.top


@given(st.integers(1, 1 << 50))
def test_rounded_sizes_have_two_digits_and_are_near(nbytes: int) -> None:
    found = rounded(nbytes)
    assert math.isclose(found, nbytes, rel_tol=0.06, abs_tol=1)


def replay(*arguments: object) -> tuple[int, str, str]:
    """The console script, in this process: its exit code, stdout and stderr."""
    done = call("replay", *arguments, ok=None)
    return done.code, done.out, done.err


def planned(spec: str, profile: str = "qwen3-next-80b-a3b", limit: int | None = None) -> SizePlan:
    search = Search(Question(open_source(spec, limit=limit), ["hvd"], profile_named(profile), bounds=False))
    results = list(search.results())
    assert search.plan is not None
    assert len(results) == 1 + len(search.plan.hosts) + len(search.plan.disks) <= 19
    return search.plan


def rows_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_the_answer_is_what_the_runs_say() -> None:
    """Each figure of the answer is that of a run, and a replay with these sizes gives it again."""
    code, out, err = replay(SMALL, "--plan", "-o", "jsonl")
    assert code == 0, err
    *rows, last = rows_of(out)
    plan = last["plan"]
    free = rows[0]
    assert free["policy"] == "infinite"
    assert {row["policy"] for row in rows[1:]} == {"hvd"}
    assert (plan["unlimited_bytes"], plan["unlimited_saved"]) == (free["capacity_bytes"], free["flops_saved"])
    sizes = {row["capacity_bytes"]: row["flops_saved"] for row in rows[1:] if "disk" not in row["tiers"]}
    assert plan["host_saved"] == pytest.approx(max(v for s, v in sizes.items() if s <= plan["host_bytes"]))
    assert plan["host_bytes"] in sizes
    assert plan["enough_bytes"] in {*sizes, plan["unlimited_bytes"]}
    code, out, _ = replay(
        SMALL, "--policy", "hvd", "--no-bounds", "-o", "jsonl",
        "--host-bytes", plan["host_bytes"], "--disk-bytes", plan["disk_bytes"] or 10**9,
    )  # fmt: skip
    again = rows_of(out)[-1]
    if plan["disk_bytes"]:
        assert again["flops_saved"] == plan["disk_saved"]
    else:
        assert again["flops_saved"] < plan["host_saved"] + 0.01
    assert re.match(r"[\d.]+ [KMG]iB of host memory save [\d.]+ % of the prefill", plan["sentences"][0])


def test_the_terminal_has_the_answer_first_and_the_page_has_the_same(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    code, out, err = replay(SMALL, "--limit", 9, "--plan", "--report", path)
    assert code == 0, err
    first = out.splitlines()[2]
    assert " of host memory save " in first
    page = path.read_text()
    assert first.rstrip() in page
    assert all(word in page for word in ("All runs", "The policy is hvd.", "Content-Security-Policy"))
    assert "<script" not in page


@pytest.mark.parametrize(
    ("spec", "limit", "profile", "told"),
    [
        ("shared-prefix?groups=40&prompts=1", 6, "qwen3-next-80b-a3b", "Nothing is saved, whatever the size"),
        (SMALL, 1, "qwen3-next-80b-a3b", "Nothing is saved, whatever the size"),
        (SMALL, 9, "qwen3-8b", "of host memory save"),
        pytest.param(SMALL, 9, "mamba2-2.7b", "of host memory save", marks=pytest.mark.slow),
    ],
)
def test_it_is_sensible_for_short_sources_and_for_other_models(spec, limit, profile, told):
    plan = planned(spec, profile, limit)
    assert told in next(sentences(plan))
    assert bool(plan.hosts) == ("save" in told and "Nothing" not in told)


@pytest.mark.slow
def test_disks_are_run_where_the_host_leaves_something_to_save() -> None:
    plan = planned("shared-prefix?groups=6&prompts=5&system=2000-4000", limit=30)
    for one in plan.disks:
        assert disk_of(one) > 0
        wear = plan.written_per_day(one)
        assert wear == pytest.approx(one.tiers["disk"].written_bytes / plan.seconds * 86_400)
    if plan.disk is not None:
        assert host_of(plan.disk) == plan.host
        assert plan.disk.flops_saved >= plan.curve.at(plan.host) + 0.009
    assert plan.seconds > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--capacity", "0.1"), "--plan finds the sizes of host and disk itself; leave out --capacity"),
        (("--host-bytes", "1GiB", "--disk-bytes", "1GiB"), "leave out --host-bytes, --disk-bytes"),
        (("--write", "write_back"), "leave out --write"),
        (("--policy", "lru,hvd"), "--plan runs one policy, and --policy names 2; name one of them"),
    ],
)
def test_mistakes_are_one_sentence(options: tuple[str, ...], message: str) -> None:
    code, out, err = replay(SMALL, "--plan", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_what_is_known_is_shown_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Search.results

    def cut(self: Search) -> Any:
        for number, result in enumerate(whole(self)):
            if number == 3:
                raise KeyboardInterrupt
            yield result

    monkeypatch.setattr(Search, "results", cut)
    code, out, err = replay(SMALL, "--plan")
    assert code == 130
    assert "interrupted after 3 runs" in err
    assert " of host memory save " in out


@pytest.mark.slow
def test_the_knee_of_a_generator_is_where_the_savings_stop_to_rise() -> None:
    plan = planned("multi-turn", limit=150)
    curve = plan.curve
    assert curve.at(plan.host) > 0.85 * curve.top
    assert plan.host < 0.35 * plan.footprint
    assert curve.at(plan.host / 2) < curve.at(plan.host) - 0.05
