"""Messages between ranks over real sockets: strangers, broken connections, a leader that starts again."""

import asyncio
import gc
import queue
import socket
import time
from contextlib import suppress

import pytest

from tiercache.controller.ranks import MAX_MESSAGE_BYTES
from tiercache.controller.ranks.sockets import KEY_BYTES, SocketRankGroup
from tiercache.errors import InputError, MissingExtraError, RankError
from tiercache.integrations import torch_ranks

KEY = bytes(range(KEY_BYTES))


class Member:
    """One rank, and what it has received."""

    def __init__(self, rank, size=2, address=("127.0.0.1", 0), key=KEY):
        self.inbox = queue.SimpleQueue()
        self.group = SocketRankGroup(rank, size, address, key)
        self.group.open(self.inbox.put)

    def next(self, timeout=20):
        return self.inbox.get(timeout=timeout)


@pytest.fixture
def member():
    members = []

    def make(*args, **kwargs):
        members.append(Member(*args, **kwargs))
        return members[-1]

    yield make
    for one in members:
        one.group.close()
        one.group.close()
        assert not one.group._thread.is_alive()  # private: a thread that is left behind has no other sign


def connected(leader, follower):
    """Wait until messages go both ways; those that were sent before are lost."""
    while leader.inbox.empty():
        follower.group.send(0, b"hello")
        time.sleep(0.01)
    while leader.next(1) != b"last":
        if leader.inbox.empty():
            follower.group.send(0, b"last")
    return leader, follower


def test_messages_of_all_possible_lengths_arrive_in_order_both_ways(member):
    leader = member(0, 3)
    others = [member(rank, 3, leader.group.address) for rank in (1, 2)]
    for other in others:
        connected(leader, other)
    messages = [b"", b"x", b"y" * 70_000, b"z" * MAX_MESSAGE_BYTES, *(bytes([n]) for n in range(100))]
    for number, other in enumerate(others, 1):
        for message in messages:
            leader.group.send(number, message)
        assert [other.next() for _ in messages] == messages
        for message in messages:
            other.group.send(0, message)
        assert [leader.next() for _ in messages] == messages
    leader.group.send(7, b"nobody is there")
    others[0].group.send(1, b"followers do not talk to each other")
    others[0].group.send(0, b"x" * (MAX_MESSAGE_BYTES + 1))  # is lost, and the connection stays
    others[0].group.send(0, b"end")
    assert leader.next() == b"end"


def test_strangers_are_dropped_and_cost_little(member, caplog):
    leader = member(0)
    _, follower = connected(leader, member(1, 2, leader.group.address))
    frames = [
        b"GET / HTTP/1.1\r\n\r\n",
        (36).to_bytes(4, "little") + bytes(32) + (1).to_bytes(4, "little"),  # a wrong key
        (36).to_bytes(4, "little") + KEY + (0).to_bytes(4, "little"),  # the leader's own number
        (36).to_bytes(4, "little") + KEY + (-1).to_bytes(4, "little", signed=True),
        (4).to_bytes(4, "little") + b"1234",
        (1 << 31).to_bytes(4, "little"),
    ]
    for frame in frames:
        with socket.create_connection(leader.group.address, timeout=10) as stranger:
            stranger.sendall(frame)
            assert stranger.recv(1) == b""
    crowd = [socket.create_connection(leader.group.address, timeout=10) for _ in range(80)]
    follower.group.send(0, b"still here")
    assert leader.next() == b"still here"
    for one in crowd:
        one.close()
    assert leader.inbox.empty()
    wrong = member(1, 2, leader.group.address, key=bytes(KEY_BYTES))
    wrong.group.send(0, b"as rank 1")
    follower.group.send(0, b"and still")
    assert leader.next() == b"and still"


def test_a_rank_with_a_wrong_key_neither_spins_nor_fills_the_log(member, monkeypatch, caplog):
    tried = []
    connect = asyncio.open_connection
    monkeypatch.setattr(asyncio, "open_connection", lambda *a, **k: tried.append(a) or connect(*a, **k))
    leader = member(0)
    member(1, 2, leader.group.address, key=bytes(KEY_BYTES))
    time.sleep(1.0)
    assert len(tried) <= 25
    assert sum("showed a wrong key" in line for line in caplog.messages) <= 1
    assert sum("the connection to rank 0 ended" in line for line in caplog.messages) <= 1


