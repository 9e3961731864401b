from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from tests.pools.tensors import ArrayTensor
from tiercache.core import HitPolicy, PoolName
from tiercache.errors import GeometryError, PoolFullError
from tiercache.geometry import Geometry, Segment, kv_geometry, state_geometry
from tiercache.pools import DevicePool, by_layer, page_geometry_of, state_geometry_of

PAGE, SLOTS = 4, 5


def kv_tensors(layers: tuple[int, ...] = (3, 7)) -> dict[tuple[int, str], torch.Tensor]:
    shape = (SLOTS * PAGE, 2, 8)
    k = by_layer("k", [torch.zeros(shape, dtype=torch.bfloat16) for _ in layers], layers)
    return k | by_layer("v", [torch.zeros(shape, dtype=torch.bfloat16) for _ in layers], layers)


def latent_geometry(width: int, dtype: str) -> Geometry:
    return Geometry(PoolName.KV, PAGE, (Segment(0, "latent", (PAGE, width), dtype),))


def test_kv_per_layer() -> None:
    tensors = kv_tensors()
    geometry = page_geometry_of(tensors, PAGE)
    assert geometry == kv_geometry([3, 7], 2, 8, "bfloat16", PAGE)
    pool = DevicePool.from_tensors(geometry, tensors)
    assert (pool.capacity, pool.device, pool.name, pool.available) == (SLOTS, "cpu", PoolName.KV, SLOTS)
    table = pool.segments
    assert table.base.dtype == np.uint64
    assert table.base.tolist() == [
        tensors[key].data_ptr() for key in [(3, "k"), (3, "v"), (7, "k"), (7, "v")]
    ]
    assert table.stride.tolist() == table.length.tolist() == [PAGE * 2 * 8 * 2] * 4
    assert table.offset.tolist() == [0, 128, 256, 384]
    assert table.layer.tolist() == [3, 3, 7, 7]


@pytest.mark.parametrize("paged", [False, True])
def test_packed_and_latent(paged: bool) -> None:
    first = (SLOTS, PAGE) if paged else (SLOTS * PAGE,)
    packed = by_layer("kv", torch.zeros((2, *first, 2, 3, 8), dtype=torch.float16), [0, 1])
    assert page_geometry_of(packed, PAGE, paged=paged) == kv_geometry(
        [0, 1], 3, 8, "float16", PAGE, packed=True
    )
    latent = by_layer("latent", [torch.zeros((*first, 9), dtype=torch.float8_e4m3fn)], [0])
    assert page_geometry_of(latent, PAGE, paged=paged) == latent_geometry(9, "float8_e4m3fn")
    for tensors in (packed, latent):
        pool = DevicePool.from_tensors(page_geometry_of(tensors, PAGE, paged=paged), tensors)
        assert pool.capacity == SLOTS
        assert (pool.segments.stride == pool.segments.length).all()


def test_states_of_a_stacked_tensor_with_side_tensors() -> None:
    conv = torch.zeros((3, SLOTS, 6, 3), dtype=torch.bfloat16)
    ssm = torch.zeros((3, SLOTS, 2, 4, 4))
    flags = torch.zeros((SLOTS, 3), dtype=torch.uint8)
    tensors = (
        by_layer("conv", conv, [0, 1, 4])
        | by_layer("ssm", ssm, [0, 1, 4])
        | {(4, "flags"): flags, (4, "step"): torch.zeros(SLOTS)}
    )
    geometry = state_geometry_of(tensors, 64)
    assert geometry.hit_policy is HitPolicy.TRAILING_PAGES
    assert [(s.layer, s.name) for s in geometry.segments][-4:] == [
        (4, "conv"), (4, "ssm"), (4, "flags"), (4, "step"),
    ]  # fmt: skip
    assert geometry.segments[-1].shape == ()
    pool = DevicePool.from_tensors(geometry, tensors)
    assert pool.capacity == SLOTS
    assert pool.segments.base[2] == conv[1].data_ptr()
    assert pool.segments.length.tolist()[-2:] == [3, 4]


def test_slots_may_lie_apart() -> None:
    """One tensor `[slots, layers, ...]` gives a view per layer whose slots are a whole row apart."""
    stacked = torch.zeros((SLOTS, 2, 6))
    tensors = by_layer("ssm", [stacked[:, 0], stacked[:, 1]], [0, 1])
    pool = DevicePool.from_tensors(state_geometry_of(tensors, 64), tensors)
    assert pool.segments.stride.tolist() == [48, 48]
    assert pool.segments.length.tolist() == [24, 24]


def test_tokens_fill_whole_pages() -> None:
    tensors = {(0, "latent"): torch.zeros((SLOTS * PAGE + 3, 8))}
    with pytest.raises(GeometryError, match="23 tokens, which is not a multiple of the page size 4"):
        DevicePool.from_tensors(latent_geometry(8, "float32"), tensors)


