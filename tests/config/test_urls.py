"""Storage URLs: every path comes back from its URL, and what could be meant in two ways is refused."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.config.loading import load
from tiercache.config.urls import section_of, storage_url, unix_target
from tiercache.errors import ConfigError
from tiercache.storage import open_backend

AWKWARD = ("a b#c?d=e&f+g;h~i", "50%", "%41", "é ü 目録", "{rank}\\'\"[x]:b@c", ".hidden")


def names():
    """Names of files: anything but a slash and NUL, also what is not UTF-8."""
    return st.binary(min_size=1, max_size=40).map(
        lambda name: os.fsdecode(name.replace(b"/", b"-").replace(b"\0", b"-"))
    )


@given(
    st.lists(names(), min_size=1, max_size=4),
    st.sampled_from(["file", "lmdb", "grpc"]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0")),
)
def test_a_path_and_settings_come_back_from_their_url(parts, kind, value):
    path = os.path.abspath("/" + "/".join(parts))
    url = storage_url(kind, path, capacity="1GiB", mac_key=value)
    assert url.isascii()
    assert url.isprintable()
    assert " " not in url
    assert section_of(url) == {"type": kind, "path": path, "capacity": "1GiB", "mac_key": value}


def test_a_relative_path_is_meant_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage_url("file", "s", capacity=4096) == f"file://{tmp_path}/s?capacity=4096"
    assert section_of(storage_url("file", Path()))["path"] == str(tmp_path)


def test_an_address_is_no_path():
    assert storage_url("grpc", address="[::1]:7070", tls="true") == "grpc://[::1]:7070?tls=true"
    assert section_of("grpc://[::1]:7070?tls=true") == {
        "type": "grpc",
        "address": "[::1]:7070",
        "tls": "true",
    }
    assert section_of("memory://") == {"type": "memory"}


@pytest.mark.parametrize(
    ("url", "section"),
    [
        ("file:///a b?capacity=1GiB", {"type": "file", "path": "/a b", "capacity": "1GiB"}),
        ("file:///é", {"type": "file", "path": "/é"}),
        ("file:///a%20b%23", {"type": "file", "path": "/a b#"}),
        ("file:///a?mac_key=/k+1", {"type": "file", "path": "/a", "mac_key": "/k+1"}),
        ("lmdb:///a?capacity=", {"type": "lmdb", "path": "/a", "capacity": ""}),
    ],
)
def test_what_people_write_by_hand(url, section):
    assert section_of(url) == section


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("/var/lib", "is not a URL; write type://"),
        ("file:/var/lib", "is not a URL"),
        ("://x", "is not a URL"),
        ("", "is not a URL"),
        ("file:///a#1?capacity=1GiB", "write %23"),
        ("file:///a?capacity=1GiB#x", "write %23"),
        ("file:///50%?capacity=1GiB", "write %25"),
        ("file:///a?mac_key=/100%25%", "write %25"),
        ("file:///a%00b", "%00"),
        ("file:///a\nb", "cannot be printed"),
        ("file:///a?x=1&x=2", "'x' twice"),
        ("file:///a?path=/b", "'path' twice"),
    ],
)
def test_what_could_be_meant_in_two_ways_is_refused(url, sentence):
    with pytest.raises(ConfigError, match="storage") as caught:
        section_of(url)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refusal_does_not_repeat_the_settings():
    with pytest.raises(ConfigError) as caught:
        section_of("grpc://h:1#?token=hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_comma_is_nothing_that_grpc_can_find(tmp_path):
    for refuse in (
        lambda: load(None, {"directory": str(tmp_path / "a,b")}),
        lambda: open_backend(storage_url("grpc", tmp_path / "a,b")),
    ):
        with pytest.raises(ConfigError, match="has a comma"):
            refuse()
    assert (
        load(None, {"directory": str(tmp_path / "a,b"), "sockets": str(tmp_path / "run")}).socket_directory
        == tmp_path / "run"
    )


@pytest.mark.parametrize("name", AWKWARD)
def test_grpc_serves_and_finds_a_unix_socket_of_any_name(tmp_path, name):
    path = tmp_path / name
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(unix_target(path))
    server.start()
    try:
        assert path.is_socket()
        with grpc.insecure_channel(unix_target(path)) as channel, pytest.raises(grpc.RpcError) as answered:
            channel.unary_unary("/nobody/Nothing")(b"", timeout=30)
        assert answered.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        server.stop(0).wait()
