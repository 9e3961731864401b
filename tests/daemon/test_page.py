"""The status page as a real browser shows it, of a daemon that serves."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiercache_backends.memory import MemoryBackend

from tests.cli.store.test_samples import call
from tests.daemon.hosts import secret, until
from tests.daemon.test_metrics import Told, settings_of
from tests.lab.replay import browser
from tests.lab.replay.browser import Page
from tests.lab.replay.test_report_in_browser import PALE, WIDE
from tiercache.core import Outcome, PoolName
from tiercache.daemon import StorageServer
from tiercache.daemon.tenants.account import Counts
from tiercache.storage.base import TierReport, Usage
from tiercache.storage.shares import OwnerUse
from tiercache.testing.objects import key, to_get

HOSTILE = "<img src=x onerror=window.bad=1><script>window.bad=1</script>"
GIB = 1 << 30
TEXT = "document.body.innerText"
page = browser.page


def usage(**health: str) -> Usage:
    def tier(name: str, kind: str, capacity: int, used: float, **more: Any) -> TierReport:
        return TierReport(
            name=name, kind=kind, health=health.get(kind, "serving"), objects=int(used * capacity) >> 20,
            used_bytes=int(used * capacity), capacity_bytes=capacity, last_read=time.time() - 30, **more,
        )  # fmt: skip

    tiers = [
        tier("dram", "memory", 64 * GIB, 0.97, read_objects=52_000, waiting=120),
        tier("nvme", "file", 2048 * GIB, 0.61, read_objects=18_300, waiting=4, dropped=17),
        tier(HOSTILE, "s3", 16_384 * GIB, 0.22, read_objects=1_900, lost_calls=3, why=HOSTILE * (
            health.get("s3") == "out")),
    ]  # fmt: skip
    details = {"restorable_bytes": 4500 * GIB, "dead_bytes": 180 * GIB, "orphans": 912}
    used = sum(one.used_bytes for one in tiers)
    capacity = sum(one.capacity_bytes for one in tiers)
    owners = {
        "": OwnerUse(used_bytes=7 * GIB),
        "acme": OwnerUse(used_bytes=390 * GIB, quota_bytes=400 * GIB, guarantee_bytes=100 * GIB,
                         evicted_objects=4711, throttled_objects=29),
        "globex": OwnerUse(used_bytes=3 * GIB),
    }  # fmt: skip
    return Usage(4_812_004, used, used, capacity, details, tiers, owners)


@contextmanager
def daemon(path: Path, tell: Callable[[], Usage] = usage, **more: Any) -> Iterator[StorageServer]:
    """A daemon whose figures are told by a function, and which has counted some calls."""
    principals = [
        {"name": name, "uid": 1_000_000 + n, "tenant": tenant}
        for n, (name, tenant) in enumerate([("sglang-0", "acme"), ("vllm-1", "acme"), ("batch", "globex")])
    ]
    tenants = {tenant: {"salt_file": secret(path / tenant, tenant * 8)} for tenant in ("acme", "globex")}
    path.chmod(0o711)  # for the users of the principals
    settings = settings_of(path, principals=principals, tenants=tenants, **more)
    with StorageServer(settings, Told(MemoryBackend(), tell)) as node:
        board = node._board  # private: calls of an hour would take an hour
        assert board is not None
        board._figures._every = 0.05  # type: ignore[misc]  # private: every look would else take five seconds
        until(lambda: len(board.document(None)["tiers"]) == 3)
        board.sample()
        count(node)
        yield node


def count(node: StorageServer) -> None:
    board = node._board  # private: see above
    assert board is not None
    metrics = board._metrics  # private: see above
    kv, mamba = to_get(key(1), 1), to_get(key(2, PoolName.MAMBA), 1)
    metrics.count_exists([kv.key] * 1000, [n % 4 != 0 for n in range(1000)])
    outcomes = [Outcome.HIT] * 744 + [Outcome.CORRUPT] * 6
    metrics.count_reads("sglang-0", "shared", [kv] * 740 + [mamba] * 10, outcomes)
    metrics.count_payload("sglang-0", "shared", "out", 740 << 20)
    metrics.count_payload("batch", "data", "in", 310 << 20)
    for name, calls in (("sglang-0", 1210), ("vllm-1", 640), ("batch", 88)):
        for _ in range(calls):
            metrics.count_call(name)
    counts = Counts(
        asked_tokens=64_000,
        restored_tokens=48_000,
        timed_tokens=48_000,
        prefill_seconds=960.0,
        read_seconds=60.0,
    )
    board._hits.__self__.add("acme", counts)  # type: ignore[attr-defined]  # private: see above


def shown(page: Page, said: str, seconds: float = 60) -> None:
    until(lambda: said in page.ask(TEXT), seconds)


def test_a_daemon_in_a_browser(page: Page, tmp_path: Path) -> None:
    health: dict[str, str] = {}
    with daemon(tmp_path, lambda: usage(**health)) as node:
        address = f"http://{node.http_address}/status"
        for dark, width in ((False, 1280), (True, 360)):
            page.open(address, width=width, dark=dark)
            shown(page, "75.0 %")
            text = page.ask(TEXT)
            for said in ("dram", "62.1 GiB of 64.0 GiB", HOSTILE, "absent (exists)", "checksum (get)",
                         "96.2 %", "912 orphans", "sglang-0", "globex", "1,210", "740 MiB",
                         "serves a store of type", "ready",
                         "390 GiB of 400 GiB", "48,000 of 64,000 prompt tokens", "15 min", "100 GiB",
                         "4,711", "29"):  # fmt: skip
                assert said in text, said
            assert page.ask("document.documentElement.scrollWidth") <= width
            assert page.ask(WIDE) == []
            pale = page.ask(PALE)
            assert (pale["checked"] > 60, pale["pale"]) == (True, [])
            ground = page.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            assert (max(ground) < 60) == dark
            assert page.ask("[...document.querySelectorAll('svg')].every(one => one.ariaLabel)")
        assert "certificate" not in text
        # Under the pointer, a curve tells the value of one moment.
        box = page.ask(
            "(b => [b.right - 2, b.top + 5])(document.querySelector('.tiles svg').getBoundingClientRect())"
        )
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        moment = r"(?m)^\d\d:\d\d:\d\d: (75\.0 %|-)$"  # nobody may have asked since the last sample
        until(lambda: re.search(moment, page.ask(TEXT)))
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        until(lambda: not re.search(moment, page.ask(TEXT)))
        board = node._board  # private: a daemon with TLS has an address that no browser trusts
        ending = SimpleNamespace(end=time.time() + 13 * 86400)
        board._certificates = SimpleNamespace(now=ending)  # private: see above
        shown(page, "the certificate ends in 12")
        assert "certificate until 20" in page.ask(TEXT)
        assert page.ask("typeof window.bad") == "undefined"
        assert page.ask("document.querySelectorAll('img, td script, span script').length") == 0
        assert page.complaints == []
        asked = {one for one in page.asked if not one.startswith("data:")}
        assert asked == {address, f"{address}.json"}

        # It follows the daemon, and keeps the nodes that it has.
        page.ask("window.first = document.querySelector('#tiers td'); 0")
        health["s3"] = "out"
        shown(page, "degraded")
        assert page.ask("document.getElementById('state').className") == "pill warn"
        assert page.ask("document.title") == f"degraded: {socket.gethostname()}: tiercache"
        shown(page, "out")
        assert page.ask("window.first === document.querySelector('#tiers td')")
        count(node)
        shown(page, "96,000 of 128,000 prompt tokens")
        assert page.complaints == []
        assert page.ask("typeof window.bad") == "undefined"
        names = {
            node["name"]["value"]
            for node in page.call("Accessibility.getFullAXTree")["nodes"]
            if not node.get("ignored") and "name" in node
        }
        assert {"Tiers", "Last events", "Hit rate over the last hour; now 75.0 %"} <= names
    shown(page, "The daemon does not answer since")
    assert page.ask("document.title") == f"no answer: {socket.gethostname()}: tiercache"
    settings = settings_of(tmp_path, http={"listen": node.http_address, "public": True})
    with StorageServer(settings, MemoryBackend()):
        shown(page, "MemoryBackend store")
        until(lambda: page.ask("document.getElementById('notice').textContent") == "")
        page.open("about:blank")  # before the daemon ends: the page would complain


def test_a_capacity_that_shrinks_draws_over_nothing(page: Page, tmp_path: Path) -> None:
    """Test a curve of what was stored when more fitted."""
    shrunk: list[int] = []

    def tell() -> Usage:
        found = usage()
        return replace(found, used_bytes=GIB, capacity_bytes=2 * GIB) if shrunk else found

    with daemon(tmp_path, tell) as node:
        board = node._board  # private: samples of an hour would take an hour
        assert board is not None
        time.sleep(1.2)  # younger samples are not compared with the present
        board.sample()
        shrunk.append(1)
        time.sleep(1.2)
        page.open(f"http://{node.http_address}/status")
        shown(page, "50.0 % of 2.0 GiB")
        inside = "[...document.querySelectorAll('.tiles path')].every(p => p.getBBox().y >= 0)"
        until(lambda: page.ask("document.querySelectorAll('.tiles path').length") > 8)
        assert page.ask(inside)
        wrapped = "[...document.querySelectorAll('.figure')].every(f => f.getClientRects()[0].height < 45)"
        assert page.ask(wrapped)
        page.open("about:blank")  # before the daemon ends: the page would complain


def test_a_tenant_gives_its_token_and_sees_itself(page, tmp_path, monkeypatch):
    principals = [
        {"name": name, "token_file": secret(tmp_path / name, "t" * 16 + name), "tenant": name}
        for name in ("acme", "globex")
    ]
    tenants = {
        name: {"salt_file": secret(tmp_path / f"{name}.salt", name * 8)} for name in ("acme", "globex")
    }
    settings = settings_of(
        tmp_path, principals=principals, tenants=tenants, http={"listen": "127.0.0.1:0", "public": False}
    )
    with StorageServer(settings, MemoryBackend()) as node:
        here = node.http_address
        # Chromium asks for name and password where a user looks; without one, they stand in the address.
        page.open(f"http://anyone:{'t' * 16}acme@{here}/status", width=360)
        shown(page, "as acme")
        text = page.ask(TEXT)
        assert "Principals since the start" in text
        assert not any(word in text for word in ("globex", "Tiers", "Hit rate", "Last events"))
        assert page.ask("document.documentElement.scrollWidth") <= 360
        assert page.complaints == []
        url = f"grpc://{node.addresses[0]}?token_file={tmp_path}/acme"
        said = call("status", "-s", url).out
        assert "acme" in said
        assert not any(word in said for word in ("globex", "tier ", "hit rate"))
        monkeypatch.setattr(node._board, "encoded", lambda _: 1 / 0)  # private: a bug
        shown(page, "The daemon says: the answer could not be made")
