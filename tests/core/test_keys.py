"""Golden vectors, and: whatever a byte depends on changes its key."""

from dataclasses import replace

import numpy as np
import pytest

from tiercache.core import PoolName, as_tokens
from tiercache.errors import InputError, TokenError
from tiercache.geometry import Geometry, Segment, kv_geometry, state_geometry
from tiercache.keys import (
    Identity,
    Shard,
    layout_digest,
    namespace_of,
    object_key,
    page_keys,
    sequence_extra,
    sglang_page_keys,
)

IDENTITY = Identity("org/model", "abc123", "bfloat16", "bfloat16", "float32", 64)
KV = kv_geometry([3, 7], kv_heads=2, head_dim=256, dtype="bfloat16", page_size=64)
STATE = state_geometry(
    [(0, "conv", (8192, 4), "bfloat16"), (0, "ssm", (32, 128, 128), "float32")], page_size=64
)


def test_golden_namespace():
    assert namespace_of(IDENTITY).hex() == GOLDEN["namespace"]


def test_golden_page_keys():
    keys = page_keys(namespace_of(IDENTITY), as_tokens(range(200)), 64)
    assert [k.hex() for k in keys] == GOLDEN["pages"]


@pytest.mark.parametrize("tokens", [list(range(200)), range(200), np.arange(200, dtype=np.int32)])
def test_page_keys_take_what_is_taken_as_tokens_elsewhere(tokens):
    namespace = namespace_of(IDENTITY)
    assert page_keys(namespace, tokens, 64) == page_keys(namespace, as_tokens(range(200)), 64)
    with pytest.raises(TokenError, match="must be integers"):
        page_keys(namespace, [0.5] * 64, 64)


def test_golden_page_keys_at_the_ends_of_the_range_and_with_extra():
    tokens = as_tokens([0, 2**64 - 1])
    assert (
        page_keys(bytes(32), tokens, 2, extra=sequence_extra("lora@1", (b"img",)))[0].hex() == GOLDEN["extra"]
    )


def test_golden_object_key():
    layout = layout_digest(PoolName.KV, KV.fingerprint, Shard(1, 4))
    assert layout.hex() == GOLDEN["layout"]
    key = object_key(PoolName.KV, layout, bytes(range(32)))
    assert (key.layout, key.page_key) == (layout, bytes(range(32)))


