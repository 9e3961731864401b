"""Settings that change while a daemon serves: tokens, rights and certificates, good ones and broken ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tiercache_backends.grpc import GrpcBackend
from tiercache_backends.grpc.settings import read_settings

from tests.daemon import web
from tests.daemon.hosts import GUARD, Client, Worker, secret, serving, set_messages, until
from tests.storage_backends.grpc.nodes import daemon_settings, issue
from tiercache.config.models import Settings
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import ConfigError
from tiercache.testing.conformance.threads import run_all
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


def client(node: StorageServer, token: str, credentials: grpc.ChannelCredentials | None = None) -> Client:
    return Client(node.addresses[0], [("authorization", f"Bearer {token * 16}")], credentials)


def test_tokens_and_rights_change_between_two_calls(node: StorageServer, tmp_path: Path) -> None:
    """a gets another token, b another right, and c comes; their connections stay open."""
    with client(node, "1") as a, client(node, "2") as b, client(node, "3") as c, client(node, "4") as d:
        assert a.call("Hello", HELLO).principal == "a"
        assert list(b.call("Hello", HELLO).verbs) == ["read"]
        assert c.refused("Hello", HELLO) is UNAUTHENTICATED
        now = [("a", "3", ("read",)), ("b", "2", ("read", "write")), ("c", "4", ("admin",))]
        assert (
            node.reload(settings(tmp_path, *(principal(tmp_path, *values) for values in now))).at_next_start
            == []
        )
        assert a.refused("Hello", HELLO) is UNAUTHENTICATED
        assert c.call("Hello", HELLO).principal == "a"
        assert list(b.call("Hello", HELLO).verbs) == ["read", "write"]
        assert list(d.call("Hello", HELLO).verbs) == ["admin"]


def test_who_is_removed_is_out_at_once_also_on_data_connections(node: StorageServer, tmp_path: Path) -> None:
    where = {"address": node.addresses[0], "timeout": "20s"}
    one, two = (
        principal(tmp_path, name, token, ("read", "write")) for name, token in (("a", "1"), ("b", "2"))
    )
    assert node.reload(settings(tmp_path, one, two)).at_next_start == []
    files = [str(who["token_file"]) for who in (one, two)]
    with (
        closing(GrpcBackend(read_settings({**where, "token_file": files[0]}))) as stays,
        closing(GrpcBackend(read_settings({**where, "token_file": files[1]}))) as goes,
    ):
        for store in (stays, goes):
            assert put(store, key(0), payload(0, 9000)) in {Outcome.STORED, Outcome.HIT}
            assert fetch(store, key(0), 9000) == payload(0, 9000)
        assert node.reload(settings(tmp_path, one)).at_next_start == []
        assert fetch(stays, key(0), 9000) == payload(0, 9000)
        assert fetch(goes, key(0), 9000) is Outcome.REFUSED


def test_a_closed_daemon_is_not_opened(node: StorageServer, tmp_path: Path) -> None:
    """Without principals, a daemon would be open to all; that needs a restart."""
    assert node.reload(settings(tmp_path)).at_next_start == ["principals"]
    with client(node, "1") as a, Client(node.addresses[0]) as stranger:
        assert a.call("Hello", HELLO).principal == "a"
        assert stranger.refused("Hello", HELLO) is UNAUTHENTICATED


def test_what_needs_a_restart_is_named(node: StorageServer, tmp_path: Path) -> None:
    changed = settings(
        tmp_path, principal(tmp_path, "a", "1"), principal(tmp_path, "b", "2"), drain=9.0, host_bytes="99MiB"
    )
    assert node.reload(changed).at_next_start == ["drain", "host_bytes"]
    node.stop()  # writes what the audit log still has to write
    told = [json.loads(line) for line in node.settings.audit_file.read_text().splitlines()]
    assert [(record["event"], record["at_next_start"]) for record in told] == [
        ("reload", "drain, host_bytes")
    ]


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


class Pair:
    """The files of a daemon's certificate, into which one of several pairs is copied."""

    def __init__(self, here: Path) -> None:
        self._here = here
        self.key, self.certificate, self.ca = here / "server.key", here / "server.pem", here / "ca.pem"
        self.settings = {"certificate": self.certificate, "key": self.key}

    def install(self, name: str, days: int = 2) -> None:
        if not (self._here / f"{name}.pem").exists():
            issue(self._here, name, days=days)
        if self.certificate.is_dir():
            self.certificate.rmdir()
        for file in (self.key, self.certificate):
            shutil.copy(self._here / f"{name}{file.suffix}", file)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    pair = Pair(tmp_path)
    for name in ("two", "one"):
        pair.install(name)
    return pair


