"""Access over real sockets: verbs, namespaces, tenants, tokens; the hidden is answered like a miss."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from tiercache_backends.memory import MemoryBackend

from tests.daemon import web
from tests.daemon.hosts import (
    NAMESPACE,
    Client,
    Daemon,
    Worker,
    get_request,
    key,
    secret,
    serving,
    set_messages,
)
from tests.storage_backends.grpc.nodes import issue
from tiercache.config.models import Settings
from tiercache.core import ObjectKey
from tiercache.daemon import StorageServer
from tiercache.daemon.tenants.store import NameCipher
from tiercache.wire import messages
from tiercache.wire.methods import METHODS
from tiercache.wire.v1 import attach_pb2
from tiercache.wire.v1 import storage_pb2 as pb

OTHER = b"o" * 32
LENGTH = 5000


class Principal(NamedTuple):
    """A row of the matrix."""

    verbs: str
    tenant: str = ""
    namespaces: tuple[bytes, ...] = ()


PRINCIPALS = {
    "reader": Principal("read"), "writer": Principal("write"), "both": Principal("read write"),
    "keeper": Principal("admin"), "chief": Principal("read write admin"),
    "fenced": Principal("read write", namespaces=(NAMESPACE,)),
    "outside": Principal("read write", namespaces=(OTHER,)), "red": Principal("read write", "red"),
    "redder": Principal("read write admin", "red"), "blue": Principal("read write admin", "blue"),
    "warden": Principal("read write admin", namespaces=(NAMESPACE,)),
    "narrow": Principal("read write", "red", (OTHER,)),
    "shown": Principal("read write", "red", (NameCipher(b"red" * 20).mark(OTHER),)),
}  # fmt: skip
VERBS = {name: method.verb for name, method in METHODS.items()}
OPEN = {"GetInto", "SetFrom"}
"""Only on the unix sockets; over TCP they are refused whoever calls, after the verb was looked at."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("x")
    body = (
        f'directory = "{directory}"\ndisk_bytes = "512MiB"\nhost_bytes = "48MiB"\nlisten = ["127.0.0.1:0"]\n'
    )
    for tenant in ("red", "blue"):
        body += f'[tenants.{tenant}]\nsalt_file = "{secret(directory / f"{tenant}.salt", tenant * 20)}"\n'
    for name, principal in PRINCIPALS.items():
        spaces = [namespace.hex() for namespace in principal.namespaces] or ["*"]
        body += f'[[principals]]\nname = "{name}"\ntoken_file = "{secret(directory / name, token(name))}"\n'
        body += f'verbs = {principal.verbs.split()}\ntenant = "{principal.tenant}"\nnamespaces = {spaces}\n'
    with serving(directory, body.replace("'", '"')) as daemon:
        yield daemon


def token(name: str) -> str:
    return f"{name}-".ljust(32, "t")


def known(daemon: Daemon, name: str, credentials: grpc.ChannelCredentials | None = None) -> Client:
    bearer = [("authorization", f"Bearer {token(name)}")]
    return Client(f"127.0.0.1:{daemon.ports[0]}", bearer, credentials)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Any]:
    made: list[Client] = []

    def by(name: str) -> Client:
        made.append(known(daemon, name))
        return made[-1]

    yield by
    for one in made:
        one.close()


def ask(client: Client, method: str, k: ObjectKey, namespace: bytes = NAMESPACE) -> list[bytes]:
    """The raw answer to a sound request of a method for one key."""
    requests = {
        "Get": get_request({k: LENGTH}),
        "Set": next(set_messages({k: bytes(LENGTH)}, namespace)),
        "Register": (
            pb.RegisterRequest(
                namespace=pb.Namespace(namespace=namespace, texts={"model": "m", "tenant": "mine"})
            ).SerializeToString()
        ),
        "Scan": pb.ScanRequest(namespace=namespace).SerializeToString(),
        "Advise": pb.AdviseRequest(keys=messages.keys([k]), values=[1.0]).SerializeToString(),
    }
    keyed = {"Exists": pb.ExistsRequest, "Delete": pb.DeleteRequest, "Describe": pb.DescribeRequest}
    if method == "History":
        history = pb.HistoryRequest(keys=messages.keys([k]), pages=k.page_key).SerializeToString()
        return list(client.stream(method, iter([history])))
    data = requests.get(method) or (
        keyed[method](keys=messages.keys([k])).SerializeToString() if method in keyed else b""
    )
    return list(client.stream(method, iter([data])))


