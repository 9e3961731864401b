"""Clients that mean harm with the memory that they share: the daemon does not grow, and loses no object."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.daemon.hosts import (
    HOST_BYTES,
    MIB,
    NAMESPACE,
    Daemon,
    Good,
    Worker,
    attach_socket,
    clients,
    key,
    serving,
    until,
)
from tiercache.core import ObjectKey, ObjectMeta
from tiercache.errors import WireError
from tiercache.storage.checksum import checksum
from tiercache.wire import attachment, messages
from tiercache.wire.v1 import attach_pb2
from tiercache.wire.v1 import storage_pb2 as pb

SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FUTURE_WRITE = 0x10
HIT, STORED, MISS, CORRUPT, ERROR = (
    pb.OUTCOME_HIT, pb.OUTCOME_STORED, pb.OUTCOME_MISS, pb.OUTCOME_CORRUPT, pb.OUTCOME_ERROR,
)  # fmt: skip
KEPT = 64
"""Mappings, of two descriptors each, that the daemon keeps for processes that may come back."""
OBJECTS = {key(n, "o"): bytes([n]) * MIB for n in range(8)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("a")
    body = f"""
        directory = "{directory}"
        disk_bytes = "64MiB"
        host_bytes = {HOST_BYTES}
        [limits]
        idle = "1s"
        clients = 64
        attached_bytes = "64MiB"
    """
    with serving(directory, body) as daemon:
        # every thread and every buffer that there will be
        with Worker(daemon) as client, Region(8 * MIB) as region:
            filler = [key(n, "filler") for n in range(60)]  # every slab of the store has a descriptor
            for k in filler:
                client.set({k: bytes(MIB)})
            client.delete(filler)
            client.set(OBJECTS)
            assert client.attach(region.fd, region.nbytes).region == 1
            for _ in range(20):
                into(client, region, 1, OBJECTS)
                client.get(dict.fromkeys(OBJECTS, MIB))
        yield daemon


@pytest.fixture(autouse=True)
def unharmed(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[None]:
    """After every attack: it lives, holds what it held, and serves others."""
    before = daemon.figures()
    yield
    assert daemon.alive(), daemon.log.read_text()[-4000:]
    until(lambda: daemon.figures().descriptors <= before.descriptors + 2 * KEPT, 60)
    after = daemon.figures()
    print(
        f"\n{request.node.name}: memory {before.memory / MIB:.0f} -> {after.memory / MIB:.0f} MiB,"
        f" descriptors {after.descriptors}"
    )
    # what was freed is given back every two seconds
    until(lambda: daemon.figures().memory <= before.memory + HOST_BYTES // 4, 10)
    with Worker(daemon) as client:
        assert client.get(dict.fromkeys(list(OBJECTS)[:2], MIB)) == list(OBJECTS.values())[:2]


class Region:
    """A memfd with all its pages, as a client should make it, or without some of what that takes."""

    def __init__(
        self,
        nbytes: int,
        *,
        seals: int = SEALED,
        touched: bool = True,
        flags: int = os.MFD_ALLOW_SEALING,
        name: str = "hostile",
    ) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | flags)
        os.ftruncate(self.fd, nbytes)
        self.map = mmap.mmap(self.fd, nbytes)
        if touched:
            self.map[:] = bytes(nbytes)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.map.close()
        with suppress(OSError):
            os.close(self.fd)


def places(spots: list[tuple[int, int, int]]) -> pb.Places:
    """One extent for each item: region, offset, size."""
    regions, offsets, sizes = zip(*spots, strict=True)
    return pb.Places(counts=[1] * len(spots), regions=regions, offsets=offsets, sizes=sizes)


def into(
    client: Worker,
    region: Region,
    number: int,
    objects: dict[ObjectKey, bytes],
    at: Callable[[int], int] = lambda n: n * MIB,
) -> list[int]:
    request = pb.GetIntoRequest(
        keys=messages.keys(list(objects)),
        lengths=[MIB] * len(objects),
        places=places([(number, at(n) % region.nbytes, MIB) for n in range(len(objects))]),
    )
    return list(client.call("GetInto", request).outcomes)


def store_from(
    client: Worker, region: Region, keys: list[ObjectKey], sum_of: Callable = checksum
) -> list[int]:
    """Store the first MiBs of region 1."""
    sums = [sum_of(k, [memoryview(region.map[n * MIB : (n + 1) * MIB])], MIB) for n, k in enumerate(keys)]
    request = pb.SetFromRequest(
        keys=messages.keys(keys),
        metas=[messages.meta(ObjectMeta(NAMESPACE, MIB, found)) for found in sums],
        places=places([(1, n * MIB, MIB) for n in range(len(keys))]),
    )
    return list(client.call("SetFrom", request).outcomes)


def refused(answer: attach_pb2.Answer) -> str:
    assert answer.refusal
    assert not answer.region
    return answer.refusal


def a_file() -> int:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, MIB)
    return fd


def a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def read_only() -> int:
    with Region(MIB) as region:
        return os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY)


def fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    if libc.fallocate(fd, mode, offset, nbytes):
        raise OSError(ctypes.get_errno(), "fallocate")


def pages_beyond_the_end() -> int:
    """Make a memfd with as many pages as its size needs, all of them beyond its end."""
    fd = os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    fallocate(fd, 1, MIB, MIB)  # FALLOC_FL_KEEP_SIZE
    assert os.fstat(fd).st_blocks * 512 == os.fstat(fd).st_size == MIB
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def sealed_against_writers() -> int:
    region = Region(MIB, seals=0)
    region.map.close()
    fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, SEALED | fcntl.F_SEAL_WRITE)
    return region.fd


def a_terabyte() -> int:
    """Make a memfd of this size, without pages."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 40)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALED)
    return fd


