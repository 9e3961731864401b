from __future__ import annotations

import logging
import threading

import pytest

from tiercache.errors import TransferError
from tiercache.transfer import LayerTicket, Ticket


def test_a_ticket_calls_back_once_before_and_after() -> None:
    ticket, calls = Ticket(), []
    ticket.add_done_callback(lambda t: calls.append(("early", t.done(), t.error)))
    assert not ticket.done()
    assert not ticket.wait(0.0)
    assert calls == []
    ticket.finish()
    ticket.add_done_callback(lambda t: calls.append(("late", t.done(), t.error)))
    assert ticket.wait(0.0)
    assert calls == [("early", True, None), ("late", True, None)]


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    ticket, calls = Ticket(), []
    ticket.add_done_callback(lambda t: 1 / 0)
    ticket.add_done_callback(calls.append)
    with caplog.at_level(logging.ERROR):
        ticket.finish()
    assert calls == [ticket]
    assert "ZeroDivisionError" in caplog.text


def test_callbacks_race_with_the_end() -> None:
    for _ in range(200):
        ticket, calls = Ticket(), []
        ender = threading.Thread(target=ticket.finish)
        ender.start()
        ticket.add_done_callback(calls.append)
        ender.join()
        assert calls == [ticket]


def test_layers_are_waited_for_one_by_one() -> None:
    ticket = LayerTicket([4, 2, 2])
    assert ticket.layers == (2, 4)
    assert ticket.wait_layer(3)
    assert not ticket.wait_layer(2, timeout=0.0)
    ticket.finish_layer(2)
    assert ticket.wait_layer(2)
    assert not ticket.wait_layer(4, timeout=0.0)
    ticket.finish()
    assert ticket.wait_layer(4)


def test_a_failure_reaches_the_layers_that_are_not_there() -> None:
    ticket, seen = LayerTicket([0, 1]), []

    def engine() -> None:
        try:
            ticket.wait_layer(1)
        except TransferError as error:
            seen.append(str(error))

    waiting = threading.Thread(target=engine)
    waiting.start()
    ticket.finish_layer(0)
    ticket.finish(TransferError("the device fell over"))
    waiting.join()
    assert seen == ["layer 1 was not loaded: the device fell over"]
    assert ticket.wait_layer(0)
    with pytest.raises(TransferError, match="layer 1"):
        ticket.wait_layer(1)
    assert str(ticket.error) == "the device fell over"