@pytest.mark.parametrize("name", PRINCIPALS)
def test_every_verb_is_asked_for(client: Any, name: str) -> None:
    principal = PRINCIPALS[name]
    caller = client(name)
    hello, verbs = caller.call("Hello", b""), sorted(principal.verbs.split())
    assert (hello.principal, hello.tenant, sorted(hello.verbs)) == (name, principal.tenant, verbs)
    for method, verb in VERBS.items():
        if (
            method == "Usage"
            and "admin" not in principal.verbs
            and (principal.tenant or principal.namespaces or "read" in principal.verbs)
        ):
            assert caller.refused(method) is grpc.StatusCode.PERMISSION_DENIED  # the totals of all
        elif verb is not None and verb not in principal.verbs.split():
            assert caller.refused(method) is grpc.StatusCode.PERMISSION_DENIED
        elif method == "Report" and principal.namespaces:
            assert caller.refused(method) is grpc.StatusCode.PERMISSION_DENIED  # it counts by tenant
        elif method == "Reload" and (principal.tenant or principal.namespaces):
            assert caller.refused(method) is grpc.StatusCode.PERMISSION_DENIED  # for operators of the daemon
        elif method in OPEN:
            assert caller.refused(method) in (
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.INVALID_ARGUMENT,
            )
        elif method == "Register" and principal.namespaces and NAMESPACE not in principal.namespaces:
            with pytest.raises(grpc.RpcError) as info:
                ask(caller, method, key(1))
            assert info.value.code() is grpc.StatusCode.PERMISSION_DENIED
        else:
            ask(caller, method, key(99, "verbs"))


METHODS_OF_ONE_KEY = ("Exists", "Get", "Describe", "History", "Delete")


def answers(caller: Client, k: ObjectKey, *, admin: bool) -> list[list[bytes]]:
    return [ask(caller, method, k) for method in METHODS_OF_ONE_KEY if admin or method != "Delete"]


@pytest.mark.parametrize(
    ("owner", "stranger"),
    [
        ("red", "blue"), ("blue", "red"), ("red", "both"), ("both", "red"), ("both", "outside"),
        ("red", "narrow"),
    ],
)  # fmt: skip
def test_what_is_foreign_answers_like_a_miss_to_the_byte(client: Any, owner: str, stranger: str) -> None:
    mine, other = client(owner), client(stranger)
    k, absent = key(1, f"{owner}-{stranger}"), key(2, f"{owner}-{stranger}")
    ask(mine, "Register", k)
    assert mine.set({k: os.urandom(LENGTH)}) == [pb.OUTCOME_STORED]
    admin = "admin" in PRINCIPALS[stranger].verbs
    assert answers(other, k, admin=admin) == answers(other, absent, admin=admin)
    assert other.exists([k]) == [False]
    assert other.get({k: LENGTH}) == [None]
    assert mine.exists([k]) == [True]
    # A wrong length is no way to ask either.
    assert list(other.stream("Get", iter([get_request({k: 7})]))) == list(
        other.stream("Get", iter([get_request({absent: 7})]))
    )


def scanned(caller: Client, namespace: bytes | None = None) -> set[ObjectKey]:
    found: set[ObjectKey] = set()
    cursor = b""
    while True:
        page = caller.call("Scan", pb.ScanRequest(namespace=namespace, cursor=cursor))
        found |= set(messages.read_keys(page.keys, 1 << 20))
        cursor = page.cursor
        if not cursor:
            return found


