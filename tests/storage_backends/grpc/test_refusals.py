"""A refusal is no outage: what a client makes of a daemon that answers, and does not serve it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiercache_backends.grpc.backend import GrpcBackend
from tiercache_backends.grpc.settings import read_settings
from tiercache_backends.memory import MemoryBackend

from tests.daemon.hosts import NAMESPACE, key
from tests.storage_backends.grpc.nodes import daemon_settings, secret
from tiercache.core import ObjectMeta, Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import RefusedError
from tiercache.storage.base import GetItem, SetItem

LENGTH = 4096
TOKENS = {name: f"{name}-".ljust(32, name[0]) for name in ("reader", "writer", "keeper", "nobody")}
VERBS = {"reader": ("read",), "writer": ("read", "write"), "keeper": ("read", "admin")}


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def token(tmp_path: Path, name: str) -> Path:
    return secret(tmp_path / f"{name}.token", TOKENS[name])


@pytest.fixture
def client(tmp_path: Path, ends: ExitStack) -> Callable[..., GrpcBackend]:
    """A client of a daemon for each principal; that of `nobody` is not known there."""
    principals = tuple(
        {"name": name, "token_file": token(tmp_path, name), "verbs": verbs} for name, verbs in VERBS.items()
    )
    node = ends.enter_context(
        StorageServer(daemon_settings("tcp", principals=principals), MemoryBackend(1 << 24))
    )

    def made(name: str, **more: Any) -> GrpcBackend:
        given = {"address": node.addresses[0], "token_file": str(token(tmp_path, name)), **more}
        return ends.enter_context(GrpcBackend(read_settings(given)))

    return made


def set_one(store: GrpcBackend, number: int = 1) -> Outcome:
    data = memoryview(np.full(LENGTH, 7, np.uint8)).cast("B")
    [outcome] = store.set([SetItem(key(number), [data], ObjectMeta(NAMESPACE, LENGTH, b"", None, None))])
    return outcome


def get_one(store: GrpcBackend, number: int = 1) -> Outcome:
    [outcome] = store.get([GetItem(key(number), [memoryview(bytearray(LENGTH))], LENGTH)])
    return outcome


def test_a_verb_that_is_not_allowed_is_a_refusal_and_what_is_allowed_goes_on(client, caplog):
    writer, reader = client("writer"), client("reader")
    assert set_one(writer) is Outcome.STORED
    with caplog.at_level(logging.INFO):
        for _ in range(5):  # more than open a breaker
            assert set_one(reader, 2) is Outcome.REFUSED
        assert get_one(reader) is Outcome.HIT
        with pytest.raises(RefusedError, match=r"flush is refused by .*reader may read, not write"):
            reader.flush()
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if line.startswith("refused by")]) == 1
    assert not [line for line in told if "not available" in line or "answer" in line]


def test_who_is_not_known_is_refused_and_served_once_that_changes(client, tmp_path, caplog):
    assert set_one(client("writer")) is Outcome.STORED
    with caplog.at_level(logging.INFO):
        nobody = client("nobody", breaker_pause="50ms")
        for _ in range(5):
            assert get_one(nobody) is Outcome.REFUSED
            with pytest.raises(RefusedError, match="unauthenticated"):
                nobody.exists([key(1)])
        for ask in (nobody.usage, nobody.ping, nobody.scan, nobody.namespaces, nobody.flush):
            with pytest.raises(RefusedError, match="unauthenticated"):
                ask()
        assert not [
            r
            for r in caplog.records
            if "not available" in r.getMessage() or "does not answer" in r.getMessage()
        ]
        (tmp_path / "nobody.token").write_text(TOKENS["writer"])
        end = time.monotonic() + 60
        while get_one(nobody) is not Outcome.HIT:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_who_has_used_up_its_share_is_refused(tmp_path: Path, ends: ExitStack) -> None:
    node = ends.enter_context(
        StorageServer(daemon_settings("unix", limits={"clients": 1}), MemoryBackend(1 << 24))
    )
    first, second = (
        ends.enter_context(GrpcBackend(read_settings({"path": str(node.settings.socket_directory)})))
        for _ in range(2)
    )
    assert set_one(first) is Outcome.STORED
    with pytest.raises(RefusedError, match=r"limits\.clients"):
        second.ping()
    assert get_one(second) is Outcome.REFUSED