def test_new_connections_see_a_new_certificate_and_old_ones_go_on(tmp_path: Path, pair: Pair) -> None:
    who = principal(tmp_path, "a", "1", ("read", "write"))
    http = {"listen": "127.0.0.1:0"}
    with StorageServer(settings(tmp_path, who, tls=pair.settings, http=http)) as node:
        addresses = (node.addresses[0], node.data_addresses[0], node.http_address)
        with client(node, "1", grpc.ssl_channel_credentials(pair.ca.read_bytes())) as old:
            assert old.call("Hello", HELLO).principal == "a"
            assert [shown(address, pair.ca) for address in addresses] == ["one"] * 3
            pair.install("two")
            assert node.reload(node.settings).at_next_start == []
            assert [shown(address, pair.ca) for address in addresses] == ["two"] * 3
            assert old.call("Hello", HELLO).principal == "a"
            assert node.reload(settings(tmp_path, who, http=http)).at_next_start == ["tls"]


def from_pair(name: str, *files: Path) -> None:
    """Copy files of another pair, which lies beside, to these."""
    for file in files:
        shutil.copy(file.with_name(f"{name}{file.suffix}"), file)


def as_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


BROKEN: dict[str, tuple[Callable[[Pair], object], str]] = {
    "certificate cut off": (lambda pair: os.truncate(pair.certificate, 300), "not a certificate and its"),
    "key cut off": (lambda pair: os.truncate(pair.key, 100), "not a certificate and its"),
    "key of another": (lambda pair: from_pair("two", pair.key), "not a certificate and its"),
    "expired": (
        lambda pair: from_pair("old", pair.key, pair.certificate),
        "no client would accept .*expired",
    ),
    "key open to others": (lambda pair: pair.key.chmod(0o644), "users other than its owner"),
    "key gone": (lambda pair: pair.key.unlink(), "does not exist"),
    "certificate gone": (lambda pair: pair.certificate.unlink(), "does not exist"),
    "certificate empty": (lambda pair: os.truncate(pair.certificate, 0), "holds no certificate"),
    "certificate a directory": (lambda pair: as_directory(pair.certificate), "not a regular file"),
}
"""Ways to break the files of a pair, each with what the message must say."""


def test_a_broken_pair_changes_nothing_and_the_end_of_the_good_one_is_told(tmp_path, pair):
    """The old certificate, the old tokens and the old end stay, whatever is wrong with the new files."""
    more = {"tls": pair.settings, "http": {"listen": "127.0.0.1:0", "hosts": ["localhost"]}}
    first = settings(tmp_path, principal(tmp_path, "a", "1", ("admin",)), **more)
    other = settings(tmp_path, principal(tmp_path, "a", "2"), **more)
    context = ssl.create_default_context(cafile=str(pair.ca))
    told = {"authorization": f"Bearer {'1' * 16}"}
    with StorageServer(first) as node:

        def ends() -> set[float]:
            """Return the ends that the document and the metrics tell, which may be of different moments."""
            status = json.loads(web.ask(node.http_address, "/status.json", context=context, **told).text)
            metrics = web.ask(node.http_address, "/metrics", context=context, **told).text
            [line] = re.findall(r"(?m)^tiercache_node_certificate_expires_seconds (\S+)", metrics)
            return {float(line), status["certificate_expires"]}

        [good] = ends()
        assert abs(good - time.time() - 2 * 86400) < 3600
        issue(tmp_path, "old", days=-1)
        for how, (damage, wanted) in BROKEN.items():
            damage(pair)
            with pytest.raises(ConfigError, match=wanted):
                node.reload(other)
            assert shown(node.addresses[0], pair.ca) == "one", how
            assert ends() == {good}
            pair.install("one")
        pair.install("long", days=90)
        assert node.reload(first).at_next_start == []
        until(lambda: good not in ends())  # the port keeps answers for a moment
        [new] = ends()
        assert abs(new - time.time() - 90 * 86400) < 3600


