"""Principals known by their user id reach the sockets of a directory that the daemon made."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.daemon.hosts import Daemon, config, serving
from tiercache.config.loading import load
from tiercache.daemon import StorageServer
from tiercache.errors import ConfigError

GUEST, STRANGER = 54_321, 54_322
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")

BODY = """
directory = "{directory}/made"
storage = "file://{directory}/made/store?capacity=64MiB"
[[principals]]
name = "guest"
uid = {uid}
"""
AS_USER = """
import os, sys
from tests.storage_backends.grpc.test_refusals import get_one, set_one
from tiercache_backends.grpc.backend import GrpcBackend
from tiercache_backends.grpc.settings import read_settings
import grpc, grpc._channel, grpc._cython.cygrpc, lmdb, numpy
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
with GrpcBackend(read_settings(dict(path={path!r}))) as store:
    print(set_one(store), get_one(store))
    try:
        print(store.ping().principal)
    except OSError as error:
        print(type(error).__name__, error)
"""
RAW = """
import os, socket
os.setgroups([]); os.setgid({uid}); os.setuid({uid})
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(30)
sock.connect({path!r} + "/grpc.sock")
try:
    print(sock.recv(100))
except ConnectionResetError:
    print(b"")
for name in ("plain.sock", "../store/LOCK"):
    try:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect({path!r} + "/" + name)
        print("reached")
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="tiercache-uids-"))
    try:
        directory.chmod(0o755)
        with serving(directory, BODY.format(directory=directory, uid=GUEST)) as daemon:
            yield daemon
    finally:
        shutil.rmtree(directory)


def sockets(daemon: Daemon) -> Path:
    return daemon.directory / "made/run"


def run(script: str, **values: object) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script.format(**values)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_user_who_is_a_principal_is_served(daemon: Daemon) -> None:
    [outcomes, principal] = run(AS_USER, uid=GUEST, path=str(sockets(daemon)))
    assert outcomes.split() in (["stored", "hit"], ["hit", "hit"])
    assert principal == "guest"


def test_the_daemons_own_user_is_served_as_before(daemon: Daemon) -> None:
    assert run(AS_USER, uid=os.getuid(), path=str(sockets(daemon)))[1] == "owner"


def test_a_user_who_is_none_is_refused(daemon: Daemon) -> None:
    [outcomes, said] = run(AS_USER, uid=STRANGER, path=str(sockets(daemon)))
    assert outcomes.split() == ["refused", "refused"]
    assert said.startswith("RefusedError")
    assert f"uid = {STRANGER}" in said


def test_other_sockets_and_files_are_out_of_reach(daemon: Daemon) -> None:
    """A principal reaches only the gate's socket, and another user gets no byte even of that."""
    denied = ["PermissionError", "PermissionError"]
    assert run(RAW, uid=STRANGER, path=str(sockets(daemon))) == ["b''", *denied]
    assert run(RAW, uid=GUEST, path=str(sockets(daemon)))[1:] == denied


def test_nothing_else_is_open_to_others(daemon: Daemon) -> None:
    made = daemon.directory / "made"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (made, made / "store", made / "run")}
    assert modes == {"made": 0o711, "store": 0o700, "run": 0o711}


def test_without_other_users_everything_is_closed(tmp_path: Path) -> None:
    with serving(tmp_path, BODY.format(directory=tmp_path, uid=os.getuid())):
        assert stat.S_IMODE((tmp_path / "made/run").stat().st_mode) == 0o700


def test_a_directory_with_other_things_in_it_is_not_opened(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir(0o700)
    (made / "diary").touch()
    settings = load(config(tmp_path, BODY.format(directory=tmp_path, uid=GUEST)), {})
    with pytest.raises(ConfigError, match=r"cannot pass through .*chmod o\+x"):
        StorageServer(settings, MemoryBackend(1 << 20)).start()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.slow
def test_one_that_an_earlier_daemon_made_is_opened(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir(0o700)
    with serving(tmp_path, BODY.format(directory=tmp_path, uid=GUEST)):
        assert stat.S_IMODE(made.stat().st_mode) == 0o711
        with socket.socket(socket.AF_UNIX) as sock:
            assert sock.connect_ex(str(made / "run/grpc.sock")) == 0
