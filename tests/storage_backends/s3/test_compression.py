"""Compression: byte-exact for any bytes, and damaged encodings are refused within bounds."""

from __future__ import annotations

import random
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tiercache_backends.s3.compression import CHUNK, Codec, decode, encode

from tests.examples import example_count

CODECS = [codec for codec in Codec if codec is not Codec.RAW]
FLOATS = {"bf16": ("<u2", 7), "fp16": ("<u2", 10), "fp32": ("<u4", 23)}


def pieces_of(data: bytes, cuts: list[int]) -> list[memoryview]:
    """Cut a payload into buffers, which also have different alignments."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [memoryview(bytearray(data[a:b])) for a, b in pairwise(edges)]


def roundtrip(codec: Codec, data: bytes, cuts: list[int]) -> bytes | None:
    """Encode and decode; return the encoded bytes, or None if they would not be smaller."""
    encoded = encode(codec, [*pieces_of(data, cuts), memoryview(b"behind the payload")], len(data))
    if encoded is None:
        return None
    whole = b"".join(encoded)
    assert len(whole) < len(data)
    assert decode(codec, memoryview(whole), len(data)) == data
    return whole


def floats(dtype: str, count: int, seed: int) -> bytes:
    """Normal numbers with NaN, infinities, zeros and denormals among them."""
    word, mantissa = FLOATS[dtype]
    rng = np.random.default_rng(seed)
    plain = rng.standard_normal(count).astype(np.float32)
    if dtype == "bf16":
        bits = (plain.view("<u4") >> 16).astype("<u2")
    else:
        bits = plain.astype("<f2" if dtype == "fp16" else "<f4").view(word)
    exponents = 5 if dtype == "fp16" else 8
    odd = [
        0, 1, (1 << mantissa) - 1, ((1 << exponents) - 1) << mantissa,
        ((2 << exponents) - 1) << (mantissa - 1),
    ]  # fmt: skip
    sign = 1 << (exponents + mantissa)
    for value in (*odd, *(value ^ sign for value in odd)):
        bits[rng.integers(0, count, 3)] = value & (2 * sign - 1)
    return bits.tobytes()


@settings(max_examples=example_count(60), deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.tuples(st.binary(max_size=9), st.integers(0, 400)).map(lambda t: t[0] * t[1]),
    ),
    cuts=st.lists(st.integers(0, 4000), max_size=3),
    codec=st.sampled_from(CODECS),
)
def test_any_bytes_come_back(data, cuts, codec):
    roundtrip(codec, data, cuts)


@settings(max_examples=example_count(20), deadline=None)
@given(
    dtype=st.sampled_from(list(FLOATS)),
    count=st.integers(1000, 20_000),
    extra=st.binary(max_size=3),
    cuts=st.lists(st.integers(0, 80_000), max_size=4),
    seed=st.integers(0, 99),
    codec=st.sampled_from(CODECS),
)
def test_floats_come_back_bit_by_bit(dtype, count, extra, cuts, seed, codec):
    roundtrip(codec, floats(dtype, count, seed) + extra, cuts)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_lengths_about_a_chunk(codec, length):
    data = (floats("bf16", length // 2, 3) if length > 1 else b"") + bytes(length % 2 or (length == 1))
    whole = roundtrip(codec, data[:length], [CHUNK - 2, 70_001] if length > 1 else [])
    assert (whole is None) == (length < 2)


@pytest.mark.parametrize(
    ("dtype", "codec", "least"),
    [("bf16", Codec.PLANES2, 1.49), ("fp16", Codec.PLANES2, 1.15), ("fp32", Codec.PLANES4, 1.17)],
)
def test_planes_shrink_floats_more_than_zstd_alone(dtype, codec, least):
    data = floats(dtype, 200_000, 0)
    planes = roundtrip(codec, data, [])
    level1 = roundtrip(Codec.ZSTD, data, [])
    assert planes is not None
    assert len(planes) * least < len(data)
    assert level1 is None or len(planes) < 0.95 * len(level1)


def test_noise_is_left_as_it_is():
    noise = random.Random(1).randbytes(100_000)
    assert all(encode(codec, [memoryview(noise)], len(noise)) is None for codec in CODECS)
    assert encode(Codec.RAW, [memoryview(noise)], len(noise)) is None


def test_raw_entries_must_have_the_length():
    assert decode(Codec.RAW, memoryview(b"sixsix"), 6) == b"sixsix"
    assert decode(Codec.RAW, memoryview(b"seven.."), 6) is None
    assert decode(Codec.RAW, memoryview(b"five."), 6) is None


@pytest.mark.parametrize("codec", CODECS)
def test_every_changed_byte_is_refused_or_harmless_to_the_bounds(codec):
    data = floats("fp32", 700, 5) + b"end"
    data += bytes(1000)
    whole = roundtrip(codec, data, [1234])
    assert whole is not None
    rng = random.Random(7)
    for place in range(len(whole)):
        bad = bytearray(whole)
        bad[place] ^= 1 << rng.randrange(8)
        found = decode(codec, memoryview(bad), len(data))
        assert found is None or found.nbytes == len(data)
    for length in range(len(whole)):
        assert decode(codec, memoryview(whole)[:length], len(data)) is None
    assert decode(codec, memoryview(whole + b"\0"), len(data)) is None
    for other in (len(data) - 1, len(data) + 1, 0, 2 * len(data)):
        assert decode(codec, memoryview(whole), other) is None


def entry(*frames: bytes, rest: bytes = b"", marks: tuple[int, ...] | None = None) -> memoryview:
    """An encoded chunk whose planes are these frames."""
    heads = marks or tuple(len(frame) | 1 << 31 for frame in frames)
    return memoryview(struct.pack(f"<{len(heads)}I", *heads) + b"".join(frames) + rest)


BOMB = 1 << 26
LIES = {
    "a bomb": lambda: entry(zstandard.compress(bytes(BOMB))),
    "a bomb that does not tell its size": lambda: entry(
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(BOMB))
    ),
    "a bomb behind an honest size": lambda: entry(
        honest_header(zstandard.compress(bytes(BOMB)), zstandard.compress(bytes(4096)))
    ),
    "a skippable frame": lambda: entry(b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"skip"),
    "a second frame": lambda: entry(zstandard.compress(bytes(4096)) * 2),
    "too few bytes": lambda: entry(zstandard.compress(bytes(4095))),
    "a plane longer than the entry": lambda: entry(b"x", marks=(0x7FFF_FFFF,)),
    "a frame longer than the entry": lambda: entry(b"x", marks=(0xFFFF_FFFF,)),
    "a plane that is too short": lambda: entry(bytes(4095), marks=(4095,)),
    "a plane that is too long": lambda: entry(bytes(4097), marks=(4097,)),
    "an empty frame": lambda: entry(b"", marks=(1 << 31,)),
    "nothing": lambda: memoryview(b""),
}


def honest_header(bomb: bytes, honest: bytes) -> bytes:
    """The blocks of `bomb` behind the frame header of `honest`."""
    size = zstandard.frame_header_size
    return honest[: size(honest)] + bomb[size(bomb) :]


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_within_the_bounds(lie):
    data = LIES[lie]()
    decode(Codec.ENTROPY, entry(zstandard.compress(bytes(4096))), 4096)
    tracemalloc.start()
    try:
        assert decode(Codec.ENTROPY, data, 4096) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [5, 77, 255, -1])
def test_a_codec_of_the_future_is_refused(codec):
    data = entry(zstandard.compress(bytes(4096)))
    assert decode(Codec.ENTROPY, data, 4096) == bytes(4096)
    assert decode(codec, data, 4096) is None


def test_threads_do_not_share_their_scratch():
    payloads = [floats("bf16", 400_000, seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as threads:
        for found in [threads.submit(roundtrip, Codec.PLANES2, data, [99]) for data in payloads]:
            assert found.result() is not None