def test_a_daemon_without_tls_tells_of_no_certificate(tmp_path: Path) -> None:
    with StorageServer(settings(tmp_path, http={"listen": "127.0.0.1:0"})) as node:
        assert "certificate_expires_seconds " not in web.ask(node.http_address, "/metrics").text
        assert json.loads(web.ask(node.http_address, "/status.json").text)["certificate_expires"] is None


@pytest.mark.slow
def test_certificates_and_tokens_rotate_under_load(tmp_path: Path, pair: Pair) -> None:
    """No call fails while the certificate and the tokens change, two of which are valid at a time."""
    rounds, clients = 12, 4
    gate = threading.Barrier(clients + 1, timeout=600)

    def rights(turn: int) -> Settings:
        valid = (
            principal(tmp_path, f"w{n % 2}", f"{n:02}", ("read", "write")) for n in {turn, max(0, turn - 1)}
        )
        return settings(tmp_path, *valid, tls=pair.settings)

    with StorageServer(rights(0)) as node:

        def in_step(work: Callable[[int], None]) -> None:
            try:
                for turn in range(rounds):
                    gate.wait()
                    work(turn)
                    gate.wait()
            except BaseException:
                gate.abort()
                raise

        def use(number: int, turn: int) -> None:
            where = {
                "address": node.addresses[0], "ca": str(pair.ca), "timeout": "60s",
                "token_file": str(tmp_path / f"w{turn % 2}-{turn:02}"),
            }  # fmt: skip
            with closing(GrpcBackend(read_settings(where))) as store:
                assert put(store, key(number), payload(number, 9000)) in {Outcome.STORED, Outcome.HIT}
                for _ in range(50):
                    assert fetch(store, key(number), 9000) == payload(number, 9000)

        def rotate(turn: int) -> None:
            pair.install(f"n{turn}")
            assert node.reload(rights(turn + 1)).at_next_start == []

        workers = (partial(in_step, partial(use, number)) for number in range(clients))
        run_all(*workers, partial(in_step, rotate))
        assert shown(node.addresses[0], pair.ca) == f"n{rounds - 1}"


HERE = 'directory = "{here}"\ndisk_bytes = "64MiB"\nhost_bytes = "64MiB"\ndrain = "{drain}"\n'


def test_a_storm_of_hangups_disturbs_no_call_and_the_last_settings_hold(tmp_path: Path) -> None:
    body = HERE.format(here=tmp_path, drain="10s")
    with serving(tmp_path, body) as daemon, Worker(daemon) as client:
        client.set({key(0): b"x" * 1000})
        for number in range(400):
            daemon.process.send_signal(signal.SIGHUP)
            if number % 10 == 0:
                assert client.exists([key(0)]) == [True]
        (tmp_path / "tiercache.toml").write_text(HERE.format(here=tmp_path, drain="9s"))
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "drain: changed, but only from the next start on" in daemon.log.read_text())
        assert client.get({key(0): 1000}) == [b"x" * 1000]
    assert daemon.log.read_text().count("configuration: tiers, quotas") < 200


def test_a_hangup_while_the_daemon_drains_changes_nothing(tmp_path: Path) -> None:
    """A call that is under way lets the drain last; the settings are broken meanwhile."""
    body = HERE.format(here=tmp_path, drain="2s")
    with serving(tmp_path, body) as daemon, Worker(daemon) as client:
        over = threading.Event()

        def requests() -> Iterator[bytes]:
            yield next(set_messages({key(0): b"x" * 1000}))
            over.wait(GUARD)

        call = client.stream("Set", requests(), timeout=GUARD)
        until(lambda: call.is_active() and client.exists([key(1)]) == [False])
        (tmp_path / "tiercache.toml").write_text("broken")
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping: calls under way have" in daemon.log.read_text())
        for _ in range(20):
            daemon.process.send_signal(signal.SIGHUP)
        assert daemon.process.wait(GUARD) == 0
        over.set()
    assert "configuration:" not in daemon.log.read_text()
    assert daemon.log.read_text().rstrip().endswith("stopped")


