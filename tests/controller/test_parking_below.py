"""Parked requests in storage, and tickets that another process uses."""

import os
import time
import tracemalloc
from dataclasses import replace

import pytest
from blake3 import blake3
from tiercache_backends.memory import MemoryBackend

from tests.controller.harness import IDENTITY, KV, MAMBA, Flaky, P, prompt
from tests.controller.parking import PROMPT, go_on, parked, resume, scribble, verify
from tests.controller.test_interleavings import until
from tests.controller.test_parking import KINDS, empty, settled
from tests.controller.test_prefetch import Clock
from tests.examples import slow_after
from tiercache.controller import ParkedStatus, Status
from tiercache.core import Outcome, Reason, as_tokens
from tiercache.errors import AdmissionError, InputError, RefusedError
from tiercache.keys import page_keys
from tiercache.storage.registry import open_backend

URLS = {
    "memory": "memory://",
    "file": "file://{}/store?capacity=16MiB",
    "lmdb": "lmdb://{}/store?capacity=16MiB",
}


def stored(engine, tokens=PROMPT, **kwargs):
    held = parked(engine, tokens, below=True, **kwargs)
    until(engine, lambda: held.status is ParkedStatus.STORED)
    settled(engine)
    return held


def parked_keys_in(store, held):
    return [entry.key for entry in store.scan_all() if entry.key.page_key in held.keys]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("url", slow_after(2, URLS))
