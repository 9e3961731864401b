"""`tiercache serve` as a process: ready, serving, drained, killed, started again; and what it says where it
cannot start.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.processes import suspend
from tiercache.wire import attachment
from tiercache.wire.methods import METHODS, SESSION_METADATA
from tiercache.wire.v1 import attach_pb2, storage_pb2

COMMAND = [sys.executable, "-m", "tiercache.cli", "serve"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "d"


@contextmanager
def serving(
    directory: Path, *arguments: str, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A daemon that answers; killed at the end if it still lives."""
    command = [*COMMAND, "--directory", str(directory), "--disk-bytes", "64MiB", *arguments]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {})
    )
    try:
        until(lambda: process.poll() is not None or _answers(directory))
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _answers(directory: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        return sock.connect_ex(str(directory / "run/attach.sock")) == 0


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.01)


@contextmanager
def connected(directory: Path) -> Iterator[Callable[..., storage_pb2.HelloReply]]:
    """The Hello of a session on the unix sockets."""
    hello = METHODS["Hello"]
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
        grpc.insecure_channel(f"unix:{directory}/run/grpc.sock") as channel,
    ):
        sock.settimeout(30)
        sock.connect(str(directory / "run/attach.sock"))
        session, _ = attachment.receive(sock, attach_pb2.Session)
        assert session is not None
        call = channel.unary_unary(hello.path, hello.request.SerializeToString, hello.reply.FromString)
        yield lambda: call(
            storage_pb2.HelloRequest(), timeout=30, metadata=[(SESSION_METADATA, session.token)]
        )


def test_a_daemon_serves_and_ends_in_order(directory: Path) -> None:
    with serving(directory, "--listen", "127.0.0.1:0") as process:
        with connected(directory) as hello:
            reply = hello()
            assert (reply.principal, reply.store, reply.persistent) == ("owner", "file", True)
        assert (directory / "run").stat().st_mode & 0o777 == 0o700
        assert (directory / "run/grpc.sock").stat().st_mode & 0o777 == 0o600
        assert (directory / "run/attach.sock").stat().st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert "on 127.0.0.1:" in said
        assert f"grpc://{directory}/run" in said
        assert said.rstrip().endswith("stopped")
        assert "Traceback" not in said
        assert list((directory / "run").iterdir()) == []


def test_sighup_reads_the_settings_again(directory: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiercache.toml"
    config.write_text("drain = '3s'\n")
    with serving(directory, "--config", str(config)) as process, connected(directory) as hello:

        def hang_up(text: str) -> str:
            config.write_text(text)
            process.send_signal(signal.SIGHUP)
            assert process.stderr is not None
            while "configuration:" not in (line := process.stderr.readline()):
                assert line, "the daemon has ended"
            return line

        assert "nothing was changed" in hang_up("drain = 'soon'\n")
        assert "are those of the settings now" in hang_up("drain = '3s'\n[log]\nlevel = 'debug'\n")
        assert "are those of the settings now" in hang_up("drain = '4s'\n")
        assert process.stderr is not None
        assert "drain: changed, but only from the next start on" in process.stderr.readline()
        assert hello().principal == "owner"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 0


def test_clients_that_go_by_themselves_are_not_told_of(directory: Path) -> None:
    """Those that only look who listens, and those whose call was served."""
    with serving(directory) as process:
        for _ in range(50):
            assert _answers(directory)
        with connected(directory) as hello:
            hello()
        subprocess.run([*COMMAND[:-1], "ping", "-s", str(directory)], check=True, capture_output=True)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=120)
        assert "Broken pipe" not in log
        assert "cut off" not in log


def test_one_that_was_killed_is_followed_by_another(directory: Path) -> None:
    with serving(directory) as process:
        with connected(directory) as hello:
            first = hello().instance
        process.kill()
        process.wait()
    with serving(directory) as process, connected(directory) as hello:
        assert hello().instance != first


def test_a_second_daemon_on_the_same_directory_says_who_is_there(directory: Path) -> None:
    with serving(directory) as process:
        for other in ([], ["--storage", "memory://?capacity=1MiB"]):
            command = [*COMMAND, "--directory", str(directory), *other]
            second = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert second.returncode == 1
            assert str(process.pid) in second.stderr
            assert "Traceback" not in second.stderr
        with connected(directory) as hello:
            hello()


def test_a_watchdog_is_not_fed_by_a_daemon_that_hangs(directory: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        with serving(
            directory, environment={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        ) as process:
            manager.settimeout(30)
            manager.recv(1000)
            suspend(process.pid)
            manager.settimeout(1)
            beats = iter(lambda: manager.recv(1000), b"")
            with pytest.raises(TimeoutError):
                all(beats)


def test_a_port_in_use_is_named(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [*COMMAND, "--directory", str(directory), "--listen", address],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert address in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_ctrl_c_twice_does_not_wait(directory: Path) -> None:
    with serving(directory) as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        assert process.returncode in (0, 130)
