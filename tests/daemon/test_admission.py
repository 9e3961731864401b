"""Admission of connections whose callers are not known yet: their order, and the rate that they share."""

from __future__ import annotations

import pytest

from tiercache.daemon.admission import (
    GREETING_BYTES,
    HEAD_BYTES,
    Admission,
    ConnectionState,
    OpeningCounter,
    SharedRate,
)

HERE, THERE = b"here", b"there"


@pytest.fixture
def rate() -> SharedRate:
    return SharedRate(burst=1000, per_second=100, now=0.0)


def test_it_grows_with_time_up_to_its_most(rate: SharedRate) -> None:
    rate.take(HERE, 1000)
    assert [rate.left(now) for now in (0.0, 1.0, 2.5, 100.0, 1000.0)] == [0, 100, 250, 1000, 1000]
    rate.take(HERE, 1 << 30)
    assert [rate.left(1000 + now) for now in (0.5, 1.0, 1.5)] == [0, 0, 50], "no more than a second is owed"


def test_what_was_taken_is_remembered_until_nothing_lacks(rate: SharedRate) -> None:
    rate.take(HERE, 300)
    rate.take(HERE, 100)
    assert rate.left(1.0) == 700
    assert (rate.used(HERE), rate.used(THERE)) == (400, 0)
    assert rate.left(10.0) == 1000
    assert rate.used(HERE) == 0


def test_over_any_time_no_more_than_the_rate_is_taken_by_who_asks_before(rate: SharedRate) -> None:
    taken = 0
    for step in range(10_000):
        piece = min(rate.left(step / 100), 7)
        rate.take(HERE, piece)
        taken += piece
    assert taken <= 1000 + 100 * 100


@pytest.fixture
def admission() -> Admission[ConnectionState]:
    return Admission(max_connections=4, max_opening=2, settling=5.0, now=0.0)


def add(
    admission: Admission[ConnectionState], number: int, origin: bytes = HERE, **more: bool
) -> ConnectionState:
    made = ConnectionState(number, origin, 0.0, **{"tls": False, "trusted": False, **more})
    admission.add(made)
    return made


def opened(admission: Admission[ConnectionState]) -> list[int]:
    numbers = []
    for connection in admission.to_open(lambda: 0.0):
        connection.opening = OpeningCounter(tls=connection.tls, max_streams=8)
        numbers.append(connection.number)
    return numbers


def test_the_origin_with_the_fewest_opening_connections_opens_first(admission):
    for number, origin in enumerate((HERE, HERE, THERE)):
        add(admission, number, origin)
    assert opened(admission) == [0, 2]
    assert opened(admission) == [], "two are opening"
    admission.settle(admission.connections[2])
    assert opened(admission) == [1]


def test_the_origin_that_was_served_least_opens_first(admission: Admission[ConnectionState]) -> None:
    first = add(admission, 0)
    add(admission, 1, THERE)
    admission.record_forwarded(first, 500, 500)
    assert opened(admission) == [1, 0]


def test_an_origin_that_came_to_nothing_waits_for_those_that_did_not_until_it_is_forgiven(admission):
    admission.remove(add(admission, 0))
    known = add(admission, 1, b"elsewhere")
    known.known = True
    admission.remove(known)
    for number, origin in enumerate((HERE, THERE, b"elsewhere"), 2):
        add(admission, number, origin)
    assert opened(admission) == [3, 4]
    for number in (3, 4):
        admission.settle(admission.connections[number])
        admission.remove(admission.connections[number])
    for now in (6.0, 12.0):
        admission.overdue(now)
    add(admission, 5, b"elsewhere")
    assert opened(admission) == [2, 5], "all are forgiven"


def test_of_those_that_open_few_may_send_much() -> None:
    admission: Admission[ConnectionState] = Admission(
        max_connections=4, max_opening=4, max_wide=1, settling=5.0, now=0.0
    )
    connections = [add(admission, number, tls=True) for number in range(3)]
    assert opened(admission) == [0, 1, 2]
    counters = [connection.opening for connection in connections if connection.opening is not None]
    for counter in counters[:2]:
        assert counter.take(b"\x16\x03\x01\x02\x00" + bytes(counter.room - 5)) == GREETING_BYTES[True]
        assert (counter.room, counter.cost) == (0, GREETING_BYTES[True] - 5 - 512), "the hello costs nothing"
    assert list(admission.to_widen()) == connections[:1]
    assert [counter.room for counter in counters] == [
        HEAD_BYTES - GREETING_BYTES[True], 0, GREETING_BYTES[True]
    ]  # fmt: skip
    assert list(admission.to_widen()) == [], "one is wide"
    admission.remove(connections[0])
    assert list(admission.to_widen()) == connections[1:2]


def test_none_opens_while_the_rate_is_used_up(admission: Admission[ConnectionState]) -> None:
    admission.record_forwarded(add(admission, 0), 1 << 20, 1 << 20)
    assert opened(admission) == []


def test_the_oldest_unknown_of_the_largest_origin_makes_way(admission: Admission[ConnectionState]) -> None:
    connections = [add(admission, number, origin) for number, origin in enumerate((THERE, HERE, HERE, HERE))]
    assert admission.is_full
    connections[1].known = True
    assert admission.to_displace() is connections[2]
    for connection in connections:
        connection.known = True
    assert admission.to_displace() is None


def test_time_settles_what_cannot_be_seen_and_ends_the_rest(admission: Admission[ConnectionState]) -> None:
    plain, hidden = add(admission, 0), add(admission, 1, tls=True)
    assert opened(admission) == [0, 1]
    assert admission.overdue(5.0) == ([], [])
    assert admission.overdue(5.1) == ([hidden], [plain])
    add(admission, 2)
    assert admission.overdue(1.1) == ([], [plain, hidden]), "another one waits for its turn"


def test_the_least_served_goes_first_and_who_is_known_is_not_stalled(admission):
    connections = [add(admission, number) for number in range(3)]
    for connection, nbytes in zip(connections, (30, 10, 20), strict=True):
        admission.settle(connection)
        admission.record_forwarded(connection, nbytes, nbytes)
        admission.throttle(connection)
    connections[2].known = True
    assert admission.stalled(6.0) == connections[:2]
    assert [connection.number for connection in admission.to_serve(lambda: 0.0)] == [1, 2, 0]
    assert not admission.has_throttled


def test_a_trusted_connection_takes_nothing_of_the_rate(admission: Admission[ConnectionState]) -> None:
    trusted, stranger = add(admission, 0, trusted=True), add(admission, 1)
    admission.record_forwarded(trusted, 1 << 20, 1 << 20)
    assert admission.may_forward(stranger, 0.0) == 1024
    admission.record_forwarded(stranger, 1 << 20, 1 << 20)
    assert (admission.may_forward(stranger, 0.0), admission.may_forward(trusted, 0.0)) == (0, 1024)
