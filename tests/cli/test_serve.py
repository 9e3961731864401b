"""`tiercache serve` as a process: ready, drained, killed, started again, or unable to start."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cli.serving import GUARD, serving
from tests.cli.store.test_samples import call
from tests.processes import suspend
from tiercache.wire import attachment
from tiercache.wire.methods import METHODS, SESSION_METADATA
from tiercache.wire.v1 import attach_pb2, storage_pb2


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "d"


def daemon(directory: Path, *arguments: object, **variables: str) -> Any:
    return serving("--directory", directory, "--disk-bytes", "64MiB", *arguments, **variables)


def listens(directory: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        return sock.connect_ex(str(directory / "run/attach.sock")) == 0


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


def test_a_daemon_follows_a_killed_one_serves_and_ends_in_order(directory: Path) -> None:
    with daemon(directory), connected(directory) as hello:
        killed = hello().instance
    with daemon(directory, "--listen", "127.0.0.1:0") as (process, _):
        with connected(directory) as hello:
            reply = hello()
            assert (reply.principal, reply.store, reply.persistent) == ("owner", "file", True)
            assert reply.instance != killed
        for _ in range(50):
            assert listens(directory)  # a client that only looks who listens
        call("ping", "-s", directory)
        assert (directory / "run").stat().st_mode & 0o777 == 0o700
        assert (directory / "run/grpc.sock").stat().st_mode & 0o777 == 0o600
        assert (directory / "run/attach.sock").stat().st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=GUARD)
        assert process.returncode == 0, said
        assert "on 127.0.0.1:" in said
        assert f"grpc://{directory}/run" in said
        assert said.rstrip().endswith("stopped")
        assert "Traceback" not in said
        assert "Broken pipe" not in said, "clients that go by themselves are not told of"
        assert "cut off" not in said
        assert list((directory / "run").iterdir()) == []


def test_sighup_reads_the_settings_again(directory: Path, tmp_path: Path) -> None:
    config = tmp_path / "tiercache.toml"
    config.write_text("drain = '3s'\n")
    with daemon(directory, "--config", config) as (process, _), connected(directory) as hello:

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
        # At the second signal, nobody waits for the calls under way.
        suspend(process.pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            process.send_signal(number)
        process.communicate(timeout=GUARD)
        assert process.returncode == 128 + signal.SIGTERM


def test_a_second_daemon_on_the_same_directory_says_who_is_there(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f'directory = "{directory}"\ndisk_bytes = "16MiB"\n')
    with daemon(directory) as (process, _):
        for other in (
            ["-d", directory],
            ["-d", directory, "--storage", "memory://?capacity=1MiB"],
            ["-c", file],
        ):
            assert str(process.pid) in call("serve", *other, ok=1).error
        said = call("config", "check", file, ok=1).error
        assert f"another daemon serves {directory}/run (process {process.pid})" in said
        assert call("config", "check", "--no-ports", file).out.startswith(f"{file}: fine")
        with connected(directory) as hello:
            hello()


def test_a_watchdog_is_not_fed_by_a_daemon_that_hangs(directory: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        with daemon(directory, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="300000") as (
            process,
            _,
        ):
            manager.settimeout(30)
            manager.recv(1000)
            suspend(process.pid)
            manager.settimeout(1)
            beats = iter(lambda: manager.recv(1000), b"")
            with pytest.raises(TimeoutError):
                all(beats)
