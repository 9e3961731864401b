"""Bytes from outside that nobody meant: a documented answer, never INTERNAL, never a hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.daemon.hosts import MIB, REFUSALS, Daemon, Worker, get_request, key, set_messages
from tests.daemon.test_attach import Region, places
from tests.examples import example_count
from tiercache.config.loading import load
from tiercache.core import ObjectMeta
from tiercache.daemon import StorageServer
from tiercache.errors import WireError
from tiercache.storage.checksum import checksum
from tiercache.wire import messages
from tiercache.wire.messages import read_message
from tiercache.wire.methods import METHODS
from tiercache.wire.v1 import storage_pb2 as pb

NEVER = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.CANCELLED}
DOCUMENTED = REFUSALS - NEVER
FUZZ = settings(
    max_examples=example_count(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

KEYS = messages.keys([key(n) for n in range(3)])
SUMS = [checksum(key(n), [memoryview(bytes(4096))], 4096) for n in range(3)]
METAS = [messages.meta(ObjectMeta(b"n", 4096, found, b"p" * 32, n)) for n, found in enumerate(SUMS)]
PLACES = places([(1, n * 4096, 4096) for n in range(3)])
SOUND: dict[str, bytes] = {
    "Hello": pb.HelloRequest(client="c").SerializeToString(),
    "Exists": pb.ExistsRequest(keys=KEYS).SerializeToString(),
    "Get": get_request({key(n): 4096 for n in range(3)}),
    "Set": next(set_messages({key(n): bytes(4096) for n in range(3)})),
    "GetInto": pb.GetIntoRequest(keys=KEYS, lengths=[4096] * 3, places=PLACES).SerializeToString(),
    "SetFrom": pb.SetFromRequest(keys=KEYS, metas=METAS, places=PLACES).SerializeToString(),
    "Delete": pb.DeleteRequest(keys=KEYS).SerializeToString(),
    "Describe": pb.DescribeRequest(keys=KEYS).SerializeToString(),
    "Scan": pb.ScanRequest(namespace=b"n", cursor=bytes(8)).SerializeToString(),
    "Advise": pb.AdviseRequest(keys=KEYS, values=[1.0, 0.0, 1e300], worker=3).SerializeToString(),
    "Register": (
        pb.RegisterRequest(
            namespace=pb.Namespace(namespace=b"n", texts={"a": "b"}, numbers={"c": 1})
        ).SerializeToString()
    ),
    "Namespaces": b"",
    "Usage": b"",
    "Flush": b"",
    "Status": b"",
    "History": pb.HistoryRequest(keys=KEYS, pages=KEYS.digests[:96]).SerializeToString(),
    "Report": pb.ReportRequest(since=1e9).SerializeToString(),
}


@pytest.fixture(scope="module", params=["memory", "file", "lmdb"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A client of a live node of this process, with memory attached."""
    directory = tmp_path_factory.mktemp("f")
    given = {
        "directory": str(directory),
        "host_bytes": "48MiB",
        "limits": {"idle": "1s", "attached_bytes": "1MiB"},
    }
    if request.param == "memory":
        given["storage"] = "memory://?capacity=1MiB"
    elif request.param == "lmdb":
        given["storage"] = f"lmdb://{directory}/lmdb?capacity=64MiB"
    else:
        given["disk_bytes"] = "64MiB"
    with StorageServer(load(None, given)), Region(64 << 10) as region:
        daemon = Daemon(None, directory, [], directory)  # type: ignore[arg-type]
        with Worker(daemon) as client:
            assert client.attach(region.fd, region.nbytes).region == 1
            yield client


def check(client: Worker, method: str, requests: list[bytes]) -> None:
    """Check that a call is answered, or ends with a documented status, before its deadline."""
    try:
        for reply in client.stream(method, iter(requests), 10):
            METHODS[method].reply.FromString(reply)
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        assert code in DOCUMENTED, (method, code, details)


@st.composite
def mutated(draw: Any) -> tuple[str, list[bytes]]:
    """A sound request of some method with some of its bytes changed, cut out, repeated or moved."""
    method = draw(st.sampled_from(sorted(SOUND)))
    data = bytearray(SOUND[method])
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == 1:
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == 2:
            data[at:at] = draw(st.binary(max_size=12))
        else:
            data += data[at:]
    return method, [bytes(data)] * draw(st.integers(0, 2))