@pytest.mark.parametrize("tokens", [PROMPT, prompt(1, 2, 3)], ids=["partial", "whole"])
def test_a_request_goes_on_from_storage_and_leaves_nothing_there(rig, tmp_path, kind, url, tokens):
    store = open_backend(URLS[url].format(tmp_path))
    engine = rig(store, **KINDS[kind])
    held = stored(engine, tokens)
    assert engine.metrics.value("parked_bytes") == 0
    pages = -(-len(tokens) // P)
    assert len(parked_keys_in(store, held)) == pages * engine.kv + engine.hybrid
    empty(engine)
    assert engine.arena.available == engine.arena.blocks
    admission = engine.controller.resume(held, tokens=len(tokens) + P, states=2)
    engine.check()
    assert admission.wait().status is Status.READY
    assert admission.resumed
    verify(engine, admission, tokens)
    go_on(engine, admission, tokens)
    settled(engine)
    assert parked_keys_in(store, held) == []


@pytest.mark.parametrize("url", ["file", "lmdb"])
def test_a_ticket_is_carried_to_another_process(rig, tmp_path, url):
    url = URLS[url].format(tmp_path)
    engine = rig(open_backend(url))
    ticket = stored(engine, commit=False).to_bytes()
    assert engine.controller.close()
    engine = rig(open_backend(url))
    scribble(engine)
    admission = engine.controller.resume(ticket)
    admission.wait()
    assert admission.resumed
    verify(engine, admission)
    go_on(engine, admission)
    engine.keep(PROMPT)
    again = engine.controller.resume(ticket)
    poll = again.wait()
    assert not again.resumed
    assert (poll.depth, poll.reason) == (3 * P, Reason.ABSENT), "an ordinary request for the same tokens"
    engine.verify(again, as_tokens(PROMPT), 3)
    engine.controller.release(again)


def test_a_host_too_small_for_one_object_is_a_miss(rig):
    store = Flaky(MemoryBackend())
    ticket = stored(rig(store), commit=False).to_bytes()
    engine = rig(store, blocks=2)
    admission = engine.controller.resume(ticket)
    poll = admission.wait()
    assert (admission.resumed, poll.status, poll.reason) == (False, Status.FAILED, Reason.BUSY)
    engine.controller.release(admission)


def test_storage_sees_a_sequence_with_a_state_at_its_end_to_which_no_prompt_leads(rig):
    store = Flaky(MemoryBackend())
    engine = rig(store, blocks=80)
    held, other = stored(engine, commit=False), stored(engine, commit=False)
    own = {entry.key.page_key for entry in store.scan_all()}
    assert len(own) == 8, "two requests with the same tokens have no key in common"
    namespace = held.ticket.namespace
    for extra in (b"", held.ticket.id):
        assert own.isdisjoint(page_keys(namespace, as_tokens([*PROMPT, 0, 0]), P, extra=extra))
    entries = {(e.key.pool, e.meta.depth): e for e in store.scan_all() if e.key.page_key in held.keys}
    assert [entries[KV, depth].key.page_key for depth in range(1, 5)] == held.keys
    assert [entries[KV, depth].meta.parent for depth in range(1, 5)] == [None, *held.keys[:3]]
    assert entries[MAMBA, 4].meta.parent == held.keys[3]
    for one in (held, other):
        one.release()


class Recording(Flaky):
    """A store that records the values that it is given, and refuses deletions if told so."""

    def __init__(self):
        super().__init__(MemoryBackend())
        self.values, self.refuses = {}, False

    def set(self, items):
        self.values |= {item.key: item.meta.value for item in items}
        return super().set(items)

    def advise(self, keys, values, worker=0):
        self.values |= dict(zip(keys, values, strict=True))

    def delete(self, keys):
        if self.refuses:
            raise RefusedError("deletions are for operators")
        return super().delete(keys)


def test_a_value_lasts_for_the_time_to_live(rig):
    """Values lose half in an hour: an hour more doubles them."""
    store = Recording()
    engine = rig(store, blocks=80)
    hour, ten = (stored(engine, commit=False, ttl=hours * 3600.0) for hours in (1, 10))
    [one], [other] = (
        {value for key, value in store.values.items() if key.page_key in held.keys} for held in (hour, ten)
    )
    assert other / one == pytest.approx(2.0**9)
    for held in (hour, ten):
        held.release()


def test_what_may_not_be_deleted_gets_no_value(rig):
    store = Recording()
    engine = rig(store, blocks=80)
    held = stored(engine, commit=False)
    store.refuses = True
    held.release()
    settled(engine)
    assert len(parked_keys_in(store, held)) == 5
    assert {value for key, value in store.values.items() if key.page_key in held.keys} == {0.0}
    assert not engine.context.writes.is_suspended


# -- what is refused


def test_bytes_that_are_no_ticket_are_refused(rig):
    engine = rig(Flaky(MemoryBackend()))
    ticket = stored(engine, commit=False).to_bytes()
    free = engine.arena.available
    bad = [ticket[:n] for n in range(0, len(ticket), 7)]
    bad += [ticket[:n] + bytes([ticket[n] ^ 1]) + ticket[n + 1 :] for n in range(0, len(ticket), 3)]
    bad += [ticket + b"x", b"", b"\x00" * 100, os.urandom(500), bytes(40 << 20)]
    for each in bad:
        with pytest.raises(InputError, match="no ticket of a parked request"):
            engine.controller.resume(each)
    for each in (None, 5, "ticket", [ticket]):
        with pytest.raises(InputError, match="is a Parked or its bytes"):
            engine.controller.resume(each)
    assert engine.arena.available == free
    engine.controller.release(engine.controller.resume(bytearray(ticket)))


def test_a_ticket_is_refused_elsewhere_and_later(rig, monkeypatch):
    store = Flaky(MemoryBackend())
    ticket = stored(rig(store), ttl=60.0).to_bytes()
    for change in ({"salt": b"other"}, {"model": "other"}, {"kv_dtype": "float16"}):
        with pytest.raises(InputError, match="of another model, numerics or tenant"):
            rig(store, identity=replace(IDENTITY, **change)).controller.resume(ticket)
    with pytest.raises(InputError, match="has no storage"):
        rig().controller.resume(ticket)
    engine, now = rig(store), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61.0)
    with pytest.raises(AdmissionError, match="has expired"):
        engine.controller.resume(ticket)