def test_a_scan_tells_nothing_of_others(client: Any) -> None:
    """Neither by its entries nor by the number of empty pages nor by its cursor, in the store a key."""
    red, blue, both, outside, chief = (client(name) for name in ("red", "blue", "both", "outside", "chief"))
    before = ask(outside, "Scan", key(1), OTHER)
    mine = {key(n, "scan-red"): b"r" * 64 for n in range(2100)}
    assert set(red.set(dict(list(mine.items())[:1050]))) | set(red.set(dict(list(mine.items())[1050:]))) == {
        pb.OUTCOME_STORED
    }
    own = {key(n, "scan-blue"): b"b" * 64 for n in range(3)}
    blue.set(own)
    shared = {key(n, "scan-all"): b"a" * 64 for n in range(3)}
    both.set(shared)
    assert len(set(mine) - scanned(red)) == 0, (
        len(scanned(red)),
        len(scanned(chief)),
        sum(red.exists(list(mine))),
    )
    assert set(own) <= scanned(blue)
    assert not (scanned(blue) | scanned(both) | scanned(outside)) & set(mine)
    assert set(shared) <= scanned(both)
    page = blue.call("Scan", pb.ScanRequest())
    assert not page.cursor, "a small tenant's scan is one page, whatever others store"
    assert ask(outside, "Scan", key(1), OTHER) == before
    # The cursor of a page is not a name of anything that the store holds.
    first = red.call("Scan", pb.ScanRequest())
    everything = scanned(chief)
    assert first.cursor
    assert first.cursor not in {k.digest for k in everything}
    hidden = [k for k in everything if k not in shared][:500]
    assert not any(client("red").exists(hidden))


def test_two_tenants_never_meet_and_two_principals_of_one_share(client: Any) -> None:
    red, redder, blue = client("red"), client("redder"), client("blue")
    k = key(1, "meet")
    assert red.set({k: b"r" * LENGTH}) == [pb.OUTCOME_STORED]
    assert blue.set({k: b"b" * LENGTH}) == [pb.OUTCOME_STORED], "the same key and namespace, another object"
    assert (red.get({k: LENGTH}), blue.get({k: LENGTH})) == ([b"r" * LENGTH], [b"b" * LENGTH])
    assert redder.get({k: LENGTH}) == [b"r" * LENGTH]
    assert redder.set({k: b"x" * LENGTH}) == [pb.OUTCOME_HIT]
    blue.delete([k])
    assert (red.exists([k]), blue.exists([k])) == ([True], [False])


def test_what_is_outside_a_fence_cannot_be_stored_or_overwritten(client: Any) -> None:
    both, outside = client("both"), client("outside")
    k = key(1, "fence")
    assert both.set({k: b"1" * LENGTH}) == [pb.OUTCOME_STORED]
    assert outside.set({k: b"2" * LENGTH}, OTHER) == [pb.OUTCOME_ERROR]
    assert outside.set({key(2, "fence"): b"2" * LENGTH}, NAMESPACE) == [pb.OUTCOME_ERROR]
    assert both.get({k: LENGTH, key(2, "fence"): LENGTH}) == [b"1" * LENGTH, None]


def test_the_operators_label_wins_and_names_on_disk_are_not_the_tenants(client: Any, daemon: Daemon) -> None:
    red, both, chief = client("red"), client("both"), client("chief")
    marker = ObjectKey(key(1).pool, b"L" * 32 + b"a page key of the red tenant 321")
    red.set({marker: b"p" * LENGTH})
    ask(red, "Register", marker)
    [mine] = [record for record in red.call("Namespaces", b"").namespaces if record.namespace == NAMESPACE]
    assert mine.texts["tenant"] == "red"
    assert not any(record.texts.get("tenant") == "red" for record in both.call("Namespaces", b"").namespaces)
    assert "red" in {record.texts.get("tenant") for record in chief.call("Namespaces", b"").namespaces}
    marked = next(
        r.namespace for r in chief.call("Namespaces", b"").namespaces if r.texts.get("tenant") == "red"
    )
    ask(both, "Register", marker, marked)  # somebody who knew the name could not take it over
    assert marked not in {record.namespace for record in both.call("Namespaces", b"").namespaces}
    assert "red" in {record.texts.get("tenant") for record in chief.call("Namespaces", b"").namespaces}
    chief.call("Flush", b"")
    data = b"".join(path.read_bytes() for path in (daemon.directory / "store").rglob("*") if path.is_file())
    assert b"a page key of the red tenant" not in data


