"""Memory and computation of one layer of each kind.

Biases, norms, activations and rotary embeddings are left out: they are under a percent. Recurrences are counted in their sequential form,
per element of the state; chunked kernels trade more arithmetic for fewer steps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

DELTA_RULE: Final = 7
"""FLOPs per token and element of a delta rule's state: decay 1, prediction 2, outer product 2, read-out 2."""
MAMBA_2: Final = 5
"""FLOPs per token and element of a Mamba-2 state: decay 1, outer product 2, read-out 2."""
MAMBA_1: Final = 7
"""FLOPs per token and element of a Mamba state: 5 as for Mamba-2, and a product and an exponential for each element's own decay."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Memory and computation of a layer, or of a sum of layers."""

    kv: int = 0
    """Elements of KV per token."""
    state: int = 0
    """Elements of recurrent state per sequence; these are kept in float32."""
    conv: int = 0
    """Elements of past convolution inputs per sequence; these are kept in the model's dtype."""
    weights: int = 0
    """Number of weights that are active for every token, at two FLOPs each."""
    work: int = 0
    """Further FLOPs per token."""
    context: int = 0
    """FLOPs per token for each token before it."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))


def attention(hidden: int, heads: int, kv_heads: int, head_dim: int, *, gated: bool = False, window: int | None = None) -> Cost:
    """Return the cost of grouped-query attention. With `gated`, it has a gate as wide as the queries.

    A sliding window of `window` tokens is counted as always full: its FLOPs are per token, and none are per context token. Its KV counts in
    full, for all tokens.
    """
    weights = hidden * head_dim * (heads * (3 if gated else 2) + 2 * kv_heads)
    pair = 4 * heads * head_dim
    return Cost(kv=2 * kv_heads * head_dim, weights=weights, work=pair * window if window else 0, context=0 if window else pair)


def latent_attention(hidden: int, heads: int, q_rank: int | None, kv_rank: int, nope: int, rope: int, value: int) -> Cost:
    """Return the cost of multi-head latent attention, which keeps the latent and the rope part, and prefills in the expanded form.

    The cost of expanding the kept latents of a reused prefix again is left out: kernels do it once per chunk of the prefill.
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
    return Cost(state=inner * state, conv=channels * (kernel - 1), weights=weights, work=MAMBA_2 * inner * state)


def gated_delta(hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int) -> Cost:
    """Return the cost of a gated delta net.

    It has projections to q, k, v, output gate, write strength and decay; the convolution runs over q, k and v.
    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    weights = hidden * (channels + values + 2 * value_heads) + values * hidden + channels * kernel
    state = value_heads * key_dim * value_dim
    return Cost(state=state, conv=channels * (kernel - 1), weights=weights, work=DELTA_RULE * state)


def kimi_delta(hidden: int, heads: int, head_dim: int, kernel: int) -> Cost:
    """Return the cost of Kimi delta attention: decay and output gate have rank `head_dim`, and the decay is per key channel."""
    inner = heads * head_dim
    low_rank = head_dim * (hidden + inner)
    weights = 4 * hidden * inner + 2 * low_rank + hidden * heads + 3 * inner * kernel
    return Cost(state=inner * head_dim, conv=3 * inner * (kernel - 1), weights=weights, work=DELTA_RULE * inner * head_dim)


def short_conv(hidden: int, kernel: int) -> Cost:
    """Return the cost of a gated short convolution as in LFM2, whose only state is its past inputs."""
    return Cost(conv=hidden * (kernel - 1), weights=4 * hidden * hidden + hidden * kernel)


def mlp(hidden: int, inner: int, *, matrices: int = 3) -> Cost:
    """Return the cost of a feed-forward layer: 3 matrices are gate, up and down; 2 are up and down only."""
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
    """Return the cost of a mixture of experts: the router, `active` of `total` experts, and shared experts of total width `shared`.

    With `latent`, the routed experts work in a space of that width, with a projection into it and one back.
    """
    routed = hidden * total + matrices * (latent or hidden) * inner * active + (2 * hidden * latent if latent else 0)
    return Cost(weights=routed + matrices * hidden * shared + (hidden if shared_gate else 0))
