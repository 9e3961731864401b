"""Sections and URLs of the backend."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.grpc.settings import read_settings

from tests.storage_backends.grpc.nodes import certificates, token_file
from tiercache.config.urls import section_of
from tiercache.errors import ConfigError


def read(url: str) -> Any:
    given = section_of(url)
    assert given.pop("type") == "grpc"
    return read_settings(given)


def test_a_host_and_a_directory() -> None:
    tcp, unix = read("grpc://cache.example:7070"), read("grpc:///run/tiercache/")
    assert (tcp.target, tcp.transport, str(tcp)) == ("cache.example:7070", "tcp", "grpc://cache.example:7070")
    assert (unix.target, unix.transport) == ("unix:/run/tiercache/grpc.sock", "unix")
    assert (unix.timeout, unix.transfer_timeout, unix.breaker_failures, unix.breaker_pause) == (2, 10, 3, 1)
    assert read("grpc://[::1]:7070?tls=true").transport == "tls"
    values = read("grpc:///run/t?timeout=250ms&transfer_timeout=30s&breaker_failures=5&breaker_pause=2s")
    given = (values.timeout, values.transfer_timeout, values.breaker_failures, values.breaker_pause)
    assert given == (0.25, 30, 5, 2)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("grpc://", "needs an address or a directory"), ("grpc:///", "no directory"),
        ("grpc://host", "host:port"), ("grpc://host:0", "port 0"), ("grpc://host:7070/path", "not both"),
        ("grpc:///run?tls=true", "is for TCP"), ("grpc://h:1?tls=false&server_name=x", "contradicts"),
        ("grpc://h:1?certificate=/c.pem", "pair"), ("grpc://h:1?ca=/nowhere/ca.pem", "does not exist"),
        ("grpc://localhost:1?token_file=/nowhere/token", "does not exist"),
        ("grpc:///" + 100 * "d", "would have 113 bytes"), ("grpc://h:1?speed=high", "no setting 'speed'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_reason(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(url)


def test_a_token_does_not_travel_in_the_clear() -> None:
    token = token_file()
    with pytest.raises(ConfigError, match="in the clear"):
        read(f"grpc://cache.example:7070?token_file={token}")
    assert read(f"grpc://127.0.0.1:7070?token_file={token}").metadata() == (
        ("authorization", "Bearer " + token.read_text()),
    )
    assert read(f"grpc://cache.example:7070?token_file={token}&tls=true").tls
    with pytest.raises(ConfigError, match="a token is for TCP"):
        read(f"grpc:///run?token_file={token}")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with the openssl command")
def test_certificates(tmp_path: Path) -> None:
    private, certificate = certificates()
    chosen = read(f"grpc://h:1?ca={certificate}&certificate={certificate}&key={private}")
    assert chosen.tls
    assert chosen.credentials() is not None
    (tmp_path / "empty").write_text("nothing")
    with pytest.raises(ConfigError, match="holds no certificate"):
        read(f"grpc://h:1?ca={tmp_path}/empty")