AS_NOBODY = """
import os, socket, sys
os.chdir(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect("attach.sock")
print(sock.recv(4096).hex())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_gets_no_session(daemon: Daemon) -> None:
    """Even where he can reach the socket."""
    run = daemon.directory / "run"
    command = [sys.executable, "-c", AS_NOBODY, str(run)]
    shut = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "PermissionError" in shut.stderr
    try:
        run.chmod(0o711)
        (run / "attach.sock").chmod(0o666)
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        run.chmod(0o700)
        (run / "attach.sock").chmod(0o600)
    session = attach_pb2.Session.FromString(bytes.fromhex(answer))
    assert not session.token
    assert "65534" in session.refusal


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, and what they signed: the daemon's, workers', one that has expired."""
    directory = tmp_path_factory.mktemp("tls")
    issue(directory, "server", san="DNS:localhost")
    issue(directory, "worker", san="DNS:worker.example")
    issue(directory, "unknown", san="DNS:unknown.example")
    issue(directory, "impostor", san="DNS:worker.example", ca="evil")
    issue(directory, "expired", san="DNS:worker.example", days=-1)
    return directory


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("t")
    body = f"""
directory = "{directory}"
storage = "memory://?capacity=8MiB"
host_bytes = "48MiB"
listen = ["127.0.0.1:0"]
[http]
listen = "127.0.0.1:0"
[tls]
certificate = "{certificates}/server.pem"
key = "{certificates}/server.key"
client_ca = "{certificates}/ca.pem"
[[principals]]
name = "worker"
san = "worker.example"
verbs = ["read"]
[[principals]]
name = "bearer"
token_file = "{secret(directory / "bearer", token("bearer"))}"
"""
    with serving(directory, body) as daemon:
        yield daemon


def credentials(certificates: Path, name: str | None) -> grpc.ChannelCredentials:
    ca = (certificates / "ca.pem").read_bytes()
    if name is None:
        return grpc.ssl_channel_credentials(ca)
    return grpc.ssl_channel_credentials(
        ca, (certificates / f"{name}.key").read_bytes(), (certificates / f"{name}.pem").read_bytes()
    )


@pytest.mark.parametrize("name", [None, "impostor", "expired", "unknown"])
def test_certificates_that_are_none(tls: Daemon, certificates: Path, name: str | None) -> None:
    with Client(f"127.0.0.1:{tls.ports[0]}", credentials=credentials(certificates, name)) as caller:
        for method in ("Hello", "Exists", "Get", "Usage"):
            expected = grpc.StatusCode.UNAUTHENTICATED if name == "unknown" else grpc.StatusCode.UNAVAILABLE
            assert caller.refused(method, timeout=30) is expected


def test_certificates_tell_who_calls(tls: Daemon, certificates: Path) -> None:
    with Client(f"127.0.0.1:{tls.ports[0]}", credentials=credentials(certificates, "worker")) as caller:
        assert caller.call("Hello", b"").principal == "worker"
        assert caller.refused("Delete") is grpc.StatusCode.PERMISSION_DENIED
    with known(tls, "bearer", credentials(certificates, "unknown")) as caller:
        assert caller.call("Hello", b"").principal == "bearer"


def test_certificates_and_tokens_of_the_http_port(tls: Daemon, certificates: Path) -> None:
    [address] = re.findall(r"status on https://(\S+)/status", tls.log.read_text())

    def asked(path: str, name: str | None, **headers: str) -> web.Answer:
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        context.check_hostname = False
        if name is not None:
            context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
        return web.ask(address, path, context=context, **headers)

    assert asked("/healthz", None).status == 200
    for name in (None, "unknown"):
        assert asked("/status.json", name).status == 401
        assert (
            asked("/status.json", name, Authorization=f"Bearer {token('bearer')}").text.count('"bearer"') > 1
        )
    assert json.loads(asked("/status.json", "worker").text)["reader"] == "worker"
    for name in ("impostor", "expired"):
        with pytest.raises(OSError):
            asked("/healthz", name)
    with pytest.raises(OSError):
        web.ask(address, "/healthz")


