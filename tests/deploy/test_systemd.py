"""The unit of systemd: its commands start a daemon that notifies, with the files of the example."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.base import DEPLOY, run, tool, turned_on
from tiercache.config.loading import resolve
from tiercache.daemon import server
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import fetch, key, payload, put
from tiercache.text import parse_duration, parse_size

SYSTEMD = DEPLOY / "systemd"
COMMAND = "/opt/tiercache/bin/tiercache"
CONFIG = "/etc/tiercache/tiercache.toml"
EXAMPLE = (SYSTEMD / "tiercache.toml").read_text()
SECONDS = 120


def directives() -> dict[str, str]:
    """Directives of the unit, none of which is given twice."""
    lines = re.findall(r"(?m)^(\w+)=(.*)$", (SYSTEMD / "tiercache.service").read_text())
    assert len({name for name, _ in lines}) == len(lines)
    return dict(lines)


UNIT = directives()


def in_place(text: str, here: Path) -> str:
    """The example's text with paths, ports and sizes of a test."""
    for there, path in (
        (f"/var/lib/{UNIT['StateDirectory']}", here / "state"),
        (f"/run/credentials/{UNIT['User']}.service", here / "credentials"),
        (f"/run/{UNIT['RuntimeDirectory']}", here / "run"),
        ("127.0.0.1:9464", "127.0.0.1:0"),
        ("0.0.0.0:7070", "127.0.0.1:0"),
        ("data_port = 7071", "data_port = 0"),
        ("64GiB", "64MiB"),
        ("1GiB", "96MiB"),
    ):
        assert there in text, f"the example no longer has {there}"
        text = text.replace(there, str(path))
    return text


