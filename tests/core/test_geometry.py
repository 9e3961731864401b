import pytest

from tiercache.core import HitPolicy, PoolName
from tiercache.errors import GeometryError
from tiercache.geometry import Geometry, Segment, kv_geometry, nbytes_of, state_geometry


def test_qwen3_next_pages_and_states():
    """From the public config: 12 attention layers with 2 KV heads of 256 in bf16; 36 linear layers with 32 x
    128 x 128 in fp32 and a convolution of 8192 x 3 in bf16."""
    kv = kv_geometry(range(3, 48, 4), 2, 256, "bfloat16", 64)
    assert (len(kv.segments), kv.segments[0].nbytes, kv.nbytes) == (24, 64 * 1024, 24 * 64 * 1024)
    assert kv.nbytes / 64 == 24 * 1024
    linear = [n for n in range(48) if n % 4 != 3]
    state = state_geometry(
        [
            t
            for n in linear
            for t in ((n, "conv", (8192, 3), "bfloat16"), (n, "ssm", (32, 128, 128), "float32"))
        ],
        64,
    )
    assert state.nbytes == 36 * (2 * 1024**2 + 48 * 1024)
    assert (state.hit_policy, state.trailing, state.layers) == (HitPolicy.TRAILING_PAGES, 1, tuple(linear))


def test_offsets_and_padding():
    geometry = state_geometry(
        [(1, "b", (3,), "uint8"), (0, "a", (5,), "float32"), (1, "c", (2, 2), "bfloat16")], 16
    )
    assert geometry.lengths.tolist() == [20, 3, 8]
    assert geometry.offsets.tolist() == [0, 20, 23]
    assert (geometry.nbytes, geometry.padded_nbytes) == (31, 4096)


def test_packed_pages_have_the_same_size():
    assert (
        kv_geometry([0], 2, 8, "float32", 4, packed=True).nbytes
        == kv_geometry([0], 2, 8, "float32", 4).nbytes
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "bytes_"),
    [((3, 5), "bfloat16", 30), ((4,), "int4", 2), ((2, 8), "float8_e4m3fn", 16), ((7,), "float64", 56)],
)
def test_bytes_without_torch(shape, dtype, bytes_):
    assert nbytes_of(shape, dtype) == bytes_


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kv_geometry([0], 1, 8, "float32", 0), "page size 0|empty dimension"),
        (lambda: kv_geometry([], 1, 8, "float32", 64), "no segments"),
        (lambda: kv_geometry([0, 0], 1, 8, "float32", 64), "twice"),
        (lambda: kv_geometry([1, 0], 1, 8, "float32", 64), "out of order"),
        (lambda: nbytes_of((3,), "int4"), "whole bytes"),
        (lambda: nbytes_of((3,), "bf16"), "unknown"),
        (lambda: nbytes_of((0,), "int8"), "empty dimension"),
        (
            lambda: Geometry(PoolName.SWA, 64, (Segment(0, "k", (1,), "int8"),), HitPolicy.TRAILING_PAGES, 0),
            "trailing=0",
        ),
        (
            lambda: Geometry(
                PoolName.SWA, 64, (Segment(0, "k", (1,), "int8"),), HitPolicy.TRAILING_PAGES, 2**31 + 1
            ),
            "trailing=2147483649",
        ),
        (
            lambda: Geometry(
                PoolName.SWA, 64, (Segment(0, "k", (1,), "int8"),), HitPolicy.TRAILING_PAGES, 1.5
            ),
            "trailing=1.5",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(make, message):
    with pytest.raises(GeometryError, match=message):
        make().nbytes  # noqa: B018