def test_the_http_port_wants_a_certificate_where_nothing_else_is_a_credential(certificates, tmp_path):
    tls = {name: certificates / file for name, file in
           (("certificate", "server.pem"), ("key", "server.key"), ("client_ca", "ca.pem"))}  # fmt: skip
    given = {"directory": tmp_path, "host_bytes": "48MiB", "tls": tls, "http": {"listen": "127.0.0.1:0"}}
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    context.check_hostname = False
    with StorageServer(Settings(**given).check(), MemoryBackend()) as node, ExitStack() as ends:  # type: ignore[arg-type]
        for _ in range(40):  # each is in the middle of a handshake
            host, _, port = node.http_address.rpartition(":")
            ends.enter_context(socket.create_connection((host, int(port)), 30))
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/status.json", 401), ("/metrics", 401)):
            assert web.ask(node.http_address, path, context=context).status == status
        context.load_cert_chain(certificates / "unknown.pem", certificates / "unknown.key")
        assert web.ask(node.http_address, "/metrics", context=context).status == 200


def test_without_tls_nobody_is_heard(tls: Daemon) -> None:
    with known(tls, "bearer") as caller:
        assert caller.refused("Hello", timeout=3) in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )


def test_get_into_answers_like_a_miss_too(daemon: Daemon, client: Any) -> None:
    """The owner has no tenant: a tenant's names mean nothing to it either."""
    from tests.daemon.test_attach import Region, into

    k, absent = key(1, "into"), key(2, "into")
    client("red").set({k: bytes(1 << 20)})
    with Worker(daemon) as worker, Region(1 << 20) as region:
        assert worker.attach(region.fd, region.nbytes).region == 1
        assert (
            into(worker, region, 1, {k: b""}) == into(worker, region, 1, {absent: b""}) == [pb.OUTCOME_MISS]
        )
    [reply] = ask(client("red"), "Get", absent)
    assert not pb.GetReply.FromString(reply).payload


def test_a_namespace_may_be_named_as_the_operator_is_shown_it(client: Any) -> None:
    """With the tenant's mark; the principal itself uses the tenant's own name."""
    k = key(1, "shown")
    assert client("shown").set({k: bytes(LENGTH)}, namespace=OTHER) == [pb.OUTCOME_STORED]
    assert client("narrow").exists([k]) == [True]
    assert client("shown").set({key(2, "shown"): bytes(LENGTH)}, namespace=NAMESPACE) == [pb.OUTCOME_ERROR]


def test_who_calls_without_a_name_sees_no_tenants_objects(tmp_path: Path) -> None:
    """A loopback address without tokens serves every user, and shows no tenants known by their uid."""
    body = f"""
directory = "{tmp_path}"
storage = "memory://?capacity=8MiB"
listen = ["127.0.0.1:0"]
[tenants.red]
salt_file = "{secret(tmp_path / "salt", "red" * 20)}"
[[principals]]
name = "red"
uid = {os.getuid()}
tenant = "red"
"""
    with (
        serving(tmp_path, body) as daemon,
        Worker(daemon) as red,
        Client(f"127.0.0.1:{daemon.ports[0]}") as anybody,
    ):
        red.set({key(n): b"r" * 64 for n in range(5)})
        ask(red, "Register", key(1))
        assert anybody.call("Hello", b"").principal == "anonymous"
        assert (scanned(anybody), list(anybody.call("Namespaces", b"").namespaces)) == (set(), [])
        assert anybody.exists([key(n) for n in range(5)]) == [False] * 5
        assert anybody.refused("Usage") is grpc.StatusCode.PERMISSION_DENIED
        assert anybody.set({key(1): b"a" * 64}) == [pb.OUTCOME_STORED]
        assert red.get({key(1): 64}) == [b"r" * 64]
        assert len(scanned(red)) == 5