def test_a_ticket_with_other_tokens_leads_to_nothing(rig):
    """Its objects would be those of other tokens, and so a wrong answer."""
    engine = rig(Flaky(MemoryBackend()))
    held = stored(engine, commit=False)
    forged = replace(held.ticket, tokens=as_tokens([9, *PROMPT[1:]]))
    engine = rig(engine.context.storage.backend)
    admission = engine.controller.resume(forged.to_bytes())
    poll = admission.wait()
    assert (admission.resumed, poll.depth, poll.reason) == (False, 0, Reason.ABSENT)
    engine.controller.release(admission)
    assert len(parked_keys_in(engine.context.storage.backend, held)) == 5


def test_a_changed_ticket_of_a_request_that_is_here_is_refused_and_leaves_it_alone(rig):
    engine = rig(Flaky(MemoryBackend()))
    held = stored(engine, commit=False)
    for change in ({"tokens": as_tokens([9, *PROMPT[1:]])}, {"extra": b"x"}, {"expires": 1e300}):
        with pytest.raises(InputError, match="this ticket was changed"):
            engine.controller.resume(replace(held.ticket, **change).to_bytes())
    held.release()
    settled(engine)


def test_a_forged_ticket_of_nested_arrays_takes_no_memory(rig):
    engine = rig(Flaky(MemoryBackend()))
    body = b"tiercache parked 1\n" + b"\xdd\x00\x40\x00\x00" * 500 + bytes(8 << 20)
    ticket = body + blake3(body).digest(length=16)
    tracemalloc.start()
    with pytest.raises(InputError, match="no ticket of a parked request"):
        engine.controller.resume(ticket)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_only_what_is_in_storage_has_a_ticket(rig):
    engine = rig(Flaky(MemoryBackend()), blocks=60)
    held = parked(engine)
    with pytest.raises(AdmissionError, match="is not in storage"):
        held.to_bytes()
    held.release()
    with pytest.raises(AdmissionError, match=r"it is released"):
        held.to_bytes()


# -- its end


@pytest.mark.parametrize("how", ["release", "expire"])
def test_what_is_given_up_is_deleted(rig, how):
    clock, store = Clock(), Flaky(MemoryBackend())
    engine = rig(store, clock=clock)
    held = stored(engine, commit=False, ttl=60.0)
    ticket = held.to_bytes()
    if how == "release":
        held.release()
    else:
        clock.now += 61.0
        engine.controller.tick()
        assert held.status is ParkedStatus.EXPIRED
    engine.controller.flush()
    until(engine, lambda: not list(store.scan_all()))
    admission = engine.controller.resume(ticket)
    assert (admission.wait().depth, admission.resumed) == (0, False)
    engine.controller.release(admission)


@pytest.mark.parametrize("fault", [Outcome.THROTTLED, Outcome.ERROR, "raise"])
@pytest.mark.parametrize("nth", slow_after(2, [0, 4, 1, 2, 3]))
def test_what_storage_does_not_take_stays_on_the_host(rig, fault, nth):
    store = Flaky(MemoryBackend())
    engine = rig(store)
    store.sets = [fault, *[None] * nth]
    held = parked(engine, commit=False, below=True)
    settled(engine)
    assert held.status is ParkedStatus.ON_HOST
    empty(engine)
    resume(engine, held)
    settled(engine)
    until(engine, lambda: not list(store.scan_all()))


def test_a_resume_while_storage_is_written_comes_from_the_host(rig):
    engine = rig(Flaky(MemoryBackend()), blocks=60)
    for _ in range(10):
        held = parked(engine, commit=False, below=True)
        until(engine, lambda held=held: held.status is not ParkedStatus.COPYING)
        resume(engine, held)
        engine.check()
    settled(engine)
    until(engine, lambda: not list(engine.context.storage.backend.scan_all()))


def test_close_leaves_alone_what_is_in_storage(rig):
    store = Flaky(MemoryBackend())
    engine = rig(store, blocks=60)
    held, other = stored(engine, commit=False), parked(engine, commit=False)
    assert engine.controller.close()
    assert other.status is ParkedStatus.RELEASED
    engine = rig(store, blocks=60)
    resume(engine, held.to_bytes())