def example(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tiercache.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as systemd hands them over: each in one folder, with the credential's name before its own."""
    tool("openssl", "apt-get install openssl")
    made, here = tmp_path_factory.mktemp("made") / "trial", tmp_path_factory.mktemp("systemd")
    run("sh", DEPLOY / "certificates.sh", made, "worker-1", "127.0.0.1", "::1", "cache.example")
    (made / "acme.salt").write_bytes(os.urandom(32))
    (made / "acme.salt").chmod(0o600)
    loaded, _, folder = UNIT["LoadCredential"].partition(":")
    assert f"d {folder} 0700 root root" in (SYSTEMD / "tmpfiles.conf").read_text()
    (here / "credentials").mkdir()
    for file in made.iterdir():
        file.rename(here / "credentials" / f"{loaded}_{file.name}")
    return here


@contextmanager
def notified(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(path))
        heard.settimeout(SECONDS)
        yield heard


def until(heard: socket.socket, word: str) -> str:
    while word not in (said := heard.recv(4096).decode()):
        pass
    return said


def command(directive: str, config: Path) -> list[str]:
    first, *words = shlex.split(UNIT[directive])
    assert first == COMMAND
    assert CONFIG in words
    return [sys.executable, "-m", "tiercache.cli", *(str(config) if w == CONFIG else w for w in words)]


def test_the_unit_s_commands_serve_and_notify_until_they_are_stopped(secrets: Path, tmp_path: Path) -> None:
    """The certificates of the trial let exactly their client in."""
    config = example(tmp_path, in_place(turned_on(EXAMPLE), secrets))
    environment = os.environ | {"NOTIFY_SOCKET": str(secrets / "notify"), "WATCHDOG_USEC": "300000"}
    with notified(secrets / "notify") as heard:
        daemon = subprocess.Popen(
            command("ExecStart", config), env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            port = re.search(r"127\.0\.0\.1:(\d+)", until(heard, "READY=1"))[1]  # type: ignore[index]
            until(heard, "WATCHDOG=1")
            at = f"grpc://127.0.0.1:{port}?ca={secrets}/credentials/secret_ca.pem"
            mine = "&".join(
                f"{name}={secrets}/credentials/secret_client.{end}"
                for name, end in (("certificate", "pem"), ("key", "key"))
            )
            with open_backend(f"{at}&{mine}") as shown, open_backend(at) as hidden:
                assert put(shown, key("a"), payload("a", 4096)) == "stored"
                assert fetch(shown, key("a"), 4096) == payload("a", 4096)
                assert put(hidden, key("b"), b"x") == "unavailable"
            run(*(word.replace("$MAINPID", str(daemon.pid)) for word in shlex.split(UNIT["ExecReload"])))
            until(heard, "RELOADING=1")
            until(heard, "READY=1")
            daemon.send_signal(signal.SIGTERM)
            until(heard, "STOPPING=1")
            _, said = daemon.communicate(timeout=SECONDS)
        finally:
            daemon.kill()
            daemon.communicate()
    assert daemon.returncode == 0, said
    assert (secrets / "state" / "store").is_dir()


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    settings = resolve(example(tmp_path, EXAMPLE)).settings
    assert str(settings.directory) == f"/var/lib/{UNIT['StateDirectory']}"
    assert str(settings.socket_directory) == f"/run/{UNIT['RuntimeDirectory']}"
    more = resolve(example(tmp_path, turned_on(EXAMPLE))).settings
    assert {p.name for p in more.principals} == {"engine", "worker-1"}
    assert more.tls is not None
    assert more.tenants


def test_the_unit_s_limits_fit_the_daemon(tmp_path: Path) -> None:
    settings = resolve(example(tmp_path, EXAMPLE)).settings
    assert float(UNIT["TimeoutStopSec"]) > 3 * settings.drain + 5
    # private: how long `start` may take is no setting
    assert float(UNIT["TimeoutStartSec"]) > server._START_SECONDS
    assert int(UNIT["LimitNOFILE"]) >= 1024 + 32 * settings.limits.clients
    assert parse_size(UNIT["MemoryMax"].replace("G", "GiB")) >= settings.host_bytes + parse_size("512MiB")
    assert parse_duration(f"{UNIT['WatchdogSec']}s") >= 10
    assert (UNIT["Type"], UNIT["RestartPreventExitStatus"]) == ("notify", "2")
    assert "PrivateUsers" not in UNIT


def test_systemd_understands_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "apt-get install systemd")
    unit = tmp_path / "tiercache.service"
    unit.write_text((SYSTEMD / "tiercache.service").read_text().replace(COMMAND, "/bin/true"))
    assert run(analyze, "verify", "--man=no", unit).strip() == ""
    # Exposure times ten; 100 is a service without any protection.
    run(analyze, "security", "--offline=true", "--threshold=18", unit)


def test_systemd_makes_the_user_and_the_directories(tmp_path: Path) -> None:
    sysusers, tmpfiles = (
        tool("systemd-sysusers", "apt-get install systemd"),
        tool("systemd-tmpfiles", "apt-get install systemd"),
    )
    (tmp_path / "etc").mkdir()
    run(sysusers, f"--root={tmp_path}", SYSTEMD / "sysusers.conf")
    assert f"{UNIT['User']}:" in (tmp_path / "etc/passwd").read_text()
    assert UNIT["Group"] == UNIT["User"]
    if os.getuid() != 0:
        pytest.skip("only root may give directories to root")
    run(tmpfiles, f"--root={tmp_path}", "--create", SYSTEMD / "tmpfiles.conf")
    users = [line.split(":") for line in (tmp_path / "etc/passwd").read_text().splitlines()]
    ids = {name: int(uid) for name, _, uid, *_ in users}
    for name, owner in (("secrets", 0), ("rotating", ids[UNIT["User"]])):
        found = (tmp_path / "etc/tiercache" / name).stat()
        assert (found.st_mode & 0o777, found.st_uid) == (0o700, owner)


def test_the_trial_s_keys_are_closed_and_nothing_is_overwritten(tmp_path: Path) -> None:
    tool("openssl", "apt-get install openssl")
    script = ["sh", str(DEPLOY / "certificates.sh"), str(tmp_path / "trial"), "worker-1", "cache.example"]
    run(*script)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "trial").iterdir()}
    assert modes == {
        f"{name}.{end}": mode
        for name in ("ca", "server", "client")
        for end, mode in (("key", 0o600), ("pem", 0o644))
    }
    before = (tmp_path / "trial/ca.key").read_bytes()
    assert subprocess.run(script, capture_output=True).returncode != 0
    assert (tmp_path / "trial/ca.key").read_bytes() == before
    usage = subprocess.run(script[:3], capture_output=True, text=True)
    assert (usage.returncode, "DIRECTORY CLIENT HOST" in usage.stderr) == (2, True)
