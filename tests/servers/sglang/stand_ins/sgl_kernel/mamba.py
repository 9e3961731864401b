"""The short convolution and the gated delta net of Qwen3-Next, token after token, in torch.

state   [slot, head, value, key]       S <- exp(g) S;  S <- S + beta (v - S k) k^T;  out = S q
chunk   every 64 tokens SGLang keeps the state before them, of which a prefill stores some
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sgl_kernel import no_stand_in as __getattr__  # noqa: F401

_CHUNK = 64


def _spans(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """The sequences of a batch: number, first token, token after the last."""
    at = [int(end) for end in ends.tolist()]
    for n, (begin, end) in enumerate(pairwise(at)):
        if end > begin:
            yield n, begin, end


def _activated(x: Tensor, activation: str | None) -> Tensor:
    return functional.silu(x) if activation in ("silu", "swish") else x


def causal_conv1d_fn_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any, activation: str | None = None,
    conv_states: Any = None, has_initial_state: Any = None, cache_indices: Any = None,
    query_start_loc: Any = None, **__: Any,
) -> Tensor:  # fmt: skip
    """Convolve the sequences of a batch, x [channels, tokens], and keep the last inputs of each."""
    out, keep = torch.empty_like(x), weight.shape[1] - 1
    for n, begin, end in _spans(query_start_loc):
        slot = int(cache_indices[n])
        if slot < 0:
            continue
        goes_on = has_initial_state is not None and bool(has_initial_state[n])
        before = conv_states[slot, :, -keep:].to(x.dtype)
        inputs = torch.cat([before if goes_on else torch.zeros_like(before), x[:, begin:end]], dim=1)
        made = functional.conv1d(
            inputs.float()[None], weight.float()[:, None], None if bias is None else bias.float(),
            groups=x.shape[0],
        )[0]  # fmt: skip
        out[:, begin:end] = _activated(made, activation).to(x.dtype)
        conv_states[slot, :, -keep:] = inputs[:, -keep:].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, conv_state_indices: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Convolve one token of each sequence, x [sequences, channels]."""
    keep = weight.shape[1] - 1
    slots = conv_state_indices.long()
    used = slots >= 0
    inputs = torch.cat([conv_state[slots.clamp(min=0)][:, :, -keep:].to(x.dtype), x[:, :, None]], dim=2)
    made = (inputs.float() * weight.float()[None]).sum(-1)
    conv_state[slots[used], :, -keep:] = inputs[used][:, :, 1:].to(conv_state.dtype)
    return _activated(made if bias is None else made + bias.float(), activation).to(x.dtype)


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def _queries_and_keys(q: Tensor, k: Tensor, heads: int, *, unit: bool) -> tuple[Tensor, Tensor]:
    q, k = q[0].float(), k[0].float()
    if unit:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return _per_head(q * q.shape[-1] ** -0.5, heads), _per_head(k, heads)


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state = state * g.exp()[..., None, None]
    error = (v - (state * k[..., None, :]).sum(-1)) * beta[..., None]
    state = state + error[..., :, None] * k[..., None, :]
    return state, (state * q[..., None, :]).sum(-1)


def chunk_gated_delta_rule_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Any = None,
    cu_seqlens: Any = None, use_qk_l2norm_in_kernel: bool = True, initial_state_indices: Any = None,
    **_: Any,
) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
    """Run the sequences of a prefill; return the outputs, nothing, and the states before each chunk."""
    heads = v.shape[2]
    q, k = _queries_and_keys(q, k, heads, unit=use_qk_l2norm_in_kernel)
    values, g, beta = v[0].float(), g.reshape(-1, heads).float(), beta.reshape(-1, heads).float()
    out, kept = torch.empty_like(values), []
    for n, begin, end in _spans(cu_seqlens):
        slot = int(initial_state_indices[n])
        state = (
            initial_state[slot].float() if slot >= 0 else values.new_zeros(heads, v.shape[-1], k.shape[-1])
        )
        for t in range(begin, end):
            if (t - begin) % _CHUNK == 0:
                kept.append(state)
            state, out[t] = _step(state, q[t], k[t], values[t], g[t], beta[t])
        if slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    return out[None].to(v.dtype), None, torch.stack(kept)[None] if kept else None


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
    """Return decay and learning rate of each token and head."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,  # noqa: N803
    initial_state_source: Tensor, initial_state_indices: Tensor, cu_seqlens: Any,
    use_qk_l2norm_in_kernel: bool = True, *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    """Run one token of each sequence of a decode."""
    q, k = _queries_and_keys(q, k, v.shape[2], unit=use_qk_l2norm_in_kernel)
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    slots = initial_state_indices.long()[: q.shape[0]]
    used = slots >= 0
    state, out = _step(initial_state_source[slots.clamp(min=0)].float(), q, k, v[0].float(), g[0], beta[0])
    initial_state_source[slots[used]] = state[used].to(initial_state_source.dtype)
    return out[None].to(v.dtype)


for _made in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu):
    setattr(torch.ops.sgl_kernel, _made.__name__, _made)