def test_a_reload_that_hangs_does_not_keep_the_daemon_from_its_end(tmp_path: Path) -> None:
    """The configuration is a pipe into which nobody writes, as a file on a disk that hangs."""
    with serving(tmp_path, HERE.format(here=tmp_path, drain="2s")) as daemon, Worker(daemon) as client:
        (tmp_path / "tiercache.toml").unlink()
        os.mkfifo(tmp_path / "tiercache.toml")
        daemon.process.send_signal(signal.SIGHUP)
        writers: list[int] = []

        def is_read() -> bool:
            with suppress(OSError):  # ENXIO: nobody reads
                writers.append(os.open(tmp_path / "tiercache.toml", os.O_WRONLY | os.O_NONBLOCK))
            return bool(writers)

        until(is_read)
        daemon.process.send_signal(signal.SIGHUP)
        assert client.exists([key(0)]) == [False]
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(GUARD) == 0
        os.close(writers[0])


def test_operators_see_what_was_reloaded_refused_and_changed(tmp_path: Path) -> None:
    """The journal of a real daemon; who comes back has the counts of before."""
    names = "abc"
    tokens = {name: secret(tmp_path / name, name * 16) for name in names}
    salt = secret(tmp_path / "salt", "s" * 32)

    def body(*present: str, quota: str = "4MiB", more: str = "") -> str:
        principals = "".join(
            f'[[principals]]\nname = "{name}"\ntoken_file = "{tokens[name]}"\nverbs = ["admin"]\n'
            for name in present
        )
        return (
            f'directory = "{tmp_path}"\ndisk_bytes = "64MiB"\nhost_bytes = "48MiB"\n{more}'
            'listen = ["127.0.0.1:0"]\n[http]\nlisten = "127.0.0.1:0"\n'
            f'[tenants.acme]\nsalt_file = "{salt}"\nquota = "{quota}"\n{principals}'
        )

    with serving(tmp_path, body("a", "b")) as daemon:
        places = json.loads((tmp_path / "places.json").read_text())["places"]
        page = next(place["address"] for place in places if place["transport"] == "http")
        address = f"127.0.0.1:{daemon.ports[0]}"

        def document() -> dict[str, Any]:
            answer = web.ask(page, "/status.json", authorization=f"Bearer {'a' * 16}")
            return dict(json.loads(answer.text))

        def told(start: str) -> str:
            return next((row["text"] for row in document()["journal"] if row["text"].startswith(start)), "")

        def calls() -> dict[str, int]:
            return {row["name"]: row["calls"] for row in document()["principals"]}

        def reload(text: str) -> None:
            (tmp_path / "tiercache.toml").write_text(text)
            daemon.process.send_signal(signal.SIGHUP)

        with Client(address, [("authorization", f"Bearer {'b' * 16}")]) as b:
            for _ in range(3):
                b.call("Hello", HELLO)
        # An answer may be a fifth of a second old, so each is asked for until it says so.
        reload(body("a", "c", quota="1MiB"))
        until(lambda: told("reload done") == "reload done (changed quota of acme, removed b)")
        with Client(address, [("authorization", f"Bearer {'c' * 16}")]) as c:
            c.call("Hello", HELLO)
        until(lambda: "b" not in calls() and calls()["c"] == 1, GUARD)
        reload("nonsense")
        until(lambda: told("reload refused"))
        reload(body("a", "b", "c", quota="1MiB", more='drain = "9s"\n'))
        until(lambda: "drain" in told("reload done"))
        until(lambda: calls()["b"] == 3)
        assert document()["host"] == socket.gethostname()
