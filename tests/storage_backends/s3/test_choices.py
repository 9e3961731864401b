"""Choices of codecs: what is measured, what is chosen, and what is stored meanwhile."""

from __future__ import annotations

import itertools
import random

import pytest
from tiercache_backends.s3.choices import REVIEW, TRIAL, CodecChoices
from tiercache_backends.s3.compression import Codec, decode
from tiercache_backends.s3.service import WireSpeed

from tests.storage_backends.s3.test_compression import floats
from tiercache.testing.objects import key

BF16 = floats("bf16", 8000, 0)
FP32 = floats("fp32", 8000, 0)
NOISE = random.Random(0).randbytes(16_000)
ZEROS = bytes(16_000)


def store(choices: CodecChoices, data: bytes, pool: str = "kv", count: int = TRIAL) -> list[Codec]:
    """Encode objects; return the codec of each after a check that its bytes come back."""
    codecs = []
    for number in range(count):
        codec, pieces = choices.encode(key((pool, number), pool=pool), [memoryview(data)], len(data))
        target = bytearray(len(data))
        assert (pieces is None) == (codec is Codec.RAW)
        assert pieces is None or decode(codec, memoryview(b"".join(pieces)), [memoryview(target)], len(data))
        assert pieces is None or target == data
        codecs.append(codec)
    return codecs


def wire(speed: float) -> WireSpeed:
    """A wire that was seen to move `speed` bytes a second."""
    now = 0.0
    found = WireSpeed(lambda: now)
    found.begin(1 << 30)
    now = (1 << 30) / speed
    found.end(1 << 30, 1 << 30)
    return found


@pytest.mark.parametrize(
    ("data", "chosen"), [(BF16, Codec.PLANES2), (FP32, Codec.PLANES4), (NOISE, Codec.RAW)]
)
def test_a_pool_gets_the_codec_that_shrinks_its_objects_most(data, chosen):
    codecs = store(CodecChoices("smallest", wire(1e9)), data, count=TRIAL + 3)
    assert codecs[:TRIAL] == [Codec.RAW] * TRIAL
    assert codecs[TRIAL:] == [chosen] * 3


def test_an_object_that_does_not_shrink_is_raw_in_any_pool():
    choices = CodecChoices("smallest", wire(1e9))
    store(choices, BF16)
    assert store(choices, NOISE, count=1) == [Codec.RAW]
    assert store(choices, BF16, count=1) == [Codec.PLANES2]


def test_pools_are_told_apart_and_reported():
    choices = CodecChoices("smallest", wire(1e9))
    store(choices, BF16, "kv", TRIAL + 20)
    store(choices, NOISE, "noise", TRIAL + 1)
    store(choices, ZEROS, "zeros", 3)
    report = choices.report()
    assert list(report) == ["kv", "noise", "zeros"]
    assert report["kv"].startswith("planes2 1.")
    assert report["noise"] == "raw 1.00"
    assert report["zeros"] == "raw 1.00"


def test_none_measures_nothing():
    def clock():
        raise AssertionError("nothing is to be measured")

    assert set(store(CodecChoices("none", wire(1e6), clock=clock), BF16)) == {Codec.RAW}


@pytest.mark.parametrize(("speed", "compressed"), [(1e6, True), (1e12, False)])
def test_a_fast_wire_needs_no_compression(speed, compressed):
    codecs = store(CodecChoices("auto", wire(speed)), BF16, count=TRIAL + 1)
    assert (codecs[-1] is not Codec.RAW) == compressed


def test_auto_weighs_bytes_against_the_time_of_a_core():
    # Every reading of the clock is a millisecond later: each encoding and each decoding takes one. An object
    # of 16 kB then takes 1 ms on the wire raw, and 0.66 ms in two planes.
    def chosen(speed: float) -> Codec:
        ticks = itertools.count()
        choices = CodecChoices("auto", wire(speed), clock=lambda: next(ticks) * 1e-3)
        return store(choices, BF16, count=TRIAL + 1)[-1]

    assert chosen(16_000 / 2e-3) is Codec.RAW
    assert chosen(16_000 / 4e-3) is Codec.PLANES2


def test_a_pool_is_measured_again_after_many_objects(monkeypatch):
    choices = CodecChoices("smallest", wire(1e9))
    store(choices, NOISE)
    small = floats("bf16", 500, 1)
    codecs = store(choices, small, count=REVIEW)
    assert codecs[: REVIEW - TRIAL] == [Codec.RAW] * (REVIEW - TRIAL)
    assert store(choices, small, count=TRIAL + 1)[-1] is Codec.PLANES2


def test_only_so_many_pools_are_kept():
    choices = CodecChoices("smallest", wire(1e9))
    for number in range(300):
        store(choices, ZEROS[:100], f"pool{number}", 1)
    assert len(choices.report()) == 256
    assert "pool299" in choices.report()


def test_large_objects_are_measured_on_a_part_and_encoded_whole():
    data = floats("bf16", 700_001, 2) + b"x"
    choices = CodecChoices("smallest", wire(1e9))
    assert store(choices, data, count=TRIAL + 1)[-1] is Codec.PLANES2


def test_the_speed_of_the_wire_counts_time_with_transfers_under_way():
    now = 0.0
    found = WireSpeed(lambda: now)
    assert found.speed == WireSpeed.FIRST
    for turn in range(64):
        assert turn > 31 or found.speed == WireSpeed.FIRST
        found.begin(2 << 20)
        found.begin(2 << 20)
        found.begin(4096)
        now += 0.01
        found.end(2 << 20, 2 << 20)
        found.end(4096, 4096)
        now += 0.01
        found.end(2 << 20, 0)
        now += 5.0
    assert found.speed == pytest.approx((2 << 20) / 0.02)