def test_a_rank_connects_while_strangers_hold_all_places(member, monkeypatch):
    # private: no stranger is sent away for its silence
    monkeypatch.setattr("tiercache.controller.ranks.sockets._GREETING_S", 1000.0)
    leader = member(0)
    crowd = [socket.create_connection(leader.group.address, timeout=10) for _ in range(64)]
    # private: nothing else shows that they are in
    while len(leader.group._strangers) < len(crowd):
        time.sleep(0.01)
    follower, end = member(1, 2, leader.group.address), time.monotonic() + 20
    while leader.inbox.empty():
        assert time.monotonic() < end, "it waits until a stranger is sent away"
        follower.group.send(0, b"hello")
        time.sleep(0.01)
    for one in crowd:
        one.close()


def test_closed_in_the_moment_of_a_connection_it_leaves_no_socket_and_says_nothing(member, caplog):
    for _ in range(30):
        leader = member(0)
        crowd = [socket.create_connection(leader.group.address, timeout=10) for _ in range(3)]
        leader.group.close()
        for one in crowd:
            with one, suppress(ConnectionResetError):
                assert one.recv(1) == b""
    gc.collect()  # tells of a socket that nobody closed, and a warning fails a test
    assert not caplog.messages


def test_stopped_in_the_moment_in_which_it_connects_a_rank_ends(member, monkeypatch):
    leader, connect = member(0), asyncio.open_connection

    async def last(*address):
        found = await connect(*address)
        asyncio.get_running_loop().stop()  # what `close` does, from another thread
        return found

    monkeypatch.setattr(asyncio, "open_connection", last)
    thread = member(1, 2, leader.group.address).group._thread  # private: nothing else tells of its end
    thread.join(20)
    assert not thread.is_alive()


def test_ranks_connect_again_when_the_leader_starts_again_at_its_address(member):
    first = member(0)
    _, follower = connected(first, member(1, 2, first.group.address))
    first.group.close()
    second = member(0, 2, first.group.address)
    connected(second, follower)
    second.group.send(1, b"welcome back")
    assert follower.next() == b"welcome back"
    again = member(1, 2, first.group.address)  # the newer connection of a rank counts
    follower.group.close()  # or it would connect again, and be the newer one
    connected(second, again)
    second.group.send(1, b"to the new one")
    assert again.next() == b"to the new one"


def test_send_never_waits_for_a_rank_that_does_not_read(member):
    leader = member(0)
    with socket.create_connection(leader.group.address, timeout=10) as deaf:
        deaf.sendall((36).to_bytes(4, "little") + KEY + (1).to_bytes(4, "little"))
        deaf.sendall((5).to_bytes(4, "little") + b"ready")
        assert leader.next() == b"ready"
        for _ in range(100):
            leader.group.send(1, bytes(MAX_MESSAGE_BYTES))
        # private: nothing else shows that what cannot be sent is bounded
        [writer] = leader.group._writers.values()
        assert writer.transport.get_write_buffer_size() <= (16 << 20) + MAX_MESSAGE_BYTES + 4


def test_bad_arguments_are_refused():
    with pytest.raises(InputError, match="the key has 3 bytes; all ranks need the same 32"):
        SocketRankGroup(0, 2, ("127.0.0.1", 0), b"key")
    with pytest.raises(InputError, match="rank 2 is outside"):
        SocketRankGroup(2, 2, ("127.0.0.1", 0), KEY)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(RankError, match=r"rank 0 cannot listen at 127\.0\.0\.1:"),
    ):
        SocketRankGroup(0, 2, taken.getsockname(), KEY)
    SocketRankGroup(0, 2, ("127.0.0.1", 0), KEY).close()  # without an open


def test_torch_is_needed_for_its_groups_only(monkeypatch):
    with pytest.raises(InputError, match="no process group; call init_process_group first"):
        torch_ranks.ranks_of()
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tiercache-hybrid\[torch\]'"):
        torch_ranks.ranks_of()


def test_rank_0_stops_listening_if_the_broadcast_fails(monkeypatch):
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    addresses = []

    def fail(*_, **__):
        raise RuntimeError("a rank has gone")

    made = torch_ranks.SocketRankGroup

    def noted(*args):
        group = made(*args)
        addresses.append(group.address)
        return group

    monkeypatch.setattr(dist, "broadcast", fail)
    monkeypatch.setattr(torch_ranks, "SocketRankGroup", noted)
    try:
        with pytest.raises(RuntimeError, match="has gone"):
            torch_ranks.ranks_of()
    finally:
        dist.destroy_process_group()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[0], timeout=5).close()
