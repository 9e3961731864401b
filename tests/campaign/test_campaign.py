"""The quick form of every campaign, and what they are made of."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from random import Random

import pytest

from tests.campaign import growth
from tests.campaign.__main__ import CAMPAIGNS, main
from tests.campaign.actors import Part
from tests.campaign.damage import DAMAGES, NAMES, Template, template
from tests.campaign.model import Model
from tests.campaign.stores import KINDS, available
from tests.campaign.victims import Nursery, spread
from tiercache.testing.objects import key


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_campaign(campaign: str, kind: str, tmp_path: Path) -> None:
    if kind not in available():
        pytest.skip(f"{kind} is not installed")
    status = main(["--quick", "--backend", kind, "--only", campaign, "-o", str(tmp_path / "result.json")])
    rows = json.loads((tmp_path / "result.json").read_text())
    if all(row["skipped"] for row in rows):
        pytest.skip(rows[0]["skipped"] if rows else "made for another store")
    assert status == 0
    assert all(row["trials"] for row in rows if not row["skipped"])


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Template:
    return template(request.param, tmp_path_factory.mktemp("template"))


def test_every_object_lies_somewhere(made: Template) -> None:
    assert sorted(name for name, _, _ in made.records) == list(range(NAMES)), "each object has one record"
    if made.kind == "lmdb":
        assert {"main leaf", "objects leaf", "objects branch"} <= {role for role, _ in made.pages.values()}
    else:
        assert {name for objects in made.slabs.values() for name, _ in objects} == set(range(NAMES))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_changes_its_copy_alone_and_can_be_repeated(made, name, tmp_path):
    damage, kinds = DAMAGES[name]
    if made.kind not in kinds:
        pytest.skip("another kind's")
    before = contents(made.running)
    left = []
    for turn in range(2):
        subject = made.copy(tmp_path / str(turn), closed=False)
        spoiled = damage(made, subject.path, Random(5))
        left.append((contents(subject.path), spoiled.loses))
        assert spoiled.kept()
    assert left[0] == left[1]
    assert (left[0][0] != before) == (name != "nothing")
    assert contents(made.running) == before


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_process_kills_itself_at_the_call_that_it_was_told(made: Template, tmp_path: Path) -> None:
    with Nursery() as nursery:
        subject = made.copy(tmp_path / "whole", closed=True)
        assert nursery.played(Part("open_and_close", subject.fields)) == 0
        calls = int(nursery.words["calls"])
        assert calls > 10
        for name, kill_at, status in (("last", calls, -signal.SIGKILL), ("none", calls + 1, 0)):
            copy = made.copy(tmp_path / name, closed=True)
            assert nursery.played(Part("open_and_close", copy.fields, kill_at=kill_at)) == status
        nowhere = ("file", "/dev/null/there", 1 << 24, "process")
        assert nursery.played(Part("open_and_close", nowhere)) == 1
        assert "Error" in nursery.died


def test_who_looks_tells_what_is_lost_and_what_has_other_bytes(made: Template, tmp_path: Path) -> None:
    subject = made.copy(tmp_path / "store", closed=True)
    with subject.open() as store:
        assert store.delete([key(3)]) == [True]
    model = Model.from_json(made.model.to_json())
    model.stored[4] = 2
    with Nursery() as nursery:
        verdict = nursery.looked(Part("look", subject.fields, NAMES, model.to_json(), must=[(2, 1), (3, 1)]))
    assert (verdict.lost, verdict.failed, len(verdict.found)) == (1, 0, NAMES - 2)
    assert verdict.wrong == 2, "an older version of one object, at both looks"


def test_payloads_are_found_and_spoiled_where_they_lie(made: Template, tmp_path: Path) -> None:
    made.copy(tmp_path / "store", closed=False)
    chosen = [version for version in sorted(made.model.certain()) if len(version.data) > 9000][:3]
    assert sorted(growth.spoil(tmp_path / "store", chosen)) == chosen
    before, after = contents(made.running), contents(tmp_path / "store")
    assert sum(a != b for name in before for a, b in zip(before[name], after[name], strict=True)) == 3


@pytest.mark.parametrize(("calls", "count"), [(1, 5), (5, 5), (93, 4), (93, 92), (7, 0)])
def test_kills_are_spread_over_all_calls(calls: int, count: int) -> None:
    chosen = spread(calls, count, Random(0))
    assert len(chosen) == min(calls, count)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(1, calls + 1))