def test_packed_four_bit_elements() -> None:
    geometry = Geometry(PoolName.KV, PAGE, (Segment(0, "k", (PAGE, 6), "float4_e2m1fn"),))
    for dtype in (torch.uint8, torch.float4_e2m1fn_x2):
        tensor = torch.zeros((SLOTS * PAGE, 3), dtype=torch.uint8).view(dtype)
        assert DevicePool.from_tensors(geometry, {(0, "k"): tensor}).segments.length.tolist() == [12]
    assert page_geometry_of({(0, "k"): tensor}, PAGE) == geometry


def test_references_are_kept_and_nothing_is_copied() -> None:
    tensors = kv_tensors()
    pool = DevicePool.from_tensors(page_geometry_of(tensors, PAGE), tensors)
    kept = weakref.ref(tensors[3, "k"])
    address = tensors[3, "k"].data_ptr()
    tensors.clear()
    assert kept() is not None
    assert address in pool.segments.base.tolist()


def test_the_allocator_is_delegated_to() -> None:
    tensors = kv_tensors()
    pool = DevicePool.from_tensors(page_geometry_of(tensors, PAGE), tensors)
    slots = pool.alloc(3)
    assert pool.available == pool.source.available == 2
    with pytest.raises(PoolFullError, match="3 kv slots"):
        pool.alloc(3)
    pool.free(slots)
    assert pool.available == SLOTS


def bf16(*shape: int, **settings: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, **settings)


K = "layer 7 tensor 'k'"


@pytest.mark.parametrize(
    ("place", "tensor", "message"),
    [
        ((7, "v"), None, r"no tensor 'v' for layer 7"),
        ((9, "k"), torch.zeros(1), r"does not know tensor 'k' of layer 9"),
        ((7, "k"), torch.zeros((SLOTS * PAGE, 2, 8)), f"{K} is float32 where its geometry says bfloat16"),
        ((7, "k"), bf16(SLOTS * PAGE, 2, 9), rf"{K} has shape \(20, 2, 9\)"),
        ((7, "k"), bf16(SLOTS * PAGE + 1, 2, 8), f"{K} has 21 tokens"),
        ((7, "k"), bf16(SLOTS * PAGE + PAGE, 2, 8), f"{K} has 6 slots where 5"),
        ((7, "k"), bf16(SLOTS * PAGE, 8, 2).mT, f"{K}.*not one contiguous run"),
        ((7, "k"), bf16(SLOTS * PAGE, 2, 2, 8)[:, 0], f"{K}.*not one contiguous run"),
        ((7, "k"), bf16(SLOTS * PAGE, 2, 8, device="meta"), f"{K} is on meta"),
        ((7, "k"), bf16(0, 2, 8), "and so no slots"),
    ],
)
def test_what_does_not_fit_is_named(place, tensor, message):
    changed = kv_tensors() | {place: tensor}
    tensors = {key: tensor for key, tensor in changed.items() if tensor is not None}
    with pytest.raises(GeometryError, match=message):
        DevicePool.from_tensors(kv_geometry([3, 7], 2, 8, "bfloat16", PAGE), tensors)


def test_slots_that_overlap() -> None:
    tensors = {(0, "ssm"): torch.zeros((1, 6)).expand(SLOTS, 6)}
    with pytest.raises(GeometryError, match="layer 0 tensor 'ssm' has slots 0 bytes apart"):
        DevicePool.from_tensors(state_geometry([(0, "ssm", (6,), "float32")], 64), tensors)


def test_layers_and_page_sizes_that_disagree() -> None:
    with pytest.raises(GeometryError, match="tensor 'k' has 2 layers and 3 layer numbers"):
        by_layer("k", torch.zeros((2, 20, 8)), [0, 1, 2])
    with pytest.raises(GeometryError, match="does not have 8 tokens a page"):
        page_geometry_of({(0, "k"): torch.zeros((SLOTS, PAGE, 2))}, 8, paged=True)
    with pytest.raises(GeometryError, match="complex64"):
        page_geometry_of({(0, "k"): torch.zeros((20, 2), dtype=torch.complex64)}, PAGE)


def test_a_device_is_named_as_torch_names_it() -> None:
    tensors = {(0, "ssm"): ArrayTensor(np.zeros((SLOTS, 2), np.uint32), "torch.float32", "cuda:0")}
    assert DevicePool.from_tensors(state_geometry_of(tensors, 64), tensors).device == "cuda:0"


def test_the_pools_do_not_import_torch() -> None:
    code = "import sys, tiercache.pools, tiercache.transfer; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