@FUZZ
@given(mutated())
def test_sound_requests_with_errors(worker: Worker, case: tuple[str, list[bytes]]) -> None:
    check(worker, *case)


@settings(FUZZ, max_examples=example_count(60))
@given(st.sampled_from(sorted(SOUND)), st.lists(st.binary(max_size=400), max_size=3))
def test_any_bytes(worker: Worker, method: str, requests: list[bytes]) -> None:
    check(worker, method, requests)


U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
COLUMN = st.lists(st.one_of(st.sampled_from([0, 1, 4095, 4096, 8192, 2**63, 2**64 - 4096]), U64), max_size=5)
BATCH = st.builds(
    pb.Keys,
    digests=st.one_of(st.just(KEYS.digests), st.binary(max_size=256)),
    pools=st.lists(st.sampled_from(["kv", "mamba", "x"]), max_size=3),
    pool_of=st.binary(max_size=4),
)
SPOTS = st.builds(
    pb.Places,
    counts=st.lists(U32, max_size=4),
    regions=st.lists(st.integers(0, 3), max_size=5),
    offsets=COLUMN,
    sizes=COLUMN,
)
DESCRIPTION = st.builds(
    pb.ObjectMeta, namespace=st.binary(max_size=70), length=st.one_of(st.integers(0, 9000), U64),
    checksum=st.binary(max_size=20),
    parent=st.one_of(st.none(), st.binary(max_size=40)), depth=st.one_of(st.none(), U32),
)  # fmt: skip
MESSAGES = {
    "Get": st.builds(pb.GetRequest, keys=BATCH, lengths=COLUMN),
    "GetInto": st.builds(pb.GetIntoRequest, keys=BATCH, lengths=COLUMN, places=SPOTS),
    "SetFrom": st.builds(pb.SetFromRequest, keys=BATCH, metas=st.lists(DESCRIPTION, max_size=4),
     places=SPOTS),
    "Scan": st.builds(pb.ScanRequest, namespace=st.one_of(st.none(), st.binary(max_size=70)),
     cursor=st.binary(max_size=130)),
    "Describe": st.builds(pb.DescribeRequest, keys=BATCH),
    "Delete": st.builds(pb.DeleteRequest, keys=BATCH),
    "History": st.builds(pb.HistoryRequest, keys=BATCH,
     pages=st.one_of(st.binary(max_size=130), st.just(bytes(32 * 70_000)))),
    "Report": st.builds(pb.ReportRequest, since=st.floats()),
    "Advise": st.builds(pb.AdviseRequest, keys=BATCH, values=st.lists(st.floats(), max_size=4),
     worker=st.integers(0, 2**64 - 1)),
    "Register": st.builds(
        pb.RegisterRequest,
        namespace=st.builds(
            pb.Namespace, namespace=st.binary(max_size=70),
            texts=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
            numbers=st.dictionaries(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1), max_size=3),
        ),
    ),
}  # fmt: skip


@FUZZ
@given(st.sampled_from(sorted(MESSAGES)).flatmap(lambda name: st.tuples(st.just(name), MESSAGES[name])))
def test_messages_that_make_no_sense(worker: Worker, case: tuple[str, Any]) -> None:
    check(worker, case[0], [case[1].SerializeToString()])


HEADERS = st.one_of(st.none(), st.builds(pb.SetHeader, keys=BATCH, metas=st.lists(DESCRIPTION, max_size=4)))


@settings(FUZZ, max_examples=example_count(80))
@given(st.lists(st.tuples(HEADERS, st.binary(max_size=600)), max_size=4))
def test_headers_and_payload_in_any_order(worker, stream):
    check(
        worker,
        "Set",
        [pb.SetRequest(header=header, payload=payload).SerializeToString() for header, payload in stream],
    )


@pytest.mark.parametrize("field", [b"\x12\0", b"\x22\0", b"\x9a\x01\0", b"\x08\x01"])
def test_a_message_of_nothing_but_fields_is_refused_before_it_is_built(field: bytes) -> None:
    with pytest.raises(WireError, match="fields"):
        read_message(field * (MIB // len(field)), pb.SetFromRequest, 4 * MIB)
    with pytest.raises(WireError, match="fields"):
        read_message(field * (MIB // len(field)), pb.UnreadHeader, 4 * MIB)
