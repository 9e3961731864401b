"""The operator's verbs on a pool that cannot list its objects: they say what cannot be known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.store.test_samples import call
from tests.storage_backends.mooncake.rig import Pool
from tiercache.config.urls import storage_url
from tiercache.core import Outcome
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import NAMESPACE, key, payload, put

SIZE = 20_000
ADVICE = "cannot list or count its objects, because Mooncake does so only over HTTP; add http=HOST:PORT"


def unlisted(pool: Pool, prefix: str) -> str:
    return storage_url("mooncake", address=pool.address, prefix=prefix, staging="4MiB")


def fill(*urls: str) -> None:
    with open_backend(list(urls) if len(urls) > 1 else urls[0]) as store:
        store.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        assert {put(store, key(n), payload(n, SIZE)) for n in range(3)} == {Outcome.STORED}
        store.flush()


def holds(url: str) -> int:
    with open_backend(url) as store:
        return sum(store.exists([key(n) for n in range(3)]))


@pytest.mark.parametrize("verb", [("ls",), ("verify",), ("inspect", "ab"), ("flush", "--older", "1h", "-y")])
def test_a_verb_that_needs_a_list_is_refused_in_one_sentence(pool: Pool, verb: tuple[str, ...]) -> None:
    done = call(*verb, "-s", unlisted(pool, "listless"), ok=1)
    assert (done.out, done.err.count("\n")) == ("", 1)
    assert ADVICE in done.error


def test_status_and_verify_say_what_is_not_known(pool: Pool, tmp_path: Path) -> None:
    url = unlisted(pool, "figures")
    found = call("status", "-s", url, "-o", "json").document
    assert ADVICE in found["unlisted"]
    assert {found[name] for name in ("objects", "payload_bytes", "used_bytes", "capacity_bytes")} == {None}
    said = " ".join(call("status", "-s", url).out.split())
    assert "objects not known" in said
    assert ADVICE in said
    assert "no limit" not in said
    above = f"file://{tmp_path}/disk?capacity=32MiB"
    fill(above, url)
    found = call("status", "-s", above, "-s", url, "-o", "json").document
    assert (found["objects"], [tier["objects"] for tier in found["tiers"]]) == (None, [3, 0])
    shown = call("status", "-s", above, "-s", url).out
    [row] = [line.split() for line in shown.splitlines() if line.strip().startswith("mooncake ")]
    assert row[3:5] == ["-", "-"]
    assert "tier mooncake cannot list" in call("verify", "-s", above, "-s", url, ok=1).error


def test_flush_all_clears_the_own_prefix_and_no_neighbour(pool: Pool, tmp_path: Path) -> None:
    own, neighbour = unlisted(pool, "v.w"), unlisted(pool, "vxw")
    above = f"file://{tmp_path}/disk?capacity=32MiB"
    fill(own)
    fill(neighbour)
    assert "deletes" in call("flush", "--all", "-s", own, ok=2).error
    assert ADVICE in call("flush", "--all", "--dry-run", "-s", own, ok=1).error
    assert holds(own) == 3
    done = call("flush", "--all", "-y", "-s", own)
    assert "4 objects and records of namespaces deleted from" in done.out
    assert "(prefix v.w)" in " ".join(done.out.split())
    assert [holds(own), holds(neighbour)] == [0, 3]
    fill(above, own)
    found = call("flush", "--all", "-y", "-s", above, "-s", own, "-o", "json").document
    assert (found["deleted"], found["bytes"]) == (7, None)
    assert [holds(above), holds(own), holds(neighbour)] == [0, 0, 3]
