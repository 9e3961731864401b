"""`report`: days and hours, tenants, FLOPs that are not known, and what cannot be reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call, make_store
from tests.daemon.test_account import read, register, sequence
from tests.daemon.test_removals import client, server, worker
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.cli.store.report import flops_text
from tiercache.cli.terminal import Exit
from tiercache.daemon import StorageServer
from tiercache.daemon.tenants.account import HOUR_S
from tiercache.storage.registry import open_backend

HOUR = int(time.time()) // HOUR_S * HOUR_S


@pytest.fixture
def node() -> Iterator[StorageServer]:
    """A daemon with an account of two tenants in the past, and of calls in this hour."""
    settings = daemon_settings("unix")
    past = [
        (30, "red", {"read_objects": 5, "restored_tokens": 320, "saved_flops": 2e15}),
        (29, "red", {"read_objects": 6, "restored_tokens": 64, "unpriced_tokens": 64}),
        (240, "old \x1b[31m[b]", {"written_objects": 1, "written_bytes": 1 << 20}),
    ]
    rows = [{"hour": HOUR - ago * HOUR_S, "tenant": tenant, **counts} for ago, tenant, counts in past]
    settings.account_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with StorageServer(settings, open_backend("memory://")) as node:
        with worker(node) as store:
            register(store, flops_per_token=1000)
            read(store, sequence(store, 10))
        yield node


def url(node: StorageServer) -> str:
    return f"grpc://{node.settings.socket_directory}?timeout=60s"


def test_days_hours_and_tenants(node: StorageServer) -> None:
    today = call("report", "-s", url(node), "--since", "1h", "-o", "json").document
    assert [(row["tenant"], row["restored_tokens"], row["saved_flops"]) for row in today["rows"]] == [
        ("", 40, 40_000)
    ]
    assert today["account_begins"] == HOUR - 240 * HOUR_S
    hours = call("report", "-s", url(node), "--since", "3d", "--by", "hour", "-o", "jsonl").lines
    assert [(row["tenant"], row["read_objects"]) for row in hours] == [("red", 5), ("red", 6), ("", 10)]
    assert [row["begins"] for row in hours[:2]] == [HOUR - 30 * HOUR_S, HOUR - 29 * HOUR_S]
    assert [row["saved_flops"] for row in hours] == [2e15, None, 40_000], "all unpriced: unknown"
    days = call("report", "-s", url(node), "--since", "3d", "--tenant", "red", "-o", "jsonl").lines
    assert sum(row["read_objects"] for row in days) == 11
    for row in days:
        begins = time.localtime(row["begins"])
        assert (begins.tm_hour, begins.tm_min, row["tenant"]) == (0, 0, "red")
    everything = call("report", "-s", url(node), "--since", "2020-01-01", "-o", "json").document
    assert sum(row["written_bytes"] for row in everything["rows"]) == 10_000 + (1 << 20)


def test_tables_say_what_is_unknown_and_escape_what_comes_from_others(node: StorageServer) -> None:
    text = call("report", "-s", url(node), "--since", "30d", "--by", "hour").out
    assert "2 PFLOP" in text
    assert "unknown" in text
    assert "40 kFLOP" in text
    assert "unknown: the model's FLOPs were not registered; give SGLang or vLLM the model as a direct" in text
    assert "(no tenant)" in text
    assert "\x1b[31m" not in text
    assert "account begins at" in text
    assert flops_text(0) == "0 FLOP"
    assert flops_text(1.234e24) == "1.23e+03 ZFLOP"


def test_a_tenant_s_principal_gets_its_own_rows(tmp_path: Path) -> None:
    with server(tmp_path, "memory://") as node:
        for name, pages in (("red", 3), ("blue", 5)):
            with client(node, tmp_path, name) as store:
                register(store, flops_per_token=10)
                read(store, sequence(store, pages))

        def target(name: str) -> str:
            return f"grpc://{node.addresses[0]}?token_file={tmp_path}/{name}.token&timeout=60s"

        rows = call("report", "-s", target("red"), "-o", "jsonl").lines
        assert [(row["tenant"], row["restored_tokens"]) for row in rows] == [("red", 12)]
        unknown = call("report", "-s", target("red"), "--tenant", "blue", ok=Exit.MISUSED)
        assert "'blue' has nothing in this account" in unknown.error
        assert {row["tenant"] for row in call("report", "-s", target("chief"), "-o", "jsonl").lines} == {
            "red",
            "blue",
        }
        assert "limited to namespaces" in call("report", "-s", target("fenced"), ok=Exit.REFUSED).error


def test_what_cannot_be_reported(node: StorageServer, tmp_path: Path) -> None:
    for since, said in {
        "2999-01-01": "is in the future",
        "tomorrow": "neither an age",
        "-1h": "neither an age",
        "": "neither an age",
        "nan": "neither an age",
        "9999999999-01-01": "neither an age",
    }.items():
        assert said in call("report", "-s", url(node), f"--since={since}", ok=Exit.MISUSED).error, since
    assert "tenants" not in call("report", "-s", url(node), "--since", "1000000d").err
    path = make_store("file", tmp_path / "s")
    assert "only a running daemon keeps an account" in call("report", "-s", path, ok=Exit.MISUSED).error
    assert call("report", "-s", f"grpc://{tmp_path}/nowhere", ok=Exit.UNREACHABLE).error
    call("report", "-s", url(node), "--by", "week", ok=Exit.MISUSED)