def test_golden_fingerprints():
    assert KV.fingerprint.hex() == GOLDEN["kv"]
    assert STATE.fingerprint.hex() == GOLDEN["state"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/other"}, {"revision": "abc124"}, {"weights_dtype": "float8_e4m3fn"},
        {"kv_dtype": "float8_e4m3fn"}, {"state_dtype": "bfloat16"}, {"quantization": "awq-4bit"},
        {"page_size": 32}, {"salt": b"tenant-a"}, {"tenant": "a"},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_every_field_of_the_identity_changes_the_keys(change):
    tokens = as_tokens(range(256))
    other = replace(IDENTITY, **change)
    assert namespace_of(other) != namespace_of(IDENTITY)
    assert not set(page_keys(namespace_of(other), tokens, 64)) & set(
        page_keys(namespace_of(IDENTITY), tokens, 64)
    )


def test_moving_a_boundary_between_two_fields_changes_the_namespace():
    assert namespace_of(replace(IDENTITY, model="ab", revision="c")) != namespace_of(
        replace(IDENTITY, model="a", revision="bc")
    )


@pytest.mark.parametrize(
    "geometry",
    [
        kv_geometry([3, 7], 2, 256, "float16", 64), kv_geometry([3, 7], 4, 128, "bfloat16", 64),
        kv_geometry([3, 7], 2, 256, "bfloat16", 32), kv_geometry([3, 8], 2, 256, "bfloat16", 64),
        kv_geometry([3], 2, 256, "bfloat16", 64), kv_geometry([3, 7], 2, 256, "bfloat16", 64, packed=True),
        kv_geometry([3, 7], 2, 256, "bfloat16", 64, value_dim=128),
        Geometry(PoolName.KV, 64, tuple(Segment(n, "latent", (64, 576), "bfloat16") for n in (3, 7))),
        replace(KV, layout="head_token_dim"),
    ],
    ids=["dtype", "heads", "page_size", "layers", "layer_count", "packed", "value_dim", "mla", "layout"],
)  # fmt: skip
def test_every_part_of_the_geometry_changes_the_layout(geometry):
    assert layout_digest(PoolName.KV, geometry.fingerprint, Shard()) != layout_digest(
        PoolName.KV, KV.fingerprint, Shard()
    )


def test_rank_size_and_pool_change_the_layout():
    shards = [Shard(), Shard(0, 2), Shard(1, 2), Shard(0, 4)]
    layouts = {
        layout_digest(pool, KV.fingerprint, shard) for pool in (PoolName.KV, PoolName.SWA) for shard in shards
    }
    assert len(layouts) == 8


def test_adapters_and_images_change_the_page_keys_and_do_not_collide():
    namespace, tokens = namespace_of(IDENTITY), as_tokens(range(64))
    extras = [
        b"",
        *(
            sequence_extra(*e)
            for e in [
                ("a",), ("b",), ("", (b"a",)), ("a", (b"b",)), ("a", (b"b", b"c")), ("a", (b"bc",)),
                ("ab", (b"",)),
            ]
        ),
    ]  # fmt: skip
    assert len({page_keys(namespace, tokens, 64, extra=e)[0] for e in extras}) == len(extras)


def test_chaining_equals_one_go():
    namespace, tokens = namespace_of(IDENTITY), as_tokens(range(640))
    whole = page_keys(namespace, tokens, 64)
    assert whole[:4] + page_keys(namespace, tokens[256:], 64, parent=whole[3]) == whole


def test_a_key_depends_on_the_whole_prefix():
    namespace = namespace_of(IDENTITY)
    first, second = np.arange(128, dtype=np.uint64), np.arange(128, dtype=np.uint64)
    second[0] = 99
    assert not set(page_keys(namespace, first, 64)) & set(page_keys(namespace, second, 64))


def test_registering_one_more_pool_leaves_the_others_alone():
    def layouts(*geometries: Geometry):
        return {g.pool: layout_digest(g.pool, g.fingerprint, Shard()) for g in geometries}

    assert layouts(KV, STATE)[PoolName.KV] == layouts(KV)[PoolName.KV]


def test_less_than_a_page_has_no_key():
    assert page_keys(bytes(32), as_tokens([]), 64) == page_keys(bytes(32), as_tokens([1]), 64) == []


def test_the_salt_stays_inside():
    record = replace(IDENTITY, salt=b"secret", tenant="acme").public_record()
    assert "salt" not in record
    assert b"secret" not in str(record).encode()
    assert record["tenant"] == "acme"


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_impossible_ranks_are_refused(rank, size):
    with pytest.raises(InputError, match="rank"):
        Shard(rank, size)


def test_page_size_0_is_refused():
    with pytest.raises(InputError, match="page size 0"):
        replace(IDENTITY, page_size=0)


GOLDEN = {
    "namespace": "d4d68e185c0cfcf20189a0d1cf4626e1c299d2926a5b1a0a4494edcfd39589b2",
    "pages": [
        "e23827a3af5834fa79b887346d03d05afed6510b9baa53fad030e353f21fe599",
        "45f02c288ec4c80aabfbab38194b94b8636fdae21e2ec6c15f52bfdf91fb820d",
        "00260868529fa01008c0235e168faf39179ddaa5ece6f00e97d1180ca903b48c",
    ],
    "extra": "1695bca641adb95180f593d758bc8d3b17919c4b18b8c0867b9d26ee3b201688",
    "layout": "79083139e6427bf85714b43f8e78b4e4b37451a654cffc2fe9330231e73580a4",
    "kv": "a87281adb726b614a7c66c85ec529ac4998a200ab22ddb0211744de93efd1bb5",
    "state": "ea6ae5780d791fc8e1a931da8530ee22ebf8dc05b3d71e0109aa6ad6e8866f3f",
}


def test_page_keys_of_sglang_are_those_of_the_plug_in():
    """Its module is loaded by its path, because the package around it imports SGLang."""
    import hashlib
    import importlib.util
    from pathlib import Path

    import tiercache

    place = Path(tiercache.__file__).parent / "integrations" / "sglang" / "pools.py"
    spec = importlib.util.spec_from_file_location("sglang_pools", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokens, hashes, before = as_tokens([7, 2**32 - 1, 0, 300, 5, 6, 7, 8, 9]), [], b""
    for at in (0, 4):
        page = b"".join(int(token).to_bytes(4, "little") for token in tokens[at : at + 4])
        before = hashlib.sha256(before + page).digest()
        hashes.append(before.hex())
    namespace = namespace_of(IDENTITY)
    assert sglang_page_keys(namespace, tokens, 4) == module.PageKeys(namespace).keys_of(hashes)
    assert sglang_page_keys(namespace, as_tokens([2**32] * 8), 4) == []
