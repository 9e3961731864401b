"""Verbs against a daemon that does not allow what they ask: exit code 5, a sentence, nothing half done."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.cli.store.test_samples import ACME, PROMPT, call, identity, store_sequence
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.daemon import StorageServer
from tiercache.storage.base import NamespaceRecord, ScanPage
from tiercache.storage.registry import open_backend

PRINCIPALS = {
    "reader": ("read",), "writer": ("read", "write"), "keeper": ("read", "admin"),
    "blind": ("write", "admin"),
    "chief": ("read", "write", "admin"),
}  # fmt: skip


@pytest.fixture
def served(tmp_path: Path):
    """The daemon's store, and its URL for a principal."""

    def token(name: str) -> Path:
        path = tmp_path / name
        path.touch(0o600)
        path.write_text(f"{name}-".ljust(32, "t"))
        return path

    principals = tuple(
        {"name": name, "token_file": token(name), "verbs": verbs} for name, verbs in PRINCIPALS.items()
    )
    store = MemoryBackend(1 << 24)
    store.register_namespace(NamespaceRecord(ACME, identity().public_record()))
    store_sequence(store, PROMPT)
    with StorageServer(daemon_settings("tcp", principals=principals), store) as node:
        yield store, lambda name: f"grpc://{node.addresses[0]}?token_file={token(name)}"


def refused(*arguments: object) -> str:
    done = call(*arguments, ok=None)
    assert done.code == 5, (done.code, done.err)
    assert "does not answer" not in done.err
    assert done.err.count("\n") == 1
    return done.err


def test_what_deletes_begins_only_with_every_verb_that_it_takes(served):
    store, url = served
    before = {entry.key for entry in store.scan_all()}
    for name, verb in product(
        PRINCIPALS.keys() - {"chief"}, (("flush", "--all", "--yes"), ("verify", "--repair"))
    ):
        refused(*verb, "-s", url(name))
        assert {entry.key for entry in store.scan_all()} == before


def test_what_lacks_is_named(served):
    store, url = served
    said = refused("flush", "--all", "--yes", "-s", url("keeper"))
    assert "lacks write" in said
    assert "nothing was changed" in said
    call("flush", "--all", "--dry-run", "-s", url("keeper"))
    call("flush", "--all", "--yes", "-s", url("chief"))
    assert not list(store.scan_all())


@pytest.mark.parametrize(
    "verb",
    [
        ("ping",), ("status",), ("ls",), ("verify",), ("flush", "--all", "--yes"), ("inspect", "0" * 8),
        ("report",), ("explain", "--tokens", "PROMPT"),
    ],
)  # fmt: skip
def test_who_is_not_known_is_told_so(served, verb, tmp_path):
    _, url = served
    (tmp_path / "prompt").write_text("1 2 3")
    verb = [tmp_path / "prompt" if word == "PROMPT" else word for word in verb]
    assert "unauthenticated" in refused(*verb, "-s", url("stranger"))


@pytest.mark.parametrize("verb", [("ls",), ("verify",)])
def test_who_may_not_read_is_told_so(served, verb):
    _, url = served
    said = refused(*verb, "-s", url("blind"))
    assert "blind may admin and write, not read" in said
    assert "permission_denied" not in said


def test_a_tenant_verifies_what_is_its_own(tmp_path: Path):
    for name, text in (("token", "acme-".ljust(32, "t")), ("salt", "s" * 32)):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text)
    settings = daemon_settings(
        "tcp",
        tenants={"acme": {"salt_file": tmp_path / "salt"}},
        principals=(
            {"name": "acme", "tenant": "acme", "token_file": tmp_path / "token", "verbs": ("read", "write")},
        ),
    )
    with StorageServer(settings, MemoryBackend(1 << 24)) as node:
        url = f"grpc://{node.addresses[0]}?token_file={tmp_path}/token"
        with open_backend(url) as store:
            store_sequence(store, PROMPT)
        found = call("verify", "-s", url, "-o", "json").document["summary"]
    assert (found["objects"], found["ok"], found["catalog"]) == (13, 13, "unknown")


class Evicting(MemoryBackend):
    """Store that loses three objects whenever it has listed them."""

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        page = super().scan(namespace, cursor)
        self.delete([entry.key for entry in page.entries[-3:]])
        return page


def test_what_is_evicted_while_verify_reads_is_counted_and_not_listed():
    store = Evicting(1 << 24)
    store_sequence(store, PROMPT)
    with StorageServer(daemon_settings("unix"), store) as node:
        url = f"grpc://{node.settings.socket_directory}"
        found = call("verify", "-s", url, "-o", "json").document
        assert [row for row in found["found"] if row["result"] == "missing"] == []
        assert (found["summary"]["missing"], found["summary"]["removed"]) == (0, 3)
        shown = call("verify", "-s", url).out
    assert "missing" not in shown
    assert "3 were evicted or deleted meanwhile, which is no damage" in shown
