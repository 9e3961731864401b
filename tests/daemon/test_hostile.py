"""Clients that mean harm, against a daemon process: they get a refusal without content, and nobody else
notices much.

Every attack runs beside a client that keeps to the protocol. While it lasts, and after it: the daemon lives,
that client is served within seconds, the memory that clients can make the daemon hold stays within its idle
figure and 1.1 times host_bytes (see `hosts.figures` for what is counted), and memory, descriptors and threads
come back to what they were.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest

from tests.daemon.attacks import at_once, attack, rest
from tests.daemon.hosts import (
    HOST_BYTES,
    MIB,
    TOKENS,
    Client,
    Daemon,
    Good,
    Http2,
    Worker,
    attach_socket,
    clients,
    key,
    serving,
    set_messages,
    status,
    until,
    with_mallory,
)
from tests.examples import slow_after
from tiercache.core import ObjectMeta, Verb
from tiercache.wire import messages
from tiercache.wire.methods import METHODS, SERVICE
from tiercache.wire.v1 import storage_pb2 as pb

IDLE = 0.5
WATCH = "/grpc.health.v1.Health/Watch"
KEYS = 512
MESSAGE = 2 * MIB
BIG = {key(n, "big"): MIB for n in range(6)}

LIMITS = """
[limits]
idle = "1s"
call = "3s"
clients = 64
keys_per_batch = 512
message_bytes = "2MiB"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Its store is full, so that the objects that attackers store take no more than was there before."""
    directory = tmp_path_factory.mktemp("d")
    with serving(directory, with_mallory(directory, LIMITS)) as daemon:
        with Worker(daemon) as client:
            client.set({k: os.urandom(size) for k, size in BIG.items()})
            client.set({key(n, "fill"): os.urandom(64 << 10) for n in range(32)})
            with ThreadPoolExecutor(24) as pool:  # every thread that there will be
                list(pool.map(lambda _: client.get(dict.fromkeys(BIG, MIB)), range(48)))
        rest(daemon)
        yield daemon


@pytest.fixture
def mallory(daemon: Daemon) -> Callable[[], Client]:
    """Clients of a principal who may read and write, and no more."""
    return lambda: Client(f"127.0.0.1:{daemon.ports[0]}", [("authorization", f"Bearer {TOKENS['mallory']}")])


BEARER = {"authorization": f"Bearer {TOKENS['mallory']}"}


def tcp(daemon: Daemon) -> socket.socket:
    return socket.create_connection(("127.0.0.1", daemon.ports[0]), timeout=10)


@pytest.fixture
def attacked(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Good]:
    with attack(daemon, request) as good:
        yield good


@pytest.mark.usefixtures("attacked")
class TestWhoDoesNotMoveOn:
    """Reads nothing, or sends next to nothing."""

    def test_readers_that_do_not_read_are_cut(self, mallory: Callable[[], Client]) -> None:
        wanted = pb.GetRequest(
            keys=messages.keys([key(n % 6, "big") for n in range(48)]), lengths=[MIB] * 48
        ).SerializeToString()
        with clients(6, mallory) as hostile:
            calls = [client.stream("Get", iter([wanted]), 3) for client in hostile for _ in range(8)]
            # past their deadline: who waited for a place until now would be served if we read
            time.sleep(max(2.5 * IDLE, 3.5))
            ends = []
            for call in calls:
                with pytest.raises(grpc.RpcError) as info:
                    list(call)
                ends.append(info.value.code())
        assert set(ends) == {grpc.StatusCode.DEADLINE_EXCEEDED}

    def test_senders_of_one_byte_a_second_are_cut(self, daemon: Daemon) -> None:
        methods = {stream: ("Set", "Exists", "Hello")[stream // 2 % 3] for stream in range(1, 33, 2)}
        with ExitStack() as stack:
            conns = [Http2(stack.enter_context(tcp(daemon))) for _ in range(8)]
            for conn in conns:
                for stream, method in methods.items():
                    conn.open(stream, METHODS[method].path, BEARER)
                    conn.data(stream, b"\0" + MIB.to_bytes(4))
            for _ in range(5):
                for conn in conns:
                    for stream in methods:
                        with suppress(OSError):
                            conn.data(stream, b"x")
                time.sleep(IDLE)
            cut = [received(conn.sock).count(b"limits.idle") for conn in conns]
        assert sum(cut) > 0, cut  # those that had their turn; the others hold nothing while they wait

    def test_messages_that_never_end_hold_no_more_than_their_share(self, daemon: Daemon) -> None:
        """Two MiB, but for the last byte, in as many streams as there may be."""
        with ExitStack() as stack:
            conns = [Http2(stack.enter_context(tcp(daemon))) for _ in range(8)]

            def send(number: int) -> None:
                conn = conns[number]
                with suppress(OSError):
                    conn.sock.settimeout(0.3)
                    for stream in range(1, 33, 2):
                        conn.open(stream, METHODS["Set" if stream % 4 == 1 else "Describe"].path, BEARER)
                        conn.data(stream, b"\0" + (MESSAGE - 16).to_bytes(4))
                    for _ in range((MESSAGE >> 14) - 1):
                        for stream in range(1, 33, 2):
                            conn.data(stream, bytes(16 << 10))

            at_once(8, send)
            time.sleep(1.5 * IDLE)


def received(sock: socket.socket) -> bytes:
    """Read all bytes that the other end has sent so far."""
    sock.settimeout(0.1)
    data = b""
    with suppress(OSError):
        while piece := sock.recv(1 << 20):
            data += piece
    return data


class TestSilence:
    """Connections that say nothing."""

    def test_a_thousand_unix_connections(self, daemon: Daemon, attacked: Good) -> None:
        refused: set[socket.socket] = set()
        with ExitStack() as stack:
            kept = [stack.enter_context(attach_socket(daemon)) for _ in range(1000)]

            def are_refused() -> bool:
                for sock in set(kept) - refused:
                    sock.setblocking(False)
                    with suppress(OSError):
                        if b"limits.clients" in sock.recv(4096):
                            refused.add(sock)
                return len(refused) > 900

            until(are_refused)
        until(lambda: _works(lambda: Worker(daemon)))

    def test_a_thousand_connections_to_the_grpc_socket(self, daemon: Daemon, attacked: Good) -> None:
        with ExitStack() as stack:
            for _ in range(1000):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.settimeout(0.2)
                with suppress(OSError):
                    sock.connect(str(daemon.directory / "run/grpc.sock"))
        until(lambda: _works(lambda: Worker(daemon)))


def _works(make: Callable[[], Client]) -> bool:
    try:
        with make() as client:
            client.call("Hello", b"", timeout=2)
    except (grpc.RpcError, OSError, AssertionError):
        return False
    return True


def keys_of(count: int, pools: int = 1) -> pb.Keys:
    return pb.Keys(digests=bytes(64 * count), pools=["kv"] * pools, pool_of=bytes(count))


def header(**columns: Any) -> bytes:
    return pb.SetRequest(header=pb.SetHeader(**columns)).SerializeToString()


ONE_OF_MANY = pb.SetHeader(keys=keys_of(1), metas=[pb.ObjectMeta(namespace=b"n" * 64, length=4 * MIB)])
META = messages.meta(ObjectMeta(b"n", 1, b"", None, None))
LIES = {
    "Get": [
        pb.GetRequest(keys=keys_of(1), lengths=[2**64 - 1]),
        pb.GetRequest(keys=keys_of(1), lengths=[0]),
        pb.GetRequest(keys=keys_of(1), lengths=[2**40]),
        pb.GetRequest(keys=keys_of(KEYS + 1), lengths=[1] * (KEYS + 1)),
        pb.GetRequest(keys=keys_of(0), lengths=[1] * 10_000),
        pb.GetRequest(keys=pb.Keys(digests=bytes(64), pools=[], pool_of=b"\xff"), lengths=[1]),
        pb.GetRequest(keys=pb.Keys(digests=bytes(64), pools=["nothing"], pool_of=b"\0"), lengths=[1]),
        b"\x12" + b"\xff\xff\xff\xff\x0f",
        b"\x12\xfa\xff\x7f" + bytes(2 * MIB - 100),
    ],
    "Exists": [pb.ExistsRequest(keys=pb.Keys(digests=bytes(63), pool_of=b"\0", pools=["kv"])),
     pb.ExistsRequest(keys=keys_of(20_000))],
    "Set": [
        header(keys=keys_of(1), metas=[META]), header(keys=keys_of(1), metas=[META, META]),
        header(keys=keys_of(1), metas=[pb.ObjectMeta(namespace=b"n", length=2**64 - 1)]),
        header(keys=keys_of(1), metas=[pb.ObjectMeta(namespace=b"n", length=0)]),
        header(keys=keys_of(1), metas=[pb.ObjectMeta(namespace=b"n", length=HOST_BYTES)]),
        header(keys=keys_of(KEYS + 1), metas=[META] * (KEYS + 1)), header(metas=[META] * 10_000),
        pb.SetRequest(payload=b"x"),
        pb.SetRequest(header=pb.SetHeader(keys=keys_of(1), metas=[META]), payload=b"xy"),
        b"\x0a\xfe\xff\x7f" + b"\x12\0" * (MIB - 16), b"\x1a\0" * (MIB - 16), b"\x0a" + b"\xff" * 9 + b"\x01",
    ],
    "SetFrom": [b"\x12\0" * (MIB - 16), pb.SetFromRequest(keys=keys_of(2), metas=[META])],
    "GetInto": [
        pb.GetIntoRequest(keys=keys_of(1), lengths=[1], places=pb.Places(counts=[2**32 - 1])),
        pb.GetIntoRequest(keys=keys_of(1), lengths=[1],
         places=pb.Places(counts=[9**5], regions=[1] * 9**5, offsets=[0], sizes=[1] * 9**5)),
    ],
    "Advise": [
        pb.AdviseRequest(keys=keys_of(2), values=[1.0]),
        pb.AdviseRequest(keys=keys_of(1), values=[1.0] * 9**5),
        pb.AdviseRequest(keys=pb.Keys(digests=bytes(64), pools=["kv"])),
        b"\x12\xff\xff\xff\x7f",
    ],
    "Register": [
        pb.RegisterRequest(),
        pb.RegisterRequest(namespace=pb.Namespace(namespace=bytes(65))),
        pb.RegisterRequest(namespace=pb.Namespace(namespace=b"nn", texts={str(n): "" for n in range(65)})),
        pb.RegisterRequest(namespace=pb.Namespace(namespace=b"nn", texts={"a": "b" * 5000})),
        pb.RegisterRequest(namespace=pb.Namespace(namespace=b"nn",
          texts={str(n): "" for n in range(200_000)})),
    ],
}  # fmt: skip


def raw(request: Any) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


@pytest.mark.usefixtures("attacked")
class TestLies:
    """Messages that promise what is not there, or mean nothing."""

    def test_every_lie_is_refused(self, daemon: Daemon) -> None:
        with Worker(daemon) as client:
            for name, requests in LIES.items():
                for number, request in enumerate(requests):
                    code = client.refused(name, raw(request))
                    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), (
                        name,
                        number,
                        code,
                    )

    def test_no_message_above_the_limit(self, mallory: Callable[[], Client]) -> None:
        with mallory() as client:
            for name, method in METHODS.items():
                if method.verb is not Verb.ADMIN:
                    assert client.refused(name, bytes(3 * MIB)) in (
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        grpc.StatusCode.INVALID_ARGUMENT,
                    )


@pytest.mark.usefixtures("attacked")
class TestAmplification:
    """Little on the wire, much in memory."""

    def test_one_byte_objects_by_the_thousand(self, mallory: Callable[[], Client]) -> None:
        tiny = [list(set_messages({key(n, f"t{who}-"): b"x" for n in range(KEYS)})) for who in range(8)]
        with clients(4, mallory) as hostile:
            at_once(
                16, lambda n: [list(hostile[n % 4].stream("Set", iter(tiny[n % 8]), 20)) for _ in range(3)]
            )

    def test_objects_that_are_begun_and_never_finished(self, mallory: Callable[[], Client]) -> None:
        """Each is charged for its whole length: few are under way; the first message brings much beside."""
        whole = pb.SetRequest(header=ONE_OF_MANY, payload=b"x").SerializeToString()
        begun = whole + b"\x1a\xa0\x8d\x06" + bytes(100_000)

        def requests() -> Iterator[bytes]:
            yield begun
            time.sleep(3 * IDLE)

        with clients(4, mallory) as hostile:
            codes = at_once(32, lambda n: status(hostile[n % 4].stream("Set", requests(), 2)))
        assert grpc.StatusCode.DEADLINE_EXCEEDED in codes

    def test_large_messages_of_few_bytes(self, mallory: Callable[[], Client]) -> None:
        """A two-MiB message that carries a few bytes of an object is not kept for their sake."""
        item = pb.SetHeader(keys=keys_of(1), metas=[pb.ObjectMeta(namespace=b"n", length=3)])
        more = pb.SetRequest(payload=b"x").SerializeToString()
        junk = b"\x1a" + bytes([0xF0, 0xFF, 0x7B]) + bytes(0x1EFFFF0)[: 0x7B << 14 | 0x3FF0]

        def requests() -> Iterator[bytes]:
            begun = pb.SetRequest(header=item, payload=b"x").SerializeToString()
            yield begun + junk[: MESSAGE - 400]
            yield more
            time.sleep(2 * IDLE)

        with clients(4, mallory) as hostile:
            at_once(16, lambda n: status(hostile[n % 4].stream("Set", requests(), 2)))

    def test_messages_of_one_byte(self, mallory: Callable[[], Client]) -> None:
        [whole] = set_messages({key(n, "p"): b"x" for n in range(KEYS)})
        header = pb.SetRequest.FromString(whole).header
        requests = [pb.SetRequest(header=header, payload=b"x").SerializeToString()]
        requests += [pb.SetRequest(payload=b"x").SerializeToString()] * (KEYS - 1)
        with clients(4, mallory) as hostile:

            def send(number: int) -> None:
                with suppress(grpc.RpcError):  # it may take longer than a call may
                    list(hostile[number % 4].stream("Set", iter(requests), 20))

            at_once(16, send)

    def test_registering_without_end(self, mallory: Callable[[], Client]) -> None:
        codes = []
        with mallory() as client:
            for n in range(700):
                record = pb.Namespace(namespace=n.to_bytes(4), texts={str(i): "x" * 100 for i in range(30)})
                try:
                    client.call("Register", pb.RegisterRequest(namespace=record))
                except grpc.RpcError as error:
                    codes.append(error.code())
            assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert len(client.call("Namespaces", b"").namespaces) < 700


@pytest.mark.usefixtures("attacked")
class TestCrowds:
    """Everything at once."""

    def test_more_calls_than_may_be(self, mallory: Callable[[], Client]) -> None:
        request = pb.ExistsRequest(keys=keys_of(KEYS)).SerializeToString()
        answered = 0
        with clients(8, mallory) as hostile:
            calls = [client.stream("Exists", iter([request]), 8) for client in hostile for _ in range(150)]
            for call in calls:
                try:
                    answered += len(list(call))
                except grpc.RpcError as error:
                    # A stream above the connection's limit is refused before it begins: a reset with
                    # REFUSED_STREAM, 7 (RFC 9113, 7).
                    stream_refused = (
                        error.code() is grpc.StatusCode.UNAVAILABLE and "error code 7" in error.details()
                    )
                    limited = error.code() in (
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                    )
                    assert limited or stream_refused, error  # noqa: PT017
        assert answered

    @pytest.mark.parametrize("method", slow_after(1, ["Get", "Exists", "Set"]))
    def test_calls_that_are_cancelled_at_once(self, mallory: Callable[[], Client], method: str) -> None:
        requests = {
            "Get": [
                pb.GetRequest(
                    keys=messages.keys([key(n % 6, "big") for n in range(48)]), lengths=[MIB] * 48
                ).SerializeToString()
            ],
            "Exists": [pb.ExistsRequest(keys=keys_of(KEYS)).SerializeToString()],
            "Set": list(set_messages({key(n, "c"): bytes(MIB // 2) for n in range(4)})),
        }[method]
        end = time.monotonic() + 1.5
        with clients(4, mallory) as hostile:

            def hit(number: int) -> None:
                while time.monotonic() < end:
                    call = hostile[number % 4].stream(method, iter(requests), 5)
                    time.sleep(0.001 * (number % 4))
                    call.cancel()

            at_once(8, hit)

    @pytest.mark.parametrize("method", ["Get", "Set"])
    def test_connections_that_vanish_in_the_middle(self, daemon: Daemon, method: str) -> None:
        whole = pb.GetRequest(
            keys=messages.keys([key(n % 6, "big") for n in range(24)]), lengths=[MIB] * 24
        ).SerializeToString()
        if method == "Set":
            whole = next(set_messages({key(0, "v"): bytes(MIB)}))
        for _ in range(40):
            with tcp(daemon) as sock:
                conn = Http2(sock)
                for stream in range(1, 17, 2):
                    conn.open(stream, METHODS[method].path, BEARER)
                    conn.data(stream, (b"\0" + len(whole).to_bytes(4) + whole)[: 8 << 10])
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST

    @pytest.mark.parametrize("flood", slow_after(2, ["rapid reset", "ping", "continuation"]))
    def test_floods_of_frames(self, daemon: Daemon, flood: str) -> None:
        """From a known client. Rapid reset, of streams without end, is CVE-2023-44487."""
        end = time.monotonic() + 1.0

        def hit(_: int) -> None:
            while time.monotonic() < end:
                with suppress(OSError), tcp(daemon) as sock:
                    conn = Http2(sock)
                    conn.open(1, METHODS["Set"].path, BEARER)
                    if flood == "continuation":
                        conn.frame(1, 0, 3, b"\x10\x01a\x01b")
                    for stream in range(3, 4001, 2):
                        if flood == "ping":
                            conn.frame(6, 0, 0, bytes(8))
                        elif flood == "continuation":
                            conn.frame(9, 0, 3, b"\x10\x01a\x7f\x00" + b"b" * 127)
                        else:
                            conn.open(stream, METHODS["Hello"].path, BEARER)
                            conn.frame(3, 0, stream, b"\0\0\0\x08")

        at_once(4, hit)


@pytest.mark.usefixtures("attacked")
class TestStrangers:
    """Whoever is not known learns nothing and holds nothing."""

    def test_nothing_is_told_to_strangers(self, daemon: Daemon) -> None:
        target = f"127.0.0.1:{daemon.ports[0]}"
        token = TOKENS["mallory"]
        wrong = (
            "Bearer wrong", token, "Basic x", f"Bearer {token[:-1]}", f"Bearer  {token}", f"bearer {token}",
        )  # fmt: skip
        for metadata in ([], *([("authorization", text)] for text in wrong)):
            with Client(target, metadata) as client:
                assert {client.refused(name) for name in METHODS} == {grpc.StatusCode.UNAUTHENTICATED}
                for path in (f"/{SERVICE}/Nothing", "/", "/x/y", f"/{SERVICE}/get", WATCH):
                    assert client.refused(path, b"") is grpc.StatusCode.UNIMPLEMENTED

    def test_health_checks_hold_nothing(self, daemon: Daemon) -> None:
        """A probe has no credentials: it is answered whatever it asks, and before it has asked."""
        with ExitStack() as stack:
            conns = [Http2(stack.enter_context(tcp(daemon))) for _ in range(16)]
            for conn in conns:
                with suppress(OSError):
                    conn.sock.settimeout(0.2)
                    for stream in range(1, 65, 2):
                        conn.open(stream, "/grpc.health.v1.Health/Check")
                        conn.data(stream, b"\0" + (MESSAGE - 1).to_bytes(4) + bytes(1000))
            with Client(f"127.0.0.1:{daemon.ports[0]}") as client:
                assert list(client.stream("/grpc.health.v1.Health/Check", iter([b""]), 5)) == [b"\x08\x01"]

    def test_a_call_needs_a_deadline_and_no_deadline_is_too_long(self, mallory: Callable[[], Client]) -> None:
        with mallory() as client:
            assert client.refused("Hello", b"", timeout=None) is grpc.StatusCode.INVALID_ARGUMENT
            assert client.call("Hello", b"", timeout=1e9).principal == "mallory"
            never = client.stream("Set", _slowly(), 1e9)
            started = time.monotonic()
            assert status(never) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert time.monotonic() - started < 30

    def test_metadata_are_bounded(self, daemon: Daemon) -> None:
        with Client(f"127.0.0.1:{daemon.ports[0]}", [("authorization", "Bearer " + "x" * 60_000)]) as client:
            assert client.refused("Hello") in (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.UNAVAILABLE,
            )

    def test_a_session_is_good_for_one_client_and_ends_with_its_connection(self, daemon, mallory):
        bearer, unknown = ("authorization", BEARER["authorization"]), grpc.StatusCode.UNAUTHENTICATED
        with Worker(daemon) as one, Client(daemon.grpc) as thief:
            session = ("tiercache-session-bin", one.token)
            for told in ([], [(session[0], bytes(32))], [bearer]):
                assert thief.refused("Hello", metadata=told) is unknown
            with mallory() as other:
                # Over TCP the token counts, and no session does.
                assert other.call("Hello", b"", metadata=[bearer, session]).principal == "mallory"
                assert other.refused("Hello", metadata=[session]) is unknown
            one.sock.close()
            until(lambda: _gone(one))


def _slowly() -> Iterator[bytes]:
    """Something every now and then, for ever: never idle, never done."""
    yield pb.SetRequest(header=ONE_OF_MANY, payload=b"x").SerializeToString()
    for _ in range(1000):
        time.sleep(0.3)
        yield pb.SetRequest(payload=b"x").SerializeToString()


def _gone(client: Client) -> bool:
    try:
        client.call("Hello", b"")
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False
