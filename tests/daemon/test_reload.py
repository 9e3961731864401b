"""Settings that change while a daemon serves: tokens, rights and certificates, good ones and broken ones."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings

from tests.daemon.hosts import Client, secret, serving, until
from tests.daemon.test_access import openssl
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.config.settings import Settings
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import ConfigError
from tiercache.testing.objects import fetch, key, payload, put
from tiercache.wire.v1 import storage_pb2 as pb

HELLO = pb.HelloRequest()
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def principal(tmp_path: Path, name: str, token: str, verbs: tuple[str, ...] = ("read",)) -> dict[str, object]:
    return {"name": name, "token_file": secret(tmp_path / f"{name}-{token}", token * 16), "verbs": verbs}


def settings(tmp_path: Path, *principals: dict[str, object], **more: object) -> Settings:
    return daemon_settings("tcp", tmp_path / "run", principals=principals, **more)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StorageServer]:
    first = settings(tmp_path, principal(tmp_path, "a", "1"), principal(tmp_path, "b", "2"))
    with StorageServer(first) as served:
        yield served


def client(node: StorageServer, token: str) -> Client:
    return Client(node.addresses[0], [("authorization", f"Bearer {token * 16}")])


def test_tokens_and_rights_change_between_two_calls(node: StorageServer, tmp_path: Path) -> None:
    """a gets another token, b another right, and c comes; their connections stay open."""
    with client(node, "1") as a, client(node, "2") as b, client(node, "3") as c, client(node, "4") as d:
        assert a.call("Hello", HELLO).principal == "a"
        assert list(b.call("Hello", HELLO).verbs) == ["read"]
        assert c.refused("Hello", HELLO) is UNAUTHENTICATED
        now = [("a", "3", ("read",)), ("b", "2", ("read", "write")), ("c", "4", ("admin",))]
        assert node.reload(settings(tmp_path, *(principal(tmp_path, *values) for values in now))) == []
        assert a.refused("Hello", HELLO) is UNAUTHENTICATED
        assert c.call("Hello", HELLO).principal == "a"
        assert list(b.call("Hello", HELLO).verbs) == ["read", "write"]
        assert list(d.call("Hello", HELLO).verbs) == ["admin"]


def test_who_is_removed_is_out_at_once_also_on_data_connections(node: StorageServer, tmp_path: Path) -> None:
    where = {"address": node.addresses[0], "timeout": "20s"}
    one, two = (
        principal(tmp_path, name, token, ("read", "write")) for name, token in (("a", "1"), ("b", "2"))
    )
    assert node.reload(settings(tmp_path, one, two)) == []
    files = [str(who["token_file"]) for who in (one, two)]
    with (
        closing(GrpcBackend(read_settings({**where, "token_file": files[0]}))) as stays,
        closing(GrpcBackend(read_settings({**where, "token_file": files[1]}))) as goes,
    ):
        for store in (stays, goes):
            assert put(store, key(0), payload(0, 9000)) in {Outcome.STORED, Outcome.HIT}
            assert fetch(store, key(0), 9000) == payload(0, 9000)
        assert node.reload(settings(tmp_path, one)) == []
        assert fetch(stays, key(0), 9000) == payload(0, 9000)
        assert fetch(goes, key(0), 9000) is Outcome.REFUSED


def test_a_closed_daemon_is_not_opened(node: StorageServer, tmp_path: Path) -> None:
    """Without principals, a daemon would be open to all; that needs a restart."""
    assert node.reload(settings(tmp_path)) == ["principals"]
    with client(node, "1") as a, Client(node.addresses[0]) as stranger:
        assert a.call("Hello", HELLO).principal == "a"
        assert stranger.refused("Hello", HELLO) is UNAUTHENTICATED


def test_what_needs_a_restart_is_named(node: StorageServer, tmp_path: Path) -> None:
    changed = settings(
        tmp_path, principal(tmp_path, "a", "1"), principal(tmp_path, "b", "2"), drain=9.0, host_bytes="99MiB"
    )
    assert node.reload(changed) == ["drain", "host_bytes"]
    node.stop()  # writes what the audit log still has to write
    told = [json.loads(line) for line in node.settings.audit_file.read_text().splitlines()]
    assert [(record["event"], record["at_next_start"]) for record in told] == [
        ("reload", "drain, host_bytes")
    ]


def issue(directory: Path, name: str) -> None:
    """A certificate of 127.0.0.1 from the directory's own authority."""
    if not (directory / "ca.pem").exists():
        openssl(directory, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-subj", "/CN=ca", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
        (directory / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl(directory, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
            f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
    openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", "ext", "-out", f"{name}.pem")  # fmt: skip
    (directory / f"{name}.key").chmod(0o600)


def shown(address: str, ca: Path) -> str:
    """The common name of the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 30) as plain,
        context.wrap_socket(plain, server_hostname=host) as sock,
    ):
        return dict(pair for part in sock.getpeercert()["subject"] for pair in part)["commonName"]


def test_new_connections_see_a_new_certificate_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        issue(tmp_path, name)
    key_file, certificate = tmp_path / "server.key", tmp_path / "server.pem"

    def install(name: str) -> None:
        shutil.copy(tmp_path / f"{name}.key", key_file)
        shutil.copy(tmp_path / f"{name}.pem", certificate)

    install("one")
    tls = {"certificate": certificate, "key": key_file}
    who = principal(tmp_path, "a", "1", ("read", "write"))
    ca = tmp_path / "ca.pem"
    with StorageServer(settings(tmp_path, who, tls=tls)) as node:
        addresses = (node.addresses[0], node.data_addresses[0])
        with Client(
            node.addresses[0],
            [("authorization", f"Bearer {'1' * 16}")],
            grpc.ssl_channel_credentials(ca.read_bytes()),
        ) as old:
            assert old.call("Hello", HELLO).principal == "a"
            assert [shown(address, ca) for address in addresses] == ["one", "one"]
            shutil.copy(tmp_path / "two.key", key_file)  # and not the certificate that belongs to it
            with pytest.raises(ConfigError, match="not a certificate and its"):
                node.reload(settings(tmp_path, principal(tmp_path, "a", "2"), tls=tls))
            assert [shown(address, ca) for address in addresses] == ["one", "one"]
            assert old.call("Hello", HELLO).principal == "a"
            install("two")
            assert node.reload(node.settings) == []
            assert [shown(address, ca) for address in addresses] == ["two", "two"]
            assert old.call("Hello", HELLO).principal == "a"
            assert node.reload(settings(tmp_path, who)) == ["tls"]


@pytest.mark.slow
def test_certificates_and_tokens_rotate_under_load(tmp_path: Path) -> None:
    """Ten thousand calls of eight clients, some on new connections; certificates change twenty times."""
    calls, clients = 10_000, 8
    for number in range(20):
        issue(tmp_path, f"n{number}")
    key_file, certificate = tmp_path / "server.key", tmp_path / "server.pem"

    def install(name: str) -> None:
        for made, used in ((f"{name}.key", key_file), (f"{name}.pem", certificate)):
            shutil.copy(tmp_path / made, tmp_path / "next")
            (tmp_path / "next").rename(used)

    install("n0")
    token = secret(tmp_path / "token", "t" * 20)
    body = f"""
directory = "{tmp_path}/d"
disk_bytes = "64MiB"
host_bytes = "64MiB"
listen = ["127.0.0.1:0"]
[tls]
certificate = "{certificate}"
key = "{key_file}"
[[principals]]
name = "worker"
token_file = "{token}"
verbs = ["read", "write"]
"""
    keys = [key(n) for n in range(8)]
    failures: list[object] = []
    done = threading.Semaphore(0)
    with serving(tmp_path, body) as daemon:
        where = {
            "address": f"127.0.0.1:{daemon.ports[0]}", "ca": str(tmp_path / "ca.pem"),
            "token_file": str(token), "timeout": "30s",
        }  # fmt: skip

        def work(number: int) -> None:
            try:
                for _ in range(5):
                    with closing(GrpcBackend(read_settings(dict(where)))) as store:
                        assert put(store, keys[number], payload(number, 9000)) in {
                            Outcome.STORED,
                            Outcome.HIT,
                        }
                        for _ in range(calls // clients // 5):
                            assert fetch(store, keys[number], 9000) == payload(number, 9000)
                            done.release()
            except BaseException as error:  # noqa: BLE001
                failures.append(error)
                done.release(calls)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(clients)]
        for thread in threads:
            thread.start()
        for number in range(1, 21):
            for _ in range(calls // 21):
                done.acquire()
            if number < 20:
                install(f"n{number}")
            daemon.process.send_signal(signal.SIGHUP)
            until(lambda number=number: daemon.log.read_text().count("SIGHUP: certificates") == number)
        for thread in threads:
            thread.join()
        assert failures == []
        assert shown(f"127.0.0.1:{daemon.ports[0]}", tmp_path / "ca.pem") == "n19"
        log = daemon.log.read_text()
    assert "nothing was changed" not in log
