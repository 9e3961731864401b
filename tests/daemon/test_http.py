"""The HTTP port for operators: who is answered what, and what a hostile client cannot do to it."""

from __future__ import annotations

import base64
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from tiercache_backends.memory import MemoryBackend

from tests.cli.store import test_samples as runner
from tests.daemon.hosts import secret, until
from tests.daemon.web import ask, say
from tests.storage.late import Late
from tiercache.config.models import Settings
from tiercache.daemon import StorageServer
from tiercache.daemon.http import HttpPort, routes
from tiercache.daemon.http.port import MAX_SERVED
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key
from tiercache.wire import messages
from tiercache.wire.methods import METHODS
from tiercache.wire.v1 import storage_pb2 as pb

TOKENS = {name: f"{name}-" + name[0] * 24 for name in ("watcher", "acme", "rival")}


@contextmanager
def serving(path: Path, store: StorageBackend | None = None, **more: Any) -> Iterator[StorageServer]:
    given = {"directory": path, "host_bytes": "64MiB", "http": {"listen": "127.0.0.1:0"}, "drain": 2}
    with StorageServer(Settings(**(given | more)).check(), store or MemoryBackend()) as node:  # type: ignore[arg-type]
        yield node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageServer]:
    with serving(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageServer]:
    """A daemon of two tenants and a watcher, each with a token."""
    here = tmp_path_factory.mktemp("guarded")
    tenants = {}
    for name in ("acme", "rival"):
        secret(here / f"{name}.salt", name * 16)
        tenants[name] = {"salt_file": here / f"{name}.salt"}
    principals = [
        {
            "name": name,
            "token_file": secret(here / name, token),
            "tenant": name if name in tenants else "",
            "verbs": ["observe"] if name == "watcher" else ["read", "write", "admin"],
        }
        for name, token in TOKENS.items()
    ]
    http = {"listen": "127.0.0.1:0", "hosts": ["cache-1.example"]}
    more = {"http": http, "listen": ["127.0.0.1:0"]}
    with serving(here, principals=principals, tenants=tenants, **more) as made:
        yield made


# -- the answers


def test_every_path_of_the_port(node: StorageServer) -> None:
    here = node.http_address
    assert ask(here, "/healthz")[:2] == (200, "alive\n")
    assert json.loads(ask(here, "/readyz").text) == {"ready": True, "state": "ready", "reasons": []}
    start = ask(here, "/")
    assert (start.status, start.headers["Location"]) == (302, "status")
    assert "tiercache_node_calls_limit" in ask(here, "/metrics?name[]=x").text
    told = json.loads(ask(here, "/status.json").text)
    assert (told["whole"], told["store"]["kind"]) == (True, "MemoryBackend")
    for path in ("/metrics/../etc", "/status/", "//"):
        assert ask(here, path).status == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(here, "/status.json", method).status == 405
    assert ask(here, "/metrics", "POST").headers["Allow"] == "GET,HEAD"
    assert f"metrics and status on http://{here}/status" in node.describe()


def test_answers_are_for_nobody_else_s_page(node: StorageServer) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/status", "/status.json", "/nothing"):
        headers = ask(node.http_address, path).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Connection"] == "close", "one request on each connection"
        assert headers["Server"] == "tiercache"
        assert not {"Set-Cookie", "Access-Control-Allow-Origin"} & {*headers}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421), ("evil.example:9464", 421), ("localhost.evil.example", 421), ("", 421),
        ("127.0.0.1.evil.example", 421), ("[evil.example]", 421), ("localhost@evil.example", 421),
        ("localhost", 200), ("LOCALHOST:9464", 200), ("10.1.2.3:9464", 200), ("[::1]:9464", 200),
        ("cache-1.example", 200), ("Cache-1.Example.:9464", 200), ("cache-2.example", 421),
    ],
)  # fmt: skip
def test_only_a_host_of_the_daemon_is_answered(guarded: StorageServer, host: str, status: int) -> None:
    for path in ("/healthz", "/readyz", "/nothing"):
        answer = ask(guarded.http_address, path, Host=host)
        assert answer.status == (404 if (status, path) == (200, "/nothing") else status)
    if status == 421:
        assert "http.hosts" in answer.text
        assert answer.text.count("\n") == 1


# -- who may read


def bearer(name: str) -> str:
    return f"Bearer {TOKENS[name]}"


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def test_strangers_learn_whether_it_is_well_and_nothing_else(guarded: StorageServer) -> None:
    here = guarded.http_address
    assert ask(here, "/healthz")[:2] == (200, "alive\n")
    assert json.loads(ask(here, "/readyz").text) == {"ready": True}
    wrong = [
        "", "Bearer ", "Bearer x", bearer("acme")[:-1], TOKENS["acme"], "Basic !", "Basic", basic("a:b"),
        basic(TOKENS["acme"]), "Digest x", "Basic " + base64.b64encode(b"\xff:\xff").decode(),
    ]  # fmt: skip
    for given in wrong:
        for path in ("/metrics", "/status", "/status.json"):
            answer = ask(here, path, Authorization=given)
            assert (answer.status, answer.headers["WWW-Authenticate"][:5]) == (401, "Basic")
            assert answer.text.count("\n") == 1
            assert not any(token in answer.text for token in TOKENS.values())