NOT_MEMORY: dict[str, Callable[[], int]] = {
    "file": a_file, "pipe": a_pipe, "directory": lambda: os.open("/", os.O_RDONLY),
    "device": lambda: os.open("/dev/zero", os.O_RDWR), "socket": lambda: socket.socket().detach(),
    "read-only": read_only, "unsealable": lambda: os.dup(Region(MIB, flags=0, seals=0).fd),
    "unsealed": lambda: os.dup(Region(MIB, seals=0).fd),
    "growing only": lambda: os.dup(Region(MIB, seals=fcntl.F_SEAL_GROW).fd),
    "pages beyond its end": pages_beyond_the_end,
    "untouched": lambda: os.dup(Region(MIB, touched=False).fd),
    "closed to writers": sealed_against_writers, "a terabyte": a_terabyte,
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_MEMORY)
def test_what_is_no_sound_memory_is_refused(daemon: Daemon, kind: str) -> None:
    fd = NOT_MEMORY[kind]()
    with Worker(daemon) as client:
        refused(client.attach(fd, 1 << 40 if kind == "a terabyte" else MIB))
        client.call("Hello", b"")
    os.close(fd)


@pytest.mark.parametrize("more", [fcntl.F_SEAL_SEAL, FUTURE_WRITE])
def test_seals_that_stand_in_the_way_do_no_harm(daemon: Daemon, more: int) -> None:
    with Worker(daemon) as client, Region(MIB, seals=SEALED | more) as region:
        answer = client.attach(region.fd, MIB)
        assert bool(answer.region) != bool(answer.refusal)


@pytest.mark.parametrize("declared", [0, 1, 4096, MIB - 1, MIB + 1, 2 * MIB, 2**40, 2**63, 2**64 - 1])
def test_lies_about_the_size(daemon: Daemon, declared: int) -> None:
    with Worker(daemon) as client, Region(MIB) as region:
        refused(client.attach(region.fd, declared))


def test_more_than_may_be_attached(daemon: Daemon) -> None:
    with Worker(daemon) as client, Region(40 * MIB) as one, Region(40 * MIB) as two:
        assert client.attach(one.fd, 40 * MIB).region
        assert "attached_bytes" in refused(client.attach(two.fd, 40 * MIB))


def test_a_thousand_regions(daemon: Daemon) -> None:
    with Worker(daemon) as client, Region(4096) as region:
        answers = [client.attach(region.fd, 4096) for _ in range(1000)]
        assert sum(bool(answer.region) for answer in answers) < 100
        assert daemon.figures().descriptors < 300


def test_one_memory_in_many_sessions_at_once(daemon: Daemon) -> None:
    """All find the same mapping, whatever comes between their steps, and it goes with the last of them."""
    with clients(8, lambda: Worker(daemon)) as many:
        for _ in range(10):
            with Region(MIB) as region:
                for client in many:
                    attachment.send(
                        client.sock, attach_pb2.Request(attach=attach_pb2.Attach(bytes=MIB)), region.fd
                    )
                answers = [client.answer() for client in many]
                assert any(answer.region for answer in answers)
        assert all(client.call("Hello", b"").principal for client in many)


def punched(region: Region) -> None:
    with suppress(OSError):
        fallocate(region.fd, 3, 0, region.nbytes)  # KEEP_SIZE | PUNCH_HOLE
    region.map.madvise(mmap.MADV_REMOVE, 0, region.nbytes)


def closed(region: Region) -> None:
    os.close(region.fd)
    region.fd = -1


