"""`tiercache config` as a user runs it."""

from __future__ import annotations

import json
import os
import tomllib
from unittest.mock import patch

import pytest

from tests.cli.store.test_samples import call
from tiercache.cli.config import EXAMPLE
from tiercache.config.loading import DEFAULT_FILE, load

NODE = """
disk_bytes = "64MiB"
host_bytes = "1GiB"
listen = ["127.0.0.1:7070"]
[[principals]]
name = "worker-1"
token_file = "{token}"
verbs = ["write", "read"]
[limits]
idle = "5s"
"""


@pytest.fixture
def node(tmp_path):
    token = tmp_path / "token"
    token.write_text("hunter2-hunter2-hunter2\n")
    token.chmod(0o600)
    file = tmp_path / "node.toml"
    file.write_text(NODE.format(token=token))
    return file


def config(*arguments, ok=None, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERCACHE_")}
    with patch.dict(os.environ, environment | {"COLUMNS": "80", **variables}, clear=True):
        done = call("config", *arguments, ok=ok)
    assert "hunter2" not in done.out + done.err
    return done


def refused(*arguments, **variables):
    done = config(*arguments, **variables)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("tiercache: ")
    assert done.err.count("\n") == 1
    return done.err


def test_check_says_what_would_be_served_to_whom(node):
    done = config("check", node)
    assert (done.code, done.err) == (0, "")
    said = done.out
    assert said.startswith(f"{node}: fine\n")
    assert "/var/lib/tiercache/store, 64MiB" in said
    assert "/var/lib/tiercache/run/grpc.sock" in said
    assert "127.0.0.1:7070, no TLS, tokens" in said
    assert f"worker-1 by token_file {node.parent}/token: read, write in all namespaces" in said
    assert "1GiB in flight, 256MiB of one client" in said
    assert "cut after 5s without progress" in said
    assert "warning" not in said


def test_check_warns_and_is_content(node):
    node.write_text("insecure_bind = true\n" + node.read_text().replace("127.0.0.1:7070", "0.0.0.0:1"))
    done = config("check", node)
    assert done.code == 0
    assert "warning: tokens travel unencrypted to 0.0.0.0:1 (insecure_bind)" in done.out
    done = config("check", node, TIERCACHE_LIMITS_IDLE="1s", TIERCACHE_PORT_7070_TCP="tcp://10.0.0.1:7070")
    assert "warning: TIERCACHE_LIMITS_IDLE is not read; set limits.idle in the file" in done.out
    assert "TIERCACHE_PORT" not in done.out, "Kubernetes sets it for a service of that name"


def test_check_finds_its_file(node, tmp_path):
    assert config("check", TIERCACHE_CONFIG=str(node)).out.startswith(f"{node}: fine\n")
    assert "does not exist" in refused("check", TIERCACHE_CONFIG=str(tmp_path / "none"))
    if not DEFAULT_FILE.exists():
        assert f"TIERCACHE_CONFIG is not set, and {DEFAULT_FILE} does not exist" in refused("check")


def test_check_looks_at_the_files_unless_told_otherwise(node):
    (node.parent / "token").chmod(0o644)
    assert (
        f"{node}: principals[0].token_file: {node.parent}/token can be read or changed by users other"
        in refused("check", node)
    )
    assert config("check", "--no-files", node).code == 0


def test_show_tells_where_each_value_comes_from(node):
    done = config("show", node)
    assert done.code == 0
    rows = {line.split()[0]: line.split() for line in reversed(done.out.splitlines()) if line.strip()}
    assert rows["drain"][1:3] == ["10s", "default"]
    assert rows["host_bytes"][1:3] == ["1GiB", "file"]
    assert rows["limits.idle"][1:3] == ["5s", "file"]
    assert rows["limits.call"][1:3] == ["1min", "default"]
    assert rows["limits.object_bytes"][1:3] == ["256MiB", "default"]
    assert "SIGTERM" in done.out


def test_formats(node):
    said = json.loads(config("check", node, "-o", "json").out)
    assert (said["file"], said["warnings"]) == (str(node), [])
    assert {"what": "tcp", "how": "127.0.0.1:7070, no TLS, tokens"} in said["serves"]
    rows = [json.loads(row) for row in config("check", node, "-o", "jsonl").out.splitlines()]
    assert rows == [*said["serves"], {"summary": {"file": str(node)}}]
    rows = [json.loads(row) for row in config("show", node, "-o", "jsonl").out.splitlines()]
    assert {"limits.idle", "principals[0].name", "sockets"} <= {row["setting"] for row in rows}
    assert next(row for row in rows if row["setting"] == "limits.idle") | {"description": ""} == {
        "setting": "limits.idle", "value": "5s", "origin": "file", "description": "",
    }  # fmt: skip
    every = [json.loads(row) for row in config("schema", "-o", "jsonl").out.splitlines()]
    assert {
        "directory", "tls.key", "principals[].san", "tenants.NAME.salt_file", "limits.idle", "http.listen",
    } <= {row["setting"] for row in every}  # fmt: skip
    assert next(row["default"] for row in every if row["setting"] == "limits.idle") == "10s"
    assert all(row["description"] for row in every)
    assert json.loads(config("schema", "-o", "json").out) == {"settings": every}
    assert "principals[].san" in config("schema").out


def test_show_as_json(node):
    said = json.loads(config("show", node, "-o", "json").out)
    assert said["file"] == str(node)
    assert said["settings"]["limits"]["idle"] == "5s"
    assert said["settings"]["sockets"] == "/var/lib/tiercache/run"
    assert (said["origins"]["limits.idle"], said["origins"]["principals[0].name"]) == ("file", "file")
    assert said["origins"]["principals[0].namespaces"] == "default"


def test_show_as_toml_can_be_loaded_again(node, tmp_path):
    again = tmp_path / "again.toml"
    again.write_text(config("show", node, "--toml").out)
    assert load(again) == load(node)


def test_show_needs_no_file():
    said = json.loads(config("show", "-o", "json", TIERCACHE_CONFIG="").out)
    assert said["file"] is None or DEFAULT_FILE.exists()


def test_the_example_of_the_help_loads(tmp_path):
    helped = config("--help").out
    shown = [line.strip() for line in helped.splitlines()]
    for line in EXAMPLE.splitlines():
        assert line.strip() in shown
    file = tmp_path / "example.toml"
    file.write_text(EXAMPLE)
    assert load(file).principals[0].tenant == "acme"
    assert tomllib.loads(EXAMPLE)["tls"]["client_ca"] == "/etc/tiercache/clients.crt"
    for verb in ("check", "show", "schema"):
        assert "tiercache config" in config(verb, "--help").out