def test_a_principal_that_observes_reads_everything(guarded: StorageServer) -> None:
    for given in (bearer("watcher"), basic(f"anyone:{TOKENS['watcher']}")):
        assert ask(guarded.http_address, "/metrics", Authorization=given).status == 200
        told = json.loads(ask(guarded.http_address, "/status.json", Authorization=given).text)
        assert ask(guarded.http_address, "/status", Authorization=given).text.startswith("<!doctype html>")
        assert (told["reader"], told["whole"], bool(told["tiers"])) == ("watcher", True, True)
        assert {row["name"] for row in told["principals"]} == {*TOKENS, "owner"}
    assert "reasons" in ask(guarded.http_address, "/readyz", Authorization=bearer("watcher")).text
    url = f"grpc://{guarded.addresses[0]}?token_file={guarded.settings.directory}/watcher"
    found = runner.call("status", "-s", url, "-o", "json").document
    assert (found["objects"], found["status"]["whole"]) == (0, True), "without the right to count objects"


def test_a_tenant_reads_of_itself_only_even_with_the_verb_admin(guarded: StorageServer) -> None:
    given = bearer("acme")
    refused = ask(guarded.http_address, "/metrics", Authorization=given)
    assert (refused.status, refused.text.count("\n")) == (403, 1)
    text = ask(guarded.http_address, "/status.json", Authorization=given).text
    told = json.loads(text)
    assert [row["name"] for row in told["principals"]] == ["acme"]
    assert {name: told[name] for name in ("store", "lookups", "history", "whole")} == {
        "store": None, "lookups": None, "history": None, "whole": False,
    }  # fmt: skip
    assert told["tiers"] == told["limits"] == told["journal"] == []
    assert not any(word in text for word in ("rival", "watcher", *TOKENS.values()))
    assert ask(guarded.http_address, "/readyz", Authorization=given).text == '{"ready": true}'
    with open_backend(f"grpc://{guarded.addresses[0]}?token_file={guarded.settings.directory}/acme") as store:
        assert store.status().keys() == told.keys()  # type: ignore[attr-defined]
        assert not any(store.status()[name] for name in ("store", "tiers", "journal", "whole"))  # type: ignore[attr-defined]


def test_a_public_port_answers_everyone_and_still_knows_tenants(tmp_path: Path) -> None:
    principals = [{"name": "acme", "token_file": secret(tmp_path / "acme", TOKENS["acme"]), "tenant": "acme"}]
    tenants = {"acme": {"salt_file": secret(tmp_path / "salt", "s" * 40)}}
    http = {"listen": "127.0.0.1:0", "public": True}
    with serving(tmp_path, principals=principals, tenants=tenants, http=http) as node:
        here = node.http_address
        assert ask(here, "/metrics").status == 200
        assert json.loads(ask(here, "/status.json").text)["whole"] is True
        assert ask(here, "/status.json", Authorization="Bearer wrong").status == 401
        own = ask(here, "/status.json", Authorization=f"Bearer {TOKENS['acme']}")
        assert json.loads(own.text)["whole"] is False


# -- hostile clients


def test_nonsense_is_refused(node: StorageServer, caplog: pytest.LogCaptureFixture) -> None:
    here = node.http_address
    for nonsense in (
        b"\x16\x03\x01\r\n\r\n", b"GET /metrics\r\n\r\n", b"GET /metrics SMTP/1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ):  # fmt: skip
        assert say(here, nonsense).split()[1] in (b"400", b"421")
    assert say(here, b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 421")
    assert ask(here, "/healthz").status == 200
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


@contextmanager
def port(**settings: Any) -> Iterator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="x" * settings.get("nbytes", 1))

    app = web.Application()
    app.router.add_get("/", answer)
    before = threading.enumerate()
    made = HttpPort("127.0.0.1", 0, app, seconds=settings.get("seconds", 5.0))
    try:
        yield f"127.0.0.1:{made.port}"
    finally:
        made.close()
        made.close()
    # The daemon beside it may take another thread for its own work at any moment.
    grown = {*threading.enumerate()} - {*before}
    assert [thread for thread in grown if not thread.name.startswith("asyncio_")] == []


def connect(ends: ExitStack, address: str) -> socket.socket:
    return ends.enter_context(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 30))


def is_open(sock: socket.socket) -> bool:
    """Whether the other side has not cut this connection, on which nothing was sent to us."""
    sock.setblocking(False)
    try:
        sock.recv(1)
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
    finally:
        sock.settimeout(30)
    return False


