"""The quick form of every campaign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.campaign.__main__ import CAMPAIGNS, main
from tests.campaign.stores import KINDS, available


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_campaign(campaign: str, kind: str, tmp_path: Path) -> None:
    if kind not in available():
        pytest.skip(f"{kind} is not installed")
    status = main(["--quick", "--backend", kind, "--only", campaign, "-o", str(tmp_path / "result.json")])
    rows = json.loads((tmp_path / "result.json").read_text())
    if all(row["skipped"] for row in rows):
        pytest.skip(rows[0]["skipped"])
    assert status == 0
    assert all(row["trials"] for row in rows if not row["skipped"])