HARM: dict[str, Callable[[Region], object]] = {
    "punched": punched,
    "shrunk": lambda region: os.ftruncate(region.fd, 0),
    "grown": lambda region: os.ftruncate(region.fd, 2 * region.nbytes),
    "closed": closed,
    "unmapped": lambda region: region.map.close(),
}


@pytest.mark.parametrize("harm", HARM)
def test_memory_that_is_changed_after_it_was_attached(daemon: Daemon, harm: str) -> None:
    """The pages do not become part of the daemon's own memory; the client may lose its session."""
    before = daemon.figures().memory
    for _ in range(5):
        with Worker(daemon) as client, Region(8 * MIB) as region:
            if not client.attach(region.fd, region.nbytes).region:
                break  # too often
            with suppress(grpc.RpcError):
                for _ in range(2):  # the second time, in pages that the daemon has filled
                    with suppress(OSError):
                        HARM[harm](region)
                    assert set(into(client, region, 1, OBJECTS)) <= {HIT, ERROR}
    assert daemon.figures().memory < before + 16 * MIB


def test_places_that_are_not_there(daemon: Daemon) -> None:
    k = next(iter(OBJECTS))
    wrong = [
        (0, 0, MIB), (2, 0, MIB), (1, MIB, MIB), (1, 0, 2 * MIB), (1, 2**64 - 4096, MIB),
        (1, 2**64 - 4096, 4096), (1, 0, 2**64 - 4096),
        (1, 1, MIB), (1, 0, MIB - 1), (1, 0, 0), (2**32 - 1, 0, MIB), (1, 4096, MIB),
    ]  # fmt: skip
    with Worker(daemon) as client, Worker(daemon) as other, Region(MIB) as region, Region(4 * MIB) as theirs:
        assert client.attach(region.fd, MIB).region == 1
        for _ in range(3):
            other.attach(theirs.fd, 4 * MIB)  # regions of another session are none of this one's
        for spot in wrong:
            request = pb.GetIntoRequest(keys=messages.keys([k]), lengths=[MIB], places=places([spot]))
            assert client.refused("GetInto", request) is grpc.StatusCode.INVALID_ARGUMENT, spot
            metas = [messages.meta(ObjectMeta(NAMESPACE, MIB, b"", None, None))]
            assert client.refused(
                "SetFrom", pb.SetFromRequest(keys=messages.keys([k]), metas=metas, places=places([spot]))
            ) is (grpc.StatusCode.INVALID_ARGUMENT), spot
        # Fewer bytes than the object has.
        request = pb.GetIntoRequest(keys=messages.keys([k]), lengths=[MIB], places=places([(1, 0, 4096)]))
        assert list(client.call("GetInto", request).outcomes) == [ERROR]
        assert into(client, region, 1, {k: b""}) == [HIT]


def test_more_extents_than_a_call_may_have(daemon: Daemon) -> None:
    with Worker(daemon) as client, Region(MIB) as region:
        client.attach(region.fd, MIB)
        for count in (20_000, 300_000):
            request = pb.GetIntoRequest(
                keys=messages.keys([key(1)]), lengths=[1],
                places=pb.Places(counts=[count], regions=[1] * count, offsets=[0] * count,
                 sizes=[4096] * count),
            )  # fmt: skip
            assert client.refused("GetInto", request) is grpc.StatusCode.INVALID_ARGUMENT


def test_overlapping_places_cost_nobody_an_object(daemon: Daemon) -> None:
    """All objects into one place, at once and again: what is there in the end is the client's trouble."""
    with clients(4, lambda: Worker(daemon)) as many, Region(MIB) as region:
        for client in many:
            assert isinstance(client, Worker)
            client.attach(region.fd, MIB)

        def hit(client: Any) -> None:
            for _ in range(10):
                assert set(into(client, region, 1, OBJECTS, at=lambda _: 0)) <= {HIT, ERROR}

        threads = [threading.Thread(target=hit, args=(client,)) for client in many]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert many[0].exists(list(OBJECTS)) == [True] * len(OBJECTS)


@contextmanager
def scribbling(region: Region, seconds: float) -> Iterator[Callable[[], bool]]:
    """Overwrites the region by the client's own mapping (another is noticed); tells whether it still does."""
    end = time.monotonic() + seconds
    target = np.frombuffer(region.map, np.uint8)

    def run() -> None:
        n = 0
        while time.monotonic() < end:
            n += 1
            target[:] = n & 255

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: time.monotonic() < end
    finally:
        thread.join()