def test_silent_clients_make_room_for_others_and_are_cut() -> None:
    with ExitStack() as ends:
        here = ends.enter_context(port(seconds=1.0))
        silent = [connect(ends, here) for _ in range(100)]
        for sock in silent[50:]:
            with suppress(OSError):  # some had to go already
                sock.sendall(b"GET / HT")
        before = threading.active_count()
        for _ in range(5):
            assert ask(here, "/").status == 200
        assert threading.active_count() == before
        assert sum(map(is_open, silent)) <= MAX_SERVED[False]
        for sock in silent:
            with suppress(ConnectionResetError):
                assert sock.recv(10) == b""
        assert ask(here, "/").status == 200


def test_clients_that_drip_or_do_not_read_are_cut_in_time() -> None:
    with ExitStack() as ends:
        here = ends.enter_context(port(seconds=0.5, nbytes=64 << 20))
        dripping, reading_nothing = connect(ends, here), connect(ends, here)
        reading_nothing.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        dripping.sendall(b"GET / HTTP/1.1\r\nX: ")
        with pytest.raises(OSError):  # noqa: PT012
            while True:
                dripping.sendall(b"x")
                time.sleep(0.05)
        got = 0
        with suppress(OSError):
            while part := reading_nothing.recv(1 << 20):
                got += len(part)
        assert got < 64 << 20


def test_a_flood_of_requests_is_answered_from_one_rendering(node, monkeypatch):
    made: list[None] = []
    monkeypatch.setattr(routes, "generate_latest", lambda _: made.append(None) or b"x")
    start = time.monotonic()
    for _ in range(50):
        assert ask(node.http_address, "/metrics").status == 200
    assert 0 < len(made) <= 2 + (time.monotonic() - start) / routes.FRESH_SECONDS


def test_a_bug_is_one_sentence_for_the_reader_and_a_traceback_in_the_log(node, monkeypatch, caplog):
    monkeypatch.setattr(routes, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(routes, "generate_latest", lambda _: 1 / 0)
    answer = ask(node.http_address, "/metrics")
    assert (answer.status, answer.text.count("\n")) == (500, 1)
    assert "ZeroDivisionError" in caplog.text
    assert "ZeroDivisionError" not in answer.text


# -- where it listens


def test_it_serves_ipv6(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(tmp_path, http={"listen": "[::1]:0"}) as node:
        assert ask(node.http_address, "/healthz").status == 200


def test_a_daemon_that_drains_is_alive_and_not_ready(tmp_path: Path) -> None:
    go_on, begun = threading.Event(), threading.Event()

    slow = Late(MemoryBackend(), {"exists"}, lambda: begun.set() or go_on.wait(60))
    with serving(tmp_path, slow, listen=["127.0.0.1:0"], drain=60) as node:
        with grpc.insecure_channel(node.addresses[0]) as channel:
            method = METHODS["Exists"]
            asked = channel.unary_unary(method.path).future(
                pb.ExistsRequest(keys=messages.keys([key(1)])).SerializeToString(), timeout=50
            )
            assert begun.wait(30)
            stopping = threading.Thread(target=node.stop)
            stopping.start()
            until(lambda: ask(node.http_address, "/readyz").status == 503)
            assert json.loads(ask(node.http_address, "/readyz").text)["reasons"] == ["the daemon shuts down"]
            assert ask(node.http_address, "/healthz").status == 200
            told = json.loads(ask(node.http_address, "/status.json").text)
            assert told["journal"][0]["text"] == "the daemon shuts down"
            go_on.set()
            assert asked.result(30), "the call under way has ended well"
        stopping.join(30)
        with pytest.raises(OSError):
            ask(node.http_address, "/healthz")


@pytest.mark.slow
def test_without_the_extra_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['aiohttp'] = None; from tiercache.cli.app import main; main()"
    words = ["serve", "-d", str(tmp_path), "--disk-bytes", "16MiB", "--http", "127.0.0.1:0"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (
        "http.listen needs aiohttp, which is not installed: pip install 'tiercache-hybrid[http]'"
        in done.stderr
    )
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [], "it is said before the store is opened"


def test_a_daemon_with_a_tier_out_is_degraded_and_takes_calls(tmp_path: Path) -> None:
    """Test that probes let a daemon with a tier out stay in, and that operators read which tier it is."""
    chain = open_backend(["memory://?capacity=16MiB&tier_name=ram", "grpc://127.0.0.1:1?tier_name=far"])
    more = {"listen": ["127.0.0.1:0"], "unix": False}
    with serving(tmp_path, chain, **more) as node, grpc.insecure_channel(node.addresses[0]) as channel:
        until(lambda: "degraded" in ask(node.http_address, "/readyz").text)
        ready = ask(node.http_address, "/readyz")
        assert ready.status == 200
        found = json.loads(ready.text)
        assert (found["ready"], found["state"]) == (True, "degraded")
        assert found["reasons"][0].startswith("tier far is out: ")
        assert json.loads(ask(node.http_address, "/status.json").text)["readiness"] == found
        health = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30)
        assert health == b"\x08\x01", "SERVING"
        told = runner.call("status", "-s", f"grpc://{node.addresses[0]}").out
        assert "degraded: tier far is out" in " ".join(told.split())
