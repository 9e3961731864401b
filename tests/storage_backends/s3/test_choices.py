"""Choices of codecs: what is measured, what is chosen, and what is stored meanwhile."""

from __future__ import annotations

import itertools
import random

import pytest
from tiercache_backends.s3.choices import REVIEW, TRIAL, CodecChoices
from tiercache_backends.s3.compression import Codec, decode

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
        assert decode(codec, memoryview(b"".join(pieces)), len(data)) == data
        codecs.append(codec)
    return codecs


@pytest.mark.parametrize(
    ("data", "chosen"), [(BF16, Codec.PLANES2), (FP32, Codec.PLANES4), (NOISE, Codec.RAW)]
)
def test_a_pool_gets_the_codec_that_shrinks_its_objects_most(data, chosen):
    codecs = store(CodecChoices("smallest"), data, count=TRIAL + 3)
    assert codecs[:TRIAL] == [Codec.RAW] * TRIAL
    assert codecs[TRIAL:] == [chosen] * 3


def test_an_object_that_does_not_shrink_is_raw_in_any_pool():
    choices = CodecChoices("smallest")
    store(choices, BF16)
    assert store(choices, NOISE, count=1) == [Codec.RAW]
    assert store(choices, BF16, count=1) == [Codec.PLANES2]


def test_pools_are_told_apart_and_reported():
    choices = CodecChoices("smallest")
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

    assert set(store(CodecChoices("none", clock=clock), BF16)) == {Codec.RAW}


@pytest.mark.parametrize(("tick", "chosen"), [(2e-5, Codec.RAW), (1e-5, Codec.PLANES2)])
def test_auto_weighs_bytes_against_the_time_of_a_core(tick, chosen):
    """Each encoding and each decoding takes a tick; 16 kB take 64 us on the wire raw, 43 us in two planes."""
    ticks = itertools.count()
    choices = CodecChoices("auto", clock=lambda: next(ticks) * tick)
    assert store(choices, BF16, count=TRIAL + 1)[-1] is chosen


def test_a_pool_is_measured_again_after_many_objects(monkeypatch):
    choices = CodecChoices("smallest")
    store(choices, NOISE)
    small = floats("bf16", 500, 1)
    codecs = store(choices, small, count=REVIEW)
    assert codecs[: REVIEW - TRIAL] == [Codec.RAW] * (REVIEW - TRIAL)
    assert store(choices, small, count=TRIAL + 1)[-1] is Codec.PLANES2


def test_only_so_many_pools_are_kept():
    choices = CodecChoices("smallest")
    for number in range(300):
        store(choices, ZEROS[:100], f"pool{number}", 1)
    assert len(choices.report()) == 256
    assert "pool299" in choices.report()


def test_large_objects_are_measured_on_a_part_and_encoded_whole():
    data = floats("bf16", 700_001, 2) + b"x"
    choices = CodecChoices("smallest")
    assert store(choices, data, count=TRIAL + 1)[-1] is Codec.PLANES2