def test_scribbling_into_a_set_hurts_that_object_alone(daemon: Daemon) -> None:
    keys = [key(n, "torn") for n in range(8)]
    with Worker(daemon) as client, Region(8 * MIB) as region:
        client.attach(region.fd, region.nbytes)
        with scribbling(region, 1) as goes_on:
            while goes_on():
                assert set(store_from(client, region, keys)) <= {STORED, HIT, ERROR}
                client.delete(keys)
        store_from(client, region, keys)
        assert client.get(dict.fromkeys(keys, MIB)) == [
            bytes(region.map[n * MIB : (n + 1) * MIB]) for n in range(8)
        ]
        assert client.get(dict.fromkeys(OBJECTS, MIB)) == list(OBJECTS.values())
        client.delete(keys)


def test_a_checksum_that_lies_is_found_out_at_the_latest_when_it_is_read(daemon: Daemon) -> None:
    with Worker(daemon) as client, Region(MIB) as region:
        client.attach(region.fd, region.nbytes)
        outcomes = store_from(client, region, [key(1, "lie")], lambda *_: b"l" * 16)
        assert outcomes in ([STORED], [ERROR])
        assert client.get({key(1, "lie"): MIB}) == [None]
        client.delete([key(1, "lie")])


def test_a_set_from_shared_memory_needs_the_checksum_of_what_is_meant(daemon: Daemon) -> None:
    """The daemon may read the bytes late, so that a checksum which it made itself would prove nothing."""
    k = key(1, "unsummed")
    with Worker(daemon) as client, Region(MIB) as region:
        client.attach(region.fd, region.nbytes)
        with pytest.raises(grpc.RpcError, match="without its checksum") as refused:
            store_from(client, region, [k], lambda *_: b"")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert client.get({k: MIB}) == [None]


VICTIM = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.daemon.test_attach import *
daemon = Daemon(None, Path(sys.argv[1]), [], None)
client, region = Worker(daemon), Region(32 * MIB, name="hostile-victim")
assert client.attach(region.fd, region.nbytes).region
print("on", flush=True)
while True:
    into(client, region, 1, OBJECTS)
    store_from(client, region, [key(n, "v") for n in range(32)])
"""


def test_a_client_that_is_killed_in_the_middle_is_gone_within_seconds(daemon: Daemon) -> None:
    before = daemon.figures()
    root = str(Path(__file__).parents[2])
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", VICTIM.format(root=root), str(daemon.directory)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        until(lambda: "hostile-victim" not in Path(f"/proc/{daemon.pid}/maps").read_text(), 60)
        until(lambda: daemon.figures().descriptors <= before.descriptors, 60)


GARBAGE = [
    b"", b"\0", b"x" * 4096, b"x" * 5000, b"\xff" * 100, b"\x0a", b"\x0a\x05", b"\x12\x02\x08\x63",
    b"\x0a\x80\x80\x80\x80\x10",
    attach_pb2.Request().SerializeToString() + b"\x1a\x00", b"\x0a\x0b\x08" + b"\xff" * 10, os.urandom(300),
]  # fmt: skip


@pytest.mark.parametrize("fds", [0, 1, 2, 20])
def test_garbage_packets_with_and_without_descriptors(daemon: Daemon, fds: int) -> None:
    with Region(MIB) as region:
        for packet in GARBAGE:
            with attach_socket(daemon) as sock:
                attachment.receive(sock, attach_pb2.Session)
                with suppress(OSError):
                    socket.send_fds(sock, [packet], [region.fd] * fds)
                    sock.recv(4096)


def test_descriptors_where_none_belong(daemon: Daemon) -> None:
    with Region(MIB) as region:
        for fds in (1, 2, 5):
            with Worker(daemon) as client:
                assert client.attach(region.fd, MIB).region == 1
                attachment.send(client.sock, attach_pb2.Request(), *[region.fd] * fds)
                with suppress(WireError, OSError, AssertionError):
                    refused(client.answer())
        with Worker(daemon) as client:
            attachment.send(
                client.sock, attach_pb2.Request(attach=attach_pb2.Attach(bytes=MIB)), region.fd, region.fd
            )
            with suppress(WireError, OSError, AssertionError):
                refused(client.answer())
        with Worker(daemon) as client:
            attachment.send(client.sock, attach_pb2.Request(attach=attach_pb2.Attach(bytes=MIB)))
            refused(client.answer())


def test_a_flood_of_packets_whose_answers_nobody_reads(daemon: Daemon) -> None:
    packet = attach_pb2.Request(attach=attach_pb2.Attach(bytes=1)).SerializeToString()
    with Good(lambda: Worker(daemon)) as good, attach_socket(daemon) as sock:
        sock.settimeout(0.2)
        with suppress(OSError):
            for _ in range(200_000):
                sock.send(packet)
    assert good.p99 < 5
