"""Formulas for the memory and computation of one layer of each kind.

Biases, norms, activations and rotary embeddings are left out, because they are under a percent of the cost.
Recurrences are counted in their sequential form, per element of the state. Chunked kernels do more arithmetic
in fewer steps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

DELTA_RULE: Final = 7
"""FLOPs per token and element of a delta rule's state.

Decay takes 1, prediction 2, the outer product 2, and the read-out 2.
"""
MAMBA_2: Final = 5
"""FLOPs per token and element of a Mamba-2 state: decay takes 1, the outer product 2, and the read-out 2."""
MAMBA_1: Final = 7
"""FLOPs per token and element of a Mamba state.

Besides the 5 FLOPs of Mamba-2, the decay of each element takes a product and an exponential.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Memory and computation of a layer, or of a sum of layers."""

    kv: int = 0
    """Elements of KV per token."""
    state: int = 0
    """Elements of recurrent state per sequence, kept in float32."""
    conv: int = 0
    """Elements of past convolution inputs per sequence, kept in the model's dtype."""
    weights: int = 0
    """Number of weights that each token uses, at two FLOPs per weight."""
    work: int = 0
    """Further FLOPs per token."""
    context: int = 0
    """FLOPs of attention per pair of a token and an earlier token."""
    window: int = 0
    """Elements of KV in sliding windows per sequence, kept in the model's dtype."""
    windows: tuple[tuple[int, int], ...] = ()
    """Window in tokens, and FLOPs per pair of a token and an earlier token in it, of each layer with one."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))


def attention(
    hidden: int, heads: int, kv_heads: int, head_dim: int, *, gated: bool = False, window: int | None = None
) -> Cost:
    """Return the cost of grouped-query attention. With `gated`, there is a gate as wide as the queries.

    With a sliding window of `window` tokens, a token attends to at most as many, and the KV of the last
    `window` - 1 tokens is kept at each depth, like a recurrent state, instead of that of every token.
    """
    # Heads have projections for queries, outputs and, if gated, gates; KV heads for keys and values.
    weights = hidden * head_dim * (heads * (3 if gated else 2) + 2 * kv_heads)
    pair = 4 * heads * head_dim  # 2 for the product of query and key, 2 for the weighted value
    kv = 2 * kv_heads * head_dim
    if window is None:
        return Cost(kv=kv, weights=weights, context=pair)
    return Cost(weights=weights, window=kv * (window - 1), windows=((window, pair),))


def latent_attention(
    hidden: int, heads: int, q_rank: int | None, kv_rank: int, nope: int, rope: int, value: int
) -> Cost:
    """Return the cost of multi-head latent attention.

    For each token, the cache keeps the latent (keys and values in compressed form) and the rope part of the
    key. Prefill expands them to keys and values. If a prefix was restored, each chunk of the prefill expands
    the whole prefix again. That work is not counted.
    """
    query = hidden * heads * (nope + rope) if q_rank is None else q_rank * (hidden + heads * (nope + rope))
    weights = query + hidden * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * hidden
    return Cost(kv=kv_rank + rope, weights=weights, context=2 * heads * (nope + rope + value))


def mamba1(hidden: int, inner: int, state: int, rank: int, kernel: int) -> Cost:
    """Return the cost of a Mamba mixer whose time step has rank `rank`."""
    weights = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner + inner * kernel
    return Cost(state=inner * state, conv=inner * (kernel - 1), weights=weights, work=MAMBA_1 * inner * state)


def mamba2(hidden: int, heads: int, head_dim: int, state: int, groups: int, kernel: int) -> Cost:
    """Return the cost of a Mamba-2 mixer; its convolution runs over x, B and C."""
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    weights = hidden * (inner + channels + heads) + inner * hidden + channels * kernel
    return Cost(
        state=inner * state, conv=channels * (kernel - 1), weights=weights, work=MAMBA_2 * inner * state
    )


def gated_delta(
    hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int
) -> Cost:
    """Return the cost of a gated delta net.

    It has projections to q, k, v, output gate, write strength and decay. The convolution runs over q, k and
    v.
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    weights = hidden * (channels + values + 2 * value_heads) + values * hidden + channels * kernel
    state = value_heads * key_dim * value_dim
    return Cost(state=state, conv=channels * (kernel - 1), weights=weights, work=DELTA_RULE * state)


def kimi_delta(hidden: int, heads: int, head_dim: int, kernel: int) -> Cost:
    """Return the cost of Kimi delta attention.

    The projections to decay and output gate have rank `head_dim`. Each key channel has its own decay.
    """
    inner = heads * head_dim
    low_rank = head_dim * (hidden + inner)
    weights = 4 * hidden * inner + 2 * low_rank + hidden * heads + 3 * inner * kernel
    return Cost(
        state=inner * head_dim,
        conv=3 * inner * (kernel - 1),
        weights=weights,
        work=DELTA_RULE * inner * head_dim,
    )


def short_conv(hidden: int, kernel: int) -> Cost:
    """Return the cost of a gated short convolution as in LFM2. Its only state is its past inputs."""
    return Cost(conv=hidden * (kernel - 1), weights=4 * hidden * hidden + hidden * kernel)


def mlp(hidden: int, inner: int, *, matrices: int = 3) -> Cost:
    """Return the cost of a feed-forward layer of 3 matrices (gate, up, down) or 2 (up, down)."""
    return Cost(weights=matrices * hidden * inner)


def experts(
    hidden: int,
    total: int,
    active: int,
    inner: int,
    *,
    shared: int = 0,
    shared_gate: bool = False,
    matrices: int = 3,
    latent: int | None = None,
) -> Cost:
    """Return the cost of a mixture of experts.

    It has a router, `total` experts of which each token uses `active`, and shared experts of total width
    `shared`. With `latent`, the routed experts work in a space of that width. One projection leads into this
    space, and another leads back.
    """
    routed = (
        hidden * total
        + matrices * (latent or hidden) * inner * active
        + (2 * hidden * latent if latent else 0)
    )
    return Cost(weights=routed + matrices * hidden * shared + (hidden if shared_gate else 0))
