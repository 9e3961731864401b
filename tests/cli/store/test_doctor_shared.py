"""`doctor` of stores that hosts share: it names what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.store.test_samples import call
from tests.storage_backends.mooncake.rig import require
from tests.storage_backends.s3.hooks import open_s3, prefix_of
from tests.storage_backends.s3.server import BUCKET, endpoint, needs_weed
from tiercache.testing.objects import key, payload, put


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)


def found(url: str) -> dict[str, tuple[str, str, str]]:
    done = call("doctor", "-s", url, "-o", "json", ok=None)
    return {
        check["name"]: (check["level"], check["found"], check["fix"])
        for check in done.document
        if check["name"].startswith(("s3", "mooncake"))
    }


def test_missing_credentials_and_a_wrong_endpoint_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}?endpoint=http://127.0.0.1:1&deadline=0.2s"
    level, wrong, fix = found(url)["s3 bucket"]
    assert (level, BUCKET in wrong, "endpoint=" in fix) == ("fail", True, True)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    level, wrong, fix = found(url)["s3 settings"]
    assert (level, "no credentials" in wrong, "AWS_ACCESS_KEY_ID" in fix) == ("fail", True, True)
    assert found("s3://ab")["s3 settings"][0] == "fail"


@needs_weed
def test_a_store_that_answers_is_counted(tmp_path: Path) -> None:
    with open_s3(tmp_path) as store:
        put(store, key("a"), payload("a", 5000))
    checks = found(f"s3://{BUCKET}/{prefix_of(tmp_path)}?endpoint={endpoint()}&capacity=1GiB")
    assert [level for level, _, _ in checks.values()] == ["ok", "ok"]
    assert checks["s3 bucket"][1].startswith("1 objects")


def test_a_master_that_does_not_answer_and_settings_that_cannot_be_are_named() -> None:
    require()
    checks = found("mooncake://127.0.0.1:1?deadline=200ms")
    assert checks["mooncake settings"][0] == "ok"
    level, wrong, fix = checks["mooncake pool"]
    assert (level, "no master answers at 127.0.0.1:1" in wrong, "start mooncake_master" in fix) == (
        "fail",
        True,
        True,
    )
    level, wrong, fix = found("mooncake://127.0.0.1:1?devices=mlx5_0")["mooncake settings"]
    assert (level, "are for RDMA" in wrong, "protocol=rdma" in fix) == ("fail", True, True)
